// The amaxes of one tile: of x, of its transform, and of single lines.
#pragma once

#include "blocks.cuh"
#include "reduce.cuh"

namespace nvfp4 {

struct TileAmax {
  float rowwise;
  float columnwise;
};

// Each thread looks at the chunks that it loaded itself: needs no barrier, only that the thread's copies have arrived.
template <DType D>
__device__ __forceinline__ float own_chunks_amax(const uint8_t* tile) {
  typename Element<D>::Pair m{};
#pragma unroll
  for (int i = threadIdx.x; i < kTileRows * kRowChunks; i += blockDim.x) {
    Chunk<D> chunk;
    chunk.vector = *reinterpret_cast<const uint4*>(tile + chunk_offset<D>(i / kRowChunks, i % kRowChunks));
#pragma unroll
    for (int e = 0; e < Chunk<D>::kPairs; ++e) m = Element<D>::larger_ignore_nan(m, chunk.pair[e]);
  }
  return pair_max_ignore_nan<D>(m);
}

// What is asked of every tile; the buffers are raised here only if every line has its own amax.
struct AmaxTask {
  float* rowwise;
  float* columnwise;
  int64_t rows;
  int64_t cols;
  bool with_rht;
  uint32_t sign_mask;
  bool row_scaled;
};

// This thread's share of both amaxes of a complete tile.
template <DType D>
__device__ inline TileAmax tile_amax(const AmaxTask& task, TilePlace place, const uint8_t* tile) {
  const TileOrigin origin = tile_origin<D>(place);
  const ColumnLane lane;
  TileAmax amax = {0.0F, 0.0F};
  const auto max = [](auto a, auto b) { return Element<D>::larger_ignore_nan(a, b); };
  for (int block = threadIdx.x / 32; block < kTileColBlocks<D>; block += blockDim.x / 32) {
    const int col = block * kBlock + lane.pair * 2;
    const ColumnPair<D> x(tile, lane.row_block, col);
    const typename Element<D>::Pair m = x.reduce(max);
    amax.rowwise = fmaxf(amax.rowwise, pair_max_ignore_nan<D>(m));
    if (task.columnwise == nullptr) continue;
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      float line = fabsf(which == 0 ? Element<D>::low(m) : Element<D>::high(m));
      if (task.with_rht) {
        const TransformedBlock y(ColumnBlock<D>{x, which}, task.sign_mask);
        line = y.reduce([](float a, float b) { return fmaxf(a, b); });
      }
      amax.columnwise = fmaxf(amax.columnwise, line);
      if (task.row_scaled) {
        line = group_max_ignore_nan<kTileRowBlocks>(line);
        const int64_t k = origin.col + col + which;
        if (lane.row_block == 0 && k < task.cols) raise_amax(task.columnwise + k, line);
      }
    }
  }
  if (task.row_scaled && task.rowwise != nullptr) {
    constexpr int kBlocks = kTileColBlocks<D>;
    for (int i = threadIdx.x; i < kTileRows * kBlocks; i += blockDim.x) {
      const int row = i / kBlocks;
      const RowBlock<D> x(tile, row, i % kBlocks);
      const float line = group_max_ignore_nan<kBlocks>(pair_max_ignore_nan<D>(x.reduce(max)));
      if (i % kBlocks == 0 && origin.row + row < task.rows) {
        raise_amax(task.rowwise + origin.row + row, line);
      }
    }
  }
  return amax;
}

}  // namespace nvfp4
