"""4over6: the better of two scales, in near-ties too, where each rounding of the error sums decides."""

import pytest
import torch
from helpers import assert_same_bytes, make_input, reference
from native import MODES, assert_matches_oracle, native, oracle

FOUR_OVER_SIX = [mode for mode in MODES if mode.startswith("4over6")]


@pytest.mark.parametrize("mode", FOUR_OVER_SIX)
def test_four_over_six_takes_the_better_scale(mode, device, schedule):
    """Tiles of 4, 3, 2 are exact if their largest becomes 4, tiles of 6, 4, 3 if it becomes 6."""
    steps = torch.arange(16 * 32) * 7 % 3  # 3 and 16 have no common factor: every line of a tile holds every value
    to_four, to_six = torch.tensor([4.0, 3.0, 2.0]) / 4, torch.tensor([6.0, 4.0, 3.0]) / 6
    x = torch.cat([to_four[steps], to_six[steps]]).reshape(32, 32).to(device)
    amax = MODES[mode].get("nvfp4_e4m3_max", 448) / 32  # makes the scales 32 (largest becomes 6) and 48 (4)
    row_scaled = "row_scaled" in mode
    if row_scaled:
        x = torch.cat([x, torch.full((32, 16), amax, device=device)], dim=1)
    got = native(x, MODES[mode], schedule, None if row_scaled else amax)
    scale = reference.decode_e4m3(got["rowwise_scale_inv"][:32, :2].cpu().contiguous())
    assert_same_bytes(scale, torch.tensor([48.0] * 16 + [32.0] * 16)[:, None].expand(32, 2))


AMAX = 2.3


def with_amax(x: torch.Tensor) -> torch.Tensor:
    """16 more columns give each line and the tensor the same amax."""
    return torch.cat([x, torch.full((x.shape[0], 16), AMAX)], dim=1)


def takes_four(x: torch.Tensor, options: dict) -> torch.Tensor:
    """Whether each block, all of maximum 1, gets the larger scale; bool (lines, blocks)."""
    scale = oracle(with_amax(x), options | {"columnwise": False})["rowwise_scale_inv"]
    scale = scale[: x.shape[0], : x.shape[1] // 16].contiguous()
    return reference.decode_e4m3(scale) > 1.25 * options.get("nvfp4_e4m3_max", 448) / AMAX


def near_ties(options: dict) -> torch.Tensor:
    """Blocks a hair on either side of the other choice, bisected between two that choose differently."""
    lines, elements = 32, 128
    noise = 0.08 * make_input("bell", (2, lines, elements)).double()
    levels = torch.arange(lines * elements).reshape(lines, elements) * 7 % 3
    ends = [torch.tensor(v).double()[levels] for v in ([1.0, 3 / 4, 2 / 4], [1.0, 4 / 6, 3 / 6])]
    four, six = ((end + n).clamp(max=1.0) for end, n in zip(ends, noise, strict=True))
    four[:, ::16] = six[:, ::16] = 1.0

    def mixed(share: torch.Tensor) -> torch.Tensor:
        return (four + (six - four) * share.repeat_interleave(16, 1)).float()

    low = torch.zeros(lines, elements // 16, dtype=torch.float64)
    high = torch.ones_like(low)
    choices_differ = takes_four(mixed(low), options) & ~takes_four(mixed(high), options)
    assert choices_differ.float().mean() > 0.2
    for _ in range(32):
        middle = (low + high) / 2
        is_four = takes_four(mixed(middle), options)
        low, high = torch.where(is_four, middle, low), torch.where(is_four, high, middle)
    return torch.cat([mixed(low), mixed(high)])


@pytest.mark.parametrize("mode", FOUR_OVER_SIX)
def test_near_ties(mode, device, schedule):
    x = with_amax(near_ties(MODES[mode])).to(device)
    for view in (x, x.t(), -x):
        assert_matches_oracle(view, MODES[mode], schedule)
