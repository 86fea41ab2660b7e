"""1-D and 2-D quantization of any shape, dtype, stride and values; the public quantizer; what a call costs on a GPU."""

import itertools

import pytest
import torch
from helpers import DTYPES, KINDS, STRIDES, USAGES, assert_same_buffers, assert_same_bytes, make_input, strided
from native import assert_matches_oracle, gpu_operations, native, native_quantizer, oracle, public_quantizer

from nvfp4_quant import NVFP4Quantizer, NVFP4Tensor, NVFP4TensorStorage

TWO_D = ({}, {"with_2d_quantization": True})
MODE_IDS = ["1d", "2d"]
EXTENTS = (0, 1, 7, 15, 16, 17, 33)


def usage_options(usage) -> dict:
    return {"rowwise": usage[0], "columnwise": usage[1]}


def usage_id(usage) -> str:
    return "+".join(name for name, wanted in zip(("row", "column"), usage, strict=True) if wanted)


@pytest.mark.parametrize("mode", TWO_D, ids=MODE_IDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_shapes(dtype, mode, device, schedule):
    for m, k in itertools.product(EXTENTS, EXTENTS):
        assert_matches_oracle(make_input("bell", (m, k), dtype, device, seed=m * 64 + k), mode, schedule)


SHAPES = ((1088, 1024), (130, 48), (129, 257), (16, 2064), (2064, 16), (64, 128), (300, 70), (1, 1000), (1000, 1))


@pytest.mark.parametrize("usage", USAGES, ids=usage_id)
@pytest.mark.parametrize("mode", TWO_D, ids=MODE_IDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_larger_shapes(shape, mode, usage, device, schedule):
    x = make_input("bell", shape, torch.bfloat16, device)
    assert_matches_oracle(x, mode | usage_options(usage), schedule)


@pytest.mark.parametrize("mode", TWO_D, ids=MODE_IDS)
@pytest.mark.parametrize("shape", [(0,), (1,), (40,), (3, 5, 17), (2, 0, 3), (3, 4, 0), (2, 3, 4, 5, 18)], ids=str)
def test_other_numbers_of_dimensions(shape, mode, device, schedule):
    x = make_input("bell", shape, torch.float16, device)
    assert_matches_oracle(x, mode, schedule)
    assert_matches_oracle(x.movedim(0, -1), mode, schedule)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("usage", USAGES, ids=usage_id)
@pytest.mark.parametrize("mode", TWO_D, ids=MODE_IDS)
@pytest.mark.parametrize("stride", STRIDES)
def test_strides(stride, mode, usage, dtype, device, schedule):
    for shape in ((33, 40), (70, 129)):
        x = strided(stride, make_input("bell", shape, dtype, device))
        assert_matches_oracle(x, mode | usage_options(usage), schedule)


@pytest.mark.parametrize("mode", TWO_D, ids=MODE_IDS)
def test_strides_of_more_dimensions(mode, device, schedule):
    x = make_input("bell", (4, 6, 5, 34), torch.bfloat16, device)
    views = (x.permute(3, 1, 0, 2), x.permute(2, 0, 1, 3), x[:, ::2, 1:, 3:], x[:, :1].expand(4, 9, 5, 34), x[1:, 2])
    for view in views:
        assert_matches_oracle(view, mode, schedule)


@pytest.mark.sanitize
@pytest.mark.parametrize("mode", TWO_D, ids=MODE_IDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_values(kind, dtype, mode, device, schedule):
    for shape in ((33, 40), (17, 130)):
        assert_matches_oracle(make_input(kind, shape, dtype, device), mode, schedule)


@pytest.mark.parametrize("mode", TWO_D, ids=MODE_IDS)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_every_16_bit_value(dtype, mode, device, schedule):
    """Each as it is (its own maximum decides) and each beside a 6, under a tensor scale of exactly 1."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
    assert_matches_oracle(values.reshape(256, 256), mode, schedule)
    beside = torch.stack([values, torch.full_like(values, 6.0)], dim=1).reshape(8192, 16)
    assert_matches_oracle(beside, mode, schedule, amax=2688.0)


def test_many_threads_and_tiles_agree_with_one(device, schedule):
    """The same block gives the same bytes wherever it lies."""
    block = make_input("wide", (16, 16), torch.bfloat16, device)
    got = native(block.repeat(40, 50), {}, schedule)
    want = native(block, {}, schedule)
    assert_same_bytes(got["rowwise_data"], want["rowwise_data"].repeat(40, 50))
    assert_same_bytes(got["columnwise_data"], want["columnwise_data"].repeat(50, 40))


@pytest.mark.parametrize("mode", TWO_D, ids=MODE_IDS)
def test_subnormals_survive_flush_denormal(mode, device, schedule):
    x = make_input("least", (600, 512), torch.float32, device)
    tiny = make_input("tiny", (600, 512), torch.float32, device)
    want = [oracle(t, mode) for t in (x, tiny)]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        got = [native(t, mode, schedule) for t in (x, tiny)]
        still_set = (torch.full((1,), 1e-38) * 1e-2).item() == 0
    finally:
        torch.set_flush_denormal(False)
    assert still_set, "the call left flush-denormal off"
    for g, w in zip(got, want, strict=True):
        assert_same_buffers(g, w)


# ---- the public quantizer


@pytest.mark.parametrize("usage", USAGES, ids=usage_id)
@pytest.mark.parametrize("mode", TWO_D, ids=MODE_IDS)
def test_public_quantizer(mode, usage, device):
    options = mode | usage_options(usage)
    q = public_quantizer(options)
    x = make_input("bell", (3, 11, 21), torch.bfloat16, device)
    for y in (q(x), q.quantize(x)):
        assert type(y) is NVFP4Tensor
        assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
        assert_same_buffers(y, oracle(x, options))
    assert q.quantize(x, dtype=torch.float32).dtype == torch.float32


def test_internal_quantizer_gives_storage(device):
    q = NVFP4Quantizer()
    q.internal = True
    x = make_input("bell", (11, 21), torch.bfloat16, device)
    y = q(x)
    assert type(y) is NVFP4TensorStorage
    assert_same_buffers(y, oracle(x, {}))


def test_usages_can_change_between_calls(device):
    q = NVFP4Quantizer()
    x = make_input("bell", (19, 35), torch.float16, device)
    for usage in (*USAGES, *reversed(USAGES)):
        q.set_usage(**usage_options(usage))
        assert_same_buffers(q(x), oracle(x, usage_options(usage)))


def test_no_two_buffers_share_storage(device, schedule):
    x = make_input("bell", (19, 35), device=device)
    for shape in ((19, 35), (1, 1)):
        buffers = native(x[: shape[0], : shape[1]], {}, schedule)
        storages = {t.untyped_storage().data_ptr() for t in (*buffers.values(), x)}
        assert len(storages) == 7


def test_input_is_not_changed(device, schedule):
    x = make_input("wide", (33, 40), device=device)
    before = x.clone()
    native(x, {}, schedule)
    assert_same_bytes(x, before)


def test_gradient_passes_straight_through(device):
    x = make_input("bell", (20, 24), device=device).requires_grad_()
    weight = make_input("bell", (20, 24), device=device, seed=1)
    (NVFP4Quantizer()(x).dequantize() * weight).sum().backward()
    assert_same_bytes(x.grad, weight)


# ---- given amax


@pytest.mark.parametrize("mode", TWO_D, ids=MODE_IDS)
@pytest.mark.parametrize("amax", [0.0, 0.25, 3.0, 1e-37, 1e30, float("inf")])
def test_given_amax(amax, mode, device, schedule):
    x = make_input("bell", (33, 40), torch.bfloat16, device)
    want = oracle(x, mode, amax)
    for given in (amax, torch.tensor([amax], device=device), torch.tensor(amax, device=device)):
        assert_same_buffers(native(x, mode, schedule, given), want)
        assert_same_buffers(public_quantizer(mode).quantize(x, amax=given), want)


def test_given_amax_saturates(device, schedule):
    x = torch.full((16, 16), 100.0, device=device)
    got = native(x, {}, schedule, amax=1.0)
    assert (got["rowwise_scale_inv"][:16, 0] == 0x7E).all() and (got["rowwise_data"] == 0x77).all()


def test_given_amax_is_copied(device, schedule):
    amax = torch.tensor([2.0], device=device)
    got = native(make_input("bell", (16, 16), device=device), {}, schedule, amax)
    amax.zero_()
    for side in ("rowwise", "columnwise"):
        assert_same_bytes(got[f"amax_{side}"], torch.tensor([2.0]))


REFUSED_AMAX = {
    "two elements": (lambda device: torch.ones(2, device=device), ValueError),
    "float64": (lambda device: torch.ones(1, dtype=torch.float64, device=device), TypeError),
    "on meta": (lambda device: torch.ones(1, device="meta"), ValueError),
    "text": (lambda device: "1.0", TypeError),
}


@pytest.mark.parametrize("case", REFUSED_AMAX)
def test_refused_amax(case, device):
    make, error = REFUSED_AMAX[case]
    x = torch.ones(16, 16, device=device)
    with pytest.raises(error, match="amax"):
        NVFP4Quantizer().quantize(x, amax=make(device))


@pytest.mark.parametrize("option", ["with_rht", "row_scaled_nvfp4"])
def test_amax_is_refused_where_there_is_more_than_one(option, device):
    with pytest.raises(ValueError, match="amax"):
        NVFP4Quantizer(**{option: True}).quantize(torch.ones(16, 16, device=device), amax=1.0)


# ---- refusals


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.uint8, torch.bool, torch.complex64], ids=str)
def test_refused_dtype(dtype, device):
    with pytest.raises(TypeError, match="x"):
        NVFP4Quantizer()(torch.ones(16, 16, dtype=dtype, device=device))


def test_refused_input(device):
    with pytest.raises(ValueError, match="x"):
        NVFP4Quantizer()(torch.ones((), device=device))
    with pytest.raises(TypeError, match="x"):
        NVFP4Quantizer()([1.0, 2.0])
    with pytest.raises(TypeError):
        q = NVFP4Quantizer()
        q.quantize(q(torch.ones(16, 16, device=device)))


# ---- on a GPU


def kernels(names: list[str]) -> list[str]:
    """Which of the three operations each name is; any other name as it is."""
    known = ("zero_amax_kernel", "amax_kernel", "quantize")
    return [next((k for k in known if k in name), name) for name in names]


EXPECTED_OPERATIONS = {"split": [["zero_amax_kernel", "amax_kernel", "quantize"]], "fused": [["quantize"]]}
EXPECTED_OPERATIONS["auto"] = EXPECTED_OPERATIONS["split"] + EXPECTED_OPERATIONS["fused"]


@pytest.mark.cuda
@pytest.mark.parametrize("usage", USAGES, ids=usage_id)
@pytest.mark.parametrize("mode", TWO_D, ids=MODE_IDS)
@pytest.mark.parametrize("stride", STRIDES)
def test_gpu_operations(stride, mode, usage, device, schedule):
    x = strided(stride, make_input("bell", (330, 410), torch.bfloat16, device))
    q = native_quantizer(mode | usage_options(usage), schedule)
    names = gpu_operations(lambda: q.quantize(x))
    assert kernels(names) in EXPECTED_OPERATIONS[schedule], names


@pytest.mark.cuda
def test_gpu_operations_with_given_amax(device, schedule):
    x, amax = make_input("bell", (330, 410), torch.bfloat16, device), torch.ones(1, device=device)
    q = native_quantizer({}, schedule)
    for given in (amax, 1.0):
        names = gpu_operations(lambda given=given: q.quantize(x, amax=given))
        assert kernels(names) == ["quantize"], names


@pytest.mark.cuda
def test_a_call_does_not_synchronize(device, schedule):
    x = make_input("bell", (330, 410), torch.bfloat16, device)
    q = native_quantizer({}, schedule)
    q.quantize(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        q.quantize(x)
        NVFP4Quantizer()(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
def test_current_stream_is_used(device, schedule):
    x = make_input("bell", (512, 512), torch.bfloat16, device)
    q, want = native_quantizer({}, schedule), oracle(x, {})
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        late = x * 1
        got = q.quantize(late)
    stream.synchronize()
    assert_same_buffers(got, want)


@pytest.mark.cuda
@pytest.mark.parametrize("mode", TWO_D, ids=MODE_IDS)
def test_inside_a_cuda_graph(mode, device, schedule):
    x = make_input("bell", (130, 210), torch.bfloat16, device)
    q = native_quantizer(mode, schedule)
    q.quantize(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        buffers = q.quantize(x)
    for scale in (4.0, 0.5, 0.0, 2.0):
        x.copy_(scale * make_input("bell", (130, 210), torch.bfloat16, device, seed=7))
        graph.replay()
        assert_same_buffers(buffers, oracle(x, mode), f"scale {scale}")
