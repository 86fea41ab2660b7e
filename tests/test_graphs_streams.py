"""The public calls under CUDA graphs, streams and threads, on other devices, and without synchronisation."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import BUFFERS, assert_same_buffers, assert_same_bytes, buffers_of, make_input
from native import MODES, RNG_STATE, native_quantizer, oracle, public_quantizer

import nvfp4_quant
from nvfp4_quant import NVFP4Quantizer, NVFP4Tensor

SHAPE = (130, 72)
GRAPH_MODES = [mode for mode, options in MODES.items() if not options.get("stochastic_rounding")]
RANDOM_MODES = [mode for mode in MODES if mode not in GRAPH_MODES]


def make_x(device, seed=0, shape=SHAPE) -> torch.Tensor:
    return make_input("bell", shape, torch.bfloat16, device, seed)


def captured(call) -> tuple[torch.cuda.CUDAGraph, object]:
    """The call's graph and its result, which replays write."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # the first call may load code, which must not be captured
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    torch.cuda.synchronize()  # torch writes the seed on the capture's stream, and a replay's on another
    return graph, result


def in_threads(calls) -> list:
    """All calls at once, each in a thread of its own; results in order, exceptions raised."""
    barrier = threading.Barrier(len(calls))

    def run(call):
        barrier.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


# ---- threads


@pytest.mark.parametrize("mode", MODES)
def test_threads_give_serial_results(mode, device):
    """Many at once on one quantizer, each with an input of its own."""
    q = public_quantizer(MODES[mode])
    rng_state = RNG_STATE if q.stochastic_rounding else None
    xs = [make_x(device, seed) * 2.0**seed for seed in range(4)]
    results = in_threads([lambda x=x: [q.quantize(x, rng_state=rng_state) for _ in range(5)] for x in xs])
    for x, repeats in zip(xs, results, strict=True):
        want = oracle(x, MODES[mode])
        for y in repeats:
            assert_same_buffers(y, want, mode)


def test_threads_update_and_read(device):
    q = NVFP4Quantizer()

    def work(seed: int):
        y = q.make_empty(SHAPE, dtype=torch.bfloat16, device=device)
        for i in range(5):
            x = make_x(device, seed + i)
            q.update_quantized(x, y)
            nvfp4_quant.swizzle_scales_for_gemm_(y)
            assert_same_bytes(y.dequantize(), q(x).dequantize())
        return y

    for seed, y in zip((0, 10, 20), in_threads([lambda s=s: work(s) for s in (0, 10, 20)]), strict=True):
        assert_same_buffers(y, oracle(make_x(device, seed + 4), {"optimize_for_gemm": True}))


def test_threads_change_quantizers_of_their_own(device):
    """Copies share their settings and the native quantizer until they change."""
    q = NVFP4Quantizer()
    x = make_x(device)

    def work(name: str):
        own = q.copy()
        setattr(own, name, True)
        return own(x)

    names = ["with_2d_quantization", "with_rht", "row_scaled_nvfp4", "optimize_for_gemm"]
    for name, y in zip(names, in_threads([lambda n=n: work(n) for n in names]), strict=True):
        assert_same_buffers(y, oracle(x, {name: True}), name)
    assert_same_buffers(q(x), oracle(x, {}))


def test_no_memory_is_kept(device):
    """Results are freed with their last reference: no cycle holds them."""
    q = NVFP4Quantizer()
    gc.collect()
    gc.disable()
    try:
        y = q(make_x(device))
        alive = torch.multiprocessing.reductions.StorageWeakRef(y._rowwise_data.untyped_storage())
        nvfp4_quant.swizzle_scales_for_gemm_(y)
        y.dequantize()
        del y
        assert alive.expired()
    finally:
        gc.enable()


# ---- CUDA graphs


@pytest.mark.cuda
@pytest.mark.parametrize("mode", GRAPH_MODES)
def test_replays_follow_the_input(mode, device):
    q = public_quantizer(MODES[mode])
    x = make_x(device)
    updated = q(x)
    graph, (made, _) = captured(lambda: (q(x), q.update_quantized(x, updated)))
    for scale in (1.0, 0.125, 0.0, 32.0):
        x.copy_(make_x(device, 7) * scale)
        graph.replay()
        want = oracle(x, MODES[mode])
        assert_same_buffers(made, want, f"{mode} {scale}")
        assert_same_buffers(updated, want, f"{mode} {scale} in place")


@pytest.mark.cuda
@pytest.mark.parametrize("mode", RANDOM_MODES)
def test_replays_draw_new_bits_and_follow_the_seed(mode, device):
    q = public_quantizer(MODES[mode])
    x = make_x(device)
    graph, y = captured(lambda: q(x))
    draws = []
    for seed in (3, 3, 4):
        torch.cuda.manual_seed(seed)
        for _ in range(2):
            graph.replay()
            draws.append(y._rowwise_data.clone())
    first, second, again, again_second, other, _ = draws
    assert torch.equal(first, again) and torch.equal(second, again_second)
    assert not torch.equal(first, second) and not torch.equal(first, other)
    torch.cuda.manual_seed(3)
    assert_same_bytes(q(x)._rowwise_data, first)


@pytest.mark.cuda
def test_noop_flag_in_a_graph(device):
    q = NVFP4Quantizer()
    x, flag = make_x(device), torch.zeros(1, device=device)
    y = q(x)
    graph, _ = captured(lambda: q.update_quantized(x, y, noop_flag=flag))
    want = oracle(x, {})
    for seed, noop in ((1, 0.0), (2, 1.0), (3, 0.0)):
        x.copy_(make_x(device, seed))
        flag.fill_(noop)
        graph.replay()
        want = want if noop else oracle(x, {})
        assert_same_buffers(y, want, f"noop_flag {noop}")


@pytest.mark.cuda
def test_everything_else_in_a_graph(device):
    q = NVFP4Quantizer(with_2d_quantization=True)
    x, amax = make_x(device), torch.zeros(1, device=device)

    def call():
        y = q(x)
        nvfp4_quant.compute_amax(x, amax)
        y.update_usage(columnwise_usage=False)
        y.update_usage(columnwise_usage=True)
        return nvfp4_quant.swizzle_scales_for_gemm_(y), y.dequantize()

    graph, (y, values) = captured(call)
    for seed in range(3):
        x.copy_(make_x(device, seed) / 2**seed)
        graph.replay()
        assert_same_buffers(y, oracle(x, {"with_2d_quantization": True, "optimize_for_gemm": True}))
        assert_same_bytes(values, q(x).dequantize())
        assert amax.item() == x.abs().max().item()


@pytest.mark.cuda
def test_two_graphs_on_two_streams(device):
    q = NVFP4Quantizer()
    xs = [make_x(device, seed, (512, 512)) for seed in range(2)]
    graphs = [captured(lambda x=x: q(x)) for x in xs]
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(20):
        for stream, (graph, _) in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for x, (_, y) in zip(xs, graphs, strict=True):
        assert_same_buffers(y, oracle(x, {}))


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["plain", "hadamard", "row_scaled"])
def test_cast_that_starts_before_its_amax_has_finished(mode, device):
    # Enough tiles for that, right behind the kernels that write x; and without an amax kernel in between.
    q, fused = (public_quantizer(MODES[mode] | {"schedule": schedule}) for schedule in ("split", "fused"))
    source = make_x(device, 3, (8192, 2560))
    x = source.clone()
    graph, replayed = captured(lambda: q(x))

    def rewrite(y, scale):
        # Scaled by powers of two x has the same codes, so that those of before are spoilt, and x differs in between.
        for name, buffer in buffers_of(y).items():
            if "amax" not in name:
                buffer.view(torch.uint8).fill_(0xA5)
        torch.mul(source, -1.0, out=x)
        torch.mul(source, scale, out=x)

    for scale in (0.125, 32.0, 1.0):
        torch.mul(source, scale, out=x)
        called = q(x)
        want = buffers_of(fused(x))
        assert_same_buffers(called, want, f"{mode} {scale}")
        rewrite(replayed, scale)
        graph.replay()
        assert_same_buffers(replayed, want, f"{mode} {scale} in a graph")
        rewrite(called, scale)
        native_quantizer(MODES[mode], "split").quantize_into(x, *buffers_of(called).values(), with_amax=False)
        assert_same_buffers(called, want, f"{mode} {scale} with the amax of before")


# ---- streams and devices


@pytest.mark.cuda
@pytest.mark.parametrize("mode", MODES)
def test_no_call_synchronises(mode, device):
    q = public_quantizer(MODES[mode])
    x, flag = make_x(device), torch.zeros(1, device=device)
    y = q(x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        q(x)
        q.update_quantized(x, y, noop_flag=flag)
        y.dequantize()
        nvfp4_quant.swizzle_scales_for_gemm_(y)
        nvfp4_quant.compute_amax(x, torch.empty(1, device=device))
        q.make_empty(SHAPE, device=device)
        repr(y)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
def test_streams_and_threads_at_once(device):
    q = NVFP4Quantizer()

    def work(seed: int):
        with torch.cuda.stream(torch.cuda.Stream()):
            x = make_x(device, seed, (256, 512))
            ys = [q(x) for _ in range(10)]
            torch.cuda.current_stream().synchronize()
        return x, ys

    torch.cuda.synchronize()
    for x, ys in in_threads([lambda s=s: work(s) for s in range(4)]):
        want = oracle(x, {})
        for y in ys:
            assert_same_buffers(y, want)


@pytest.mark.cuda
def test_memory_used_on_another_stream_is_kept(device):
    """record_stream reaches every buffer: none is handed out again while the other stream still reads it."""
    q = NVFP4Quantizer()
    x = make_x(device, shape=(512, 512))
    want = q(x).dequantize()
    side = torch.cuda.Stream()
    y = q(x)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)  # half a second: longer than all below takes
        got = y.dequantize()
    y.record_stream(side)
    pointers = {b.data_ptr() for b in y._buffers()}
    del y
    reused = [q(x * 0) for _ in range(4)]
    assert pointers.isdisjoint(b.data_ptr() for z in reused for b in z._buffers())
    torch.cuda.synchronize()
    assert_same_bytes(got, want)


@pytest.mark.cuda
@pytest.mark.multi_gpu
def test_a_device_that_is_not_the_current_one(device):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda", 1)
    q = NVFP4Quantizer(with_rht=True)
    with torch.cuda.device(0):
        x = make_x(other)
        with torch.cuda.stream(torch.cuda.Stream(other)):
            torch.cuda._sleep(10_000_000)
            x.mul_(2)
            y = q(x)
        torch.cuda.synchronize(other)
        assert torch.cuda.current_device() == 0
        assert isinstance(y, NVFP4Tensor) and all(getattr(y, f"_{name}").device == other for name in BUFFERS)
        assert_same_buffers(y, oracle(x, {"with_rht": True}))
        assert_same_bytes(y.dequantize().cpu(), y.cpu().dequantize())
        with pytest.raises(ValueError, match="cuda:1"):
            q.update_quantized(x, q(x.to("cuda:0")))
