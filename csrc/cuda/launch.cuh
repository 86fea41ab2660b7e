// What every launcher needs: error checks and facts about the current device.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>

#include "tile.cuh"

namespace nvfp4 {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // so that the next caller does not meet this error again
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

inline constexpr int kMaxDevices = 64;

inline int current_device() {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

// A number that is asked of the driver once a device.
template <class Query>
int cached_on_device(std::atomic<int> (&cache)[kMaxDevices], Query query) {
  const int device = current_device();
  if (device >= kMaxDevices) return query(device);
  int value = cache[device].load(std::memory_order_relaxed);
  if (value == 0) {
    value = query(device);
    cache[device].store(value, std::memory_order_relaxed);
  }
  return value;
}

inline int multiprocessor_count() {
  static std::atomic<int> cache[kMaxDevices];
  return cached_on_device(cache, [](int device) {
    int count = 0;
    check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    return count;
  });
}

// Threads of a block for a kernel with one tile a block.
inline int threads_for(int64_t tiles) { return tiles <= 2 * multiprocessor_count() ? kManyThreads : kThreads; }

// Blocks of a kernel that fit on the device at once.
template <auto Kernel>
int resident_blocks(int threads) {
  static std::atomic<int> cache[kMaxDevices];
  return cached_on_device(cache, [=](int) {
    int blocks = 0;
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, Kernel, threads, 0), "occupancy");
    if (blocks == 0) throw std::runtime_error("nvfp4_quant: a kernel does not fit on this device");
    return blocks * multiprocessor_count();
  });
}

}  // namespace nvfp4
