// Passes over the tokens of a batch, one row of channels at a time. Plain C++: ops.cpp knows torch, rows_impl.h knows
// vectors, and each rows_*.cpp compiles the latter for one kind of CPU.
#pragma once

#include <cstdint>

namespace pn {

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

// The tokens of a tensor (outer, inner, channels) in this order, which need not be that of the memory: a transposed or cut
// tensor is read where it lies. Strides are in elements; the stride of the channels is 1.
template <class S>
struct Rows {
  const S* data;
  uint32_t inner;  // 0: all rows are `inner_stride` apart
  int64_t outer_stride, inner_stride;

  const S* operator[](int64_t row) const {
    if (inner == 0) return data + row * inner_stride;
    const uint32_t number = static_cast<uint32_t>(row), outer = number / inner;  // a division of 64 bits is slow
    return data + outer * outer_stride + (number - outer * inner) * inner_stride;
  }
};

// Sums over the tokens of one thread: vectors over channels for the real tokens, then as many for the padding.
// `narrow` is added to `wide` every so many rows, so that its error does not grow with the batch.
template <class A>
struct Sums {
  A* narrow = nullptr;
  double* wide = nullptr;
  int64_t real = 0;  // number of real tokens
};

// S is the type of the activations, A the accumulation dtype. h = x * inv_rms, or x without groups.
template <class S, class A>
struct Forward {
  int64_t channels, groups;
  A eps;
  Rows<S> x;            // (rows, channels)
  Rows<bool> padding;   // (rows, 1); null without padding
  A* inv_rms;           // (rows, groups): written, or read if `given`
  bool given;
  S* y;                 // (rows, channels): scale * (h - center) + bias; null where only sums are wanted
  const A *scale, *bias, *center;  // (channels); bias and center may be null
  bool stream;          // as in Backward
};

template <class S, class A>
struct Backward {
  int64_t channels, groups;
  Rows<S> dy, x;
  Rows<bool> padding;
  const A* inv_rms;
  S* dx;  // through layer-scale: scale * dy - 1_real * (slope * (h - center) + offset); null where only sums are wanted
  const A *scale, *slope, *offset, *center;  // (channels); all but scale may be null; offset goes with slope and center
  // Write results around the caches: they would have left them before they are read again, and a line that is written
  // in the cache is read from memory first.
  bool stream;
};

// Each group of a token by its own statistics. Of the two sets of rows, dy and x are read and `out` is written: y, or dx.
template <class S, class A>
struct PerToken {
  int64_t channels, groups, rows;
  Rows<S> dy, x;
  S* out;
  A* stats;              // (3, rows, groups): mean, 1 / divisor, share; written forward
  const A *scale, *bias;  // (channels); null forward without both, and scale null backward without a gain
  bool centered;          // divisor = max(sqrt(square_factor * mean square + eps_in_root) + eps_outside, min_divisor)
  A square_factor, eps_in_root, eps_outside, min_divisor;
  A gain, gain_slope;  // y = scale * z * (gain + gain_slope * z) + bias
  bool through_mean, through_divisor;
  bool stream;  // as in Backward
};

// y = scale * f(alpha * x + shift) + bias with f = tanh or erf.
template <class S, class A>
struct Squash {
  int64_t channels;
  Rows<S> dy, x;
  S* out;  // y, or dx
  const A *scale, *bias;
  A alpha, shift;
  bool erf;
  bool stream;
};

// What is summed in forward: h, h^2 or (h - center)^2. In backward: dy * (h - center) and dy.
enum class Kind { none, values, squares, deviations };

template <class S, class A>
struct Passes {
  // y and inv_rms of the rows [begin, end), and sums of `kind`.
  void (*forward)(const Forward<S, A>&, int64_t begin, int64_t end, Kind kind, Sums<A>& sums);
  // dx of the rows [begin, end), and their sums if `sums` has memory for them.
  void (*backward)(const Backward<S, A>&, int64_t begin, int64_t end, Sums<A>& sums);
  // y and stats; dx, and the sums of dy * z * (gain + gain_slope * z) and of dy if `sums` has memory for them.
  void (*standardize)(const PerToken<S, A>&, int64_t begin, int64_t end);
  void (*standardize_gradient)(const PerToken<S, A>&, int64_t begin, int64_t end, Sums<A>& sums);
  // y; dx, and the sums of dy * f and of dy, and behind them, one number each, the sums of df * x and of df.
  void (*squash)(const Squash<S, A>&, int64_t begin, int64_t end);
  void (*squash_gradient)(const Squash<S, A>&, int64_t begin, int64_t end, Sums<A>& sums);
};

struct Implementation {
  const char* name;
  Passes<float, float> float32;
  Passes<double, double> float64;
  Passes<BFloat16, float> bfloat16;
  Passes<Half, float> float16;
};

const Implementation& baseline();
#ifdef PN_X86
const Implementation& avx2();
const Implementation& avx512();
#endif

}  // namespace pn
