"""The rounding rules of csrc/numerics/, exhaustively: against the oracle, ml_dtypes and the contract."""

import shutil
import subprocess

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers import assert_same_bytes, reference

from nvfp4_quant._native import _C

numerics = _C.numerics

INF = float("inf")
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
CODE_AT_MIDPOINT = (0, 2, 2, 4, 4, 6, 6)  # ties to the even code
ALL_CODES = torch.arange(16, dtype=torch.uint8)
ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def all_values(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 values of a 16-bit type, as float32."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()


VALUES = {"bf16": all_values(torch.bfloat16), "fp16": all_values(torch.float16)}


def floats(start: int, count: int) -> torch.Tensor:
    """The float32 values whose bits are start, start + 1, ..."""
    bits = torch.arange(start, start + count, dtype=torch.int64)
    return bits.to(torch.int32).view(torch.float32)


def ml_encode(x: torch.Tensor, dtype) -> torch.Tensor:
    return torch.from_numpy(x.numpy().astype(dtype).view(np.uint8).copy())


def random_bytes_like(x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, x.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


# ---- CUDA's own conversions on the host

CONVERTER = """
#include <cstdio>
#include <cuda_fp4.h>
#include <cuda_fp8.h>

int main() {
  float x;
  while (fread(&x, sizeof x, 1, stdin) == 1) {
    putchar(__nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest));
    putchar(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3));
  }
}
"""


@pytest.fixture(scope="module")
def converter(tmp_path_factory):
    """A program of CUDA's headers alone: float32 numbers in, an E2M1 and an E4M3 byte for each out."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    folder = tmp_path_factory.mktemp("converter")
    (folder / "converter.cpp").write_text(CONVERTER)
    command = [nvcc, "-o", folder / "converter", folder / "converter.cpp"]
    compiled = subprocess.run(command, capture_output=True, text=True)
    if "cuda_fp4.h" in compiled.stderr:
        pytest.skip("a CUDA toolkit without FP4")
    assert compiled.returncode == 0, compiled.stderr
    return folder / "converter"


@pytest.mark.parametrize("dtype", VALUES)
def test_cuda_headers_agree(converter, dtype):
    """Every 16-bit value, NaNs and infinities too, and the neighbours of the midpoints."""
    at = torch.tensor(MIDPOINTS)
    near = torch.cat([torch.nextafter(at, torch.tensor(toward)) for toward in (0.0, INF)])
    x = torch.cat([VALUES[dtype], near, -near])
    output = subprocess.run([converter], input=x.numpy().tobytes(), capture_output=True, check=True).stdout
    e2m1, e4m3 = torch.frombuffer(bytearray(output), dtype=torch.uint8).reshape(-1, 2).unbind(1)
    assert_same_bytes(numerics.encode_e2m1(x), e2m1, "E2M1")
    scale = ~x.signbit() | x.isnan()
    assert_same_bytes(numerics.encode_e4m3(x[scale]), e4m3[scale], "E4M3")


# ---- E2M1


@pytest.mark.parametrize("encode", ["encode_e2m1", "encode_e2m1_sat"])
@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["positive", "negative"])
def test_every_midpoint_and_its_neighbours(encode, sign):
    at = torch.tensor(MIDPOINTS)
    below, above = (torch.nextafter(at, torch.tensor(toward)) for toward in (0.0, INF))
    lower = torch.arange(7, dtype=torch.uint8)
    sign_bit = 8 if sign < 0 else 0
    encode = getattr(numerics, encode)
    assert_same_bytes(encode(sign * below), lower + sign_bit, "one ulp below")
    assert_same_bytes(encode(sign * at), torch.tensor(CODE_AT_MIDPOINT, dtype=torch.uint8) + sign_bit, "midpoint")
    assert_same_bytes(encode(sign * above), lower + 1 + sign_bit, "one ulp above")


@pytest.mark.parametrize("encode", ["encode_e2m1", "encode_e2m1_sat"])
def test_e2m1_of_zeros_infinities_and_the_smallest(encode):
    x = torch.tensor([0.0, -0.0, 2.0**-149, -(2.0**-149), INF, -INF, reference.FLT_MAX, -reference.FLT_MAX])
    want = torch.tensor([0, 8, 0, 8, 7, 15, 7, 15], dtype=torch.uint8)
    assert_same_bytes(getattr(numerics, encode)(x), want)


def test_every_nan_encodes_to_7():
    nans = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF, -0x007FFFFF, -0x00400000, -1], dtype=torch.int32)
    x = nans.view(torch.float32)
    assert x.isnan().all()
    assert_same_bytes(numerics.encode_e2m1(x), torch.full((6,), 7, dtype=torch.uint8))
    assert_same_bytes(numerics.encode_e2m1_stochastic(x, random_bytes_like(x)), torch.full((6,), 7, dtype=torch.uint8))
    assert_same_bytes(numerics.encode_e4m3(x), torch.full((6,), 0x7F, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", VALUES)
def test_e2m1_of_every_16_bit_value(dtype):
    x = VALUES[dtype]
    want = reference.encode_e2m1(x)
    assert_same_bytes(numerics.encode_e2m1(x), want)
    number = ~x.isnan()
    assert_same_bytes(numerics.encode_e2m1_sat(x)[number], want[number], "sat form")
    finite = x[x.abs() <= reference.E2M1_MAX]
    assert_same_bytes(numerics.encode_e2m1(finite), ml_encode(finite, ml_dtypes.float4_e2m1fn), "ml_dtypes")


def test_e2m1_decodes():
    want = torch.tensor(reference.E2M1_VALUES)
    assert_same_bytes(numerics.decode_e2m1(ALL_CODES), torch.cat([want, -want]))
    assert_same_bytes(numerics.encode_e2m1(numerics.decode_e2m1(ALL_CODES)), ALL_CODES)


# ---- E4M3


def test_e4m3_decodes_every_byte():
    got = numerics.decode_e4m3(ALL_BYTES)
    assert_same_bytes(got, reference.decode_e4m3(ALL_BYTES), one_nan=True)
    want = torch.from_numpy(ALL_BYTES.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert_same_bytes(got, want, "ml_dtypes", one_nan=True)


def test_e4m3_encodes_every_scale_to_itself():
    scales = ALL_BYTES[:128]
    assert_same_bytes(numerics.encode_e4m3(numerics.decode_e4m3(scales)), scales)


def test_e4m3_midpoints_and_their_neighbours():
    values = numerics.decode_e4m3(ALL_BYTES[:0x7F])
    at = (values[:-1] + values[1:]) / 2  # exact
    below, above = (torch.nextafter(at, torch.tensor(toward)) for toward in (0.0, INF))
    lower = ALL_BYTES[:0x7E]
    assert_same_bytes(numerics.encode_e4m3(below), lower, "one ulp below")
    assert_same_bytes(numerics.encode_e4m3(at), lower + lower % 2, "midpoint")
    assert_same_bytes(numerics.encode_e4m3(above), lower + 1, "one ulp above")


def test_e4m3_saturates():
    x = torch.tensor([448.0, 449.0, 464.0, 480.0, 1e30, reference.FLT_MAX, INF])
    assert_same_bytes(numerics.encode_e4m3(x), torch.full((7,), 0x7E, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", VALUES)
def test_e4m3_of_every_16_bit_value_that_a_scale_can_have(dtype):
    x = VALUES[dtype]
    x = x[~x.signbit() | x.isnan()]
    assert_same_bytes(numerics.encode_e4m3(x), reference.encode_e4m3(x))
    finite = x[x <= reference.E4M3_MAX]
    assert_same_bytes(numerics.encode_e4m3(finite), ml_encode(finite, ml_dtypes.float8_e4m3fn), "ml_dtypes")


# ---- stochastic rounding


def test_stochastic_code_points_never_move():
    y = numerics.decode_e2m1(ALL_CODES)[:, None].expand(16, 256).contiguous()
    u = ALL_BYTES.expand(16, 256).contiguous()
    assert_same_bytes(numerics.encode_e2m1_stochastic(y, u), ALL_CODES[:, None].expand(16, 256).contiguous())


def test_stochastic_rounds_up_as_often_as_the_distance_says():
    codes = torch.arange(7)
    low, high = (torch.tensor(reference.E2M1_VALUES)[codes + i] for i in (0, 1))
    sixteenths = torch.arange(16) / 16
    y = (low[:, None] + (high - low)[:, None] * sixteenths)[..., None].expand(7, 16, 256).contiguous()
    got = numerics.encode_e2m1_stochastic(y, ALL_BYTES.expand(7, 16, 256).contiguous())
    ups = (got.long() - codes[:, None, None]).sum(-1)
    assert_same_bytes(ups, (256 * sixteenths).long().expand(7, 16).contiguous(), "rounded up, of 256 bytes")


@pytest.mark.parametrize("dtype", VALUES)
def test_stochastic_of_every_16_bit_value(dtype):
    x = VALUES[dtype].repeat(8)
    u = random_bytes_like(x)
    assert_same_bytes(numerics.encode_e2m1_stochastic(x, u), reference.encode_e2m1_stochastic(x, u))


def test_stochastic_next_to_the_thresholds():
    t = torch.arange(0, 7 * 256, dtype=torch.float64) / 256 + 1 / 512  # where floor(t + (2u + 1)/512) can change
    a = torch.where(t < 4, t / 2, torch.where(t < 6, t - 2, 2 * t - 8)).float()
    for y in (a, torch.nextafter(a, torch.zeros(())), torch.nextafter(a, torch.full((), INF))):
        y = torch.cat([y, -y])[:, None].expand(-1, 256).contiguous()
        u = ALL_BYTES.expand_as(y).contiguous()
        assert_same_bytes(numerics.encode_e2m1_stochastic(y, u), reference.encode_e2m1_stochastic(y, u))


# ---- Philox and Hadamard


def test_philox_words_of_the_contract():
    want = [0xFAB0AC2D, 0xB306A6FE, 0xC73C09AD, 0xBA1F3FA3]
    assert list(numerics.philox(0x123456789ABCDEF0, 5 | 1 << 63, 3)) == want


def test_philox_equals_the_oracle_at_the_ends_of_every_word():
    ends = (0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1, 0x0123456789ABCDEF)
    for seed in ends:
        for subsequence in ends:
            for offset in (0, 3, 2**32 + 1, 2**62 - 1):
                got = list(numerics.philox(seed, subsequence, offset))
                assert got == reference.philox(seed, subsequence, offset), (seed, subsequence, offset)


HADAMARD_INPUTS = {
    "bell": torch.randn(500, 16, generator=torch.Generator().manual_seed(0)),
    "least": torch.randint(-3, 4, (500, 16), generator=torch.Generator().manual_seed(0)) * 2.0**-149,
    "huge": torch.rand(500, 16, generator=torch.Generator().manual_seed(0)) * 2e38 - 1e38,
    "zero": torch.tensor([0.0, -0.0]).repeat(500, 8),
    "inf": torch.eye(16) * INF + 1,
}


@pytest.mark.parametrize("mask", [0, reference.RANDOM_SIGN_MASK, 0xFFFF])
@pytest.mark.parametrize("name", HADAMARD_INPUTS)
def test_hadamard_equals_the_oracle(name, mask):
    x = HADAMARD_INPUTS[name].nan_to_num(1.0, INF, -INF)
    want = reference.hadamard(x, mask)
    assert_same_bytes(numerics.hadamard(x, mask, False), want, one_nan=True)
    assert_same_bytes(numerics.hadamard(x, mask, True), want.bfloat16().float(), "as bf16", one_nan=True)


# ---- every float


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 2**32, 2**28), ids=lambda start: f"{start:08X}")
def test_every_float(start):
    """The sat form, the plain form, the scales and the stochastic form, over a sixteenth of all floats."""
    step = 2**22
    for low in range(start, start + 2**28, step):
        x = floats(low, step)
        want = reference.encode_e2m1(x)
        assert_same_bytes(numerics.encode_e2m1(x), want, f"E2M1 from {low:08X}")
        number = ~x.isnan()
        assert_same_bytes(numerics.encode_e2m1_sat(x)[number], want[number], f"sat form from {low:08X}")
        if low < 2**31:
            assert_same_bytes(numerics.encode_e4m3(x), reference.encode_e4m3(x), f"E4M3 from {low:08X}")
        u = random_bytes_like(x, low)
        got, want = numerics.encode_e2m1_stochastic(x, u), reference.encode_e2m1_stochastic(x, u)
        assert_same_bytes(got, want, f"stochastic from {low:08X}")
