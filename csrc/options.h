// The options of a quantizer, and the rules of which go together.
#pragma once

#include <cstdint>
#include <string_view>

#include "numerics/formats.h"

namespace nvfp4 {

// Order of the work on CUDA; the bytes do not depend on it.
enum class Schedule : uint8_t {
  kAuto,
  kSplit,  // zero the amax, reduce, cast: three launches
  kFused,  // one launch
};

struct Options {
  bool rowwise = true;
  bool columnwise = true;
  bool with_rht = false;  // random Hadamard transform, column-wise only
  bool with_random_sign_mask = true;
  bool with_2d_quantization = false;
  bool stochastic_rounding = false;
  bool row_scaled_nvfp4 = false;
  bool nvfp4_use_4over6 = false;
  int64_t nvfp4_e4m3_max = kDefaultE4M3Max;
  bool squared_error = false;  // nvfp4_4over6_err_mode: "MSE" instead of "MAE"
  bool optimize_for_gemm = false;
  Schedule schedule = Schedule::kAuto;

  // Throws a ValueError that names the options that do not go together.
  void check() const;

  uint32_t sign_mask() const;
  std::string_view err_mode() const { return squared_error ? "MSE" : "MAE"; }

  bool operator==(const Options& other) const;
  bool operator!=(const Options& other) const { return !(*this == other); }
  uint64_t packed() const;  // all options as one number: equal options, equal numbers
};

bool parse_err_mode(std::string_view mode);  // in any case; true: squared error
Schedule parse_schedule(std::string_view schedule);
std::string_view schedule_name(Schedule schedule);

}  // namespace nvfp4
