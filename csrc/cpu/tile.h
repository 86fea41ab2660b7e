// How the CPU backend walks a matrix: tile by tile, in parallel, any strides read in place.
#pragma once

#include <ATen/Parallel.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>

#include "cpu/exact_float_guard.h"
#include "numerics/bits.h"
#include "numerics/formats.h"
#include "numerics/hadamard.h"
#include "params.h"

namespace nvfp4 {

// 16 lines of one block each: 16 rows of x, or (transposed) 16 of its columns. Whatever lies outside of x is 0.
using Tile = float[kBlock][kBlock];

// The part of x in a tile; both ends may be cut off by the edge of x.
struct TilePlace {
  int64_t row;
  int64_t col;
  int rows;
  int cols;
};

// Threads get regions of tiles. 128 rows make the 64-byte pieces of a cache line of column-wise data, 64 columns a
// cache line of bf16 input and of row-wise data (with the next region).
inline constexpr int64_t kRegionRows = 128;
inline constexpr int64_t kRegionCols = 64;
inline constexpr int64_t kRegionsPerThread = 4;  // fewer are not worth a thread

template <DType D>
float load_element(const void* data, int64_t index) {
  if constexpr (D == DType::kFloat32) {
    return static_cast<const float*>(data)[index];
  } else if constexpr (D == DType::kFloat16) {
    return static_cast<float>(static_cast<const c10::Half*>(data)[index]);
  } else {
    return bits_float(uint32_t(static_cast<const uint16_t*>(data)[index]) << 16);
  }
}

template <DType D>
void store_element(void* data, int64_t index, float value) {
  if constexpr (D == DType::kFloat32) {
    static_cast<float*>(data)[index] = value;
  } else if constexpr (D == DType::kFloat16) {
    static_cast<c10::Half*>(data)[index] = c10::Half(value);
  } else {
    static_cast<uint16_t*>(data)[index] = uint16_t(float_bits(round_to_bf16(value)) >> 16);
  }
}

// Rows past place.rows are left as they are: 0 from the start of the strip.
template <DType D>
void load_tile(const MatrixView& x, const int64_t (&row_offsets)[kBlock], const TilePlace& place, Tile& tile) {
  for (int i = 0; i < place.rows; ++i) {
    const int64_t start = row_offsets[i] + place.col * x.col_stride;
    if (x.col_stride == 1 && place.cols == kBlock) {
      for (int j = 0; j < kBlock; ++j) tile[i][j] = load_element<D>(x.data, start + j);
    } else {
      for (int j = 0; j < place.cols; ++j) tile[i][j] = load_element<D>(x.data, start + j * x.col_stride);
      std::fill(tile[i] + place.cols, tile[i] + kBlock, 0.0F);
    }
  }
}

// Calls body(tile, place) for the tiles of rows [row, row_end) and columns [col, col_end).
template <DType D, class Body>
void for_each_tile_of_region(const MatrixView& x, int64_t row, int64_t row_end, int64_t col_begin, int64_t col_end,
                             const Body& body) {
  for (; row < row_end; row += kBlock) {
    const int rows = int(std::min<int64_t>(kBlock, row_end - row));
    int64_t row_offsets[kBlock];
    for (int i = 0; i < rows; ++i) row_offsets[i] = x.row_offset(row + i);
    alignas(64) Tile tile = {};
    for (int64_t col = col_begin; col < col_end; col += kBlock) {
      const TilePlace place = {row, col, rows, int(std::min<int64_t>(kBlock, col_end - col))};
      load_tile<D>(x, row_offsets, place, tile);
      body(tile, place);
    }
  }
}

// Calls body(first row, last row, first column, last column) for each region of a matrix, on many threads.
template <class Body>
void for_each_region(int64_t rows, int64_t cols, const Body& body) {
  const int64_t region_cols = ceil_div(cols, kRegionCols);
  const int64_t regions = ceil_div(rows, kRegionRows) * region_cols;
  at::parallel_for(0, regions, kRegionsPerThread, [&](int64_t begin, int64_t end) {
    const ExactFloatGuard guard;
    for (int64_t region = begin; region < end; ++region) {
      const int64_t row = region / region_cols * kRegionRows;
      const int64_t col = region % region_cols * kRegionCols;
      body(row, std::min(rows, row + kRegionRows), col, std::min(cols, col + kRegionCols));
    }
  });
}

template <DType D, class Body>
void for_each_tile(const MatrixView& x, const Body& body) {
  for_each_region(x.rows, x.cols, [&](int64_t row, int64_t row_end, int64_t col, int64_t col_end) {
    for_each_tile_of_region<D>(x, row, row_end, col, col_end, body);
  });
}

inline void transpose(const Tile& in, Tile& out) {
  for (int i = 0; i < kBlock; ++i) {
    for (int j = 0; j < kBlock; ++j) out[j][i] = in[i][j];
  }
}

// The column-wise lines of a tile of x: its columns, transformed if asked for; y has the precision of bf16 if x has.
template <DType D>
void columnwise_lines(const Tile& tile, bool with_rht, uint32_t sign_mask, Tile& lines) {
  transpose(tile, lines);
  if (!with_rht) return;
  for (auto& line : lines) {
    hadamard_forward(line, sign_mask);
    if constexpr (D == DType::kBFloat16) {
      for (float& y : line) y = round_to_bf16(y);
    }
  }
}

}  // namespace nvfp4
