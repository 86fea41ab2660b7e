#include "rng.h"

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>

#include "numerics/random.h"

#if defined(NVFP4_WITH_CUDA)
#include <ATen/cuda/CUDAGeneratorImpl.h>
#endif

namespace nvfp4 {
namespace {

PhiloxSource draw_cpu(const std::optional<at::Generator>& generator) {
  auto* const impl =
      at::get_generator_or_default<at::CPUGeneratorImpl>(generator, at::detail::getDefaultCPUGenerator());
  const std::lock_guard<std::mutex> lock(impl->mutex_);
  return {impl->random64(), 0, nullptr, nullptr};
}

#if defined(NVFP4_WITH_CUDA)
PhiloxSource draw_cuda(const std::optional<at::Generator>& generator, c10::Device device) {
  auto* const impl = at::get_generator_or_default<at::CUDAGeneratorImpl>(
      generator, at::cuda::detail::getDefaultCUDAGenerator(device.index()));
  const std::lock_guard<std::mutex> lock(impl->mutex_);
  const at::PhiloxCudaState state = impl->philox_cuda_state(kPhiloxOffsetStep);
  if (!state.captured_) return {state.seed_.val, state.offset_.val, nullptr, nullptr};
  return {0, state.offset_intragraph_, state.seed_.ptr, state.offset_.ptr};
}
#endif

}  // namespace

void check_random(const std::optional<at::Generator>& generator, const std::optional<RngState>& state,
                  c10::Device device) {
  if (generator.has_value() && generator->defined()) {
    // torch.Generator("cuda") names no device and serves the current one, as in torch's own operators.
    const c10::Device own = generator->device();
    TORCH_CHECK_VALUE(own.type() == device.type() && (!own.has_index() || own.index() == device.index()),
                      "generator: is on ", own, ", but x on ", device);
  }
  if (state.has_value()) {
    TORCH_CHECK_VALUE(state->offset % kPhiloxOffsetStep == 0, "rng_state: offset ", state->offset,
                      " is not a multiple of ", kPhiloxOffsetStep);
  }
}

PhiloxSource draw_random(const std::optional<at::Generator>& generator, const std::optional<RngState>& state,
                         c10::Device device) {
  if (state.has_value()) return {state->seed, state->offset, nullptr, nullptr};
#if defined(NVFP4_WITH_CUDA)
  if (device.is_cuda()) return draw_cuda(generator, device);
#else
  (void)device;
#endif
  return draw_cpu(generator);
}

}  // namespace nvfp4
