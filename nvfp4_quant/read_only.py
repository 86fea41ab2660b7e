"""Dense values that stand for a part of a quantized tensor."""

from typing import NoReturn

import torch
from torch.utils._pytree import tree_map_only

from . import operands


def refuse_write(what) -> NoReturn:
    """Raises for `what`, an operator or method, that would write into a copy which its caller takes for a view."""
    raise NotImplementedError(f"{what}: would write into a copy of a part of an NVFP4Tensor; clone() it first")


class DequantizedCopy(torch.Tensor):
    """The values of a part of an `NVFP4Tensor` that cannot stay packed, such as one of its rows.

    torch calls such a part a view, and what is written into a view is written into its base. This one is a copy, so
    writing into it raises `NotImplementedError`; `clone()` gives an ordinary tensor. Reading is as with any tensor.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: torch.Tensor):
        if type(values) is torch.Tensor:
            self = torch.Tensor._make_subclass(cls, values)  # on the same memory, for numpy and native code
        else:  # while torch.compile traces
            self = torch.Tensor._make_wrapper_subclass(
                cls, values.shape, strides=values.stride(), dtype=values.dtype, device=values.device
            )
        self._values = values
        return self

    def __tensor_flatten__(self):
        return ["_values"], None

    @staticmethod
    def __tensor_unflatten__(inner_tensors, _, outer_size, outer_stride):
        return DequantizedCopy(inner_tensors["_values"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not operands.has_schema(func):
            return NotImplemented
        is_view = operands.views(func, cls, args, kwargs)
        if is_view and func is not torch.ops.aten.record_stream.default:
            if operands.writes_into(func, cls, args, kwargs):
                refuse_write(func)
            out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        args, kwargs = operands.replace(cls, lambda part: part._values, args, kwargs)
        out = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, cls, out) if is_view else out

    def __repr__(self) -> str:
        return f"DequantizedCopy({self._values!r})"

    def numpy(self, *, force: bool = False):
        return self.clone().numpy(force=force)

    def tolist(self):
        return self.clone().tolist()

    def __deepcopy__(self, memo):
        return memo.setdefault(id(self), self.detach().clone())

    def __reduce_ex__(self, protocol):
        return self.detach().clone().__reduce_ex__(protocol)
