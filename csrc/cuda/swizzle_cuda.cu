// Scale bytes from compact to swizzled order and back, both directions of a tensor in one launch.
#include "../kernels.h"
#include "launch.cuh"

namespace nvfp4 {
namespace {

// Four neighbouring blocks are one word in both orders.
__global__ void __launch_bounds__(kThreads) swizzle_kernel(const __grid_constant__ SwizzleParams params) {
  const int64_t first = params.jobs[0].lines * params.jobs[0].blocks / kScaleBlockAlign;
  const int64_t total = first + params.jobs[1].lines * params.jobs[1].blocks / kScaleBlockAlign;
  const int64_t step = gridDim.x * int64_t(kThreads);
  for (int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x; i < total; i += step) {
    const SwizzleJob& job = params.jobs[i < first ? 0 : 1];
    const int64_t byte = (i < first ? i : i - first) * kScaleBlockAlign;
    const int64_t swizzled = scale_offset(byte / job.blocks, byte % job.blocks, job.blocks, true);
    const int64_t source = params.inverse ? swizzled : byte;
    const int64_t target = params.inverse ? byte : swizzled;
    *reinterpret_cast<uint32_t*>(job.target + target) = *reinterpret_cast<const uint32_t*>(job.source + source);
  }
}

}  // namespace

void swizzle_cuda(const SwizzleParams& params, Stream stream) {
  const int64_t bytes = params.jobs[0].lines * params.jobs[0].blocks + params.jobs[1].lines * params.jobs[1].blocks;
  if (bytes == 0) return;
  const int64_t units = ceil_div(bytes / kScaleBlockAlign, kThreads);
  const int64_t blocks = std::min<int64_t>(units, 16 * multiprocessor_count());
  swizzle_kernel<<<unsigned(blocks), kThreads, 0, cudaStream_t(stream)>>>(params);
  check_cuda(cudaGetLastError(), "swizzle_kernel");
}

}  // namespace nvfp4
