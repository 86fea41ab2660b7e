#include "buffers.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>

#include "matrix_view.h"

#if defined(NVFP4_WITH_CUDA)
#include <ATen/cuda/EmptyTensor.h>
#endif

namespace nvfp4 {

void check_shape(at::IntArrayRef sizes) {
  TORCH_CHECK_VALUE(!sizes.empty(), "shape: expected at least one dimension, got []");
  for (const int64_t size : sizes) TORCH_CHECK_VALUE(size >= 0, "shape: negative size in ", sizes);
}

at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device, bool pin_memory) {
#if defined(NVFP4_WITH_CUDA)
  if (device.is_cuda()) return at::detail::empty_cuda(sizes, dtype, device, std::nullopt);
#endif
  if (device.is_cpu()) return at::detail::empty_cpu(sizes, dtype, pin_memory);
  return at::empty(sizes, at::TensorOptions().dtype(dtype).device(device));
}

Buffers allocate_buffers(const Options& options, at::IntArrayRef sizes, at::Device device, bool pin_memory) {
  Buffers out;
  for_each_buffer(options, sizes, [&](int index, const Shape<int64_t>& shape) {
    out[index] = allocate(shape, buffer_dtype(index), device, pin_memory);
  });
  return out;
}

Buffers allocate_meta_buffers(const Options& options, c10::SymIntArrayRef sizes) {
  Buffers out;
  for_each_buffer(options, sizes, [&](int index, const Shape<c10::SymInt>& shape) {
    out[index] = at::empty_symint(shape, at::TensorOptions().dtype(buffer_dtype(index)).device(at::kMeta));
  });
  return out;
}

namespace {

void check_written(const at::Tensor& buffer, at::ScalarType dtype, at::Device device, const char* argument) {
  TORCH_CHECK_TYPE(buffer.scalar_type() == dtype, argument, ": expected ", dtype_name(dtype), ", got ",
                   dtype_name(buffer.scalar_type()));
  TORCH_CHECK_VALUE(buffer.device() == device, argument, ": expected on ", device, " with x, got ", buffer.device());
  TORCH_CHECK_VALUE(buffer.is_contiguous(), argument, ": expected a contiguous tensor, got strides ", buffer.strides());
  TORCH_CHECK_VALUE(!buffer.requires_grad(), argument, ": requires grad and cannot be written in place");
}

void check_no_overlap(const at::Tensor& x, const Buffers& out) {
  MemoryRange ranges[kBufferCount + 1];
  const char* names[kBufferCount + 1];
  int count = 0;
  const auto add = [&](const at::Tensor& tensor, const char* name) {
    if (!tensor.defined()) return;
    ranges[count] = memory_range(tensor);
    names[count++] = name;
    for (int i = 0; i + 1 < count; ++i) {
      TORCH_CHECK_VALUE(!ranges[i].overlaps(ranges[count - 1]), name, ": shares memory with ", names[i]);
    }
  };
  add(x, "x");
  for (int i = 0; i < kBufferCount; ++i) add(out[i], kBufferNames[i]);
}

}  // namespace

void check_amax_buffer(const at::Tensor& amax, int64_t count, at::Device device, const char* argument) {
  check_written(amax, at::kFloat, device, argument);
  TORCH_CHECK_VALUE(amax.numel() == count, argument, ": expected ", count, " element(s), got shape ", amax.sizes());
}

void check_buffers(const Options& options, const at::Tensor& x, const Buffers& out) {
  std::array<bool, kBufferCount> wanted = {};
  for_each_buffer(options, x.sizes(), [&](int index, const Shape<int64_t>& shape) {
    const at::Tensor& buffer = out[index];
    const char* const name = kBufferNames[index];
    wanted[index] = true;
    TORCH_CHECK_VALUE(buffer.defined(), name, ": None, but the quantizer writes it");
    if (index >= kRowwiseAmax) {
      check_amax_buffer(buffer, c10::multiply_integers(shape), x.device(), name);
      return;
    }
    check_written(buffer, buffer_dtype(index), x.device(), name);
    TORCH_CHECK_VALUE(buffer.sizes() == at::IntArrayRef(shape), name, ": expected shape ", at::IntArrayRef(shape),
                      " for x of shape ", x.sizes(), ", got ", buffer.sizes());
    TORCH_CHECK_VALUE(!x.is_cuda() || is_word_aligned(buffer), name, ": expected memory aligned to ", kBlockBytes,
                      " bytes, got a view that starts at byte ", buffer.storage_offset(), " of its storage");
  });
  for (int i = 0; i < kBufferCount; ++i) {
    TORCH_CHECK_VALUE(wanted[i] || !out[i].defined(), kBufferNames[i], ": given, but the quantizer does not write it");
  }
  check_no_overlap(x, out);
}

bool is_word_aligned(const at::Tensor& buffer) {
  return reinterpret_cast<uintptr_t>(buffer.const_data_ptr()) % kBlockBytes == 0;
}

void check_float_element(const at::Tensor& tensor, at::Device device, const char* argument) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kFloat, argument, ": expected float32, got ",
                   dtype_name(tensor.scalar_type()));
  TORCH_CHECK_VALUE(tensor.numel() == 1, argument, ": expected one element, got shape ", tensor.sizes());
  TORCH_CHECK_VALUE(tensor.device() == device, argument, ": expected on ", device, " with x, got ", tensor.device());
}

void mark_written(const at::Tensor& tensor) {
  if (tensor.defined() && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace nvfp4
