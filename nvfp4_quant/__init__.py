"""NVFP4 quantization for PyTorch: one contract, bit for bit the same on CPUs and GPUs. See the README."""

from ._native import _C  # isort: skip  (first: it says in a sentence why the native module cannot be loaded)
from . import checkpoint, serialization  # noqa: F401 (torch.load's safe globals)
from .dtype import DType
from .ops import compute_amax
from .quantizer import NVFP4Quantizer
from .storage import NVFP4TensorStorage
from .tensor import NVFP4Tensor, dequantize, swizzle_scales_for_gemm_, unswizzle_scales_

__all__ = [
    "DType",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "build_info",
    "checkpoint",
    "compute_amax",
    "dequantize",
    "swizzle_scales_for_gemm_",
    "unswizzle_scales_",
]
__version__ = _C.build_info()["version"]


def build_info() -> dict:
    """What the native module was built for: version, torch and CUDA versions (None: CPU only), architectures."""
    return _C.build_info()
