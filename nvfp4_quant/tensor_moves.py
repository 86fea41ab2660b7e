"""Handlers of the operators that copy, move, overwrite or allocate whole quantized tensors."""

import torch

from .handlers import aten, dense, implements
from .ops import NOMINAL_DTYPES
from .read_only import refuse_write
from .tensor import NVFP4Tensor


def map_buffers(x: NVFP4Tensor, fn, **changes) -> NVFP4Tensor:
    """x with `fn(buffer)` for every buffer it has."""
    return x._rebuild(tuple(None if b is None else fn(b) for b in x._buffers()), **changes)


def _stride_in(x: NVFP4Tensor, memory_format) -> tuple[int, ...] | None:
    """The strides that a copy of x shows: contiguous ones (None) where asked for, else x's own."""
    return None if memory_format is torch.contiguous_format else x.stride()


# ---- the same bytes


@implements(aten.clone.default)
def _clone(func, x, memory_format=None):
    return map_buffers(x, torch.clone, stride=_stride_in(x, memory_format))


@implements(aten._to_copy.default)
def _to_copy(func, x, *, dtype=None, device=None, memory_format=None, **options):
    """Between devices and nominal dtypes the bytes stay; another dtype takes the values out."""
    dtype = dtype or x.dtype
    if dtype not in NOMINAL_DTYPES:
        return func(dense(x), dtype=dtype, device=device, memory_format=memory_format, **options)
    stride = _stride_in(x, memory_format)
    return map_buffers(x, lambda b: func(b, device=device, **options), dtype=dtype, stride=stride)


@implements(aten._pin_memory.default)
def _pin_memory(func, x, device=None):
    return map_buffers(x, lambda b: func(b, device), stride=x.stride())


@implements(aten.is_pinned.default)
def _is_pinned(func, x, device=None):
    return all(func(b, device) for b in x._buffers() if b is not None)


@implements(aten.record_stream.default)
def _record_stream(func, x, stream):
    for buffer in x._buffers():
        if buffer is not None:
            func(buffer, stream)


# ---- writing


def _same_layout(a: NVFP4Tensor, b: NVFP4Tensor) -> bool:
    """Whether the bytes of one are also valid as the bytes of the other."""
    shapes = [[None if x is None else tuple(x.shape) for x in t._buffers()] for t in (a, b)]
    return (
        a.shape == b.shape
        and a._current_settings().options() == b._current_settings().options()
        and shapes[0] == shapes[1]  # not in a set: symbolic sizes have no hash
    )


@implements(aten.copy_.default)
def _copy_(func, target, source, non_blocking=False):
    """Bytes where both tensors have them in the same layout, else values in the nominal dtypes."""
    if not isinstance(target, NVFP4Tensor):
        return func(target, dense(source), non_blocking)
    if target._read_only:
        refuse_write(func)
    if isinstance(source, NVFP4Tensor) and _same_layout(target, source):
        for to, from_ in zip(target._buffers(), source._buffers(), strict=True):
            if to is not None:
                func(to, from_, non_blocking)
        return target
    values = dense(source).to(device=target.device, dtype=target.dtype, non_blocking=non_blocking)
    target.quantize_(values.expand(target.shape))
    return target


# ---- new tensors


@implements(aten.empty_like.default)
def _empty_like(func, x, *, dtype=None, device=None, memory_format=None, **options):
    dtype = dtype or x.dtype
    if dtype not in NOMINAL_DTYPES:
        return torch.empty(x.shape, dtype=dtype, device=device or x.device, pin_memory=options.get("pin_memory", False))
    stride = _stride_in(x, memory_format)
    return map_buffers(x, lambda b: func(b, device=device, **options), dtype=dtype, stride=stride)


@implements(aten.new_empty.default, aten.new_zeros.default)
def _new(func, x, size, *, dtype=None, device=None, **options):
    """A tensor of the same settings; zeros are zero bytes and an amax of zero."""
    dtype = dtype or x.dtype
    if dtype not in NOMINAL_DTYPES:
        first = next(b for b in x._buffers() if b is not None)
        return func(first, size, dtype=dtype, device=device or x.device, **options)
    shapes = x._current_settings().native().buffer_shapes(tuple(size))
    buffers = tuple(
        None if b is None else func(b, shape, device=device, **options)
        for b, shape in zip(x._buffers(), shapes, strict=True)
    )
    return x._rebuild(buffers, shape=tuple(size), dtype=dtype)
