// Scale bytes from compact to swizzled order and back, both directions of a tensor in one launch.
#include "../kernels.h"
#include "launch.cuh"

namespace nvfp4 {
namespace {

// A warp reorders the words (four neighbouring blocks) of 8 blocks x 4 rows in each quarter of 128 lines: whole sectors
// on both sides, because a row has one word in each quarter of a 512-byte tile.
constexpr uint32_t kWarpWords = 8;
constexpr uint32_t kWarpRows = 4;
constexpr uint32_t kQuarter = kScaleLineAlign / 4;

__host__ __device__ uint32_t words_of_line(const SwizzleJob& job) { return uint32_t(job.blocks / kScaleBlockAlign); }
__host__ __device__ uint32_t warps_across(const SwizzleJob& job) { return ceil_div(words_of_line(job), kWarpWords); }
__host__ __device__ uint32_t warps_of(const SwizzleJob& job) {
  return uint32_t(job.lines / kScaleLineAlign) * (kQuarter / kWarpRows) * warps_across(job);
}

__device__ __forceinline__ void swizzle_warp(const SwizzleJob& job, bool inverse, uint32_t warp) {
  const uint32_t words = words_of_line(job);
  const uint32_t down = warp / warps_across(job);
  const uint32_t word = (warp - down * warps_across(job)) * kWarpWords + threadIdx.x % kWarpWords;
  if (word >= words) return;
  const uint32_t row = down % (kQuarter / kWarpRows) * kWarpRows + threadIdx.x % 32 / kWarpWords;
  const uint64_t group = down / (kQuarter / kWarpRows);
  const uint64_t compact = (group * kScaleLineAlign + row) * words + word;  // in words
  const uint64_t step = uint64_t(kQuarter) * words;
  const uint64_t swizzled = ((group * words + word) * kQuarter + row) * 4;
  const auto* source = reinterpret_cast<const uint32_t*>(job.source) + (inverse ? swizzled : compact);
  auto* target = reinterpret_cast<uint32_t*>(job.target) + (inverse ? compact : swizzled);
  if (inverse) {  // words in pairs: buffers of callers are aligned to 8 bytes
    const uint2 low = reinterpret_cast<const uint2*>(source)[0];
    const uint2 high = reinterpret_cast<const uint2*>(source)[1];
    target[0] = low.x;
    target[step] = low.y;
    target[2 * step] = high.x;
    target[3 * step] = high.y;
  } else {
    reinterpret_cast<uint2*>(target)[0] = {source[0], source[step]};
    reinterpret_cast<uint2*>(target)[1] = {source[2 * step], source[3 * step]};
  }
}

__global__ void __launch_bounds__(kThreads) swizzle_kernel(const __grid_constant__ SwizzleParams params) {
  const uint32_t warp = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  const uint32_t first = warps_of(params.jobs[0]);
  if (warp < first) {
    swizzle_warp(params.jobs[0], params.inverse, warp);
  } else if (warp - first < warps_of(params.jobs[1])) {
    swizzle_warp(params.jobs[1], params.inverse, warp - first);
  }
}

}  // namespace

void swizzle_cuda(const SwizzleParams& params, Stream stream) {
  const uint32_t warps = warps_of(params.jobs[0]) + warps_of(params.jobs[1]);
  if (warps == 0) return;
  swizzle_kernel<<<ceil_div(warps, kThreads / 32), kThreads, 0, cudaStream_t(stream)>>>(params);
  check_cuda(cudaGetLastError(), "swizzle_kernel");
}

}  // namespace nvfp4
