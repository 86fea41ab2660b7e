// Scale byte and codes of one block of 16 elements in registers.
#pragma once

#include "../numerics/random.h"
#include "../numerics/scale.h"
#include "blocks.cuh"

namespace nvfp4 {

__device__ __forceinline__ uint32_t with_signs(uint32_t magnitudes, const SignMasks& signs) {
  return magnitudes | (signs.even & 0x08080808U) | (signs.odd & 0x80808080U);
}

// Codes of elements 8 half .. 8 half + 7, nearest.
template <class Block>
__device__ __forceinline__ uint32_t encode8(const Block& x, int half, float multiplier) {
  float y[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = x.value(half * 8 + i) * multiplier;
  if constexpr (ptx::kNativeE2M1) {
    return ptx::encode8_e2m1(y);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = fabsf(y[i]);
    const uint32_t low = encode4_e2m1_magnitudes(y[0], y[1], y[2], y[3]);
    const uint32_t high = encode4_e2m1_magnitudes(y[4], y[5], y[6], y[7]);
    return with_signs(ptx::permute<0x5410>(low, high), x.signs(half));
  }
}

// floor(4 sat(h) + 2 sat(h - 1) + sat(h - 2) + (2u + 1)/512) with h = a / 2, left in byte 2 of the result. The sum
// starts at 128 + (2u + 1)/512, whose unit in the last place is 2^-16; rounding toward zero never reaches the next
// integer.
template <int Byte>
__device__ __forceinline__ uint32_t stochastic_magnitude(float a, uint32_t random) {
  float sum = bits_float(ptx::permute<0x7604 | (Byte << 4)>(random, 0x43000080U));
  sum = __fadd_rz(sum, saturate(fused_multiply_add(a, 0.5F, -2.0F)));
  sum = __fmaf_rz(saturate(fused_multiply_add(a, 0.5F, -1.0F)), 2.0F, sum);
  sum = __fmaf_rz(saturate(0.5F * a), 4.0F, sum);
  return float_bits(sum);
}

template <class Block>
__device__ __forceinline__ uint32_t encode8_stochastic(const Block& x, int half, float multiplier, uint32_t random0,
                                                       uint32_t random1) {
  const auto scaled = [&](int i) { return fabsf(x.value(half * 8 + i) * multiplier); };
  const uint32_t c0 = stochastic_magnitude<0>(scaled(0), random0);
  const uint32_t c1 = stochastic_magnitude<1>(scaled(1), random0);
  const uint32_t c2 = stochastic_magnitude<2>(scaled(2), random0);
  const uint32_t c3 = stochastic_magnitude<3>(scaled(3), random0);
  const uint32_t c4 = stochastic_magnitude<0>(scaled(4), random1);
  const uint32_t c5 = stochastic_magnitude<1>(scaled(5), random1);
  const uint32_t c6 = stochastic_magnitude<2>(scaled(6), random1);
  const uint32_t c7 = stochastic_magnitude<3>(scaled(7), random1);
  const uint32_t even = ptx::permute<0x5410>(ptx::permute<0x0062>(c0, c2), ptx::permute<0x0062>(c4, c6));
  const uint32_t odd = ptx::permute<0x5410>(ptx::permute<0x0062>(c1, c3), ptx::permute<0x0062>(c5, c7));
  return with_signs(even | (odd << 4), x.signs(half));
}

// The codes of a block under a scale byte and what it multiplies with; random: the block's words, used if stochastic.
template <Rounding R, class Block>
__device__ __forceinline__ uint2 encode_block(const Block& x, uint32_t byte, float multiplier,
                                              const PhiloxBlock& random) {
  uint2 codes;
  if constexpr (R == Rounding::kStochastic) {
    codes.x = encode8_stochastic(x, 0, multiplier, random.word[0], random.word[1]);
    codes.y = encode8_stochastic(x, 1, multiplier, random.word[2], random.word[3]);
  } else {
    codes.x = encode8(x, 0, multiplier);
    codes.y = encode8(x, 1, multiplier);
  }
  const bool is_nan_block = byte == kNanScaleByte;
  codes.x = is_nan_block ? uint32_t(kNanCodes) : codes.x;
  codes.y = is_nan_block ? uint32_t(kNanCodes) : codes.y;
  return codes;
}

// The factors of one line: those of its tensor, or its own if it is row-scaled.
struct LineScale {
  float amax;
  TensorScale scale;
};

struct CandidateErrors {
  float six;
  float four;
};

template <class Block>
__device__ __forceinline__ CandidateErrors block_errors(const Block& x, const ScaleCandidates& candidates,
                                                        const LineScale& line, float e4m3_max, bool squared) {
  const auto error = [&](uint32_t byte) {
    return candidate_error([&](int i) { return fabsf(x.value(i)); }, byte, line.amax, line.scale.decode, e4m3_max,
                           squared);
  };
  return {error(candidates.six), error(candidates.four)};
}

__device__ __forceinline__ uint32_t choose_candidate(const ScaleCandidates& candidates, const CandidateErrors& errors) {
  return errors.four < errors.six ? candidates.four : candidates.six;
}

}  // namespace nvfp4
