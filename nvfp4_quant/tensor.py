"""NVFP4Tensor: a torch.Tensor whose data is quantized; the functions that change the order of its scales."""

import functools
import hashlib

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd.graph import increment_version

from . import ops
from .construction import checked_arguments
from .ops import NOMINAL_DTYPES  # noqa: F401
from .settings import Settings
from .storage import NVFP4TensorStorage


class _Inlined:
    """A method that Dynamo traces into. Any other one of a tensor subclass it keeps as a call on the whole tensor."""

    def __init__(self, function):
        self.function = function

    def __get__(self, instance, owner=None):
        return self.function if instance is None else functools.partial(self.function, instance)


class NVFP4Tensor(Tensor, NVFP4TensorStorage):
    """A quantized tensor that presents its original shape, and a nominal dtype: bf16, fp16 or fp32.

    Built by keyword: `NVFP4Tensor(shape=, dtype=, rowwise_data=, ...)` with the keywords of `get_metadata()`, and
    `requires_grad`. Fields and methods are those of NVFP4TensorStorage; torch's operators are in `tensor_ops`.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl
    _is_graph_input = False  # while AOTAutograd traces: it hands on writes to buffers, but not to attributes

    # Tensor has these names too, and comes first: it must, for the shape, the dtype and the device.
    __repr__ = NVFP4TensorStorage.__repr__
    __reduce_ex__ = NVFP4TensorStorage.__reduce_ex__

    def __new__(cls, shape, dtype, *, requires_grad=False, device=None, **keywords):
        del device  # that of the buffers
        return cls._wrap(*checked_arguments(shape, dtype, **keywords), requires_grad)

    def __init__(self, *args, **keywords):
        """Everything is done in `__new__`."""

    @classmethod
    def _wrap(cls, buffers, settings, shape, dtype, device, requires_grad=False, stride=None):
        self = Tensor._make_wrapper_subclass(
            cls, shape, stride, dtype=dtype, device=device, requires_grad=requires_grad
        )
        self._set_buffers(buffers)
        self._settings = settings
        return self

    def _rebuild(self, buffers, *, shape=None, dtype=None, stride=None, settings: Settings | None = None):
        """A tensor of the same class with these buffers; contiguous, and like this one, where nothing else is said."""
        device = next(buffer.device for buffer in buffers if buffer is not None)
        shape = self.shape if shape is None else shape
        return self._wrap(buffers, settings or self._settings, shape, dtype or self.dtype, device, stride=stride)

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """The values in `dtype` (bf16, fp16 or fp32; default the nominal one), row-wise where there is that side.

        The gradient passes straight through. TypeError: another dtype; RuntimeError: neither direction is there.
        """
        if torch.is_grad_enabled() and self.requires_grad:
            return _Dequantize.apply(self, dtype)
        return self._dequantize(dtype)

    @property
    def data(self) -> "NVFP4Tensor":
        """The same buffers without the autograd history. Assigning replaces the buffers, or quantizes into them.

        A tensor of a dtype that cannot be nominal makes this object a plain tensor, as `module.double()` expects.
        """
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, new: Tensor) -> None:
        if isinstance(new, NVFP4Tensor):
            Tensor.data.__set__(self, new)  # shape, dtype and device
            self._set_buffers(new._buffers())
            self._settings = new._settings
            self._read_only = new._read_only
        elif (new.shape, new.dtype, new.device) == (self.shape, self.dtype, self.device):
            self.detach().copy_(new)
        elif new.dtype in ops.NOMINAL_DTYPES:
            self.data = self._quantizer.quantize(new.detach())
        else:
            is_parameter = isinstance(self, torch.nn.Parameter)
            plain = torch.nn.Parameter(new, self.requires_grad) if is_parameter else new.detach()
            if self.grad is not None:
                plain.grad = self.grad.to(plain)
            torch.utils.swap_tensors(self, plain)

    # Tensor's own methods for these ask for the memory of one dense tensor, which there is none of.

    def share_memory_(self) -> "NVFP4Tensor":
        """Moves the buffers to shared memory, as `module.share_memory()` expects; returns self."""
        for buffer in self._buffers():
            if buffer is not None:
                buffer.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether every buffer is in shared memory."""
        return all(buffer.is_shared() for buffer in self._buffers() if buffer is not None)

    def numpy(self, *, force: bool = False):
        """The values as an array, under the rules of a plain tensor: no bf16, nothing that requires a gradient."""
        return self.dequantize().numpy(force=force)

    def tolist(self):
        """The values as nested lists of numbers."""
        return self.dequantize().tolist()

    def __deepcopy__(self, memo):
        copy = super().__deepcopy__(memo)
        copy._read_only = False
        return copy

    quantize_ = _Inlined(NVFP4TensorStorage.quantize_)

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        if self._is_graph_input:
            raise NotImplementedError("update_usage: a compiled function cannot change which buffers its inputs have")
        super().update_usage(rowwise_usage, columnwise_usage)

    update_usage.__doc__ = NVFP4TensorStorage.update_usage.__doc__

    def _fill(self, x, *args) -> "NVFP4Tensor":
        super()._fill(x, *args)
        if ops.is_eager(x) and not self.is_inference():  # traced, the writes to the buffers count by themselves
            increment_version(self)
        return self

    def __tensor_flatten__(self):
        names = [name for name in ops.ATTRIBUTES if getattr(self, name) is not None]
        # Rows are contiguous except in `t()`. Torch 2.11 mixes up the strides of a result with symbolic sizes, so that
        # they are only taken where they say something.
        has_strides = self.dim() > 1 and bool(self.stride(-1) != 1)
        return names, (self._current_settings(), self.dtype, self._read_only, has_strides)

    @classmethod
    def __tensor_unflatten__(cls, inner, context, outer_size, outer_stride):
        settings, dtype, read_only, has_strides = context
        buffers = tuple(inner.get(name) for name in ops.ATTRIBUTES)
        device = next(iter(inner.values())).device
        stride = outer_stride if has_strides else None
        self = cls._wrap(buffers, settings, outer_size, dtype, device, stride=stride)
        if read_only:
            self._read_only = True
        self._is_graph_input = isinstance(next(iter(inner.values())), FunctionalTensor)
        return self

    def __coerce_tangent_metadata__(self) -> Tensor:
        """What AOTAutograd shall expect as the gradient of such an output of a compiled function: a plain tensor.

        It asks the answer, which it takes for another tensor of this class, for its inner tensors: there are none.
        """
        buffer = next(buffer for buffer in self._buffers() if buffer is not None)
        gradient = buffer.new_empty(self.shape, dtype=self.dtype)
        gradient.__tensor_flatten__ = lambda: ([], None)
        return gradient

    def _stable_hash_for_caching(self) -> str:
        """What a graph compiled for such a tensor depends on; torch's own form of it fails on symbolic sizes."""
        names, context = self.__tensor_flatten__()
        inner = [(name, getattr(self, name).shape, getattr(self, name).dtype) for name in names]
        key = repr((self.shape, self.stride(), self.device, self.requires_grad, context, inner))
        return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        from . import tensor_ops  # it needs this class

        return tensor_ops.dispatch(cls, func, types, args, kwargs or {})


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, dtype):
        return y._dequantize(dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def dequantize(y: NVFP4TensorStorage, *, dtype: torch.dtype | None = None) -> Tensor:
    """`y.dequantize(dtype=dtype)`; TypeError if y is not quantized."""
    _require_quantized("y", y)
    return y.dequantize(dtype=dtype)


def swizzle_scales_for_gemm_(y):
    """Puts the scales of y in the order that block-scaled GEMMs read, in new buffers; returns y.

    Both directions at once; nothing happens if they are in that order already. TypeError if y is not quantized.
    """
    return _reorder_scales(y, swizzled=True)


def unswizzle_scales_(y):
    """The inverse of `swizzle_scales_for_gemm_`; returns y."""
    return _reorder_scales(y, swizzled=False)


def _reorder_scales(y, swizzled: bool):
    _require_quantized("y", y)
    if y._with_gemm_swizzled_scales != swizzled:
        scales = ops.swizzle_scales(y._rowwise_scale_inv, y._columnwise_scale_inv, inverse=not swizzled)
        y._rowwise_scale_inv, y._columnwise_scale_inv = scales
        y._with_gemm_swizzled_scales = swizzled
    return y


def _require_quantized(name: str, value) -> None:
    if not isinstance(value, NVFP4TensorStorage):
        raise TypeError(f"{name} must be an NVFP4Tensor or NVFP4TensorStorage, got {type(value).__name__}")
