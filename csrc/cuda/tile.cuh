// A tile of x in shared memory: 64 rows of 256 bytes, zero outside of x.
//
// The 16-byte chunks of a row are permuted by XOR, so that reading 16 elements of a row (neighbouring lanes on the
// blocks of a row) and reading pairs of columns (32 lanes on 4 row blocks x 8 pairs) are both free of bank conflicts.
#pragma once

#include "../numerics/hadamard.h"
#include "element.cuh"

namespace nvfp4 {

// Threads of a block on a tile. More of them finish a tile sooner, fewer spend less on it: many where there are too few
// tiles to fill the device.
inline constexpr int kThreads = 128;
inline constexpr int kManyThreads = 256;
inline constexpr int kMaxWarps = kManyThreads / 32;
inline constexpr int kRowBytes = 256;
inline constexpr int kRowChunks = kRowBytes / 16;
inline constexpr int kTileRows = 64;
inline constexpr int kTileRowBlocks = kTileRows / kBlock;  // 4: the blocks of one scale word of a column
inline constexpr int kTileBytes = kTileRows * kRowBytes;

template <DType D>
inline constexpr int kTileCols = kRowBytes / sizeof(typename Element<D>::Storage);
template <DType D>
inline constexpr int kTileColBlocks = kTileCols<D> / kBlock;

static_assert(kTileRowBlocks == kScaleBlockAlign && kTileColBlocks<DType::kFloat32> % kScaleBlockAlign == 0);
static_assert(kScaleLineAlign % kTileRows == 0 && kScaleLineAlign % kTileCols<DType::kBFloat16> == 0);

// How x is cut into tiles, worked out once on the host. Tiles cover x padded to multiples of 128 both ways, and with it
// every byte of both scale buffers. Memory ends long before 2^32 tiles.
struct Tiling {
  uint32_t rows;  // of tiles
  uint32_t cols;
  uint32_t inner_rows;  // of those that lie wholly inside x
  uint32_t inner_cols;
  uint32_t cols_reciprocal;  // floor(2^32 / cols), or 2^32 - 1
  bool aligned_rows;         // whole rows can be read 16 bytes at a time
  __host__ __device__ uint32_t count() const { return rows * cols; }
};
template <DType D>
inline Tiling tiling_of(const MatrixView& x) {
  constexpr int kSize = sizeof(typename Element<D>::Storage);
  Tiling t{};
  t.rows = uint32_t(round_up(uint64_t(x.rows), kScaleLineAlign) / kTileRows);
  t.cols = uint32_t(round_up(uint64_t(x.cols), kScaleLineAlign) / kTileCols<D>);
  t.inner_rows = uint32_t(x.rows / kTileRows);
  t.inner_cols = uint32_t(x.cols / kTileCols<D>);
  t.cols_reciprocal = t.cols <= 1 ? UINT32_MAX : uint32_t((uint64_t(1) << 32) / t.cols);
  t.aligned_rows = x.col_stride == 1 && x.row_dims == 1 && (x.row_strides[0] * kSize) % 16 == 0 &&
                   reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
  return t;
}

// A tile by its place in the grid, and its first element.
struct TilePlace {
  uint32_t row;
  uint32_t col;
};
struct TileOrigin {
  int64_t row;
  int64_t col;
};
// The product with the reciprocal is the quotient, or one less.
__device__ __forceinline__ TilePlace tile_place(uint32_t index, const Tiling& tiling) {
  const uint32_t row = __umulhi(index, tiling.cols_reciprocal);
  const uint32_t col = index - row * tiling.cols;
  return col < tiling.cols ? TilePlace{row, col} : TilePlace{row + 1, col - tiling.cols};
}
template <DType D>
__device__ __forceinline__ TileOrigin tile_origin(TilePlace place) {
  return {int64_t(place.row) * kTileRows, int64_t(place.col) * kTileCols<D>};
}

template <DType D>
__device__ __forceinline__ uint32_t chunk_offset(uint32_t row, uint32_t row_block, uint32_t chunk) {
  chunk ^= (chunk >> 3) ^ ((row_block & 3) << 1);
  if constexpr (sizeof(typename Element<D>::Storage) == 4) chunk ^= (row & 1) << 1;
  return row * kRowBytes + chunk * 16;
}

template <DType D>
__device__ __forceinline__ uint32_t chunk_offset(uint32_t row, uint32_t chunk) {
  return chunk_offset<D>(row, row / kBlock, chunk);
}

template <DType D>
__device__ __forceinline__ uint32_t element_offset(uint32_t row, uint32_t col) {
  constexpr uint32_t kPerChunk = Chunk<D>::kElements;
  return chunk_offset<D>(row, col / kPerChunk) + col % kPerChunk * uint32_t(sizeof(typename Element<D>::Storage));
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
  for (int i = threadIdx.x; i < kTileRows * kRowChunks; i += blockDim.x) {
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

template <DType D, int Threads>
__device__ __forceinline__ void load_inner_tile(const MatrixView& x, TileOrigin origin, uint8_t* tile) {
  using Storage = typename Element<D>::Storage;
  constexpr int kRowStep = Threads / kRowChunks;
  static_assert(kBlock % kRowStep == 0);  // so that `row` alone tells the block of first + row
  const int chunk = threadIdx.x % kRowChunks;
  const int first = threadIdx.x / kRowChunks;
  const Storage* source = static_cast<const Storage*>(x.data) + (origin.row + first) * x.row_strides[0] + origin.col +
                          chunk * Chunk<D>::kElements;
  const int64_t step = x.row_strides[0] * kRowStep;
#pragma unroll
  for (int row = 0; row < kTileRows; row += kRowStep) {
    ptx::copy16_async(tile + chunk_offset<D>(first + row, row / kBlock, chunk), source);
    source += step;
  }
}

// Any strides: neighbouring threads follow the smaller one.
template <DType D>
__device__ __noinline__ void load_strided_tile(const MatrixView& x, TileOrigin origin, uint8_t* tile) {
  using Storage = typename Element<D>::Storage;
  const bool along_rows = x.row_strides[x.row_dims - 1] < x.col_stride;
  for (int i = threadIdx.x; i < kTileRows * kTileCols<D>; i += blockDim.x) {
    const int row = along_rows ? i % kTileRows : i / kTileCols<D>;
    const int col = along_rows ? i / kTileRows : i % kTileCols<D>;
    *reinterpret_cast<Storage*>(tile + element_offset<D>(row, col)) =
        read_element<D>(x, origin.row + row, origin.col + col);
  }
}

// Starts to load a tile and closes a group of asynchronous copies; the tile is complete once every thread has waited
// for its group and passed a barrier.
template <DType D>
__device__ __forceinline__ void load_tile(const MatrixView& x, const Tiling& tiling, TilePlace place, uint8_t* tile) {
  const TileOrigin origin = tile_origin<D>(place);
  if (!tiling.aligned_rows) {
    load_strided_tile<D>(x, origin, tile);
  } else if (place.row < tiling.inner_rows && place.col < tiling.inner_cols) {
    if (blockDim.x == kThreads) {
      load_inner_tile<D, kThreads>(x, origin, tile);
    } else {
      load_inner_tile<D, kManyThreads>(x, origin, tile);
    }
  } else {
    load_edge_tile<D>(x, origin, tile);
  }
  ptx::copy_async_commit();
}

}  // namespace nvfp4
