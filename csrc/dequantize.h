// From buffers back to numbers, and the two orders of scale bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "numerics/formats.h"

namespace nvfp4 {

struct DequantizeArguments {
  at::ScalarType dtype;
  bool columnwise = false;
  bool swizzled = false;
  bool with_rht = false;
  bool with_random_sign_mask = true;
  int64_t nvfp4_e4m3_max = kDefaultE4M3Max;
};

// shape: the logical shape, which the padded data does not tell.
at::Tensor dequantize(const at::Tensor& data, const at::Tensor& scale, const at::Tensor& amax,
                      c10::SymIntArrayRef shape, const DequantizeArguments& arguments);

// New buffers in the other order (from swizzled to compact with `inverse`), undefined where none is given.
std::array<at::Tensor, 2> swizzle_scales(const at::Tensor& rowwise, const at::Tensor& columnwise, bool inverse);

}  // namespace nvfp4
