// The amax reduction: one kernel writes both buffers itself, so that no copy between them is ever needed.
#include "../dispatch.h"
#include "../kernels.h"
#include "elements_amax.cuh"
#include "launch.cuh"
#include "tile_amax.cuh"

namespace nvfp4 {
namespace {

__global__ void zero_amax_kernel(float* rowwise, int64_t rows, float* columnwise, int64_t cols,
                                 const float* noop_flag) {
  if (is_noop(noop_flag)) return;
  const int64_t first = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  const int64_t step = gridDim.x * int64_t(blockDim.x);
  for (int64_t i = first; i < rows; i += step) rowwise[i] = 0.0F;
  for (int64_t i = first; i < cols; i += step) columnwise[i] = 0.0F;
}

template <DType D>
__device__ __forceinline__ TileAmax tiles_amax(const AmaxParams& params, const Tiling& tiling) {
  __shared__ alignas(16) uint8_t tile[kTileBytes];
  const AmaxTask task = {params.rowwise,  params.columnwise, params.x.rows,    params.x.cols,
                         params.with_rht, params.sign_mask,  params.row_scaled};
  TileAmax amax = {0.0F, 0.0F};
  for (uint32_t i = blockIdx.x; i < tiling.count(); i += gridDim.x) {
    const TilePlace place = tile_place(i, tiling);
    load_tile<D>(params.x, tiling, place, tile);
    ptx::copy_async_wait<0>();
    __syncthreads();
    const TileAmax one = tile_amax<D>(task, place, tile);
    amax = {fmaxf(amax.rowwise, one.rowwise), fmaxf(amax.columnwise, one.columnwise)};
    __syncthreads();
  }
  return amax;
}

// Tiled: for the transform and for single lines, which need to see 16x16 blocks.
template <DType D, bool Tiled>
__global__ void __launch_bounds__(kThreads)
    amax_kernel(const __grid_constant__ AmaxParams params, const __grid_constant__ Tiling tiling,
                const __grid_constant__ Stretches stretches) {
  if (is_noop(params.noop_flag)) return;
  __shared__ float shared[kMaxWarps];
  TileAmax amax;
  ptx::let_next_kernel_start();
  if constexpr (Tiled) {
    amax = tiles_amax<D>(params, tiling);
    if (params.row_scaled) return;
  } else {
    amax.rowwise = amax.columnwise = elements_amax<D, kManyLoads>(params.x, params.x.rows, stretches);
  }
  const float rowwise = block_max_ignore_nan(amax.rowwise, shared);
  const float columnwise = Tiled ? block_max_ignore_nan(amax.columnwise, shared) : rowwise;
  if (threadIdx.x != 0) return;
  if (params.rowwise != nullptr) raise_amax(params.rowwise, rowwise);
  if (params.columnwise != nullptr) raise_amax(params.columnwise, columnwise);
}

}  // namespace

bool device_has_code_cuda() {
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, zero_amax_kernel) == cudaSuccess) return true;
  cudaGetLastError();  // so that the next caller does not meet this error
  return false;
}

void zero_amax_cuda(const AmaxParams& params, Stream stream) {
  const int64_t rows = params.rowwise == nullptr ? 0 : params.row_scaled ? params.x.rows : 1;
  const int64_t cols = params.columnwise == nullptr ? 0 : params.row_scaled ? params.x.cols : 1;
  if (rows == 0 && cols == 0) return;
  const int64_t blocks = std::min<int64_t>(ceil_div(std::max(rows, cols), kThreads), multiprocessor_count());
  const int threads = std::max(rows, cols) == 1 ? 1 : kThreads;
  zero_amax_kernel<<<unsigned(blocks), threads, 0, cudaStream_t(stream)>>>(params.rowwise, rows, params.columnwise,
                                                                           cols, params.noop_flag);
  check_cuda(cudaGetLastError(), "zero_amax_kernel");
}

void amax_cuda(const AmaxParams& params, Stream stream) {
  if (params.x.rows == 0 || params.x.cols == 0) return;
  const bool tiled = params.row_scaled || (params.with_rht && params.columnwise != nullptr);
  AmaxParams p = params;
  if (!tiled) p.x = longest_rows(p.x);
  dispatch_dtype(p.x.dtype, [&](auto dtype) {
    dispatch_bool(tiled, [&](auto with_tiles) {
      constexpr auto kKernel = amax_kernel<dtype(), with_tiles()>;
      const Tiling tiling = tiling_of<dtype()>(p.x);
      const int64_t resident = resident_blocks<kKernel>(kThreads);
      const Stretches stretches = stretches_of<kManyLoads>(p.x, p.x.rows);
      const int64_t units = with_tiles()          ? tiling.count()
                            : stretches.count > 0 ? stretches.count
                                                  : ceil_div(p.x.rows * p.x.cols, kThreads);
      const auto blocks = unsigned(std::min(units, resident));
      kKernel<<<blocks, kThreads, 0, cudaStream_t(stream)>>>(p, tiling, stretches);
    });
  });
  check_cuda(cudaGetLastError(), "amax_kernel");
}

}  // namespace nvfp4
