// E4M3 ("fn"): bias 7, largest value 448 = 0x7E, NaN = 0x7F (0xFF when read from elsewhere), no infinity.
//
//   bit 7  6 5 4 3  2 1 0
//       s  e e e e  m m m
#pragma once

#include "bits.h"
#include "formats.h"

namespace nvfp4 {

// A scale is never negative, so x >= 0 or NaN. Nearest, ties to even; saturates at 448, infinity too.
NVFP4_HD constexpr uint32_t encode_e4m3(float x) {
  constexpr float kSubnormalMagic = 12582912.0F / 512.0F;  // 1.5 * 2^23 in steps of 2^-9
  if (is_nan(x)) return kNanScaleByte;
  if (x >= kE4M3Max) return 0x7EU;
  if (x < 0.015625F) return float_bits(x + kSubnormalMagic) & 0xFU;  // below 2^-6
  const uint32_t bits = float_bits(x);
  return ((bits + 0x7FFFFU + ((bits >> 20) & 1U)) >> 20) - (120U << 3);
}

NVFP4_HD constexpr float decode_e4m3(uint32_t byte) {
  const uint32_t sign = (byte & 0x80U) << 24;
  const uint32_t exponent = (byte >> 3) & 0xFU;
  const uint32_t mantissa = byte & 7U;
  if ((byte & 0x7FU) == kNanScaleByte) return bits_float(sign | 0x7FC00000U);
  if (exponent == 0) return bits_float(sign | float_bits(static_cast<float>(mantissa) * 0.001953125F));
  return bits_float(sign | ((exponent + 120U) << 23) | (mantissa << 20));
}

static_assert(encode_e4m3(448.0F) == 0x7E && encode_e4m3(464.0F) == 0x7E && encode_e4m3(kInfinity) == 0x7E);
static_assert(encode_e4m3(432.0F) == 0x7E && encode_e4m3(431.0F) == 0x7D && encode_e4m3(400.0F) == 0x7C);
static_assert(encode_e4m3(0.0009765625F) == 0 && encode_e4m3(0.0029296875F) == 2 && encode_e4m3(0.015625F) == 8);
static_assert(encode_e4m3(bits_float(0x7FC00000U)) == 0x7F && is_nan(decode_e4m3(0xFF)));
static_assert(decode_e4m3(0x7E) == 448.0F && decode_e4m3(0x01) == 0.001953125F && decode_e4m3(0x38) == 1.0F);

}  // namespace nvfp4
