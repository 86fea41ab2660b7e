// The cast alone, for an amax that is known: after amax_kernel, or given by the caller.
#include "../dispatch.h"
#include "../kernels.h"
#include "cast.cuh"
#include "launch.cuh"

namespace nvfp4 {
namespace {

// Where the amaxes of both directions are; null: the value that params holds.
struct KnownAmax {
  const float* rowwise;
  const float* columnwise;
};

// Without Hadamard both directions share one amax; either buffer may be absent.
KnownAmax known_amax(const QuantizeParams& params) {
  if (params.amax_source == AmaxSource::kValue) return {nullptr, nullptr};
  if (params.amax_source == AmaxSource::kPointer) return {params.given_amax, params.given_amax};
  const float* rowwise = params.rowwise.amax != nullptr ? params.rowwise.amax : params.columnwise.amax;
  return {rowwise, params.columnwise.amax != nullptr ? params.columnwise.amax : rowwise};
}

__device__ __forceinline__ float read_amax(const float* known, const QuantizeParams& params) {
  return known != nullptr ? __ldcg(known) : params.given_amax_value;
}

__device__ __forceinline__ void write_amax(const QuantizeParams& params, float rowwise, float columnwise) {
  if (params.rowwise.amax != nullptr) *params.rowwise.amax = rowwise;
  if (params.columnwise.amax != nullptr) *params.columnwise.amax = columnwise;
}

template <DType D, Rounding R, bool WithRht, bool RowScaled>
__global__ void __maxnreg__(kMaxRegisters) quantize_kernel(const __grid_constant__ CastPlan<D> plan, KnownAmax known) {
  const QuantizeParams& params = plan.params;
  if (is_noop(params.noop_flag)) {
    ptx::wait_for_previous_kernel();  // what follows this kernel counts on it
    return;
  }
  __shared__ alignas(16) uint8_t tile[kTileBytes];
  __shared__ CastShared shared;
  __shared__ ScaleStage stage;
  const TilePlace place = tile_place(gridDim.x - 1 - blockIdx.x, plan.tiling);
  load_tile<D>(params.x, plan.tiling, place, tile);

  float rowwise = 0.0F;
  float columnwise = 0.0F;
  ptx::wait_for_previous_kernel();  // for the amax: all else is older
  if constexpr (!RowScaled) {
    rowwise = read_amax(known.rowwise, params);
    columnwise = WithRht ? read_amax(known.columnwise, params) : rowwise;
  }
  const TensorCast<D, R, WithRht, RowScaled> tensor(plan, rowwise, columnwise, shared);
  if (blockIdx.x == 0 && threadIdx.x == 0 && params.amax_source != AmaxSource::kBuffers) {
    write_amax(params, rowwise, columnwise);
  }
  ptx::copy_async_wait<0>();
  __syncthreads();
  tensor.cast(place, tile, shared, stage);
  __syncthreads();
  tensor.write_out(place, stage);
}

__global__ void write_amax_kernel(const __grid_constant__ QuantizeParams params, KnownAmax known) {
  if (is_noop(params.noop_flag)) return;
  const float amax = read_amax(known.rowwise, params);
  write_amax(params, amax, amax);
}

// Whether the code that the device runs has the instruction that waits for the kernel before.
template <auto Kernel>
bool can_wait() {
  static std::atomic<int> cache[kMaxDevices];
  const int version = cached_on_device(cache, [](int) {
    cudaFuncAttributes attributes{};
    check_cuda(cudaFuncGetAttributes(&attributes, Kernel), "quantize_kernel");
    return attributes.ptxVersion;
  });
  return version >= 90;
}

// Whether the first blocks may load their tiles while amax_kernel is finishing: with few tiles that costs more than it
// saves. What a block reads before it waits is older than amax_kernel, which itself is launched without overlap.
template <auto Kernel>
bool may_overlap(uint32_t tiles) {
  return tiles >= 2U * uint32_t(resident_blocks<Kernel>(kThreads)) && can_wait<Kernel>();
}

}  // namespace

void quantize_cuda(const QuantizeParams& params, bool after_amax, Stream stream) {
  if (params.x.rows == 0 || params.x.cols == 0) {  // no data, but an amax that was given is still the tensor's
    if (params.amax_source != AmaxSource::kBuffers) {
      write_amax_kernel<<<1, 1, 0, cudaStream_t(stream)>>>(params, known_amax(params));
      check_cuda(cudaGetLastError(), "write_amax_kernel");
    }
    return;
  }
  dispatch_cast(params, [&](auto dtype, auto rounding, auto with_rht, auto row_scaled) {
    const CastPlan<dtype()> plan(params);
    const uint32_t tiles = plan.tiling.count();
    constexpr auto kKernel = quantize_kernel<dtype(), rounding(), with_rht(), row_scaled()>;
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(tiles);
    config.blockDim = dim3(unsigned(threads_for(tiles)));
    config.stream = cudaStream_t(stream);
    config.attrs = &overlap;
    config.numAttrs = after_amax && may_overlap<kKernel>(tiles) ? 1 : 0;
    check_cuda(cudaLaunchKernelEx(&config, kKernel, plan, known_amax(params)), "quantize_kernel");
  });
}

}  // namespace nvfp4
