// Steps 2 to 7 of the chain on the CPU, in every mode; numbers as in the contract.
#include "cpu/tile.h"
#include "dispatch.h"
#include "kernels.h"
#include "numerics/fp4.h"
#include "numerics/fp8.h"
#include "numerics/random.h"
#include "numerics/scale.h"

namespace nvfp4 {
namespace {

using Block = float[kBlock];

struct Direction {
  DirectionBuffers buffers;
  DirectionLayout<int64_t> layout;
  bool columnwise;
};

float block_max(const Block& block) {
  float m = 0.0F;
  for (const float x : block) m = max_spread_nan(m, magnitude(x));
  return m;
}

float tile_max(const Tile& tile) {
  Block m = {};
  for (const Block& block : tile) {
    for (int j = 0; j < kBlock; ++j) m[j] = max_spread_nan(m[j], magnitude(block[j]));
  }
  return block_max(m);
}

// 4over6: the error of a block that is cast with this scale byte.
float candidate_error_sum(const QuantizeParams& p, const Block& block, uint32_t byte, const TensorScale& tensor,
                          float amax) {
  return candidate_error([&](int i) { return magnitude(block[i]); }, byte, amax, tensor.decode, p.e4m3_max,
                         p.squared_error);
}

// The sums of 16 rows as a halving tree with distances 8, 4, 2, 1.
float tile_error_sum(const QuantizeParams& p, const Tile& tile, uint32_t byte, const TensorScale& tensor, float amax) {
  Block sums;
  for (int i = 0; i < kBlock; ++i) sums[i] = candidate_error_sum(p, tile[i], byte, tensor, amax);
  for (int distance = kBlock / 2; distance > 0; distance /= 2) {
    for (int i = 0; i < distance; ++i) sums[i] += sums[i + distance];
  }
  return sums[0];
}

template <class ErrorOf>
uint32_t choose_candidate(float max, const TensorScale& tensor, const ErrorOf& error_of) {
  const ScaleCandidates candidates = scale_candidates(max, tensor.encode);
  return error_of(candidates.four) < error_of(candidates.six) ? candidates.four : candidates.six;
}

// Steps 4 and 5 of one block with its own scale.
template <Rounding R>
uint32_t block_scale_byte(const QuantizeParams& p, const Block& block, const TensorScale& tensor, float amax) {
  const float max = block_max(block);
  if constexpr (R != Rounding::kFourOverSix) return encode_e4m3(max * tensor.block_multiplier);
  return choose_candidate(max, tensor,
                          [&](uint32_t byte) { return candidate_error_sum(p, block, byte, tensor, amax); });
}

// The same for a tile with one scale. 4over6: `tile` is one of x, never its transpose, whose sums may differ.
template <Rounding R>
uint32_t tile_scale_byte(const QuantizeParams& p, const Tile& tile, float amax) {
  const TensorScale tensor = tensor_scale(amax, p.e4m3_max);
  const float max = tile_max(tile);
  if constexpr (R != Rounding::kFourOverSix) return encode_e4m3(max * tensor.block_multiplier);
  return choose_candidate(max, tensor, [&](uint32_t byte) { return tile_error_sum(p, tile, byte, tensor, amax); });
}

// Step 7: 16 codes, element 0 in the lowest bits.
template <Rounding R>
uint64_t cast_block(const QuantizeParams& p, const Direction& d, const Block& block, float multiplier, uint64_t index) {
  uint32_t codes[kBlock];
  if constexpr (R == Rounding::kStochastic) {
    const PhiloxBlock random = block_random_bytes(p.random.seed, p.random.offset, index, d.columnwise);
    for (int j = 0; j < kBlock; ++j) codes[j] = encode_e2m1_stochastic(block[j] * multiplier, random_byte(random, j));
  } else {
    for (int j = 0; j < kBlock; ++j) codes[j] = encode_e2m1(block[j] * multiplier);
  }
  uint64_t packed = 0;
  for (int j = 0; j < kBlock; ++j) packed |= uint64_t(codes[j]) << (4 * j);
  return packed;
}

void store_codes(uint8_t* target, uint64_t packed) {
  for (int i = 0; i < kBlockBytes; ++i) target[i] = uint8_t(packed >> (8 * i));  // one store on little-endian machines
}

// Casts block number `block` of `count` lines; shared_byte: the scale byte of a whole tile, or null.
template <Rounding R>
void cast_lines(const QuantizeParams& p, const Direction& d, const Tile& lines, int64_t first_line, int count,
                int64_t block, const uint32_t* shared_byte) {
  const DirectionLayout<int64_t>& layout = d.layout;
  float amax = d.buffers.amax[0];
  TensorScale tensor = tensor_scale(amax, p.e4m3_max);
  for (int i = 0; i < count; ++i) {
    const int64_t line = first_line + i;
    if (p.row_scaled) {
      amax = d.buffers.amax[line];
      tensor = tensor_scale(amax, p.e4m3_max);
    }
    const uint32_t byte = shared_byte != nullptr ? *shared_byte : block_scale_byte<R>(p, lines[i], tensor, amax);
    const float multiplier = element_multiplier(decode_e4m3(byte), tensor.decode);
    const uint64_t index = uint64_t(line * layout.blocks() + block);
    d.buffers.scale[scale_offset(line, block, layout.scale_blocks(), p.swizzled)] = uint8_t(byte);
    store_codes(d.buffers.data + index * kBlockBytes, cast_block<R>(p, d, lines[i], multiplier, index));
  }
}

template <DType D, Rounding R>
void quantize_tiles(const QuantizeParams& p) {
  const Direction rowwise = {p.rowwise, {p.x.rows, p.x.cols}, false};
  const Direction columnwise = {p.columnwise, {p.x.cols, p.x.rows}, true};
  const bool with_rowwise = p.rowwise.data != nullptr;
  const bool with_columnwise = p.columnwise.data != nullptr;
  const float* any_amax = with_rowwise ? p.rowwise.amax : p.columnwise.amax;

  for_each_tile<D>(p.x, [&](const Tile& tile, const TilePlace& place) {
    uint32_t tile_byte = 0;
    const uint32_t* shared_byte = p.two_d ? &tile_byte : nullptr;
    if (p.two_d) tile_byte = tile_scale_byte<R>(p, tile, *any_amax);
    if (with_rowwise) cast_lines<R>(p, rowwise, tile, place.row, place.rows, place.col / kBlock, shared_byte);
    if (!with_columnwise) return;
    alignas(64) Tile lines;
    columnwise_lines<D>(tile, p.with_rht, p.sign_mask, lines);
    if (p.two_d && p.with_rht) tile_byte = tile_scale_byte<R>(p, lines, *p.columnwise.amax);
    cast_lines<R>(p, columnwise, lines, place.col, place.cols, place.row / kBlock, shared_byte);
  });
}

void fill_given_amax(const QuantizeParams& p, const DirectionBuffers& buffers) {
  if (buffers.amax == nullptr) return;
  *buffers.amax = p.amax_source == AmaxSource::kPointer ? *p.given_amax : p.given_amax_value;
}

void prepare_amax(const QuantizeParams& p) {
  if (p.amax_source == AmaxSource::kCompute) {
    amax_cpu({p.x, p.rowwise.amax, p.columnwise.amax, nullptr, p.with_rht, p.sign_mask, p.row_scaled});
  } else if (p.amax_source != AmaxSource::kBuffers) {
    fill_given_amax(p, p.rowwise);
    fill_given_amax(p, p.columnwise);
  }
}

// The padding; scales that belong to blocks are overwritten.
void clear_scales(const DirectionBuffers& buffers, const DirectionLayout<int64_t>& layout) {
  if (buffers.scale != nullptr) std::fill_n(buffers.scale, layout.scale_lines() * layout.scale_blocks(), uint8_t(0));
}

}  // namespace

void quantize_cpu(const QuantizeParams& p) {
  if (p.noop_flag != nullptr && *p.noop_flag == 1.0F) return;
  prepare_amax(p);
  if (p.x.rows == 0 || p.x.cols == 0) return;
  clear_scales(p.rowwise, {p.x.rows, p.x.cols});
  clear_scales(p.columnwise, {p.x.cols, p.x.rows});
  dispatch_dtype(p.x.dtype, [&](auto dtype) {
    dispatch_rounding(p.rounding,
                      [&](auto rounding) { quantize_tiles<decltype(dtype)::value, decltype(rounding)::value>(p); });
  });
}

}  // namespace nvfp4
