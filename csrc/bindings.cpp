// The Python module `_C`: unpacks arguments, nothing else. Eager calls come here, without torch's dispatcher.
#include "dequantize.h"
#include "numerics_bindings.h"
#include "python_arguments.h"
#include "quantizer.h"

namespace nvfp4 {
namespace {

py::tuple quantize(const NVFP4Quantizer& self, py::handle x, py::handle amax, py::handle generator,
                   py::handle rng_state) {
  const at::Tensor& tensor = tensor_argument(x, "x");
  CallArguments call;
  set_amax_argument(amax, call);
  call.generator = generator_argument(generator);
  call.rng_state = rng_state_argument(rng_state);
  Buffers out;
  {
    const WithoutGil without_gil(tensor);
    out = self.quantize(tensor, call);
  }
  return to_tuple(out);
}

void quantize_into(const NVFP4Quantizer& self, py::handle x, py::handle rowwise_data, py::handle rowwise_scale_inv,
                   py::handle columnwise_data, py::handle columnwise_scale_inv, py::handle amax_rowwise,
                   py::handle amax_columnwise, py::handle noop_flag, py::handle amax, py::handle generator,
                   py::handle rng_state, bool with_amax) {
  const at::Tensor& tensor = tensor_argument(x, "x");
  const py::handle objects[kBufferCount] = {rowwise_data,         rowwise_scale_inv, columnwise_data,
                                            columnwise_scale_inv, amax_rowwise,      amax_columnwise};
  Buffers out;
  for (int i = 0; i < kBufferCount; ++i) out[i] = optional_tensor_argument(objects[i], kBufferNames[i]);
  CallArguments call;
  call.noop_flag = optional_tensor_argument(noop_flag, "noop_flag");
  set_amax_argument(amax, call);
  call.generator = generator_argument(generator);
  call.rng_state = rng_state_argument(rng_state);
  call.with_amax = with_amax;
  const WithoutGil without_gil(tensor);
  self.quantize_into(tensor, out, call);
}

void compute_amax_into(const NVFP4Quantizer& self, py::handle x, py::handle amax_rowwise, py::handle amax_columnwise,
                       py::handle noop_flag) {
  const at::Tensor& tensor = tensor_argument(x, "x");
  const at::Tensor& rowwise = optional_tensor_argument(amax_rowwise, kBufferNames[kRowwiseAmax]);
  const at::Tensor& columnwise = optional_tensor_argument(amax_columnwise, kBufferNames[kColumnwiseAmax]);
  const at::Tensor& flag = optional_tensor_argument(noop_flag, "noop_flag");
  const WithoutGil without_gil(tensor);
  self.compute_amax_into(tensor, rowwise, columnwise, flag);
}

void compute_amax_py(py::handle x, py::handle amax_rowwise, py::handle amax_columnwise, py::handle noop_flag) {
  const at::Tensor& tensor = tensor_argument(x, "x");
  const at::Tensor& rowwise = tensor_argument(amax_rowwise, kBufferNames[kRowwiseAmax]);
  const at::Tensor& columnwise = optional_tensor_argument(amax_columnwise, kBufferNames[kColumnwiseAmax]);
  const at::Tensor& flag = optional_tensor_argument(noop_flag, "noop_flag");
  const WithoutGil without_gil(tensor);
  compute_amax(tensor, rowwise, columnwise, flag);
}

at::Tensor dequantize_py(py::handle data, py::handle scale_inv, py::handle amax, at::IntArrayRef shape,
                         at::ScalarType dtype, bool columnwise, bool swizzled, bool with_rht,
                         bool with_random_sign_mask, int64_t nvfp4_e4m3_max) {
  const at::Tensor& codes = tensor_argument(data, "data");
  const at::Tensor& scale = tensor_argument(scale_inv, "scale_inv");
  const at::Tensor& amax_tensor = tensor_argument(amax, "amax");
  check_shape(shape);
  const WithoutGil without_gil(codes);
  return dequantize(codes, scale, amax_tensor, c10::fromIntArrayRefSlow(shape),
                    {dtype, columnwise, swizzled, with_rht, with_random_sign_mask, nvfp4_e4m3_max});
}

py::tuple swizzle_scales_py(py::handle rowwise, py::handle columnwise, bool inverse) {
  const at::Tensor& rowwise_scale = optional_tensor_argument(rowwise, kBufferNames[kRowwiseScale]);
  const at::Tensor& columnwise_scale = optional_tensor_argument(columnwise, kBufferNames[kColumnwiseScale]);
  return to_tuple(swizzle_scales(rowwise_scale, columnwise_scale, inverse));
}

template <class Sizes>
py::tuple shape_tuple(const Sizes& sizes) {
  py::tuple result(sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) result[i] = py::cast(sizes[i]);
  return result;
}

// Symbolic sizes (Int = c10::SymInt, under torch.compile) are those of a tensor and were checked there.
template <class Int>
py::tuple buffer_shapes(const NVFP4Quantizer& self, c10::ArrayRef<Int> shape) {
  if constexpr (std::is_same_v<Int, int64_t>) check_shape(shape);
  py::list shapes;
  for (int i = 0; i < kBufferCount; ++i) shapes.append(py::none());
  for_each_buffer(self.options(), shape,
                  [&](int index, const Shape<Int>& sizes) { shapes[index] = shape_tuple(sizes); });
  return py::tuple(shapes);
}

template <class Int>
py::tuple scale_shape_py(c10::ArrayRef<Int> shape, bool columnwise) {
  if constexpr (std::is_same_v<Int, int64_t>) check_shape(shape);
  return shape_tuple(scale_shape(shape, columnwise));
}

py::dict build_info() {
  py::dict info;
  const std::string cuda = NVFP4_CUDA_VERSION;
  info["version"] = NVFP4_VERSION;
  info["torch"] = NVFP4_TORCH_VERSION;
  info["cuda"] = cuda.empty() ? py::object(py::none()) : py::object(py::str(cuda));
  info["archs"] = py::str(NVFP4_CUDA_ARCHS).attr("split")();
  return info;
}

NVFP4Quantizer make_quantizer(bool rowwise, bool columnwise, bool with_rht, bool with_random_sign_mask,
                              bool with_2d_quantization, bool stochastic_rounding, bool row_scaled_nvfp4,
                              bool nvfp4_use_4over6, int64_t nvfp4_e4m3_max, const std::string& err_mode,
                              bool optimize_for_gemm, const std::string& schedule) {
  return NVFP4Quantizer({rowwise, columnwise, with_rht, with_random_sign_mask, with_2d_quantization,
                         stochastic_rounding, row_scaled_nvfp4, nvfp4_use_4over6, nvfp4_e4m3_max,
                         parse_err_mode(err_mode), optimize_for_gemm, parse_schedule(schedule)});
}

// The options as read-only attributes, under their own names.
template <class Class>
void bind_options(Class& quantizer) {
  const auto attribute = [&](const char* name, auto member) {
    quantizer.def_property_readonly(name, [member](const NVFP4Quantizer& self) { return self.options().*member; });
  };
  attribute("rowwise", &Options::rowwise);
  attribute("columnwise", &Options::columnwise);
  attribute("with_rht", &Options::with_rht);
  attribute("with_random_sign_mask", &Options::with_random_sign_mask);
  attribute("with_2d_quantization", &Options::with_2d_quantization);
  attribute("stochastic_rounding", &Options::stochastic_rounding);
  attribute("row_scaled_nvfp4", &Options::row_scaled_nvfp4);
  attribute("nvfp4_use_4over6", &Options::nvfp4_use_4over6);
  attribute("nvfp4_e4m3_max", &Options::nvfp4_e4m3_max);
  attribute("optimize_for_gemm", &Options::optimize_for_gemm);
  quantizer.def_property_readonly("nvfp4_4over6_err_mode",
                                  [](const NVFP4Quantizer& self) { return self.options().err_mode(); });
  quantizer.def_property_readonly("schedule",
                                  [](const NVFP4Quantizer& self) { return schedule_name(self.options().schedule); });
}

void bind_quantizer(py::module_& m) {
  const py::object none = py::none();
  const Options defaults;
  py::class_<NVFP4Quantizer> quantizer(m, "NVFP4Quantizer");
  quantizer.def(py::init(&make_quantizer), py::kw_only(), py::arg("rowwise") = defaults.rowwise,
                py::arg("columnwise") = defaults.columnwise, py::arg("with_rht") = defaults.with_rht,
                py::arg("with_random_sign_mask") = defaults.with_random_sign_mask,
                py::arg("with_2d_quantization") = defaults.with_2d_quantization,
                py::arg("stochastic_rounding") = defaults.stochastic_rounding,
                py::arg("row_scaled_nvfp4") = defaults.row_scaled_nvfp4,
                py::arg("nvfp4_use_4over6") = defaults.nvfp4_use_4over6,
                py::arg("nvfp4_e4m3_max") = defaults.nvfp4_e4m3_max,
                py::arg("nvfp4_4over6_err_mode") = std::string(defaults.err_mode()),
                py::arg("optimize_for_gemm") = defaults.optimize_for_gemm,
                py::arg("schedule") = std::string(schedule_name(defaults.schedule)));
  bind_options(quantizer);
  quantizer.def("quantize", &quantize, py::arg("x"), py::arg("amax") = none, py::arg("generator") = none,
                py::arg("rng_state") = none);
  quantizer.def("quantize_into", &quantize_into, py::arg("x"), py::arg("rowwise_data"), py::arg("rowwise_scale_inv"),
                py::arg("columnwise_data"), py::arg("columnwise_scale_inv"), py::arg("amax_rowwise"),
                py::arg("amax_columnwise"), py::arg("noop_flag") = none, py::arg("amax") = none,
                py::arg("generator") = none, py::arg("rng_state") = none, py::arg("with_amax") = true);
  quantizer.def("compute_amax_into", &compute_amax_into, py::arg("x"), py::arg("amax_rowwise"),
                py::arg("amax_columnwise"), py::arg("noop_flag") = none);
  quantizer.def(
      "empty",
      [](const NVFP4Quantizer& self, at::IntArrayRef shape, at::Device device, bool pin_memory) {
        return to_tuple(self.empty(shape, device, pin_memory));
      },
      py::arg("shape"), py::arg("device"), py::arg("pin_memory") = false);
  quantizer.def("buffer_shapes", &buffer_shapes<int64_t>, py::arg("shape"));
  quantizer.def("buffer_shapes", &buffer_shapes<c10::SymInt>, py::arg("shape"));
  quantizer.def("__eq__", [](const NVFP4Quantizer& self, const py::object& other) {
    return py::isinstance<NVFP4Quantizer>(other) && self.options() == other.cast<const NVFP4Quantizer&>().options();
  });
  quantizer.def("__hash__", [](const NVFP4Quantizer& self) { return self.options().packed(); });
}

void bind_functions(py::module_& m) {
  const py::object none = py::none();
  m.def("compute_amax", &compute_amax_py, py::arg("x"), py::arg("amax_rowwise"), py::arg("amax_columnwise") = none,
        py::arg("noop_flag") = none);
  m.def("dequantize", &dequantize_py, py::arg("data"), py::arg("scale_inv"), py::arg("amax"), py::arg("shape"),
        py::arg("dtype"), py::arg("columnwise"), py::arg("swizzled"), py::arg("with_rht"),
        py::arg("with_random_sign_mask"), py::arg("nvfp4_e4m3_max"));
  m.def("swizzle_scales", &swizzle_scales_py, py::arg("rowwise_scale_inv"), py::arg("columnwise_scale_inv"),
        py::arg("inverse") = false);
  m.def("scale_shape", &scale_shape_py<int64_t>, py::arg("shape"), py::arg("columnwise"));
  m.def("scale_shape", &scale_shape_py<c10::SymInt>, py::arg("shape"), py::arg("columnwise"));
  m.def(
      "columnwise_shape",
      [](at::IntArrayRef shape) {
        check_shape(shape);
        return shape_tuple(data_shape(shape, true));
      },
      py::arg("shape"));
  m.def("build_info", &build_info);
  m.attr("BLOCK_SIZE") = kBlock;
}

}  // namespace
}  // namespace nvfp4

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::register_local_exception_translator(&nvfp4::translate_torch_errors);
  nvfp4::bind_quantizer(m);
  nvfp4::bind_functions(m);
  nvfp4::bind_numerics(m);
}
