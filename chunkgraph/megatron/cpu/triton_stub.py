"""Load the modules of Megatron-core that import triton unconditionally where triton is missing."""

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
    """Stands for triton in a module whose kernels are never launched on this machine."""

    def __getattr__(self, name: str) -> _TritonStub:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # As a decorator it leaves the kernel alone; as anything else it stays a stub.
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self


class _StubTritonLoader(importlib.machinery.SourceFileLoader):
    """Compiles one source file with its top-level triton imports turned into stubs."""

    _IMPORT = re.compile(
        r"^import triton(?:\.language as (?P<alias>\w+))?[ \t]*(?:#.*)?$", re.MULTILINE
    )

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_source(fullname) or ""
        stub = f"__import__({__name__!r}, fromlist=['_TritonStub'])._TritonStub()"
        source = self._IMPORT.sub(lambda m: f"{m['alias'] or 'triton'} = {stub}", source)
        return compile(source, self.path, "exec", dont_inherit=True)


class TritonStubFinder:
    """Meta-path finder for modules that import triton without asking.

    Those of the paged stash, and of inference where Mamba layers come from.

    A stub in ``sys.modules`` would be seen by torch itself, which then believes that triton is
    there. So only these modules are compiled differently, and nothing else changes.
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
        """Add the finder where triton is missing; return a function that takes it away."""
        if importlib.util.find_spec("triton") is not None or cls in sys.meta_path:
            return lambda: None
        sys.meta_path.insert(0, cls)
        return lambda: sys.meta_path.remove(cls)
