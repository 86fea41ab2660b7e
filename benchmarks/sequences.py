"""The same quantization in four, three and one operations on the GPU, and the least that any call has to do."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from nvfp4_quant import NVFP4Quantizer, NVFP4Tensor
from nvfp4_quant._native import _C

AMAX_ROWWISE, AMAX_COLUMNWISE = 4, 5  # positions among the six buffers


class Sequence(NamedTuple):
    """`call` makes a tensor, as `q(x)` does; `fill` writes into six given buffers, for the time on the GPU alone."""

    operations: int
    what: str
    call: Callable[[torch.Tensor], NVFP4Tensor]
    fill: Callable[[torch.Tensor, tuple], None]


def _four_operations() -> Sequence:
    settings, native = NVFP4Quantizer()._settings, _C.NVFP4Quantizer(schedule="split")

    def fill(x, buffers):
        _C.compute_amax(x, buffers[AMAX_ROWWISE])  # two operations
        buffers[AMAX_COLUMNWISE].copy_(buffers[AMAX_ROWWISE])
        native.quantize_into(x, *buffers, with_amax=False)

    def call(x):
        buffers = native.empty(x.shape, x.device)
        fill(x, buffers)
        return NVFP4Tensor._wrap(buffers, settings, x.shape, x.dtype, x.device)

    return Sequence(4, "zero_amax_kernel, amax_kernel, 4-byte copy, quantize_kernel", call, fill)


def _scheduled_sequence(operations: int, what: str, schedule: str) -> Sequence:
    native = _C.NVFP4Quantizer(schedule=schedule)
    return Sequence(
        operations,
        what,
        NVFP4Quantizer(schedule=schedule),
        lambda x, buffers: native.quantize_into(x, *buffers),
    )


def sequences() -> list[Sequence]:
    """The classic order of work first, ours last; all of them write the same bytes."""
    return [
        _four_operations(),
        _scheduled_sequence(3, "zero_amax_kernel, amax_kernel, quantize_kernel", "split"),
        _scheduled_sequence(1, "fused_quantize_kernel", "fused"),
    ]


class BareTensor(torch.Tensor):
    """The least that a tensor subclass can be."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f"{func}")


def bare_tensor(x, buffers):
    self = torch.Tensor._make_wrapper_subclass(BareTensor, x.shape, dtype=x.dtype, device=x.device)
    self.a, self.b, self.c, self.d, self.e, self.f = buffers
    return self


def skeleton_statements(x: torch.Tensor) -> tuple[dict[str, str], dict]:
    """What the bare skeleton of `q(x)` consists of, as statements by name, and the names that they use.

    The whole is one trip into the native module that allocates the six outputs, one launch of an empty kernel (on a
    GPU), and one bare subclass object with six attributes.
    """
    native = _C.NVFP4Quantizer()
    half = _C.NVFP4Quantizer(columnwise=False)
    names = {
        "x": x,
        "native": native,
        "half": half,
        "buffers": native.empty(x.shape, x.device),
        "bare_tensor": bare_tensor,
    }
    launch = ""
    if x.is_cuda:
        names["launch"] = torch.cuda._sleep  # a kernel of one thread, without the dispatcher
        launch = "launch(0)"
    whole = ["b = native.empty(x.shape, x.device)", launch, "bare_tensor(x, b)"]
    statements = {
        "whole": "; ".join(filter(None, whole)),
        "six outputs": "native.empty(x.shape, x.device)",
        "three outputs": "half.empty(x.shape, x.device)",
        "one launch": launch,
        "one bare object": "bare_tensor(x, buffers)",
    }
    return {name: stmt for name, stmt in statements.items() if stmt}, names
