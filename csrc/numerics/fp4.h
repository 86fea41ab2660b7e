// E2M1: 1 sign bit, 2 exponent bits, 1 mantissa bit; magnitudes 0 0.5 1 1.5 2 3 4 6; no infinity, no NaN.
//
//   bit 3  2 1  0
//       s  e e  m
#pragma once

#include "bits.h"
#include "formats.h"

namespace nvfp4 {

// Whether a magnitude is encoded as `code` or more, code = 1 .. 7: the midpoints, where ties go to the even code.
NVFP4_HD constexpr bool reaches_e2m1(float a, int code) {
  switch (code) {
    case 1:
      return a > 0.25F;
    case 2:
      return a >= 0.75F;
    case 3:
      return a > 1.25F;
    case 4:
      return a >= 1.75F;
    case 5:
      return a > 2.5F;
    case 6:
      return a >= 3.5F;
    default:
      return a > 5.0F;
  }
}

// Nearest, ties to even code; saturates. The sign is y's own (-0 gives 8); a NaN gives 7.
NVFP4_HD constexpr uint32_t encode_e2m1(float y) {
  if (is_nan(y)) return 7U;
  const float a = magnitude(y);
  uint32_t code = 0;
  NVFP4_UNROLL
  for (int k = 1; k < 8; ++k) code += uint32_t(reaches_e2m1(a, k));
  return code | ((float_bits(y) >> 31) << 3);
}

// table[code of a], without an index that is only known at run time.
NVFP4_HD constexpr float look_up_e2m1(float a, const float (&table)[8]) {
  float value = table[0];
  NVFP4_UNROLL
  for (int k = 1; k < 8; ++k) value = reaches_e2m1(a, k) ? table[k] : value;
  return value;
}

NVFP4_HD constexpr float decode_e2m1_magnitude(uint32_t code) {
  const uint32_t exponent = (code >> 1) & 3U;
  const uint32_t mantissa = code & 1U;
  if (exponent == 0) return mantissa != 0 ? 0.5F : 0.0F;
  return bits_float(((126U + exponent) << 23) | (mantissa << 22));
}

NVFP4_HD constexpr float decode_e2m1(uint32_t code) {
  return bits_float(float_bits(decode_e2m1_magnitude(code)) | ((code & 8U) << 28));
}

// The magnitudes of four codes from four scaled magnitudes, without integer arithmetic.
//
// A code is the nearest integer to 4 sat(h) + 2 sat(h - 1) + sat(h - 2) with h = a / 2: at most one term is no integer,
// so that adding the terms to 1.5 * 2^23 * w (whose unit in the last place is w) rounds once, ties to even, and leaves
// the code, times w, in the low bits. Weights 4096, 256, 16, 1 chain four codes into one register; the subtraction
// that takes the constant of one weight to the next is exact. A NaN gives 0: its block is overwritten as a whole.
NVFP4_HD constexpr float add_e2m1_magnitude(float sum, float a, float weight) {
  const float h0 = saturate(0.5F * a);
  const float h1 = saturate(fused_multiply_add(a, 0.5F, -1.0F));
  const float h2 = saturate(fused_multiply_add(a, 0.5F, -2.0F));
  sum = fused_multiply_add(h2, weight, sum);
  sum = fused_multiply_add(h1, 2.0F * weight, sum);
  return fused_multiply_add(h0, 4.0F * weight, sum);
}

// The codes are in the low 16 bits, the upper ones are left as they come.
NVFP4_HD constexpr uint32_t encode4_e2m1_magnitudes(float a0, float a1, float a2, float a3) {
  constexpr float kMagic = 12582912.0F;  // 1.5 * 2^23
  float sum = add_e2m1_magnitude(kMagic * 4096.0F, a3, 4096.0F);
  sum = add_e2m1_magnitude(sum - (kMagic * 4096.0F - kMagic * 256.0F), a2, 256.0F);
  sum = add_e2m1_magnitude(sum - (kMagic * 256.0F - kMagic * 16.0F), a1, 16.0F);
  sum = add_e2m1_magnitude(sum - (kMagic * 16.0F - kMagic), a0, 1.0F);
  return float_bits(sum);
}

// Every midpoint and code point.
static_assert(encode_e2m1(0.25F) == 0 && encode_e2m1(0.75F) == 2 && encode_e2m1(1.25F) == 2);
static_assert(encode_e2m1(1.75F) == 4 && encode_e2m1(2.5F) == 4 && encode_e2m1(3.5F) == 6 && encode_e2m1(5.0F) == 6);
static_assert(encode_e2m1(0.5F) == 1 && encode_e2m1(1.5F) == 3 && encode_e2m1(3.0F) == 5 && encode_e2m1(6.0F) == 7);
static_assert(encode_e2m1(-0.0F) == 8 && encode_e2m1(-0.25F) == 8 && encode_e2m1(-kInfinity) == 15);
static_assert(encode_e2m1(bits_float(0xFFC00000U)) == 7);
static_assert(decode_e2m1(7) == 6.0F && decode_e2m1(13) == -3.0F && float_bits(decode_e2m1(8)) == kSignBit);
#if !defined(__CUDACC__)  // on a GPU these are instructions, not constant expressions
static_assert((encode4_e2m1_magnitudes(0.25F, 0.75F, 1.25F, 1.75F) & 0xFFFFU) == 0x4220U);
static_assert((encode4_e2m1_magnitudes(2.5F, 3.5F, 5.0F, kInfinity) & 0xFFFFU) == 0x7664U);
#endif

}  // namespace nvfp4
