// torch.ops.nvfp4_quant: the same functions behind torch's dispatcher, for torch.compile, fake tensors and subclasses.
//
// Each operator has one kernel for the CPU, CUDA and meta keys: the functions below look at the device themselves.
// None has an autograd formula: what it returns or writes never requires grad.
#include <torch/library.h>

#include <string>

#include "dequantize.h"
#include "quantizer.h"

namespace nvfp4 {
namespace {

const std::string kOptions =
    "bool rowwise=True, bool columnwise=True, bool with_rht=False, bool with_random_sign_mask=True, "
    "bool with_2d_quantization=False, bool stochastic_rounding=False, bool row_scaled_nvfp4=False, "
    "bool nvfp4_use_4over6=False, int nvfp4_e4m3_max=448, str nvfp4_4over6_err_mode=\"MAE\", "
    "bool optimize_for_gemm=False, str schedule=\"auto\"";
const std::string kGivenAmax = "Tensor? amax=None, float? amax_value=None";
const std::string kRandom = "Generator? generator=None, int? seed=None, int? offset=None";

// Takes the arguments of a boxed call from the stack, in the order of the schema: twenty typed parameters would have
// to be repeated for every operator that has the options.
class ArgumentReader {
 public:
  ArgumentReader(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : stack_(stack), count_(op.schema().arguments().size()), next_(stack.size() - count_) {}
  ~ArgumentReader() { torch::jit::drop(stack_, count_); }
  ArgumentReader(const ArgumentReader&) = delete;
  ArgumentReader& operator=(const ArgumentReader&) = delete;

  at::Tensor tensor() {
    const c10::IValue& value = stack_[next_++];
    return value.isNone() ? at::Tensor() : value.toTensor();
  }
  template <class T>
  T get() {
    return stack_[next_++].to<T>();
  }

 private:
  torch::jit::Stack& stack_;
  size_t count_;
  size_t next_;
};

Options read_options(ArgumentReader& arguments) {
  Options options;
  options.rowwise = arguments.get<bool>();
  options.columnwise = arguments.get<bool>();
  options.with_rht = arguments.get<bool>();
  options.with_random_sign_mask = arguments.get<bool>();
  options.with_2d_quantization = arguments.get<bool>();
  options.stochastic_rounding = arguments.get<bool>();
  options.row_scaled_nvfp4 = arguments.get<bool>();
  options.nvfp4_use_4over6 = arguments.get<bool>();
  options.nvfp4_e4m3_max = arguments.get<int64_t>();
  options.squared_error = parse_err_mode(arguments.get<std::string>());
  options.optimize_for_gemm = arguments.get<bool>();
  options.schedule = parse_schedule(arguments.get<std::string>());
  return options;
}

void read_given_amax(ArgumentReader& arguments, CallArguments& call) {
  call.amax = arguments.tensor();
  call.amax_value = arguments.get<std::optional<double>>();
}

void read_random(ArgumentReader& arguments, CallArguments& call) {
  call.generator = arguments.get<std::optional<at::Generator>>();
  const auto seed = arguments.get<std::optional<int64_t>>();
  const auto offset = arguments.get<std::optional<int64_t>>();
  TORCH_CHECK_VALUE(seed.has_value() == offset.has_value(), "seed, offset: both or neither must be given");
  if (seed.has_value()) call.rng_state = RngState{uint64_t(*seed), uint64_t(*offset)};
}

void quantize_op(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::List<at::Tensor> present;
  {
    ArgumentReader arguments(op, *stack);
    const at::Tensor x = arguments.tensor();
    const NVFP4Quantizer quantizer(read_options(arguments));
    CallArguments call;
    read_given_amax(arguments, call);
    read_random(arguments, call);
    for (at::Tensor& buffer : quantizer.quantize(x, call)) {
      if (buffer.defined()) present.push_back(std::move(buffer));
    }
  }
  torch::jit::push(*stack, std::move(present));
}

void quantize_into_op(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ArgumentReader arguments(op, *stack);
  const at::Tensor x = arguments.tensor();
  Buffers out;
  for (at::Tensor& buffer : out) buffer = arguments.tensor();
  const NVFP4Quantizer quantizer(read_options(arguments));
  CallArguments call;
  call.noop_flag = arguments.tensor();
  read_given_amax(arguments, call);
  read_random(arguments, call);
  call.with_amax = arguments.get<bool>();
  quantizer.quantize_into(x, out, call);
}

at::Tensor or_undefined(const std::optional<at::Tensor>& tensor) { return tensor.value_or(at::Tensor()); }

void quantizer_amax_op(const at::Tensor& x, const std::optional<at::Tensor>& amax_rowwise,
                       const std::optional<at::Tensor>& amax_columnwise, bool with_rht, bool with_random_sign_mask,
                       bool row_scaled_nvfp4, const std::optional<at::Tensor>& noop_flag) {
  Options options;
  options.with_rht = with_rht;
  options.with_random_sign_mask = with_random_sign_mask;
  options.row_scaled_nvfp4 = row_scaled_nvfp4;
  NVFP4Quantizer(options).compute_amax_into(x, or_undefined(amax_rowwise), or_undefined(amax_columnwise),
                                            or_undefined(noop_flag));
}

void compute_amax_op(const at::Tensor& x, const at::Tensor& amax_rowwise,
                     const std::optional<at::Tensor>& amax_columnwise, const std::optional<at::Tensor>& noop_flag) {
  compute_amax(x, amax_rowwise, or_undefined(amax_columnwise), or_undefined(noop_flag));
}

at::Tensor dequantize_op(const at::Tensor& data, const at::Tensor& scale_inv, const at::Tensor& amax,
                         c10::SymIntArrayRef shape, at::ScalarType dtype, bool columnwise, bool swizzled, bool with_rht,
                         bool with_random_sign_mask, int64_t nvfp4_e4m3_max) {
  return dequantize(data, scale_inv, amax, shape,
                    {dtype, columnwise, swizzled, with_rht, with_random_sign_mask, nvfp4_e4m3_max});
}

std::vector<at::Tensor> swizzle_scales_op(const std::optional<at::Tensor>& rowwise_scale_inv,
                                          const std::optional<at::Tensor>& columnwise_scale_inv, bool inverse) {
  std::vector<at::Tensor> present;
  for (at::Tensor& scale :
       swizzle_scales(or_undefined(rowwise_scale_inv), or_undefined(columnwise_scale_inv), inverse)) {
    if (scale.defined()) present.push_back(std::move(scale));
  }
  return present;
}

void register_kernels(torch::Library& m) {
  m.impl("quantize", torch::CppFunction::makeFromBoxedFunction<&quantize_op>());
  m.impl("quantize_", torch::CppFunction::makeFromBoxedFunction<&quantize_into_op>());
  m.impl("quantizer_amax_", &quantizer_amax_op);
  m.impl("compute_amax", &compute_amax_op);
  m.impl("dequantize", &dequantize_op);
  m.impl("swizzle_scales", &swizzle_scales_op);
}

}  // namespace
}  // namespace nvfp4

TORCH_LIBRARY(nvfp4_quant, m) {
  using namespace nvfp4;
  const std::vector<at::Tag> pure = {at::Tag::pt2_compliant_tag};
  const std::vector<at::Tag> random = {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded};
  const std::string quantize =
      "quantize(Tensor x, *, " + kOptions + ", " + kGivenAmax + ", " + kRandom + ") -> Tensor[]";
  const std::string quantize_into =
      "quantize_(Tensor x, Tensor(a!)? rowwise_data, Tensor(b!)? rowwise_scale_inv, Tensor(c!)? columnwise_data, "
      "Tensor(d!)? columnwise_scale_inv, Tensor(e!)? amax_rowwise, Tensor(f!)? amax_columnwise, *, " +
      kOptions + ", Tensor? noop_flag=None, " + kGivenAmax + ", " + kRandom + ", bool with_amax=True) -> ()";
  m.def(quantize.c_str(), random);
  m.def(quantize_into.c_str(), random);
  m.def(
      "quantizer_amax_(Tensor x, Tensor(a!)? amax_rowwise, Tensor(b!)? amax_columnwise, *, bool with_rht=False, "
      "bool with_random_sign_mask=True, bool row_scaled_nvfp4=False, Tensor? noop_flag=None) -> ()",
      pure);
  m.def(
      "compute_amax(Tensor x, Tensor(a!) amax_rowwise, Tensor(b!)? amax_columnwise=None, *, "
      "Tensor? noop_flag=None) -> ()",
      pure);
  m.def(
      "dequantize(Tensor data, Tensor scale_inv, Tensor amax, SymInt[] shape, *, ScalarType dtype, "
      "bool columnwise=False, bool swizzled=False, bool with_rht=False, bool with_random_sign_mask=True, "
      "int nvfp4_e4m3_max=448) -> Tensor",
      pure);
  m.def("swizzle_scales(Tensor? rowwise_scale_inv, Tensor? columnwise_scale_inv, *, bool inverse=False) -> Tensor[]",
        pure);
}

TORCH_LIBRARY_IMPL(nvfp4_quant, CPU, m) { nvfp4::register_kernels(m); }
TORCH_LIBRARY_IMPL(nvfp4_quant, CUDA, m) { nvfp4::register_kernels(m); }  // without CUDA code: says so
TORCH_LIBRARY_IMPL(nvfp4_quant, Meta, m) { nvfp4::register_kernels(m); }

// Writing into an inference tensor is allowed outside of inference mode, too.
TORCH_LIBRARY_IMPL(nvfp4_quant, Autograd, m) {
  for (const char* name :
       {"quantize", "quantize_", "quantizer_amax_", "compute_amax", "dequantize", "swizzle_scales"}) {
    m.impl(name, torch::CppFunction::makeFallthrough());
  }
}
