// Passes over the tokens of a batch, one row of channels at a time. Plain C++: ops.cpp knows torch, rows_impl.h knows the
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

// Element (outer, inner) of a (T, B, ...) or (B, T, ...) tensor, whichever order its rows are visited in.
template <class T>
struct Rows {
  T* data = nullptr;
  int64_t outer = 0;
  int64_t inner = 0;

  T* at(int64_t o, int64_t i) const { return data + o * outer + i * inner; }
};

// Sums over the tokens of one thread: `kinds` vectors over channels for the real tokens, then as many for the padding.
// Narrow sums are added up in `wide` every so many rows, so that their error does not grow with the batch.
template <class A>
struct Sums {
  A* narrow = nullptr;
  double* wide = nullptr;
  int64_t real = 0;  // number of real tokens
};

template <class S, class A>
struct Forward {
  int64_t inner, channels, groups;
  A eps;
  Rows<const S> x;
  Rows<const bool> padding;  // data is null without
  Rows<A> inv_rms;           // written, or read if `given`
  bool given;
  Rows<S> y;                       // data is null where only sums are wanted
  const A *scale, *bias, *center;  // bias and center may be null
  bool stream;                     // as in Backward
};

template <class S, class A>
struct Backward {
  int64_t inner, channels, groups;
  Rows<const S> dy, x;
  Rows<const bool> padding;
  Rows<const A> inv_rms;
  Rows<S> dx;                                // data is null where only sums are wanted
  const A *scale, *slope, *offset, *center;  // all but scale may be null; offset only with slope
  // Write the result around the caches: it would not be found there any more, and a line that is written in the cache
  // is read from memory first.
  bool stream;
};

// What is summed in forward. In backward it is dy * (h - center) and dy.
enum class Kind { none, values, squares };

template <class S, class A>
struct Passes {
  // y and inv_rms of the rows [begin, end), and sums of `kind` of h - center.
  void (*forward)(const Forward<S, A>&, int64_t begin, int64_t end, Kind kind, Sums<A>& sums);
  // dx of the rows [begin, end), and their sums if `sums` has room for them.
  void (*backward)(const Backward<S, A>&, int64_t begin, int64_t end, Sums<A>& sums);
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
