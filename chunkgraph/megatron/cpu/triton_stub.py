"""Load modules of Megatron-core that import triton unconditionally, without triton."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

__all__ = ["TritonStubFinder"]


class _TritonStub:
    """Replace triton in a module whose kernels are never launched on this machine."""

    def __getattr__(self, name: str) -> _TritonStub:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # As a decorator, return the kernel; otherwise return the stub.
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self


class _StubTritonLoader(importlib.machinery.SourceFileLoader):
    """Compile one source file with stubs instead of its top-level triton imports."""

    _IMPORT = re.compile(
        r"^import triton(?:\.language as (?P<alias>\w+))?[ \t]*(?:#.*)?$", re.MULTILINE
    )

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_source(fullname) or ""
        stub = f"__import__({__name__!r}, fromlist=['_TritonStub'])._TritonStub()"
        source = self._IMPORT.sub(lambda m: f"{m['alias'] or 'triton'} = {stub}", source)
        return compile(source, self.path, "exec", dont_inherit=True)


class TritonStubFinder:
    """Meta-path finder for modules that import triton unconditionally.

    These are modules of the paged stash, and a module of inference that Mamba layers import.

    A stub in ``sys.modules`` would make torch believe that triton is installed. So only these
    modules are compiled differently.
    """

    modules = (
        "megatron.core.transformer.moe.paged_stash",
        "megatron.core.transformer.moe.ops.paged_stash",
        "megatron.core.inference.contexts.attention_context.triton.tensor_ops",
    )

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, *_: object
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec with the stubbing loader for the listed modules, else None."""
        if fullname not in cls.modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            return spec
        spec.loader = _StubTritonLoader(fullname, spec.origin)
        return spec

    @classmethod
    def install(cls) -> Callable[[], None]:
        """Add the finder if triton is missing; return a function that removes it."""
        if importlib.util.find_spec("triton") is not None or cls in sys.meta_path:
            return lambda: None
        sys.meta_path.insert(0, cls)
        return lambda: sys.meta_path.remove(cls)
