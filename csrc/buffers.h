// The six buffers of a quantized tensor: shapes, allocation, checks.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "numerics/layout.h"
#include "options.h"

namespace nvfp4 {

// The order in which buffers are passed and returned everywhere.
enum BufferIndex : int {
  kRowwiseData,
  kRowwiseScale,
  kColumnwiseData,
  kColumnwiseScale,
  kRowwiseAmax,
  kColumnwiseAmax,
  kBufferCount,
};

using Buffers = std::array<at::Tensor, kBufferCount>;  // undefined where a direction is not asked for

inline constexpr const char* kBufferNames[kBufferCount] = {
    "rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "amax_rowwise", "amax_columnwise"};

inline at::ScalarType buffer_dtype(int index) { return index < kRowwiseAmax ? at::kByte : at::kFloat; }

// Int is int64_t, or c10::SymInt under torch.compile.
template <class Int>
using Shape = c10::SmallVector<Int, 5>;

// A tensor of this shape as lines of its last dimension (row-wise), or as the transpose of that (column-wise).
template <class Int>
DirectionLayout<Int> direction_layout(c10::ArrayRef<Int> sizes, bool columnwise) {
  Int rows = 1;
  for (size_t d = 0; d + 1 < sizes.size(); ++d) rows = rows * sizes[d];
  if (columnwise) return {sizes.back(), rows};
  return {rows, sizes.back()};
}

template <class Int>
Shape<Int> data_shape(c10::ArrayRef<Int> sizes, bool columnwise) {
  const DirectionLayout<Int> layout = direction_layout(sizes, columnwise);
  if (columnwise) return {layout.lines, layout.line_bytes()};
  Shape<Int> shape;
  for (const Int& size : sizes.slice(0, sizes.size() - 1)) shape.push_back(size);
  shape.push_back(layout.line_bytes());
  return shape;
}

template <class Int>
Shape<Int> scale_shape(c10::ArrayRef<Int> sizes, bool columnwise) {
  const DirectionLayout<Int> layout = direction_layout(sizes, columnwise);
  return {layout.scale_lines(), layout.scale_blocks()};
}

template <class Int>
Shape<Int> amax_shape(c10::ArrayRef<Int> sizes, bool columnwise, bool row_scaled) {
  if (!row_scaled) return {Int(1)};
  return {direction_layout(sizes, columnwise).lines};
}

// Calls f(index, shape) for each buffer that the options ask for.
template <class Int, class F>
void for_each_buffer(const Options& options, c10::ArrayRef<Int> sizes, const F& f) {
  if (options.rowwise) {
    f(kRowwiseData, data_shape(sizes, false));
    f(kRowwiseScale, scale_shape(sizes, false));
    f(kRowwiseAmax, amax_shape(sizes, false, options.row_scaled_nvfp4));
  }
  if (options.columnwise) {
    f(kColumnwiseData, data_shape(sizes, true));
    f(kColumnwiseScale, scale_shape(sizes, true));
    f(kColumnwiseAmax, amax_shape(sizes, true, options.row_scaled_nvfp4));
  }
}

void check_shape(at::IntArrayRef sizes);  // ValueError: no dimension, or a negative size

// An uninitialised tensor without a trip through torch's dispatcher.
at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device, bool pin_memory = false);

Buffers allocate_buffers(const Options& options, at::IntArrayRef sizes, at::Device device, bool pin_memory = false);
Buffers allocate_meta_buffers(const Options& options, c10::SymIntArrayRef sizes);

// Throws unless `out` holds exactly the buffers that quantizing x fills: shapes, dtypes, device, and memory of their
// own.
void check_buffers(const Options& options, const at::Tensor& x, const Buffers& out);

// An amax buffer of `count` elements, in any shape; throws TypeError or ValueError naming it.
void check_amax_buffer(const at::Tensor& amax, int64_t count, at::Device device, const char* argument);

// Whether kernels can move the codes of a block as one word; a view of bytes may start anywhere.
bool is_word_aligned(const at::Tensor& buffer);

// A float32 tensor of one element on x's device (a noop flag, a given amax).
void check_float_element(const at::Tensor& tensor, at::Device device, const char* argument);

// What torch's own in-place operators do for autograd; inference tensors have no version.
void mark_written(const at::Tensor& tensor);

}  // namespace nvfp4
