"""Times quantization on one device and writes a JSON line for each figure; see the README beside this file."""

import argparse
import json
import statistics
import sys
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from arguments import KINDS, environment, parse_arguments
from peers import peers
from sequences import sequences, skeleton_statements
from table import markdown
from timing import copy_rates, gpu_operations, replay_times, rotating_sets, wall_medians

from nvfp4_quant import NVFP4Quantizer, swizzle_scales_for_gemm_
from nvfp4_quant._native import _C

QUANTIZE = "q(x)"
QUANTIZE_AND_SWIZZLE = "t = q(x); swizzle_scales_for_gemm_(t)"
STATEMENTS = (QUANTIZE, QUANTIZE_AND_SWIZZLE)
FILL = "quantize_into(x, *buffers)"
CALL = "call(x)"
REPLAYS = 11
RNG_STATE = (1, 0)  # given where a graph is captured, so that a replay is the quantization and nothing else
SCALES = (1, 3)  # positions among the six buffers


def as_text(result: dict) -> str:
    """JSON with one row a line, so that two runs can be compared by line."""
    head = json.dumps({name: value for name, value in result.items() if name != "rows"}, indent=2)
    rows = ",\n".join(f"    {json.dumps(row)}" for row in result["rows"])
    return f'{head[:-2]},\n  "rows": [\n{rows}\n  ]\n}}\n'


class Work(NamedTuple):
    """Inputs and outputs of one kind and shape; on a GPU so many of them that a turn does not fit into the L2."""

    inputs: list[torch.Tensor]
    outputs: list[tuple]

    @property
    def x(self) -> torch.Tensor:
        return self.inputs[0]

    def moved_bytes(self, reads: int) -> int:
        return reads * self.x.nbytes + sum(buffer.nbytes for buffer in self.outputs[0])


def native_quantizer(kind: str, optimize_for_gemm: bool, schedule: str):
    return _C.NVFP4Quantizer(**KINDS[kind].options, optimize_for_gemm=optimize_for_gemm, schedule=schedule)


def public_quantizer(kind: str, optimize_for_gemm: bool, schedule: str) -> NVFP4Quantizer:
    quantizer = NVFP4Quantizer(**KINDS[kind].options, schedule=schedule)
    quantizer.optimize_for_gemm = optimize_for_gemm
    return quantizer


def fill(native, x: torch.Tensor, buffers: tuple) -> None:
    native.quantize_into(x, *buffers, rng_state=RNG_STATE if native.stochastic_rounding else None)


def fill_and_swizzle(native, x: torch.Tensor, buffers: tuple) -> None:
    fill(native, x, buffers)
    _C.swizzle_scales(*(buffers[i] for i in SCALES))


def run_statement(stmt: str, q: NVFP4Quantizer, x: torch.Tensor):
    t = q(x)
    return swizzle_scales_for_gemm_(t) if stmt == QUANTIZE_AND_SWIZZLE else t


def about_call(kind: str, q: NVFP4Quantizer, stmt: str, x: torch.Tensor) -> dict:
    """What is called, and what became of the scales."""
    t = q(x)
    made = [t._buffers()[i] for i in SCALES]
    if stmt == QUANTIZE_AND_SWIZZLE:
        swizzle_scales_for_gemm_(t)
    return {
        "kind": kind,
        "dtype": str(x.dtype).removeprefix("torch."),
        "shape": tuple(x.shape),
        "optimize_for_gemm": q.optimize_for_gemm,
        "swizzled_after_call": t.with_gemm_swizzled_scales,
        "allocated_swizzled": any(t._buffers()[i] is not scale for i, scale in zip(SCALES, made, strict=True)),
        "stmt": stmt,
    }


class Benchmark:
    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.device = arguments.device
        self.on_gpu = self.device.type == "cuda"
        self.result = {"label": arguments.label, **environment(self.device), "rows": [], "errors": []}
        self.rate = None  # bytes a second that a copy kernel reads and writes
        self.skeletons = {}  # wall time by shape

    def run(self) -> dict:
        """The result as it is in the JSON file."""
        a = self.arguments
        if self.on_gpu:
            with self.section("copy"):
                self.copy()
        else:
            print("skipped, as they need a GPU: copy, GPU times, trace", file=sys.stderr)
        for shape in a.shapes:
            with self.section(f"skeleton {shape}"):
                self.skeleton(shape)
            with self.section(f"sequences {shape}"):
                self.sequences(shape)
            for kind in a.kinds:
                with self.section(f"{kind} {shape}"):
                    self.calls(kind, shape)
        for (name, function), shape in product(peers() if a.peers else (), a.shapes):
            with self.section(f"{name} {shape}"):
                self.peer(name, function, shape)
        if a.trace and self.on_gpu:  # last: a profiler that has run makes later launches slower
            for shape in a.shapes:
                with self.section(f"trace {shape}"):
                    self.trace(shape)
        return self.result

    @contextmanager
    def section(self, name: str):
        """What fails in it is reported and does not take the rest along."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            print(f"failed: {name}", file=sys.stderr, flush=True)
            self.result["errors"].append(f"{name}: {type(error).__name__}: {error}")
            if self.on_gpu:  # a failed capture leaves its own stream behind
                torch.cuda.set_stream(torch.cuda.default_stream())
        if self.arguments.out:
            self.arguments.out.write_text(as_text(self.result))

    def emit(self, **row) -> None:
        row = {"label": self.arguments.label, **row}
        self.result["rows"].append(row)
        print(json.dumps(row), flush=True)

    # ---- what is measured of each call

    def work(self, native, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> Work:
        def one_set():
            return torch.randn(shape, dtype=dtype, device=self.device), native.empty(shape, self.device)

        sets = [one_set()]
        if self.on_gpu:
            set_bytes = Work([sets[0][0]], [sets[0][1]]).moved_bytes(1)
            sets += [one_set() for _ in range(rotating_sets(set_bytes, self.device) - 1)]
        return Work(*map(list, zip(*sets, strict=True)))

    def wall(self, stmt: str, names: dict) -> dict:
        medians = wall_medians(stmt, names, self.arguments.repeats, self.arguments.min_run_time)
        return {
            "stmt": stmt,
            "medians_us": medians,
            "median_us": statistics.median(medians),
            "best_median_us": min(medians),
        }

    def over_skeleton(self, shape: tuple[int, int], wall: dict) -> dict:
        skeleton = self.skeletons.get(shape)
        return {"wall_over_skeleton": skeleton and wall["median_us"] / skeleton}

    def gpu(self, fill_one: Callable, work: Work) -> dict:
        """GPU time of `fill_one(x, buffers)`, beside the time in which a copy kernel would move the bytes."""
        if not self.on_gpu:
            return {"gpu_us": None}
        times = replay_times([partial(fill_one, *pair) for pair in zip(*work, strict=True)], REPLAYS)
        found = {"gpu_us": statistics.median(times), "best_gpu_us": min(times)}
        if self.rate:
            for name, reads in (("copy", 1), ("floor", 2)):
                found[f"{name}_us"] = work.moved_bytes(reads) / self.rate * 1e6
                found[f"gpu_over_{name}"] = found["gpu_us"] / found[f"{name}_us"]
        return found

    # ---- the sections

    def copy(self) -> None:
        rates = copy_rates(self.device, REPLAYS)
        self.rate = rates["kernel"]
        self.emit(row="copy", **{f"{name}_bytes_per_s": rate for name, rate in rates.items()})

    def skeleton(self, shape: tuple[int, int]) -> None:
        x = torch.randn(shape, dtype=torch.bfloat16, device=self.device)
        statements, names = skeleton_statements(x)
        for part, stmt in statements.items():
            if part != "whole" and self.skeletons:  # the parts once, they hardly depend on the shape
                continue
            wall = self.wall(stmt, names)
            self.emit(row="skeleton", part=part, shape=shape, **wall)
            if part == "whole":
                whole = wall["median_us"]
        self.skeletons[shape] = whole

    def sequences(self, shape: tuple[int, int]) -> None:
        native = _C.NVFP4Quantizer()
        work = self.work(native, shape)
        wanted = native.quantize(work.x)
        for sequence in sequences():
            if not all(map(torch.equal, sequence.call(work.x)._buffers(), wanted)):
                raise RuntimeError(f"{sequence.what}: the bytes differ from those of q(x)")
            wall = self.wall(CALL, {"call": sequence.call, "x": work.x})
            about = {"kind": "1d", "shape": shape, "operations": sequence.operations, "sequence": sequence.what}
            gpu = self.gpu(sequence.fill, work)
            self.emit(row="sequence", **about, **wall, **self.over_skeleton(shape, wall), **gpu)

    def calls(self, kind: str, shape: tuple[int, int]) -> None:
        schedule = self.arguments.schedule[0]
        work = self.work(native_quantizer(kind, False, schedule), shape, KINDS[kind].dtype)
        for optimize_for_gemm in KINDS[kind].orders:
            gpu = self.schedules(kind, shape, work, optimize_for_gemm)
            q = public_quantizer(kind, optimize_for_gemm, schedule)
            names = {"q": q, "x": work.x, "swizzle_scales_for_gemm_": swizzle_scales_for_gemm_}
            for stmt in STATEMENTS:
                about = about_call(kind, q, stmt, work.x)
                if about["allocated_swizzled"]:
                    gpu = self.gpu(partial(fill_and_swizzle, native_quantizer(kind, False, schedule)), work)
                wall = self.wall(stmt, names)
                over = self.over_skeleton(shape, wall)
                self.emit(row="call", **(about | {"schedule": schedule} | wall), **over, **gpu)

    def schedules(self, kind: str, shape: tuple[int, int], work: Work, optimize_for_gemm: bool) -> dict:
        """GPU time in each schedule; returns that of the first."""
        found = []
        for schedule in self.arguments.schedule:
            found.append(self.gpu(partial(fill, native_quantizer(kind, optimize_for_gemm, schedule)), work))
            if self.on_gpu:
                about = {"kind": kind, "shape": shape, "optimize_for_gemm": optimize_for_gemm, "schedule": schedule}
                self.emit(row="schedule", **about, stmt=FILL, **found[-1])
        return found[0]

    def peer(self, name: str, function: Callable, shape: tuple[int, int]) -> None:
        work = self.work(_C.NVFP4Quantizer(), shape)
        wall = self.wall(CALL, {"call": function, "x": work.x})
        gpu = {"gpu_us": None}
        with self.section(f"{name} {shape} in a graph"):
            gpu = self.gpu(lambda x, buffers: function(x), work)  # its outputs are its own
        self.emit(row="peer", kind="1d", shape=shape, peer=name, **wall, **gpu)

    def trace(self, shape: tuple[int, int]) -> None:
        abouts, calls = [], []
        for kind in self.arguments.kinds:
            x = torch.randn(shape, dtype=KINDS[kind].dtype, device=self.device)
            for order, stmt in product(KINDS[kind].orders, STATEMENTS):
                q = public_quantizer(kind, order, self.arguments.schedule[0])
                abouts.append(about_call(kind, q, stmt, x))
                calls.append(partial(run_statement, stmt, q, x))
        x = torch.randn(shape, dtype=torch.bfloat16, device=self.device)
        for sequence in sequences():
            abouts.append({"kind": "1d", "shape": shape, "stmt": CALL, "sequence": sequence.what})
            calls.append(partial(sequence.call, x))
        for about, operations in zip(abouts, gpu_operations(calls), strict=True):
            for i, (name, time) in enumerate(operations, 1):
                numbers = {"operation": i, "operations": len(operations)}
                self.emit(row="trace", **about, **numbers, gpu_activity=name, time=time)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv, __doc__)
    if arguments.device.type == "cuda":
        torch.cuda.set_device(arguments.device)
    result = Benchmark(arguments).run()
    print(markdown(result), file=sys.stderr)
    return 1 if result["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
