"""The Python face of the quantizer: options, their checks, copies, and what a call takes and returns."""

import copy
import pickle
from functools import partial

import pytest
import torch
from helpers import DTYPES, USAGES, assert_same_buffers, assert_same_bytes, buffers_of, make_input
from native import MODES, RNG_STATE, gpu_operations, oracle, public_quantizer

from nvfp4_quant import DType, NVFP4Quantizer, NVFP4Tensor, NVFP4TensorStorage
from nvfp4_quant.settings import Settings

SHAPES = [(0, 16), (16, 0), (1,), (33,), (1, 1), (17, 33), (2, 3, 40), (2, 0, 5)]


# ---- options


def test_defaults(device):
    q = NVFP4Quantizer()
    got = {name: getattr(q, name) for name in Settings._fields}
    assert got == {
        "rowwise": True,
        "columnwise": True,
        "with_rht": False,
        "with_random_sign_mask": True,
        "with_2d_quantization": False,
        "stochastic_rounding": False,
        "row_scaled_nvfp4": False,
        "nvfp4_use_4over6": False,
        "nvfp4_e4m3_max": 448,
        "nvfp4_4over6_err_mode": "MAE",
        "optimize_for_gemm": False,
        "schedule": "auto",
        "fp4_dtype": DType.kFloat4E2M1,
        "with_post_rht_amax": False,
        "with_amax_reduction": False,
        "amax_reduction_group": None,
        "internal": False,
    }
    assert q.dtype is DType.kFloat4E2M1
    assert (q.rowwise_usage, q.columnwise_usage) == (True, True)


@pytest.mark.parametrize("name", [n for n, default in Settings._field_defaults.items() if default is False])
def test_every_switch_is_an_attribute(name, device):
    q = NVFP4Quantizer()
    setattr(q, name, True)
    assert getattr(q, name) is True
    assert [n for n in Settings._fields if getattr(q, n) != Settings._field_defaults[n]] == [name]


def test_positional_order(device):
    """The order of Transformer Engine's constructor."""
    q = NVFP4Quantizer(DType.kFloat4E2M1, True, False, False, None, True, True, False, True)
    assert q.columnwise_usage is False and q.with_rht and q.with_post_rht_amax and q.stochastic_rounding


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"rowwise": False, "columnwise": False}, ValueError, "rowwise=False"),
        ({"row_scaled_nvfp4": True, "with_2d_quantization": True}, ValueError, "row_scaled_nvfp4=True"),
        ({"row_scaled_nvfp4": True, "with_amax_reduction": True}, ValueError, "with_amax_reduction=True"),
        ({"nvfp4_use_4over6": True, "with_rht": True}, ValueError, "nvfp4_use_4over6=True"),
        ({"nvfp4_use_4over6": True, "stochastic_rounding": True}, ValueError, "stochastic_rounding=True"),
        ({"nvfp4_e4m3_max": 256}, ValueError, "nvfp4_e4m3_max=256"),
        ({"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 300}, ValueError, "nvfp4_e4m3_max=300"),
        ({"nvfp4_4over6_err_mode": "MAX"}, ValueError, "nvfp4_4over6_err_mode='MAX'"),
        ({"fp4_dtype": DType.kFloat8E4M3}, TypeError, "kFloat8E4M3"),
        ({"fp4_dtype": torch.float32}, TypeError, "fp4_dtype"),
        ({"with_rht": 1}, TypeError, "with_rht.*1"),
        ({"nvfp4_e4m3_max": 448.0}, TypeError, "nvfp4_e4m3_max.*448.0"),
        ({"nvfp4_4over6_err_mode": None}, TypeError, "nvfp4_4over6_err_mode.*None"),
    ],
)
def test_refused_options(options, error, words, device):
    """In the constructor, and where attributes lead there; a refused change leaves the quantizer as it was."""
    with pytest.raises(error, match=words):
        NVFP4Quantizer(**options)
    q = NVFP4Quantizer()
    with pytest.raises(error, match=words):
        for name, value in options.items():
            setattr(q, name, value)
    before = q._settings
    *_, (name, value) = options.items()
    with pytest.raises(error):
        setattr(q, name, value)
    assert q._settings is before


def test_error_mode_in_any_case(device):
    assert NVFP4Quantizer(nvfp4_4over6_err_mode="mse").nvfp4_4over6_err_mode == "MSE"
    assert NVFP4Quantizer(nvfp4_4over6_err_mode="mae")._settings == NVFP4Quantizer()._settings


def test_set_usage(device):
    q = NVFP4Quantizer()
    q.set_usage(columnwise=False)
    assert q.get_usages() == {"rowwise": True, "columnwise": False}
    q.set_usage()
    q.set_usage(rowwise=False, columnwise=True)
    assert q.get_usages() == {"rowwise": False, "columnwise": True}
    with pytest.raises(ValueError, match="columnwise=False"):
        q.set_usage(columnwise=False)
    with pytest.raises(TypeError):
        q.set_usage(False)
    assert q.columnwise_usage


def test_post_rht_amax_has_no_effect(device):
    x = make_input("bell", (33, 40), torch.bfloat16, device)
    for options in ({}, {"with_rht": True}):
        want = NVFP4Quantizer(**options)(x)
        got = NVFP4Quantizer(**options, with_post_rht_amax=True)(x)
        for a, b in zip(got._buffers(), want._buffers(), strict=True):
            assert_same_bytes(a, b)


@pytest.mark.parametrize("name", ["kByte", "kInt32", "kFloat32", "kFloat16", "kBFloat16", "kFloat8E4M3", "kFloat8E5M2"])
def test_other_fp4_dtypes_are_refused_by_name(name, device):
    with pytest.raises(TypeError, match=name):
        NVFP4Quantizer(fp4_dtype=DType[name])


def test_dtype_values(device):
    assert {d.name: int(d) for d in DType} == {
        "kByte": 0,
        "kInt32": 2,
        "kFloat32": 4,
        "kFloat16": 5,
        "kBFloat16": 6,
        "kFloat8E4M3": 7,
        "kFloat8E5M2": 8,
        "kFloat4E2M1": 10,
    }


# ---- settings and copies


def test_settings_are_a_value(device):
    a, b = NVFP4Quantizer(with_rht=True)._settings, NVFP4Quantizer(with_rht=True)._settings
    assert a == b and hash(a) == hash(b) and a != NVFP4Quantizer()._settings
    assert pickle.loads(pickle.dumps(a)) == a
    text, names = a.__fx_repr__()
    assert eval(text, dict(names)) == a
    with pytest.raises(AttributeError):
        a.with_rht = False
    assert a.native() is b.native(), "equal settings share the native quantizer"


def test_settings_with_a_group_have_no_hash(device):
    with pytest.raises(TypeError, match="amax_reduction_group"):
        hash(Settings(amax_reduction_group=object()))


def test_settings_are_kept_until_an_option_changes(device):
    q = NVFP4Quantizer()
    before = q._settings
    q(torch.ones(2, 16, device=device))
    assert q._settings is before
    q.with_rht = True
    assert q._settings != before


@pytest.mark.parametrize(
    "duplicate", [NVFP4Quantizer.copy, copy.copy, copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q))]
)
@pytest.mark.parametrize("internal", [False, True])
def test_copies_are_apart(internal, duplicate, device):
    q = NVFP4Quantizer(columnwise=False, with_2d_quantization=True, stochastic_rounding=True)
    q.optimize_for_gemm = q.internal = internal
    c = duplicate(q)
    assert type(c) is NVFP4Quantizer and c is not q and c._settings == q._settings
    c.set_usage(columnwise=True)
    c.optimize_for_gemm = False
    assert not q.columnwise_usage and q.optimize_for_gemm == internal
    c.internal = False
    assert isinstance(c(torch.ones(1, 16, device=device)), NVFP4Tensor)


def test_repr_names_what_differs(device):
    assert repr(NVFP4Quantizer()) == "NVFP4Quantizer()"
    assert repr(NVFP4Quantizer(with_rht=True, columnwise=False)) == "NVFP4Quantizer(columnwise=False, with_rht=True)"


# ---- calls


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("usage", USAGES, ids=str)
def test_public_call_equals_the_oracle(mode, usage, device):
    options = MODES[mode] | {"rowwise": usage[0], "columnwise": usage[1], "optimize_for_gemm": True}
    x = make_input("bell", (33, 40), torch.bfloat16, device)
    q = public_quantizer(options)
    want = oracle(x, options)
    rng_state = RNG_STATE if options.get("stochastic_rounding") else None
    assert_same_buffers(q.quantize(x, rng_state=rng_state), want, "quantize")
    q.internal = True
    assert_same_buffers(q.quantize(x, rng_state=rng_state), want, "internal")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_result_presents_the_input(shape, dtype, device):
    x = make_input("bell", shape, dtype, device)
    y = NVFP4Quantizer()(x)
    assert type(y) is NVFP4Tensor and y.shape == x.shape and y.dtype == dtype and y.device == x.device
    assert y.is_contiguous() and not y.requires_grad
    assert_same_buffers(y, oracle(x, {}))


def test_nominal_dtype(device):
    x = make_input("bell", (4, 16), torch.float32, device)
    y = NVFP4Quantizer().quantize(x, dtype=torch.bfloat16)
    assert y.dtype == torch.bfloat16 and y.dequantize().dtype == torch.bfloat16
    assert_same_buffers(y, oracle(x, {}))
    with pytest.raises(TypeError, match="float64"):
        NVFP4Quantizer().quantize(x, dtype=torch.float64)


@pytest.mark.parametrize("bad", [None, [1.0], 3.0], ids=str)
def test_not_a_tensor(bad, device):
    q = NVFP4Quantizer()
    y = q(torch.ones(1, 16, device=device))
    with pytest.raises(TypeError, match="x must be a torch.Tensor"):
        q(bad)
    with pytest.raises(TypeError, match="src must be a torch.Tensor"):
        q.update_quantized(bad, y)
    with pytest.raises(TypeError, match="x must be a torch.Tensor"):
        y.quantize_(bad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.uint8, torch.bool, torch.complex64], ids=str)
def test_other_dtypes(dtype, device):
    q, x = NVFP4Quantizer(), torch.zeros(2, 16, dtype=dtype, device=device)
    assert not q.is_quantizable(x)
    with pytest.raises(TypeError, match="x"):
        q(x)
    with pytest.raises(TypeError):
        q(x.to("meta"))


def test_zero_dimensions(device):
    q, x = NVFP4Quantizer(), torch.tensor(1.0, device=device)
    assert not q.is_quantizable(x)
    with pytest.raises(ValueError, match="x"):
        q(x)


def test_quantized_input(device):
    q = NVFP4Quantizer()
    y = q(torch.ones(2, 16, device=device))
    q.internal = True
    for quantized in (y, q(torch.ones(2, 16, device=device))):
        assert not q.is_quantizable(quantized)
        with pytest.raises(TypeError, match="x is quantized"):
            q(quantized)
        with pytest.raises(TypeError, match="src is quantized"):
            q.update_quantized(quantized, y)


def test_is_quantizable(device):
    q = NVFP4Quantizer()
    for dtype in DTYPES:
        for shape in SHAPES:
            assert q.is_quantizable(torch.empty(shape, dtype=dtype, device=device))
    assert not q.is_quantizable("x")


def test_out(device):
    q = NVFP4Quantizer()
    a, b = (make_input("bell", (5, 40), torch.bfloat16, device, seed) for seed in range(2))
    y = q(a)
    data = y._rowwise_data
    assert q.quantize(b, out=y) is y and y._rowwise_data is data
    assert_same_buffers(y, oracle(b, {}))
    assert_same_buffers(q.quantize(a, out=y, amax=2.5), oracle(a, {}, amax=2.5))
    with pytest.raises(ValueError, match="dtype=torch.float16.*bfloat16"):
        q.quantize(a, out=y, dtype=torch.float16)
    assert q.quantize(a, out=y, dtype=torch.bfloat16) is y
    with pytest.raises(TypeError, match="Tensor"):
        q.quantize(a, out=a)
    with pytest.raises(ValueError, match=r"\(5, 40\).*\(40, 5\)"):
        q.quantize(a.t(), out=y)


@pytest.mark.parametrize("in_tensor", [False, True])
def test_given_amax(in_tensor, device):
    x = make_input("bell", (17, 33), torch.float32, device)
    amax = torch.tensor([0.75], device=device) if in_tensor else 0.75
    for options in ({}, {"with_2d_quantization": True}, {"nvfp4_use_4over6": True}):
        y = public_quantizer(options).quantize(x, amax=amax)
        assert_same_buffers(y, oracle(x, options, amax=0.75), str(options))
        assert y._amax_rowwise.item() == y._amax_columnwise.item() == 0.75


@pytest.mark.parametrize(
    "options", [{"with_rht": True}, {"row_scaled_nvfp4": True}, {"with_amax_reduction": True}], ids=str
)
def test_given_amax_is_refused(options, device):
    x = torch.ones(2, 16, device=device)
    with pytest.raises(ValueError, match="amax"):
        NVFP4Quantizer(**options).quantize(x, amax=1.0)


def test_generator(device):
    q = NVFP4Quantizer(stochastic_rounding=True)
    x = torch.rand(64, 64, device=device)
    a, b, c = (q.quantize(x, generator=torch.Generator(device).manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(a._rowwise_data, b._rowwise_data) and not torch.equal(a._rowwise_data, c._rowwise_data)
    generator = torch.Generator(device).manual_seed(5)
    first, second = (q.quantize(x, generator=generator) for _ in range(2))
    assert not torch.equal(first._rowwise_data, second._rowwise_data)
    assert_same_buffers(q.update_quantized(x, first, rng_state=RNG_STATE), oracle(x, q._settings.options()))


@pytest.mark.parametrize("rng_state", [(-1, 0), (1 << 64, 0), (0, 1 << 64), (0, 2)])
def test_bad_rng_state(rng_state, device):
    q = NVFP4Quantizer(stochastic_rounding=True)
    with pytest.raises(ValueError, match="rng_state"):
        q.quantize(torch.ones(1, 16, device=device), rng_state=rng_state)


# ---- empty tensors and shapes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_make_empty_has_the_buffers_of_a_call(shape, mode, device):
    q = public_quantizer(MODES[mode])
    want = q(torch.zeros(shape, dtype=torch.float16, device=device))
    for spelling in (tuple, list, torch.Size):
        got = q.make_empty(spelling(shape), dtype=torch.float16, device=device)
        assert got.shape == want.shape and got.dtype == torch.float16 and got._settings == want._settings
        shapes = [[b if b is None else (b.shape, b.dtype, b.device) for b in y._buffers()] for y in (got, want)]
        assert shapes[0] == shapes[1]


def test_make_empty_options(device):
    q = NVFP4Quantizer()
    y = q.make_empty((2, 16), device=device, requires_grad=True)
    assert y.dtype == torch.float32 and y.requires_grad and y.is_leaf
    default = q.make_empty((2, 16))
    assert default.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert q.make_empty([3, 16], device="meta")._rowwise_data.is_meta
    with pytest.raises(TypeError, match="int8"):
        q.make_empty((2, 16), dtype=torch.int8, device=device)
    q.internal = True
    assert isinstance(q.make_empty((2, 16), device=device), NVFP4TensorStorage)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, device):
    q = NVFP4Quantizer()
    y = q(torch.zeros(shape, device=device))
    assert tuple(q.get_columnwise_shape(shape)) == tuple(y._columnwise_data.shape)
    assert tuple(q.get_scale_shape(list(shape), False)) == tuple(y._rowwise_scale_inv.shape)
    assert tuple(q.get_scale_shape(torch.Size(shape), columnwise=True)) == tuple(y._columnwise_scale_inv.shape)


def test_schedule_is_of_the_quantizer_not_of_its_tensors(device):
    x = make_input("bell", (33, 40), torch.bfloat16, device)
    q, fused = NVFP4Quantizer(), NVFP4Quantizer(schedule="fused")
    y = fused(x)
    assert fused.schedule == "fused" and fused.copy().schedule == "fused" and y._quantizer.schedule == "auto"
    assert type(torch.cat([y[:16], q(x)[:16]])) is NVFP4Tensor  # settings are the same
    addresses = [buffer.data_ptr() for buffer in y._buffers()]
    fused.update_quantized(x * 2, y, noop_flag=torch.zeros(1, device=device))
    assert [buffer.data_ptr() for buffer in y._buffers()] == addresses
    assert_same_buffers(y, buffers_of(q(x * 2)))
    with pytest.raises(ValueError, match="schedule"):
        fused.schedule = "quick"
    assert fused.schedule == "fused"


@pytest.mark.cuda
def test_schedule_decides_the_gpu_operations(device):
    x = make_input("bell", (33, 40), torch.bfloat16, device)
    calls = [partial(NVFP4Quantizer(schedule=schedule), x) for schedule in ("fused", "split")]
    assert [len(names) for names in gpu_operations(*calls)] == [1, 3]
