// Seeds and offsets of stochastic rounding, from torch's generators or from the caller.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <optional>

#include "params.h"

namespace nvfp4 {

struct RngState {
  uint64_t seed;
  uint64_t offset;
};

// ValueError: a generator of another device, or an offset that torch's generators never have.
void check_random(const std::optional<at::Generator>& generator, const std::optional<RngState>& state,
                  c10::Device device);

// The random bits of one quantized tensor. Advances the generator (the device's default one if none is given), unless
// a state is given.
PhiloxSource draw_random(const std::optional<at::Generator>& generator, const std::optional<RngState>& state,
                         c10::Device device);

}  // namespace nvfp4
