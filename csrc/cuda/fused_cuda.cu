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

// The tiles of one block, every gridDim.x-th of all. The last one stays in shared memory between amax and cast.
template <DType D>
struct BlockTiles {
  const MatrixView& x;
  const Tiling& tiling;
  uint8_t* slot;
  uint32_t count;

  __device__ BlockTiles(const CastPlan<D>& plan, uint8_t* memory)
      : x(plan.params.x),
        tiling(plan.tiling),
        slot(memory),
        count((plan.tiling.count() - blockIdx.x + gridDim.x - 1) / gridDim.x) {}

  __device__ __forceinline__ TilePlace place(uint32_t i) const {
    return tile_place(blockIdx.x + i * gridDim.x, tiling);
  }
  __device__ __forceinline__ void load(TilePlace tile) const { load_tile<D>(x, tiling, tile, slot); }
};

// The tiles that no block keeps, the first ones of the tiling, and the rows of x that hold them.
struct OtherTiles {
  uint32_t count;
  int64_t rows;
  Stretches stretches;
};

template <DType D>
OtherTiles other_tiles(const CastPlan<D>& plan, uint32_t blocks) {
  OtherTiles others{};
  others.count = plan.tiling.count() - blocks;
  others.rows = std::min(int64_t(ceil_div(others.count, plan.tiling.cols)) * kTileRows, plan.params.x.rows);
  others.stretches = stretches_of<kFewLoads>(plan.params.x, others.rows);
  return others;
}

// Both of the following return the block's share of the amaxes and leave its last tile in the slot.

// The order does not matter: what does not stay on chip is read straight through, evenly shared among the blocks.
template <DType D>
__device__ __forceinline__ TileAmax untiled_amax(const BlockTiles<D>& tiles, const OtherTiles& others) {
  tiles.load(tiles.place(tiles.count - 1));
  float amax = elements_amax<D, kFewLoads>(tiles.x, others.rows, others.stretches);
  ptx::copy_async_wait<0>();
  if (!tiles.tiling.aligned_rows) __syncthreads();  // else every thread looks at its own copies only
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

// scratch: [2, blocks], the amaxes of every block by direction, unused if row-scaled; then a counter.
template <DType D, Rounding R, bool WithRht, bool RowScaled>
__global__ void __maxnreg__(WithRht ? kMaxRegistersWithRht : kMaxRegisters)
    fused_quantize_kernel(const __grid_constant__ CastPlan<D> plan, const __grid_constant__ OtherTiles others,
                          float* scratch) {
  const QuantizeParams& params = plan.params;
  if (is_noop(params.noop_flag)) return;
  __shared__ alignas(16) uint8_t slot[kTileBytes];
  __shared__ CastShared shared;
  __shared__ ScaleStage stage;
  __shared__ float reduction[kMaxWarps];
  __shared__ uint32_t drawn;
  const auto whole_grid = cooperative_groups::this_grid();
  uint32_t* const tickets = reinterpret_cast<uint32_t*>(scratch + 2 * gridDim.x);

  // 1. The amax.
  const BlockTiles<D> tiles(plan, slot);
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
    amax = untiled_amax<D>(tiles, others);
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
  const TensorCast<D, R, WithRht, RowScaled> tensor(plan, amax.rowwise, amax.columnwise, shared);
  TilePlace place = tiles.place(tiles.count - 1);
  for (;;) {
    __syncthreads();
    const uint32_t ticket = threadIdx.x == 0 && others.count > 0 ? atomicAdd(tickets, 1U) : 0U;
    tensor.cast(place, slot, shared, stage);
    if (threadIdx.x == 0) drawn = ticket;  // only now, so that the cast hides the atomic's way
    __syncthreads();
    tensor.write_out(place, stage);
    if (drawn >= others.count) return;
    place = tile_place(others.count - 1 - drawn, tiles.tiling);
    tiles.load(place);
    ptx::copy_async_wait<0>();
  }
}

// f(kernel, plan, blocks, threads).
template <class F>
void dispatch_kernel(const QuantizeParams& params, F&& f) {
  dispatch_cast(params, [&](auto dtype, auto rounding, auto with_rht, auto row_scaled) {
    constexpr auto kKernel = fused_quantize_kernel<dtype(), rounding(), with_rht(), row_scaled()>;
    const CastPlan<dtype()> plan(params);
    const int64_t tiles = plan.tiling.count();
    const int resident = resident_blocks<kKernel>(kThreads);
    const int threads = 2 * tiles <= resident ? threads_for(tiles) : kThreads;
    f(kKernel, plan, int(std::min<int64_t>(tiles, resident)), threads);
  });
}

}  // namespace

FusedNeeds fused_needs_cuda(const QuantizeParams& params) {
  FusedNeeds needs{};
  dispatch_kernel(params, [&](auto, const auto& plan, int blocks, int) {
    needs = {2 * int64_t(blocks) + 1, plan.tiling.count() == uint32_t(blocks)};
  });
  return needs;
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
  dispatch_kernel(params, [&](auto kernel, const auto& plan, int blocks, int threads) {
    cudaLaunchAttribute cooperative{};
    cooperative.id = cudaLaunchAttributeCooperative;
    cooperative.val.cooperative = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(blocks));
    config.blockDim = dim3(unsigned(threads));
    config.stream = cudaStream_t(stream);
    config.attrs = &cooperative;
    config.numAttrs = 1;
    check_cuda(cudaLaunchKernelEx(&config, kernel, plan, other_tiles(plan, unsigned(blocks)), scratch),
               "fused_quantize_kernel");
  });
}

}  // namespace nvfp4
