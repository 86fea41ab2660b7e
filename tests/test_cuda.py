"""What a call is on a GPU: its operations, streams, devices and CUDA graphs."""

from functools import partial

import pytest
import torch
from helpers import BUFFERS, STRIDES, USAGES, assert_same_buffers, buffers_of, make_input, reference, strided
from native import (
    MODES,
    RNG_STATE,
    assert_matches_oracle,
    every_layout,
    gpu_operations,
    native_quantizer,
    oracle,
    poisoned_buffers,
    public_quantizer,
    rng_of,
    usage_id,
    usage_options,
)

from nvfp4_quant import NVFP4Quantizer, swizzle_scales_for_gemm_, unswizzle_scales_

pytestmark = pytest.mark.cuda

TWO_D = ({}, {"with_2d_quantization": True})
MODE_IDS = ["1d", "2d"]


def kernels(names: list[str]) -> list[str]:
    """Which of the three operations each name is; any other name as it is."""
    known = ("zero_amax_kernel", "amax_kernel", "quantize")
    return [next((k for k in known if k in name), name) for name in names]


EXPECTED_OPERATIONS = {"split": [["zero_amax_kernel", "amax_kernel", "quantize"]], "fused": [["quantize"]]}
EXPECTED_OPERATIONS["auto"] = EXPECTED_OPERATIONS["split"] + EXPECTED_OPERATIONS["fused"]


@pytest.mark.parametrize("usage", USAGES, ids=usage_id)
@pytest.mark.parametrize("mode", TWO_D, ids=MODE_IDS)
def test_gpu_operations(mode, usage, device, schedule):
    q = native_quantizer(mode | usage_options(usage), schedule)
    bell = make_input("bell", (330, 410), torch.bfloat16, device)
    xs = [strided(stride, bell) for stride in STRIDES]
    for stride, names in zip(STRIDES, gpu_operations(*[partial(q.quantize, x) for x in xs]), strict=True):
        assert kernels(names) in EXPECTED_OPERATIONS[schedule], (stride, names)


def test_gpu_operations_with_given_amax(device, schedule):
    x, amax = make_input("bell", (330, 410), torch.bfloat16, device), torch.ones(1, device=device)
    q = native_quantizer({}, schedule)
    for names in gpu_operations(*[partial(q.quantize, x, amax=given) for given in (amax, 1.0)]):
        assert kernels(names) == ["quantize"], names


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


def test_streams_share_nothing(device, schedule):
    """Two streams at once, many times: no scratch memory of one call is another's."""
    xs = [make_input("bell", (1024, 1024), torch.bfloat16, device, seed) for seed in range(2)]
    q, want = native_quantizer({}, schedule), [oracle(x, {}) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    results = [[], []]
    for _ in range(50):
        for x, stream, got in zip(xs, streams, results, strict=True):
            with torch.cuda.stream(stream):
                got.append(q.quantize(x))
    torch.cuda.synchronize()
    for w, buffers in zip(want, results, strict=True):
        for got in buffers:
            assert_same_buffers(got, w)


@pytest.mark.multi_gpu
def test_another_gpu_than_the_current_one(device, schedule):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    x = make_input("bell", (130, 210), torch.bfloat16, "cuda:1")
    assert torch.cuda.current_device() == 0
    assert_matches_oracle(x, {}, schedule)
    assert NVFP4Quantizer()(x).device == x.device


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


@pytest.mark.parametrize("mode", MODES)
def test_gpu_operations_of_every_mode(mode, device, schedule):
    x = make_input("bell", (330, 410), torch.bfloat16, device)
    layouts = list(every_layout(MODES[mode]))
    rng_state = rng_of(MODES[mode])
    calls = [partial(native_quantizer(options, schedule).quantize, x, rng_state=rng_state) for options in layouts]
    for options, names in zip(layouts, gpu_operations(*calls), strict=True):
        assert kernels(names) in EXPECTED_OPERATIONS[schedule], (options, names)


def test_gpu_operations_with_the_generator(device, schedule):
    x = make_input("bell", (330, 410), torch.bfloat16, device)
    q = native_quantizer({"stochastic_rounding": True}, schedule)
    (names,) = gpu_operations(partial(q.quantize, x))
    assert kernels(names) in EXPECTED_OPERATIONS[schedule], names


def test_gpu_operations_of_swizzling(device):
    y = public_quantizer({})(make_input("bell", (330, 410), torch.bfloat16, device))

    there, back = gpu_operations(partial(swizzle_scales_for_gemm_, y), partial(unswizzle_scales_, y))
    assert len(there) == len(back) == 1, (there, back)


@pytest.mark.parametrize("mode", MODES)
def test_inside_a_cuda_graph_with_a_noop_flag(mode, device, schedule):
    options = MODES[mode]
    q = native_quantizer(options, schedule)
    x, flag = torch.zeros(130, 70, device=device), torch.zeros(1, device=device)
    buffers = poisoned_buffers(q, x.shape, device)
    q.quantize_into(x, *buffers, noop_flag=flag, rng_state=rng_of(options))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q.quantize_into(x, *buffers, noop_flag=flag, rng_state=rng_of(options))
    want = None
    for seed, noop in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 1.0)):
        x.copy_(make_input("wide", x.shape, device=device, seed=seed))
        flag.fill_(noop)
        graph.replay()
        want = want if noop else oracle(x, options)
        assert_same_buffers(buffers, want, f"seed {seed}")


@pytest.mark.parametrize("mode", [mode for mode in MODES if "stochastic" in mode])
def test_cpu_and_gpu_draw_the_same_bits(mode, device, schedule):
    x = make_input("bell", (70, 90), torch.bfloat16)
    q = native_quantizer(MODES[mode], schedule)
    want = native_quantizer(MODES[mode]).quantize(x, rng_state=RNG_STATE)
    assert_same_buffers(q.quantize(x.to(device), rng_state=RNG_STATE), buffers_of(want))


@pytest.mark.parametrize("mode", MODES)
def test_larger_than_what_fits_on_chip(mode, device, schedule):
    """34 MB: more than all shared memory together; the oracle, too, runs on the GPU here."""
    options = MODES[mode] | {"optimize_for_gemm": True}
    x = make_input("bell", (4112, 4099), torch.bfloat16, device)
    want = reference.quantize(x, rng_state=rng_of(options), **options)
    assert_same_buffers(native_quantizer(options, schedule).quantize(x, rng_state=rng_of(options)), want)


@pytest.mark.parametrize("name", BUFFERS[:4])
def test_misaligned_buffers_are_refused(name, device):
    """The codes of a block are one word here."""
    q = native_quantizer({})
    buffers = buffers_of(poisoned_buffers(q, (33, 70), device))
    shape = buffers[name].shape
    buffers[name] = torch.zeros(shape.numel() + 1, dtype=torch.uint8, device=device)[1:].view(shape)
    before = {other: t.clone() for other, t in buffers.items()}
    with pytest.raises(ValueError, match=name):
        q.quantize_into(torch.ones(33, 70, device=device), **buffers)
    assert_same_buffers(buffers, before)
