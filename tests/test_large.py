"""Extents that overflow 16-bit grids, 31-bit element counts and 32-bit byte offsets, mostly on a GPU."""

import pytest
import torch
from helpers import BUFFERS, assert_same_bytes, make_input
from native import MODES, assert_matches_oracle, native, oracle

pytestmark = pytest.mark.slow

TILE = 128  # no kernel has tiles of more lines or blocks than this
SHAPES = {
    "tall": ((65_536 + 3) * TILE + 16, 16),
    "wide": (16, (65_536 + 3) * TILE + 16),
    "more than 2^31 elements, 2^32 bytes": (131_072 + 48, 16_384),
}


def fill(shape, device) -> torch.Tensor:
    """bf16 noise, drawn in place; the maximum is the last element."""
    x = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
    x[-1, -1] = -100.0
    return x


def window(buffers: dict, rows: slice, cols: slice) -> dict:
    """The part of every buffer that belongs to x[rows, cols]; all bounds are multiples of 16."""

    def part(data, scale, lines, elements):
        blocks = slice(elements.start // 16, elements.stop // 16)
        return data[lines, elements.start // 2 : elements.stop // 2], scale[lines, blocks]

    result = dict(buffers)
    result["rowwise_data"], result["rowwise_scale_inv"] = part(
        buffers["rowwise_data"], buffers["rowwise_scale_inv"], rows, cols
    )
    result["columnwise_data"], result["columnwise_scale_inv"] = part(
        buffers["columnwise_data"], buffers["columnwise_scale_inv"], cols, rows
    )
    return result


def assert_windows(x: torch.Tensor, got: dict, options: dict) -> None:
    """Corners and middle against the oracle, which is given the amax of the whole."""
    amax = 100.0
    m, k = x.shape
    height, width = min(m, 256), min(k, 256)
    places = [(r, c) for r in {0, m // 32 * 16, m - height} for c in {0, k // 32 * 16, k - width}]
    for r, c in places:
        rows, cols = slice(r, min(r + height, m)), slice(c, min(c + width, k))
        part = x[rows, cols]
        whole = window(oracle(part, options, amax), slice(0, part.shape[0]), slice(0, part.shape[1]))
        here = window(got, rows, cols)
        for name in BUFFERS:
            assert_same_bytes(here[name], whole[name], f"{name} at {r, c}")


@pytest.mark.cuda
@pytest.mark.parametrize("options", [{}, {"with_2d_quantization": True}], ids=["1d", "2d"])
@pytest.mark.parametrize("name", SHAPES)
def test_large(name, options, device, schedule):
    x = fill(SHAPES[name], device)
    assert_windows(x, native(x, options, schedule), options)


@pytest.mark.cuda
@pytest.mark.parametrize("options", [{}, {"with_2d_quantization": True}], ids=["1d", "2d"])
def test_large_transposed(options, device, schedule):
    x = fill(SHAPES["more than 2^31 elements, 2^32 bytes"], device).t()
    assert_windows(x, native(x, options, schedule), options)


def test_offset_beyond_2_to_31(device, schedule):
    """Rows 2^28 elements apart: few pages of the storage are ever touched on a CPU."""
    storage = torch.empty(16 * 2**28, dtype=torch.bfloat16, device=device)
    x = storage.as_strided((16, 64), (2**28, 1))
    x.copy_(make_input("bell", (16, 64), torch.bfloat16))
    for view in (x, x.t(), x[:, ::3]):
        for mode in ("plain", "2d", "hadamard", "row_scaled"):
            assert_matches_oracle(view, MODES[mode], schedule)
