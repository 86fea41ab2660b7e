#include "numerics_bindings.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include "cpu/exact_float_guard.h"
#include "matrix_view.h"
#include "numerics/fp4.h"
#include "numerics/fp8.h"
#include "numerics/hadamard.h"
#include "numerics/random.h"

namespace nvfp4 {
namespace {

template <class T>
constexpr at::ScalarType kScalarType = std::is_same_v<T, float> ? at::kFloat : at::kByte;

template <class T>
at::Tensor checked(const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == kScalarType<T>, "expected ", dtype_name(kScalarType<T>), ", got ",
                   dtype_name(tensor.scalar_type()));
  TORCH_CHECK_VALUE(tensor.is_cpu(), "expected a CPU tensor, got one on ", tensor.device());
  return tensor.contiguous();
}

template <class In, class Out, class Rule>
at::Tensor map_elements(const at::Tensor& tensor, const Rule& rule) {
  const ExactFloatGuard guard;
  const at::Tensor in = checked<In>(tensor);
  at::Tensor out = at::empty(in.sizes(), in.options().dtype(kScalarType<Out>));
  const In* const from = static_cast<const In*>(in.const_data_ptr());
  Out* const to = static_cast<Out*>(out.mutable_data_ptr());
  for (int64_t i = 0; i < in.numel(); ++i) to[i] = static_cast<Out>(rule(from[i]));
  return out;
}

// The form that packs four codes into one number; a NaN has magnitude 0 here.
at::Tensor encode_e2m1_sat(const at::Tensor& tensor) {
  const ExactFloatGuard guard;
  const at::Tensor in = checked<float>(tensor);
  at::Tensor out = at::empty(in.sizes(), in.options().dtype(at::kByte));
  const float* const from = static_cast<const float*>(in.const_data_ptr());
  uint8_t* const to = static_cast<uint8_t*>(out.mutable_data_ptr());
  const int64_t n = in.numel();
  for (int64_t i = 0; i < n; i += 4) {
    float a[4] = {};
    const int64_t count = std::min<int64_t>(4, n - i);
    for (int64_t j = 0; j < count; ++j) a[j] = magnitude(from[i + j]);
    const uint32_t packed = encode4_e2m1_magnitudes(a[0], a[1], a[2], a[3]);
    for (int64_t j = 0; j < count; ++j) {
      to[i + j] = uint8_t(((packed >> (4 * j)) & 7U) | ((float_bits(from[i + j]) >> 31) << 3));
    }
  }
  return out;
}

at::Tensor encode_stochastic(const at::Tensor& y, const at::Tensor& u) {
  const ExactFloatGuard guard;
  const at::Tensor values = checked<float>(y);
  const at::Tensor bytes = checked<uint8_t>(u);
  TORCH_CHECK_VALUE(values.sizes() == bytes.sizes(), "u: expected shape ", values.sizes(), ", got ", bytes.sizes());
  at::Tensor out = at::empty(bytes.sizes(), bytes.options());
  const float* const value = static_cast<const float*>(values.const_data_ptr());
  const uint8_t* const byte = static_cast<const uint8_t*>(bytes.const_data_ptr());
  uint8_t* const to = static_cast<uint8_t*>(out.mutable_data_ptr());
  for (int64_t i = 0; i < values.numel(); ++i) to[i] = uint8_t(encode_e2m1_stochastic(value[i], byte[i]));
  return out;
}

at::Tensor hadamard(const at::Tensor& x, uint32_t sign_mask, bool to_bf16) {
  const ExactFloatGuard guard;
  TORCH_CHECK_VALUE(x.dim() == 2 && x.size(1) == kBlock, "x: expected shape [n, ", kBlock, "], got ", x.sizes());
  at::Tensor out = checked<float>(x).clone();
  auto* const lines = static_cast<float (*)[kBlock]>(out.mutable_data_ptr());
  for (int64_t i = 0; i < x.size(0); ++i) {
    hadamard_forward(lines[i], sign_mask);
    for (float& y : lines[i]) y = to_bf16 ? round_to_bf16(y) : y;
  }
  return out;
}

}  // namespace

void bind_numerics(py::module_& parent) {
  py::module_ m = parent.def_submodule("numerics");
  m.def("encode_e2m1", [](const at::Tensor& y) { return map_elements<float, uint8_t>(y, encode_e2m1); });
  m.def("encode_e2m1_sat", &encode_e2m1_sat);
  m.def("decode_e2m1", [](const at::Tensor& codes) { return map_elements<uint8_t, float>(codes, decode_e2m1); });
  m.def("encode_e4m3", [](const at::Tensor& x) { return map_elements<float, uint8_t>(x, encode_e4m3); });
  m.def("decode_e4m3", [](const at::Tensor& bytes) { return map_elements<uint8_t, float>(bytes, decode_e4m3); });
  m.def("encode_e2m1_stochastic", &encode_stochastic, py::arg("y"), py::arg("u"));
  m.def(
      "philox",
      [](uint64_t seed, uint64_t subsequence, uint64_t offset) {
        const PhiloxBlock block = philox4x32_10(seed, offset, subsequence);
        return py::make_tuple(block.word[0], block.word[1], block.word[2], block.word[3]);
      },
      py::arg("seed"), py::arg("subsequence"), py::arg("offset"));
  m.def("hadamard", &hadamard, py::arg("x"), py::arg("sign_mask"), py::arg("to_bf16"));
}

}  // namespace nvfp4
