"""1-D and 2-D quantization of any shape, dtype, stride and values; the public quantizer; what a call costs on a GPU."""

import contextlib
import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import DTYPES, KINDS, STRIDES, TESTS, USAGES, assert_same_buffers, assert_same_bytes, make_input, strided
from native import (
    MODES,
    assert_matches_oracle,
    native,
    native_quantizer,
    oracle,
    public_quantizer,
    usage_id,
    usage_options,
)

from nvfp4_quant import NVFP4Quantizer, NVFP4Tensor, NVFP4TensorStorage

TWO_D = ({}, {"with_2d_quantization": True})
MODE_IDS = ["1d", "2d"]
EXTENTS = (0, 1, 7, 15, 16, 17, 33)


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


@pytest.mark.parametrize("mode", MODES)
def test_subnormals_survive_flush_denormal(mode, device, schedule):
    inputs = [make_input(kind, (130, 144), torch.float32, device) for kind in ("least", "tiny")]
    want = [oracle(x, MODES[mode]) for x in inputs]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        got = [native(x, MODES[mode], schedule) for x in inputs]
        still_set = (torch.full((1,), 1e-38) * 1e-2).item() == 0
    finally:
        torch.set_flush_denormal(False)
    assert still_set, "the call left flush-denormal off"
    for g, w in zip(got, want, strict=True):
        assert_same_buffers(g, w)


def test_threads_of_python(device, schedule):
    """Calls of several threads at once do not disturb each other; on a GPU each has its own stream."""
    xs = [make_input("bell", (130, 210), torch.bfloat16, device, seed) for seed in range(8)]
    q = native_quantizer({}, schedule)

    def work(x):
        stream = torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else contextlib.nullcontext()
        with stream:
            results = [q.quantize(x) for _ in range(20)]
            if device.type == "cuda":
                torch.cuda.current_stream().synchronize()
        return results

    if device.type == "cuda":
        torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        for x, results in zip(xs, pool.map(work, xs), strict=True):
            want = oracle(x, {})
            for got in results:
                assert_same_buffers(got, want)


EXIT_SCRIPT = """
import torch
from nvfp4_quant import NVFP4Quantizer
x = torch.randn(64, 64, device="{device}")
q = NVFP4Quantizer(stochastic_rounding=True)
y = q(x)
if x.is_cuda:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z = q(x)
    graph.replay()
"""


def test_process_exits_while_everything_is_alive(device):
    command = [sys.executable, "-c", EXIT_SCRIPT.format(device=device)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS.parent)
    assert (done.returncode, done.stderr) == (0, "")


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
