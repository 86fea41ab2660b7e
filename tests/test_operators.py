"""The operators `torch.ops.nvfp4_quant.*`: opcheck, fake kernels against real ones, aliasing, agreement with `_C`."""

import pytest
import torch
from helpers import DTYPES, STRIDES, USAGES, assert_same_bytes, make_input, reference, strided
from native import MODES, RNG_STATE, native_quantizer, poisoned_buffers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.library import opcheck

from nvfp4_quant._native import _C

OPERATORS = torch.ops.nvfp4_quant
SHAPES = [(0, 16), (5, 0), (1,), (33,), (1, 1), (16, 16), (17, 33), (130, 24), (2, 3, 40), (2, 0, 5)]
SEED = {"seed": 0x123456789ABCDEF0, "offset": 12}
USAGE_OPTIONS = [{"rowwise": rowwise, "columnwise": columnwise} for rowwise, columnwise in USAGES]


def seed_of(options: dict) -> dict:
    return SEED if options.get("stochastic_rounding") else {}


def of_strides(kind: str, device) -> torch.Tensor:
    return strided(kind, make_input("bell", (17, 33), torch.bfloat16, device))


def check(operator, *arguments, **keywords) -> None:
    """All of opcheck: the schema tells the truth, autograd, the fake kernel, and tracing with symbolic sizes."""
    opcheck(operator.default, arguments, keywords)


def described(tensors) -> list:
    """What a fake kernel must get right."""
    return [(tuple(t.shape), tuple(t.stride()), t.dtype, t.device, t.storage_offset()) for t in tensors]


# ---- opcheck


@pytest.mark.parametrize("mode", MODES)
def test_quantize(mode, device):
    options = MODES[mode]
    x = make_input("bell", (17, 33), torch.bfloat16, device)
    check(OPERATORS.quantize, x, **options, **seed_of(options))
    check(OPERATORS.quantize, x[:, ::2], **options, rowwise=False, optimize_for_gemm=True, **seed_of(options))
    check(OPERATORS.quantize, x.float(), **options, columnwise=False, **seed_of(options))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantize_shapes(shape, device):
    check(OPERATORS.quantize, make_input("bell", shape, torch.float16, device))


@pytest.mark.parametrize("kind", STRIDES)
def test_quantize_strides(kind, device):
    check(OPERATORS.quantize, of_strides(kind, device))


def test_quantize_given_amax(device):
    x = make_input("bell", (17, 33), torch.float32, device)
    check(OPERATORS.quantize, x, amax=torch.full((1,), 2.0, device=device))
    check(OPERATORS.quantize, x, amax_value=2.0)


@pytest.mark.parametrize("mode", MODES)
def test_quantize_into(mode, device):
    options = MODES[mode]
    x = make_input("bell", (17, 33), torch.bfloat16, device)
    flags = (None, torch.zeros(1, device=device), torch.ones(1, device=device))
    for usage, flag in zip(USAGE_OPTIONS, flags, strict=True):
        buffers = poisoned_buffers(native_quantizer(options | usage), x.shape, device)
        check(OPERATORS.quantize_, x, *buffers, **options, **usage, noop_flag=flag, **seed_of(options))
    check(OPERATORS.quantize_, x, *buffers, **options, **usage, with_amax=False, **seed_of(options))


def test_amax(device):
    x = make_input("bell", (17, 33), torch.bfloat16, device)
    one, two, rows, columns = (torch.zeros(n, device=device) for n in (1, 1, 17, 33))
    check(OPERATORS.compute_amax, x, one)
    check(OPERATORS.compute_amax, x.t(), one, two, noop_flag=torch.zeros(1, device=device))
    check(OPERATORS.quantizer_amax_, x, one, two, with_rht=True)
    check(OPERATORS.quantizer_amax_, x, None, two, noop_flag=torch.ones(1, device=device))
    check(OPERATORS.quantizer_amax_, x, rows, columns, row_scaled_nvfp4=True, with_rht=True)


@pytest.mark.parametrize("mode", MODES)
def test_dequantize(mode, device):
    options = MODES[mode]
    x = make_input("bell", (2, 9, 33), torch.bfloat16, device)
    data, scale, t_data, t_scale, amax, t_amax = native_quantizer(options).quantize(x, rng_state=RNG_STATE)
    keywords = {"nvfp4_e4m3_max": options.get("nvfp4_e4m3_max", 448)}
    check(OPERATORS.dequantize, data, scale, amax, x.shape, dtype=torch.bfloat16, **keywords)
    keywords |= {"with_rht": options.get("with_rht", False), "columnwise": True}
    check(OPERATORS.dequantize, t_data, t_scale, t_amax, x.shape, dtype=torch.float32, **keywords)


def test_swizzle(device):
    _, scale, _, t_scale, *_ = native_quantizer({}).quantize(make_input("bell", (130, 24), device=device))
    check(OPERATORS.swizzle_scales, scale, t_scale)
    check(OPERATORS.swizzle_scales, scale, None)
    check(OPERATORS.swizzle_scales, None, t_scale, inverse=True)


# ---- fake kernels


@pytest.mark.parametrize("mode", MODES)
def test_fake_results_are_as_the_real_ones(mode, device):
    for options in (MODES[mode] | usage for usage in USAGE_OPTIONS):
        for shape in SHAPES:
            for dtype in DTYPES:
                x = make_input("zero", shape, dtype, device)
                real = OPERATORS.quantize(x, **options)
                with FakeTensorMode() as fake_mode:
                    fake = OPERATORS.quantize(fake_mode.from_tensor(x), **options)
                assert described(fake) == described(real), (options, shape)


@pytest.mark.parametrize("kind", STRIDES)
def test_fake_results_are_contiguous_for_any_strides(kind, device):
    x = of_strides(kind, device)
    with FakeTensorMode() as mode:
        fake = OPERATORS.quantize(mode.from_tensor(x))
    assert described(fake) == described(OPERATORS.quantize(x))


@pytest.mark.parametrize("row_scaled", [False, True])
def test_fake_results_for_symbolic_sizes(row_scaled, device):
    """One symbolic trace stands for every size: the padding is part of the expressions."""
    x = torch.zeros(6, 7, 40, device=device)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        symbolic = mode.from_tensor(x, static_shapes=False)
        fake = OPERATORS.quantize(symbolic, row_scaled_nvfp4=row_scaled)
        back = OPERATORS.dequantize(fake[0], fake[1], fake[4], symbolic.shape, dtype=torch.float16)
    assert back.shape == symbolic.shape and back.dtype == torch.float16
    sizes = [s.node.expr for s in symbolic.shape]
    for shape in ((2, 3, 17), (5, 26, 129), (6, 7, 40)):
        values = dict(zip(sizes, shape, strict=True))
        real = OPERATORS.quantize(torch.zeros(shape, device=device), row_scaled_nvfp4=row_scaled)
        for a, b in zip(fake, real, strict=True):
            got = tuple(s.node.expr.subs(values) if isinstance(s, torch.SymInt) else s for s in a.shape)
            assert got == tuple(b.shape)


# ---- what comes out


@pytest.mark.parametrize("mode", MODES)
def test_as_the_native_module(mode, device):
    for options in (MODES[mode] | usage for usage in USAGE_OPTIONS):
        x = make_input("bell", (17, 33), torch.bfloat16, device)
        want = [b for b in native_quantizer(options).quantize(x, rng_state=RNG_STATE) if b is not None]
        got = OPERATORS.quantize(x, **options, **SEED)
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            assert_same_bytes(a, b)


def test_seeds_in_two_s_complement(device):
    x = torch.rand(17, 33, device=device)
    options = {"stochastic_rounding": True}
    for seed, offset in ((2**64 - 1, 8), (2**63, 2**64 - 4), (5, 2**63)):
        got = OPERATORS.quantize(x, **options, seed=seed - (seed >> 63 << 64), offset=offset - (offset >> 63 << 64))
        want = reference.quantize(x.cpu(), **options, rng_state=(seed, offset))
        assert_same_bytes(got[0], want["rowwise_data"])


@pytest.mark.parametrize("mode", MODES)
def test_no_result_shares_memory(mode, device):
    x = make_input("bell", (16, 16), torch.float32, device)
    got = OPERATORS.quantize(x, **MODES[mode], **SEED)
    swizzled = OPERATORS.swizzle_scales(got[1], got[3])
    dequantized = OPERATORS.dequantize(got[0], got[1], got[4], x.shape, dtype=torch.float32)
    storages = [t.untyped_storage().data_ptr() for t in (x, *got, *swizzled, dequantized)]
    assert len(set(storages)) == len(storages)


def test_tags(device):
    random = {torch.Tag.nondeterministic_seeded}
    assert random <= set(OPERATORS.quantize.default.tags) and random <= set(OPERATORS.quantize_.default.tags)


def test_errors_come_from_fake_kernels_too(device):
    """With the same exception as real ones, so that a compiled function fails as it would in eager mode."""
    x = make_input("bell", (17, 33), torch.float32, device)
    cases = [
        (ValueError, lambda x: OPERATORS.quantize(x, rowwise=False, columnwise=False)),
        (ValueError, lambda x: OPERATORS.quantize(x, nvfp4_e4m3_max=256)),
        (TypeError, lambda x: OPERATORS.quantize(x.double())),
        (ValueError, lambda x: OPERATORS.quantize(x[0, 0])),
    ]
    for error, call in cases:
        with pytest.raises(error) as real:
            call(x)
        with pytest.raises(error) as fake:
            call(x.to("meta"))
        assert str(real.value).split("\n")[0] == str(fake.value).split("\n")[0]


def test_the_operator_path_needs_no_python_quantizer(device):
    """What torch.export saves runs with the operators alone."""
    x = make_input("bell", (17, 33), torch.float32, device)
    data, scale, amax = OPERATORS.quantize(x, columnwise=False)
    got = OPERATORS.dequantize(data, scale, amax, x.shape, dtype=torch.float32)
    want = _C.dequantize(data, scale, amax, x.shape, torch.float32, False, False, False, True, 448)
    assert_same_bytes(got, want)
