// Every kernel entry point, once for each backend. Arguments are checked by the callers; empty inputs are allowed.
#pragma once

#include "params.h"

namespace nvfp4 {

void amax_cpu(const AmaxParams& params);
void quantize_cpu(const QuantizeParams& params);  // computes the amax first where params.amax_source says so
void dequantize_cpu(const DequantizeParams& params);
void swizzle_cpu(const SwizzleParams& params);

#if defined(NVFP4_WITH_CUDA)
using Stream = void*;  // a cudaStream_t; the CUDA headers stay out of the host files

bool device_has_code_cuda();  // whether this library has code for the current device

void zero_amax_cuda(const AmaxParams& params, Stream stream);
void amax_cuda(const AmaxParams& params, Stream stream);  // the buffers hold zeros already
// Any amax source but kCompute. after_amax: the launch before this one on the stream was that of amax_cuda.
void quantize_cuda(const QuantizeParams& params, bool after_amax, Stream stream);
void dequantize_cuda(const DequantizeParams& params, Stream stream);
void swizzle_cuda(const SwizzleParams& params, Stream stream);

struct FusedNeeds {
  int64_t scratch_elements;  // float32
  bool fits_on_chip;         // every tile of x at once, so that x is read once
};

// amax and cast in one launch, amax_source == kCompute.
FusedNeeds fused_needs_cuda(const QuantizeParams& params);
void fused_quantize_cuda(const QuantizeParams& params, float* scratch, Stream stream);
#endif

}  // namespace nvfp4
