"""How things are timed: wall time of a statement, GPU time by graph replay, what a copy reaches, what the GPU ran."""

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.benchmark import Timer

MIN_CALLS = 20  # in a graph, so that its own launch does not count
MAX_SETS = 512  # of rotating buffers
COPY_BYTES = 2 << 30


def wall_medians(stmt: str, names: dict, repeats: int, min_run_time: float) -> list[float]:
    """Median microseconds a call of `stmt`, once for each of `repeats` measurements."""
    timer = Timer(stmt, globals=names, num_threads=torch.get_num_threads())
    timer.timeit(1)  # what happens once, as a compilation
    return [timer.blocked_autorange(min_run_time=min_run_time).median * 1e6 for _ in range(repeats)]


def rotating_sets(set_bytes: int, device: torch.device) -> int:
    """How many sets of inputs and outputs, used in turn, leave nothing of one in the L2 cache when it is used again."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(max(2, math.ceil(3 * cache / set_bytes)), MAX_SETS)


def replay_times(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Microseconds a call on the GPU, once for each replay of a graph that makes all `calls` in turn."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is loaded, compiled or allocated once must not be captured
        for _ in range(2):
            calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    rounds = math.ceil(MIN_CALLS / len(calls))
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    graph.replay()  # the GPU is busy while the host enqueues what is timed
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 / (rounds * len(calls)) for start, end in events]


def copy_rates(device: torch.device, repeats: int) -> dict[str, float]:
    """Bytes read and written a second: by torch's device-to-device copy, and by a kernel that reads and writes once."""
    free, _ = torch.cuda.mem_get_info(device)
    source = torch.randint(1 << 30, (min(COPY_BYTES, free // 4) // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    copies = {
        "memcpy": lambda: target.copy_(source),
        "kernel": lambda: torch.bitwise_not(source, out=target),
    }
    moved = 2 * source.nbytes
    return {name: moved / statistics.median(replay_times([copy], repeats)) * 1e6 for name, copy in copies.items()}


def gpu_operations(calls: Sequence[Callable[[], object]]) -> list[list[tuple[str, float]]]:
    """Name and microseconds of the kernels, copies and memsets of a warm run of each call, in order."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for i, call in enumerate(calls):
            with record_function(f"call {i}"):
                time.sleep(1e-3)  # host and device clocks differ a little
                call()
                torch.cuda.synchronize()
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    on_gpu = [e for e in events if e.device_type == DeviceType.CUDA and not e.name.startswith("call ")]
    spans = [e.time_range for e in events if e.device_type == DeviceType.CPU and e.name.startswith("call ")]
    return [
        [(e.name, e.time_range.elapsed_us()) for e in on_gpu if span.start <= e.time_range.start < span.end]
        for span in spans
    ]
