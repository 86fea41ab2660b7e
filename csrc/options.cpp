#include "options.h"

#include <c10/util/Exception.h>

#include <cctype>
#include <string>

#include "numerics/hadamard.h"

namespace nvfp4 {

void Options::check() const {
  TORCH_CHECK_VALUE(rowwise || columnwise, "rowwise=False, columnwise=False: at least one direction is needed");
  TORCH_CHECK_VALUE(!(row_scaled_nvfp4 && with_2d_quantization),
                    "row_scaled_nvfp4=True does not go with with_2d_quantization=True: a tile spans 16 lines");
  TORCH_CHECK_VALUE(!(nvfp4_use_4over6 && with_rht), "nvfp4_use_4over6=True does not go with with_rht=True");
  TORCH_CHECK_VALUE(!(nvfp4_use_4over6 && stochastic_rounding),
                    "nvfp4_use_4over6=True does not go with stochastic_rounding=True");
  TORCH_CHECK_VALUE(nvfp4_e4m3_max == kDefaultE4M3Max || (nvfp4_use_4over6 && nvfp4_e4m3_max == kReducedE4M3Max),
                    "nvfp4_e4m3_max=", nvfp4_e4m3_max, ": must be ", kDefaultE4M3Max,
                    ", or with nvfp4_use_4over6=True ", kDefaultE4M3Max, " or ", kReducedE4M3Max);
}

uint32_t Options::sign_mask() const { return hadamard_sign_mask(with_random_sign_mask); }

uint64_t Options::packed() const {
  uint64_t bits = uint64_t(nvfp4_e4m3_max);
  for (const bool flag : {rowwise, columnwise, with_rht, with_random_sign_mask, with_2d_quantization,
                          stochastic_rounding, row_scaled_nvfp4, nvfp4_use_4over6, squared_error, optimize_for_gemm}) {
    bits = bits << 1 | uint64_t(flag);
  }
  return bits << 2 | uint64_t(schedule);
}

bool Options::operator==(const Options& other) const { return packed() == other.packed(); }

bool parse_err_mode(std::string_view mode) {
  std::string upper(mode);
  for (char& c : upper) c = char(std::toupper(static_cast<unsigned char>(c)));
  TORCH_CHECK_VALUE(upper == "MAE" || upper == "MSE", "nvfp4_4over6_err_mode='", mode, "': must be 'MAE' or 'MSE'");
  return upper == "MSE";
}

Schedule parse_schedule(std::string_view schedule) {
  for (const Schedule s : {Schedule::kAuto, Schedule::kSplit, Schedule::kFused}) {
    if (schedule_name(s) == schedule) return s;
  }
  TORCH_CHECK_VALUE(false, "schedule='", schedule, "': must be 'auto', 'split' or 'fused'");
}

std::string_view schedule_name(Schedule schedule) {
  switch (schedule) {
    case Schedule::kAuto:
      return "auto";
    case Schedule::kSplit:
      return "split";
    case Schedule::kFused:
      return "fused";
  }
  TORCH_INTERNAL_ASSERT(false);
}

}  // namespace nvfp4
