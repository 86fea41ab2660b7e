"""The column-wise buffers of a 2-D quantized tensor from its row-wise ones."""

import math

import torch
from torch import Tensor

from . import ops
from ._native import _C


def unpack(data: Tensor) -> Tensor:
    """[..., n/2] bytes -> [..., n] codes; the low nibble comes first."""
    return torch.stack((data & 0xF, data >> 4), -1).flatten(-2)


def pack(codes: Tensor) -> Tensor:
    """[..., n] codes -> [..., n/2] bytes."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def transpose_tiles(data: Tensor, scale_inv: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Data and compact scales of the column-wise side, exactly; every tile has one scale and so needs no new one.

    data: [..., Kp/2] row-wise codes of a tensor of `shape`; scale_inv: its compact scales.
    """
    rows, columns = math.prod(shape[:-1]), shape[-1]
    tiles = scale_inv[: rows : ops.BLOCK]  # [Mp/16, blocks]
    lines = tiles.repeat_interleave(ops.BLOCK, 1)[:, :columns].t()  # [K, Mp/16]
    scales = scale_inv.new_zeros(_C.scale_shape(tuple(shape), True))
    scales[:columns, : lines.shape[1]] = lines

    codes = unpack(data.reshape(rows, data.shape[-1]))[:, :columns].t()  # [K, M]
    missing = -rows % ops.BLOCK
    if missing and rows:
        # Rows past M are zero, except in a tile with a NaN: there all codes are the one of NaN, also in the last row.
        is_nan = lines[:, -1:].contiguous().view(torch.float8_e4m3fn).float().isnan()
        codes = torch.cat((codes, torch.where(is_nan, codes[:, -1:], 0).expand(-1, missing)), 1)
    return pack(codes).contiguous(), scales
