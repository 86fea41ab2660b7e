// A torch tensor seen as the matrix that the kernels read.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "params.h"

namespace nvfp4 {

std::string dtype_name(at::ScalarType type);  // as in Python: "float32"

DType to_dtype(at::ScalarType type, const char* argument);  // TypeError for all but float32, float16, bfloat16

// What every quantized tensor must be; throws TypeError or ValueError naming x.
void check_input(const at::Tensor& x);

// x itself, or a copy if its numbers are not those in its memory (lazy negation, a symbolic zero).
at::Tensor materialized(const at::Tensor& x);

// Leading dimensions are merged where their strides allow it. x must have passed check_input.
MatrixView matrix_view(const at::Tensor& x);

// The bytes from a tensor's first element to its last.
struct MemoryRange {
  const char* begin;
  const char* end;
  bool overlaps(const MemoryRange& other) const { return begin < other.end && other.begin < end; }
};
MemoryRange memory_range(const at::Tensor& tensor);

}  // namespace nvfp4
