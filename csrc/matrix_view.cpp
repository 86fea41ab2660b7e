#include "matrix_view.h"

#include <ATen/ops/resolve_neg.h>
#include <ATen/ops/zeros_like.h>

namespace nvfp4 {

std::string dtype_name(at::ScalarType type) { return std::string(c10::getDtypeNames(type).first); }

DType to_dtype(at::ScalarType type, const char* argument) {
  if (type == at::kFloat) return DType::kFloat32;
  if (type == at::kHalf) return DType::kFloat16;
  TORCH_CHECK_TYPE(type == at::kBFloat16, argument, ": expected float32, float16 or bfloat16, got ", dtype_name(type));
  return DType::kBFloat16;
}

void check_input(const at::Tensor& x) {
  TORCH_CHECK_TYPE(x.defined() && x.layout() == at::kStrided, "x: expected a dense tensor, got ",
                   x.defined() ? x.layout() : at::kStrided);
  to_dtype(x.scalar_type(), "x");
  TORCH_CHECK_VALUE(x.dim() >= 1, "x: expected at least one dimension, got a tensor of shape []");
}

at::Tensor materialized(const at::Tensor& x) {
  if (x.is_neg()) return at::resolve_neg(x);
  if (x._is_zerotensor()) return at::zeros_like(x);
  return x;
}

MatrixView matrix_view(const at::Tensor& x) {
  const int64_t last = x.dim() - 1;
  MatrixView view;
  view.data = x.const_data_ptr();
  view.dtype = to_dtype(x.scalar_type(), "x");
  view.rows = 1;
  view.cols = x.size(last);
  view.col_stride = x.stride(last);
  view.row_dims = 1;
  view.row_sizes[0] = 1;
  view.row_strides[0] = 0;
  for (int64_t d = 0; d < last; ++d) {
    const int64_t size = x.size(d);
    const int64_t stride = x.stride(d);
    view.rows *= size;
    if (size == 1) continue;
    const int32_t previous = view.row_dims - 1;
    if (view.row_sizes[previous] == 1 || view.row_strides[previous] == size * stride) {
      view.row_sizes[previous] *= size;
      view.row_strides[previous] = stride;
      continue;
    }
    TORCH_CHECK_VALUE(view.row_dims < kMaxRowDims, "x: shape ", x.sizes(), " has too many dimensions");
    view.row_sizes[view.row_dims] = size;
    view.row_strides[view.row_dims++] = stride;
  }
  return view;
}

MemoryRange memory_range(const at::Tensor& tensor) {
  const char* const data = static_cast<const char*>(tensor.const_data_ptr());
  if (tensor.numel() == 0) return {data, data};
  int64_t last = 0;  // strides of dense tensors are never negative
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return {data, data + (last + 1) * int64_t(tensor.element_size())};
}

}  // namespace nvfp4
