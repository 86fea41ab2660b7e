"""The oracle against the golden cases, the golden blocks and the facts of the contract that it states in numbers."""

import struct

import pytest
import torch
from helpers import KINDS, assert_same_bytes, dequantize_options, golden_cases, make_input, reference

ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def f32(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def hex_bytes(t: torch.Tensor) -> str:
    return bytes(t.reshape(-1).tolist()).hex(" ").upper()


@pytest.mark.parametrize("case", golden_cases(), ids=lambda case: case["name"])
def test_golden_case(case, device):
    x, options = case["input"].to(device), case["options"]
    got = reference.quantize(x, rng_state=case["rng_state"], **options)
    for name, want in case["expected"].items():
        assert_same_bytes(got[name], want, name)
    for side, want in case["dequantized"].items():
        if want is None:
            continue
        columnwise = side == "columnwise"
        out = reference.dequantize(got, x.shape, torch.float32, columnwise=columnwise, **dequantize_options(options))
        assert_same_bytes(out, want, f"dequantized {side}", one_nan=True)


def test_there_are_enough_golden_cases():
    assert len(golden_cases()) == 126


def underflowing_block():
    x = torch.full((16,), 2.0**-20)
    x[3], x[5], x[6] = -(2.0**-20), -0.0, 0.0
    return x


def zero_block():
    x = torch.zeros(16)
    x[1] = -0.0
    return x


INDEX = torch.arange(16.0)
GOLDEN_BLOCKS = {
    "0 to 15": (INDEX, 15.0, 0x43333333, "7E", "10 22 43 54 65 66 76 77"),
    "alternating": ((-1.0) ** INDEX * (INDEX + 1) / 8, 100.0, 0x41D70A3D, "51", "91 B2 C4 D5 E5 E6 F6 F7"),
    "scale underflows": (underflowing_block(), 1024.0, 0x40280000, "00", "77 F7 87 70 77 77 77 77"),
    "zeros": (zero_block(), 0.0, 0x3F800000, "00", "80 00 00 00 00 00 00 00"),
    "subnormal": ((INDEX + 1) * 2.0**-130, 16 * 2.0**-130, 0x7F7FFFFF, "33", "10 21 32 43 44 55 55 66"),
}


@pytest.mark.parametrize("name", GOLDEN_BLOCKS)
def test_golden_block(name, device):
    block, amax, s_enc, scale, data = GOLDEN_BLOCKS[name]
    got = reference.quantize(block.to(device), columnwise=False, amax=amax)
    assert hex_bytes(got["rowwise_scale_inv"][0, :1]) == scale
    assert hex_bytes(got["rowwise_data"]) == data
    got_s_enc, _ = reference._encode_scale(torch.tensor([amax], device=device), 448)
    assert_same_bytes(got_s_enc, torch.tensor([f32(s_enc)]), "S_enc")


def test_constants_have_the_bits_of_the_contract(device):
    like = torch.zeros(1, device=device)
    for value, bits in ((1 / 6, 0x3E2AAAAB), (1 / 2688, 0x39C30C31), (1 / 1536, 0x3A2AAAAB)):
        assert reference._full(value, like).item() == f32(bits)


def test_philox_words():
    seed, block, offset = 0x123456789ABCDEF0, 5, 12
    want = [0xFAB0AC2D, 0xB306A6FE, 0xC73C09AD, 0xBA1F3FA3]
    assert reference.philox(seed, block | 1 << 63, offset // 4) == want
    as_tensor = reference.philox(seed, torch.tensor([block | -(2**63)]), offset // 4)
    assert [word.item() for word in as_tensor] == want


def test_random_bytes_are_little_endian_bytes_of_the_words(device):
    u = reference.random_bytes((0x123456789ABCDEF0, 12), 3, 2, True, device)
    words = b"".join(w.to_bytes(4, "little") for w in (0xFAB0AC2D, 0xB306A6FE, 0xC73C09AD, 0xBA1F3FA3))
    assert bytes(u[2, 1].tolist()) == words


def test_codes_decode_and_encode_to_themselves(device):
    codes = torch.arange(16, dtype=torch.uint8, device=device)
    assert_same_bytes(reference.encode_e2m1(reference.decode_e2m1(codes)), codes)
    scales = ALL_BYTES.to(device)
    want = torch.where((scales & 0x7F) == 0x7F, 0x7F, scales)
    assert_same_bytes(reference.encode_e4m3(reference.decode_e4m3(scales)), want)


def test_exact_code_points_never_move_under_stochastic_rounding(device):
    codes = torch.arange(16, dtype=torch.uint8, device=device)[:, None].expand(16, 256)
    u = torch.arange(256, device=device).expand(16, 256)
    assert_same_bytes(reference.encode_e2m1_stochastic(reference.decode_e2m1(codes), u), codes.contiguous())


def test_hadamard_equals_the_matrix_and_undoes_itself(device):
    h = torch.tensor([[(-1.0) ** bin(r & c).count("1") for c in range(16)] for r in range(16)], dtype=torch.float64)
    x = torch.randint(-64, 65, (50, 16), generator=torch.Generator().manual_seed(1)).double()
    for mask in (0, reference.RANDOM_SIGN_MASK):
        signs = torch.tensor([-1.0 if mask >> i & 1 else 1.0 for i in range(16)], dtype=torch.float64)
        y = reference.hadamard(x.float().to(device), mask)
        assert_same_bytes(y, (x * signs @ h / 4).float(), "y")
        assert_same_bytes(reference.inverse_hadamard(y, mask) + 0.0, x.float(), "x")  # + 0.0: -0 counts as 0


def test_hadamard_of_zeros_has_no_negative_zero(device):
    x = torch.tensor([0.0, -0.0] * 8, device=device)
    assert not reference.hadamard(x, reference.RANDOM_SIGN_MASK).signbit().any()


def test_swizzle_puts_each_scale_where_the_contract_says(device):
    rows, cols = 256, 12
    scale = torch.randint(0, 256, (rows, cols), dtype=torch.uint8, device=device)
    flat = reference.swizzle(scale).reshape(-1)
    for r, c in ((0, 0), (1, 0), (33, 5), (127, 11), (128, 0), (200, 7), (255, 11)):
        place = ((r // 128) * (cols // 4) + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
        assert flat[place] == scale[r, c]
    assert_same_bytes(reference.unswizzle(reference.swizzle(scale)), scale)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("nan", "inf", "huge")])
def test_two_d_columns_are_the_transpose_of_the_rows(kind, device):
    x = make_input(kind, (40, 24), device=device)
    for options in ({}, {"nvfp4_use_4over6": True}, {"nvfp4_use_4over6": True, "nvfp4_4over6_err_mode": "MSE"}):
        got = reference.quantize(x, with_2d_quantization=True, **options)
        rows = reference.unpack(got["rowwise_data"])[:40, :24]
        columns = reference.unpack(got["columnwise_data"])[:24, :40]
        assert_same_bytes(rows.t(), columns, str(options))


SHAPES = ((0,), (1,), (17,), (0, 5), (5, 0), (0, 0), (2, 0, 3), (3, 4, 0), (1, 17), (7, 1), (2, 3, 5))
MODES = {
    "plain": {},
    "2d": {"with_2d_quantization": True},
    "hadamard": {"with_rht": True},
    "row scaled": {"row_scaled_nvfp4": True},
    "4over6": {"nvfp4_use_4over6": True, "with_2d_quantization": True},
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_shapes_of_the_buffers(shape, mode, device):
    x = make_input("bell", shape, device=device)
    got = reference.quantize(x, **MODES[mode])
    m, k = reference.matrix_shape(shape)
    up = reference.round_up
    mp, kp = up(m, 16), up(k, 16)
    row_scaled = mode == "row scaled"
    want = {
        "rowwise_data": (*shape[:-1], kp // 2),
        "rowwise_scale_inv": (up(m, 128), up(kp // 16, 4)),
        "columnwise_data": (k, mp // 2),
        "columnwise_scale_inv": (up(k, 128), up(mp // 16, 4)),
        "amax_rowwise": (m,) if row_scaled else (1,),
        "amax_columnwise": (k,) if row_scaled else (1,),
    }
    assert {name: tuple(t.shape) for name, t in got.items()} == want
    for columnwise in (False, True):
        out = reference.dequantize(got, shape, x.dtype, columnwise=columnwise, with_rht=mode == "hadamard")
        assert out.shape == x.shape


def test_oracle_reads_any_strides(device):
    x = make_input("bell", (33, 40), torch.bfloat16, device)
    view = x.t()[3::2, 1:]
    got, want = reference.quantize(view, with_rht=True), reference.quantize(view.contiguous(), with_rht=True)
    for name in want:
        assert_same_bytes(got[name], want[name], name)
