// From a device to its kernels: which backend, which schedule, which stream.
#pragma once

#include <ATen/core/Tensor.h>

#include "options.h"
#include "params.h"

namespace nvfp4 {

// ValueError unless this build has code for the device ("meta" counts: it has nothing to compute).
void check_device(at::Device device, const char* argument);

// On CUDA: on the given device's current stream. Nothing happens on the meta device.
void run_amax(const AmaxParams& params, at::Device device);
void run_quantize(const QuantizeParams& params, Schedule schedule, at::Device device);
void run_dequantize(const DequantizeParams& params, at::Device device);
void run_swizzle(const SwizzleParams& params, at::Device device);

}  // namespace nvfp4
