"""The main figures of a run as Markdown tables: `python benchmarks/table.py run.json`."""

import json
import sys
from pathlib import Path


def _number(value, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _table(head: tuple[str, ...], rows: list[tuple]) -> list[str]:
    lines = [head, ("---",) * len(head), *rows]
    return ["| " + " | ".join(map(str, line)) + " |" for line in lines] + [""]


def _shape(row: dict) -> str:
    return "×".join(map(str, row["shape"]))


def _times(row: dict) -> tuple[str, ...]:
    times = _number(row.get("gpu_us"), 1), _number(row.get("gpu_over_floor")), _number(row.get("median_us"), 1)
    return *times, _number(row.get("wall_over_skeleton"))


def _sequences(rows: list[dict]) -> list[str]:
    """The ways to the same tensor: four, three and one operations, other libraries, and the bare skeleton."""
    listed = []
    for row in rows:
        if row["row"] == "sequence":
            listed.append((_shape(row), f"{row['operations']}: {row['sequence']}", *_times(row)))
        elif row["row"] == "peer":
            listed.append((_shape(row), row["peer"], *_times(row)))
        elif row["row"] == "skeleton" and row["part"] == "whole":
            listed.append((_shape(row), "bare skeleton", *_times(row)))
    return _table(("shape", "operations", "GPU µs", "over floor", "wall µs", "over skeleton"), listed)


def _kinds(rows: list[dict]) -> list[str]:
    def schedules(call):
        same = ("kind", "shape", "optimize_for_gemm")
        found = [r for r in rows if r["row"] == "schedule" and all(r[name] == call[name] for name in same)]
        return ", ".join(f"{r['schedule']} {_number(r.get('gpu_over_floor'))}" for r in found) or "–"

    listed = []
    for row in rows:
        if row["row"] == "call":
            scales = "GEMM order" if row["optimize_for_gemm"] else "compact"
            over = schedules(row) if not row["allocated_swizzled"] else _number(row.get("gpu_over_floor"))
            gpu, _, *wall = _times(row)
            listed.append((_shape(row), row["kind"], scales, f"`{row['stmt']}`", gpu, over, *wall))
    head = ("shape", "kind", "scales", "call", "GPU µs", "over floor", "wall µs", "over skeleton")
    return _table(head, listed)


def markdown(result: dict) -> str:
    """The tables of the result of one run."""
    rows = json.loads(json.dumps(result["rows"]))  # as from a file: shapes are lists
    about = [result["label"], result.get("gpu", result["device"]), f"torch {result['torch']}"]
    for row in rows:
        if row["row"] == "copy":
            about += [f"{name} {row[f'{name}_bytes_per_s'] / 1e12:.2f} TB/s" for name in ("kernel", "memcpy")]
    return "\n".join([", ".join(about), "", *_sequences(rows), *_kinds(rows), *result["errors"]])


if __name__ == "__main__":
    for file in sys.argv[1:]:
        print(markdown(json.loads(Path(file).read_text())))
