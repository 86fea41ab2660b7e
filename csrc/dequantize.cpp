#include "dequantize.h"

#include <ATen/ops/empty.h>

#include "backend.h"
#include "buffers.h"
#include "matrix_view.h"
#include "numerics/hadamard.h"

namespace nvfp4 {
namespace {

void check_bytes(const at::Tensor& tensor, at::IntArrayRef shape, at::Device device, const char* argument) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kByte, argument, ": expected uint8, got ",
                   dtype_name(tensor.scalar_type()));
  TORCH_CHECK_VALUE(tensor.device() == device, argument, ": expected on ", device, " with data, got ", tensor.device());
  TORCH_CHECK_VALUE(tensor.sizes() == shape, argument, ": expected shape ", shape, ", got ", tensor.sizes());
}

void check_amax(const at::Tensor& amax, int64_t lines, at::Device device) {
  TORCH_CHECK_TYPE(amax.scalar_type() == at::kFloat, "amax: expected float32, got ", dtype_name(amax.scalar_type()));
  TORCH_CHECK_VALUE(amax.device() == device, "amax: expected on ", device, " with data, got ", amax.device());
  TORCH_CHECK_VALUE(amax.numel() == 1 || amax.numel() == lines, "amax: expected 1 element or ", lines,
                    " (one a line), got shape ", amax.sizes());
}

// Contiguous, and where whole words of it can be read.
c10::MaybeOwned<at::Tensor> readable(const at::Tensor& bytes) {
  if (is_word_aligned(bytes)) return bytes.expect_contiguous();
  return c10::MaybeOwned<at::Tensor>::owned(bytes.clone(at::MemoryFormat::Contiguous));
}

at::Tensor empty_like_meta(const at::Tensor& scale) {
  return scale.defined() ? at::empty_symint(scale.sym_sizes(), scale.options()) : at::Tensor();
}

void check_scale(const at::Tensor& scale, const char* argument) {
  TORCH_CHECK_TYPE(scale.scalar_type() == at::kByte, argument, ": expected uint8, got ",
                   dtype_name(scale.scalar_type()));
  const bool padded = scale.dim() == 2 && scale.size(0) % kScaleLineAlign == 0 && scale.size(1) % kScaleBlockAlign == 0;
  TORCH_CHECK_VALUE(padded, argument, ": expected a shape of multiples of ", kScaleLineAlign, " and ", kScaleBlockAlign,
                    ", got ", scale.sizes());
  check_device(scale.device(), argument);
}

}  // namespace

at::Tensor dequantize(const at::Tensor& data, const at::Tensor& scale, const at::Tensor& amax,
                      c10::SymIntArrayRef shape, const DequantizeArguments& arguments) {
  const DType dtype = to_dtype(arguments.dtype, "dtype");
  TORCH_CHECK_VALUE(!shape.empty(), "shape: expected at least one dimension, got []");
  TORCH_CHECK_VALUE(arguments.nvfp4_e4m3_max == kDefaultE4M3Max || arguments.nvfp4_e4m3_max == kReducedE4M3Max,
                    "nvfp4_e4m3_max=", arguments.nvfp4_e4m3_max, ": must be ", kDefaultE4M3Max, " or ",
                    kReducedE4M3Max);
  const at::Device device = data.device();
  if (data.is_meta()) return at::empty_symint(shape, data.options().dtype(arguments.dtype));

  const at::IntArrayRef sizes = C10_AS_INTARRAYREF_SLOW(shape);
  const bool columnwise = arguments.columnwise;
  const DirectionLayout<int64_t> layout = direction_layout(sizes, columnwise);
  check_shape(sizes);
  check_device(device, "data");
  check_bytes(data, data_shape(sizes, columnwise), device, "data");
  check_bytes(scale, scale_shape(sizes, columnwise), device, "scale_inv");
  check_amax(amax, layout.lines, device);

  const auto data_in_order = readable(data);
  const auto scale_in_order = readable(scale);
  const auto amax_in_order = amax.expect_contiguous();
  at::Tensor out = allocate(sizes, arguments.dtype, device);
  DequantizeParams params = {};
  params.data = static_cast<const uint8_t*>(data_in_order->const_data_ptr());
  params.scale = static_cast<const uint8_t*>(scale_in_order->const_data_ptr());
  params.amax = static_cast<const float*>(amax_in_order->const_data_ptr());
  params.out = out.mutable_data_ptr();
  params.dtype = dtype;
  params.rows = columnwise ? layout.length : layout.lines;
  params.cols = columnwise ? layout.lines : layout.length;
  params.columnwise = columnwise;
  params.swizzled = arguments.swizzled;
  params.row_scaled = amax.numel() != 1;
  params.with_rht = columnwise && arguments.with_rht;
  params.sign_mask = hadamard_sign_mask(arguments.with_random_sign_mask);
  params.e4m3_max = static_cast<float>(arguments.nvfp4_e4m3_max);
  run_dequantize(params, device);
  return out;
}

std::array<at::Tensor, 2> swizzle_scales(const at::Tensor& rowwise, const at::Tensor& columnwise, bool inverse) {
  TORCH_CHECK_VALUE(rowwise.defined() || columnwise.defined(), "rowwise_scale_inv, columnwise_scale_inv: both None");
  const at::Device device = rowwise.defined() ? rowwise.device() : columnwise.device();
  const std::array<at::Tensor, 2> given = {rowwise, columnwise};
  if (device.is_meta()) return {empty_like_meta(rowwise), empty_like_meta(columnwise)};
  if (rowwise.defined()) check_scale(rowwise, "rowwise_scale_inv");
  if (columnwise.defined()) check_scale(columnwise, "columnwise_scale_inv");
  TORCH_CHECK_VALUE(!rowwise.defined() || !columnwise.defined() || rowwise.device() == columnwise.device(),
                    "columnwise_scale_inv: expected on ", device, " with rowwise_scale_inv, got ", columnwise.device());

  std::array<at::Tensor, 2> sources;
  std::array<at::Tensor, 2> targets;
  SwizzleParams params = {};
  params.inverse = inverse;
  for (int i = 0; i < 2; ++i) {
    if (!given[i].defined()) continue;
    sources[i] = *readable(given[i]);
    targets[i] = allocate(given[i].sizes(), at::kByte, device);
    params.jobs[i] = {static_cast<const uint8_t*>(sources[i].const_data_ptr()),
                      static_cast<uint8_t*>(targets[i].mutable_data_ptr()), given[i].size(0), given[i].size(1)};
  }
  run_swizzle(params, device);
  return targets;
}

}  // namespace nvfp4
