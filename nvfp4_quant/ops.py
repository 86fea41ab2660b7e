"""Typed wrappers of the native entry points on plain buffers.

Eager tensors go straight to the native module. Whatever is traced, faked or transformed goes through the operators
`torch.ops.nvfp4_quant.*`, which run the same native code and have fake kernels of the exact shapes.
"""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ._native import _C

BUFFERS = (  # flatten order
    "rowwise_data",
    "rowwise_scale_inv",
    "columnwise_data",
    "columnwise_scale_inv",
    "amax_rowwise",
    "amax_columnwise",
)
ATTRIBUTES = tuple(f"_{name}" for name in BUFFERS)  # of a tensor
ROWWISE = (0, 1, 4)  # positions in BUFFERS
COLUMNWISE = (2, 3, 5)
BUFFER_DTYPES = (torch.uint8,) * 4 + (torch.float32,) * 2
NOMINAL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCK = 2 * _C.columnwise_shape((1, 1))[-1]  # elements that share a scale: one row is padded to one block, two a byte

Buffers = tuple[Tensor | None, ...]  # six, in flatten order

_operators = torch.ops.nvfp4_quant
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_mode_stack_size = torch._C._len_torch_dispatch_stack
_functorch_active = torch._C._are_functorch_transforms_active


def is_eager(x: Tensor) -> bool:
    """Whether x may be handed to the native module: a plain tensor with data, and nothing that watches operators."""
    return not (is_compiling() or type(x) not in _PLAIN or _mode_stack_size() or _functorch_active() or x.is_meta)


def require_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")


def random_arguments(rng_state: tuple[int, int] | None) -> dict[str, int]:
    """`rng_state` as keywords of the operators: unsigned 64-bit numbers in two's complement."""
    if rng_state is None:
        return {}
    arguments = {}
    for name, value in zip(("seed", "offset"), rng_state, strict=True):
        value = int(value)  # a symbolic one cannot be compared with 2^64
        if not 0 <= value < 1 << 64:
            raise ValueError(f"rng_state: {name} must be an unsigned 64-bit number, got {value}")
        arguments[name] = value - (value >> 63 << 64)
    return arguments


def amax_arguments(amax: Tensor | float | None) -> dict[str, Any]:
    """`amax` as a keyword of the operators, which have one for a tensor and one for a number."""
    if amax is None:
        return {}
    return {"amax": amax} if isinstance(amax, Tensor) else {"amax_value": float(amax)}


def in_flatten_order(present: list[Tensor], rowwise: bool, columnwise: bool) -> Buffers:
    """The six buffers from those that an operator returned."""
    if rowwise and columnwise:
        return tuple(present)
    data, scale_inv, amax = present
    return (data, scale_inv, None, None, amax, None) if rowwise else (None, None, data, scale_inv, None, amax)


def quantize(x, settings, amax=None, generator=None, rng_state=None) -> Buffers:
    """Quantizes x into new buffers."""
    if is_eager(x):
        return settings.native().quantize(x, amax, generator, rng_state)
    random = random_arguments(rng_state)
    options = settings.options()
    present = _operators.quantize(x, **options, **amax_arguments(amax), generator=generator, **random)
    return in_flatten_order(present, settings.rowwise, settings.columnwise)


def empty(shape: tuple[int, ...], device: torch.device, settings, pin_memory: bool = False) -> Buffers:
    """Uninitialised buffers for a tensor of `shape`."""
    if not is_compiling() and not _mode_stack_size() and device.type != "meta":
        return settings.native().empty(shape, device, pin_memory)
    like = quantize(torch.empty(shape, device="meta"), settings)  # the shapes, symbolic ones too, of the fake kernel
    return tuple(
        None if b is None else torch.empty(b.shape, dtype=b.dtype, device=device, pin_memory=pin_memory) for b in like
    )


def quantize_into(
    x, buffers: Buffers, settings, noop_flag=None, amax=None, generator=None, rng_state=None, with_amax=True
) -> None:
    """Quantizes x into the given buffers; with_amax=False: their amaxes are there already."""
    if is_eager(x):
        settings.native().quantize_into(x, *buffers, noop_flag, amax, generator, rng_state, with_amax)
        return
    _operators.quantize_(
        x.detach(),
        *buffers,
        **settings.options(),
        noop_flag=noop_flag,
        **amax_arguments(amax),
        generator=generator,
        **random_arguments(rng_state),
        with_amax=with_amax,
    )


def quantizer_amax_into(x, settings, amax_rowwise: Tensor | None, amax_columnwise: Tensor | None) -> None:
    """Writes the amaxes of a quantization of x: of its lines where row-scaled, of the transform with Hadamard."""
    if is_eager(x):
        settings.native().compute_amax_into(x, amax_rowwise, amax_columnwise)
        return
    _operators.quantizer_amax_(
        x,
        amax_rowwise,
        amax_columnwise,
        with_rht=settings.with_rht,
        with_random_sign_mask=settings.with_random_sign_mask,
        row_scaled_nvfp4=settings.row_scaled_nvfp4,
    )


def compute_amax(
    x: Tensor, amax_rowwise: Tensor, amax_columnwise: Tensor | None = None, *, noop_flag: Tensor | None = None
) -> None:
    """Writes max(abs(x)) to `amax_rowwise` and, where given, to `amax_columnwise`.

    x: bf16, fp16 or fp32 of any shape and strides. A NaN is ignored, an infinity kept; an empty x gives 0. The amaxes
    are float32, contiguous, of one element, on x's device, and not the same memory. If `noop_flag` (float32, one
    element) is exactly 1, nothing is written. TypeError: a dtype; ValueError: a size, a device, the same amax twice.
    """
    require_tensor("x", x)
    if is_eager(x):
        _C.compute_amax(x, amax_rowwise, amax_columnwise, noop_flag)
    else:
        _operators.compute_amax(x, amax_rowwise, amax_columnwise, noop_flag=noop_flag)


def dequantize(data, scale_inv, amax, shape, dtype, columnwise, settings) -> Tensor:
    """The values of one direction, in `shape` and `dtype`."""
    if is_eager(data):
        return _C.dequantize(
            data,
            scale_inv,
            amax,
            shape,
            dtype,
            columnwise,
            settings.optimize_for_gemm,
            settings.with_rht,
            settings.with_random_sign_mask,
            settings.nvfp4_e4m3_max,
        )
    return _operators.dequantize(
        data,
        scale_inv,
        amax,
        shape,
        dtype=dtype,
        columnwise=columnwise,
        swizzled=settings.optimize_for_gemm,
        with_rht=settings.with_rht,
        with_random_sign_mask=settings.with_random_sign_mask,
        nvfp4_e4m3_max=settings.nvfp4_e4m3_max,
    )


def swizzle_scales(
    rowwise_scale_inv: Tensor | None, columnwise_scale_inv: Tensor | None, inverse: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """Both scale buffers, or the one there is, in the order of the GEMM (inverse: back from it), in new buffers."""
    given = rowwise_scale_inv if rowwise_scale_inv is not None else columnwise_scale_inv
    if is_eager(given):
        return _C.swizzle_scales(rowwise_scale_inv, columnwise_scale_inv, inverse)
    present = _operators.swizzle_scales(rowwise_scale_inv, columnwise_scale_inv, inverse=inverse)
    if rowwise_scale_inv is not None and columnwise_scale_inv is not None:
        return tuple(present)
    return (present[0], None) if rowwise_scale_inv is not None else (None, present[0])
