#include "quantizer.h"

#include <cmath>

#include "backend.h"
#include "matrix_view.h"

namespace nvfp4 {
namespace {

float* amax_pointer(const at::Tensor& amax) {
  return amax.defined() ? static_cast<float*>(amax.mutable_data_ptr()) : nullptr;
}

const float* float_pointer(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<const float*>(tensor.const_data_ptr()) : nullptr;
}

uint8_t* byte_pointer(const at::Tensor& buffer) {
  return buffer.defined() ? static_cast<uint8_t*>(buffer.mutable_data_ptr()) : nullptr;
}

AmaxSource amax_source(const CallArguments& call) {
  if (call.amax.defined()) return AmaxSource::kPointer;
  if (call.amax_value.has_value()) return AmaxSource::kValue;
  return call.with_amax ? AmaxSource::kCompute : AmaxSource::kBuffers;
}

Rounding rounding(const Options& options) {
  if (options.nvfp4_use_4over6) return Rounding::kFourOverSix;
  return options.stochastic_rounding ? Rounding::kStochastic : Rounding::kNearest;
}

void check_amax_value(double value) {
  const bool fits = std::isinf(value) || std::isfinite(static_cast<float>(value));
  TORCH_CHECK_VALUE(value >= 0 && fits, "amax: expected a float32 number of at least 0, got ", value);
}

}  // namespace

void NVFP4Quantizer::check_call(const at::Tensor& x, const CallArguments& call) const {
  check_input(x);
  check_device(x.device(), "x");
  if (x.is_meta()) return;
  if (call.noop_flag.defined()) check_float_element(call.noop_flag, x.device(), "noop_flag");
  check_random(call.generator, call.rng_state, x.device());
  const bool given = call.amax.defined() || call.amax_value.has_value();
  if (!given) return;
  TORCH_CHECK_VALUE(!(call.amax.defined() && call.amax_value.has_value()), "amax, amax_value: only one may be given");
  TORCH_CHECK_VALUE(!options_.with_rht, "amax: cannot be given with with_rht=True, whose two amaxes differ");
  TORCH_CHECK_VALUE(!options_.row_scaled_nvfp4, "amax: cannot be given with row_scaled_nvfp4=True");
  TORCH_CHECK_VALUE(call.with_amax, "amax: cannot be given with with_amax=False");
  if (call.amax.defined()) check_float_element(call.amax, x.device(), "amax");
  if (call.amax_value.has_value()) check_amax_value(*call.amax_value);
}

void NVFP4Quantizer::run(const at::Tensor& x, const Buffers& out, const CallArguments& call) const {
  const at::Tensor input = materialized(x);
  QuantizeParams params = {};
  params.x = matrix_view(input);
  params.rowwise = {byte_pointer(out[kRowwiseData]), byte_pointer(out[kRowwiseScale]), amax_pointer(out[kRowwiseAmax])};
  params.columnwise = {byte_pointer(out[kColumnwiseData]), byte_pointer(out[kColumnwiseScale]),
                       amax_pointer(out[kColumnwiseAmax])};
  params.noop_flag = float_pointer(call.noop_flag);
  params.amax_source = amax_source(call);
  params.given_amax = float_pointer(call.amax);
  params.given_amax_value = static_cast<float>(call.amax_value.value_or(0.0));
  params.rounding = rounding(options_);
  if (options_.stochastic_rounding) params.random = draw_random(call.generator, call.rng_state, x.device());
  params.with_rht = options_.with_rht;
  params.sign_mask = options_.sign_mask();
  params.two_d = options_.with_2d_quantization;
  params.row_scaled = options_.row_scaled_nvfp4;
  params.squared_error = options_.squared_error;
  params.e4m3_max = static_cast<float>(options_.nvfp4_e4m3_max);
  params.swizzled = options_.optimize_for_gemm;
  run_quantize(params, options_.schedule, x.device());
}

Buffers NVFP4Quantizer::quantize(const at::Tensor& x, const CallArguments& call) const {
  check_call(x, call);
  if (x.is_meta()) return allocate_meta_buffers(options_, x.sym_sizes());
  Buffers out = allocate_buffers(options_, x.sizes(), x.device());
  run(x, out, call);
  return out;
}

void NVFP4Quantizer::quantize_into(const at::Tensor& x, const Buffers& out, const CallArguments& call) const {
  check_call(x, call);
  if (x.is_meta()) return;
  check_buffers(options_, x, out);
  run(x, out, call);
  for (const at::Tensor& buffer : out) mark_written(buffer);
}

void NVFP4Quantizer::compute_amax_into(const at::Tensor& x, const at::Tensor& rowwise, const at::Tensor& columnwise,
                                       const at::Tensor& noop_flag) const {
  check_input(x);
  check_device(x.device(), "x");
  TORCH_CHECK_VALUE(rowwise.defined() || columnwise.defined(), "amax_rowwise, amax_columnwise: both None");
  if (x.is_meta()) return;
  const auto check_amax = [&](const at::Tensor& amax, bool columnwise_side, const char* argument) {
    if (!amax.defined()) return;
    const auto shape = amax_shape(x.sizes(), columnwise_side, options_.row_scaled_nvfp4);
    check_amax_buffer(amax, shape[0], x.device(), argument);
    TORCH_CHECK_VALUE(!memory_range(amax).overlaps(memory_range(x)), argument, ": shares memory with x");
  };
  check_amax(rowwise, false, kBufferNames[kRowwiseAmax]);
  check_amax(columnwise, true, kBufferNames[kColumnwiseAmax]);
  if (rowwise.defined() && columnwise.defined()) {
    TORCH_CHECK_VALUE(!memory_range(rowwise).overlaps(memory_range(columnwise)),
                      "amax_columnwise: is the same buffer as amax_rowwise");
  }
  if (noop_flag.defined()) check_float_element(noop_flag, x.device(), "noop_flag");

  const at::Tensor input = materialized(x);
  run_amax({matrix_view(input), amax_pointer(rowwise), amax_pointer(columnwise), float_pointer(noop_flag),
            options_.with_rht, options_.sign_mask(), options_.row_scaled_nvfp4},
           x.device());
  mark_written(rowwise);
  mark_written(columnwise);
}

Buffers NVFP4Quantizer::empty(at::IntArrayRef shape, at::Device device, bool pin_memory) const {
  check_shape(shape);
  check_device(device, "device");
  return allocate_buffers(options_, shape, device, pin_memory);
}

void compute_amax(const at::Tensor& x, const at::Tensor& rowwise, const at::Tensor& columnwise,
                  const at::Tensor& noop_flag) {
  TORCH_CHECK_VALUE(rowwise.defined(), "amax_rowwise: None");
  static const NVFP4Quantizer plain{Options()};
  plain.compute_amax_into(x, rowwise, columnwise, noop_flag);
}

}  // namespace nvfp4
