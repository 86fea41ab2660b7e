// Values from codes and scales, from either direction.
#include "../dispatch.h"
#include "../kernels.h"
#include "../numerics/hadamard.h"
#include "../numerics/scale.h"
#include "element.cuh"
#include "launch.cuh"

namespace nvfp4 {
namespace {

// The 16 values code * f of block `block` of line `line`.
__device__ __forceinline__ void decode_block(const DequantizeParams& params, const DirectionLayout<int64_t>& layout,
                                             int64_t line, int64_t block, float (&v)[kBlock]) {
  const uint2 codes = *reinterpret_cast<const uint2*>(params.data + (line * layout.blocks() + block) * kBlockBytes);
  const uint8_t byte = params.scale[scale_offset(line, block, layout.scale_blocks(), params.swizzled)];
  const float amax = params.amax[params.row_scaled ? line : 0];
  const float factor = dequantize_factor(decode_e4m3(byte), amax, params.e4m3_max);
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    v[i] = decode_e2m1(((i < 8 ? codes.x : codes.y) >> (4 * (i % 8))) & 0xFU) * factor;
  }
}

template <DType D>
__device__ __forceinline__ void write_row(const DequantizeParams& params, int64_t row, int64_t col,
                                          const float (&v)[kBlock]) {
  using Storage = typename Element<D>::Storage;
  constexpr int kPerChunk = Chunk<D>::kElements;
  Storage* target = static_cast<Storage*>(params.out) + row * params.cols + col;
  alignas(16) Storage values[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) values[i] = Element<D>::from_float(v[i]);
  if (params.cols % kPerChunk == 0 && col + kBlock <= params.cols) {
#pragma unroll
    for (int i = 0; i < kBlock; i += kPerChunk) {
      *reinterpret_cast<uint4*>(target + i) = *reinterpret_cast<const uint4*>(values + i);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    if (col + i < params.cols) target[i] = values[i];
  }
}

// Neighbouring threads take neighbouring columns of x, so that both kinds write whole sectors.
template <DType D, bool Columnwise>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(const __grid_constant__ DequantizeParams params) {
  using Storage = typename Element<D>::Storage;
  const DirectionLayout<int64_t> layout = Columnwise ? DirectionLayout<int64_t>{params.cols, params.rows}
                                                     : DirectionLayout<int64_t>{params.rows, params.cols};
  const int64_t total = layout.lines * layout.blocks();
  const int64_t step = gridDim.x * int64_t(kThreads);
  for (int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x; i < total; i += step) {
    float v[kBlock];
    if constexpr (Columnwise) {
      const int64_t line = i % layout.lines;
      const int64_t block = i / layout.lines;
      decode_block(params, layout, line, block, v);
      if (params.with_rht) hadamard_inverse(v, params.sign_mask);
#pragma unroll
      for (int e = 0; e < kBlock; ++e) {
        const int64_t row = block * kBlock + e;
        if (row < params.rows) {
          static_cast<Storage*>(params.out)[row * params.cols + line] = Element<D>::from_float(v[e]);
        }
      }
    } else {
      decode_block(params, layout, i / layout.blocks(), i % layout.blocks(), v);
      write_row<D>(params, i / layout.blocks(), i % layout.blocks() * kBlock, v);
    }
  }
}

constexpr int kBlocksPerMultiprocessor = 16;

}  // namespace

void dequantize_cuda(const DequantizeParams& params, Stream stream) {
  if (params.rows == 0 || params.cols == 0) return;
  const int64_t lines = params.columnwise ? params.cols : params.rows;
  const int64_t length = params.columnwise ? params.rows : params.cols;
  const int64_t units = ceil_div(lines * ceil_div(length, kBlock), kThreads);
  const int64_t blocks = std::min<int64_t>(units, kBlocksPerMultiprocessor * multiprocessor_count());
  dispatch_dtype(params.dtype, [&](auto dtype) {
    dispatch_bool(params.columnwise, [&](auto columnwise) {
      dequantize_kernel<dtype(), columnwise()><<<unsigned(blocks), kThreads, 0, cudaStream_t(stream)>>>(params);
    });
  });
  check_cuda(cudaGetLastError(), "dequantize_kernel");
}

}  // namespace nvfp4
