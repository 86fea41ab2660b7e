// Amax and cast in one launch. Every block reads its tiles through a ring in shared memory, the grid agrees on the amax,
// and every block casts its tiles in the opposite order: the newest are still in the ring, the next ones in the L2.
#include <cooperative_groups.h>

#include "../dispatch.h"
#include "../kernels.h"
#include "cast.cuh"
#include "launch.cuh"
#include "tile_amax.cuh"

namespace nvfp4 {
namespace {

constexpr int kSlots = 2;

// The tiles of one block: every gridDim.x-th of the grid, each in the slot after that of the tile before.
template <DType D>
struct Ring {
  const MatrixView& x;
  uint8_t* slots;
  TileGrid grid;
  TilePlace step;
  int count;
  bool aligned;

  __device__ Ring(const MatrixView& matrix, uint8_t* memory)
      : x(matrix),
        slots(memory),
        grid(tile_grid<D>(matrix)),
        step(tile_place(gridDim.x, grid)),
        count(int((grid.count() - blockIdx.x + gridDim.x - 1) / gridDim.x)),
        aligned(has_aligned_rows<D>(matrix)) {}

  __device__ __forceinline__ uint8_t* slot(int i) const { return slots + i % kSlots * kTileBytes; }

  __device__ __forceinline__ TilePlace after(TilePlace place) const {
    place.row += step.row;
    place.col += step.col;
    if (place.col < grid.cols) return place;
    return {place.row + 1, place.col - grid.cols};
  }
  __device__ __forceinline__ TilePlace before(TilePlace place) const {
    place.row -= step.row;
    if (place.col >= step.col) return {place.row, place.col - step.col};
    return {place.row - 1, place.col + grid.cols - step.col};
  }

  // Always closes one group of copies, so that the groups can be counted.
  __device__ __forceinline__ void load(int i, TilePlace place) const {
    if (i >= 0 && i < count) {
      load_tile<D>(x, aligned, place, slot(i));
    } else {
      ptx::copy_async_commit();
    }
  }
};

// The block's share of the amaxes. Afterwards the last kSlots tiles are in the ring; `place` becomes that of the last one.
template <DType D, bool WithRht>
__device__ __forceinline__ TileAmax ring_amax(const Ring<D>& ring, const AmaxTask& task, TilePlace& place) {
  const bool own_chunks = ring.aligned && !WithRht && !task.row_scaled;
  TilePlace ahead = place;
  for (int i = 0; i < kSlots; ++i, ahead = ring.after(ahead)) ring.load(i, ahead);
  TileAmax amax = {0.0F, 0.0F};
  for (int i = 0;; ++i, place = ring.after(place), ahead = ring.after(ahead)) {
    ptx::copy_async_wait<kSlots - 1>();
    if (own_chunks) {
      amax.rowwise = fmaxf(amax.rowwise, own_chunks_amax<D>(ring.slot(i)));
    } else {
      __syncthreads();
      const TileAmax one = tile_amax<D>(task, place, ring.slot(i));
      amax = {fmaxf(amax.rowwise, one.rowwise), fmaxf(amax.columnwise, one.columnwise)};
      __syncthreads();
    }
    ring.load(i + kSlots, ahead);
    if (i + 1 == ring.count) return amax;
  }
}

// The largest of what every block wrote to scratch.
__device__ __forceinline__ float grid_max(const float* scratch, float* shared) {
  float m = 0.0F;
  for (int i = threadIdx.x; i < int(gridDim.x); i += kThreads) m = fmaxf(m, __ldcg(scratch + i));
  return block_max_ignore_nan<kWarps>(m, shared);
}

__device__ __forceinline__ void zero_lines(const AmaxTask& task) {
  const int64_t first = blockIdx.x * int64_t(kThreads) + threadIdx.x;
  const int64_t step = gridDim.x * int64_t(kThreads);
  if (task.rowwise != nullptr) {
    for (int64_t i = first; i < task.rows; i += step) task.rowwise[i] = 0.0F;
  }
  if (task.columnwise != nullptr) {
    for (int64_t i = first; i < task.cols; i += step) task.columnwise[i] = 0.0F;
  }
}

// Blocks that should fit on a multiprocessor: as many as the rings leave room for, where the registers suffice.
template <Rounding R, bool WithRht, bool RowScaled>
inline constexpr int kMinBlocks = WithRht || RowScaled || R != Rounding::kNearest ? 4 : 6;

// scratch: [2, blocks], the amaxes of every block by direction; unused if row-scaled.
template <DType D, Rounding R, bool WithRht, bool RowScaled>
__global__ void __launch_bounds__(kThreads, kMinBlocks<R, WithRht, RowScaled>)
    fused_quantize_kernel(const __grid_constant__ QuantizeParams params, float* scratch) {
  if (is_noop(params.noop_flag)) return;
  extern __shared__ __align__(16) uint8_t memory[];
  __shared__ CastShared shared;
  __shared__ ScaleStage stage[2];
  __shared__ float reduction[kWarps];
  const auto whole_grid = cooperative_groups::this_grid();

  // 1. The amax.
  const Ring<D> ring(params.x, memory);
  TilePlace place = tile_place(blockIdx.x, ring.grid);
  const AmaxTask task = {params.rowwise.amax, params.columnwise.amax, params.x.rows,    params.x.cols,
                         WithRht,             params.sign_mask,       RowScaled};
  if constexpr (RowScaled) {
    zero_lines(task);
    whole_grid.sync();
  }
  TileAmax amax = ring_amax<D, WithRht>(ring, task, place);
  if constexpr (!RowScaled) {
    amax.rowwise = block_max_ignore_nan<kWarps>(amax.rowwise, reduction);
    if (WithRht) amax.columnwise = block_max_ignore_nan<kWarps>(amax.columnwise, reduction);
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

  // 3. The cast. Behind each barrier the slot of the tile before is free for the next load, and its scales are complete.
  const TensorCast<D, R, WithRht, RowScaled> tensor(params, amax.rowwise, amax.columnwise, shared);
  static_assert(kSlots == 2);
  TilePlace done = place;
  for (int i = ring.count - 1; i >= 0; --i) {
    const TilePlace next = ring.before(place);
    ptx::copy_async_wait<0>();
    __syncthreads();
    if (i + 1 < ring.count) {
      ring.load(i - 1, next);
      tensor.write_out(done, stage[(i + 1) % 2]);
    }
    tensor.cast(place, ring.slot(i), shared, stage[i % 2]);
    done = place;
    place = next;
  }
  __syncthreads();
  tensor.write_out(done, stage[0]);
}

template <class F>
void dispatch_kernel(const QuantizeParams& params, F&& f) {
  dispatch_cast(params, [&](auto dtype, auto rounding, auto with_rht, auto row_scaled) {
    constexpr auto kKernel = fused_quantize_kernel<dtype(), rounding(), with_rht(), row_scaled()>;
    constexpr int kBytes = kSlots * kTileBytes;
    const int64_t tiles = tile_grid<dtype()>(params.x).count();
    f(kKernel, int(std::min<int64_t>(tiles, resident_blocks<kKernel>(kThreads, kBytes))), kBytes);
  });
}

}  // namespace

int64_t fused_scratch_elements(const QuantizeParams& params) {
  int64_t elements = 0;
  if (params.row_scaled) return elements;
  dispatch_kernel(params, [&](auto, int blocks, int) { elements = 2 * int64_t(blocks); });
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
  dispatch_kernel(params, [&](auto kernel, int blocks, int shared_bytes) {
    cudaLaunchAttribute cooperative{};
    cooperative.id = cudaLaunchAttributeCooperative;
    cooperative.val.cooperative = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(blocks));
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = size_t(shared_bytes);
    config.stream = cudaStream_t(stream);
    config.attrs = &cooperative;
    config.numAttrs = 1;
    check_cuda(cudaLaunchKernelEx(&config, kernel, params, scratch), "fused_quantize_kernel");
  });
}

}  // namespace nvfp4
