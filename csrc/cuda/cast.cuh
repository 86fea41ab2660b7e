// The cast of one tile in shared memory: scale bytes and codes of both directions.
#pragma once

#include "encode.cuh"
#include "reduce.cuh"

namespace nvfp4 {

// The scale bytes of one tile, kept until a barrier so that they leave four at a time.
struct ScaleStage {
  alignas(4) uint8_t rowwise[kTileRows * kTileColBlocks<DType::kBFloat16>];    // [row, block]
  alignas(4) uint8_t columnwise[kTileCols<DType::kBFloat16> * kTileRowBlocks];  // [column, block]
};

// What all tiles of one tensor share, in shared memory.
struct CastShared {
  float multiplier[2][128];  // by direction and scale byte, once S_dec is known; not if row-scaled
  uint8_t tile_byte[kTileRowBlocks][kTileColBlocks<DType::kBFloat16>];  // 2-D: the scale bytes of the tiles of x
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

// Writes the staged bytes of a tile, and zero for what lies in the padding of the buffer. Words: four blocks of a line.
template <int Lines, int Words>
__device__ __forceinline__ void write_scales(const Direction& direction, int64_t line, int64_t block, bool swizzled,
                                             const uint8_t* stage) {
  const int64_t scale_blocks = direction.layout.scale_blocks();
  const int lines = clamp_extent(direction.layout.lines - line, Lines);
  const int blocks = clamp_extent(direction.layout.blocks() - block, Words * kScaleBlockAlign);
  const int padded_lines = clamp_extent(direction.layout.scale_lines() - line, Lines);
  const int padded_blocks = clamp_extent(scale_blocks - block, Words * kScaleBlockAlign);
  uint8_t* scale = direction.buffers.scale + scale_offset(line, block, scale_blocks, swizzled);
#pragma unroll
  for (int i = threadIdx.x; i < Lines * Words; i += kThreads) {
    const int l = i / Words;
    const int b = i % Words * kScaleBlockAlign;
    if (l >= padded_lines || b >= padded_blocks) continue;
    uint32_t word = reinterpret_cast<const uint32_t*>(stage)[i];
    if (blocks - b < kScaleBlockAlign) word &= (1U << (8 * max(0, blocks - b))) - 1U;
    if (l >= lines) word = 0U;
    *reinterpret_cast<uint32_t*>(scale + scale_offset(l, b, scale_blocks, swizzled)) = word;
  }
}

template <Rounding R, bool RowScaled>
struct Caster {
  const QuantizeParams& params;
  Philox philox;

  __device__ __forceinline__ LineScale line_scale(const Direction& direction, int64_t line) const {
    if constexpr (RowScaled) {
      const float amax = __ldcg(direction.buffers.amax + line);
      return {amax, tensor_scale(amax, params.e4m3_max)};
    } else {
      return direction.tensor;
    }
  }

  // Step 5: the scale byte of a block, from its maximum.
  template <class Block>
  __device__ __forceinline__ uint32_t scale_byte(const Block& x, float block_max, const LineScale& line) const {
    if constexpr (R == Rounding::kFourOverSix) {
      const ScaleCandidates candidates = scale_candidates(block_max, line.scale.encode);
      return choose_candidate(candidates, block_errors(x, candidates, line, params.e4m3_max, params.squared_error));
    } else {
      return ptx::encode_e4m3(block_max * line.scale.block_multiplier);
    }
  }

  // Steps 6 and 7.
  template <class Block>
  __device__ __forceinline__ uint2 codes(const Direction& direction, int64_t line, int64_t block, const Block& x,
                                         uint32_t byte, const LineScale& scale) const {
    const float multiplier =
        RowScaled ? element_multiplier(decode_e4m3(byte), scale.scale.decode) : direction.multiplier[byte];
    PhiloxBlock random{};
    if constexpr (R == Rounding::kStochastic) {
      const uint64_t index = uint64_t(line) * direction.layout.blocks() + block;
      random = block_random_bytes(philox.seed, philox.offset, index, direction.columnwise);
    }
    return encode_block<R>(x, byte, multiplier, random);
  }
};

template <DType D, Rounding R, bool RowScaled>
__device__ __forceinline__ void cast_rows(const Caster<R, RowScaled>& caster, const Direction& direction,
                                          TileOrigin origin, const uint8_t* tile, const CastShared& shared,
                                          ScaleStage& stage) {
  constexpr int kBlocks = kTileColBlocks<D>;
  constexpr int kStep = kThreads / kBlocks;
  const int64_t line_bytes = direction.layout.line_bytes();
  const int block_in_tile = threadIdx.x % kBlocks;
  const int64_t block = origin.col / kBlock + block_in_tile;
  if (block >= direction.layout.blocks()) return;
  const int rows = clamp_extent(direction.layout.lines - origin.row, kTileRows);
  int row = threadIdx.x / kBlocks;
  uint8_t* data = direction.buffers.data + (origin.row + row) * line_bytes + block * kBlockBytes;
#pragma unroll 1
  for (; row < rows; row += kStep, data += kStep * line_bytes) {
    const RowBlock<D> x(tile, row, block_in_tile);
    const LineScale scale = caster.line_scale(direction, origin.row + row);
    uint32_t byte;
    if (caster.params.two_d) {
      byte = shared.tile_byte[row / kBlock][block_in_tile];
    } else {
      const auto max = [](auto a, auto b) { return Element<D>::max_spread_nan(a, b); };
      byte = caster.scale_byte(x, pair_max_spread_nan<D>(x.reduce(max)), scale);
    }
    stage.rowwise[row * kBlocks + block_in_tile] = uint8_t(byte);
    __stcs(reinterpret_cast<uint2*>(data), caster.codes(direction, origin.row + row, block, x, byte, scale));
  }
}

// One column of a pair, untransformed or transformed.
template <class Block, Rounding R, bool RowScaled>
__device__ __forceinline__ void cast_column(const Caster<R, RowScaled>& caster, const Direction& direction, int64_t line,
                                            int64_t block, const Block& x, uint32_t byte, const LineScale& scale,
                                            uint8_t* data, uint8_t* stage) {
  *stage = uint8_t(byte);
  __stcs(reinterpret_cast<uint2*>(data), caster.codes(direction, line, block, x, byte, scale));
}

template <DType D, Rounding R, bool WithRht, bool RowScaled>
__device__ __forceinline__ void cast_columns(const Caster<R, RowScaled>& caster, const Direction& direction,
                                             TileOrigin origin, const uint8_t* tile, const CastShared& shared,
                                             ScaleStage& stage) {
  const QuantizeParams& params = caster.params;
  const int64_t line_bytes = direction.layout.line_bytes();
  const ColumnLane lane;
  const int64_t block = origin.row / kBlock + lane.row_block;
  const bool in_line = block < direction.layout.blocks();
  int col = threadIdx.x / 32 * kBlock + lane.pair * 2;
  uint8_t* data = direction.buffers.data + (origin.col + col) * line_bytes + block * kBlockBytes;
#pragma unroll 1
  for (; col < kTileCols<D>; col += kWarps * kBlock, data += kWarps * kBlock * line_bytes) {
    const ColumnPair<D> x(tile, lane.row_block, col);
    const auto pair_max = x.reduce([](auto a, auto b) { return Element<D>::max_spread_nan(a, b); });
    const auto float_max = [](float a, float b) { return ptx::max_spread_nan_f32(a, b); };
    float tile_max = 0.0F;
    if (WithRht && params.two_d) {
#pragma unroll 1
      for (int which = 0; which < 2; ++which) {
        const TransformedBlock y(ColumnBlock<D>{x, which}, params.sign_mask);
        tile_max = float_max(tile_max, y.reduce(float_max));
      }
      tile_max = group_max_spread_nan<8>(tile_max, kTileRowBlocks);
    }
    if (!in_line) continue;
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const int64_t line = origin.col + col + which;
      if (line >= direction.layout.lines) continue;
      const ColumnBlock<D> column{x, which};
      const LineScale scale = caster.line_scale(direction, line);
      uint8_t* staged = stage.columnwise + (col + which) * kTileRowBlocks + lane.row_block;
      uint8_t* target = data + which * line_bytes;
      if constexpr (WithRht) {
        const TransformedBlock y(column, params.sign_mask);
        const float block_max = params.two_d ? tile_max : y.reduce(float_max);
        cast_column(caster, direction, line, block, y, caster.scale_byte(y, block_max, scale), scale, target, staged);
      } else {
        const float block_max = which == 0 ? Element<D>::low(pair_max) : Element<D>::high(pair_max);
        const uint32_t byte = params.two_d ? uint32_t(shared.tile_byte[lane.row_block][col / kBlock])
                                           : caster.scale_byte(column, block_max, scale);
        cast_column(caster, direction, line, block, column, byte, scale, target, staged);
      }
    }
  }
}

// 2-D: the scale bytes of the 16x16 tiles of x. 4over6 decides by the errors of its 16 rows, summed as a halving tree.
template <DType D, Rounding R>
__device__ inline void choose_tile_bytes(const QuantizeParams& params, const LineScale& tensor, const uint8_t* tile,
                                         CastShared& shared) {
  constexpr int kBlocks = kTileColBlocks<D>;
  const int row_in_block = threadIdx.x % kBlock;
  const auto max = [](auto a, auto b) { return Element<D>::max_spread_nan(a, b); };
#pragma unroll 1
  for (int i = threadIdx.x / kBlock; i < kTileRowBlocks * kBlocks; i += kThreads / kBlock) {
    const RowBlock<D> x(tile, i / kBlocks * kBlock + row_in_block, i % kBlocks);
    const float tile_max = group_max_spread_nan<kBlock>(pair_max_spread_nan<D>(x.reduce(max)));
    uint32_t byte;
    if constexpr (R == Rounding::kFourOverSix) {
      const ScaleCandidates candidates = scale_candidates(tile_max, tensor.scale.encode);
      CandidateErrors errors = block_errors(x, candidates, tensor, params.e4m3_max, params.squared_error);
#pragma unroll
      for (int distance = kBlock / 2; distance > 0; distance /= 2) {
        errors.six += __shfl_xor_sync(0xFFFFFFFFU, errors.six, distance);
        errors.four += __shfl_xor_sync(0xFFFFFFFFU, errors.four, distance);
      }
      byte = choose_candidate(candidates, errors);
    } else {
      byte = ptx::encode_e4m3(tile_max * tensor.scale.block_multiplier);
    }
    if (row_in_block == 0) shared.tile_byte[i / kBlocks][i % kBlocks] = uint8_t(byte);
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
    const float scale = decode_e4m3(threadIdx.x % 128);
    shared.multiplier[0][threadIdx.x % 128] = element_multiplier(scale, rowwise.tensor.scale.decode);
    if (WithRht) shared.multiplier[1][threadIdx.x % 128] = element_multiplier(scale, columnwise.tensor.scale.decode);
  }

  // Called by the whole block with a complete tile. A barrier must follow before the tile is overwritten, and before the
  // stage is written out.
  __device__ __forceinline__ void cast(TileOrigin origin, const uint8_t* tile, CastShared& shared,
                                       ScaleStage& stage) const {
    if (caster.params.two_d) {
      choose_tile_bytes<D, R>(caster.params, rowwise.tensor, tile, shared);
      __syncthreads();
    }
    if (rowwise.buffers.data != nullptr) cast_rows<D>(caster, rowwise, origin, tile, shared, stage);
    if (columnwise.buffers.data != nullptr) cast_columns<D, R, WithRht>(caster, columnwise, origin, tile, shared, stage);
  }

  __device__ __forceinline__ void write_out(TileOrigin origin, const ScaleStage& stage) const {
    const bool swizzled = caster.params.swizzled;
    if (rowwise.buffers.data != nullptr) {
      write_scales<kTileRows, kTileColBlocks<D> / kScaleBlockAlign>(rowwise, origin.row, origin.col / kBlock, swizzled,
                                                                    stage.rowwise);
    }
    if (columnwise.buffers.data != nullptr) {
      write_scales<kTileCols<D>, 1>(columnwise, origin.col, origin.row / kBlock, swizzled, stage.columnwise);
    }
  }
};

}  // namespace nvfp4
