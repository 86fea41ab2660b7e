// The amax of many elements in no particular order, shared among all blocks of a grid.
#pragma once

#include <utility>

#include "reduce.cuh"
#include "tile.cuh"

namespace nvfp4 {

// 16-byte loads in flight for each thread: few where the blocks must share the work evenly.
inline constexpr int kFewLoads = 4;
inline constexpr int kManyLoads = 8;

// One stretch of a row, contiguous: whole chunks where they are aligned, single elements at both ends.
template <DType D, int Loads>
__device__ __forceinline__ float stretch_amax(const typename Element<D>::Storage* x, int64_t length) {
  using Storage = typename Element<D>::Storage;
  constexpr int kPerChunk = Chunk<D>::kElements;
  float amax = 0.0F;
  const int64_t head = min(length, int64_t((16 - reinterpret_cast<uintptr_t>(x) % 16) % 16 / sizeof(Storage)));
  const int64_t chunks = (length - head) / kPerChunk;
  const uint4* vectors = reinterpret_cast<const uint4*>(x + head);
  typename Element<D>::Pair m{};
  for (int64_t first = threadIdx.x; first < chunks; first += Loads * blockDim.x) {
    Chunk<D> chunk[Loads] = {};
#pragma unroll
    for (int u = 0; u < Loads; ++u) {
      if (first + u * blockDim.x < chunks) chunk[u].vector = vectors[first + u * blockDim.x];
    }
#pragma unroll
    for (int u = 0; u < Loads; ++u) {
#pragma unroll
      for (int e = 0; e < Chunk<D>::kPairs; ++e) {
        m = Element<D>::max_ignore_nan(m, Element<D>::magnitude(chunk[u].pair[e]));
      }
    }
  }
  amax = pair_max_ignore_nan<D>(m);
  if (threadIdx.x < head) amax = fmaxf(amax, fabsf(Element<D>::to_float(x[threadIdx.x])));
  for (int64_t i = head + chunks * kPerChunk + threadIdx.x; i < length; i += blockDim.x) {
    amax = fmaxf(amax, fabsf(Element<D>::to_float(x[i])));
  }
  return amax;
}

template <int Loads>
inline constexpr int64_t kStretch = int64_t(kThreads) * Loads * 8;  // elements a block takes at a time
inline constexpr int64_t kMinStretch = 512;                         // shorter rows are read element by element

// Whether rows touch, so that they read as one.
__host__ __device__ inline bool is_one_row(const MatrixView& x) {
  return x.row_dims == 1 && x.col_stride == 1 && x.row_strides[0] == x.cols;
}

// Whether rows are read in stretches, else element by element.
__host__ __device__ inline bool in_stretches(const MatrixView& x) {
  return x.col_stride == 1 && (x.cols >= kMinStretch || is_one_row(x));
}

// For a maximum the order of the elements does not matter: rows may become columns, and rows that touch become one.
inline MatrixView longest_rows(MatrixView x) {
  if (x.row_dims != 1) return x;
  if (x.row_strides[0] == 1 && x.col_stride != 1) {
    std::swap(x.rows, x.cols);
    std::swap(x.row_strides[0], x.col_stride);
  }
  if (is_one_row(x)) {
    x.cols *= x.rows;
    x.rows = 1;
  }
  return x;
}

// This thread's share of the first `rows` rows.
template <DType D, int Loads>
__device__ __forceinline__ float elements_amax(const MatrixView& x, int64_t rows) {
  using Storage = typename Element<D>::Storage;
  const Storage* data = static_cast<const Storage*>(x.data);
  float amax = 0.0F;
  if (in_stretches(x)) {
    const bool one_row = is_one_row(x);
    const int64_t cols = one_row ? rows * x.cols : x.cols;
    const int64_t stretches = ceil_div(cols, kStretch<Loads>);
    const int64_t units = (one_row ? 1 : rows) * stretches;
    for (int64_t i = blockIdx.x; i < units; i += gridDim.x) {
      const int64_t row = one_row ? 0 : i / stretches;
      const int64_t first = (one_row ? i : i % stretches) * kStretch<Loads>;
      amax = fmaxf(amax, stretch_amax<D, Loads>(data + x.row_offset(row) + first, min(kStretch<Loads>, cols - first)));
    }
    return amax;
  }
  const int64_t step = gridDim.x * int64_t(blockDim.x);
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < rows * x.cols; i += step) {
    amax = fmaxf(amax, fabsf(Element<D>::to_float(data[x.row_offset(i / x.cols) + i % x.cols * x.col_stride])));
  }
  return amax;
}

}  // namespace nvfp4
