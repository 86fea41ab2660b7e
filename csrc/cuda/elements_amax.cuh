// The amax of many elements in no particular order, shared among all blocks of a grid.
#pragma once

#include <utility>

#include "reduce.cuh"
#include "tile.cuh"

namespace nvfp4 {

// 16-byte loads in flight for each thread: few where the blocks must share the work evenly.
inline constexpr int kFewLoads = 4;
inline constexpr int kManyLoads = 8;

// One stretch of a row, contiguous and short: whole chunks where they are aligned, single elements at both ends.
template <DType D, int Loads>
__device__ __forceinline__ float stretch_amax(const typename Element<D>::Storage* x, int64_t length) {
  using Storage = typename Element<D>::Storage;
  constexpr int kPerChunk = Chunk<D>::kElements;
  const uint32_t head =
      min(uint32_t(length), uint32_t((16 - reinterpret_cast<uintptr_t>(x) % 16) % 16 / sizeof(Storage)));
  const uint32_t chunks = (uint32_t(length) - head) / kPerChunk;
  const uint4* vectors = reinterpret_cast<const uint4*>(x + head) + threadIdx.x;
  typename Element<D>::Pair m{};
  const auto take = [&](const Chunk<D>& chunk) {
#pragma unroll
    for (int e = 0; e < Chunk<D>::kPairs; ++e) m = Element<D>::larger_ignore_nan(m, chunk.pair[e]);
  };
  uint32_t first = 0;
  for (; first + Loads * kThreads <= chunks && blockDim.x == kThreads; first += Loads * kThreads) {
    Chunk<D> chunk[Loads];
#pragma unroll
    for (int u = 0; u < Loads; ++u) chunk[u].vector = __ldcs(vectors + first + u * kThreads);
#pragma unroll
    for (int u = 0; u < Loads; ++u) take(chunk[u]);
  }
#pragma unroll 2
  for (first += threadIdx.x; first < chunks; first += blockDim.x) {
    Chunk<D> chunk;
    chunk.vector = __ldcs(vectors + first - threadIdx.x);
    take(chunk);
  }
  float amax = pair_max_ignore_nan<D>(m);
  if (threadIdx.x < head) amax = fmaxf(amax, fabsf(Element<D>::to_float(x[threadIdx.x])));
  for (uint32_t i = head + chunks * kPerChunk + threadIdx.x; i < length; i += blockDim.x) {
    amax = fmaxf(amax, fabsf(Element<D>::to_float(x[i])));
  }
  return amax;
}

// How the first rows of x are cut into stretches that the blocks of a grid take in turn, worked out once on the host.
// Rows that touch are one; short or strided rows are read element by element.
struct Stretches {
  int64_t row_length;
  int64_t in_row;
  int64_t count;  // 0: element by element
};

template <int Loads>
inline constexpr int64_t kStretch = int64_t(kThreads) * Loads * 8;  // elements, the last of a row may be shorter

// Whether rows touch, so that they read as one.
inline bool is_one_row(const MatrixView& x) {
  return x.row_dims == 1 && x.col_stride == 1 && x.row_strides[0] == x.cols;
}

template <int Loads>
inline Stretches stretches_of(const MatrixView& x, int64_t rows) {
  constexpr int64_t kShortestRow = 512;
  const bool one_row = is_one_row(x);
  if (x.col_stride != 1 || (!one_row && x.cols < kShortestRow)) return {};
  const int64_t row_length = one_row ? rows * x.cols : x.cols;
  const int64_t in_row = ceil_div(row_length, kStretch<Loads>);
  return {row_length, in_row, one_row ? in_row : rows * in_row};
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

// The next four: this thread's share of the amax.

template <DType D, int Loads>
__device__ __forceinline__ float one_row_amax(const MatrixView& x, const Stretches& stretches) {
  float amax = 0.0F;
  for (int64_t i = blockIdx.x; i < stretches.count; i += gridDim.x) {
    const int64_t first = i * kStretch<Loads>;
    const auto* start = static_cast<const typename Element<D>::Storage*>(x.data) + first;
    amax = fmaxf(amax, stretch_amax<D, Loads>(start, min(kStretch<Loads>, stretches.row_length - first)));
  }
  return amax;
}

template <DType D, int Loads>
__device__ __noinline__ float rows_amax(const MatrixView& x, const Stretches& stretches) {
  float amax = 0.0F;
  for (int64_t i = blockIdx.x; i < stretches.count; i += gridDim.x) {
    const int64_t first = i % stretches.in_row * kStretch<Loads>;
    const auto* start =
        static_cast<const typename Element<D>::Storage*>(x.data) + x.row_offset(i / stretches.in_row) + first;
    amax = fmaxf(amax, stretch_amax<D, Loads>(start, min(kStretch<Loads>, stretches.row_length - first)));
  }
  return amax;
}

template <DType D>
__device__ __noinline__ float single_elements_amax(const MatrixView& x, int64_t rows) {
  const auto* data = static_cast<const typename Element<D>::Storage*>(x.data);
  float amax = 0.0F;
  const int64_t step = gridDim.x * int64_t(blockDim.x);
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < rows * x.cols; i += step) {
    amax = fmaxf(amax, fabsf(Element<D>::to_float(data[x.row_offset(i / x.cols) + i % x.cols * x.col_stride])));
  }
  return amax;
}

// Of the first `rows` rows, which `stretches` cuts.
template <DType D, int Loads>
__device__ __forceinline__ float elements_amax(const MatrixView& x, int64_t rows, const Stretches& stretches) {
  if (stretches.count == 0) return single_elements_amax<D>(x, rows);
  if (stretches.count > stretches.in_row) return rows_amax<D, Loads>(x, stretches);
  return one_row_amax<D, Loads>(x, stretches);
}

}  // namespace nvfp4
