"""The checks of a tensor that is built from its buffers by keyword."""

import torch
from torch import Tensor

from . import ops
from .dtype import DType
from .settings import Settings


def checked_arguments(
    shape,
    dtype: torch.dtype,
    *,
    rowwise_data: Tensor | None = None,
    rowwise_scale_inv: Tensor | None = None,
    columnwise_data: Tensor | None = None,
    columnwise_scale_inv: Tensor | None = None,
    amax_rowwise: Tensor | None = None,
    amax_columnwise: Tensor | None = None,
    fp4_dtype: DType = DType.kFloat4E2M1,
    quantizer=None,
    with_gemm_swizzled_scales: bool | None = None,
    row_scaled_nvfp4: bool | None = None,
    nvfp4_use_4over6: bool | None = None,
    nvfp4_e4m3_max: int | None = None,
):
    """The keywords of a constructor as the arguments of `_wrap`."""
    buffers = (
        rowwise_data,
        rowwise_scale_inv,
        columnwise_data,
        columnwise_scale_inv,
        amax_rowwise,
        amax_columnwise,
    )
    if rowwise_data is None and columnwise_data is None:
        raise RuntimeError("rowwise_data and columnwise_data are both None")
    if dtype not in ops.NOMINAL_DTYPES:
        raise TypeError(f"dtype must be one of {ops.NOMINAL_DTYPES}, got {dtype}")
    given = {
        "fp4_dtype": fp4_dtype,
        "optimize_for_gemm": with_gemm_swizzled_scales,
        "row_scaled_nvfp4": row_scaled_nvfp4,
        "nvfp4_use_4over6": nvfp4_use_4over6,
        "nvfp4_e4m3_max": nvfp4_e4m3_max,
        "rowwise": rowwise_data is not None,
        "columnwise": columnwise_data is not None,
    }
    base = Settings() if quantizer is None else quantizer._settings.of_tensor()
    settings = base._replace(**{name: value for name, value in given.items() if value is not None}).check()
    shape = torch.Size(shape)
    device = check_buffers(buffers, settings.native().buffer_shapes(tuple(shape)))
    return buffers, settings, shape, dtype, device


def check_buffers(buffers: ops.Buffers, shapes) -> torch.device:
    """The one device of the buffers, given just where there is a shape, which they must have, and their dtype."""
    device = None
    for name, buffer, shape, dtype in zip(ops.BUFFERS, buffers, shapes, ops.BUFFER_DTYPES, strict=True):
        if buffer is None and shape is None:
            continue
        if buffer is None or shape is None:
            raise RuntimeError(
                f"{name} is {'missing' if buffer is None else 'given, but the data of its direction is not'}"
            )
        ops.require_tensor(name, buffer)
        if buffer.dtype != dtype:
            raise TypeError(f"{name} must be {dtype}, got {buffer.dtype}")
        if tuple(buffer.shape) != tuple(shape):
            raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(buffer.shape)}")
        device = device or buffer.device
        if buffer.device != device:
            raise ValueError(f"{name} must be on {device} as the others, got {buffer.device}")
    return device
