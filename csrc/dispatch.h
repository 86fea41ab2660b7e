// Run-time value -> template argument, by generic lambda. Each dispatcher covers every value or throws.
#pragma once

#include <stdexcept>
#include <type_traits>
#include <utility>

#include "params.h"

namespace nvfp4 {

template <class F>
decltype(auto) dispatch_bool(bool value, F&& f) {
  if (value) return std::forward<F>(f)(std::true_type{});
  return std::forward<F>(f)(std::false_type{});
}

template <DType Value>
using DTypeConstant = std::integral_constant<DType, Value>;

template <class F>
decltype(auto) dispatch_dtype(DType value, F&& f) {
  switch (value) {
    case DType::kFloat32:
      return std::forward<F>(f)(DTypeConstant<DType::kFloat32>{});
    case DType::kFloat16:
      return std::forward<F>(f)(DTypeConstant<DType::kFloat16>{});
    case DType::kBFloat16:
      return std::forward<F>(f)(DTypeConstant<DType::kBFloat16>{});
  }
  throw std::logic_error("dispatch_dtype: no such dtype");
}

template <Rounding Value>
using RoundingConstant = std::integral_constant<Rounding, Value>;

template <class F>
decltype(auto) dispatch_rounding(Rounding value, F&& f) {
  switch (value) {
    case Rounding::kNearest:
      return std::forward<F>(f)(RoundingConstant<Rounding::kNearest>{});
    case Rounding::kStochastic:
      return std::forward<F>(f)(RoundingConstant<Rounding::kStochastic>{});
    case Rounding::kFourOverSix:
      return std::forward<F>(f)(RoundingConstant<Rounding::kFourOverSix>{});
  }
  throw std::logic_error("dispatch_rounding: no such rounding");
}

// Everything that the kernels of a cast are compiled for: dtype, rounding, with_rht, row_scaled.
template <class F>
void dispatch_cast(const QuantizeParams& params, F&& f) {
  const bool with_rht = params.with_rht && params.columnwise.data != nullptr;
  dispatch_dtype(params.x.dtype, [&](auto dtype) {
    dispatch_rounding(params.rounding, [&](auto rounding) {
      dispatch_bool(params.row_scaled, [&](auto row_scaled) {
        if (!with_rht) return f(dtype, rounding, std::false_type{}, row_scaled);
        if constexpr (rounding() == Rounding::kFourOverSix) {
          throw std::logic_error("dispatch_cast: 4over6 with Hadamard");  // refused by the options
        } else {
          f(dtype, rounding, std::true_type{}, row_scaled);
        }
      });
    });
  });
}

}  // namespace nvfp4
