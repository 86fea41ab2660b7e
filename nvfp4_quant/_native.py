"""Imports the native module, or says in one sentence why it cannot be: `from ._native import _C`."""

import torch

REBUILD = "run `pip install --no-build-isolation -e .` in the source tree to build it for this environment"


def _check_built_for(torch_version: str, cuda_version: str | None) -> None:
    """Raises ImportError unless the installed torch has the ABI of the one that the library was built for."""
    same_torch = torch_version.split(".")[:2] == torch.__version__.split(".")[:2]
    same_cuda = cuda_version is None or cuda_version.split(".")[0] == (torch.version.cuda or "").split(".")[0]
    if not (same_torch and same_cuda):
        raise ImportError(
            f"nvfp4_quant was built for torch {torch_version}, but torch {torch.__version__} is installed: {REBUILD}."
        )


def _load():
    try:
        from ._build import CUDA, TORCH
    except ModuleNotFoundError as error:
        raise ImportError(f"the native module of nvfp4_quant is not built: {REBUILD}.") from error
    _check_built_for(TORCH, CUDA)
    try:
        from . import _C
    except ImportError as error:
        raise ImportError(f"the native module of nvfp4_quant cannot be loaded ({error}): {REBUILD}.") from error
    return _C


_C = _load()
