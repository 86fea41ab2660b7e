// The random Hadamard transform of 16 values: y = (x * signs) H / 4, H[r][c] = (-1)^popcount(r & c).
#pragma once

#include "bits.h"
#include "formats.h"

namespace nvfp4 {

inline constexpr uint32_t kHadamardSignMask = 0xD7E8U;  // bit i set: element i changes its sign
inline constexpr float kHadamardScale = 0.25F;

NVFP4_HD constexpr uint32_t hadamard_sign_mask(bool random) { return random ? kHadamardSignMask : 0U; }

// x * (+-1/4) + 0, rounded once: a zero never becomes -0.
NVFP4_HD constexpr float hadamard_scaled(float x, bool negative) {
  return fused_multiply_add(x, negative ? -kHadamardScale : kHadamardScale, 0.0F);
}

// Four stages (a, b) -> (a + b, a - b) with strides 1, 2, 4, 8: their order fixes the bits.
NVFP4_HD constexpr void hadamard_stages(float (&v)[kBlock]) {
  NVFP4_UNROLL
  for (int stride = 1; stride < kBlock; stride *= 2) {
    NVFP4_UNROLL
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
  NVFP4_UNROLL
  for (int i = 0; i < kBlock; ++i) v[i] = hadamard_scaled(v[i], ((sign_mask >> i) & 1U) != 0);
  hadamard_stages(v);
}

// The transform is its own inverse up to the order of signs and stages.
NVFP4_HD constexpr void hadamard_inverse(float (&v)[kBlock], uint32_t sign_mask) {
  NVFP4_UNROLL
  for (int i = 0; i < kBlock; ++i) v[i] *= kHadamardScale;
  hadamard_stages(v);
  NVFP4_UNROLL
  for (int i = 0; i < kBlock; ++i) v[i] = ((sign_mask >> i) & 1U) != 0 ? -v[i] : v[i];
}

}  // namespace nvfp4
