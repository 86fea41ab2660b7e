// Maxima of magnitudes across a warp, a thread block and the grid. Magnitudes are not negative, so that their bits
// order like unsigned integers, with every NaN above infinity.
#pragma once

#include "element.cuh"

namespace nvfp4 {

__device__ __forceinline__ bool is_noop(const float* flag) { return flag != nullptr && *flag == 1.0F; }

template <int Lanes>
__device__ __forceinline__ float group_max_ignore_nan(float m, int stride = 1) {
#pragma unroll
  for (int distance = 1; distance < Lanes; distance *= 2) {
    m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFFU, m, distance * stride));
  }
  return m;
}
template <int Lanes>
__device__ __forceinline__ float group_max_spread_nan(float m, int stride = 1) {
#pragma unroll
  for (int distance = 1; distance < Lanes; distance *= 2) {
    m = ptx::max_spread_nan_f32(m, __shfl_xor_sync(0xFFFFFFFFU, m, distance * stride));
  }
  return m;
}

// The maximum of all threads of a block, in every thread; `shared` holds one float a warp.
__device__ __forceinline__ float block_max_ignore_nan(float m, float* shared) {
  m = group_max_ignore_nan<32>(m);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = m;
  __syncthreads();
  m = shared[0];
  for (int i = 1; i < int(blockDim.x / 32); ++i) m = fmaxf(m, shared[i]);
  return m;
}

// Raises *target to m. Reading first spares most of the atomic operations.
__device__ __forceinline__ void raise_amax(float* target, float m) {
  if (m > __ldcg(target)) atomicMax(reinterpret_cast<unsigned int*>(target), float_bits(m));
}

}  // namespace nvfp4
