"""Draws time and ratio to the floor over size from the JSON files of bench_nvfp4_paths.py. Needs matplotlib."""

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path

QUANTIZE = "q(x)"  # the call that is drawn, without a swizzle after it


def _name(row: dict) -> str | None:
    """The line that a row belongs to; None for rows that are not drawn."""
    if row["row"] == "sequence":
        return f"{row['operations']} operation{'s' if row['operations'] > 1 else ''}"
    if row["row"] == "peer":
        return row["peer"]
    if row["row"] == "skeleton" and row["part"] == "whole":
        return "bare skeleton"
    if row["row"] == "call" and row["stmt"] == QUANTIZE and row["kind"] != "1d" and not row["optimize_for_gemm"]:
        return row["kind"]  # 1d is among the sequences
    return None


def lines(results: list[dict], field: str, only: list[str] | None = None) -> dict[str, list[tuple[int, float]]]:
    """Points (elements, value of `field`) of each line, or of those named `only`, from the rows that have it."""
    found = defaultdict(list)
    for result in results:
        prefix = f"{result['label']}: " if len(results) > 1 else ""
        for row in result["rows"]:
            name = _name(row)
            if name and row.get(field) is not None and (only is None or name in only):
                found[prefix + name].append((math.prod(row["shape"]), row[field]))
    return {name: sorted(points) for name, points in found.items()}


def floor(results: list[dict]) -> list[tuple[int, float]]:
    """Two reads and one write of a 1-D bf16 quantization, at the rate of a copy in the first result that has one."""
    for result in results:
        rows = [row for row in result["rows"] if row["row"] == "sequence" and "floor_us" in row]
        if rows:
            return sorted({(math.prod(row["shape"]), row["floor_us"]) for row in rows})
    return []


def draw(results: list[dict], out: Path, only: list[str] | None = None) -> None:
    """One panel for each of GPU time, its ratio to the floor and wall time, as far as the results have them."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    fields = {"gpu_us": "GPU time, µs", "gpu_over_floor": "GPU time / floor of two reads", "median_us": "wall time, µs"}
    panels = [(field, lines(results, field, only)) for field in fields]
    panels = [(field, drawn) for field, drawn in panels if drawn]
    if not panels:
        raise ValueError("these files have no times to draw")
    figure, axes = pyplot.subplots(1, len(panels), figsize=(6 * len(panels), 5), squeeze=False, layout="constrained")
    names = list(dict.fromkeys(name for _, drawn in panels for name in drawn))
    styles = {name: {"color": f"C{i % 10}", "marker": "os^D"[i // 10 % 4]} for i, name in enumerate(names)}
    handles = {}
    for axis, (field, drawn) in zip(axes[0], panels, strict=True):
        for name, points in drawn.items():
            (handles[name],) = axis.plot(*zip(*points, strict=True), markersize=4, **styles[name])
        if field == "gpu_us" and (points := floor(results)):
            (handles["floor of two reads"],) = axis.plot(*zip(*points, strict=True), color="black", linestyle=":")
        if field == "gpu_over_floor":
            axis.axhline(1, color="black", linestyle=":")
        axis.set(xscale="log", yscale="log", xlabel="elements", ylabel=fields[field])
        axis.grid(True, alpha=0.3)
    figure.legend(handles.values(), handles.keys(), loc="outside right center")
    result = results[0]
    figure.suptitle(f"NVFP4 quantization, both directions, amax included: {result.get('gpu', result['device'])}")
    figure.savefig(out, dpi=120)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="JSON files, as written by --out")
    parser.add_argument("--out", type=Path, default=Path("nvfp4_paths.png"), help="the picture")
    parser.add_argument("--only", help="names of the lines to draw, comma-separated, as the legend has them")
    arguments = parser.parse_args(argv)
    only = arguments.only.split(",") if arguments.only else None
    draw([json.loads(file.read_text()) for file in arguments.files], arguments.out, only)


if __name__ == "__main__":
    main()
