"""with_amax_reduction: one amax for all processes of a group, in one collective; two processes on this machine."""

import functools
import os
import tempfile
import traceback
from multiprocessing.connection import wait

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers import assert_same_buffers, make_input, reference
from native import public_quantizer

from nvfp4_quant import NVFP4Quantizer

WORLD = 2
OPTIONS = [
    {},
    {"with_2d_quantization": True},
    {"with_rht": True},
    {"columnwise": False},
    {"rowwise": False, "with_rht": True},
    {"nvfp4_use_4over6": True, "optimize_for_gemm": True},
]


def _worker(rank: int, file: str, device_type: str, scenarios, results) -> None:
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=WORLD)
    for scenario in scenarios:
        try:
            scenario(rank, device)
        except Exception:
            results.put((scenario.__name__, rank, traceback.format_exc()))
            os._exit(1)  # the other process may wait for this one in a collective
        results.put((scenario.__name__, rank, ""))
    dist.barrier()
    dist.destroy_process_group()


@functools.cache
def outcomes(device_type: str) -> dict:
    """(scenario, rank) -> traceback or "", of all scenarios in one pair of processes."""
    context = mp.get_context("spawn")
    results = context.Manager().Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (os.path.join(folder, "store"), device_type, SCENARIOS, results)
        processes = [context.Process(target=_worker, args=(rank, *arguments)) for rank in range(WORLD)]
        for process in processes:
            process.start()
        wait([process.sentinel for process in processes], 180)
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.terminate()
        gathered = [results.get() for _ in range(results.qsize())]
    return {(name, rank): error for name, rank, error in gathered}


def inputs(kind: str = "bell", shapes=((33, 40), (20, 40))) -> list:
    """What every process has; process 1 has the larger values."""
    return [make_input(kind, shape, torch.bfloat16, seed=rank) * 4**rank for rank, shape in enumerate(shapes)]


def want_of(xs, rank: int, options: dict) -> dict:
    """The oracle's cast of this process's input with the maximum of all amaxes."""
    alone = [reference.quantize(x, **options) for x in xs]
    amaxes = {
        name: None if alone[0][name] is None else torch.stack([a[name] for a in alone]).amax(0)
        for name in ("amax_rowwise", "amax_columnwise")
    }
    want = {}
    for side in reference.SIDES:
        # One direction at a time, with its amax given in place of the reduction; with Hadamard see below.
        amax = amaxes[f"amax_{side}"]
        for name in (f"{side}_data", f"{side}_scale_inv", f"amax_{side}"):
            want[name] = None if amax is None else _cast(xs[rank], options, side, amax)[name]
    return want


def _cast(x, options: dict, side: str, amax) -> dict:
    if not (options.get("with_rht") and side == "columnwise"):
        return reference.quantize(x, **{**options, "with_rht": False}, amax=amax)
    # The column-wise side of a Hadamard quantization is the row-wise one of the transposed transform.
    mask = 0xD7E8
    padded = torch.nn.functional.pad(x.float().t(), (0, -x.shape[0] % 16))
    y = reference.hadamard(padded.reshape(-1, 16), mask).reshape(padded.shape).to(x.dtype)
    plain = {**options, "with_rht": False, "rowwise": True, "columnwise": False}
    cast = reference.quantize(y, **plain, amax=amax)
    return {name.replace("rowwise", "columnwise"): t for name, t in cast.items() if "rowwise" in name}


# ---- scenarios: module-level functions, since other processes run them


def check_every_mode(rank, device):
    xs = inputs()
    for options in OPTIONS:
        quantizer = public_quantizer(options | {"with_amax_reduction": True})
        got = quantizer(xs[rank].to(device))
        assert_same_buffers(got, want_of(xs, rank, options), f"rank {rank} {options}")
        assert not got._quantizer.with_amax_reduction
        again = quantizer.update_quantized(xs[rank].to(device) * 0.5, got)
        assert_same_buffers(again, want_of([x * 0.5 for x in xs], rank, options), f"rank {rank} {options} in place")


def check_empty_input(rank, device):
    xs = inputs(shapes=((0, 40), (20, 40)))
    got = NVFP4Quantizer(with_amax_reduction=True)(xs[rank].to(device))
    assert_same_buffers(got, want_of(xs, rank, {}), f"rank {rank}")
    assert got._amax_rowwise.item() == xs[1].abs().max().item() > 0


def check_noop_flag(rank, device):
    """Process 1 has its flag set: nothing of its tensor changes, and process 0 still gets the amax of both."""
    quantizer = NVFP4Quantizer(with_amax_reduction=True)
    first, second = inputs(), inputs("wide")
    y = quantizer(first[rank].to(device))
    before = {name: t.clone() for name, t in zip(reference.BUFFERS, y._buffers(), strict=True)}
    flag = torch.full((1,), float(rank), device=device)
    quantizer.update_quantized(second[rank].to(device), y, noop_flag=flag)
    assert_same_buffers(y, before if rank else want_of(second, 0, {}), f"rank {rank}")
    for wrong, error in ((flag.double(), TypeError), (torch.zeros(2, device=device), ValueError)):
        with pytest.raises(error, match="noop_flag"):
            quantizer.update_quantized(first[rank].to(device), y, noop_flag=wrong)
    assert_same_buffers(y, before if rank else want_of(second, 0, {}), f"rank {rank} after a wrong flag")
    quantizer.update_quantized(second[rank].to(device), y, noop_flag=flag * 0)
    assert_same_buffers(y, want_of(second, rank, {}), f"rank {rank} afterwards")


def check_one_collective(rank, device):
    """One coalesced all-reduce a call, whatever the directions."""
    from nvfp4_quant import amax_reduction

    calls = []
    original = amax_reduction.all_reduce_max
    amax_reduction.all_reduce_max = lambda tensors, group: (calls.append(len(tensors)), original(tensors, group))
    for usage in ({}, {"columnwise": False}, {"rowwise": False}):
        NVFP4Quantizer(**usage, with_amax_reduction=True)(inputs()[rank].to(device))
    assert calls == [2, 1, 1]


def check_groups(rank, device):
    """A group of its own process reduces nothing; the group of both does; a copy keeps the group."""
    groups = [dist.new_group([r]) for r in range(WORLD)]
    both = dist.new_group(list(range(WORLD)))
    xs = inputs()
    alone = NVFP4Quantizer(with_amax_reduction=True, amax_reduction_group=groups[rank])
    assert_same_buffers(alone(xs[rank].to(device)), want_of(xs[rank : rank + 1], 0, {}), f"rank {rank} alone")
    together = NVFP4Quantizer(with_amax_reduction=True, amax_reduction_group=both)
    for quantizer in (together, together.copy()):
        assert_same_buffers(quantizer(xs[rank].to(device)), want_of(xs, rank, {}), f"rank {rank} together")
    try:
        hash(together._settings)
    except TypeError as error:
        assert "amax_reduction_group" in str(error)
    else:
        raise AssertionError("settings with a group have a hash")


def check_later_update_is_local(rank, device):
    """A tensor updates itself, and unpickles, without the group: only process 0 does so here, and does not wait."""
    xs = inputs()
    y = NVFP4Quantizer(with_amax_reduction=True)(xs[rank].to(device))
    if rank == 0:
        y.quantize_(xs[0].to(device))
        assert_same_buffers(y, want_of(xs[:1], 0, {}))
        y._quantizer(xs[0].to(device))


SCENARIOS = (
    check_every_mode,
    check_empty_input,
    check_noop_flag,
    check_one_collective,
    check_groups,
    check_later_update_is_local,
)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.xdist_group("amax_reduction")
def test_in_two_processes(scenario, device):
    if device.type == "cuda" and torch.cuda.device_count() < WORLD:
        pytest.skip(f"needs {WORLD} GPUs")
    got = outcomes(device.type)
    for rank in range(WORLD):
        error = got.get((scenario.__name__, rank), "did not end")
        assert not error, f"process {rank}: {error}"


def test_refused_for_fake_and_meta_tensors(device):
    quantizer = NVFP4Quantizer(with_amax_reduction=True)
    with pytest.raises(NotImplementedError, match="with_amax_reduction=True"):
        quantizer(torch.ones(2, 16, device="meta"))
