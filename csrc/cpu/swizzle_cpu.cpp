// Scale bytes between the compact and the swizzled order on the CPU.
#include <ATen/Parallel.h>

#include <cstring>

#include "kernels.h"

namespace nvfp4 {

void swizzle_cpu(const SwizzleParams& params) {
  for (const SwizzleJob& job : params.jobs) {
    at::parallel_for(0, job.lines, kScaleLineAlign, [&](int64_t begin, int64_t end) {
      for (int64_t line = begin; line < end; ++line) {
        for (int64_t block = 0; block < job.blocks; block += kScaleBlockAlign) {
          const int64_t compact = scale_offset(line, block, job.blocks, false);
          const int64_t swizzled = scale_offset(line, block, job.blocks, true);
          const int64_t from = params.inverse ? swizzled : compact;
          const int64_t to = params.inverse ? compact : swizzled;
          std::memcpy(job.target + to, job.source + from, kScaleBlockAlign);
        }
      }
    });
  }
}

}  // namespace nvfp4
