// The random Hadamard transform of 16 values: y = (x * signs) H / 4, H[r][c] = (-1)^popcount(r & c).
#pragma once

#include "bits.h"
#include "formats.h"

namespace nvfp4 {

inline constexpr uint32_t kHadamardSignMask = 0xD7E8U;  // bit i set: element i changes its sign
inline constexpr float kHadamardScale = 0.25F;

// x * (+-1/4) + 0 as one FMA, or the same bits without one: a zero never becomes -0.
NVFP4_HD constexpr float hadamard_scaled(float x, bool negative) {
  const float factor = negative ? -kHadamardScale : kHadamardScale;
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(x, factor, 0.0F);
#else
  return x == 0.0F ? 0.0F : x * factor;
#endif
}

// Four stages (a, b) -> (a + b, a - b) with strides 1, 2, 4, 8: their order fixes the bits.
NVFP4_HD constexpr void hadamard_stages(float (&v)[kBlock]) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int stride = 1; stride < kBlock; stride *= 2) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int i = 0; i < kBlock; ++i) {
      if ((i & stride) != 0) continue;
      const float a = v[i];
      const float b = v[i + stride];
      v[i] = a + b;
      v[i + stride] = a - b;
    }
  }
}

NVFP4_HD constexpr void hadamard_forward(float (&v)[kBlock], uint32_t sign_mask) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int i = 0; i < kBlock; ++i) v[i] = hadamard_scaled(v[i], ((sign_mask >> i) & 1U) != 0);
  hadamard_stages(v);
}

// The transform is its own inverse up to the order of signs and stages.
NVFP4_HD constexpr void hadamard_inverse(float (&v)[kBlock], uint32_t sign_mask) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int i = 0; i < kBlock; ++i) v[i] *= kHadamardScale;
  hadamard_stages(v);
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int i = 0; i < kBlock; ++i) v[i] = ((sign_mask >> i) & 1U) != 0 ? -v[i] : v[i];
}

}  // namespace nvfp4
