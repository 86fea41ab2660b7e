// The instructions that C++ does not reach, and all that differs between architectures. With numerics/bits.h the only
// place that asks for __CUDA_ARCH__; every #if has an #else that computes the same bits.
#pragma once

#include <cstdint>

#include "../numerics/fp8.h"

// FP4 conversions exist on Blackwell, and only in code for one architecture (a) or one family (f).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && \
    (defined(__CUDA_ARCH_SPECIFIC__) || defined(__CUDA_ARCH_FAMILY_SPECIFIC__))
#define NVFP4_NATIVE_E2M1 1
#else
#define NVFP4_NATIVE_E2M1 0
#endif

namespace nvfp4::ptx {

inline constexpr bool kNativeE2M1 = NVFP4_NATIVE_E2M1 != 0;

// The larger magnitudes of two packed pairs, under signs that mean nothing; `spread` gives NaN where one operand is
// NaN, `ignore` the other operand.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
#define NVFP4_LARGER(d, a, b, nan, type) asm("max" nan ".xorsign.abs." type " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b))
#else
#define NVFP4_LARGER(d, a, b, nan, type) \
  asm("max" nan "." type " %0, %1, %2;" : "=r"(d) : "r"((a) & 0x7FFF7FFFU), "r"((b) & 0x7FFF7FFFU))
#endif
__device__ __forceinline__ uint32_t larger_spread_nan_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  NVFP4_LARGER(d, a, b, ".NaN", "bf16x2");
  return d;
}
__device__ __forceinline__ uint32_t larger_ignore_nan_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  NVFP4_LARGER(d, a, b, "", "bf16x2");
  return d;
}
__device__ __forceinline__ uint32_t larger_spread_nan_f16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  NVFP4_LARGER(d, a, b, ".NaN", "f16x2");
  return d;
}
__device__ __forceinline__ uint32_t larger_ignore_nan_f16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  NVFP4_LARGER(d, a, b, "", "f16x2");
  return d;
}
#undef NVFP4_LARGER
__device__ __forceinline__ float max_spread_nan_f32(float a, float b) {
  float d;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

// Byte permutation; with bit 3 of a selector nibble set, the sign of that byte fills its place.
template <uint32_t Selector>
__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "n"(Selector));
  return d;
}

__device__ __forceinline__ float half_bits_to_float(uint16_t h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}
__device__ __forceinline__ uint16_t float_to_half_bits(float f) {
  uint16_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
__device__ __forceinline__ uint16_t float_to_bf16_bits(float f) {
  uint16_t h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}

// E4M3 byte of x >= 0 or NaN; saturates.
__device__ __forceinline__ uint32_t encode_e4m3(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t d;
  asm("{\n"
      ".reg .b16 pair;\n"
      "cvt.rn.satfinite.e4m3x2.f32 pair, %1, %2;\n"
      "mov.b32 %0, {pair, 0};\n"
      "}"
      : "=r"(d)
      : "f"(0.0F), "f"(x));
  return d;
#else
  return nvfp4::encode_e4m3(x);
#endif
}

// Eight E2M1 codes, with signs, of eight scaled values. Only where kNativeE2M1.
__device__ __forceinline__ uint32_t encode8_e2m1(const float (&y)[8]) {
#if NVFP4_NATIVE_E2M1
  uint32_t d;
  asm("{\n"
      ".reg .b8 b0, b1, b2, b3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b0, %2, %1;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b1, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b2, %6, %5;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b3, %8, %7;\n"
      "mov.b32 %0, {b0, b1, b2, b3};\n"
      "}"
      : "=r"(d)
      : "f"(y[0]), "f"(y[1]), "f"(y[2]), "f"(y[3]), "f"(y[4]), "f"(y[5]), "f"(y[6]), "f"(y[7]));
  return d;
#else
  (void)y;
  __trap();
  return 0;
#endif
}

// The same number, of which the compiler knows nothing: it then computes one address and reaches others by a constant
// offset in the instruction, where it would spell out sixteen.
__device__ __forceinline__ uint32_t opaque(uint32_t value) {
  asm("" : "+r"(value));
  return value;
}

// In a kernel that was launched to overlap the one before it: waits until that one has finished and its writes are
// visible. And in that one: lets the next one start. Without such a launch neither does anything.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// 16 bytes from global to shared memory, past the registers.
__device__ __forceinline__ void copy16_async(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
               :
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "l"(global)
               : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" : : : "memory"); }
template <int Pending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" : : "n"(Pending) : "memory");
}

}  // namespace nvfp4::ptx
