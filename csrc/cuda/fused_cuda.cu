// Amax and cast in one launch. Every block reads its tiles through a ring in shared memory, the grid agrees on the
// amax, and every block casts its tiles in the opposite order: the newest are still in the ring, the next ones in the
// L2.
#include <cooperative_groups.h>

#include "../dispatch.h"
#include "../kernels.h"
#include "cast.cuh"
#include "elements_amax.cuh"
#include "launch.cuh"
#include "tile_amax.cuh"

namespace nvfp4 {
namespace {

constexpr int kSlots = 2;

// The tiles of one block, every gridDim.x-th of the grid, and two slots for them in shared memory.
template <DType D>
struct Ring {
  const MatrixView& x;
  uint8_t* slots;
  TileGrid grid;
  int count;
  bool aligned;

  __device__ Ring(const MatrixView& matrix, uint8_t* memory)
      : x(matrix),
        slots(memory),
        grid(tile_grid<D>(matrix)),
        count(int((grid.count() - blockIdx.x + gridDim.x - 1) / gridDim.x)),
        aligned(has_aligned_rows<D>(matrix)) {}

  __device__ __forceinline__ uint8_t* slot(int i) const { return slots + (i & 1) * kTileBytes; }
  __device__ __forceinline__ TilePlace place(int i) const { return tile_place(blockIdx.x + i * gridDim.x, grid); }

  // Always closes one group of copies, so that the groups can be counted.
  __device__ __forceinline__ void load(int i) const {
    if (i >= 0 && i < count) {
      load_tile<D>(x, aligned, place(i), slot(i));
    } else {
      ptx::copy_async_commit();
    }
  }
  // The tiles of all blocks before the last two of each.
  __device__ __forceinline__ uint32_t other_tiles() const {
    const uint32_t resident = kSlots * gridDim.x;
    return grid.count() > resident ? grid.count() - resident : 0U;
  }
};

// Both of the following return the block's share of the amaxes and leave its last two tiles in the ring.

// The order does not matter: what does not stay in the ring is read straight through, evenly shared among the blocks.
template <DType D>
__device__ __forceinline__ TileAmax untiled_amax(const Ring<D>& ring) {
  ring.load(ring.count - 2);
  ring.load(ring.count - 1);
  const int64_t rows = int64_t(ceil_div(int64_t(ring.other_tiles()), ring.grid.cols)) * kTileRows;
  float amax = rows == 0 ? 0.0F : elements_amax<D>(ring.x, min(rows, ring.x.rows));
  ptx::copy_async_wait<0>();
  if (!ring.aligned) __syncthreads();  // else every thread looks at its own copies only
  if (ring.count > 1) amax = fmaxf(amax, own_chunks_amax<D>(ring.slot(ring.count - 2)));
  amax = fmaxf(amax, own_chunks_amax<D>(ring.slot(ring.count - 1)));
  return {amax, amax};
}

// For the transform and for single lines, which need to see 16x16 blocks.
template <DType D>
__device__ __forceinline__ TileAmax tiled_amax(const Ring<D>& ring, const AmaxTask& task) {
  ring.load(0);
  ring.load(1);
  TileAmax amax = {0.0F, 0.0F};
  for (int i = 0; i < ring.count; ++i) {
    ptx::copy_async_wait<kSlots - 1>();
    __syncthreads();
    const TileAmax one = tile_amax<D>(task, ring.place(i), ring.slot(i));
    amax = {fmaxf(amax.rowwise, one.rowwise), fmaxf(amax.columnwise, one.columnwise)};
    __syncthreads();
    ring.load(i + kSlots);
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

// Blocks of kManyThreads that should fit on a multiprocessor, or twice as many of kThreads: as many as the rings leave
// room for, where the registers suffice.
template <Rounding R, bool WithRht, bool RowScaled>
inline constexpr int kMinBlocks = WithRht || RowScaled || R != Rounding::kNearest ? 2 : 3;

// scratch: [2, blocks], the amaxes of every block by direction, unused if row-scaled; then a counter.
template <DType D, Rounding R, bool WithRht, bool RowScaled>
__global__ void __launch_bounds__(kManyThreads, kMinBlocks<R, WithRht, RowScaled>)
    fused_quantize_kernel(const __grid_constant__ QuantizeParams params, float* scratch) {
  if (is_noop(params.noop_flag)) return;
  extern __shared__ __align__(16) uint8_t memory[];
  __shared__ CastShared shared;
  __shared__ ScaleStage stage[2];
  __shared__ float reduction[kMaxWarps];
  __shared__ uint32_t drawn[2];
  const auto whole_grid = cooperative_groups::this_grid();
  uint32_t* const tickets = reinterpret_cast<uint32_t*>(scratch + 2 * gridDim.x);

  // 1. The amax.
  const Ring<D> ring(params.x, memory);
  const AmaxTask task = {
      params.rowwise.amax, params.columnwise.amax, params.x.rows, params.x.cols, WithRht, params.sign_mask, RowScaled};
  if (blockIdx.x == 0 && threadIdx.x == 0) *tickets = 0;
  if constexpr (RowScaled) {
    zero_lines(task);
    whole_grid.sync();
  }
  TileAmax amax;
  if constexpr (WithRht || RowScaled) {
    amax = tiled_amax<D>(ring, task);
  } else {
    amax = untiled_amax<D>(ring);
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

  // 3. The cast: the block's own last two tiles, then those that it draws a ticket for, the newest first. Behind each
  // barrier the slot of the tile before is free for the next load, and its scales are complete.
  const TensorCast<D, R, WithRht, RowScaled> tensor(params, amax.rowwise, amax.columnwise, shared);
  const uint32_t others = ring.other_tiles();
  TilePlace done{};
  TilePlace place = ring.place(ring.count - 1);
  TilePlace next = ring.place(max(ring.count - 2, 0));
  bool has_next = ring.count > 1;
  int turn = 0;
  for (;; ++turn) {
    const int i = (ring.count - 1 + turn) & 1;
    ptx::copy_async_wait<0>();
    __syncthreads();
    if (turn > 0) {
      const uint32_t ticket = drawn[(turn - 1) & 1];
      has_next = ticket < others;
      next = tile_place(others - 1 - ticket, ring.grid);
      if (has_next) load_tile<D>(ring.x, ring.aligned, next, ring.slot(i + 1));
      tensor.write_out(done, stage[(turn - 1) & 1]);
    }
    const uint32_t ticket = threadIdx.x == 0 && others > 0 ? atomicAdd(tickets, 1U) : 0U;
    tensor.cast(place, ring.slot(i), shared, stage[turn & 1]);
    if (threadIdx.x == 0) drawn[turn & 1] = ticket;  // only now, so that the cast hides the atomic's way
    done = place;
    if (!has_next) break;
    place = next;
  }
  __syncthreads();
  tensor.write_out(done, stage[turn & 1]);
}

template <class F>
void dispatch_kernel(const QuantizeParams& params, F&& f) {
  dispatch_cast(params, [&](auto dtype, auto rounding, auto with_rht, auto row_scaled) {
    constexpr auto kKernel = fused_quantize_kernel<dtype(), rounding(), with_rht(), row_scaled()>;
    constexpr int kBytes = kSlots * kTileBytes;
    const int64_t tiles = tile_grid<dtype()>(params.x).count();
    const int resident = resident_blocks<kKernel>(kThreads, kBytes);
    const int threads = 2 * tiles <= resident ? threads_for(tiles) : kThreads;
    f(kKernel, int(std::min<int64_t>(tiles, resident)), threads, kBytes);
  });
}

}  // namespace

int64_t fused_scratch_elements(const QuantizeParams& params) {
  int64_t elements = 0;
  dispatch_kernel(params, [&](auto, int blocks, int, int) { elements = 2 * int64_t(blocks) + 1; });
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
  dispatch_kernel(params, [&](auto kernel, int blocks, int threads, int shared_bytes) {
    cudaLaunchAttribute cooperative{};
    cooperative.id = cudaLaunchAttributeCooperative;
    cooperative.val.cooperative = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(blocks));
    config.blockDim = dim3(unsigned(threads));
    config.dynamicSmemBytes = size_t(shared_bytes);
    config.stream = cudaStream_t(stream);
    config.attrs = &cooperative;
    config.numAttrs = 1;
    check_cuda(cudaLaunchKernelEx(&config, kernel, params, scratch), "fused_quantize_kernel");
  });
}

}  // namespace nvfp4
