"""Views and parts of quantized tensors: what shares the buffers, what is a packed copy, what is dequantized.

A tensor is seen as M rows of K values. Its row-wise side is a list of M lines in blocks along K, its column-wise side
a list of K lines in blocks along M; so a cut of the rows takes whole lines of the one and blocks of the other.
"""

import math

import torch
import torch.nn.functional as F
from torch._prims_common import canonicalize_dim, canonicalize_dims, infer_size

from . import ops
from ._native import _C
from .handlers import alias, aten, dense, implements
from .read_only import DequantizedCopy
from .tensor import NVFP4Tensor

SIDES = (ops.ROWWISE, ops.COLUMNWISE)  # positions of data, scale_inv and amax


def _read_only_copy(func, x, *args, **kwargs):
    """The result of a view operator on the dequantized values."""
    out = func(dense(x), *args, **kwargs)
    return DequantizedCopy(out) if isinstance(out, torch.Tensor) else [DequantizedCopy(part) for part in out]


# the views that torch's own matmul, einsum and iteration take of an operand
implements(aten.select.int, aten.unbind.int, aten.expand.default)(_read_only_copy)


def matrix_shape(x: NVFP4Tensor) -> tuple[int, int]:
    """(M, K) of the matrix that the buffers hold."""
    shape = x._layout_shape()
    return math.prod(shape[:-1]), shape[-1]


def is_matrix(x: NVFP4Tensor) -> bool:
    """False for `y.view(-1)`, whose buffers are those of y."""
    return tuple(x._layout_shape()) == tuple(x.shape)


# ---- the same buffers in another shape


@implements(aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default)
def _view(func, x, size, *strides):
    rows, columns = matrix_shape(x)
    size = tuple(infer_size(tuple(size), x.numel()))
    if size == tuple(x.shape):
        return alias(func, x)
    buffers = list(x._buffers())
    if size and (math.prod(size[:-1]), size[-1]) == (rows, columns):
        if buffers[0] is not None:
            buffers[0] = buffers[0].view(*size[:-1], buffers[0].shape[-1])
    elif size != (x.numel(),):
        raise NotImplementedError(
            f"{func}: shape {size} does not keep the last dimension of {columns}; use dequantize()"
        )
    out = x._rebuild(tuple(buffers), shape=size)
    out._read_only = x._read_only
    return out


@implements(aten.unsqueeze.default)
def _unsqueeze(func, x, dim):
    dim = canonicalize_dim(x.ndim + 1, dim)
    if dim == x.ndim or not is_matrix(x):
        return _read_only_copy(func, x, dim)
    return _view(func, x, (*x.shape[:dim], 1, *x.shape[dim:]))


@implements(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(func, x, dims=None):
    dims = range(x.ndim) if dims is None else (dims,) if isinstance(dims, int) else dims
    dropped = {dim for dim in canonicalize_dims(x.ndim, tuple(dims)) if x.shape[dim] == 1}
    if x.ndim - 1 in dropped or not is_matrix(x):
        return DequantizedCopy(torch.squeeze(dense(x), tuple(dropped)))
    return _view(func, x, tuple(n for dim, n in enumerate(x.shape) if dim not in dropped))


@implements(aten.as_strided.default)
def _as_strided(func, x, size, stride, storage_offset=None):
    if tuple(size) == tuple(x.shape) and tuple(stride) == tuple(x.stride()) and not storage_offset:
        return alias(func, x)
    raise NotImplementedError(
        f"{func}: only the tensor's own shape {tuple(x.shape)} and strides {x.stride()} at offset 0, got "
        f"{tuple(size)}, {tuple(stride)}, {storage_offset}"
    )


# ---- transposition


@implements(aten.t.default)
def _t(func, x):
    """Rows of x are columns of the result, so its sides are those of x, exchanged.

    Where the sides decode differently, the result keeps only the one that x is dequantized from.
    """
    if x.ndim < 2:
        return alias(func, x)
    settings = x._settings
    exact = settings.with_2d_quantization and not settings.with_rht and not settings.stochastic_rounding
    buffers = x._buffers()
    rowwise, columnwise = ([buffers[i] for i in side] for side in SIDES)
    has_rowwise = rowwise[0] is not None
    if not has_rowwise and settings.with_rht:
        return x._dequantize().t()
    dropped = has_rowwise and columnwise[0] is not None and not exact
    out = x._rebuild(
        _in_flatten_order((None,) * 3 if dropped else columnwise, rowwise),
        shape=tuple(x.shape[::-1]),
        stride=x.stride()[::-1],
        settings=settings._replace(with_rht=False),
    )
    out._read_only = x._read_only or dropped  # a write would not reach the side of x that was left behind
    return out


@implements(aten.transpose.int)
def _transpose(func, x, dim0, dim1):
    if canonicalize_dim(x.ndim, dim0) == canonicalize_dim(x.ndim, dim1):
        return alias(func, x)
    return _t(func, x) if x.ndim == 2 else _read_only_copy(func, x, dim0, dim1)


@implements(aten.permute.default)
def _permute(func, x, dims):
    order = canonicalize_dims(x.ndim, tuple(dims))
    if order == tuple(range(x.ndim)):
        return alias(func, x)
    return _t(func, x) if order == (1, 0) else _read_only_copy(func, x, dims)


# ---- parts


def _in_flatten_order(rowwise, columnwise):
    """The six buffers from (data, scale_inv, amax) of each side."""
    buffers = dict(zip((*ops.ROWWISE, *ops.COLUMNWISE), (*rowwise, *columnwise), strict=True))
    return tuple(buffers[i] for i in range(len(buffers)))


def compact_sides(x: NVFP4Tensor):
    """(data of one line a row, scale_inv in rows and columns, amax) of each side, None for one that is missing."""
    buffers = x._buffers()
    scales = [buffers[side[1]] for side in SIDES]
    if x._settings.optimize_for_gemm:
        scales = ops.swizzle_scales(*scales, inverse=True)
    for side, lines, scale in zip(SIDES, matrix_shape(x), scales, strict=True):
        data = buffers[side[0]]
        yield None if data is None else (data.reshape(lines, data.shape[-1]), scale, buffers[side[2]])


def from_sides(like: NVFP4Tensor, sides, shape) -> NVFP4Tensor:
    """A tensor with the settings of `like` from compact sides whose scales have no padding yet."""
    buffers = []
    for columnwise, side in enumerate(sides):
        if side is None:
            buffers.append((None,) * 3)
            continue
        data, scale, amax = side
        lines, blocks = _C.scale_shape(tuple(shape), bool(columnwise))
        scale = F.pad(scale, (0, blocks - scale.shape[1], 0, lines - scale.shape[0]))
        buffers.append((data if columnwise else data.reshape(*shape[:-1], data.shape[1]), scale, amax))
    if like._settings.optimize_for_gemm:
        scales = ops.swizzle_scales(buffers[0][1], buffers[1][1])
        buffers = [(data, scale, amax) for (data, _, amax), scale in zip(buffers, scales, strict=True)]
    return like._rebuild(_in_flatten_order(*buffers), shape=shape)


def _cut_side(side, start: int, end: int, lines_are_cut: bool, row_scaled: bool):
    """Lines or, at multiples of a block, elements [start, end) of every line, in new memory."""
    data, scale, amax = side
    if lines_are_cut:
        amax = amax[start:end] if row_scaled else amax
        return data[start:end].clone(), scale[start:end], amax.clone()
    blocks = slice(start // ops.BLOCK, -(-end // ops.BLOCK))
    per_block = ops.BLOCK // 2
    data = data[:, blocks.start * per_block : blocks.stop * per_block]
    return data.clone(memory_format=torch.contiguous_format), scale[:, blocks], amax.clone()


def _cut_axis(x: NVFP4Tensor, dim: int) -> int | None:
    """0 if a range of `dim` is a range of the rows, 1 if of the columns, else None."""
    if not is_matrix(x):
        return None
    if dim == x.ndim - 1:
        return 1
    return 0 if all(n == 1 for n in x.shape[:dim]) else None


def _packed_part(x: NVFP4Tensor, dim: int, start: int, end: int) -> NVFP4Tensor | None:
    """[start, end) of `dim` without leaving the format; None where blocks or tiles would be cut."""
    axis = _cut_axis(x, dim)
    if axis is None:
        return None
    settings = x._settings
    unit = math.prod(x.shape[dim + 1 : -1]) if axis == 0 else 1
    first, last = start * unit, end * unit
    aligned = first % ops.BLOCK == 0 and (last % ops.BLOCK == 0 or end == x.shape[dim])
    only_lines = axis == 0 and x._columnwise_data is None and not settings.with_2d_quantization
    if not aligned and not only_lines:
        return None
    sides = [
        side and _cut_side(side, first, last, axis == columnwise, settings.row_scaled_nvfp4)
        for columnwise, side in enumerate(compact_sides(x))
    ]
    return from_sides(x, sides, (*x.shape[:dim], end - start, *x.shape[dim + 1 :]))


@implements(aten.slice.Tensor)
def _slice(func, x, dim=0, start=None, end=None, step=1):
    """The whole range shares the buffers; a part is a copy, packed where possible, that refuses to be written."""
    dim = canonicalize_dim(x.ndim, dim)
    size = x.shape[dim]
    start, end = _bound(start, 0, size), _bound(end, size, size)
    end = max(start, end)
    if step == 1 and start == 0 and end == size:
        return alias(func, x)
    part = _packed_part(x, dim, start, end) if step == 1 else None
    if part is None:
        return _read_only_copy(func, x, dim, start, end, step)
    part._read_only = True
    return part


def _bound(index, default: int, size: int) -> int:
    if index is None:
        return default
    return min(max(index + size if index < 0 else index, 0), size)


@implements(aten.split_with_sizes.default)
def _split_with_sizes(func, x, sizes, dim=0):
    dim = canonicalize_dim(x.ndim, dim)
    if sum(sizes) != x.shape[dim]:
        raise ValueError(f"{func}: split_sizes {sizes} must add up to {x.shape[dim]}, the size of dimension {dim}")
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [_slice(aten.slice.Tensor, x, dim, end - size, end) for size, end in zip(sizes, ends, strict=True)]


@implements(aten.split.Tensor)
def _split(func, x, size, dim=0):
    total = x.shape[canonicalize_dim(x.ndim, dim)]
    if size < 0 or (size == 0 and total):
        raise ValueError(f"{func}: split_size must be positive, got {size}")
    starts = range(0, max(total, 1), size or 1)
    return [_slice(aten.slice.Tensor, x, dim, start, start + size) for start in starts]
