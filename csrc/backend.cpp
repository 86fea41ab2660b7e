#include "backend.h"

#include "buffers.h"
#include "kernels.h"

#if defined(NVFP4_WITH_CUDA)
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#endif

namespace nvfp4 {

#if defined(NVFP4_WITH_CUDA)
namespace {

// Makes a device the current one, and knows its current stream.
class CudaScope {
 public:
  explicit CudaScope(at::Device device) : guard_(device), stream_(c10::cuda::getCurrentCUDAStream(device.index())) {}
  Stream stream() const { return stream_.stream(); }

 private:
  c10::cuda::CUDAGuard guard_;
  c10::cuda::CUDAStream stream_;
};

void check_cuda_device(at::Device device, const char* argument) {
  static std::atomic<bool> checked[C10_COMPILE_TIME_MAX_GPUS];
  std::atomic<bool>& known = checked[device.has_index() ? device.index() : c10::cuda::current_device()];
  if (known.load(std::memory_order_relaxed)) return;
  const c10::cuda::CUDAGuard guard(device);
  TORCH_CHECK_VALUE(device_has_code_cuda(), argument, ": is on ", device, ", but this build has CUDA code for ",
                    NVFP4_CUDA_ARCHS, " only");
  known.store(true, std::memory_order_relaxed);
}

void quantize_on_cuda(QuantizeParams params, Schedule schedule, at::Device device) {
  const CudaScope scope(device);
  // The one place that chooses the schedule. The cast alone always is one launch; only the amax before it can be fused,
  // which is the faster way as long as it spares the second read of x. The README names the border.
  if (params.amax_source == AmaxSource::kCompute && schedule != Schedule::kSplit) {
    const FusedNeeds needs = fused_needs_cuda(params);
    if (schedule == Schedule::kFused || needs.fits_on_chip) {
      const at::Tensor scratch = allocate({needs.scratch_elements}, at::kFloat, device);
      return fused_quantize_cuda(params, static_cast<float*>(scratch.mutable_data_ptr()), scope.stream());
    }
  }
  const bool with_amax = params.amax_source == AmaxSource::kCompute;
  if (with_amax) {
    const AmaxParams amax = {params.x,        params.rowwise.amax, params.columnwise.amax, params.noop_flag,
                             params.with_rht, params.sign_mask,    params.row_scaled};
    zero_amax_cuda(amax, scope.stream());
    amax_cuda(amax, scope.stream());
    params.amax_source = AmaxSource::kBuffers;
  }
  quantize_cuda(params, with_amax, scope.stream());
}

}  // namespace
#endif

void check_device(at::Device device, const char* argument) {
  if (device.is_cpu() || device.is_meta()) return;
#if defined(NVFP4_WITH_CUDA)
  TORCH_CHECK_VALUE(device.is_cuda(), argument, ": is on ", device, ", expected a CPU or CUDA device");
  check_cuda_device(device, argument);
#else
  TORCH_CHECK_VALUE(!device.is_cuda(), argument, ": is on ", device, ", but this build has no CUDA code");
  TORCH_CHECK_VALUE(false, argument, ": is on ", device, ", expected a CPU device");
#endif
}

void run_amax(const AmaxParams& params, at::Device device) {
  if (device.is_cpu()) amax_cpu(params);
#if defined(NVFP4_WITH_CUDA)
  if (!device.is_cuda()) return;
  const CudaScope scope(device);
  zero_amax_cuda(params, scope.stream());
  amax_cuda(params, scope.stream());
#endif
}

void run_quantize(const QuantizeParams& params, [[maybe_unused]] Schedule schedule, at::Device device) {
  if (device.is_cpu()) quantize_cpu(params);
#if defined(NVFP4_WITH_CUDA)
  if (device.is_cuda()) quantize_on_cuda(params, schedule, device);
#endif
}

void run_dequantize(const DequantizeParams& params, at::Device device) {
  if (device.is_cpu()) dequantize_cpu(params);
#if defined(NVFP4_WITH_CUDA)
  if (!device.is_cuda()) return;
  const CudaScope scope(device);
  dequantize_cuda(params, scope.stream());
#endif
}

void run_swizzle(const SwizzleParams& params, at::Device device) {
  if (device.is_cpu()) swizzle_cpu(params);
#if defined(NVFP4_WITH_CUDA)
  if (!device.is_cuda()) return;
  const CudaScope scope(device);
  swizzle_cuda(params, scope.stream());
#endif
}

}  // namespace nvfp4
