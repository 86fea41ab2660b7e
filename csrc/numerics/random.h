// The random bits of stochastic rounding: Philox4x32-10, a function of (seed, offset, direction, block index) alone.
#pragma once

#include "bits.h"
#include "formats.h"

namespace nvfp4 {

// Torch's generators count offsets in multiples of 4; each quantized tensor takes one step.
inline constexpr uint64_t kPhiloxOffsetStep = 4;

struct PhiloxBlock {
  uint32_t word[4];
};

NVFP4_HD constexpr PhiloxBlock philox4x32_10(uint64_t seed, uint64_t counter_low, uint64_t counter_high) {
  uint32_t c0 = uint32_t(counter_low);
  uint32_t c1 = uint32_t(counter_low >> 32);
  uint32_t c2 = uint32_t(counter_high);
  uint32_t c3 = uint32_t(counter_high >> 32);
  uint32_t k0 = uint32_t(seed);
  uint32_t k1 = uint32_t(seed >> 32);
  NVFP4_UNROLL
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t(0xD2511F53U) * c0;
    const uint64_t p1 = uint64_t(0xCD9E8D57U) * c2;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
    c1 = uint32_t(p1);
    c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c3 = uint32_t(p0);
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
  return {{c0, c1, c2, c3}};
}

// The 16 random bytes of a block; element j uses byte j % 4 (0 = least significant) of word j / 4.
NVFP4_HD constexpr PhiloxBlock block_random_bytes(uint64_t seed, uint64_t offset, uint64_t block, bool columnwise) {
  return philox4x32_10(seed, offset / kPhiloxOffsetStep, block | (uint64_t(columnwise) << 63));
}

NVFP4_HD constexpr uint32_t random_byte(const PhiloxBlock& random, int element) {
  return (random.word[element / 4] >> (8 * (element % 4))) & 0xFFU;
}

// min(7, floor(min(2a, a + 2, a/2 + 4) + (2u + 1)/512)) with y's sign; unbiased, code points never move; NaN gives 7.
// In double every sum that can reach the next integer is exact.
NVFP4_HD constexpr uint32_t encode_e2m1_stochastic(float y, uint32_t random_byte) {
  if (is_nan(y)) return 7U;
  const double a = magnitude(y);
  double t = 2.0 * a;
  if (a + 2.0 < t) t = a + 2.0;
  if (0.5 * a + 4.0 < t) t = 0.5 * a + 4.0;
  t += (2.0 * random_byte + 1.0) / 512.0;
  const uint32_t code = t >= 7.0 ? 7U : uint32_t(t);
  return code | ((float_bits(y) >> 31) << 3);
}

static_assert(block_random_bytes(0x123456789ABCDEF0ULL, 12, 5, true).word[0] == 0xFAB0AC2DU);
static_assert(block_random_bytes(0x123456789ABCDEF0ULL, 12, 5, true).word[3] == 0xBA1F3FA3U);
static_assert(encode_e2m1_stochastic(3.0F, 255) == 5 && encode_e2m1_stochastic(-6.0F, 0) == 15);
static_assert(encode_e2m1_stochastic(0.25F, 127) == 0 && encode_e2m1_stochastic(0.25F, 128) == 1);
static_assert(encode_e2m1_stochastic(kInfinity, 0) == 7 && encode_e2m1_stochastic(-0.0F, 255) == 8);

}  // namespace nvfp4
