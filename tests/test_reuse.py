"""In-place reuse of buffers and tensors, also across quantizers; noop flags; a refused call writes nothing."""

import itertools
import random

import pytest
import torch
from helpers import BUFFERS, USAGES, assert_same_buffers, assert_same_bytes, buffers_of, make_input, reference
from native import (
    MODES,
    RNG_STATE,
    SWIZZLED,
    native_quantizer,
    oracle,
    poisoned_buffers,
    public_quantizer,
    rng_of,
    usage_id,
    usage_options,
)

from nvfp4_quant import NVFP4Quantizer
from nvfp4_quant._native import _C


def update(q, x, y, **keywords):
    return q.update_quantized(x, y, rng_state=RNG_STATE if q.stochastic_rounding else None, **keywords)


def addresses(y) -> dict:
    return {name: t if t is None else t.data_ptr() for name, t in buffers_of(y).items()}


def frozen(y) -> dict:
    return {name: t if t is None else t.clone() for name, t in buffers_of(y).items()}


# ---- buffers


@pytest.mark.parametrize("swizzled", [False, True], ids=["compact", "swizzled"])
@pytest.mark.parametrize("mode", MODES)
def test_every_byte_of_poisoned_buffers_is_written(mode, swizzled, device, schedule):
    for usage, shape in itertools.product(USAGES, ((33, 70), (1, 1), (128, 64), (16, 300), (0, 5), (5, 0))):
        options = MODES[mode] | usage_options(usage) | {"optimize_for_gemm": swizzled}
        x = make_input("bell", shape, torch.bfloat16, device)
        q = native_quantizer(options, schedule)
        buffers = poisoned_buffers(q, shape, device)
        q.quantize_into(x, *buffers, rng_state=rng_of(options))
        assert_same_buffers(buffers, oracle(x, options), f"{shape} {usage}")


def test_buffer_shapes_and_empty_agree_with_the_oracle(device):
    modes = ("plain", "hadamard", "row_scaled")
    for mode, usage, shape in itertools.product(modes, USAGES, ((33, 70), (2, 3, 5), (7,), (0, 5), (5, 0))):
        options = MODES[mode] | usage_options(usage)
        want = oracle(torch.zeros(shape), options)
        q = native_quantizer(options)
        for side in reference.SIDES:
            if want[f"{side}_scale_inv"] is not None:
                assert tuple(_C.scale_shape(shape, side == "columnwise")) == tuple(want[f"{side}_scale_inv"].shape)
        if want["columnwise_data"] is not None:
            assert tuple(_C.columnwise_shape(shape)) == tuple(want["columnwise_data"].shape)
        shapes = dict(zip(BUFFERS, q.buffer_shapes(shape), strict=True))
        for name, t in buffers_of(q.empty(shape, device)).items():
            assert (t is None) == (want[name] is None) == (shapes[name] is None)
            if t is not None:
                assert tuple(t.shape) == tuple(want[name].shape) == tuple(shapes[name])
                assert (t.dtype, t.device.type) == (want[name].dtype, device.type)


def spoiled_buffers(device) -> dict:
    """Ways to spoil the six buffers of a (33, 70) tensor: position, what goes there, the error."""
    wrong = (TypeError, ValueError)
    return {
        "missing": (0, lambda b: None, ValueError),
        "short": (0, lambda b: b[0][:-1], ValueError),
        "flat": (2, lambda b: b[2].reshape(-1), ValueError),
        "not contiguous": (0, lambda b: torch.empty(b[0].t().shape, dtype=torch.uint8, device=device).t(), ValueError),
        "int8 data": (2, lambda b: b[2].view(torch.int8), wrong),
        "float scale": (1, lambda b: b[1].float(), wrong),
        "unpadded scale": (3, lambda b: b[3][:70], ValueError),
        "float64 amax": (4, lambda b: b[4].double(), wrong),
        "amax of two": (5, lambda b: torch.empty(2, device=device), ValueError),
        "one amax twice": (5, lambda b: b[4], ValueError),
        "one scale twice": (3, lambda b: b[1].reshape(-1)[: b[3].numel()].view(b[3].shape), ValueError),
        "on meta": (1, lambda b: b[1].to("meta"), ValueError),
    }


@pytest.mark.parametrize("case", spoiled_buffers("cpu"))
def test_refused_buffers_leave_the_others_as_they_were(case, device):
    position, spoil, error = spoiled_buffers(device)[case]
    q = native_quantizer({})
    x = torch.ones(33, 70, device=device)
    buffers = poisoned_buffers(q, x.shape, device)
    spoiled = list(buffers)
    spoiled[position] = spoil(buffers)
    before = frozen(buffers)
    with pytest.raises(error, match=BUFFERS[position]):
        q.quantize_into(x, *spoiled)
    assert_same_buffers(buffers, before)


def test_input_that_shares_storage_with_a_buffer_is_refused(device):
    q = native_quantizer({"columnwise": False})
    x = torch.ones(1, 1, device=device)
    data, scale, _, _, amax, _ = q.empty((1, 1), device)
    with pytest.raises(ValueError, match="amax_rowwise"):
        q.quantize_into(x, data, scale, None, None, x.view(1), None)
    assert x.item() == 1.0


# ---- one tensor, many inputs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("usage", USAGES, ids=usage_id)
@pytest.mark.parametrize("mode", MODES)
def test_a_maximum_that_falls_reaches_zero_and_rises(mode, usage, dtype, device):
    options = MODES[mode] | usage_options(usage)
    q = public_quantizer(options)
    for shape in ((32, 64), (33, 41)):
        y = q.make_empty(shape, dtype=dtype, device=device)
        where = addresses(y)
        for seed, scale in enumerate((4.0, 0.25, 0.0, 3.0, 100.0)):
            x = scale * make_input("bell", shape, dtype, device, seed)
            assert update(q, x, y) is y
            assert_same_buffers(y, oracle(x, options), f"scale {scale}")
            assert addresses(y) == where


@pytest.mark.parametrize("mode", MODES)
def test_schedules_agree_on_reused_buffers(mode, device, schedule):
    options = MODES[mode]
    q = native_quantizer(options, schedule)
    buffers = poisoned_buffers(q, (33, 41), device)
    for seed, scale in enumerate((4.0, 0.25, 0.0, 3.0)):
        x = scale * make_input("bell", (33, 41), torch.bfloat16, device, seed)
        q.quantize_into(x, *buffers, rng_state=rng_of(options))
        assert_same_buffers(buffers, oracle(x, options), f"scale {scale}")


def test_other_ways_to_write_into_a_tensor(device):
    q = NVFP4Quantizer()
    xs = [make_input("bell", (33, 41), torch.bfloat16, device, seed) for seed in range(3)]
    y = q(xs[0])
    where = addresses(y)
    assert q.quantize(xs[1], out=y) is y
    assert_same_buffers(y, oracle(xs[1], {}))
    assert y.quantize_(xs[2]) is y
    assert_same_buffers(y, oracle(xs[2], {}))
    assert addresses(y) == where


def test_storage_is_reused_too(device):
    q = NVFP4Quantizer(with_rht=True)
    q.internal = True
    y = q(make_input("bell", (33, 41), torch.bfloat16, device))
    x = make_input("bell", (33, 41), torch.bfloat16, device, seed=1)
    assert q.update_quantized(x, y) is y
    assert_same_buffers(y, oracle(x, {"with_rht": True}))


@pytest.mark.parametrize("shape", [(33, 40), (41, 33), (33 * 41,)], ids=str)
def test_input_of_another_shape_is_refused(shape, device):
    q = NVFP4Quantizer()
    y = q(make_input("bell", (33, 41), device=device))
    before = frozen(y)
    for call in (q.update_quantized, lambda x, y: q.quantize(x, out=y), lambda x, y: y.quantize_(x)):
        with pytest.raises(ValueError):
            call(torch.ones(shape, device=device), y)
    assert_same_buffers(y, before)


# ---- one tensor, many quantizers

SETTINGS = ("plain", "2d", "hadamard", "row_scaled", "row_scaled_hadamard", "stochastic", "4over6_256_mse")


def assert_reused(q, options, x, y) -> None:
    """y, filled by q, equals a fresh quantization; buffers of the same shape keep their place."""
    shapes = {name: None if t is None else t.shape for name, t in buffers_of(y).items()}
    where = addresses(y)
    assert update(q, x, y) is y
    assert_same_buffers(y, oracle(x, options), str(options))
    for name, t in buffers_of(y).items():
        if t is not None and t.shape == shapes[name]:
            assert t.data_ptr() == where[name], f"{name} moved"
    assert y._with_gemm_swizzled_scales is options.get("optimize_for_gemm", False)
    assert y._row_scaled_nvfp4 is options.get("row_scaled_nvfp4", False)
    assert y._nvfp4_use_4over6 is options.get("nvfp4_use_4over6", False)
    assert y._nvfp4_e4m3_max == options.get("nvfp4_e4m3_max", 448)
    amaxes = [t for name, t in buffers_of(y).items() if name.startswith("amax") and t is not None]
    assert len({t.untyped_storage().data_ptr() for t in amaxes}) == len(amaxes)
    names = ("with_rht", "with_random_sign_mask", "nvfp4_e4m3_max", "optimize_for_gemm")
    how = {name: options[name] for name in names if name in options}
    want = reference.dequantize(oracle(x, options), x.shape, x.dtype, **how)
    assert_same_bytes(y.dequantize(), want, "dequantized", one_nan=True)


@pytest.mark.parametrize("first, second", list(itertools.permutations(SETTINGS, 2)), ids=str)
def test_filled_by_another_quantizer_and_back(first, second, device):
    shape = (33, 41)
    y = public_quantizer(MODES[first])(make_input("bell", shape, torch.bfloat16, device))
    for seed, mode in enumerate((second, first, second), start=1):
        x = make_input("bell", shape, torch.bfloat16, device, seed)
        assert_reused(public_quantizer(MODES[mode]), MODES[mode], x, y)


@pytest.mark.parametrize("shape", [(33, 41), (2, 16, 32), (1, 70), (1, 1)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_any_sequence_of_quantizers(seed, shape, device):
    r = random.Random(seed)
    y = NVFP4Quantizer()(make_input("bell", shape, torch.bfloat16, device))
    for step in range(20):
        options = MODES[r.choice(list(MODES))] | usage_options(r.choice(USAGES)) | r.choice(({}, SWIZZLED))
        x = make_input(r.choice(("bell", "zero", "outlier", "nan")), shape, torch.bfloat16, device, step)
        assert_reused(public_quantizer(options), options, x, y)


def test_usages_that_change_allocate_and_drop(device):
    q = NVFP4Quantizer()
    y = q(make_input("bell", (33, 41), torch.bfloat16, device))
    for seed, usage in enumerate((*USAGES, *reversed(USAGES))):
        q.set_usage(**usage_options(usage))
        assert_reused(q, usage_options(usage), make_input("bell", (33, 41), torch.bfloat16, device, seed), y)
        assert y.get_usages() == usage_options(usage)


def test_amaxes_that_a_caller_made_one_do_not_stay_wrong(device):
    """Assigned by hand to both sides: refused by name, or made two again; never one wrong amax."""
    q = NVFP4Quantizer(with_rht=True)
    x = make_input("bell", (33, 41), torch.bfloat16, device)
    y = q(x)
    y._amax_columnwise = y._amax_rowwise
    try:
        q.update_quantized(x, y)
    except ValueError as error:
        assert "amax" in str(error)
    else:
        assert_same_buffers(y, oracle(x, {"with_rht": True}))


# ---- noop flag


@pytest.mark.parametrize("mode", MODES)
def test_noop_flag(mode, device):
    for usage, layout in itertools.product(USAGES, ({}, SWIZZLED)):
        options = MODES[mode] | usage_options(usage) | layout
        q = public_quantizer(options)
        xs = [make_input("bell", (33, 41), torch.bfloat16, device, seed) for seed in range(2)]
        y = q.quantize(xs[0], rng_state=rng_of(options))
        assert update(q, xs[1], y, noop_flag=torch.ones(1, device=device)) is y
        assert_same_buffers(y, oracle(xs[0], options), "flag 1")
        assert y._with_gemm_swizzled_scales is bool(layout)
        y.quantize_(xs[1], noop_flag=torch.ones(1, device=device), rng_state=rng_of(options))
        assert_same_buffers(y, oracle(xs[0], options), "quantize_ with flag 1")
        update(q, xs[1], y, noop_flag=torch.zeros(1, device=device))
        assert_same_buffers(y, oracle(xs[1], options), "flag 0")


DIFFERENT = {
    "usage": {"columnwise": False},
    "layout": SWIZZLED,
    "row_scaled": MODES["row_scaled"],
    "hadamard": MODES["hadamard"],
    "2d": MODES["2d"],
    "4over6": MODES["4over6_256"],
}


@pytest.mark.parametrize("flag", [0.0, 1.0])
@pytest.mark.parametrize("difference", DIFFERENT)
def test_noop_flag_needs_a_destination_that_the_quantizer_would_give(difference, flag, device):
    """Nothing could be right if the flag turned out to be 1: the bytes would stay, the meaning would change."""
    x = make_input("bell", (33, 41), torch.bfloat16, device)
    for first, second in (({}, DIFFERENT[difference]), (DIFFERENT[difference], {})):
        y = public_quantizer(first)(x)
        before, layout = frozen(y), y._with_gemm_swizzled_scales
        with pytest.raises(ValueError, match="noop_flag"):
            public_quantizer(second).update_quantized(x, y, noop_flag=torch.full((1,), flag, device=device))
        assert_same_buffers(y, before)
        assert y._with_gemm_swizzled_scales is layout


def test_refused_noop_flags(device):
    q = NVFP4Quantizer()
    x = make_input("bell", (33, 41), torch.bfloat16, device)
    y = q(x)
    for flag, error in (
        (torch.ones(2, device=device), ValueError),
        (torch.ones(1, dtype=torch.float64, device=device), TypeError),
        (torch.ones(1, device="meta"), ValueError),
    ):
        with pytest.raises(error, match="noop_flag"):
            q.update_quantized(x, y, noop_flag=flag)
    assert_same_buffers(y, oracle(x, {}))
