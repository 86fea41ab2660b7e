// Input elements: their storage, packed maxima of magnitudes (under any sign), and their float values.
#pragma once

#include <cstdint>

#include "../params.h"
#include "ptx.cuh"

namespace nvfp4 {

// Word: the unit in which a pair of neighbouring elements is read (two 16-bit elements, or two floats).
template <DType D>
struct Element;

template <>
struct Element<DType::kBFloat16> {
  using Storage = uint16_t;
  using Pair = uint32_t;
  static __device__ __forceinline__ float to_float(Storage s) { return bits_float(uint32_t(s) << 16); }
  static __device__ __forceinline__ float low(Pair p) { return bits_float(p << 16); }
  static __device__ __forceinline__ float high(Pair p) { return bits_float(p & 0xFFFF0000U); }
  static __device__ __forceinline__ Pair larger_spread_nan(Pair a, Pair b) {
    return ptx::larger_spread_nan_bf16x2(a, b);
  }
  static __device__ __forceinline__ Pair larger_ignore_nan(Pair a, Pair b) {
    return ptx::larger_ignore_nan_bf16x2(a, b);
  }
  static __device__ __forceinline__ float round(float y) { return to_float(ptx::float_to_bf16_bits(y)); }
  static __device__ __forceinline__ Storage from_float(float y) { return ptx::float_to_bf16_bits(y); }
};

template <>
struct Element<DType::kFloat16> {
  using Storage = uint16_t;
  using Pair = uint32_t;
  static __device__ __forceinline__ float to_float(Storage s) { return ptx::half_bits_to_float(s); }
  static __device__ __forceinline__ float low(Pair p) { return ptx::half_bits_to_float(uint16_t(p)); }
  static __device__ __forceinline__ float high(Pair p) { return ptx::half_bits_to_float(uint16_t(p >> 16)); }
  static __device__ __forceinline__ Pair larger_spread_nan(Pair a, Pair b) {
    return ptx::larger_spread_nan_f16x2(a, b);
  }
  static __device__ __forceinline__ Pair larger_ignore_nan(Pair a, Pair b) {
    return ptx::larger_ignore_nan_f16x2(a, b);
  }
  static __device__ __forceinline__ float round(float y) { return y; }  // the transform of fp16 stays fp32
  static __device__ __forceinline__ Storage from_float(float y) { return ptx::float_to_half_bits(y); }
};

template <>
struct Element<DType::kFloat32> {
  using Storage = float;
  using Pair = float2;
  static __device__ __forceinline__ float to_float(Storage s) { return s; }
  static __device__ __forceinline__ float low(Pair p) { return p.x; }
  static __device__ __forceinline__ float high(Pair p) { return p.y; }
  static __device__ __forceinline__ Pair larger_spread_nan(Pair a, Pair b) {
    return {ptx::max_spread_nan_f32(fabsf(a.x), fabsf(b.x)), ptx::max_spread_nan_f32(fabsf(a.y), fabsf(b.y))};
  }
  static __device__ __forceinline__ Pair larger_ignore_nan(Pair a, Pair b) {
    return {fmaxf(fabsf(a.x), fabsf(b.x)), fmaxf(fabsf(a.y), fabsf(b.y))};
  }
  static __device__ __forceinline__ float round(float y) { return y; }
  static __device__ __forceinline__ Storage from_float(float y) { return y; }
};

// The larger magnitude of a pair; fmaxf ignores NaN.
template <DType D>
__device__ __forceinline__ float pair_max_ignore_nan(typename Element<D>::Pair m) {
  return fmaxf(fabsf(Element<D>::low(m)), fabsf(Element<D>::high(m)));
}
template <DType D>
__device__ __forceinline__ float pair_max_spread_nan(typename Element<D>::Pair m) {
  return ptx::max_spread_nan_f32(fabsf(Element<D>::low(m)), fabsf(Element<D>::high(m)));
}

// 16 bytes of elements: 8 of 16 bits or 4 of 32.
template <DType D>
union Chunk {
  static constexpr int kElements = 16 / sizeof(typename Element<D>::Storage);
  static constexpr int kPairs = kElements / 2;
  uint4 vector;
  typename Element<D>::Pair pair[kPairs];
};

}  // namespace nvfp4
