"""Quantized tensors as buffers and plain values, for pickle, `torch.load(weights_only=True)` and safetensors."""

from typing import Any

import torch

from . import ops
from .construction import check_buffers
from .dtype import DType
from .settings import Settings
from .storage import NVFP4TensorStorage
from .tensor import NVFP4Tensor

FORMAT = 1
# What a tensor keeps in its `__dict__`; all else there is the user's, or torch's mark of a Parameter.
_OWN = frozenset({*ops.ATTRIBUTES, "_settings", "_read_only", "shape", "dtype"})


def to_plain(x: NVFP4TensorStorage) -> dict[str, Any]:
    """Everything about x but its buffers, in values that JSON has."""
    settings = x._current_settings().of_tensor()._asdict()
    del settings["amax_reduction_group"], settings["schedule"]
    settings["fp4_dtype"] = settings["fp4_dtype"].name
    return {
        "format": FORMAT,
        "shape": list(x.shape),
        "layout_shape": list(x._layout_shape()),
        "stride": list(x.stride()) if isinstance(x, NVFP4Tensor) else None,
        "dtype": str(x.dtype).removeprefix("torch."),
        "settings": settings,
    }


def from_plain(cls: type, buffers: ops.Buffers, plain: dict[str, Any], **keywords):
    """The tensor that `to_plain` describes, of these buffers.

    TypeError, ValueError or RuntimeError where the description is not one of this version or contradicts the buffers.
    """
    if plain["format"] != FORMAT:
        raise ValueError(f"format {plain['format']!r}: this version reads format {FORMAT}")
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in ops.NOMINAL_DTYPES}
    if plain["dtype"] not in dtypes:
        raise TypeError(f"dtype {plain['dtype']!r}: must be one of {sorted(dtypes)}")
    settings = _settings(plain["settings"])
    shape, layout_shape = (torch.Size(plain[name]) for name in ("shape", "layout_shape"))
    if shape.numel() != layout_shape.numel():
        raise ValueError(f"shape {tuple(shape)} contradicts layout_shape {tuple(layout_shape)}")
    device = check_buffers(buffers, settings.native().buffer_shapes(tuple(layout_shape)))
    if plain["stride"] is not None:
        keywords["stride"] = tuple(plain["stride"])
    return cls._wrap(buffers, settings, shape, dtypes[plain["dtype"]], device, **keywords)


def _settings(fields: dict[str, Any]) -> Settings:
    unknown = sorted(fields.keys() - set(Settings._fields))
    missing = sorted(set(Settings._fields) - fields.keys() - {"amax_reduction_group", "schedule"})
    if unknown or missing:
        raise ValueError(f"settings: {missing} are missing, {unknown} are unknown to this version")
    if fields["fp4_dtype"] not in DType.__members__:
        raise TypeError(f"fp4_dtype {fields['fp4_dtype']!r}: must be one of {list(DType.__members__)}")
    return Settings(**{**fields, "fp4_dtype": DType[fields["fp4_dtype"]]}).check()


def reduce(x: NVFP4TensorStorage):
    """`x.__reduce_ex__`: the buffers, plain values, and the attributes that the user set."""
    attributes = {name: value for name, value in x.__dict__.items() if name not in _OWN}
    return rebuild, (type(x), x._buffers(), to_plain(x), getattr(x, "requires_grad", None), attributes)


def rebuild(cls: type, buffers: ops.Buffers, plain: dict[str, Any], requires_grad: bool | None, attributes: dict):
    """The inverse of `reduce`; the name that pickles refer to."""
    if not (isinstance(cls, type) and issubclass(cls, NVFP4TensorStorage)):
        raise TypeError(f"cls must be a class of quantized tensors, got {cls!r}")
    keywords = {} if requires_grad is None else {"requires_grad": requires_grad}
    x = from_plain(cls, buffers, plain, **keywords)
    x.__dict__.update(attributes)
    return x


torch.serialization.add_safe_globals([rebuild, NVFP4Tensor, NVFP4TensorStorage])
