"""NVFP4Tensor and NVFP4TensorStorage: construction, fields, usages, in-place quantization, gradients, scale order."""

import pickle

import pytest
import torch
from helpers import BUFFERS, DTYPES, assert_same_buffers, assert_same_bytes, buffers_of, make_input
from native import MODES, RNG_STATE, oracle, public_quantizer

import nvfp4_quant
from nvfp4_quant import DType, NVFP4Quantizer, NVFP4Tensor, NVFP4TensorStorage

CLASSES = [NVFP4Tensor, NVFP4TensorStorage]


def make(cls, options=None, shape=(33, 40), dtype=torch.bfloat16, device="cpu", kind="bell"):
    """A quantized tensor of the class, and its input."""
    q = public_quantizer(options or {})
    q.internal = cls is NVFP4TensorStorage
    x = make_input(kind, shape, dtype, device)
    return q.quantize(x, rng_state=RNG_STATE if q.stochastic_rounding else None), x


def assert_equal(got, want) -> None:
    assert type(got) is type(want) and got.shape == want.shape and got.dtype == want.dtype
    assert got._settings == want._settings
    for name, a, b in zip(BUFFERS, got._buffers(), want._buffers(), strict=True):
        assert_same_bytes(a, b, name)


# ---- construction and fields


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("mode", MODES)
def test_rebuilt_from_its_metadata(mode, cls, device):
    y, _ = make(cls, MODES[mode] | {"optimize_for_gemm": mode == "plain"}, device=device)
    rebuilt = cls(**y.get_metadata())
    assert_equal(rebuilt, y)
    assert all(a is b for a, b in zip(rebuilt._buffers(), y._buffers(), strict=True))
    assert rebuilt.device == y.device
    assert_same_bytes(rebuilt.dequantize(), y.dequantize())


@pytest.mark.parametrize("cls", CLASSES)
def test_fields(cls, device):
    options = {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256, "optimize_for_gemm": True, "columnwise": False}
    y, _ = make(cls, options, device=device)
    assert y._with_gemm_swizzled_scales is True and y._nvfp4_use_4over6 is True and y._row_scaled_nvfp4 is False
    assert y._nvfp4_e4m3_max == 256 and y._fp4_dtype is DType.kFloat4E2M1 and y._dtype == torch.bfloat16
    for name in (*BUFFERS, "fp4_dtype", "with_gemm_swizzled_scales", "row_scaled_nvfp4", "nvfp4_use_4over6"):
        assert getattr(y, name) is getattr(y, f"_{name}"), name
        with pytest.raises(AttributeError):
            setattr(y, name, None)
    assert y.nvfp4_e4m3_max == 256 and y.quantizer._settings == y._quantizer._settings
    assert y.size() == (33, 40) and y.size(-1) == 40 and y.device.type == device.type and y.dtype == torch.bfloat16
    assert isinstance(y, NVFP4TensorStorage)
    assert not hasattr(cls, "__slots__") and "_rowwise_data" in y.__dict__


@pytest.mark.parametrize("cls", CLASSES)
def test_data_tensors_and_usages(cls, device):
    y, _ = make(cls, device=device)
    assert y.get_data_tensors() == (y._rowwise_data, y._columnwise_data)
    assert y.get_data_tensors(columnwise_data=False) is y._rowwise_data
    assert y.get_data_tensors(rowwise_data=False) is y._columnwise_data
    y._rowwise_data = None
    assert y.get_data_tensors()[0] is None
    assert y.get_usages() == {"rowwise": False, "columnwise": True} == y._quantizer.get_usages()
    assert y.shape == (33, 40)


@pytest.mark.parametrize("cls", CLASSES)
def test_a_tensor_keeps_its_own_settings(cls, device):
    q = NVFP4Quantizer(with_2d_quantization=True)
    q.internal = cls is NVFP4TensorStorage
    y = q(make_input("bell", (17, 33), device=device))
    q.set_usage(columnwise=False)
    q.with_2d_quantization, q.optimize_for_gemm = False, True
    assert y._quantizer.with_2d_quantization and not y._with_gemm_swizzled_scales
    assert y._quantizer is not y._quantizer
    y._quantizer.with_rht = True
    assert not y._quantizer.with_rht


def test_its_quantizer_reduces_nothing(device):
    q = NVFP4Quantizer(with_amax_reduction=True)
    y = q.make_empty((2, 16), device=device)
    assert not y._quantizer.with_amax_reduction and y._quantizer.amax_reduction_group is None
    y.quantize_(torch.ones(2, 16, device=device))
    assert_same_buffers(y, oracle(torch.ones(2, 16), {}))


@pytest.mark.parametrize("cls", CLASSES)
def test_minimal_construction(cls, device):
    """Without a quantizer; positional shape and dtype; one direction."""
    y, _ = make(cls, {"rowwise": False}, device=device)
    names = ("columnwise_data", "columnwise_scale_inv", "amax_columnwise")
    z = cls(list(y.shape), torch.float16, **{name: getattr(y, name) for name in names})
    assert z.dtype == torch.float16 and z.get_usages() == {"rowwise": False, "columnwise": True}
    assert_same_bytes(z.dequantize(dtype=torch.float32), y.dequantize(dtype=torch.float32))
    swizzled = cls(y.shape, y.dtype, **{name: getattr(y, name) for name in names}, with_gemm_swizzled_scales=True)
    assert swizzled._with_gemm_swizzled_scales is True


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"rowwise_data": None, "columnwise_data": None}, RuntimeError, "rowwise_data and columnwise_data"),
        ({"rowwise_data": None}, RuntimeError, "rowwise_scale_inv is given"),
        ({"amax_columnwise": None}, RuntimeError, "amax_columnwise is missing"),
        ({"dtype": torch.int8}, TypeError, "dtype.*int8"),
        ({"rowwise_data": "bytes"}, TypeError, "rowwise_data.*str"),
        ({"amax_rowwise": torch.zeros(1, dtype=torch.float64)}, TypeError, "amax_rowwise.*float64"),
        ({"rowwise_scale_inv": torch.zeros(4, 4, dtype=torch.uint8)}, ValueError, r"rowwise_scale_inv.*\(4, 4\)"),
        ({"amax_rowwise": torch.zeros(1, device="meta")}, ValueError, "amax_rowwise.*meta"),
        ({"shape": (40, 33)}, ValueError, r"rowwise_data must have shape \(40, "),
        ({"row_scaled_nvfp4": True}, ValueError, r"amax_rowwise must have shape \(33,\)"),
        ({"nvfp4_e4m3_max": 256}, ValueError, "nvfp4_e4m3_max=256"),
        ({"fp4_dtype": DType.kByte}, TypeError, "kByte"),
        ({"rowwise_dat": None}, TypeError, "rowwise_dat"),
    ],
)
def test_refused_construction(change, error, words, cls, device):
    y, _ = make(cls, device=device)
    with pytest.raises(error, match=words):
        cls(**(y.get_metadata() | change))


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("mode", MODES)
def test_repr(mode, cls, device):
    y, _ = make(cls, MODES[mode] | {"optimize_for_gemm": True}, shape=(2, 3, 40), device=device)
    text = repr(y)
    assert len(text) <= 300 and "\n" not in text
    for word in (cls.__name__, "(2, 3, 40)", "torch.bfloat16", str(device), "rowwise+columnwise", "swizzled=True"):
        assert word in text, (word, text)
    assert (mode == "plain") == ("mode=1d" in text)
    assert str(y) == text == f"{y}"


def test_repr_reads_no_data_and_stays_short(device):
    y = NVFP4Quantizer().make_empty((10**9,) + (1,) * 60 + (16,), device="meta")
    assert len(repr(y)) <= 300 and "meta" in repr(y)


@pytest.mark.parametrize("cls", CLASSES)
def test_pickle_keeps_the_settings(cls, device):
    y, _ = make(cls, {"with_2d_quantization": True, "optimize_for_gemm": True}, device=device)
    assert_equal(pickle.loads(pickle.dumps(y)), y)


def test_flatten_and_unflatten(device):
    for options in ({}, {"rowwise": False}, {"row_scaled_nvfp4": True, "optimize_for_gemm": True}):
        y, _ = make(NVFP4Tensor, options, device=device)
        names, context = y.__tensor_flatten__()
        assert names == [f"_{name}" for name in BUFFERS if buffers_of(y)[name] is not None]
        inner = {name: getattr(y, name) for name in names}
        assert_equal(NVFP4Tensor.__tensor_unflatten__(inner, context, y.size(), y.stride()), y)
        assert hash(context) == hash(y.__tensor_flatten__()[1])


# ---- usages


@pytest.mark.parametrize("cls", CLASSES)
def test_update_usage_drops_a_direction(cls, device):
    for kept in ("rowwise", "columnwise"):
        y, _ = make(cls, device=device)
        want = {n: None if (n.startswith("amax_") and kept not in n) or n.startswith(("rowwise", "columnwise")) and
                not n.startswith(kept) else t for n, t in buffers_of(y).items()}  # fmt: skip
        y.update_usage(rowwise_usage=kept == "rowwise", columnwise_usage=kept == "columnwise")
        assert buffers_of(y) == want and y.get_usages() == y._quantizer.get_usages()
        with pytest.raises(RuntimeError, match="no data"):
            y.update_usage(**{f"{kept}_usage": False})
        assert y.get_usages()[kept]


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("shape", [(1, 1), (16, 16), (33, 40), (40, 33), (2, 9, 130), (17,), (0, 16), (5, 0)], ids=str)
@pytest.mark.parametrize("kind", ["bell", "nan"])
@pytest.mark.parametrize("optimize_for_gemm", [False, True])
@pytest.mark.parametrize("extra", [{}, {"nvfp4_use_4over6": True}], ids=["plain", "4over6"])
def test_columnwise_side_from_a_2d_rowwise_one(extra, optimize_for_gemm, kind, shape, cls, device):
    options = {"with_2d_quantization": True, "optimize_for_gemm": optimize_for_gemm} | extra
    y, _ = make(cls, options, shape, torch.float32, device, kind)
    want = dict(buffers_of(y))
    y.update_usage(columnwise_usage=False)
    y.update_usage(rowwise_usage=True, columnwise_usage=True)
    assert_same_buffers(y, want)
    assert y._amax_columnwise.data_ptr() != y._amax_rowwise.data_ptr() and y._columnwise_data.is_contiguous()


@pytest.mark.parametrize("mode", ["plain", "hadamard_2d", "stochastic_2d", "row_scaled"])
def test_columnwise_side_cannot_always_be_made(mode, device):
    y, _ = make(NVFP4Tensor, MODES[mode] | {"columnwise": False}, device=device)
    with pytest.raises(RuntimeError, match="columnwise_usage=True"):
        y.update_usage(columnwise_usage=True)


def test_rowwise_side_cannot_be_made(device):
    y, _ = make(NVFP4Tensor, {"with_2d_quantization": True, "rowwise": False}, device=device)
    with pytest.raises(RuntimeError, match="rowwise_usage=True"):
        y.update_usage(rowwise_usage=True)


# ---- dequantize


@pytest.mark.parametrize("cls", CLASSES)
def test_dequantize_dtypes(cls, device):
    y, _ = make(cls, device=device)
    exact = y.dequantize(dtype=torch.float32)
    for dtype in DTYPES:
        assert_same_bytes(nvfp4_quant.dequantize(y, dtype=dtype), exact.to(dtype))
    assert y.dequantize().dtype == torch.bfloat16
    with pytest.raises(TypeError, match="dtype"):
        y.dequantize(dtype=torch.float64)
    with pytest.raises(TypeError, match="y must be"):
        nvfp4_quant.dequantize(exact)


@pytest.mark.parametrize("cls", CLASSES)
def test_dequantize_without_a_piece(cls, device):
    y, _ = make(cls, device=device)
    y._amax_rowwise = None
    with pytest.raises(RuntimeError, match="row-wise amax"):
        y.dequantize()
    y._rowwise_data = y._columnwise_data = None
    with pytest.raises(RuntimeError, match="data"):
        y.dequantize()
    for name in BUFFERS:
        setattr(y, f"_{name}", None)
    assert "usage=none" in repr(y) and y.get_usages() == {"rowwise": False, "columnwise": False}


# ---- in place


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("mode", MODES)
def test_quantize_in_place(mode, cls, device):
    y, _ = make(cls, MODES[mode], device=device)
    before = y._buffers()
    x = make_input("wide", (33, 40), torch.float32, device, seed=7)
    rng_state = RNG_STATE if MODES[mode].get("stochastic_rounding") else None
    assert y.quantize_(x, rng_state=rng_state) is y
    assert_same_buffers(y, oracle(x, MODES[mode]))
    assert all(a is b for a, b in zip(y._buffers(), before, strict=True))


def test_quantize_in_place_from_a_quantized_tensor(device):
    y, _ = make(NVFP4Tensor, device=device)
    for cls in CLASSES:
        source, _ = make(cls, {"with_2d_quantization": True}, kind="wide", device=device)
        y.quantize_(source)
        assert_same_buffers(y, oracle(source.dequantize(), {}))


def test_update_follows_the_quantizer(device):
    """Buffers that stay keep their memory, new ones are made, others dropped; the tensor has the new settings."""
    y, x = make(NVFP4Tensor, device=device)
    data, scale, *_ = y._buffers()
    q = NVFP4Quantizer(columnwise=False, row_scaled_nvfp4=True)
    q.optimize_for_gemm = True
    assert q.update_quantized(x, y) is y
    assert_same_buffers(y, oracle(x, q._settings.options()))
    assert y._rowwise_data is data and y._rowwise_scale_inv is scale
    assert y._with_gemm_swizzled_scales and y._row_scaled_nvfp4 and y._quantizer._settings == q._settings
    q = NVFP4Quantizer(rowwise=False)
    q.update_quantized(x, y)
    assert_same_buffers(y, oracle(x, q._settings.options()))


def test_update_with_a_noop_flag_wants_the_same_settings(device):
    y, x = make(NVFP4Tensor, device=device)
    frozen = {name: t.clone() for name, t in buffers_of(y).items()}
    flag = torch.ones(1, device=device)
    for options in ({"with_2d_quantization": True}, {"columnwise": False}, {"row_scaled_nvfp4": True}):
        for value in (flag, flag * 0):
            with pytest.raises(ValueError, match="noop_flag"):
                NVFP4Quantizer(**options).update_quantized(x * 2, y, noop_flag=value)
    NVFP4Quantizer().update_quantized(x * 2, y, noop_flag=flag)
    y.quantize_(x * 2, noop_flag=flag)
    assert_same_buffers(y, frozen)
    NVFP4Quantizer().update_quantized(x * 2, y, noop_flag=flag * 0.5)
    assert_same_buffers(y, oracle(x * 2, {}))


def test_update_counts_as_a_write(device):
    """Autograd must notice that a saved tensor was changed."""
    w = torch.nn.Parameter(make(NVFP4Tensor, device=device)[0])
    x = torch.ones(2, 40, device=device, dtype=torch.bfloat16, requires_grad=True)
    loss = torch.nn.functional.linear(x, w).sum()
    version = w._version
    w.quantize_(torch.zeros(33, 40, device=device))
    assert w._version > version
    with torch.inference_mode():
        inference = make(NVFP4Tensor, device=device)[0]
    inference.quantize_(torch.ones(33, 40, device=device))
    assert_same_buffers(inference, oracle(torch.ones(33, 40), {}))
    del loss


# ---- gradients


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_passes_straight_through(dtype, device):
    x = make_input("bell", (5, 40), dtype, device).requires_grad_()
    y = NVFP4Quantizer()(x)
    assert type(y) is NVFP4Tensor and y.requires_grad and not y.is_leaf
    grad = make_input("bell", (5, 40), torch.float32, device, seed=3)
    y.dequantize(dtype=torch.float32).backward(grad)
    assert_same_bytes(x.grad, grad.to(dtype))


def test_gradient_of_a_quantized_parameter(device):
    w = torch.nn.Parameter(make(NVFP4Tensor, device=device)[0])
    assert type(w) is NVFP4Tensor or isinstance(w, NVFP4Tensor)
    grad = make_input("bell", (33, 40), torch.bfloat16, device, seed=3)
    w.dequantize().backward(grad)
    assert type(w.grad) is torch.Tensor
    assert_same_bytes(w.grad, grad)


def test_no_gradient_where_none_is_wanted(device):
    x = make_input("bell", (5, 40), torch.float32, device).requires_grad_()
    with torch.no_grad():
        assert not NVFP4Quantizer()(x).requires_grad
    y = NVFP4Quantizer()(x.detach())
    assert not y.requires_grad and not y.dequantize().requires_grad
    q = NVFP4Quantizer()
    q.internal = True
    assert_same_buffers(q(x), oracle(x.detach(), {}))
    y.quantize_(x)
    q.update_quantized(x, y)
    assert not y.requires_grad and y._amax_rowwise.grad_fn is None


# ---- the order of the scales


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("usage", [{}, {"columnwise": False}, {"rowwise": False}], ids=str)
def test_swizzle_and_back(usage, cls, device):
    y, x = make(cls, usage, (130, 140), device=device)
    compact = y._buffers()
    assert nvfp4_quant.swizzle_scales_for_gemm_(y) is y and y._with_gemm_swizzled_scales is True
    assert_same_buffers(y, oracle(x, usage | {"optimize_for_gemm": True}))
    swizzled = y._buffers()
    assert nvfp4_quant.swizzle_scales_for_gemm_(y)._buffers() == swizzled, "a no-op the second time"
    assert_same_buffers(compact, oracle(x, usage), "the compact scales are left alone")
    assert nvfp4_quant.unswizzle_scales_(y) is y and y._with_gemm_swizzled_scales is False
    assert_same_buffers(y, oracle(x, usage))
    for name in ("swizzle_scales_for_gemm_", "unswizzle_scales_"):
        with pytest.raises(TypeError, match="y must be"):
            getattr(nvfp4_quant, name)(x)


# ---- what carries no data


@pytest.mark.parametrize("mode", MODES)
def test_meta_tensors_have_the_exact_shapes(mode, device):
    q = public_quantizer(MODES[mode])
    for shape in ((0, 16), (33,), (17, 33), (2, 3, 40)):
        want = q(torch.zeros(shape, device=device))
        got = q(torch.zeros(shape, device="meta"))
        for a, b in zip(got._buffers(), want._buffers(), strict=True):
            assert a.is_meta and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
        assert got.dequantize().shape == shape and got.dequantize().is_meta
        nvfp4_quant.swizzle_scales_for_gemm_(got)
        q.update_quantized(torch.zeros(shape, device="meta"), got)


@pytest.mark.parametrize("mode", MODES)
def test_fake_tensors_have_the_exact_shapes(mode, device):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    q = public_quantizer(MODES[mode])
    want = q(torch.zeros(2, 9, 33, device=device))
    with FakeTensorMode():
        x = torch.zeros(2, 9, 33, device=device)
        got = q(x)
        for a, b in zip(got._buffers(), want._buffers(), strict=True):
            assert isinstance(a, FakeTensor) and a.device == b.device
            assert a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
        assert isinstance(got.dequantize(), FakeTensor)
        empty = q.make_empty((2, 9, 33), device=device)
        assert isinstance(q.update_quantized(x, empty)._buffers()[0], FakeTensor)
