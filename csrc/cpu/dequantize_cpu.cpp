// Codes and scales back to numbers on the CPU.
#include "cpu/tile.h"
#include "dispatch.h"
#include "kernels.h"
#include "numerics/fp4.h"
#include "numerics/fp8.h"
#include "numerics/scale.h"

namespace nvfp4 {
namespace {

// Block number `block` of `count` lines as float32.
void decode_lines(const DequantizeParams& p, const DirectionLayout<int64_t>& layout, int64_t first_line, int count,
                  int64_t block, Tile& lines) {
  for (int i = 0; i < count; ++i) {
    const int64_t line = first_line + i;
    const uint8_t byte = p.scale[scale_offset(line, block, layout.scale_blocks(), p.swizzled)];
    const float factor = dequantize_factor(decode_e4m3(byte), p.amax[p.row_scaled ? line : 0], p.e4m3_max);
    const uint8_t* codes = p.data + (line * layout.blocks() + block) * kBlockBytes;
    for (int j = 0; j < kBlockBytes; ++j) {
      lines[i][2 * j] = decode_e2m1(codes[j] & 0xFU) * factor;
      lines[i][2 * j + 1] = decode_e2m1(codes[j] >> 4) * factor;
    }
  }
}

// The tile of x at `place`.
void decode_tile(const DequantizeParams& p, const TilePlace& place, Tile& tile) {
  if (!p.columnwise) {
    return decode_lines(p, {p.rows, p.cols}, place.row, place.rows, place.col / kBlock, tile);
  }
  alignas(64) Tile lines = {};
  decode_lines(p, {p.cols, p.rows}, place.col, place.cols, place.row / kBlock, lines);
  if (p.with_rht) {
    for (auto& line : lines) hadamard_inverse(line, p.sign_mask);
  }
  transpose(lines, tile);
}

template <DType D>
void dequantize_tiles(const DequantizeParams& p) {
  for_each_region(p.rows, p.cols, [&](int64_t row_begin, int64_t row_end, int64_t col_begin, int64_t col_end) {
    for (int64_t row = row_begin; row < row_end; row += kBlock) {
      for (int64_t col = col_begin; col < col_end; col += kBlock) {
        const TilePlace place = {row, col, int(std::min<int64_t>(kBlock, row_end - row)),
                                 int(std::min<int64_t>(kBlock, col_end - col))};
        alignas(64) Tile tile;
        decode_tile(p, place, tile);
        for (int i = 0; i < place.rows; ++i) {
          for (int j = 0; j < place.cols; ++j) store_element<D>(p.out, (row + i) * p.cols + col + j, tile[i][j]);
        }
      }
    }
  });
}

}  // namespace

void dequantize_cpu(const DequantizeParams& p) {
  if (p.rows == 0 || p.cols == 0) return;
  dispatch_dtype(p.dtype, [&](auto dtype) { dequantize_tiles<decltype(dtype)::value>(p); });
}

}  // namespace nvfp4
