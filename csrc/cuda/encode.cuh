// Scale byte and codes of one block of 16 values in registers.
#pragma once

#include "../numerics/random.h"
#include "../numerics/scale.h"
#include "ptx.cuh"

namespace nvfp4 {

// The top bytes of four floats, side by side.
__device__ __forceinline__ uint32_t gather_top_bytes(float a, float b, float c, float d) {
  const uint32_t low = __byte_perm(float_bits(a), float_bits(b), 0x0073);
  const uint32_t high = __byte_perm(float_bits(c), float_bits(d), 0x0073);
  return __byte_perm(low, high, 0x5410);
}

// The sign bits of eight values, each at bit 3 of its nibble.
__device__ __forceinline__ uint32_t gather_signs(const float* v) {
  const uint32_t even = gather_top_bytes(v[0], v[2], v[4], v[6]);
  const uint32_t odd = gather_top_bytes(v[1], v[3], v[5], v[7]);
  return ((even >> 4) & 0x08080808U) | (odd & 0x80808080U);
}

// Codes of eight elements, nearest.
__device__ __forceinline__ uint32_t encode8(const float* v, float multiplier) {
  float y[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = v[i] * multiplier;
  if constexpr (ptx::kNativeE2M1) {
    return ptx::encode8_e2m1(y);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = fabsf(y[i]);
    const uint32_t low = encode4_e2m1_magnitudes(y[0], y[1], y[2], y[3]);
    const uint32_t high = encode4_e2m1_magnitudes(y[4], y[5], y[6], y[7]);
    return __byte_perm(low, high, 0x5410) | gather_signs(v);
  }
}

// floor(4 sat(h) + 2 sat(h - 1) + sat(h - 2) + (2u + 1)/512) with h = a / 2, left in byte 2 of the result. The sum starts
// at 128 + (2u + 1)/512, whose unit in the last place is 2^-16; rounding toward zero never reaches the next integer.
__device__ __forceinline__ uint32_t stochastic_magnitude(float a, uint32_t random, int byte) {
  float sum = bits_float(__byte_perm(random, 0x43000080U, 0x7604 | (byte << 4)));
  sum = __fadd_rz(sum, saturate(fused_multiply_add(a, 0.5F, -2.0F)));
  sum = __fmaf_rz(saturate(fused_multiply_add(a, 0.5F, -1.0F)), 2.0F, sum);
  sum = __fmaf_rz(saturate(0.5F * a), 4.0F, sum);
  return float_bits(sum);
}

__device__ __forceinline__ uint32_t encode8_stochastic(const float* v, float multiplier, uint32_t random0,
                                                       uint32_t random1) {
  uint32_t code[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    code[i] = stochastic_magnitude(fabsf(v[i] * multiplier), i < 4 ? random0 : random1, i % 4);
  }
  const uint32_t even = __byte_perm(__byte_perm(code[0], code[2], 0x0062), __byte_perm(code[4], code[6], 0x0062), 0x5410);
  const uint32_t odd = __byte_perm(__byte_perm(code[1], code[3], 0x0062), __byte_perm(code[5], code[7], 0x0062), 0x5410);
  return even | (odd << 4) | gather_signs(v);
}

// The factors of one line: those of its tensor, or its own if it is row-scaled.
struct LineScale {
  float amax;
  TensorScale scale;
};

// 4over6: the error of a whole block for one candidate byte, summed in element order.
__device__ inline float block_error(const float* v, uint32_t byte, const LineScale& line, float e4m3_max, bool squared) {
  const float scale = decode_e4m3(byte);
  const float multiplier = element_multiplier(scale, line.scale.decode);
  float sum = 0.0F;
#pragma unroll 4
  for (int i = 0; i < kBlock; ++i) {
    const float a = fabsf(v[i]);
    const float code = decode_e2m1_magnitude(encode_e2m1(a * multiplier));
    sum += candidate_error(code, scale, line.amax, e4m3_max, a, squared);
  }
  return sum;
}

struct CandidateErrors {
  float six;
  float four;
};

__device__ inline CandidateErrors block_errors(const float* v, const ScaleCandidates& candidates, const LineScale& line,
                                               float e4m3_max, bool squared) {
  return {block_error(v, candidates.six, line, e4m3_max, squared),
          block_error(v, candidates.four, line, e4m3_max, squared)};
}

__device__ __forceinline__ uint32_t choose_candidate(const ScaleCandidates& candidates, const CandidateErrors& errors) {
  return errors.four < errors.six ? candidates.four : candidates.six;
}

// The codes of a block under a scale byte and what it multiplies with; random: the block's words, used if stochastic.
template <Rounding R>
__device__ __forceinline__ uint2 encode_block(const float* v, uint32_t byte, float multiplier,
                                              const PhiloxBlock& random) {
  uint2 codes;
  if constexpr (R == Rounding::kStochastic) {
    codes.x = encode8_stochastic(v, multiplier, random.word[0], random.word[1]);
    codes.y = encode8_stochastic(v + 8, multiplier, random.word[2], random.word[3]);
  } else {
    codes.x = encode8(v, multiplier);
    codes.y = encode8(v + 8, multiplier);
  }
  const bool is_nan_block = byte == kNanScaleByte;
  codes.x = is_nan_block ? uint32_t(kNanCodes) : codes.x;
  codes.y = is_nan_block ? uint32_t(kNanCodes) : codes.y;
  return codes;
}

}  // namespace nvfp4
