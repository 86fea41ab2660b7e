// Bit-level helpers that hold on host and device, in constant expressions too.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define NVFP4_HD __host__ __device__ __forceinline__
#else
#define NVFP4_HD inline
#endif

// Before a loop whose arrays must stay in registers.
#if defined(__CUDA_ARCH__)
#define NVFP4_UNROLL _Pragma("unroll")
#else
#define NVFP4_UNROLL
#endif

namespace nvfp4 {

inline constexpr float kFloatMax = 3.40282346638528859811704183484516925e+38F;
inline constexpr float kInfinity = __builtin_huge_valf();
inline constexpr uint32_t kSignBit = 0x80000000U;

NVFP4_HD constexpr uint32_t float_bits(float x) { return __builtin_bit_cast(uint32_t, x); }
NVFP4_HD constexpr float bits_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
NVFP4_HD constexpr float magnitude(float x) { return bits_float(float_bits(x) & ~kSignBit); }
NVFP4_HD constexpr bool is_nan(float x) { return (float_bits(x) & ~kSignBit) > 0x7F800000U; }

// min that keeps a NaN in its first argument.
NVFP4_HD constexpr float min_keep_nan(float x, float bound) { return x > bound ? bound : x; }

// max of two magnitudes; the first form spreads a NaN (block maxima), the second ignores it (amax). Magnitudes are
// ordered as their bits are, with NaN above infinity.
NVFP4_HD constexpr float max_spread_nan(float m, float x) {
  return int32_t(float_bits(x)) > int32_t(float_bits(m)) ? x : m;
}
NVFP4_HD constexpr float max_ignore_nan(float m, float x) { return x > m ? x : m; }

// x clamped to [0, 1]; a NaN gives 0. One modifier of the instruction on a GPU.
NVFP4_HD constexpr float saturate(float x) {
#if defined(__CUDA_ARCH__)
  return __saturatef(x);
#else
  return x > 0.0F ? (x < 1.0F ? x : 1.0F) : 0.0F;
#endif
}

// a * b + c, rounded once. On the host through double: right wherever the exact sum fits into its 53 bits.
NVFP4_HD constexpr float fused_multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return static_cast<float>(static_cast<double>(a) * b + c);
#endif
}

// Rounds to bfloat16 (nearest even) and back; a NaN stays one.
NVFP4_HD constexpr float round_to_bf16(float x) {
  const uint32_t bits = float_bits(x);
  if (is_nan(x)) return bits_float(bits | 0x00400000U);
  return bits_float((bits + 0x7FFFU + ((bits >> 16) & 1U)) & 0xFFFF0000U);
}

#if !defined(__CUDACC__)  // nvcc does not compare a NaN in a constant expression
static_assert(is_nan(min_keep_nan(bits_float(0x7FC00000U), 1.0F)));
static_assert(max_ignore_nan(2.0F, bits_float(0x7FC00000U)) == 2.0F);
static_assert(is_nan(max_spread_nan(bits_float(0x7FC00000U), 2.0F)));
#endif

}  // namespace nvfp4
