// The blocks of a tile in registers: 16 elements of a row, or of a column beside its neighbour.
//
// Each offers value(i); reduce(larger), the largest of its magnitudes, under any sign; and the signs of eight elements
// as masks, 0x00 or 0xFF a byte, of the even elements (low nibbles of the codes) and of the odd ones.
#pragma once

#include "tile.cuh"

namespace nvfp4 {

struct SignMasks {
  uint32_t even;
  uint32_t odd;
};

// From [a.low, b.low, a.high, b.high] pairs of 16-bit elements, or from single floats.
__device__ __forceinline__ uint32_t signs_of_pairs(uint32_t a, uint32_t b) { return ptx::permute<0xFBD9>(a, b); }
__device__ __forceinline__ uint32_t signs_of_floats(float a, float b, float c, float d) {
  const uint32_t ab = ptx::permute<0x00FB>(float_bits(a), float_bits(b));
  const uint32_t cd = ptx::permute<0x00FB>(float_bits(c), float_bits(d));
  return ptx::permute<0x5410>(ab, cd);
}
__device__ __forceinline__ SignMasks signs_of_floats(const float* v) {
  return {signs_of_floats(v[0], v[2], v[4], v[6]), signs_of_floats(v[1], v[3], v[5], v[7])};
}

template <DType D>
struct RowBlock {
  using Pair = typename Element<D>::Pair;
  static constexpr int kChunks = kBlock / Chunk<D>::kElements;
  Chunk<D> chunk[kChunks];

  __device__ __forceinline__ RowBlock(const uint8_t* tile, uint32_t row, uint32_t block) {
    const uint32_t first = chunk_offset<D>(row, block * kChunks);  // the low bits of a chunk's number are only XORed
#pragma unroll
    for (int i = 0; i < kChunks; ++i) chunk[i].vector = *reinterpret_cast<const uint4*>(tile + (first ^ (i * 16)));
  }
  __device__ __forceinline__ Pair pair(int i) const { return chunk[i / Chunk<D>::kPairs].pair[i % Chunk<D>::kPairs]; }
  __device__ __forceinline__ float value(int i) const {
    return i % 2 == 0 ? Element<D>::low(pair(i / 2)) : Element<D>::high(pair(i / 2));
  }
  template <class Max>
  __device__ __forceinline__ Pair reduce(Max max) const {
    Pair m = pair(0);
#pragma unroll
    for (int i = 1; i < kBlock / 2; ++i) m = max(m, pair(i));
    return m;
  }
  __device__ __forceinline__ SignMasks signs(int half) const {
    const int first = half * 4;
    if constexpr (sizeof(Pair) == 4) {
      const uint32_t a = signs_of_pairs(pair(first), pair(first + 1));
      const uint32_t b = signs_of_pairs(pair(first + 2), pair(first + 3));
      return {ptx::permute<0x5410>(a, b), ptx::permute<0x7632>(a, b)};
    } else {
      return {signs_of_floats(pair(first).x, pair(first + 1).x, pair(first + 2).x, pair(first + 3).x),
              signs_of_floats(pair(first).y, pair(first + 1).y, pair(first + 2).y, pair(first + 3).y)};
    }
  }
};

// 16 rows of two neighbouring columns.
template <DType D>
struct ColumnPair {
  using Pair = typename Element<D>::Pair;
  Pair row[kBlock];

  __device__ __forceinline__ ColumnPair(const uint8_t* tile, uint32_t row_block, uint32_t col) {
    // Within a block the place of a column only depends on whether the row is odd.
    const uint32_t first = row_block * kBlock;
    const uint8_t* even = tile + ptx::opaque(element_offset<D>(first, col));
    const uint8_t* odd = even;
    if constexpr (sizeof(Pair) == 8) odd = tile + ptx::opaque(element_offset<D>(first + 1, col) - kRowBytes);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      row[i] = *reinterpret_cast<const Pair*>((i % 2 == 0 ? even : odd) + i * kRowBytes);
    }
  }
  template <class Max>
  __device__ __forceinline__ Pair reduce(Max max) const {
    Pair m = row[0];
#pragma unroll
    for (int i = 1; i < kBlock; ++i) m = max(m, row[i]);
    return m;
  }
};

// One of them.
template <DType D>
struct ColumnBlock {
  const ColumnPair<D>& x;
  int which;

  __device__ __forceinline__ float value(int i) const {
    return which == 0 ? Element<D>::low(x.row[i]) : Element<D>::high(x.row[i]);
  }
  __device__ __forceinline__ SignMasks signs(int half) const {
    const auto* row = x.row + half * 8;
    if constexpr (sizeof(typename Element<D>::Pair) == 4) {
      const uint32_t even0 = signs_of_pairs(row[0], row[2]);
      const uint32_t even1 = signs_of_pairs(row[4], row[6]);
      const uint32_t odd0 = signs_of_pairs(row[1], row[3]);
      const uint32_t odd1 = signs_of_pairs(row[5], row[7]);
      if (which == 0) return {ptx::permute<0x5410>(even0, even1), ptx::permute<0x5410>(odd0, odd1)};
      return {ptx::permute<0x7632>(even0, even1), ptx::permute<0x7632>(odd0, odd1)};
    } else {
      if (which == 0) {
        return {signs_of_floats(row[0].x, row[2].x, row[4].x, row[6].x),
                signs_of_floats(row[1].x, row[3].x, row[5].x, row[7].x)};
      }
      return {signs_of_floats(row[0].y, row[2].y, row[4].y, row[6].y),
              signs_of_floats(row[1].y, row[3].y, row[5].y, row[7].y)};
    }
  }
};

// The transform of one of them, rounded as the dtype asks.
struct TransformedBlock {
  float y[kBlock];

  template <DType D>
  __device__ __forceinline__ TransformedBlock(const ColumnBlock<D>& x, uint32_t sign_mask) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) y[i] = x.value(i);
    hadamard_forward(y, sign_mask);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) y[i] = Element<D>::round(y[i]);
  }
  __device__ __forceinline__ float value(int i) const { return y[i]; }
  template <class Max>
  __device__ __forceinline__ float reduce(Max max) const {
    float m = fabsf(y[0]);
#pragma unroll
    for (int i = 1; i < kBlock; ++i) m = max(m, fabsf(y[i]));
    return m;
  }
  __device__ __forceinline__ SignMasks signs(int half) const { return signs_of_floats(y + half * 8); }
};

// The lanes of a warp on 64 rows x 16 columns of a tile: four row blocks, the bytes of one scale word, lie side by
// side.
struct ColumnLane {
  uint32_t row_block;
  uint32_t pair;
  __device__ __forceinline__ ColumnLane()
      : row_block(threadIdx.x % kTileRowBlocks), pair(threadIdx.x % 32 / kTileRowBlocks) {}
};

}  // namespace nvfp4
