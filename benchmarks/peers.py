"""The same work, row-wise and column-wise with the amax of the tensor, by other libraries, where they are installed."""

import sys
from collections.abc import Callable, Iterator

import torch


def _torchao() -> Iterator[tuple[str, Callable]]:
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    def row_and_column(x):
        scale = per_tensor_amax_to_scale(torch.amax(torch.abs(x)))
        return nvfp4_quantize(x, 16, scale), nvfp4_quantize(x.t().contiguous(), 16, scale)

    yield "torchao eager", row_and_column
    # fullgraph: past torch's limit of shapes it raises, and does not go on uncompiled
    yield "torchao compiled", torch.compile(row_and_column, dynamic=False, fullgraph=True)


def _fouroversix() -> Iterator[tuple[str, Callable]]:
    import fouroversix

    quantize = getattr(fouroversix, "quantize", None) or fouroversix.quantize_to_fp4
    row, column = (
        fouroversix.QuantizationConfig(backend="triton", scale_rule="static_6", transpose=transpose)
        for transpose in (False, True)
    )
    yield "fouroversix triton", lambda x: (quantize(x, row), quantize(x, column))


def peers() -> list[tuple[str, Callable]]:
    """Name and function of each peer that can be imported; a line on stderr for each that cannot."""
    found = []
    for load in (_torchao, _fouroversix):
        try:
            found += load()
        except (ImportError, AttributeError, TypeError) as error:  # not there, or another version of it
            print(f"skipped: {load.__name__[1:]}: {error}", file=sys.stderr)
    return found
