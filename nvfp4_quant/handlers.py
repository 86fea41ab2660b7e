"""The table that the handlers of torch operators enter, and what they share.

A handler works on the buffers with torch operators only, so it runs as it is on fake and functional tensors.
"""

import torch

from .read_only import DequantizedCopy
from .tensor import NVFP4Tensor

aten = torch.ops.aten
TABLE = {}


def implements(*overloads):
    """Enters a handler, called as `handler(func, *args, **kwargs)`, for these operators."""

    def enter(handler):
        TABLE.update(dict.fromkeys(overloads, handler))
        return handler

    return enter


def is_transposed(x: NVFP4Tensor) -> bool:
    """Whether x shows the strides of a transposed matrix, as `y.t()` does."""
    return x.ndim == 2 and x.stride() != (max(x.shape[1], 1), 1)


def dense(x: torch.Tensor) -> torch.Tensor:
    """The values of any tensor as a plain one with the strides that x shows, so that GEMMs choose the same kernel."""
    if isinstance(x, DequantizedCopy):
        return x._values
    if not isinstance(x, NVFP4Tensor):
        return x
    if not is_transposed(x):
        return x._dequantize()
    return aten.t.default(x)._dequantize().t()


@implements(aten.detach.default, aten.alias.default, aten.lift.default, aten.lift_fresh.default)
def alias(func, x):
    """Another tensor of the same buffers, the same objects."""
    out = x._rebuild(x._buffers(), stride=x.stride())
    out._read_only = x._read_only
    return out
