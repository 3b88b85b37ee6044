"""Mamba's Triton kernels without a build: ``python mamba_kernels.py mamba_ssm-X.tar.gz FOLDER``.

Megatron's mixer imports two modules of mamba-ssm, ``ops.triton.ssd_combined`` and
``ops.triton.layernorm_gated``. They and what they import are Python alone, but the package itself
imports its CUDA extension, and the former calls another one, that of causal-conv1d. So FOLDER gets
the modules under an empty package, and a causal-conv1d of plain operators (``plain_conv.py``) where
the real one cannot be imported. The source archive is that of

    MAMBA_SKIP_CUDA_BUILD=TRUE pip download mamba-ssm --no-deps --no-binary :all: \
        --no-build-isolation

and einops has to be there. Then::

    PYTHONPATH=FOLDER pytest -m gpu tests/megatron/test_gpu_hybrid.py
"""

from __future__ import annotations

import importlib.util
import sys
import tarfile
from pathlib import Path

MODULES = (
    *("ops/__init__.py", "ops/triton/__init__.py", "utils/__init__.py"),
    *("utils/torch.py", "utils/determinism.py"),
    *(
        f"ops/triton/{name}.py"
        for name in (
            *("layernorm_gated", "ssd_combined", "ssd_bmm", "ssd_chunk_scan", "ssd_chunk_state"),
            *("ssd_state_passing", "softplus", "k_activations"),
        )
    ),
)
PLAIN_CONV = {
    "__init__.py": '__version__ = "1.5.0"\nfrom plain_conv import causal_conv1d_fn\n',
    "cpp_functions.py": (
        "from plain_conv import causal_conv1d_bwd_function, causal_conv1d_fwd_function\n"
        "causal_conv1d_update_function = None\n"
    ),
    "causal_conv1d_varlen.py": "causal_conv1d_varlen_states = None\n",
}


def unpack(archive: Path, folder: Path) -> None:
    """Put the modules of the source archive into ``folder``."""
    with tarfile.open(archive) as tar:
        root = tar.getnames()[0].partition("/")[0]
        release = root.partition("-")[2]
        for name in MODULES:
            member = tar.extractfile(f"{root}/mamba_ssm/{name}")
            assert member is not None, name
            path = folder / "mamba_ssm" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(member.read())
    (folder / "mamba_ssm" / "__init__.py").write_text(f'__version__ = "{release}"\n')
    if importlib.util.find_spec("causal_conv1d") is None:
        for name, text in PLAIN_CONV.items():
            path = folder / "causal_conv1d" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
