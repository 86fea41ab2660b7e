// The public operations on torch tensors. Everything is checked before anything is allocated or written.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "buffers.h"
#include "options.h"
#include "rng.h"

namespace nvfp4 {

// What may change from call to call.
struct CallArguments {
  at::Tensor noop_flag;              // undefined: none
  at::Tensor amax;                   // replaces the reduction; undefined: none
  std::optional<double> amax_value;  // the same, as a number
  std::optional<at::Generator> generator;
  std::optional<RngState> rng_state;
  bool with_amax = true;  // false: the amax buffers hold the amax already
};

class NVFP4Quantizer {
 public:
  explicit NVFP4Quantizer(const Options& options) : options_(options) { options_.check(); }

  const Options& options() const { return options_; }

  Buffers quantize(const at::Tensor& x, const CallArguments& call) const;
  void quantize_into(const at::Tensor& x, const Buffers& out, const CallArguments& call) const;

  // The amaxes that the quantizer would cast with; either buffer may be undefined.
  void compute_amax_into(const at::Tensor& x, const at::Tensor& rowwise, const at::Tensor& columnwise,
                         const at::Tensor& noop_flag) const;

  Buffers empty(at::IntArrayRef shape, at::Device device, bool pin_memory) const;

 private:
  void check_call(const at::Tensor& x, const CallArguments& call) const;
  void run(const at::Tensor& x, const Buffers& out, const CallArguments& call) const;

  Options options_;
};

// The amax of x, written to one buffer or two.
void compute_amax(const at::Tensor& x, const at::Tensor& rowwise, const at::Tensor& columnwise,
                  const at::Tensor& noop_flag);

}  // namespace nvfp4
