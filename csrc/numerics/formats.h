// The constants of NVFP4: block sizes and the ranges of its two element formats.
#pragma once

#include <cstdint>

namespace nvfp4 {

inline constexpr int kBlock = 16;        // elements that share one scale byte, along a line
inline constexpr int kBlockBytes = 8;    // their packed codes
inline constexpr float kE2M1Max = 6.0F;  // the largest magnitude of a code
inline constexpr float kE4M3Max = 448.0F;
inline constexpr int kDefaultE4M3Max = 448;  // largest scale byte that the encode scale aims at ...
inline constexpr int kReducedE4M3Max = 256;  // ... and the other bound that 4over6 may use
inline constexpr float kSixth = 1.0F / 6.0F;

// What a block with a NaN holds.
inline constexpr uint32_t kNanScaleByte = 0x7FU;
inline constexpr uint64_t kNanCodes = 0x7777777777777777ULL;

}  // namespace nvfp4
