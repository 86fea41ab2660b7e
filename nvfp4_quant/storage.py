"""NVFP4TensorStorage: the buffers of a quantized tensor with their meaning, without the machinery of torch.Tensor."""

import math
from typing import Any

import torch
from torch import Tensor

from . import amax_reduction, ops
from .construction import checked_arguments
from .layout import transpose_tiles
from .read_only import refuse_write
from .settings import Settings


def _field(name: str) -> property:
    return property(lambda self: getattr(self, f"_{name}"), doc=f"`_{name}`, read-only.")


def _setting(name: str) -> property:
    def write(self, value):
        self._settings = self._settings._replace(**{name: value})

    return property(lambda self: getattr(self._settings, name), write)


class NVFP4TensorStorage:
    """The buffers of a quantized tensor of logical `shape` (M rows, K columns, seen as 2-D) and nominal `dtype`.

    _rowwise_data          uint8    shape[:-1] + (Kp/2,)
    _rowwise_scale_inv     uint8    (M up to 128, Kp/16 up to 4)
    _columnwise_data       uint8    (K, Mp/2)
    _columnwise_scale_inv  uint8    (K up to 128, Mp/16 up to 4)
    _amax_rowwise          float32  (1,), row-scaled (M,)
    _amax_columnwise       float32  (1,), row-scaled (K,)

    Kp and Mp are K and M rounded up to 16. All three of a direction that is
    not there are None. The keywords of the constructor are those of `get_metadata()`: what is not given about the mode
    comes from `quantizer`. TypeError: a dtype; ValueError: a shape, device or option; RuntimeError: a missing buffer.
    """

    _read_only = False  # True for a copy of a part of a tensor, which stands for a view and so must not be written

    def __new__(cls, shape, dtype, *, device=None, **keywords):
        del device  # that of the buffers
        return cls._wrap(*checked_arguments(shape, dtype, **keywords))

    @classmethod
    def _wrap(cls, buffers, settings, shape, dtype, device=None):
        self = object.__new__(cls)
        self._set_buffers(buffers)
        self._settings = settings
        self.shape = torch.Size(shape)
        self.dtype = dtype
        return self

    _dtype = property(lambda self: self.dtype)
    _fp4_dtype = _setting("fp4_dtype")
    _with_gemm_swizzled_scales = _setting("optimize_for_gemm")
    _row_scaled_nvfp4 = _setting("row_scaled_nvfp4")
    _nvfp4_use_4over6 = _setting("nvfp4_use_4over6")
    _nvfp4_e4m3_max = _setting("nvfp4_e4m3_max")

    rowwise_data, rowwise_scale_inv = _field("rowwise_data"), _field("rowwise_scale_inv")
    columnwise_data, columnwise_scale_inv = _field("columnwise_data"), _field("columnwise_scale_inv")
    amax_rowwise, amax_columnwise = _field("amax_rowwise"), _field("amax_columnwise")
    fp4_dtype, quantizer = _field("fp4_dtype"), _field("quantizer")
    with_gemm_swizzled_scales, row_scaled_nvfp4 = _field("with_gemm_swizzled_scales"), _field("row_scaled_nvfp4")
    nvfp4_use_4over6, nvfp4_e4m3_max = _field("nvfp4_use_4over6"), _field("nvfp4_e4m3_max")

    def size(self, dim: int | None = None):
        """The logical shape, or its element `dim`."""
        return self.shape if dim is None else self.shape[dim]

    @property
    def device(self) -> torch.device | None:
        """That of the buffers; None if all of them were taken away."""
        return next((buffer.device for buffer in self._buffers() if buffer is not None), None)

    @property
    def _quantizer(self):
        """A new quantizer that makes such tensors; it takes part in no amax reduction."""
        from .quantizer import NVFP4Quantizer

        return NVFP4Quantizer._from_settings(self._current_settings())

    def _buffers(self) -> ops.Buffers:
        return (
            self._rowwise_data,
            self._rowwise_scale_inv,
            self._columnwise_data,
            self._columnwise_scale_inv,
            self._amax_rowwise,
            self._amax_columnwise,
        )

    def _set_buffers(self, buffers: ops.Buffers) -> None:
        (
            self._rowwise_data,
            self._rowwise_scale_inv,
            self._columnwise_data,
            self._columnwise_scale_inv,
            self._amax_rowwise,
            self._amax_columnwise,
        ) = buffers

    def _layout_shape(self) -> torch.Size:
        """The shape that the buffers are laid out for: its own, except for `y.view(-1)`, which has the buffers of y."""
        if len(self.shape) != 1:
            return self.shape
        count = self.shape[0]
        if self._rowwise_data is not None:
            *leading, width = self._rowwise_data.shape
            rows = math.prod(leading)
            return torch.Size((*leading, count // rows if rows else 2 * width))
        columns = self._columnwise_data.shape[0]
        return self.shape if count == columns else torch.Size((count // columns if columns else 0, columns))

    def _current_settings(self) -> Settings:
        """The settings with the usages that the buffers, which can be assigned, have now."""
        settings = self._settings
        usages = self._rowwise_data is not None, self._columnwise_data is not None
        if usages == (settings.rowwise, settings.columnwise):
            return settings
        return settings._replace(rowwise=usages[0], columnwise=usages[1])

    def get_data_tensors(self, rowwise_data: bool = True, columnwise_data: bool = True):
        """The row-wise and the column-wise data (None where missing), or the one that is asked for."""
        if rowwise_data and columnwise_data:
            return self._rowwise_data, self._columnwise_data
        return self._rowwise_data if rowwise_data else self._columnwise_data

    def get_usages(self) -> dict[str, bool]:
        """Which directions are there: {"rowwise": bool, "columnwise": bool}."""
        return {"rowwise": self._rowwise_data is not None, "columnwise": self._columnwise_data is not None}

    def get_metadata(self) -> dict[str, Any]:
        """The keywords that build such a tensor of the same buffers."""
        return {
            "shape": self.shape,
            "dtype": self.dtype,
            **dict(zip(ops.BUFFERS, self._buffers(), strict=True)),
            "fp4_dtype": self._fp4_dtype,
            "quantizer": self._quantizer,
            "with_gemm_swizzled_scales": self._with_gemm_swizzled_scales,
            "row_scaled_nvfp4": self._row_scaled_nvfp4,
            "nvfp4_use_4over6": self._nvfp4_use_4over6,
            "nvfp4_e4m3_max": self._nvfp4_e4m3_max,
        }

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """The values in `dtype` (bf16, fp16 or fp32; default the nominal one), row-wise where there is that side.

        TypeError: another dtype; RuntimeError: neither direction is there.
        """
        return self._dequantize(dtype)

    def _dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        columnwise = self._rowwise_data is None
        data, scale_inv, amax = (self._buffers()[i] for i in (ops.COLUMNWISE if columnwise else ops.ROWWISE))
        for name, buffer in (("data", data), ("scale_inv", scale_inv), ("amax", amax)):
            if buffer is None:
                direction = "column-wise" if columnwise else "row-wise"
                raise RuntimeError(f"dequantize: the {direction} {name} is None")
        shape = self._layout_shape()
        values = ops.dequantize(data, scale_inv, amax, shape, dtype or self.dtype, columnwise, self._settings)
        return values if shape == self.shape else values.view(self.shape)

    def quantize_(self, x, *, noop_flag: Tensor | None = None, generator=None, rng_state=None):
        """Quantizes x (of this shape; may be quantized itself) into this tensor with its own settings; returns self.

        With a noop_flag (float32, one element on x's device) of exactly 1 nothing is written.
        """
        return fill(self, x, None, noop_flag, None, generator, rng_state)

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drops a direction (False) or makes sure that it is there (True).

        The column-wise side is made, exactly, from the row-wise one if the tensor is 2-D quantized, to nearest and
        without Hadamard. RuntimeError: any other direction that is missing, or if none would be left.
        """
        wanted = [
            has if usage is None else bool(usage)
            for has, usage in zip(self.get_usages().values(), (rowwise_usage, columnwise_usage), strict=True)
        ]
        if not any(wanted):
            raise RuntimeError("update_usage: rowwise_usage=False and columnwise_usage=False would leave no data")
        if wanted[0] and self._rowwise_data is None:
            raise RuntimeError("update_usage: rowwise_usage=True, but the tensor has no row-wise data")
        if wanted[1] and self._columnwise_data is None:
            self._make_columnwise()
        for kept, positions in zip(wanted, (ops.ROWWISE, ops.COLUMNWISE), strict=True):
            for i in () if kept else positions:
                setattr(self, ops.ATTRIBUTES[i], None)
        self._settings = self._current_settings()

    def _make_columnwise(self) -> None:
        s = self._settings
        if not s.with_2d_quantization or s.with_rht or s.stochastic_rounding:
            raise RuntimeError(
                "update_usage: columnwise_usage=True, but the tensor has no column-wise data, which only follows from "
                f"the row-wise data of a 2-D quantization to nearest without Hadamard: {s}"
            )
        scale_inv = self._rowwise_scale_inv
        if s.optimize_for_gemm:
            scale_inv, _ = ops.swizzle_scales(scale_inv, None, inverse=True)
        data, scale_inv = transpose_tiles(self._rowwise_data, scale_inv, self._layout_shape())
        if s.optimize_for_gemm:
            _, scale_inv = ops.swizzle_scales(None, scale_inv)
        self._columnwise_data, self._columnwise_scale_inv = data, scale_inv
        self._amax_columnwise = self._amax_rowwise.clone()

    def _fill(self, x, settings, noop_flag=None, amax=None, generator=None, rng_state=None):
        """Quantizes x into the buffers, of which those stay that `settings` wants: its own from now on; returns self.

        settings: None for its own, which also take a quantized x; in a graph a plain tuple, which must equal its own.
        """
        if settings is None and isinstance(x, NVFP4TensorStorage):
            x = x.dequantize()
        ops.require_tensor("x", x)
        in_graph = type(settings) is tuple
        if settings is None:
            settings = self._current_settings()
        elif in_graph:
            settings = Settings.from_plain(settings)
        if self._read_only:
            refuse_write("quantize_")
        shape = self.shape
        if x.shape != shape:
            raise ValueError(f"x must have the shape of the tensor, {tuple(shape)}, got {tuple(x.shape)}")
        buffers = self._buffers_for(settings, noop_flag, in_graph or torch.compiler.is_compiling())
        if len(shape) == 1:
            x = x.reshape(self._layout_shape())
        if settings.with_amax_reduction:
            amax_reduction.quantize_into(x, buffers, settings, noop_flag, amax, generator, rng_state)
        else:
            ops.quantize_into(x, buffers, settings, noop_flag, amax, generator, rng_state)
        self._set_buffers(buffers)
        self._settings = settings.of_tensor()
        return self

    def _buffers_for(self, settings: Settings, noop_flag: Tensor | None, in_graph: bool) -> ops.Buffers:
        """The buffers to write: those in place, new ones where the settings want others, None where they want none."""
        buffers = self._buffers()
        current = self._current_settings()
        if settings == current or settings.of_tensor().options() == current.options():
            return buffers
        if noop_flag is not None:
            raise ValueError(f"noop_flag: the tensor must have the quantizer's settings, {settings}, got {current}")
        if in_graph:
            raise ValueError(f"a compiled update must keep the settings of the tensor, {current}, got {settings}")
        shapes = settings.native().buffer_shapes(tuple(self._layout_shape()))
        device = self.device
        return tuple(
            _reuse(buffer, shape, dtype, device)
            for buffer, shape, dtype in zip(buffers, shapes, ops.BUFFER_DTYPES, strict=True)
        )

    def __reduce_ex__(self, protocol):
        from . import serialization  # it needs this class

        return serialization.reduce(self)

    def __repr__(self) -> str:
        s = self._settings
        shape = str(tuple(self.shape))
        modes = {
            "rht": s.with_rht,
            "2d": s.with_2d_quantization,
            "stochastic": s.stochastic_rounding,
            "row_scaled": s.row_scaled_nvfp4,
            f"4over6({s.nvfp4_4over6_err_mode}, {s.nvfp4_e4m3_max})": s.nvfp4_use_4over6,
        }
        parts = [
            f"shape={shape if len(shape) <= 80 else shape[:77] + '...'}",
            f"dtype={self.dtype}",
            f"device={self.device}",
            "usage=" + ("+".join(name for name, has in self.get_usages().items() if has) or "none"),
            "mode=" + ("+".join(name for name, on in modes.items() if on) or "1d"),
            f"swizzled={s.optimize_for_gemm}",
        ]
        return f"{type(self).__name__}({', '.join(parts)})"


def fill(y, x, settings: Settings | None, *arguments):
    """`y._fill` as one step of a compiled function too; returns y."""
    if not torch.compiler.is_dynamo_compiling():
        return y._fill(x, settings, *arguments)
    updated = y._fill(x, None if settings is None else settings.plain(), *arguments)
    # Dynamo takes an attribute of an input for an input of its own, which the write to the whole tensor does not reach.
    for name in ops.ATTRIBUTES:
        setattr(y, name, getattr(updated, name))
    return y


def _reuse(buffer: Tensor | None, shape, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    if shape is None:
        return None
    fits = buffer is not None and tuple(buffer.shape) == tuple(shape)
    return buffer if fits else torch.empty(shape, dtype=dtype, device=device)
