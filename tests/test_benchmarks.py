"""The benchmark: its rows on each device, its arithmetic with given GPU times, its tables and its plot."""

import functools
import importlib
import json
import os
import subprocess
import sys

import pytest
import torch
from helpers import TESTS

from nvfp4_quant._native import _C

BENCHMARKS = TESTS.parent / "benchmarks"
SHAPES = [[33, 50], [16, 64]]
KINDS = ["1d", "2d", "stochastic", "fp32", "swizzled"]
CALL_FIELDS = {
    *("label", "kind", "shape", "optimize_for_gemm", "swizzled_after_call", "allocated_swizzled", "stmt"),
    *("median_us", "best_median_us", "medians_us", "gpu_us", "wall_over_skeleton"),
}
SWIZZLE = "t = q(x); swizzle_scales_for_gemm_(t)"


@pytest.fixture
def modules(monkeypatch):
    """Imports a script of the benchmark as it is imported when it runs."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    names = ("arguments", "bench_nvfp4_paths", "peers", "plot", "sequences", "table", "timing")
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


@functools.cache
def run_script(device: str, out) -> tuple[list[dict], dict, str]:
    """Rows of stdout, the JSON file and stderr of one small run."""
    shapes = ",".join("x".join(map(str, shape)) for shape in SHAPES)
    options = ["--label", "tiny", "--kinds", ",".join(KINDS), "--shapes", shapes, "--repeats", "2", "--trace"]
    options += ["--min-run-time", "1e-4", "--device", device, "--out", out]
    environment = os.environ | {"PYTHONPATH": str(TESTS.parent)}
    command = [sys.executable, BENCHMARKS / "bench_nvfp4_paths.py", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], json.loads(out.read_text()), done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("benchmarks")


@pytest.fixture
def run(device, folder):
    return run_script(str(device), folder / f"{device}.json")


def rows_of(rows: list[dict], row: str) -> list[dict]:
    return [found for found in rows if found["row"] == row]


def test_file_and_lines_agree(run):
    rows, result, _ = run
    assert result["rows"] == rows and result["errors"] == [] and result["label"] == "tiny"
    assert {"device", "torch", "build", "commit"} <= result.keys()


def test_calls(run, device):
    rows, _, _ = run
    calls = rows_of(rows, "call")
    assert len(calls) == len(SHAPES) * (4 * (len(KINDS) - 1) + 2)  # "swizzled" has one order of the scales
    for row in calls:
        assert CALL_FIELDS <= row.keys() and row["shape"] in SHAPES and row["kind"] in KINDS
        swizzles = row["stmt"] == SWIZZLE
        assert row["swizzled_after_call"] == (swizzles or row["optimize_for_gemm"])
        assert row["allocated_swizzled"] == (swizzles and not row["optimize_for_gemm"])
        assert len(row["medians_us"]) == 2 and row["best_median_us"] == min(row["medians_us"]) > 0
        assert row["best_median_us"] <= row["median_us"] <= max(row["medians_us"])
        assert (row["gpu_us"] is not None) == (device.type == "cuda")


def test_sequences_and_skeleton(run):
    rows, _, _ = run
    assert [row["operations"] for row in rows_of(rows, "sequence")] == [4, 3, 1] * len(SHAPES)
    whole = {tuple(row["shape"]): row["median_us"] for row in rows_of(rows, "skeleton") if row["part"] == "whole"}
    for row in rows_of(rows, "sequence"):
        assert row["wall_over_skeleton"] == row["median_us"] / whole[tuple(row["shape"])]


def test_what_needs_a_gpu(run, device):
    rows, _, stderr = run
    traces = rows_of(rows, "trace")
    if device.type == "cpu":
        assert "skipped, as they need a GPU" in stderr and not traces and not rows_of(rows, "copy")
        return
    assert rows_of(rows, "copy")[0]["kernel_bytes_per_s"] > 0
    for row in rows_of(rows, "sequence"):
        listed = [t for t in traces if t.get("sequence") == row["sequence"] and t["shape"] == row["shape"]]
        assert len(listed) == row["operations"] and all(t["time"] > 0 and t["gpu_activity"] for t in listed)


def test_given_gpu_times(modules, monkeypatch, device, capsys, tmp_path):
    """Floors, ratios and trace rows, with times that come from no GPU."""
    bench = modules("bench_nvfp4_paths")
    monkeypatch.setattr(bench, "copy_rates", lambda device, repeats: {"memcpy": 4e12, "kernel": 2e12})
    monkeypatch.setattr(bench, "rotating_sets", lambda set_bytes, device: 3)
    monkeypatch.setattr(bench, "wall_medians", lambda *arguments: [3.0, 1.0, 2.0])
    counts = []

    def replay_times(calls, repeats):
        counts.append(len(calls))
        for call in calls:
            call()
        return [5.0, 4.0, 9.0]

    monkeypatch.setattr(bench, "replay_times", replay_times)
    monkeypatch.setattr(bench, "gpu_operations", lambda calls: [[("kernel", 1.0), ("copy", 2.0)] for call in calls])
    out = tmp_path / "given.json"
    options = ["--device", str(device), "--kinds", "1d,fp32", "--shapes", "64x32", "--trace", "--out", str(out)]
    benchmark = bench.Benchmark(bench.parse_arguments(options, ""))
    benchmark.on_gpu = True
    result = benchmark.run()
    assert result["errors"] == [] and set(counts) == {3}
    moved = sum(buffer.nbytes for buffer in _C.NVFP4Quantizer().empty((64, 32), torch.device("cpu")))
    for row in result["rows"]:
        if row["row"] in ("call", "schedule", "sequence"):
            read = 64 * 32 * (4 if row["kind"] == "fp32" else 2)
            assert row["gpu_us"] == 5 and row["best_gpu_us"] == 4
            assert row["copy_us"] == pytest.approx((read + moved) / 2e6)
            assert row["gpu_over_floor"] == pytest.approx(5 / ((2 * read + moved) / 2e6))
        if row["row"] in ("call", "sequence"):
            assert (row["median_us"], row["best_median_us"], row["wall_over_skeleton"]) == (2, 1, 1)
    traces = rows_of(result["rows"], "trace")
    assert len(traces) == 2 * (2 * 4 + 3)
    assert [(t["gpu_activity"], t["time"], t["operation"], t["operations"]) for t in traces[:2]] == [
        ("kernel", 1.0, 1, 2),
        ("copy", 2.0, 2, 2),
    ]
    table = modules("table").markdown(json.loads(out.read_text()))
    ratio = f"{5 / ((2 * 64 * 32 * 2 + moved) / 2e6):.2f}"
    assert "kernel 2.00 TB/s" in table and f"auto {ratio}, split {ratio}, fused {ratio}" in table


def test_a_failing_section_is_reported(modules, monkeypatch, device, capsys):
    bench = modules("bench_nvfp4_paths")
    monkeypatch.setattr(bench, "sequences", lambda: 1 / 0)
    options = [
        "--device",
        str(device),
        "--kinds",
        "1d",
        "--shapes",
        "16x16",
        "--repeats",
        "1",
        "--min-run-time",
        "1e-5",
    ]
    assert bench.main(options) == 1
    captured = capsys.readouterr()
    assert "failed: sequences (16, 16)" in captured.err
    assert [json.loads(line)["row"] for line in captured.out.splitlines()].count("call") == 4


@pytest.mark.parametrize(
    "options", [["--kinds", "3d"], ["--shapes", "16"], ["--shapes", "0x16"], ["--schedule", "none"], ["--repeats", "0"]]
)
def test_wrong_options(modules, device, capsys, options):
    with pytest.raises(SystemExit):
        modules("arguments").parse_arguments(options, "")
    assert options[0] in capsys.readouterr().err


def test_lines_of_the_plot(modules, run):
    plot = modules("plot")
    _, result, _ = run
    drawn = plot.lines([result], "median_us")
    names = {"4 operations", "3 operations", "1 operation", "bare skeleton", "2d", "stochastic", "fp32"}
    assert drawn.keys() == names and plot.lines([result], "median_us", ["2d"]) == {"2d": drawn["2d"]}
    assert all([x for x, _ in points] == [16 * 64, 33 * 50] for points in drawn.values())
    assert plot.lines([result, result], "median_us").keys() == {f"tiny: {name}" for name in drawn}


def test_plot(modules, run, device, folder, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    modules("plot").main([str(folder / f"{device}.json"), "--out", str(tmp_path / "plot.png")])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
