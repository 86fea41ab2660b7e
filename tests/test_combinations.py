"""Every combination of options and usages on small odd shapes: it equals the oracle, or it is one of the refusals."""

import itertools

import pytest
import torch
from helpers import USAGES, assert_same_buffers, assert_same_bytes, dequantize_options, make_input, reference
from native import RNG_STATE, assert_matches_oracle, native_quantizer, oracle, public_quantizer

from nvfp4_quant import DType, NVFP4Quantizer
from nvfp4_quant._native import _C

SHAPE = (17, 33)

# Every value of every option that decides which bytes come out.
OPTIONS = {
    "with_rht": (False, True),
    "with_random_sign_mask": (True, False),
    "with_2d_quantization": (False, True),
    "stochastic_rounding": (False, True),
    "row_scaled_nvfp4": (False, True),
    "nvfp4_use_4over6": (False, True),
    "nvfp4_e4m3_max": (448, 256),
    "nvfp4_4over6_err_mode": ("MAE", "MSE"),
    "optimize_for_gemm": (False, True),
}

# The refusals of the contract: a combination that contains one of these is a ValueError. Nothing else is.
REFUSED = (
    {"row_scaled_nvfp4": True, "with_2d_quantization": True},
    {"nvfp4_use_4over6": True, "with_rht": True},
    {"nvfp4_use_4over6": True, "stochastic_rounding": True},
    {"nvfp4_use_4over6": False, "nvfp4_e4m3_max": 256},
)


def is_refused(options: dict) -> bool:
    return any(all(options[name] == value for name, value in refusal.items()) for refusal in REFUSED)


def all_combinations():
    for values in itertools.product(*OPTIONS.values()):
        yield dict(zip(OPTIONS, values, strict=True))


def make(options: dict, schedule: str):
    """Both constructors; the native one takes the schedule."""
    public = public_quantizer(options)
    return public, native_quantizer(options, schedule)


@pytest.mark.parametrize("usage", USAGES, ids=str)
def test_all_combinations(usage, device, schedule):
    x = make_input("bell", SHAPE, torch.bfloat16, device)
    equal = refused = 0
    for options in all_combinations():
        options |= {"rowwise": usage[0], "columnwise": usage[1]}
        if is_refused(options):
            with pytest.raises(ValueError):
                native_quantizer(options, schedule)
            with pytest.raises(ValueError):
                public_quantizer(options)
            refused += 1
            continue
        q, native = make(options, schedule)
        want = oracle(x, options)
        rng_state = RNG_STATE if options["stochastic_rounding"] else None
        y = q.quantize(x, rng_state=rng_state)
        assert_same_buffers(y, want, str(options))
        assert_same_buffers(native.quantize(x, rng_state=rng_state), want, str(options))
        values = reference.dequantize(want, SHAPE, x.dtype, **dequantize_options(options))
        assert_same_bytes(y.dequantize(), values, f"dequantized {options}", one_nan=True)
        equal += 1
    # 2-D and row-scaled: 3 of 4 choices; 32 of the others without 4over6, 16 with it
    assert (equal, refused) == (144, 368)


@pytest.mark.parametrize("kind", ["nan", "inf", "zero", "least", "outlier", "huge"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_all_pairs_on_hard_values(dtype, kind, device, schedule):
    """All pairs of options away from their defaults."""
    x = make_input(kind, SHAPE, dtype, device)
    defaults = {name: values[0] for name, values in OPTIONS.items()}
    others = [{name: values[1]} for name, values in OPTIONS.items()]
    for a, b in itertools.combinations_with_replacement(others, 2):
        options = defaults | a | b
        if not is_refused(options):
            assert_matches_oracle(x, options, schedule)


@pytest.mark.parametrize("refusal", REFUSED, ids=str)
def test_refusal_names_the_option(refusal, device):
    defaults = {name: values[0] for name, values in OPTIONS.items() if name != "optimize_for_gemm"}
    for constructor in (NVFP4Quantizer, _C.NVFP4Quantizer):
        with pytest.raises(ValueError) as error:
            constructor(**defaults | refusal)
        assert any(name in str(error.value) for name in refusal), error.value


OTHER_REFUSALS = {
    "reduction of row-scaled": ({"row_scaled_nvfp4": True, "with_amax_reduction": True}, ValueError),
    "bound that is neither 448 nor 256": ({"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 100}, ValueError),
    "unknown error mode": ({"nvfp4_use_4over6": True, "nvfp4_4over6_err_mode": "MAX"}, ValueError),
    "error mode that is no text": ({"nvfp4_use_4over6": True, "nvfp4_4over6_err_mode": 3}, TypeError),
    "flag that is no bool": ({"with_rht": "yes"}, TypeError),
    "bound that is no number": ({"nvfp4_e4m3_max": "448"}, TypeError),
}


@pytest.mark.parametrize("case", OTHER_REFUSALS)
def test_other_refusals(case, device):
    options, error = OTHER_REFUSALS[case]
    with pytest.raises(error, match="|".join(options)):
        NVFP4Quantizer(**options)


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype != DType.kFloat4E2M1], ids=str)
def test_other_element_types_are_refused_by_name(dtype, device):
    with pytest.raises((TypeError, ValueError), match=dtype.name):
        NVFP4Quantizer(fp4_dtype=dtype)


def test_unknown_options_are_refused(device):
    with pytest.raises(TypeError):
        NVFP4Quantizer(with_hadamard=True)
    with pytest.raises(ValueError, match="schedule"):
        _C.NVFP4Quantizer(schedule="fast")


def test_error_mode_in_any_case(device):
    x = make_input("bell", SHAPE, device=device)
    want = oracle(x, {"nvfp4_use_4over6": True, "nvfp4_4over6_err_mode": "MSE"})
    for mode in ("mse", "MSE", "Mse"):
        assert_same_buffers(NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_4over6_err_mode=mode)(x), want)


def test_post_hadamard_amax_changes_nothing(device):
    x = make_input("bell", SHAPE, device=device)
    for rht in (False, True):
        q = NVFP4Quantizer(with_rht=rht, with_post_rht_amax=True)
        assert_same_buffers(q(x), oracle(x, {"with_rht": rht}))


@pytest.mark.parametrize("refusal", REFUSED, ids=str)
def test_changed_attributes_are_checked_again(refusal, device):
    """Refused when the last option is set; the quantizer stays as it was before that."""
    (first, first_value), (last, last_value) = refusal.items()
    if first == "nvfp4_use_4over6" and first_value is False:
        (first, first_value), (last, last_value) = (last, last_value), (first, first_value)
    q = NVFP4Quantizer(nvfp4_use_4over6=first == "nvfp4_e4m3_max")
    setattr(q, first, first_value)
    with pytest.raises(ValueError):
        setattr(q, last, last_value)
    assert getattr(q, first) == first_value and getattr(q, last) != last_value
    x = make_input("bell", SHAPE, device=device)
    assert q(x).shape == x.shape


def test_native_quantizers_compare_by_their_options(device):
    for options in ({}, {"with_rht": True}, {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256}):
        a, b = (_C.NVFP4Quantizer(**options) for _ in range(2))
        assert a == b and hash(a) == hash(b)
        assert a != _C.NVFP4Quantizer(**options, optimize_for_gemm=True)
        for name, value in options.items():
            assert getattr(a, name) == value
    with pytest.raises(AttributeError):
        a.with_rht = True
