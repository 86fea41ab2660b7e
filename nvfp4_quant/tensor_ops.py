"""Behind `NVFP4Tensor.__torch_dispatch__`: the handlers of tensor_moves, _slicing and _cat, and a rule for the rest."""

import logging

import torch

from . import operands, tensor_cat, tensor_moves, tensor_slicing  # noqa: F401 (they enter their handlers)
from .handlers import TABLE, dense
from .read_only import DequantizedCopy
from .tensor import NVFP4Tensor

_log = logging.getLogger(__name__)


def dispatch(cls, func, types, args, kwargs):
    """Runs a torch operator with quantized arguments; NotImplementedError names one that packed data cannot do."""
    handler = TABLE.get(func)
    if handler is None:
        return _unknown(func, args, kwargs)
    if torch.is_inference_mode_enabled() and operands.is_view(func) and not args[0].is_inference():
        # torch wants the view of an ordinary tensor to be ordinary even here
        with torch.inference_mode(False), torch._C._AutoDispatchBelowADInplaceOrView():
            return handler(func, *args, **kwargs)
    return handler(func, *args, **kwargs)


def _unknown(func, args, kwargs):
    """A functional operator gets the dequantized values; one that writes into a quantized tensor or views it raises."""
    if not operands.has_schema(func):
        return NotImplemented
    if operands.writes_into(func, NVFP4Tensor, args, kwargs):
        raise NotImplementedError(f"{func}: cannot write into an NVFP4Tensor; use copy_ or quantize_")
    if operands.views(func, NVFP4Tensor, args, kwargs):
        # to, reshape, chunk, ... arrive whole in inference mode
        out = func.decompose(*args, **kwargs)
        if out is NotImplemented:
            raise NotImplementedError(f"{func}: an NVFP4Tensor has no such view; use dequantize()")
        return out
    _log.debug("%s is not implemented for NVFP4Tensor: it gets the dequantized values", func)
    args, kwargs = operands.replace((NVFP4Tensor, DequantizedCopy), dense, args, kwargs)
    return func(*args, **kwargs)
