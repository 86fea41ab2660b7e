"""Dequantize from both directions, both layouts, every mode and any bytes; idempotence; what comes back."""

import pytest
import torch
from helpers import (
    DTYPES,
    KINDS,
    USAGES,
    assert_same_bytes,
    dequantize_options,
    golden_cases,
    make_input,
    reference,
)
from native import MODES, RNG_STATE, native_quantizer, public_quantizer

from nvfp4_quant import NVFP4Quantizer, dequantize
from nvfp4_quant._native import _C

FLT_MAX = reference.FLT_MAX


def quantized(x, options: dict):
    """An NVFP4Tensor, with the fixed random bits where the mode is stochastic."""
    q = public_quantizer(options)
    return q.quantize(x, rng_state=RNG_STATE) if options.get("stochastic_rounding") else q(x)


def oracle_values(y, options: dict, dtype: torch.dtype, columnwise: bool | None = None) -> torch.Tensor:
    """What the bytes of y stand for."""
    names = reference.BUFFERS
    buffers = {name: getattr(y, name) if getattr(y, name) is None else getattr(y, name).cpu() for name in names}
    return reference.dequantize(buffers, y.shape, dtype, columnwise=columnwise, **dequantize_options(options))


def native_values(buffers: dict, shape, dtype, columnwise: bool, options: dict) -> torch.Tensor:
    side = "columnwise" if columnwise else "rowwise"
    return _C.dequantize(
        buffers[f"{side}_data"],
        buffers[f"{side}_scale_inv"],
        buffers[f"amax_{side}"],
        tuple(shape),
        dtype,
        columnwise,
        options.get("optimize_for_gemm", False),
        options.get("with_rht", False),
        options.get("with_random_sign_mask", True),
        options.get("nvfp4_e4m3_max", 448),
    )


@pytest.mark.parametrize("case", golden_cases(), ids=lambda case: case["name"])
def test_golden_case(case, device):
    buffers = {name: None if t is None else t.to(device) for name, t in case["expected"].items()}
    for side, want in case["dequantized"].items():
        if want is None:
            continue
        columnwise = side == "columnwise"
        got = native_values(buffers, case["input"].shape, torch.float32, columnwise, case["options"])
        assert_same_bytes(got, want, side, one_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_modes(mode, dtype, device):
    for shape in ((33, 40), (17, 130), (2, 5, 21), (9,), (1, 1)):
        x = make_input("bell", shape, torch.bfloat16, device)
        for rowwise, columnwise in USAGES:
            for optimize_for_gemm in (False, True):
                usage = {"rowwise": rowwise, "columnwise": columnwise, "optimize_for_gemm": optimize_for_gemm}
                y = quantized(x, MODES[mode] | usage)
                want = oracle_values(y, MODES[mode] | usage, dtype)
                got = y.dequantize(dtype=dtype)
                assert (type(got), got.shape, got.device) == (torch.Tensor, x.shape, x.device)
                assert_same_bytes(got, want, str(usage), one_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["plain", "2d", "hadamard", "row_scaled", "row_scaled_hadamard", "4over6_256_mse"])
def test_values(mode, kind, device):
    for dtype in DTYPES:
        for rowwise in (True, False):
            options = MODES[mode] | {"rowwise": rowwise}
            y = quantized(make_input(kind, (37, 50), dtype, device), options)
            for out in DTYPES:
                assert_same_bytes(y.dequantize(dtype=out), oracle_values(y, options, out), f"{out}", one_nan=True)
            assert y.dequantize().dtype == dtype


AMAXES = (0.0, 2.0**-149, 1e-38, 7.9e-36, 0.5, 1.0, 1.0000001, 2688.0, 65504.0, 1e30, FLT_MAX, float("inf"))


@pytest.mark.parametrize("e4m3_max", [448, 256])
@pytest.mark.parametrize("swizzled", [False, True], ids=["compact", "swizzled"])
@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
def test_any_bytes(columnwise, swizzled, e4m3_max, device):
    """All 16 codes under all 256 scale bytes, also those that quantizing never writes."""
    codes = torch.arange(64, dtype=torch.uint8) * 7 % 16  # 4 blocks a line
    data = reference.pack(codes).repeat(256, 1).to(device)
    scale = torch.arange(256, dtype=torch.uint8)[:, None] + torch.arange(4, dtype=torch.uint8)[None] * 7
    side = "columnwise" if columnwise else "rowwise"
    for amax in AMAXES:
        buffers = dict.fromkeys(reference.BUFFERS)
        buffers |= {f"{side}_data": data, f"{side}_scale_inv": scale.to(device)}
        buffers[f"amax_{side}"] = torch.tensor([amax], device=device)
        shape = (64, 256) if columnwise else (256, 64)
        for with_rht in (False, True):
            options = {"with_rht": with_rht, "optimize_for_gemm": swizzled, "nvfp4_e4m3_max": e4m3_max}
            for dtype in DTYPES:
                got = native_values(buffers, shape, dtype, columnwise, options)
                cpu = {name: t if t is None else t.cpu() for name, t in buffers.items()}
                want = reference.dequantize(cpu, shape, dtype, columnwise=columnwise, **options)
                assert_same_bytes(got, want, f"amax {amax}, {options}, {dtype}", one_nan=True)


@pytest.mark.parametrize("mode", ["plain", "hadamard", "row_scaled", "4over6_256"])
def test_subnormals_survive_flush_denormal(mode, device):
    x = 0.02 * make_input("tiny", (600, 256), device=device)
    ys = [quantized(x, MODES[mode] | {other: other == side for other in reference.SIDES}) for side in reference.SIDES]
    want = [oracle_values(y, MODES[mode], torch.float32) for y in ys]
    for w in want:
        assert ((w != 0) & (w.abs() < torch.finfo(w.dtype).smallest_normal)).any()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        got = [y.dequantize() for y in ys]
    finally:
        torch.set_flush_denormal(False)
    for g, w in zip(got, want, strict=True):
        assert_same_bytes(g, w)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (0, 0), (2, 0, 3), (3, 4, 0)], ids=str)
def test_empty(shape, device):
    for rowwise, columnwise in USAGES:
        q = NVFP4Quantizer(rowwise=rowwise, columnwise=columnwise)
        out = q(torch.empty(shape, device=device)).dequantize()
        assert out.shape == shape and out.dtype == torch.float32


@pytest.mark.parametrize("mode", MODES)
def test_values_come_back(mode, device):
    """Four bits keep about a tenth: also through the transform, from both sides."""
    x = make_input("bell", (320, 272), device=device)
    for rowwise, columnwise in ((True, False), (False, True)):
        y = quantized(x, MODES[mode] | {"rowwise": rowwise, "columnwise": columnwise})
        error = (y.dequantize() - x).square().mean().sqrt() / x.square().mean().sqrt()
        assert 0.04 < error < 0.16, f"relative error {error:.3f}"


def test_hadamard_is_undone_exactly_where_codes_are_exact(device):
    """Lines whose transforms are code points under an exact scale come back as they were."""
    y = 6.0 * torch.eye(16) + 3.0 * torch.eye(16).roll(5, 0)
    x = reference.inverse_hadamard(y, reference.RANDOM_SIGN_MASK).t().contiguous().to(device)
    got = NVFP4Quantizer(with_rht=True, rowwise=False)(x).dequantize()
    assert torch.allclose(got, x, rtol=1e-5, atol=0)


def test_nan_stays_in_its_block(device):
    x = make_input("bell", (64, 64), device=device)
    x[20, 37] = float("nan")
    for options, rows, cols in (
        ({"columnwise": False}, slice(20, 21), slice(32, 48)),
        ({"rowwise": False}, slice(16, 32), slice(37, 38)),
        ({"with_2d_quantization": True}, slice(16, 32), slice(32, 48)),
        ({"rowwise": False, "with_rht": True}, slice(16, 32), slice(37, 38)),
    ):
        want = torch.zeros(64, 64, dtype=torch.bool)
        want[rows, cols] = True
        assert_same_bytes(NVFP4Quantizer(**options)(x).dequantize().isnan(), want, str(options))


def test_infinity_is_loud(device):
    x = make_input("inf", (64, 64), device=device)
    for options in ({"columnwise": False}, {"rowwise": False}, {"with_2d_quantization": True}):
        assert not NVFP4Quantizer(**options)(x).dequantize().isfinite().any()


@pytest.mark.parametrize("mode", ["plain", "2d", "row_scaled", "4over6", "4over6_256"])
def test_largest_numbers_stay_finite(mode, device):
    x = torch.full((32, 32), FLT_MAX, device=device)
    x[::3] = -FLT_MAX
    for usage in ({"columnwise": False}, {"rowwise": False}):
        assert public_quantizer(MODES[mode] | usage)(x).dequantize().isfinite().all()


def test_narrow_dtype_rounds_to_infinity(device):
    x = torch.full((16, 16), 1e6, device=device)
    assert (NVFP4Quantizer()(x).dequantize(dtype=torch.float16) == float("inf")).all()


@pytest.mark.parametrize("mode", ["plain", "2d", "hadamard", "row_scaled", "4over6_256"])
def test_function_and_storage(mode, device):
    x = make_input("bell", (33, 40), torch.bfloat16, device)
    q = public_quantizer(MODES[mode])
    want = q(x).dequantize()
    assert_same_bytes(dequantize(q(x)), want, "function")
    assert_same_bytes(dequantize(q(x), dtype=torch.float32), q(x).dequantize(dtype=torch.float32), "function, dtype")
    q.internal = True
    assert_same_bytes(q(x).dequantize(), want, "storage")


# ---- refusals


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.uint8], ids=str)
def test_refused_dtype(dtype, device):
    y = NVFP4Quantizer()(torch.ones(16, 16, device=device))
    with pytest.raises(TypeError, match="dtype"):
        y.dequantize(dtype=dtype)


def test_missing_direction(device):
    q = NVFP4Quantizer(columnwise=False)
    q.internal = True
    y = q(torch.ones(16, 16, device=device))
    y._rowwise_data = None
    with pytest.raises(RuntimeError):
        y.dequantize()


REFUSED = {
    "data of another shape": ("rowwise_data", lambda t: t[:-1], ValueError),
    "data of another dtype": ("rowwise_data", lambda t: t.view(torch.int8), TypeError),
    "scale of another shape": ("rowwise_scale_inv", lambda t: t[:64], ValueError),
    "scale of another dtype": ("rowwise_scale_inv", lambda t: t.float(), TypeError),
    "amax of two": ("amax_rowwise", lambda t: t.repeat(2), ValueError),
    "amax of another dtype": ("amax_rowwise", lambda t: t.double(), TypeError),
    "amax on meta": ("amax_rowwise", lambda t: t.to("meta"), ValueError),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_buffers(case, device):
    name, spoil, error = REFUSED[case]
    buffers = reference.quantize(torch.ones(33, 40))
    buffers = {n: t.to(device) for n, t in buffers.items()}
    buffers[name] = spoil(buffers[name])
    with pytest.raises(error):
        native_values(buffers, (33, 40), torch.float32, False, {})


# ---- idempotence


IDEMPOTENT = ("plain", "2d", "row_scaled")
LOSSLESS_SCALE = 0x08  # the first one that is not subnormal


def kept_blocks(y, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale bytes (lines, blocks) and data (lines, blocks, 8) of a direction."""
    data, scale = getattr(y, f"_{side}_data").cpu(), getattr(y, f"_{side}_scale_inv").cpu()
    blocks = data.unflatten(-1, (-1, 8))
    return scale[: blocks.shape[0], : blocks.shape[1]], blocks


def assert_own_amax_is_near(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Within 2 ulp of float32, or what such a number rounds to in bf16."""
    near = torch.stack([(want.view(torch.int32) + ulps).view(torch.float32) for ulps in range(-2, 3)])
    if dtype == torch.bfloat16:
        near = near.bfloat16().float()
    assert (near == got).any(0).all(), f"amax {want.tolist()} became {got.tolist()}"


@pytest.mark.parametrize("side", reference.SIDES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", IDEMPOTENT)
def test_quantizing_again_changes_nothing(mode, dtype, side, device):
    q = public_quantizer(MODES[mode] | {other: other == side for other in reference.SIDES})
    inputs = [make_input(kind, (130, 272), dtype, device) for kind in ("bell", "wide", "outlier", "huge", "ties")]
    inputs += [make_input("bell", (130, 272), dtype, device) * scale for scale in (1e-29, 1e-20, 1e20, 0.37)]
    for x in inputs:
        y = q(x)
        amax = getattr(y, f"_amax_{side}")
        values = y.dequantize(dtype=dtype)
        again = [q(values)]
        assert_own_amax_is_near(getattr(again[0], f"_amax_{side}").cpu(), amax.cpu(), dtype)
        if mode != "row_scaled":
            again.append(q.quantize(values, amax=amax))
        scale, data = kept_blocks(y, side)
        kept = scale >= LOSSLESS_SCALE
        assert kept.any()
        for z in again:
            scale_again, data_again = kept_blocks(z, side)
            assert_same_bytes(scale_again[kept], scale[kept], "scale")
            assert_same_bytes(data_again[kept], data[kept], "data")


def test_bytes_that_start_anywhere(device):
    """Views of larger buffers, aligned to no word."""
    data, scale, _, _, amax, _ = native_quantizer({"columnwise": False}).quantize(torch.ones(33, 70, device=device))
    odd = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in (data, scale)]
    options = ((33, 70), torch.float32, False, False, False, True, 448)
    assert_same_bytes(_C.dequantize(*odd, amax, *options), _C.dequantize(data, scale, amax, *options))
    assert_same_bytes(_C.swizzle_scales(odd[1], None)[0], _C.swizzle_scales(scale, None)[0])
