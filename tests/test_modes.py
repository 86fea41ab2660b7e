"""Every mode against the oracle and the golden cases, in every schedule; what is special to each; GPU operations."""

import random

import pytest
import torch
from helpers import (
    DTYPES,
    KINDS,
    STRIDES,
    USAGES,
    assert_same_buffers,
    assert_same_bytes,
    buffers_of,
    golden_cases,
    make_input,
    reference,
    strided,
)
from native import (
    MODES,
    SWIZZLED,
    assert_matches_oracle,
    every_layout,
    native,
    native_quantizer,
    oracle,
    poisoned_buffers,
    public_quantizer,
    rng_of,
)

from nvfp4_quant import swizzle_scales_for_gemm_, unswizzle_scales_
from nvfp4_quant._native import _C


@pytest.mark.parametrize("case", golden_cases(), ids=lambda case: case["name"])
def test_golden_case(case, device, schedule):
    quantizer = native_quantizer(case["options"], schedule)
    got = quantizer.quantize(case["input"].to(device), rng_state=case["rng_state"])
    assert_same_buffers(got, case["expected"])


@pytest.mark.sanitize
@pytest.mark.parametrize("mode", MODES)
def test_small_set(mode, device, schedule):
    """Every kernel once or twice, tails on both sides: what a memory or race checker can bear."""
    options = MODES[mode] | SWIZZLED
    for stride, shape in (("contiguous", (33, 70)), ("column_step", (130, 48))):
        x = strided(stride, make_input("bell", shape, torch.bfloat16, device))
        assert_matches_oracle(x, options, schedule)
        y = public_quantizer(options).quantize(x, rng_state=rng_of(options))
        y.dequantize()
        y.update_usage(rowwise_usage=False)
        y.dequantize()
        unswizzle_scales_(y)
        q = native_quantizer(options, schedule)
        buffers = q.quantize(x, rng_state=rng_of(options))
        q.quantize_into(x, *buffers, noop_flag=torch.ones(1, device=device), rng_state=rng_of(options))
        q.compute_amax_into(x, *buffers[4:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_usages_and_layouts(mode, dtype, device, schedule):
    for shape in ((33, 40), (17, 130), (1, 1)):
        x = make_input("bell", shape, dtype, device)
        for options in every_layout(MODES[mode]):
            assert_matches_oracle(x, options, schedule)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_values(mode, kind, device, schedule):
    for dtype in DTYPES:
        assert_matches_oracle(make_input(kind, (37, 50), dtype, device), MODES[mode], schedule)


@pytest.mark.parametrize("mode", MODES)
def test_shapes(mode, device, schedule):
    shapes = ((272, 144), (16, 530), (530, 16), (128, 64), (129, 65), (1, 300), (300, 1), (77,), (3, 6, 35))
    for shape in shapes:
        assert_matches_oracle(make_input("bell", shape, torch.bfloat16, device), MODES[mode] | SWIZZLED, schedule)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (0, 0), (2, 0, 3), (3, 4, 0)], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_empty_shapes(mode, shape, device, schedule):
    for options in every_layout(MODES[mode]):
        assert_matches_oracle(torch.empty(shape, device=device), options, schedule)


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("mode", MODES)
def test_strides(mode, stride, device, schedule):
    for dtype in (torch.bfloat16, torch.float32):
        x = strided(stride, make_input("bell", (35, 50), dtype, device))
        assert_matches_oracle(x, MODES[mode], schedule)


@pytest.mark.parametrize("seed", range(60))
def test_anything(seed, device, schedule):
    """Shape, strides, dtype, values, mode, usage and layout all drawn at random."""
    r = random.Random(seed)
    shape = tuple(r.choice((1, 3, 16, 17, 31, 48, r.randrange(1, 300))) for _ in range(2))
    x = make_input(r.choice(KINDS), shape, r.choice(DTYPES), device, seed)
    options = r.choice(list(every_layout(MODES[r.choice(list(MODES))])))
    assert_matches_oracle(strided(r.choice(STRIDES), x), options, schedule)


# ---- Hadamard


def test_hadamard_of_zeros_is_positive_zero(device, schedule):
    x = make_input("zero", (40, 33), torch.bfloat16, device)
    got = native(x, {"with_rht": True, "rowwise": False}, schedule)
    assert not got["columnwise_data"].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_hadamard_near_5e37_stays_finite(dtype, device, schedule):
    x = torch.full((32, 16), 5e37, dtype=dtype, device=device) * make_input("bell", (32, 16), dtype, device).sign()
    options = {"with_rht": True}
    got = native(x, options, schedule)
    assert got["amax_columnwise"].isfinite().all() and (got["columnwise_scale_inv"] != 0x7F).all()
    out = reference.dequantize({n: t.cpu() for n, t in got.items()}, x.shape, torch.float32, columnwise=True, **options)
    assert out.isfinite().all()


def test_hadamard_of_a_quarter_of_the_largest_number_is_the_largest(device, schedule):
    x = torch.full((16, 16), reference.FLT_MAX / 4, device=device)
    got = native(x, {"with_rht": True, "with_random_sign_mask": False}, schedule)
    assert_same_bytes(got["amax_columnwise"], torch.tensor([reference.FLT_MAX]))
    assert_same_bytes(got["columnwise_data"][:, 0], torch.full((16,), 0x07, dtype=torch.uint8))


def test_hadamard_amaxes_are_of_x_and_of_its_transform(device, schedule):
    x = torch.zeros(32, 8, device=device)
    x[:16] = 1.0
    got = native(x, {"with_rht": True, "with_random_sign_mask": False}, schedule)
    assert_same_bytes(got["amax_rowwise"], torch.tensor([1.0]))
    assert_same_bytes(got["amax_columnwise"], torch.tensor([4.0]))


# ---- row-scaled


@pytest.mark.parametrize("mode", ["row_scaled", "4over6_row_scaled"])
def test_row_scaled_lines_are_those_quantized_alone(mode, device, schedule):
    x = make_input("wide", (20, 50), torch.bfloat16, device)
    x[3] = 0.0
    alone = {name: value for name, value in MODES[mode].items() if name != "row_scaled_nvfp4"}
    got = native(x, MODES[mode], schedule)
    for lines, side in ((x, "rowwise"), (x.t(), "columnwise")):
        for i, line in enumerate(lines):
            want = native(line.contiguous(), alone, schedule)
            assert_same_bytes(got[f"{side}_data"][i], want["rowwise_data"], f"{side} {i}")
            assert_same_bytes(got[f"{side}_scale_inv"][i], want["rowwise_scale_inv"][0], f"{side} {i}")
            assert_same_bytes(got[f"amax_{side}"][i : i + 1], want["amax_rowwise"], f"{side} {i}")


# ---- swizzled scales


@pytest.mark.parametrize("mode", ["plain", "2d", "hadamard", "row_scaled", "4over6_256"])
def test_swizzling_a_tensor(mode, device):
    x = make_input("bell", (150, 90), torch.bfloat16, device)
    for rowwise, columnwise in USAGES:
        options = MODES[mode] | {"rowwise": rowwise, "columnwise": columnwise}
        y = public_quantizer(options)(x)
        before = buffers_of(y)
        values = y.dequantize()
        swizzle_scales_for_gemm_(y)
        assert y._with_gemm_swizzled_scales is True
        assert_same_buffers(y, oracle(x, options | SWIZZLED))
        assert_same_bytes(y.dequantize(), values)
        assert_same_buffers(before, oracle(x, options), "the buffers from before")
        after = buffers_of(y)
        swizzle_scales_for_gemm_(y)  # no-op
        assert all(t is after[name] for name, t in buffers_of(y).items())
        unswizzle_scales_(y)
        assert y._with_gemm_swizzled_scales is False
        assert_same_buffers(y, oracle(x, options))
        unswizzle_scales_(y)
        assert_same_buffers(y, oracle(x, options))


def test_swizzling_scale_buffers(device):
    """Both directions at once or one alone, into new buffers."""
    g = torch.Generator().manual_seed(0)
    for shapes in (((128, 4), (256, 12)), ((384, 8), (128, 0)), ((0, 4), (0, 0))):
        scales = [torch.randint(0, 256, shape, dtype=torch.uint8, generator=g).to(device) for shape in shapes]
        before = [scale.clone() for scale in scales]
        for given in (scales, (scales[0], None), (None, scales[1])):
            there = _C.swizzle_scales(*given)
            back = _C.swizzle_scales(*there, True)
            for scale, swizzled, compact in zip(given, there, back, strict=True):
                assert_same_bytes(swizzled, None if scale is None else reference.swizzle(scale.cpu()), "swizzled")
                assert_same_bytes(compact, scale, "and back")
        for scale, copy in zip(scales, before, strict=True):
            assert_same_bytes(scale, copy, "the source")


@pytest.mark.parametrize("spoil", [lambda t: t[:64], lambda t: t[:, :3], lambda t: t.int(), lambda t: t[0]])
def test_refused_scale_buffers(spoil, device):
    scale = torch.zeros(128, 4, dtype=torch.uint8, device=device)
    with pytest.raises((TypeError, ValueError), match="columnwise_scale_inv"):
        _C.swizzle_scales(scale, spoil(scale))


# ---- in parts: an amax from elsewhere, noop flag


@pytest.mark.parametrize("mode", MODES)
def test_amax_and_cast_in_two_calls(mode, device, schedule):
    x = make_input("bell", (33, 70), torch.bfloat16, device)
    q = native_quantizer(MODES[mode], schedule)
    buffers = poisoned_buffers(q, x.shape, device)
    q.compute_amax_into(x, *buffers[4:])
    want = oracle(x, MODES[mode])
    for side, amax in zip(reference.SIDES, buffers[4:], strict=True):
        assert_same_bytes(amax, want[f"amax_{side}"], side)
    q.quantize_into(x, *buffers, rng_state=rng_of(MODES[mode]), with_amax=False)
    assert_same_buffers(buffers, want)


@pytest.mark.parametrize("mode", [mode for mode in MODES if "hadamard" not in mode and "row_scaled" not in mode])
def test_given_amax(mode, device, schedule):
    x = make_input("bell", (33, 70), torch.bfloat16, device)
    for options in (MODES[mode], MODES[mode] | SWIZZLED):
        for amax in (0.5, 100.0):
            assert_matches_oracle(x, options, schedule, amax=torch.tensor([amax], device=device))
            assert_matches_oracle(x, options, schedule, amax=amax)


@pytest.mark.parametrize("mode", MODES)
def test_noop_flag(mode, device, schedule):
    x = make_input("bell", (33, 70), torch.bfloat16, device)
    for options in every_layout(MODES[mode]):
        q = native_quantizer(options, schedule)
        buffers = poisoned_buffers(q, x.shape, device)
        before = {name: t if t is None else t.clone() for name, t in buffers_of(buffers).items()}
        q.quantize_into(x, *buffers, noop_flag=torch.ones(1, device=device), rng_state=rng_of(options))
        assert_same_buffers(buffers, before, "flag 1")
        q.quantize_into(x, *buffers, noop_flag=torch.full((), 0.5, device=device), rng_state=rng_of(options))
        assert_same_buffers(buffers, oracle(x, options), "flag 0.5")


def test_noop_flag_with_given_amax(device, schedule):
    x = make_input("bell", (33, 70), torch.bfloat16, device)
    q = native_quantizer({}, schedule)
    for amax in (2.0, torch.tensor([2.0], device=device)):
        buffers = poisoned_buffers(q, x.shape, device)
        before = {name: t.clone() for name, t in buffers_of(buffers).items()}
        q.quantize_into(x, *buffers, noop_flag=torch.ones(1, device=device), amax=amax)
        assert_same_buffers(buffers, before, "flag 1")
        q.quantize_into(x, *buffers, noop_flag=torch.zeros(1, device=device), amax=amax)
        assert_same_buffers(buffers, oracle(x, {}, amax=2.0), "flag 0")
