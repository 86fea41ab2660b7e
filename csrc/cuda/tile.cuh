// A tile of x in shared memory: 64 rows x 128 columns, zero outside of x.
//
// The 16-byte chunks of a row are permuted by XOR, so that reading 16 elements of a row (8 lanes on 8 blocks of one row)
// and reading pairs of columns (32 lanes on 4 row blocks x 8 pairs) are both free of bank conflicts.
#pragma once

#include "../numerics/hadamard.h"
#include "element.cuh"

namespace nvfp4 {

inline constexpr int kTileRows = 64;
inline constexpr int kTileCols = 128;
inline constexpr int kThreads = 256;
inline constexpr int kTileRowBlocks = kTileRows / kBlock;  // 4: the blocks of one scale word of a column
inline constexpr int kTileColBlocks = kTileCols / kBlock;  // 8
inline constexpr int kWarps = kThreads / 32;

static_assert(kTileRowBlocks == kScaleBlockAlign && kTileColBlocks % kScaleBlockAlign == 0);
static_assert(kScaleLineAlign % kTileRows == 0 && kScaleLineAlign % kTileCols == 0);

template <DType D>
inline constexpr int kTileBytes = kTileRows * kTileCols * sizeof(typename Element<D>::Storage);

// Tiles cover x padded to multiples of 128 both ways, and with it every byte of both scale buffers.
struct TileGrid {
  int64_t rows;
  int64_t cols;
};
__host__ __device__ inline TileGrid tile_grid(const MatrixView& x) {
  return {round_up(x.rows, kScaleLineAlign) / kTileRows, round_up(x.cols, kScaleLineAlign) / kTileCols};
}

struct TileOrigin {
  int64_t row;
  int64_t col;
};
__device__ inline TileOrigin tile_origin(int64_t index, int64_t grid_cols) {
  return {index / grid_cols * kTileRows, index % grid_cols * kTileCols};
}

template <DType D>
__device__ __forceinline__ int chunk_offset(int row, int chunk) {
  constexpr int kRowBytes = kTileCols * sizeof(typename Element<D>::Storage);
  const int row_block = row / kBlock;
  if constexpr (sizeof(typename Element<D>::Storage) == 2) {
    chunk ^= (chunk >> 3) ^ ((row_block & 3) << 1);
  } else {
    chunk ^= ((chunk >> 3) & 3) ^ ((row_block & 1) << 2);
  }
  return row * kRowBytes + chunk * 16;
}

template <DType D>
__device__ __forceinline__ int element_offset(int row, int col) {
  constexpr int kPerChunk = Chunk<D>::kElements;
  return chunk_offset<D>(row, col / kPerChunk) + col % kPerChunk * int(sizeof(typename Element<D>::Storage));
}

// True where whole rows can be read 16 bytes at a time.
template <DType D>
__device__ inline bool has_aligned_rows(const MatrixView& x) {
  constexpr int kSize = sizeof(typename Element<D>::Storage);
  return x.col_stride == 1 && x.row_dims == 1 && (x.row_strides[0] * kSize) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
}

template <DType D>
__device__ __forceinline__ typename Element<D>::Storage read_element(const MatrixView& x, int64_t row, int64_t col) {
  using Storage = typename Element<D>::Storage;
  if (row >= x.rows || col >= x.cols) return Storage(0);
  return static_cast<const Storage*>(x.data)[x.row_offset(row) + col * x.col_stride];
}

// Outside of x a chunk is zero; a chunk across its edge is read element by element.
template <DType D>
__device__ __noinline__ void load_edge_tile(const MatrixView& x, TileOrigin origin, uint8_t* tile) {
  using Storage = typename Element<D>::Storage;
  constexpr int kPerChunk = Chunk<D>::kElements;
  constexpr int kRowChunks = kTileCols / kPerChunk;
  for (int i = threadIdx.x; i < kTileRows * kRowChunks; i += kThreads) {
    const int64_t row = origin.row + i / kRowChunks;
    const int64_t col = origin.col + i % kRowChunks * kPerChunk;
    uint8_t* target = tile + chunk_offset<D>(i / kRowChunks, i % kRowChunks);
    if (row < x.rows && col + kPerChunk <= x.cols) {
      ptx::copy16_async(target, static_cast<const Storage*>(x.data) + row * x.row_strides[0] + col);
    } else {
      for (int e = 0; e < kPerChunk; ++e) {
        reinterpret_cast<Storage*>(target)[e] = read_element<D>(x, row, col + e);
      }
    }
  }
}

template <DType D>
__device__ __forceinline__ void load_inner_tile(const MatrixView& x, TileOrigin origin, uint8_t* tile) {
  using Storage = typename Element<D>::Storage;
  constexpr int kPerChunk = Chunk<D>::kElements;
  constexpr int kRowChunks = kTileCols / kPerChunk;
  constexpr int kRowStep = kThreads / kRowChunks;
  const int chunk = threadIdx.x % kRowChunks;
  const int first = threadIdx.x / kRowChunks;
  const Storage* source =
      static_cast<const Storage*>(x.data) + (origin.row + first) * x.row_strides[0] + origin.col + chunk * kPerChunk;
  const int64_t step = x.row_strides[0] * kRowStep;
#pragma unroll
  for (int row = 0; row < kTileRows; row += kRowStep) {
    ptx::copy16_async(tile + chunk_offset<D>(first + row, chunk), source);
    source += step;
  }
}

// Any strides: neighbouring threads follow the smaller one.
template <DType D>
__device__ __noinline__ void load_strided_tile(const MatrixView& x, TileOrigin origin, uint8_t* tile) {
  using Storage = typename Element<D>::Storage;
  const bool along_rows = x.row_strides[x.row_dims - 1] < x.col_stride;
  for (int i = threadIdx.x; i < kTileRows * kTileCols; i += kThreads) {
    const int row = along_rows ? i % kTileRows : i / kTileCols;
    const int col = along_rows ? i / kTileRows : i % kTileCols;
    *reinterpret_cast<Storage*>(tile + element_offset<D>(row, col)) =
        read_element<D>(x, origin.row + row, origin.col + col);
  }
}

// Starts to load a tile and closes a group of asynchronous copies; the tile is complete once every thread has waited for
// its group and passed a barrier.
template <DType D>
__device__ __forceinline__ void load_tile(const MatrixView& x, bool aligned, TileOrigin origin, uint8_t* tile) {
  if (!aligned) {
    load_strided_tile<D>(x, origin, tile);
  } else if (origin.row + kTileRows <= x.rows && origin.col + kTileCols <= x.cols) {
    load_inner_tile<D>(x, origin, tile);
  } else {
    load_edge_tile<D>(x, origin, tile);
  }
  ptx::copy_async_commit();
}

// 16 elements of a row, and their largest magnitude.
template <DType D>
struct RowBlock {
  static constexpr int kChunks = kBlock / Chunk<D>::kElements;
  Chunk<D> chunk[kChunks];

  __device__ __forceinline__ RowBlock(const uint8_t* tile, int row, int block) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      chunk[i].vector = *reinterpret_cast<const uint4*>(tile + chunk_offset<D>(row, block * kChunks + i));
    }
  }
  __device__ __forceinline__ float value(int i) const {
    const typename Element<D>::Pair pair = chunk[i / Chunk<D>::kElements].pair[i % Chunk<D>::kElements / 2];
    return i % 2 == 0 ? Element<D>::low(pair) : Element<D>::high(pair);
  }
  template <class Max>
  __device__ __forceinline__ typename Element<D>::Pair reduce(Max max) const {
    auto m = Element<D>::magnitude(chunk[0].pair[0]);
#pragma unroll
    for (int i = 1; i < kBlock / 2; ++i) {
      m = max(m, Element<D>::magnitude(chunk[i / Chunk<D>::kPairs].pair[i % Chunk<D>::kPairs]));
    }
    return m;
  }
};

// 16 rows of two neighbouring columns.
template <DType D>
struct ColumnPair {
  typename Element<D>::Pair row[kBlock];

  __device__ __forceinline__ ColumnPair(const uint8_t* tile, int row_block, int col) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      row[i] = *reinterpret_cast<const typename Element<D>::Pair*>(tile + element_offset<D>(row_block * kBlock + i, col));
    }
  }
  __device__ __forceinline__ float value(int i, int which) const {
    return which == 0 ? Element<D>::low(row[i]) : Element<D>::high(row[i]);
  }
  template <class Max>
  __device__ __forceinline__ typename Element<D>::Pair reduce(Max max) const {
    auto m = Element<D>::magnitude(row[0]);
#pragma unroll
    for (int i = 1; i < kBlock; ++i) m = max(m, Element<D>::magnitude(row[i]));
    return m;
  }
};

// The lanes of a warp on 64 rows x 16 columns of a tile: four row blocks, the bytes of one scale word, lie side by side.
struct ColumnLane {
  int row_block;
  int pair;
  __device__ __forceinline__ ColumnLane()
      : row_block(threadIdx.x % kTileRowBlocks), pair(threadIdx.x % 32 / kTileRowBlocks) {}
};

// The transform of one column of a pair, rounded as the dtype asks.
template <DType D>
__device__ __forceinline__ void transformed_column(const ColumnPair<D>& x, int which, uint32_t sign_mask,
                                                   float (&y)[kBlock]) {
#pragma unroll
  for (int i = 0; i < kBlock; ++i) y[i] = x.value(i, which);
  hadamard_forward(y, sign_mask);
#pragma unroll
  for (int i = 0; i < kBlock; ++i) y[i] = Element<D>::round(y[i]);
}

}  // namespace nvfp4
