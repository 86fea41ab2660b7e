// Step 1 of the chain on the CPU: the amax of both directions in one pass over x.
#include "cpu/tile.h"
#include "dispatch.h"
#include "kernels.h"

namespace nvfp4 {
namespace {

// Tiles of one tensor or line meet here; a maximum does not depend on their order.
void atomic_max(float* target, float value) {
  float current;
  __atomic_load(target, &current, __ATOMIC_RELAXED);
  while (value > current) {
    if (__atomic_compare_exchange(target, &current, &value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return;
  }
}

float amax_of_line(const float (&line)[kBlock]) {
  float m = 0.0F;
  for (const float x : line) m = max_ignore_nan(m, magnitude(x));
  return m;
}

float amax_of_lines(const Tile& lines, int count) {
  float m[kBlock] = {};
  for (int i = 0; i < count; ++i) {
    for (int j = 0; j < kBlock; ++j) m[j] = max_ignore_nan(m[j], magnitude(lines[i][j]));
  }
  return amax_of_line(m);
}

// Adds `count` lines, the first of them number `first`, to the amax of their direction.
void update_amax(float* amax, bool row_scaled, const Tile& lines, int64_t first, int count) {
  if (!row_scaled) return atomic_max(amax, amax_of_lines(lines, count));
  for (int i = 0; i < count; ++i) atomic_max(amax + first + i, amax_of_line(lines[i]));
}

template <DType D>
void amax_of_tiles(const AmaxParams& p) {
  const bool needs_columns = p.columnwise != nullptr && (p.with_rht || p.row_scaled);
  for_each_tile<D>(p.x, [&](const Tile& tile, const TilePlace& place) {
    if (p.rowwise != nullptr) update_amax(p.rowwise, p.row_scaled, tile, place.row, place.rows);
    if (p.columnwise == nullptr) return;
    if (!needs_columns) return update_amax(p.columnwise, false, tile, 0, place.rows);
    alignas(64) Tile lines;
    columnwise_lines<D>(tile, p.with_rht, p.sign_mask, lines);
    update_amax(p.columnwise, p.row_scaled, lines, place.col, place.cols);
  });
}

}  // namespace

void amax_cpu(const AmaxParams& p) {
  if (p.noop_flag != nullptr && *p.noop_flag == 1.0F) return;
  if (p.rowwise != nullptr) std::fill_n(p.rowwise, p.row_scaled ? p.x.rows : 1, 0.0F);
  if (p.columnwise != nullptr) std::fill_n(p.columnwise, p.row_scaled ? p.x.cols : 1, 0.0F);
  if (p.x.rows == 0 || p.x.cols == 0) return;
  dispatch_dtype(p.x.dtype, [&](auto dtype) { amax_of_tiles<decltype(dtype)::value>(p); });
}

}  // namespace nvfp4
