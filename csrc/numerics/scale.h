// The two levels of scales: one FP32 factor a tensor (or line), one E4M3 byte a block.
#pragma once

#include "bits.h"
#include "formats.h"
#include "fp4.h"
#include "fp8.h"

namespace nvfp4 {

// Step 2: S_enc and S_dec of a tensor or line.
struct TensorScale {
  float encode;
  float decode;
  float block_multiplier;  // step 3: S_enc * fl(1/6), formed first
};

NVFP4_HD constexpr TensorScale tensor_scale(float amax, float e4m3_max) {
  const bool degenerate = amax == 0.0F || amax == kInfinity;
  const float encode = degenerate ? 1.0F : min_keep_nan(kE2M1Max * e4m3_max / amax, kFloatMax);
  return {encode, 1.0F / encode, encode * kSixth};
}

// Step 6: what an element is multiplied by, from the value of its scale byte; FLT_MAX for a scale of 0.
NVFP4_HD constexpr float element_multiplier(float scale, float decode) {
  return min_keep_nan(1.0F / (scale * decode), kFloatMax);
}

// 4over6: the two scale bytes that compete, from the block maximum; S_enc comes from 6 * e4m3_max.
struct ScaleCandidates {
  uint32_t six;
  uint32_t four;
};

NVFP4_HD constexpr ScaleCandidates scale_candidates(float block_max, float encode) {
  const float base = block_max / kE2M1Max * encode;
  return {encode_e4m3(base), encode_e4m3(base * 1.5F)};  // saturating: the clamps at 448 are in the conversion
}

// 4over6: the error of a block under one candidate, summed in element order. x(i): the magnitude of element i.
template <class Magnitudes>
NVFP4_HD constexpr float candidate_error(const Magnitudes& x, uint32_t byte, float amax, float decode, float e4m3_max,
                                         bool squared) {
  const float scale = decode_e4m3(byte);
  const float multiplier = element_multiplier(scale, decode);
  float values[8] = {0.0F * scale * amax};  // what each code would be read back as; NaN too
  NVFP4_UNROLL
  for (uint32_t code = 1; code < 8; ++code) {
    values[code] = decode_e2m1_magnitude(code) * scale * amax / (kE2M1Max * e4m3_max);
  }
  float sum = 0.0F;
  NVFP4_UNROLL
  for (int i = 0; i < kBlock; ++i) {
    const float a = x(i);
    const float d = look_up_e2m1(a * multiplier, values) - a;
    sum += squared ? d * d : magnitude(d);
  }
  return sum;
}

// What a code is multiplied by when it is read back. For amax > 1 the powers of two keep the product finite.
NVFP4_HD constexpr float dequantize_factor(float scale, float amax, float e4m3_max) {
  constexpr float kDown = 1.0F / 4096.0F;
  constexpr float kUp = 4096.0F;
  const float c = 1.0F / (kE2M1Max * e4m3_max);
  if (amax > 1.0F) return scale * kDown * amax * (c * kUp);
  return scale * amax * c;
}

static_assert(float_bits(kSixth) == 0x3E2AAAABU);
static_assert(float_bits(tensor_scale(15.0F, kE4M3Max).encode) == 0x43333333U);
static_assert(tensor_scale(0.0F, kE4M3Max).encode == 1.0F && tensor_scale(kInfinity, kE4M3Max).encode == 1.0F);
static_assert(element_multiplier(2.0F, 4.0F) == 0.125F);
static_assert(float_bits(dequantize_factor(1.0F, 1.0F, kE4M3Max)) == 0x39C30C31U);
static_assert(float_bits(dequantize_factor(1.0F, 1.0F, 256.0F)) == 0x3A2AAAABU);

}  // namespace nvfp4
