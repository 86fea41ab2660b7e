"""Quantized tensors of every mode, and what tests of the tensor class compare."""

import torch
from helpers import BUFFERS, assert_same_bytes, make_input

from nvfp4_quant import NVFP4Quantizer, NVFP4Tensor

MODES = {
    "1d": {},
    "rowwise": {"columnwise": False},
    "columnwise": {"rowwise": False},
    "2d": {"with_2d_quantization": True},
    "2d_rowwise": {"with_2d_quantization": True, "columnwise": False},
    "rht": {"with_rht": True},
    "rht_columnwise": {"with_rht": True, "rowwise": False, "with_random_sign_mask": False},
    "stochastic": {"stochastic_rounding": True},
    "row_scaled": {"row_scaled_nvfp4": True},
    "row_scaled_rowwise": {"row_scaled_nvfp4": True, "columnwise": False},
    "4over6": {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256, "nvfp4_4over6_err_mode": "MSE"},
    "swizzled": {"optimize_for_gemm": True},
}


def make_quantizer(mode: str = "1d", **options) -> NVFP4Quantizer:
    options = {**MODES[mode], **options}
    swizzled = options.pop("optimize_for_gemm", False)
    quantizer = NVFP4Quantizer(**options)
    quantizer.optimize_for_gemm = swizzled
    return quantizer


def make_tensor(mode="1d", shape=(48, 80), dtype=torch.bfloat16, device="cpu", *, seed=0, kind="wide") -> NVFP4Tensor:
    return make_quantizer(mode)(make_input(kind, shape, dtype, device, seed))


def buffers(y) -> list:
    return [getattr(y, f"_{name}") for name in BUFFERS]


def addresses(y) -> list:
    return [None if b is None else b.data_ptr() for b in buffers(y)]


def assert_same_tensor(got, want, *, dtype=None, device=None) -> None:
    """Class, shape, dtype, device, mode and every byte."""
    assert type(got) is type(want), f"got {type(got)}, want {type(want)}"
    assert got.shape == want.shape and got.dtype == (dtype or want.dtype)
    assert got.device == torch.device(device or want.device)
    assert got._quantizer._settings == want._quantizer._settings
    for name, a, b in zip(BUFFERS, buffers(got), buffers(want), strict=True):
        assert_same_bytes(a, b, name)


def assert_apart(a, b) -> None:
    """No buffer of one is a buffer of the other."""
    shared = {p for p in addresses(a) if p} & {p for p in addresses(b) if p}
    assert not shared, f"{len(shared)} buffers are shared"


def one_side(y: NVFP4Tensor, side: str) -> torch.Tensor | None:
    """What y holds in one direction, as float32 values."""
    if getattr(y, f"_{side}_data") is None:
        return None
    only = y.clone()
    only.update_usage(rowwise_usage=side == "rowwise", columnwise_usage=side == "columnwise")
    return only.dequantize(dtype=torch.float32)
