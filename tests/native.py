"""The native library beside the oracle: every mode of the contract, and how to run both."""

import itertools
import time

import torch
from helpers import USAGES, assert_same_buffers, buffers_of, reference
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from nvfp4_quant import NVFP4Quantizer
from nvfp4_quant._native import _C

RNG_STATE = (0x123456789ABCDEF0, 12)

_RHT = {"with_rht": True}
_2D = {"with_2d_quantization": True}
_SR = {"stochastic_rounding": True}
_ROW = {"row_scaled_nvfp4": True}
_4OVER6 = {"nvfp4_use_4over6": True}
_256 = {"nvfp4_e4m3_max": 256}
_MSE = {"nvfp4_4over6_err_mode": "MSE"}
MODES = {
    "plain": {},
    "2d": _2D,
    "hadamard": _RHT,
    "hadamard_no_signs": _RHT | {"with_random_sign_mask": False},
    "hadamard_2d": _RHT | _2D,
    "row_scaled": _ROW,
    "row_scaled_hadamard": _ROW | _RHT,
    "stochastic": _SR,
    "stochastic_2d": _SR | _2D,
    "stochastic_hadamard": _SR | _RHT,
    "stochastic_hadamard_2d": _SR | _RHT | _2D,
    "stochastic_row_scaled": _SR | _ROW,
    "stochastic_row_scaled_hadamard": _SR | _ROW | _RHT,
    "4over6": _4OVER6,
    "4over6_mse": _4OVER6 | _MSE,
    "4over6_256": _4OVER6 | _256,
    "4over6_256_mse": _4OVER6 | _256 | _MSE,
    "4over6_2d": _4OVER6 | _2D,
    "4over6_2d_256_mse": _4OVER6 | _2D | _256 | _MSE,
    "4over6_row_scaled": _4OVER6 | _ROW,
    "4over6_row_scaled_256_mse": _4OVER6 | _ROW | _256 | _MSE,
}


SWIZZLED = {"optimize_for_gemm": True}


def usage_options(usage: tuple[bool, bool]) -> dict:
    return {"rowwise": usage[0], "columnwise": usage[1]}


def usage_id(usage: tuple[bool, bool]) -> str:
    return "+".join(name for name, wanted in zip(("row", "column"), usage, strict=True) if wanted)


def every_layout(options: dict):
    """The options with each usage, compact and swizzled."""
    for usage, swizzled in itertools.product(USAGES, (False, True)):
        yield options | usage_options(usage) | {"optimize_for_gemm": swizzled}


def rng_of(options: dict) -> tuple[int, int] | None:
    return RNG_STATE if options.get("stochastic_rounding") else None


def oracle(x: torch.Tensor, options: dict, amax=None) -> dict:
    """What the contract wants, computed on the CPU from the values of x."""
    what = {name: value for name, value in options.items() if name != "schedule"}  # which changes no bit
    return reference.quantize(x.cpu(), amax=amax, rng_state=rng_of(options), **what)


def native_quantizer(options: dict, schedule: str = "auto"):
    return _C.NVFP4Quantizer(**options, schedule=schedule)


def native(x: torch.Tensor, options: dict, schedule: str = "auto", amax=None) -> dict:
    """What the library computes, by name of the buffer."""
    return buffers_of(native_quantizer(options, schedule).quantize(x, amax=amax, rng_state=rng_of(options)))


def assert_matches_oracle(x: torch.Tensor, options: dict, schedule: str = "auto", amax=None) -> None:
    assert_same_buffers(native(x, options, schedule, amax), oracle(x, options, amax), str(options))


def public_quantizer(options: dict):
    """NVFP4Quantizer of the same options; `optimize_for_gemm` is an attribute there."""
    options = dict(options)
    optimize_for_gemm = options.pop("optimize_for_gemm", False)
    quantizer = NVFP4Quantizer(**options)
    quantizer.optimize_for_gemm = optimize_for_gemm
    return quantizer


def poisoned_buffers(quantizer, shape, device) -> tuple:
    """Buffers of a native quantizer for an input of `shape`, full of bytes that nothing would write."""
    buffers = quantizer.empty(tuple(shape), device)
    for t in buffers:
        if t is not None:
            t.view(torch.uint8).fill_(0xA5)
    return buffers


def gpu_operations(*calls) -> list[list[str]]:
    """Names of the GPU operations (kernels, copies, memsets) of each call, in order; all calls are made twice."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for i, call in enumerate(calls):
            with record_function(f"call {i}"):
                time.sleep(1e-3)  # host and device clocks differ a little
                call()
                torch.cuda.synchronize()
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    on_gpu = [e for e in events if e.device_type == DeviceType.CUDA and not e.name.startswith("call ")]
    ranges = [e.time_range for e in events if e.device_type == DeviceType.CPU and e.name.startswith("call ")]
    return [[e.name for e in on_gpu if span.start <= e.time_range.start < span.end] for span in ranges]
