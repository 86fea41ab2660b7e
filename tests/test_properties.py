"""What follows from the contract without an oracle: symmetries that hold bit for bit."""

import pytest
import torch
from helpers import DTYPES, assert_same_bytes, make_input, reference
from native import MODES, native

SHAPE = (33, 70)
PARTS = ("data", "scale_inv")


@pytest.mark.parametrize("exponent", [-60, -1, 60])
@pytest.mark.parametrize("mode", MODES)
def test_a_power_of_two_changes_only_the_amax(mode, exponent, device, schedule):
    x = make_input("bell", SHAPE, device=device)
    factor = 2.0**exponent
    want, got = native(x, MODES[mode], schedule), native(factor * x, MODES[mode], schedule)
    for side in reference.SIDES:
        for part in PARTS:
            assert_same_bytes(got[f"{side}_{part}"], want[f"{side}_{part}"], f"{side}_{part}")
        assert_same_bytes(got[f"amax_{side}"], factor * want[f"amax_{side}"], f"amax_{side}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", [mode for mode in MODES if "hadamard" not in mode])
def test_a_negated_input_changes_only_the_signs(mode, dtype, device, schedule):
    """Zeros, too; with Hadamard the sums of equal numbers are +0 either way."""
    x = make_input("wide", (32, 64), dtype, device)
    want, got = native(x, MODES[mode], schedule), native(-x, MODES[mode], schedule)
    for name, t in got.items():
        assert_same_bytes(t ^ 0x88 if name.endswith("data") else t, want[name], name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", ["plain", "2d", "row_scaled", "4over6", "4over6_256_mse", "4over6_row_scaled"])
def test_the_transpose_swaps_the_directions(mode, dtype, device, schedule):
    x = make_input("bell", SHAPE, dtype, device)
    want, got = native(x, MODES[mode], schedule), native(x.t(), MODES[mode], schedule)
    for part in PARTS:
        assert_same_bytes(got[f"rowwise_{part}"], want[f"columnwise_{part}"], f"row-wise {part}")
        assert_same_bytes(got[f"columnwise_{part}"], want[f"rowwise_{part}"], f"column-wise {part}")
    assert_same_bytes(got["amax_rowwise"], want["amax_columnwise"], "amax")


@pytest.mark.parametrize("mode", MODES)
def test_zero_padding_changes_nothing(mode, device, schedule):
    """A tensor and the same with zeros up to multiples of 16 have the same codes where both have some."""
    x = make_input("bell", SHAPE, torch.bfloat16, device)
    padded = torch.nn.functional.pad(x, (0, 80 - 70, 0, 48 - 33))
    want, got = native(x, MODES[mode], schedule), native(padded, MODES[mode], schedule)
    assert_same_bytes(got["rowwise_data"][:33], want["rowwise_data"], "row-wise")
    assert_same_bytes(got["columnwise_data"][:70], want["columnwise_data"], "column-wise")
    assert not got["rowwise_data"][33:].any() and not got["columnwise_data"][70:].any()


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("mode", [mode for mode in MODES if "hadamard" not in mode])
def test_a_narrow_input_is_its_float32_values(mode, dtype, device, schedule):
    """Only the transform rounds to bf16, for bf16 input."""
    x = make_input("bell", SHAPE, dtype, device)
    want, got = native(x.float(), MODES[mode], schedule), native(x, MODES[mode], schedule)
    for name, t in got.items():
        assert_same_bytes(t, want[name], name)


@pytest.mark.parametrize("usage", ["rowwise", "columnwise"])
@pytest.mark.parametrize("mode", MODES)
def test_one_direction_is_half_of_both(mode, usage, device, schedule):
    x = make_input("bell", SHAPE, torch.bfloat16, device)
    both = native(x, MODES[mode], schedule)
    one = native(x, MODES[mode] | {side: side == usage for side in reference.SIDES}, schedule)
    for name, t in one.items():
        assert_same_bytes(t, both[name] if usage in name else None, name)
