"""Concatenation of quantized tensors along their rows."""

import torch

from . import ops
from .handlers import aten, dense, implements, is_transposed
from .tensor import NVFP4Tensor
from .tensor_slicing import SIDES, compact_sides, from_sides, is_matrix, matrix_shape


def _is_real(t: torch.Tensor) -> bool:
    """Whether a condition may depend on the values of t: not while tracing, faking or capturing a CUDA graph."""
    return ops.is_eager(t) and not (t.is_cuda and torch.cuda.is_current_stream_capturing())


def _same_amax(tensors, position: int) -> bool:
    first, *others = (x._buffers()[position] for x in tensors)
    return all(x is first or (_is_real(x) and torch.equal(x, first)) for x in others)


def _cat_compatible(tensors, dim: int) -> bool:
    first = tensors[0]
    return all(
        isinstance(x, NVFP4Tensor)
        and x.ndim >= 2
        and dim in (0, -x.ndim)
        and is_matrix(x)
        and not is_transposed(x)
        and (x.dtype, x.device, x.shape[1:]) == (first.dtype, first.device, first.shape[1:])
        and x._current_settings().options() == first._current_settings().options()
        for x in tensors
    )


def _cat_rows(sides, columnwise: bool, row_scaled: bool):
    """One side of the rows of several tensors, each with its number of rows."""
    data, scales, amaxes = zip(*(side for side, _ in sides), strict=True)
    rows = [rows for _, rows in sides]
    if columnwise:
        scales = [scale[:, : -(-n // ops.BLOCK)] for scale, n in zip(scales, rows, strict=True)]
        return torch.cat(data, 1), torch.cat(scales, 1), amaxes[0].clone()
    scales = [scale[:n] for scale, n in zip(scales, rows, strict=True)]
    return torch.cat(data), torch.cat(scales), torch.cat(amaxes) if row_scaled else amaxes[0].clone()


def _packed_cat(tensors, dim: int) -> NVFP4Tensor | None:
    if not _cat_compatible(tensors, dim):
        return None
    first = tensors[0]
    row_scaled = first._settings.row_scaled_nvfp4
    rows = [matrix_shape(x)[0] for x in tensors]
    aligned = all(n % ops.BLOCK == 0 for n in rows[:-1])
    # lines with scales of their own can be put together anywhere
    fits = [row_scaled or (aligned and _same_amax(tensors, ops.ROWWISE[2])), aligned]
    has = [first._buffers()[side[0]] is not None for side in SIDES]
    if has[1]:
        fits[1] = aligned and _same_amax(tensors, ops.COLUMNWISE[2])
    kept = [there and fit for there, fit in zip(has, fits, strict=True)]
    if not any(kept) or (not row_scaled and kept != has):
        return None
    parts = zip(*(compact_sides(x) for x in tensors), strict=True)
    sides = [
        _cat_rows(list(zip(side, rows, strict=True)), bool(columnwise), row_scaled) if kept[columnwise] else None
        for columnwise, side in enumerate(parts)
    ]
    return from_sides(first, sides, (sum(x.shape[0] for x in tensors), *first.shape[1:]))


@implements(aten.cat.default)
def _cat(func, tensors, dim=0):
    packed = _packed_cat(tensors, dim)
    return func([dense(x) for x in tensors], dim) if packed is None else packed
