// Subnormal numbers count: while a guard lives, its thread neither flushes results to zero nor reads inputs as zero.
#pragma once

#include <cstdint>

#if defined(__SSE__) || defined(_M_X64)
#include <xmmintrin.h>
#endif

namespace nvfp4 {

#if defined(__SSE__) || defined(_M_X64)
using FloatMode = unsigned int;
inline constexpr FloatMode kFlushBits = 0x8040U;  // MXCSR: FTZ is bit 15, DAZ bit 6
inline FloatMode float_mode() { return _mm_getcsr(); }
inline void set_float_mode(FloatMode mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
using FloatMode = uint64_t;
inline constexpr FloatMode kFlushBits = (1U << 24) | (1U << 19);  // FPCR: FZ and FZ16
inline FloatMode float_mode() {
  FloatMode mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
inline void set_float_mode(FloatMode mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
#else
#error "nvfp4_quant: do not know how to keep subnormal numbers on this processor"
#endif

class ExactFloatGuard {
 public:
  ExactFloatGuard() : saved_(float_mode()) {
    if ((saved_ & kFlushBits) != 0) set_float_mode(saved_ & ~kFlushBits);
  }
  ~ExactFloatGuard() {
    if ((saved_ & kFlushBits) != 0) set_float_mode(saved_);
  }
  ExactFloatGuard(const ExactFloatGuard&) = delete;
  ExactFloatGuard& operator=(const ExactFloatGuard&) = delete;

 private:
  FloatMode saved_;
};

}  // namespace nvfp4
