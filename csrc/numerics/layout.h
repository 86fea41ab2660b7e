// Shapes and places: padded sizes, the buffers of a direction, the swizzled order of the scales.
#pragma once

#include <cstdint>

#include "bits.h"
#include "formats.h"

namespace nvfp4 {

inline constexpr int kScaleLineAlign = 128;  // lines and blocks of a scale buffer are padded to these
inline constexpr int kScaleBlockAlign = 4;
inline constexpr int kScaleTileBytes = kScaleLineAlign * kScaleBlockAlign;  // one 512-byte tile of the swizzled order

// Int: an integer, or torch's symbolic one.
template <class Int>
NVFP4_HD constexpr Int ceil_div(const Int& value, int64_t unit) {
  return (value + Int(unit - 1)) / Int(unit);
}
template <class Int>
NVFP4_HD constexpr Int round_up(const Int& value, int64_t unit) {
  return ceil_div(value, unit) * Int(unit);
}

// The buffers of one direction: `lines` lines of `length` elements each, blocks along the line.
template <class Int>
struct DirectionLayout {
  Int lines;
  Int length;
  NVFP4_HD constexpr Int blocks() const { return ceil_div(length, kBlock); }
  NVFP4_HD constexpr Int line_bytes() const { return blocks() * kBlockBytes; }
  NVFP4_HD constexpr Int scale_lines() const { return round_up(lines, kScaleLineAlign); }
  NVFP4_HD constexpr Int scale_blocks() const { return round_up(blocks(), kScaleBlockAlign); }
};

// Byte of the scale of (line, block) in a buffer with `scale_blocks` (padded) blocks a line. Four neighbouring blocks
// (block / 4) always form one aligned 32-bit word.
NVFP4_HD constexpr uint64_t scale_offset(uint64_t line, uint32_t block, uint32_t scale_blocks, bool swizzled) {
  if (!swizzled) return line * scale_blocks + block;
  const uint64_t tile = (line / kScaleLineAlign) * (scale_blocks / kScaleBlockAlign) + block / kScaleBlockAlign;
  const uint32_t row = uint32_t(line) % kScaleLineAlign;
  return tile * kScaleTileBytes + (row % 32) * 16 + row / 32 * 4 + block % kScaleBlockAlign;
}

static_assert(round_up(17, 16) == 32 && round_up(int64_t(0), 128) == 0);
static_assert(scale_offset(0, 5, 8, true) == 513 && scale_offset(33, 0, 8, true) == 20);
static_assert(scale_offset(128, 0, 8, true) == 1024 && scale_offset(2, 3, 8, false) == 19);

}  // namespace nvfp4
