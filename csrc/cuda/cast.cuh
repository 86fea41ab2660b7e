// The cast of one tile in shared memory: scale bytes and codes of both directions.
#pragma once

#include "encode.cuh"
#include "reduce.cuh"
#include "tile.cuh"

namespace nvfp4 {

// What all tiles of one tensor share, in shared memory.
struct CastShared {
  float multiplier[2][128];  // by direction and scale byte, once S_dec is known; not if row-scaled
  uint8_t tile_byte[kTileRowBlocks][kTileColBlocks];  // 2-D: the scale bytes of the tiles of x
};

struct Philox {
  uint64_t seed;
  uint64_t offset;
};

__device__ inline Philox unpack(const PhiloxSource& source) {
  if (source.seed_pointer == nullptr) return {source.seed, source.offset};
  return {uint64_t(*source.seed_pointer), source.offset + uint64_t(*source.offset_pointer)};
}

// One direction of the tensor: its layout, its buffers, its amax unless every line has its own.
struct Direction {
  DirectionLayout<int64_t> layout;
  DirectionBuffers buffers;
  LineScale tensor;
  const float* multiplier;
  bool columnwise;
};

__device__ __forceinline__ int clamp_extent(int64_t left, int extent) {
  return int(max(int64_t(0), min(left, int64_t(extent))));
}

// One direction at one tile of `extent` lines; lines and blocks count from the tile's origin.
struct TileOutput {
  int64_t line;
  int64_t block;
  int lines;  // of the tensor; the scale buffers go on to the end of their padding
  int blocks;
  int scale_lines;
  int scale_blocks;
  uint8_t* data;
  uint8_t* scale;

  __device__ __forceinline__ TileOutput(const Direction& d, int64_t first_line, int64_t first_block, int extent,
                                        int block_extent, bool swizzled)
      : line(first_line),
        block(first_block),
        lines(clamp_extent(d.layout.lines - first_line, extent)),
        blocks(clamp_extent(d.layout.blocks() - first_block, block_extent)),
        scale_lines(clamp_extent(d.layout.scale_lines() - first_line, extent)),
        scale_blocks(clamp_extent(d.layout.scale_blocks() - first_block, block_extent)),
        data(d.buffers.data + (first_line * d.layout.blocks() + first_block) * kBlockBytes),
        scale(d.buffers.scale + scale_offset(first_line, first_block, d.layout.scale_blocks(), swizzled)) {}

  __device__ __forceinline__ bool holds(int l, int b) const { return l < lines && b < blocks; }
};

// Collects the bytes of four neighbouring lanes into a word, in all four.
__device__ __forceinline__ uint32_t gather_bytes(uint32_t byte) {
  uint32_t word = byte << (8 * (threadIdx.x % kScaleBlockAlign));
  word |= __shfl_xor_sync(0xFFFFFFFFU, word, 1);
  word |= __shfl_xor_sync(0xFFFFFFFFU, word, 2);
  return word;
}

template <Rounding R, bool RowScaled>
struct Caster {
  const QuantizeParams& params;
  Philox philox;

  __device__ __forceinline__ LineScale line_scale(const Direction& direction, const TileOutput& out, int l) const {
    if constexpr (RowScaled) {
      const float amax = l < out.lines ? __ldcg(direction.buffers.amax + out.line + l) : 0.0F;
      return {amax, tensor_scale(amax, params.e4m3_max)};
    } else {
      return direction.tensor;
    }
  }

  // Step 5: the scale byte of a block, from its maximum.
  __device__ __forceinline__ uint32_t scale_byte(const float* v, float block_max, const LineScale& line) const {
    if constexpr (R == Rounding::kFourOverSix) {
      const ScaleCandidates candidates = scale_candidates(block_max, line.scale.encode);
      return choose_candidate(candidates, block_errors(v, candidates, line, params.e4m3_max, params.squared_error));
    } else {
      return ptx::encode_e4m3(block_max * line.scale.block_multiplier);
    }
  }

  // Steps 6 and 7, and the stores. The blocks of one scale word lie in neighbouring lanes, the first in lane 4 n.
  __device__ __forceinline__ void write(const Direction& direction, const TileOutput& out, int l, int b, const float* v,
                                        uint32_t byte, const LineScale& scale) const {
    const bool held = out.holds(l, b);
    if (held) {
      const float multiplier =
          RowScaled ? element_multiplier(decode_e4m3(byte), scale.scale.decode) : direction.multiplier[byte];
      PhiloxBlock random{};
      if constexpr (R == Rounding::kStochastic) {
        const uint64_t index = uint64_t(out.line + l) * direction.layout.blocks() + out.block + b;
        random = block_random_bytes(philox.seed, philox.offset, index, direction.columnwise);
      }
      const uint2 codes = encode_block<R>(v, byte, multiplier, random);
      __stcs(reinterpret_cast<uint2*>(out.data + l * direction.layout.line_bytes() + b * kBlockBytes), codes);
    }
    const uint32_t word = gather_bytes(held ? byte : 0U);
    if (threadIdx.x % kScaleBlockAlign == 0 && l < out.scale_lines && b < out.scale_blocks) {
      const int64_t offset = scale_offset(l, b, direction.layout.scale_blocks(), params.swizzled);
      *reinterpret_cast<uint32_t*>(out.scale + offset) = word;
    }
  }
};

template <DType D, Rounding R, bool RowScaled>
__device__ __forceinline__ void cast_rows(const Caster<R, RowScaled>& caster, const Direction& direction,
                                          TileOrigin origin, const uint8_t* tile, const CastShared& shared) {
  const bool two_d = caster.params.two_d;
  const TileOutput out(direction, origin.row, origin.col / kBlock, kTileRows, kTileColBlocks, caster.params.swizzled);
  const int block = threadIdx.x % kTileColBlocks;
#pragma unroll 1
  for (int row = threadIdx.x / kTileColBlocks; row < kTileRows; row += kThreads / kTileColBlocks) {
    const RowBlock<D> x(tile, row, block);
    float v[kBlock];
#pragma unroll
    for (int e = 0; e < kBlock; ++e) v[e] = x.value(e);
    const LineScale scale = caster.line_scale(direction, out, row);
    uint32_t byte;
    if (two_d) {
      byte = shared.tile_byte[row / kBlock][block];
    } else {
      const auto max = [](auto a, auto b) { return Element<D>::max_spread_nan(a, b); };
      byte = caster.scale_byte(v, pair_max_spread_nan<D>(x.reduce(max)), scale);
    }
    caster.write(direction, out, row, block, v, byte, scale);
  }
}

// The largest magnitude of both columns after the transform; a NaN spreads.
template <DType D>
__device__ __forceinline__ float transformed_max(const ColumnPair<D>& x, uint32_t sign_mask) {
  float m = 0.0F;
#pragma unroll 1
  for (int which = 0; which < 2; ++which) {
    float y[kBlock];
    transformed_column(x, which, sign_mask, y);
#pragma unroll
    for (int e = 0; e < kBlock; ++e) m = ptx::max_spread_nan_f32(m, fabsf(y[e]));
  }
  return m;
}

template <DType D, Rounding R, bool WithRht, bool RowScaled>
__device__ __forceinline__ void cast_columns(const Caster<R, RowScaled>& caster, const Direction& direction,
                                             TileOrigin origin, const uint8_t* tile, const CastShared& shared) {
  const QuantizeParams& params = caster.params;
  const ColumnLane lane;
  const TileOutput out(direction, origin.col, origin.row / kBlock, kTileCols, kTileRowBlocks, params.swizzled);
#pragma unroll 1
  for (int tile_block = threadIdx.x / 32; tile_block < kTileColBlocks; tile_block += kWarps) {
    const int col = tile_block * kBlock + lane.pair * 2;
    const ColumnPair<D> x(tile, lane.row_block, col);
    typename Element<D>::Pair m{};
    float tile_max = 0.0F;
    if constexpr (WithRht) {
      if (params.two_d) tile_max = group_max_spread_nan<8>(transformed_max(x, params.sign_mask), kTileRowBlocks);
    } else {
      m = x.reduce([](auto a, auto b) { return Element<D>::max_spread_nan(a, b); });
    }
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      float v[kBlock];
      float block_max = 0.0F;
      if constexpr (WithRht) {
        transformed_column(x, which, params.sign_mask, v);
#pragma unroll
        for (int e = 0; e < kBlock; ++e) block_max = ptx::max_spread_nan_f32(block_max, fabsf(v[e]));
        if (params.two_d) block_max = tile_max;
      } else {
#pragma unroll
        for (int e = 0; e < kBlock; ++e) v[e] = x.value(e, which);
        block_max = which == 0 ? Element<D>::low(m) : Element<D>::high(m);
      }
      const LineScale scale = caster.line_scale(direction, out, col + which);
      const uint32_t byte = params.two_d && !WithRht ? shared.tile_byte[lane.row_block][tile_block]
                                                     : caster.scale_byte(v, block_max, scale);
      caster.write(direction, out, col + which, lane.row_block, v, byte, scale);
    }
  }
}

// 2-D: the scale bytes of the 16x16 tiles of x. 4over6 decides by the errors of its 16 rows, summed as a halving tree.
template <DType D, Rounding R>
__device__ inline void choose_tile_bytes(const QuantizeParams& params, const LineScale& tensor, const uint8_t* tile,
                                         CastShared& shared) {
  const int row_in_block = threadIdx.x % kBlock;
  const auto max = [](auto a, auto b) { return Element<D>::max_spread_nan(a, b); };
#pragma unroll 1
  for (int i = threadIdx.x / kBlock; i < kTileRowBlocks * kTileColBlocks; i += kThreads / kBlock) {
    const int row_block = i / kTileColBlocks;
    const int block = i % kTileColBlocks;
    const RowBlock<D> x(tile, row_block * kBlock + row_in_block, block);
    const float tile_max = group_max_spread_nan<kBlock>(pair_max_spread_nan<D>(x.reduce(max)));
    uint32_t byte;
    if constexpr (R == Rounding::kFourOverSix) {
      float v[kBlock];
#pragma unroll
      for (int e = 0; e < kBlock; ++e) v[e] = x.value(e);
      const ScaleCandidates candidates = scale_candidates(tile_max, tensor.scale.encode);
      CandidateErrors errors = block_errors(v, candidates, tensor, params.e4m3_max, params.squared_error);
#pragma unroll
      for (int distance = kBlock / 2; distance > 0; distance /= 2) {
        errors.six += __shfl_xor_sync(0xFFFFFFFFU, errors.six, distance);
        errors.four += __shfl_xor_sync(0xFFFFFFFFU, errors.four, distance);
      }
      byte = choose_candidate(candidates, errors);
    } else {
      byte = ptx::encode_e4m3(tile_max * tensor.scale.block_multiplier);
    }
    if (row_in_block == 0) shared.tile_byte[row_block][block] = uint8_t(byte);
  }
}

// Everything that a tile's cast needs besides the tile, set up once the amaxes are known.
template <DType D, Rounding R, bool WithRht, bool RowScaled>
struct TensorCast {
  Caster<R, RowScaled> caster;
  Direction rowwise;
  Direction columnwise;

  // Fills the tables: a barrier must follow. Amaxes are unused if row-scaled.
  __device__ TensorCast(const QuantizeParams& params, float amax_rowwise, float amax_columnwise, CastShared& shared)
      : caster{params, R == Rounding::kStochastic ? unpack(params.random) : Philox{}},
        rowwise{{params.x.rows, params.x.cols}, params.rowwise, {}, shared.multiplier[0], false},
        columnwise{{params.x.cols, params.x.rows}, params.columnwise, {}, shared.multiplier[WithRht ? 1 : 0], true} {
    if constexpr (RowScaled) return;
    rowwise.tensor = {amax_rowwise, tensor_scale(amax_rowwise, params.e4m3_max)};
    columnwise.tensor = WithRht ? LineScale{amax_columnwise, tensor_scale(amax_columnwise, params.e4m3_max)}
                                : rowwise.tensor;
    const int byte = threadIdx.x % 128;
    const int direction = threadIdx.x / 128;
    if (direction < (WithRht ? 2 : 1)) {
      const float decode = direction == 0 ? rowwise.tensor.scale.decode : columnwise.tensor.scale.decode;
      shared.multiplier[direction][byte] = element_multiplier(decode_e4m3(byte), decode);
    }
  }

  // Called by the whole block with a complete tile; a barrier must follow before the tile is overwritten.
  __device__ __forceinline__ void cast(TileOrigin origin, const uint8_t* tile, CastShared& shared) const {
    if (caster.params.two_d) {
      choose_tile_bytes<D, R>(caster.params, rowwise.tensor, tile, shared);
      __syncthreads();
    }
    if (rowwise.buffers.data != nullptr) cast_rows<D>(caster, rowwise, origin, tile, shared);
    if (columnwise.buffers.data != nullptr) cast_columns<D, R, WithRht>(caster, columnwise, origin, tile, shared);
  }
};

}  // namespace nvfp4
