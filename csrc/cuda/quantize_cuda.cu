// The cast alone, for an amax that is known: after amax_kernel, or given by the caller.
#include "../dispatch.h"
#include "../kernels.h"
#include "cast.cuh"
#include "launch.cuh"

namespace nvfp4 {
namespace {

// Without Hadamard both directions share one amax; either buffer may be absent.
__device__ __forceinline__ float known_amax(const QuantizeParams& params, const DirectionBuffers& first,
                                            const DirectionBuffers& second) {
  if (params.amax_source == AmaxSource::kValue) return params.given_amax_value;
  if (params.amax_source == AmaxSource::kPointer) return *params.given_amax;
  return first.amax != nullptr ? *first.amax : *second.amax;
}

template <DType D, Rounding R, bool WithRht, bool RowScaled>
__global__ void __launch_bounds__(kManyThreads) quantize_kernel(const __grid_constant__ QuantizeParams params) {
  if (is_noop(params.noop_flag)) return;
  __shared__ alignas(16) uint8_t tile[kTileBytes];
  __shared__ CastShared shared;
  __shared__ ScaleStage stage;
  const TilePlace place = tile_place(blockIdx.x, tile_grid<D>(params.x));
  load_tile<D>(params.x, has_aligned_rows<D>(params.x), place, tile);

  float rowwise = 0.0F;
  float columnwise = 0.0F;
  if constexpr (!RowScaled) {
    rowwise = known_amax(params, params.rowwise, params.columnwise);
    columnwise = WithRht ? known_amax(params, params.columnwise, params.rowwise) : rowwise;
  }
  const TensorCast<D, R, WithRht, RowScaled> tensor(params, rowwise, columnwise, shared);
  if (params.amax_source != AmaxSource::kBuffers && blockIdx.x == 0 && threadIdx.x == 0) {
    if (params.rowwise.amax != nullptr) *params.rowwise.amax = rowwise;
    if (params.columnwise.amax != nullptr) *params.columnwise.amax = columnwise;
  }
  ptx::copy_async_wait<0>();
  __syncthreads();
  tensor.cast(place, tile, shared, stage);
  __syncthreads();
  tensor.write_out(place, stage);
}

__global__ void write_amax_kernel(const __grid_constant__ QuantizeParams params) {
  if (is_noop(params.noop_flag)) return;
  const float amax = known_amax(params, params.rowwise, params.columnwise);
  if (params.rowwise.amax != nullptr) *params.rowwise.amax = amax;
  if (params.columnwise.amax != nullptr) *params.columnwise.amax = amax;
}

}  // namespace

void quantize_cuda(const QuantizeParams& params, Stream stream) {
  if (params.x.rows == 0 || params.x.cols == 0) {  // no data, but an amax that was given is still the tensor's
    if (params.amax_source != AmaxSource::kBuffers) {
      write_amax_kernel<<<1, 1, 0, cudaStream_t(stream)>>>(params);
      check_cuda(cudaGetLastError(), "write_amax_kernel");
    }
    return;
  }
  dispatch_cast(params, [&](auto dtype, auto rounding, auto with_rht, auto row_scaled) {
    const uint32_t tiles = tile_grid<dtype()>(params.x).count();
    quantize_kernel<dtype(), rounding(), with_rht(), row_scaled()>
        <<<tiles, threads_for(tiles), 0, cudaStream_t(stream)>>>(params);
  });
  check_cuda(cudaGetLastError(), "quantize_kernel");
}

}  // namespace nvfp4
