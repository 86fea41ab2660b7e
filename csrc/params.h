// Plain structs that go to the kernels of both backends by value. All strides and sizes count elements.
#pragma once

#include <cstdint>

#include "numerics/layout.h"

namespace nvfp4 {

enum class DType : uint8_t { kFloat32, kFloat16, kBFloat16 };

enum class Rounding : uint8_t { kNearest, kStochastic, kFourOverSix };

// A tensor seen as [rows, cols]; cols is its last dimension, the others are merged where their strides allow it. No
// more than 40 dimensions of two or more elements fit into memory, so that any tensor fits into this struct.
inline constexpr int kMaxRowDims = 40;

struct MatrixView {
  const void* data;
  DType dtype;
  int64_t rows;
  int64_t cols;
  int64_t col_stride;
  int32_t row_dims;  // 1 or more, outermost first
  int64_t row_sizes[kMaxRowDims];
  int64_t row_strides[kMaxRowDims];

  NVFP4_HD constexpr int64_t row_offset(int64_t row) const {
    int64_t offset = 0;
    for (int d = row_dims - 1; d > 0; --d) {
      offset += row % row_sizes[d] * row_strides[d];
      row /= row_sizes[d];
    }
    return offset + row * row_strides[0];
  }
};

// The outputs of one direction; all null where it is not asked for.
struct DirectionBuffers {
  uint8_t* data;   // [lines, padded length / 2]
  uint8_t* scale;  // [lines up to 128, blocks up to 4]
  float* amax;     // [1], row-scaled [lines]
};

// Where the random bits come from; the pointers serve CUDA graphs, whose replays advance the generator.
struct PhiloxSource {
  uint64_t seed;
  uint64_t offset;  // added to *offset_pointer where there is one
  const int64_t* seed_pointer;
  const int64_t* offset_pointer;
};

struct AmaxParams {
  MatrixView x;
  float* rowwise;  // null where not asked for
  float* columnwise;
  const float* noop_flag;  // null, or one element: exactly 1 means that nothing is written
  bool with_rht;           // the column-wise amax is that of the transform
  uint32_t sign_mask;
  bool row_scaled;  // one amax a line
};

enum class AmaxSource : uint8_t {
  kCompute,  // the amax of x, written to the buffers: only in schedules of one launch, and on the CPU
  kBuffers,  // the buffers hold it already
  kPointer,  // given by the caller, on the device: copied to the buffers
  kValue,    // given by the caller, on the host: written to the buffers
};

struct QuantizeParams {
  MatrixView x;
  DirectionBuffers rowwise;
  DirectionBuffers columnwise;
  const float* noop_flag;
  AmaxSource amax_source;
  const float* given_amax;
  float given_amax_value;
  Rounding rounding;
  PhiloxSource random;
  bool with_rht;  // column-wise only
  uint32_t sign_mask;
  bool two_d;  // one scale a 16x16 tile
  bool row_scaled;
  bool squared_error;  // 4over6: MSE instead of MAE
  float e4m3_max;      // kE4M3Max, or with 4over6 its smaller bound
  bool swizzled;       // order of the scale bytes
};

struct DequantizeParams {
  const uint8_t* data;
  const uint8_t* scale;
  const float* amax;
  void* out;  // [rows, cols], contiguous
  DType dtype;
  int64_t rows;
  int64_t cols;
  bool columnwise;  // data holds the transpose
  bool swizzled;
  bool row_scaled;
  bool with_rht;  // column-wise only
  uint32_t sign_mask;
  float e4m3_max;  // kE4M3Max, or with 4over6 its smaller bound
};

// One scale buffer to be reordered; lines == 0 where there is none.
struct SwizzleJob {
  const uint8_t* source;
  uint8_t* target;
  int64_t lines;   // padded
  int64_t blocks;  // padded
};

struct SwizzleParams {
  SwizzleJob jobs[2];
  bool inverse;  // from swizzled to compact
};

}  // namespace nvfp4
