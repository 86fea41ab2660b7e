"""NVFP4Quantizer: options, and the calls that quantize with them."""

import torch
from torch import Tensor, is_grad_enabled

from . import amax_reduction, ops
from ._native import _C
from .dtype import DType
from .settings import Settings
from .storage import NVFP4TensorStorage, fill
from .tensor import NVFP4Tensor


class _Option:
    """An attribute that is an option. Not a property: torch 2.11's Dynamo passes a property's setter by."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, quantizer, owner=None):
        return self if quantizer is None else getattr(quantizer._settings, self.name)

    def __set__(self, quantizer, value):
        quantizer._change(**{self.name: value})


class NVFP4Quantizer:
    """Quantizes tensors to NVFP4: E2M1 codes, an E4M3 scale for each block of 16, one float32 amax.

    rowwise, columnwise: which directions to make.
    with_rht: random Hadamard transform on the column-wise side, with_random_sign_mask: with its fixed signs;
        with_post_rht_amax has no effect, that amax is always the one after the transform.
    with_2d_quantization: one scale for each 16x16 tile. row_scaled_nvfp4: an amax for each line.
    stochastic_rounding: unbiased rounding of the codes.
    nvfp4_use_4over6: scale each block to 4 or to 6, whichever errs less by nvfp4_4over6_err_mode ("MAE" or "MSE"),
        under a bound of the scales, nvfp4_e4m3_max, of 448 or 256.
    with_amax_reduction: the amax is the maximum over amax_reduction_group (None: all processes).
    schedule: how a GPU works, which changes no bit: "fused", one operation; "split", zero, amax and cast; "auto", one
        where x fits on the chip.
    As attributes only: optimize_for_gemm (write the scales in the order of the GEMM), internal (make
        NVFP4TensorStorage instead of NVFP4Tensor).

    Every option is an attribute. TypeError, ValueError: an option, or options that exclude each other.
    """

    def __init__(
        self,
        fp4_dtype: DType = DType.kFloat4E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group=None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        with_random_sign_mask: bool = True,
        schedule: str = "auto",
    ):
        self._apply(
            Settings(
                fp4_dtype=fp4_dtype,
                rowwise=rowwise,
                columnwise=columnwise,
                with_amax_reduction=with_amax_reduction,
                amax_reduction_group=amax_reduction_group,
                with_rht=with_rht,
                with_post_rht_amax=with_post_rht_amax,
                with_2d_quantization=with_2d_quantization,
                stochastic_rounding=stochastic_rounding,
                row_scaled_nvfp4=row_scaled_nvfp4,
                nvfp4_use_4over6=nvfp4_use_4over6,
                nvfp4_e4m3_max=nvfp4_e4m3_max,
                nvfp4_4over6_err_mode=nvfp4_4over6_err_mode,
                with_random_sign_mask=with_random_sign_mask,
                schedule=schedule,
            )
        )

    dtype = _Option("fp4_dtype")
    fp4_dtype = _Option("fp4_dtype")
    rowwise_usage = _Option("rowwise")
    columnwise_usage = _Option("columnwise")
    rowwise = _Option("rowwise")
    columnwise = _Option("columnwise")
    with_amax_reduction = _Option("with_amax_reduction")
    amax_reduction_group = _Option("amax_reduction_group")
    with_rht = _Option("with_rht")
    with_post_rht_amax = _Option("with_post_rht_amax")
    with_2d_quantization = _Option("with_2d_quantization")
    stochastic_rounding = _Option("stochastic_rounding")
    row_scaled_nvfp4 = _Option("row_scaled_nvfp4")
    nvfp4_use_4over6 = _Option("nvfp4_use_4over6")
    nvfp4_e4m3_max = _Option("nvfp4_e4m3_max")
    nvfp4_4over6_err_mode = _Option("nvfp4_4over6_err_mode")
    with_random_sign_mask = _Option("with_random_sign_mask")
    optimize_for_gemm = _Option("optimize_for_gemm")
    schedule = _Option("schedule")
    internal = _Option("internal")

    @classmethod
    def _from_settings(cls, settings: Settings) -> "NVFP4Quantizer":
        quantizer = cls()
        quantizer._apply(settings)
        return quantizer

    def _change(self, **options) -> None:
        self._apply(self._settings._replace(**options))

    def _apply(self, settings: Settings) -> None:
        # Dynamo cannot look into the native check; there the operators make it.
        compiling = torch.compiler.is_compiling()
        self._settings = settings = settings if compiling else settings.check()
        # The native quantizer, where a call is no more than it and the tensor around its buffers.
        self._direct = None if compiling or settings.internal or settings.with_amax_reduction else settings.native()
        self._of_tensor = settings.of_tensor()

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Chooses the directions to make; None leaves one as it is. ValueError if options then exclude each other."""
        usages = {"rowwise": rowwise, "columnwise": columnwise}
        self._change(**{name: usage for name, usage in usages.items() if usage is not None})

    def get_usages(self) -> dict[str, bool]:
        """Which directions are made: {"rowwise": bool, "columnwise": bool}."""
        return {"rowwise": self._settings.rowwise, "columnwise": self._settings.columnwise}

    def copy(self) -> "NVFP4Quantizer":
        """A quantizer of the same options, to be changed on its own."""
        return NVFP4Quantizer._from_settings(self._settings)

    def quantize(
        self, x: Tensor, *, out=None, dtype: torch.dtype | None = None, amax=None, generator=None, rng_state=None
    ) -> NVFP4Tensor:
        """Quantizes x: bf16, fp16 or fp32, at least 1-D, any shape and strides, on a CPU or CUDA device.

        out: a quantized tensor to write into and return. dtype: the nominal dtype of the result (default: x's).
        amax: one float32 element on x's device, or a number, used instead of the maximum. generator, or
        rng_state=(seed, offset), unsigned 64-bit: the source of the random bits of stochastic rounding.
        The gradient passes straight through.
        TypeError: x is quantized, or a dtype; ValueError: a shape, size, device or option.
        """
        if ops.is_eager(x) and self._direct and out is dtype is None and not (x.requires_grad and is_grad_enabled()):
            buffers = self._direct.quantize(x, amax, generator, rng_state)
            return NVFP4Tensor._wrap(buffers, self._of_tensor, x.shape, x.dtype, x.device)
        _require_plain("x", x)
        if out is not None:
            if dtype is not None and dtype != out.dtype:
                raise ValueError(f"dtype={dtype}: out has the nominal dtype {out.dtype}")
            return self._fill(x, out, None, amax, generator, rng_state)
        if dtype is None:
            dtype = x.dtype
        elif dtype not in ops.NOMINAL_DTYPES:
            raise TypeError(f"dtype must be one of {ops.NOMINAL_DTYPES}, got {dtype}")
        if torch.compiler.is_dynamo_compiling() and not self._settings.internal:
            return _quantize_traced(x, self._settings, dtype, amax, generator, rng_state)
        return _quantize(x, self._settings, dtype, amax, generator, rng_state)

    def __call__(self, x: Tensor) -> NVFP4Tensor:
        """`quantize(x)`."""
        return self.quantize(x)

    def update_quantized(self, src: Tensor, dst, *, noop_flag: Tensor | None = None, generator=None, rng_state=None):
        """Quantizes src into dst, a quantized tensor of its shape, and returns dst.

        Buffers that stay keep their memory; those of a new usage are allocated, those no longer wanted dropped. With a
        noop_flag (float32, one element on src's device) of exactly 1 nothing is written; dst must then have this
        quantizer's settings already (ValueError). Errors as for `quantize`.
        In a compiled function dst must have them in any case.
        """
        _require_plain("src", src)
        return self._fill(src, dst, noop_flag, None, generator, rng_state)

    def _fill(self, x, dst, noop_flag, amax, generator, rng_state):
        if not isinstance(dst, NVFP4TensorStorage):
            raise TypeError(f"the destination must be an NVFP4Tensor or NVFP4TensorStorage, got {type(dst).__name__}")
        return fill(dst, x, self._settings, noop_flag, amax, generator, rng_state)

    def make_empty(
        self,
        shape,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ):
        """A quantized tensor of `shape` and nominal `dtype` whose buffers hold anything, to be written by an update.

        device: None is the current CUDA device if there is one, else the CPU.
        """
        if dtype not in ops.NOMINAL_DTYPES:
            raise TypeError(f"dtype must be one of {ops.NOMINAL_DTYPES}, got {dtype}")
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        device, shape = torch.device(device), tuple(shape)
        if torch.compiler.is_dynamo_compiling():
            x = torch.empty(shape, dtype=dtype, device=device, pin_memory=pin_memory, requires_grad=requires_grad)
            return _quantize_traced(x, self._settings.of_tensor(), dtype)
        buffers = ops.empty(shape, device, self._settings, pin_memory)
        y = _wrap(buffers, self._settings, shape, dtype, device)
        return y.requires_grad_() if requires_grad else y

    def is_quantizable(self, x: Tensor) -> bool:
        """Whether x is of a kind that `quantize` takes: a tensor of at least one dimension in bf16, fp16 or fp32."""
        plain = isinstance(x, Tensor) and not isinstance(x, NVFP4TensorStorage)
        return plain and x.dim() > 0 and x.dtype in ops.NOMINAL_DTYPES

    def get_scale_shape(self, shape, columnwise: bool) -> tuple[int, int]:
        """The shape of the (padded) scale buffer of a direction for a tensor of `shape`."""
        return _C.scale_shape(tuple(shape), columnwise)

    def get_columnwise_shape(self, shape) -> tuple[int, int]:
        """The shape of the column-wise data for a tensor of `shape`: (K, Mp/2)."""
        return _C.columnwise_shape(tuple(shape))

    def __reduce__(self):
        return NVFP4Quantizer._from_settings, (self._settings,)

    def __deepcopy__(self, memo) -> "NVFP4Quantizer":
        return self.copy()  # of all options only the process group is an object, and it cannot be copied

    def __repr__(self) -> str:
        changed = [
            f"{name}={value!r}"
            for name, value in self._settings._asdict().items()
            if value != Settings._field_defaults[name]
        ]
        return f"NVFP4Quantizer({', '.join(changed)})"


def _require_plain(name: str, x) -> None:
    if isinstance(x, NVFP4TensorStorage):
        raise TypeError(f"{name} is quantized already; use `quantize_` of the destination, or dequantize it")
    ops.require_tensor(name, x)


def _quantize(x, settings, dtype, amax=None, generator=None, rng_state=None):
    """The quantized x, through which the gradient passes straight."""
    if x.requires_grad and is_grad_enabled() and not settings.internal:
        return _Quantize.apply(x, settings, dtype, amax, generator, rng_state)
    return _quantize_detached(x, settings, dtype, amax, generator, rng_state)


def _quantize_detached(x, settings, dtype, amax, generator, rng_state):
    if settings.with_amax_reduction:
        buffers = amax_reduction.quantize(x, settings, amax, generator, rng_state)
    else:
        buffers = ops.quantize(x, settings, amax, generator, rng_state)
    return _wrap(buffers, settings, x.shape, dtype, x.device)


def _quantize_traced(x, settings, dtype, amax=None, generator=None, rng_state=None):
    _allow_in_graph()
    return _quantize_in_graph(x, settings.plain(), dtype, amax, generator, rng_state)


def _quantize_in_graph(x, settings, dtype, amax, generator, rng_state):
    return _quantize(x, Settings.from_plain(settings), dtype, amax, generator, rng_state)


def _allow_in_graph() -> bool:
    """Lets torch.compile keep `_quantize_in_graph` as one call, which AOTAutograd then looks into.

    Dynamo cannot trace the making of a tensor subclass. It runs this function, marked as constant, when it meets it;
    at import the same would load the whole compiler.
    """
    torch.compiler.allow_in_graph(_quantize_in_graph)
    return True


_allow_in_graph._dynamo_marked_constant = True  # what torch.compiler.assume_constant_result does


def _wrap(buffers, settings, shape, dtype, device):
    cls = NVFP4TensorStorage if settings.internal else NVFP4Tensor
    return cls._wrap(buffers, settings.of_tensor(), shape, dtype, device)


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, settings, dtype, amax, generator, rng_state):
        return _quantize_detached(x, settings, dtype, amax, generator, rng_state)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None, None, None, None
