// The cast of one tile in shared memory: scale bytes and codes of both directions.
#pragma once

#include "encode.cuh"
#include "reduce.cuh"

namespace nvfp4 {

// The scale bytes of one tile, kept until a barrier so that they leave four at a time.
struct ScaleStage {
  alignas(4) uint8_t rowwise[kTileRows * kTileColBlocks<DType::kBFloat16>];     // [row, block]
  alignas(4) uint8_t columnwise[kTileCols<DType::kBFloat16> * kTileRowBlocks];  // [column, block]
};

// What all tiles of one tensor share, in shared memory.
struct CastShared {
  float multiplier[2][128];  // by direction and scale byte, once S_dec is known; not if row-scaled
  uint8_t tile_byte[kTileRowBlocks][kTileColBlocks<DType::kBFloat16>];  // 2-D: the scale bytes of the tiles of x
};

// Registers of a thread that casts. Limits by blocks on a multiprocessor instead made the compiler choose fewer, for
// slower code; the fused kernel is faster with few blocks, whose last tiles take less long.
inline constexpr int kMaxRegisters = 96;
inline constexpr int kMaxRegistersWithRht = 128;

struct Philox {
  uint64_t seed;
  uint64_t offset;
};

__device__ inline Philox unpack(const PhiloxSource& source) {
  if (source.seed_pointer == nullptr) return {source.seed, source.offset};
  return {uint64_t(*source.seed_pointer), source.offset + uint64_t(*source.offset_pointer)};
}

// How much of tile t along one axis holds data: everything, the rest, nothing.
struct TileExtent {
  int32_t unit;
  int32_t full;
  int32_t rest;
  __device__ __forceinline__ uint32_t at(uint32_t t) const {
    return uint32_t(min(unit, max(0, min(full - int32_t(t), 1) * unit + rest)));
  }
};
inline TileExtent tile_extent(uint64_t length, int32_t unit) {
  return {unit, int32_t(length / unit), int32_t(length % unit)};
}

// One direction of the tensor in tiles of Lines lines x Blocks blocks.
template <int Lines, int Blocks>
struct DirectionPlan {
  TileExtent lines;
  TileExtent blocks;
  uint32_t line_blocks;
  uint32_t scale_blocks;  // with padding

  explicit DirectionPlan(const DirectionLayout<uint64_t>& layout)
      : lines(tile_extent(layout.lines, Lines)),
        blocks(tile_extent(layout.blocks(), Blocks)),
        line_blocks(uint32_t(layout.blocks())),
        scale_blocks(uint32_t(layout.scale_blocks())) {}
};

// What a kernel of the cast is told, worked out once on the host.
template <DType D>
struct CastPlan {
  QuantizeParams params;
  Tiling tiling;
  DirectionPlan<kTileRows, kTileColBlocks<D>> rowwise;
  DirectionPlan<kTileCols<D>, kTileRowBlocks> columnwise;

  explicit CastPlan(const QuantizeParams& p)
      : params(p),
        tiling(tiling_of<D>(p.x)),
        rowwise({uint64_t(p.x.rows), uint64_t(p.x.cols)}),
        columnwise({uint64_t(p.x.cols), uint64_t(p.x.rows)}) {}
};

// One direction in a kernel: its plan, its buffers, and its amax unless every line has its own.
template <int Lines, int Blocks>
struct Direction {
  const DirectionPlan<Lines, Blocks>& plan;
  const DirectionBuffers& buffers;
  const float* multiplier;
  LineScale tensor;

  __device__ __forceinline__ uint64_t line(uint32_t line_tile, uint32_t l) const {
    return uint64_t(line_tile) * Lines + l;
  }
  // Block (l, b) of a tile, counted along the lines of the tensor.
  __device__ __forceinline__ uint64_t block_index(uint32_t line_tile, uint32_t block_tile, uint32_t l,
                                                  uint32_t b) const {
    return line(line_tile, l) * plan.line_blocks + (block_tile * Blocks + b);
  }

  // Writes the staged bytes of a tile, and zero for what lies in the padding of the buffer.
  __device__ __forceinline__ void write_scales(uint32_t line_tile, uint32_t block_tile, bool swizzled,
                                               const uint8_t* stage) const {
    constexpr uint32_t kWords = Blocks / kScaleBlockAlign;
    static_assert(Lines * kWords <= kThreads);
    const uint32_t l = threadIdx.x / kWords;
    const uint32_t b = threadIdx.x % kWords * kScaleBlockAlign;
    if (l >= Lines || block_tile * Blocks + b >= plan.scale_blocks) return;
    uint32_t word = reinterpret_cast<const uint32_t*>(stage)[threadIdx.x];
    const int32_t missing = int32_t(b + kScaleBlockAlign - plan.blocks.at(block_tile));
    if (missing > 0) word = missing >= kScaleBlockAlign ? 0U : word & (0xFFFFFFFFU >> (8 * missing));
    if (l >= plan.lines.at(line_tile)) word = 0U;
    const uint64_t offset = scale_offset(line(line_tile, l), block_tile * Blocks + b, plan.scale_blocks, swizzled);
    *reinterpret_cast<uint32_t*>(buffers.scale + offset) = word;
  }
};

template <Rounding R, bool RowScaled>
struct Caster {
  const QuantizeParams& params;
  Philox philox;

  template <class AnyDirection>
  __device__ __forceinline__ LineScale line_scale(const AnyDirection& direction, uint64_t line) const {
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

  // Steps 6 and 7 of the block `index`, counted along the lines.
  template <class Block>
  __device__ __forceinline__ uint2 codes(const Block& x, uint32_t byte, const LineScale& line, const float* multipliers,
                                         uint64_t index, bool columnwise) const {
    const float multiplier = RowScaled ? element_multiplier(decode_e4m3(byte), line.scale.decode) : multipliers[byte];
    PhiloxBlock random{};
    if constexpr (R == Rounding::kStochastic) {
      random = block_random_bytes(philox.seed, philox.offset, index, columnwise);
    }
    return encode_block<R>(x, byte, multiplier, random);
  }
};

template <DType D, Rounding R, bool RowScaled, class RowDirection>
__device__ __forceinline__ void cast_rows(const Caster<R, RowScaled>& caster, const RowDirection& direction,
                                          TilePlace place, const uint8_t* tile, const CastShared& shared,
                                          ScaleStage& stage) {
  constexpr uint32_t kBlocks = kTileColBlocks<D>;
  const uint32_t step = blockDim.x / kBlocks;
  const uint32_t block = threadIdx.x % kBlocks;
  if (block >= direction.plan.blocks.at(place.col)) return;
  const uint32_t rows = direction.plan.lines.at(place.row);
  uint32_t row = threadIdx.x / kBlocks;
  uint64_t index = direction.block_index(place.row, place.col, row, block);
  const uint64_t index_step = uint64_t(step) * direction.plan.line_blocks;
  uint8_t* target = direction.buffers.data + index * kBlockBytes;
#pragma unroll 1
  for (; row < rows; row += step, index += index_step, target += index_step * kBlockBytes) {
    const RowBlock<D> x(tile, row, block);
    const LineScale scale = caster.line_scale(direction, direction.line(place.row, row));
    uint32_t byte;
    if (caster.params.two_d) {
      byte = shared.tile_byte[row / kBlock][block];
    } else {
      const auto max = [](auto a, auto b) { return Element<D>::larger_spread_nan(a, b); };
      byte = caster.scale_byte(x, pair_max_spread_nan<D>(x.reduce(max)), scale);
    }
    stage.rowwise[row * kBlocks + block] = uint8_t(byte);
    const uint2 codes = caster.codes(x, byte, scale, direction.multiplier, index, false);
    __stcs(reinterpret_cast<uint2*>(target), codes);
  }
}

template <DType D, Rounding R, bool WithRht, bool RowScaled, class ColumnDirection>
__device__ __forceinline__ void cast_columns(const Caster<R, RowScaled>& caster, const ColumnDirection& direction,
                                             TilePlace place, const uint8_t* tile, const CastShared& shared,
                                             ScaleStage& stage) {
  const QuantizeParams& params = caster.params;
  const ColumnLane lane;
  const bool in_line = lane.row_block < direction.plan.blocks.at(place.row);
  const uint32_t cols = direction.plan.lines.at(place.col);
  uint32_t col = threadIdx.x / 32 * kBlock + lane.pair * 2;
  uint64_t index = direction.block_index(place.col, place.row, col, lane.row_block);
  const uint32_t step = blockDim.x / 32 * kBlock;
  const uint64_t index_step = uint64_t(step) * direction.plan.line_blocks;
  uint8_t* target = direction.buffers.data + index * kBlockBytes;
#pragma unroll 1
  for (; col < kTileCols<D>; col += step, index += index_step, target += index_step * kBlockBytes) {
    const ColumnPair<D> x(tile, lane.row_block, col);
    const auto pair_max = x.reduce([](auto a, auto b) { return Element<D>::larger_spread_nan(a, b); });
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
      if (col + which >= cols) continue;
      const uint64_t to_line = which == 0 ? 0U : direction.plan.line_blocks;
      const ColumnBlock<D> column{x, which};
      const LineScale scale = caster.line_scale(direction, direction.line(place.col, col + which));
      uint32_t byte;
      uint2 codes;
      if constexpr (WithRht) {
        const TransformedBlock y(column, params.sign_mask);
        byte = caster.scale_byte(y, params.two_d ? tile_max : y.reduce(float_max), scale);
        codes = caster.codes(y, byte, scale, direction.multiplier, index + to_line, true);
      } else {
        const float block_max = fabsf(which == 0 ? Element<D>::low(pair_max) : Element<D>::high(pair_max));
        byte = params.two_d ? uint32_t(shared.tile_byte[lane.row_block][col / kBlock])
                            : caster.scale_byte(column, block_max, scale);
        codes = caster.codes(column, byte, scale, direction.multiplier, index + to_line, true);
      }
      stage.columnwise[(col + which) * kTileRowBlocks + lane.row_block] = uint8_t(byte);
      __stcs(reinterpret_cast<uint2*>(target + to_line * kBlockBytes), codes);
    }
  }
}

// 2-D: the scale bytes of the 16x16 tiles of x. 4over6 decides by the errors of its 16 rows, summed as a halving tree.
template <DType D, Rounding R>
__device__ inline void choose_tile_bytes(const QuantizeParams& params, const LineScale& tensor, const uint8_t* tile,
                                         CastShared& shared) {
  constexpr int kBlocks = kTileColBlocks<D>;
  if constexpr (R != Rounding::kFourOverSix) {
    const ColumnLane lane;
#pragma unroll 1
    for (uint32_t block = threadIdx.x / 32; block < kBlocks; block += blockDim.x / 32) {
      const ColumnPair<D> x(tile, lane.row_block, block * kBlock + lane.pair * 2);
      const auto pair_max = x.reduce([](auto a, auto b) { return Element<D>::larger_spread_nan(a, b); });
      const float tile_max = group_max_spread_nan<kBlock / 2>(pair_max_spread_nan<D>(pair_max), kTileRowBlocks);
      if (lane.pair == 0) {
        shared.tile_byte[lane.row_block][block] = uint8_t(ptx::encode_e4m3(tile_max * tensor.scale.block_multiplier));
      }
    }
  } else {
    const int row_in_block = threadIdx.x % kBlock;
#pragma unroll 1
    for (int i = threadIdx.x / kBlock; i < kTileRowBlocks * kBlocks; i += blockDim.x / kBlock) {
      const RowBlock<D> x(tile, i / kBlocks * kBlock + row_in_block, i % kBlocks);
      const auto row_max = x.reduce([](auto a, auto b) { return Element<D>::larger_spread_nan(a, b); });
      const float tile_max = group_max_spread_nan<kBlock>(pair_max_spread_nan<D>(row_max));
      const ScaleCandidates candidates = scale_candidates(tile_max, tensor.scale.encode);
      CandidateErrors errors = block_errors(x, candidates, tensor, params.e4m3_max, params.squared_error);
#pragma unroll
      for (int distance = kBlock / 2; distance > 0; distance /= 2) {
        errors.six += __shfl_xor_sync(0xFFFFFFFFU, errors.six, distance);
        errors.four += __shfl_xor_sync(0xFFFFFFFFU, errors.four, distance);
      }
      const uint32_t byte = choose_candidate(candidates, errors);
      if (row_in_block == 0) shared.tile_byte[i / kBlocks][i % kBlocks] = uint8_t(byte);
    }
  }
}

// Everything that a tile's cast needs besides the tile, set up once the amaxes are known.
template <DType D, Rounding R, bool WithRht, bool RowScaled>
struct TensorCast {
  Caster<R, RowScaled> caster;
  Direction<kTileRows, kTileColBlocks<D>> rowwise;
  Direction<kTileCols<D>, kTileRowBlocks> columnwise;

  // Fills the tables: a barrier must follow. Amaxes are unused if row-scaled.
  __device__ __forceinline__ TensorCast(const CastPlan<D>& plan, float amax_rowwise, float amax_columnwise,
                                        CastShared& shared)
      : caster{plan.params, R == Rounding::kStochastic ? unpack(plan.params.random) : Philox{}},
        rowwise{plan.rowwise, plan.params.rowwise, shared.multiplier[0], {}},
        columnwise{plan.columnwise, plan.params.columnwise, shared.multiplier[WithRht ? 1 : 0], {}} {
    if constexpr (RowScaled) return;
    const float e4m3_max = plan.params.e4m3_max;
    rowwise.tensor = {amax_rowwise, tensor_scale(amax_rowwise, e4m3_max)};
    columnwise.tensor = WithRht ? LineScale{amax_columnwise, tensor_scale(amax_columnwise, e4m3_max)} : rowwise.tensor;
    const uint32_t byte = threadIdx.x % 128;
    const float scale = decode_e4m3(byte);
    shared.multiplier[0][byte] = element_multiplier(scale, rowwise.tensor.scale.decode);
    if (WithRht) shared.multiplier[1][byte] = element_multiplier(scale, columnwise.tensor.scale.decode);
  }

  // Called by the whole block with a complete tile. A barrier must follow before the tile is overwritten, and before
  // the stage is written out.
  __device__ __forceinline__ void cast(TilePlace place, const uint8_t* tile, CastShared& shared,
                                       ScaleStage& stage) const {
    if (caster.params.two_d) {
      choose_tile_bytes<D, R>(caster.params, rowwise.tensor, tile, shared);
      __syncthreads();
    }
    if (rowwise.buffers.data != nullptr) cast_rows<D>(caster, rowwise, place, tile, shared, stage);
    if (columnwise.buffers.data != nullptr) cast_columns<D, R, WithRht>(caster, columnwise, place, tile, shared, stage);
  }

  __device__ __forceinline__ void write_out(TilePlace place, const ScaleStage& stage) const {
    const bool swizzled = caster.params.swizzled;
    if (rowwise.buffers.data != nullptr) rowwise.write_scales(place.row, place.col, swizzled, stage.rowwise);
    if (columnwise.buffers.data != nullptr) columnwise.write_scales(place.col, place.row, swizzled, stage.columnwise);
  }
};

}  // namespace nvfp4
