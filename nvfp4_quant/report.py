"""`python -m nvfp4_quant report FILE`: what NVFP4 would do to each matrix of a checkpoint."""

import math
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from .ops import BLOCK, BUFFERS
from .quantizer import NVFP4Quantizer

QUANTIZABLE = (torch.float32, torch.float16, torch.bfloat16)
CHUNK = 1 << 22  # elements compared at a time, which bounds the memory for float64


class ReportError(Exception):
    """A file that cannot be reported on; its text is one line."""


class Row(NamedTuple):
    """What NVFP4 does to one matrix; `nan` where a figure is undefined (no elements, all zero, not finite)."""

    name: str
    shape: tuple[int, ...]
    amax: float
    sqnr_1d: float  # dB
    sqnr_2d: float  # dB
    zero_blocks: float  # share of the blocks whose scale byte is 0
    bytes_before: int
    bytes_after: int  # row-wise codes, scales and amax


def sqnr_db(x: torch.Tensor, y: torch.Tensor) -> float:
    """Signal-to-quantization-noise ratio of y for x, in dB: inf if equal, nan if x is zero or not finite."""
    signal = noise = torch.zeros((), dtype=torch.float64, device=x.device)
    for a, b in zip(x.reshape(-1).split(CHUNK), y.reshape(-1).split(CHUNK), strict=True):
        a, b = a.double(), b.double()
        signal, noise = signal + a.square().sum(), noise + (a - b).square().sum()
    return (10 * torch.log10(signal / noise)).item()


def stored_bytes(y) -> int:
    """Bytes of all buffers of an NVFP4 tensor."""
    return sum(buffer.nbytes for buffer in (getattr(y, name) for name in BUFFERS) if buffer is not None)


def zero_block_share(y) -> float:
    """Share of the row-wise blocks of `y` whose scale byte is 0, of which all values are lost or were 0."""
    blocks = 2 * y.rowwise_data.numel() // BLOCK
    # Bytes that pad the scale buffer are 0, so the others can be counted without looking at its layout.
    return 1 - y.rowwise_scale_inv.count_nonzero().item() / blocks if blocks else math.nan


def measure(name: str, x: torch.Tensor) -> Row:
    """Quantizes `x` (two or more dimensions; float32, float16 or bfloat16) in 1-D and in 2-D and compares."""
    x = x.detach()
    y, y_2d = (NVFP4Quantizer(columnwise=False, with_2d_quantization=two_d)(x) for two_d in (False, True))
    sqnr_1d, sqnr_2d = (sqnr_db(x, q.dequantize(dtype=torch.float32)) for q in (y, y_2d))
    amax = y.amax_rowwise.item()
    return Row(name, tuple(x.shape), amax, sqnr_1d, sqnr_2d, zero_block_share(y), x.nbytes, stored_bytes(y))


def _open_safetensors(path: Path) -> dict[str, Callable[[], torch.Tensor]]:
    from safetensors import safe_open

    file = safe_open(path, framework="pt")
    return {name: partial(file.get_tensor, name) for name in file.keys()}


def _walk(value, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of nested dicts and lists, named by their path: `model.layers.0.weight`."""
    if isinstance(value, torch.Tensor):
        yield name or "tensor", value
        return
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        yield from _walk(item, f"{name}.{key}" if name else str(key))


def _open_torch(path: Path) -> dict[str, Callable[[], torch.Tensor]]:
    # Only the zip format can be mapped into memory, from which matrices are then read one at a time.
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    return {name: partial(torch.Tensor.detach, tensor) for name, tensor in _walk(state)}


def open_checkpoint(path: str | Path) -> dict[str, Callable[[], torch.Tensor]]:
    """Maps the name of each tensor in a `.safetensors` file or torch checkpoint to a function that loads it.

    Raises ReportError for a file that is missing, is neither, holds no tensor, or whose unpickling would run code.
    """
    path = Path(path)
    opener = _open_safetensors if path.suffix == ".safetensors" else _open_torch
    try:
        tensors = opener(path)
    except ModuleNotFoundError as error:
        raise ReportError(f"{error}: run `pip install 'nvfp4_quant[report]'`") from error
    except Exception as error:  # a damaged file makes the two readers raise almost anything
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ReportError(f"{path}: {reason}") from error
    if not tensors:
        raise ReportError(f"{path}: holds no tensors")
    return tensors


def _is_matrix(x: torch.Tensor) -> bool:
    return type(x) is torch.Tensor and x.ndim >= 2 and x.dtype in QUANTIZABLE and x.layout == torch.strided


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)


def table(rows: list[Row]) -> str:
    """The rows as lines of aligned columns, under a heading."""
    heading = ("matrix", "shape", "amax", "1-D dB", "2-D dB", "zero blocks", "bytes", "NVFP4 bytes")
    cells = [
        (
            row.name,
            "x".join(map(str, row.shape)),
            _number(row.amax, ".4g"),
            _number(row.sqnr_1d, ".2f"),
            _number(row.sqnr_2d, ".2f"),
            _number(row.zero_blocks, ".2%"),
            f"{row.bytes_before:,}",
            f"{row.bytes_after:,}",
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(heading, *cells, strict=True)]
    lines = []
    for line in (heading, *cells):
        name, *figures = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        lines.append("  ".join([name.lstrip().ljust(widths[0]), *figures]))
    return "\n".join(lines)


def report(path: str | Path, device: torch.device | str = "cpu") -> None:
    """Prints the table for the checkpoint at `path`; progress goes to standard error. Raises ReportError."""
    tensors = open_checkpoint(path)
    try:
        from tqdm import tqdm
    except ModuleNotFoundError as error:
        raise ReportError(f"{error}: run `pip install 'nvfp4_quant[report]'`") from error

    rows, others = [], 0
    for name, load in tqdm(tensors.items(), desc="quantize", unit="tensor", leave=False, file=sys.stderr):
        x = load()
        if _is_matrix(x):
            rows.append(measure(name, x.to(device)))
        else:
            others += 1
    if rows:
        print(table(rows))
    before, after = sum(row.bytes_before for row in rows), sum(row.bytes_after for row in rows)
    ratio = f", {before / after:.2f} times smaller" if after else ""
    print(f"{len(rows)} matrices: {before:,} bytes, in NVFP4 {after:,}{ratio}; {others} other tensors not quantized")
