// Amax and cast in one launch. The blocks read all of x, each keeping one tile in shared memory, and agree on the amax;
// then they cast the tiles in the opposite order: first those on chip, then what the L2 still holds.
#include <cooperative_groups.h>

#include "../dispatch.h"
#include "../kernels.h"
#include "cast.cuh"
#include "elements_amax.cuh"
#include "launch.cuh"
#include "tile_amax.cuh"

namespace nvfp4 {
namespace {

// The tiles of one block, every gridDim.x-th of the grid. The last one stays in shared memory between amax and cast.
template <DType D>
struct BlockTiles {
  const MatrixView& x;
  uint8_t* slot;
  TileGrid grid;
  uint32_t count;
  bool aligned;

  __device__ BlockTiles(const MatrixView& matrix, uint8_t* memory)
      : x(matrix),
        slot(memory),
        grid(tile_grid<D>(matrix)),
        count((grid.count() - blockIdx.x + gridDim.x - 1) / gridDim.x),
        aligned(has_aligned_rows<D>(matrix)) {}

  __device__ __forceinline__ TilePlace place(uint32_t i) const { return tile_place(blockIdx.x + i * gridDim.x, grid); }

  // The tiles of all blocks before the last one of each.
  __device__ __forceinline__ uint32_t others() const { return grid.count() - min(grid.count(), gridDim.x); }

  __device__ __forceinline__ void load(TilePlace tile) const { load_tile<D>(x, aligned, tile, slot); }
};

// Both of the following return the block's share of the amaxes and leave its last tile in the slot.

// The order does not matter: what does not stay on chip is read straight through, evenly shared among the blocks.
template <DType D>
__device__ __forceinline__ TileAmax untiled_amax(const BlockTiles<D>& tiles) {
  tiles.load(tiles.place(tiles.count - 1));
  const int64_t rows = int64_t(ceil_div(int64_t(tiles.others()), tiles.grid.cols)) * kTileRows;
  float amax = rows == 0 ? 0.0F : elements_amax<D, kFewLoads>(tiles.x, min(rows, tiles.x.rows));
  ptx::copy_async_wait<0>();
  if (!tiles.aligned) __syncthreads();  // else every thread looks at its own copies only
  amax = fmaxf(amax, own_chunks_amax<D>(tiles.slot));
  return {amax, amax};
}

// For the transform and for single lines, which need to see 16x16 blocks.
template <DType D>
__device__ __forceinline__ TileAmax tiled_amax(const BlockTiles<D>& tiles, const AmaxTask& task) {
  TileAmax amax = {0.0F, 0.0F};
  for (uint32_t i = 0; i < tiles.count; ++i) {
    __syncthreads();
    tiles.load(tiles.place(i));
    ptx::copy_async_wait<0>();
    __syncthreads();
    const TileAmax one = tile_amax<D>(task, tiles.place(i), tiles.slot);
    amax = {fmaxf(amax.rowwise, one.rowwise), fmaxf(amax.columnwise, one.columnwise)};
  }
  return amax;
}

// The largest of what every block wrote to scratch.
__device__ __forceinline__ float grid_max(const float* scratch, float* shared) {
  float m = 0.0F;
  for (int i = threadIdx.x; i < int(gridDim.x); i += blockDim.x) m = fmaxf(m, __ldcg(scratch + i));
  return block_max_ignore_nan(m, shared);
}

__device__ __forceinline__ void zero_lines(const AmaxTask& task) {
  const int64_t first = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  const int64_t step = gridDim.x * int64_t(blockDim.x);
  if (task.rowwise != nullptr) {
    for (int64_t i = first; i < task.rows; i += step) task.rowwise[i] = 0.0F;
  }
  if (task.columnwise != nullptr) {
    for (int64_t i = first; i < task.cols; i += step) task.columnwise[i] = 0.0F;
  }
}

// Blocks of kManyThreads that should fit on a multiprocessor, or twice as many of kThreads.
constexpr int min_blocks(Rounding rounding, bool with_rht, bool row_scaled) {
  if (with_rht) return 2;
  return rounding == Rounding::kNearest && !row_scaled ? 4 : 3;
}

// scratch: [2, blocks], the amaxes of every block by direction, unused if row-scaled; then a counter.
template <DType D, Rounding R, bool WithRht, bool RowScaled>
__global__ void __launch_bounds__(kManyThreads, min_blocks(R, WithRht, RowScaled))
    fused_quantize_kernel(const __grid_constant__ QuantizeParams params, float* scratch) {
  if (is_noop(params.noop_flag)) return;
  __shared__ alignas(16) uint8_t slot[kTileBytes];
  __shared__ CastShared shared;
  __shared__ ScaleStage stage;
  __shared__ float reduction[kMaxWarps];
  __shared__ uint32_t drawn;
  const auto whole_grid = cooperative_groups::this_grid();
  uint32_t* const tickets = reinterpret_cast<uint32_t*>(scratch + 2 * gridDim.x);

  // 1. The amax.
  const BlockTiles<D> tiles(params.x, slot);
  const AmaxTask task = {
      params.rowwise.amax, params.columnwise.amax, params.x.rows, params.x.cols, WithRht, params.sign_mask, RowScaled};
  if (blockIdx.x == 0 && threadIdx.x == 0) *tickets = 0;
  if constexpr (RowScaled) {
    zero_lines(task);
    whole_grid.sync();
  }
  TileAmax amax;
  if constexpr (WithRht || RowScaled) {
    amax = tiled_amax<D>(tiles, task);
  } else {
    amax = untiled_amax<D>(tiles);
  }
  if constexpr (!RowScaled) {
    amax.rowwise = block_max_ignore_nan(amax.rowwise, reduction);
    if (WithRht) amax.columnwise = block_max_ignore_nan(amax.columnwise, reduction);
    if (threadIdx.x == 0) {
      scratch[blockIdx.x] = amax.rowwise;
      if (WithRht) scratch[gridDim.x + blockIdx.x] = amax.columnwise;
    }
  }

  // 2. The grid agrees on it.
  whole_grid.sync();
  if constexpr (!RowScaled) {
    amax.rowwise = grid_max(scratch, reduction);
    amax.columnwise = WithRht ? grid_max(scratch + gridDim.x, reduction) : amax.rowwise;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      if (task.rowwise != nullptr) *task.rowwise = amax.rowwise;
      if (task.columnwise != nullptr) *task.columnwise = amax.columnwise;
    }
  }

  // 3. The cast: the block's own last tile, then those that it draws a ticket for, the newest first.
  const TensorCast<D, R, WithRht, RowScaled> tensor(params, amax.rowwise, amax.columnwise, shared);
  const uint32_t others = tiles.others();
  TilePlace place = tiles.place(tiles.count - 1);
  for (;;) {
    __syncthreads();
    const uint32_t ticket = threadIdx.x == 0 && others > 0 ? atomicAdd(tickets, 1U) : 0U;
    tensor.cast(place, slot, shared, stage);
    if (threadIdx.x == 0) drawn = ticket;  // only now, so that the cast hides the atomic's way
    __syncthreads();
    tensor.write_out(place, stage);
    if (drawn >= others) return;
    place = tile_place(others - 1 - drawn, tiles.grid);
    tiles.load(place);
    ptx::copy_async_wait<0>();
  }
}

template <class F>
void dispatch_kernel(const QuantizeParams& params, F&& f) {
  dispatch_cast(params, [&](auto dtype, auto rounding, auto with_rht, auto row_scaled) {
    constexpr auto kKernel = fused_quantize_kernel<dtype(), rounding(), with_rht(), row_scaled()>;
    const int64_t tiles = tile_grid<dtype()>(params.x).count();
    const int resident = resident_blocks<kKernel>(kThreads);
    const int threads = 2 * tiles <= resident ? threads_for(tiles) : kThreads;
    f(kKernel, int(std::min<int64_t>(tiles, resident)), threads);
  });
}

}  // namespace

int64_t fused_scratch_elements(const QuantizeParams& params) {
  int64_t elements = 0;
  dispatch_kernel(params, [&](auto, int blocks, int) { elements = 2 * int64_t(blocks) + 1; });
  return elements;
}

void fused_quantize_cuda(const QuantizeParams& params, float* scratch, Stream stream) {
  if (params.x.rows == 0 || params.x.cols == 0) {
    AmaxParams amax{};
    amax.x = params.x;
    amax.rowwise = params.rowwise.amax;
    amax.columnwise = params.columnwise.amax;
    amax.noop_flag = params.noop_flag;
    amax.row_scaled = params.row_scaled;
    return zero_amax_cuda(amax, stream);
  }
  dispatch_kernel(params, [&](auto kernel, int blocks, int threads) {
    cudaLaunchAttribute cooperative{};
    cooperative.id = cudaLaunchAttributeCooperative;
    cooperative.val.cooperative = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(blocks));
    config.blockDim = dim3(unsigned(threads));
    config.stream = cudaStream_t(stream);
    config.attrs = &cooperative;
    config.numAttrs = 1;
    check_cuda(cudaLaunchKernelEx(&config, kernel, params, scratch), "fused_quantize_kernel");
  });
}

}  // namespace nvfp4
