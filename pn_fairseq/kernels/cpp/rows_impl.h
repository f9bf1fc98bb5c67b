// The passes of rows.h in vectors of PN_VECTOR_BYTES, the native width of the CPU that a file is compiled for: wider ones
// spill. Included by rows_*.cpp, which name the function that returns the table. Of 64 bytes they are AVX-512's, of 32
// AVX2's; it is this width that decides and not the compiler's flags, which may allow more than the file is for.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "rows.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if PN_VECTOR_BYTES < 32 && !defined(__aarch64__)
#include <c10/util/Half.h>  // here only: it would be compiled for the CPU of each file, and linked once
#endif

namespace pn {
namespace {  // each file has its own copy, compiled for its own CPU

#define PN_INLINE inline __attribute__((always_inline))
// What is called from many places and gains nothing there: the files take half as long to compile.
#define PN_CALLED __attribute__((noinline))

template <class T, int bytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(bytes)));
};

template <class A>
constexpr int kWidth = PN_VECTOR_BYTES / static_cast<int>(sizeof(A));

template <class A>
using Vector = typename VectorOf<A, PN_VECTOR_BYTES>::type;

typedef VectorOf<uint32_t, PN_VECTOR_BYTES>::type Bits32;
typedef VectorOf<uint16_t, PN_VECTOR_BYTES / 2>::type Bits16;

template <class To, class From>
PN_INLINE To as(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// Storage types to vectors of the type that is computed in, and back with one rounding to nearest even.

PN_INLINE Vector<float> widen(const float* from) {
  Vector<float> v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

#ifdef PN_FLOAT64
PN_INLINE Vector<double> widen(const double* from) {
  Vector<double> v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

PN_INLINE void narrow(double* to, Vector<double> v) { std::memcpy(to, &v, sizeof v); }

PN_INLINE double total(Vector<double> v) { return v[0] + v[1]; }
#endif

PN_INLINE void narrow(float* to, Vector<float> v) { std::memcpy(to, &v, sizeof v); }

#if PN_VECTOR_BYTES == 64
PN_INLINE Vector<float> widen(const BFloat16* from) {
  __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return (Vector<float>)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
}
#elif PN_VECTOR_BYTES == 32
PN_INLINE Vector<float> widen(const BFloat16* from) {
  __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (Vector<float>)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
}
#else
PN_INLINE Vector<float> widen(const BFloat16* from) {
  Bits16 bits;
  std::memcpy(&bits, from, sizeof bits);
  return as<Vector<float>>(__builtin_convertvector(bits, Bits32) << 16);
}
#endif

// Half of the last bit that stays is added, a little less where that bit is even, and the rest is cut off. An infinity
// that this would make of a NaN is prevented.
#if PN_VECTOR_BYTES == 64
PN_INLINE void narrow(BFloat16* to, Vector<float> v) {
  const __m512i bits = (__m512i)v;
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
#else
PN_INLINE void narrow(BFloat16* to, Vector<float> v) {
  Bits32 bits = as<Bits32>(v);
  Bits32 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  Bits32 nan = bits | 0x400000u;
  Bits32 upper = ((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded) >> 16;
  Bits16 result = __builtin_convertvector(upper, Bits16);
  std::memcpy(to, &result, sizeof result);
}
#endif

#if PN_VECTOR_BYTES == 64
PN_INLINE Vector<float> widen(const Half* from) {
  return (Vector<float>)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

PN_INLINE void narrow(Half* to, Vector<float> v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph((__m512)v, 0));
}
#elif PN_VECTOR_BYTES == 32
PN_INLINE Vector<float> widen(const Half* from) {
  return (Vector<float>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

PN_INLINE void narrow(Half* to, Vector<float> v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph((__m256)v, 0));
}
#elif defined(__aarch64__)
typedef VectorOf<__fp16, PN_VECTOR_BYTES / 2>::type Halves;

PN_INLINE Vector<float> widen(const Half* from) {
  Halves v;
  std::memcpy(&v, from, sizeof v);
  return __builtin_convertvector(v, Vector<float>);
}

PN_INLINE void narrow(Half* to, Vector<float> v) {
  Halves result = __builtin_convertvector(v, Halves);
  std::memcpy(to, &result, sizeof result);
}
#else
PN_CALLED Vector<float> widen(const Half* from) {
  Vector<float> v;
  for (int k = 0; k < kWidth<float>; ++k) v[k] = c10::detail::fp16_ieee_to_fp32_value(from[k].bits);
  return v;
}

PN_CALLED void narrow(Half* to, Vector<float> v) {
  for (int k = 0; k < kWidth<float>; ++k) to[k].bits = c10::detail::fp16_ieee_from_fp32_value(v[k]);
}
#endif

// How many elements of a vector are there: all, or the first few at the end of a span, where the others read as zero.
struct Whole {};
struct Part {
  int64_t count;
};

template <class T>
PN_INLINE auto load(const T* from, Whole) {
  return widen(from);
}

template <class T>
PN_CALLED auto load(const T* from, Part part) {
  T buffer[PN_VECTOR_BYTES / sizeof(T)] = {};
  for (int64_t k = 0; k < part.count; ++k) buffer[k] = from[k];
  return widen(buffer);
}

template <class T, class V>
PN_INLINE void store(T* to, V v, Whole) {
  narrow(to, v);
}

template <class T, class V>
PN_CALLED void store(T* to, V v, Part part) {
  T buffer[PN_VECTOR_BYTES / sizeof(T)];
  narrow(buffer, v);
  for (int64_t k = 0; k < part.count; ++k) to[k] = buffer[k];
}

// A whole vector to an address that is a multiple of its size, around the caches: see `stream` in rows.h.
template <class T, class V>
PN_INLINE void stream(T* to, V v) {
#if defined(__x86_64__)
  constexpr int bytes = sizeof(V) / sizeof(v[0]) * sizeof(T);
  alignas(64) T narrowed[bytes / sizeof(T)];
  narrow(narrowed, v);
#if PN_VECTOR_BYTES == 64
  if constexpr (bytes == 64) return _mm512_stream_si512(reinterpret_cast<__m512i*>(to), as<__m512i>(narrowed));
#endif
#if PN_VECTOR_BYTES >= 32
  if constexpr (bytes == 32) return _mm256_stream_si256(reinterpret_cast<__m256i*>(to), as<__m256i>(narrowed));
#endif
  if constexpr (bytes == 16) return _mm_stream_si128(reinterpret_cast<__m128i*>(to), as<__m128i>(narrowed));
#endif
  narrow(to, v);
}

// A result, around the caches if `streams`.
template <class T, class V>
PN_INLINE void write(T* to, V v, Whole, bool streams) {
  if (streams) return stream(to, v);
  narrow(to, v);
}

template <class T, class V>
PN_INLINE void write(T* to, V v, Part part, bool) {
  store(to, v, part);
}

// Whether all vectors of rows in spans of `size` elements begin at multiples of their size.
template <class A, class S>
bool are_aligned(const S* rows, int64_t size) {
  const uintptr_t mask = kWidth<A> * sizeof(S) - 1;
  return !((reinterpret_cast<uintptr_t>(rows) | size * sizeof(S)) & mask);
}

// What was streamed is there for other threads.
PN_INLINE void end_of_stream() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

template <class A, class F>
PN_INLINE void for_span(int64_t begin, int64_t end, F&& body) {
  int64_t c = begin;
  for (; c + kWidth<A> <= end; c += kWidth<A>) body(c, Whole{});
  if (c < end) body(c, Part{end - c});
}

// The same, four vectors at once, for bodies so short that the loop itself would take time. Others would only take
// longer to compile.
template <class A, class F>
PN_INLINE void for_span_unrolled(int64_t begin, int64_t end, F&& body) {
  int64_t c = begin;
#pragma GCC unroll 4
  for (; c + kWidth<A> <= end; c += kWidth<A>) body(c, Whole{});
  if (c < end) body(c, Part{end - c});
}

// Sum of the elements. By shuffles: through memory it would wait for the store.
PN_INLINE float total(VectorOf<float, 16>::type v) { return (v[0] + v[1]) + (v[2] + v[3]); }

#if PN_VECTOR_BYTES >= 32
PN_INLINE float total(VectorOf<float, 32>::type v) {
  typedef VectorOf<float, 16>::type Half;
  return total((Half)_mm256_castps256_ps128((__m256)v) + (Half)_mm256_extractf128_ps((__m256)v, 1));
}
#endif

#if PN_VECTOR_BYTES == 64
PN_INLINE float total(VectorOf<float, 64>::type v) {
  typedef VectorOf<float, 32>::type Half;
  return total((Half)_mm512_castps512_ps256((__m512)v) + (Half)_mm512_extractf32x8_ps((__m512)v, 1));
}
#endif

template <class S, class A>
PN_INLINE A sum_of_squares(const S* x, int64_t begin, int64_t end) {
  constexpr int width = kWidth<A>;
  Vector<A> first{}, second{}, third{}, fourth{};  // a single sum would wait for itself
  int64_t c = begin;
  for (; c + 4 * width <= end; c += 4 * width) {
    Vector<A> a = widen(x + c), b = widen(x + c + width), d = widen(x + c + 2 * width), e = widen(x + c + 3 * width);
    first += a * a;
    second += b * b;
    third += d * d;
    fourth += e * e;
  }
  for_span<A>(c, end, [&](int64_t at, auto part) {
    Vector<A> v = load(x + at, part);
    first += v * v;
  });
  return total((first + second) + (third + fourth));
}

template <class A>
PN_CALLED __attribute__((optimize("tree-vectorize"))) void add_up(Sums<A>& sums, int64_t size) {
  for (int64_t k = 0; k < size; ++k) {
    sums.wide[k] += static_cast<double>(sums.narrow[k]);
    sums.narrow[k] = A(0);
  }
}

constexpr int64_t kRowsBetweenAddingUp = 256;

// The sums of `vectors` times the channels are added up every so many rows, and at the end.
template <class A, class F>
PN_INLINE void rows_with_sums(int64_t begin, int64_t end, int64_t size, Sums<A>& sums, F&& row_of) {
  for (int64_t row = begin; row < end; ++row) {
    row_of(row);
    if (size && (row - begin) % kRowsBetweenAddingUp == kRowsBetweenAddingUp - 1) add_up(sums, size);
  }
  if (size) add_up(sums, size);
}

// Calls `use` with a std::bool_constant for each condition, which can be an argument of a template.
template <class F>
void with_constants(F&& use) {
  use();
}

template <class F, class... Rest>
void with_constants(F&& use, bool condition, Rest... rest) {
  if (condition) return with_constants([&](auto... more) { use(std::true_type{}, more...); }, rest...);
  with_constants([&](auto... more) { use(std::false_type{}, more...); }, rest...);
}

// How many rows before its turn a row is fetched: a pass has little to compute and would wait for memory at the beginning of
// each row, and again for the lines that it writes. Much more than this would push out of the nearest cache what is in use.
template <class S>
PN_INLINE int64_t rows_ahead(int64_t channels) {
  constexpr int64_t bytes = 4096;
  return std::max<int64_t>(1, bytes / (std::max<int64_t>(1, channels) * static_cast<int64_t>(sizeof(S))));
}

// One row forward: all root mean squares, whose long chains of operations overlap, then all the rest. `sum` is where the
// sums of this row go. The row `next` is fetched meanwhile, and the memory of its result.
template <class S, class A, bool scaled, bool writes, bool centered, Kind kind>
PN_INLINE void forward_row(const Forward<S, A>& f, int64_t row, int64_t next, A* sum, bool streams) {
  const int64_t spans = scaled ? f.groups : 1, size = f.channels / spans;
  const S *x = f.x[row], *next_x = f.x[next];
  S *y = f.y + row * f.channels, *next_y = f.y + next * f.channels;
  A* inv_rms = f.inv_rms + row * f.groups;
  const A *scale = f.scale, *bias = f.bias, *center = f.center;
  for (int64_t g = 0; scaled && !f.given && g < spans; ++g) {
    inv_rms[g] = A(1) / std::sqrt(sum_of_squares<S, A>(x, g * size, (g + 1) * size) / static_cast<A>(size) + f.eps);
  }
  for (int64_t g = 0; g < spans; ++g) {
    const A factor = scaled ? inv_rms[g] : A(1);
    for_span_unrolled<A>(g * size, (g + 1) * size, [&](int64_t c, auto part) {
      __builtin_prefetch(next_x + c);
      if (writes && !streams) __builtin_prefetch(next_y + c, 1);
      Vector<A> h = load(x + c, part);
      if (scaled) h = h * factor;
      if (kind == Kind::values) store(sum + c, load(sum + c, part) + h, part);
      if (kind == Kind::squares) store(sum + c, load(sum + c, part) + h * h, part);
      if (centered) h = h - load(center + c, part);
      if (kind == Kind::deviations) store(sum + c, load(sum + c, part) + h * h, part);
      if (writes) write(y + c, h * load(scale + c, part) + load(bias + c, part), part, streams);
    });
  }
}

template <class S, class A, bool scaled, bool writes, bool centered, Kind kind>
void forward_rows(const Forward<S, A>& f, int64_t begin, int64_t end, Sums<A>& sums) {
  const int64_t ahead = rows_ahead<S>(f.channels);
  const bool streams = writes && f.stream && are_aligned<A>(f.y, f.channels / (scaled ? f.groups : 1));
  rows_with_sums(begin, end, kind == Kind::none ? 0 : 2 * f.channels, sums, [&](int64_t row) {
    const bool padding = f.padding.data && *f.padding[row];
    A* sum = sums.narrow + (padding ? f.channels : 0);
    forward_row<S, A, scaled, writes, centered, kind>(f, row, std::min(row + ahead, end - 1), sum, streams);
    sums.real += !padding;
  });
  if (streams) end_of_stream();
}

template <class S, class A>
void forward(const Forward<S, A>& f, int64_t begin, int64_t end, Kind kind, Sums<A>& sums) {
  with_constants([&](auto scaled, auto writes, auto centered, auto squares) {
    constexpr Kind of_sums = centered ? Kind::deviations : Kind::values;  // where nothing is written
    constexpr Kind summed = squares ? Kind::squares : writes ? Kind::none : of_sums;
    forward_rows<S, A, scaled, writes, centered, summed>(f, begin, end, sums);
  }, f.groups, f.y, f.center, kind == Kind::squares);
}

PN_INLINE bool is_zero(float value) { return value == 0.0f; }
PN_INLINE bool is_zero(double value) { return value == 0.0; }
PN_INLINE bool is_zero(BFloat16 value) { return !(value.bits & 0x7fffu); }
PN_INLINE bool is_zero(Half value) { return !(value.bits & 0x7fffu); }

template <class S>
PN_CALLED bool are_zero(const S* dy, int64_t channels) {
  constexpr int64_t block = 16;
  int64_t c = 0;
  for (; c + block <= channels; c += block) {
    int zeros = 0;
    for (int64_t k = 0; k < block; ++k) zeros += is_zero(dy[c + k]);
    if (zeros < block) return false;
  }
  while (c < channels && is_zero(dy[c])) ++c;
  return c == channels;
}

// Whether the loss does not depend on the token with this row of dy. Almost always its first element tells.
template <class S>
PN_INLINE bool is_unused(const S* dy, int64_t channels) {
  return is_zero(dy[0]) && are_zero(dy, channels);
}

// How much of a row is gone through a second time at once: more groups overlap better, and more bytes are cold again.
constexpr int64_t kHotBytes = 1024;

// One row backward, a few groups at a time: the sums and the projections mean_k(dh_k h_k), whose chains of operations
// overlap, then dx; without layer-scale all at once. `sums_up`: add dy * (h - center) to `sum` and dy to `sum + channels`.
// `projections` has room for one a group.
template <class S, class A, bool scaled, bool writes, bool sums_up, bool sloped, bool centered>
PN_CALLED void backward_row(
    const Backward<S, A>& b, int64_t row, int64_t next, A* sum, A* projections, bool streams) {
  const int64_t spans = scaled ? b.groups : 1, size = b.channels / spans;
  const int64_t at_once = std::max<int64_t>(1, kHotBytes / (std::max<int64_t>(1, size) * static_cast<int64_t>(sizeof(S))));
  const S *dy = b.dy[row], *x = b.x[row];
  const A* inv_rms = b.inv_rms + row * b.groups;
  S* dx = b.dx + row * b.channels;
  const A *scale = b.scale, *slope = b.slope, *offset = b.offset, *center = b.center;
  A* sum_dy = sum + b.channels;
  const S *next_dy = b.dy[next], *next_x = b.x[next];
  S* next_dx = b.dx + next * b.channels;
  for (int64_t first = 0; first < spans; first += at_once) {
    const int64_t last = std::min(first + at_once, spans);
    for (int64_t g = first; g < last; ++g) {
      const int64_t begin = g * size, end = begin + size;
      const A factor = scaled ? inv_rms[g] : A(1);
      Vector<A> projected{};
      for_span<A>(begin, end, [&](int64_t c, auto part) {
        if (!scaled || !writes) {
          __builtin_prefetch(next_x + c);
          __builtin_prefetch(next_dy + c);
          if (writes && !streams) __builtin_prefetch(next_dx + c, 1);
        }
        Vector<A> grad = load(dy + c, part), h = load(x + c, part);
        if (scaled) h = h * factor;
        Vector<A> centre = h;
        if (centered) centre = h - load(center + c, part);
        if (sums_up) {
          store(sum + c, load(sum + c, part) + grad * centre, part);
          store(sum_dy + c, load(sum_dy + c, part) + grad, part);
        }
        if (writes) {
          Vector<A> dh = grad * load(scale + c, part);
          if (sloped) dh = dh - centre * load(slope + c, part);
          if (sloped && centered) dh = dh - load(offset + c, part);
          if (scaled) projected += dh * h;
          if (!scaled) write(dx + c, dh, part, streams);
        }
      });
      if (scaled && writes) projections[g] = total(projected) / static_cast<A>(size);
    }
    for (int64_t g = first; scaled && writes && g < last; ++g) {
      const int64_t begin = g * size, end = begin + size;
      const A factor = inv_rms[g], projection = projections[g];
      for_span<A>(begin, end, [&](int64_t c, auto part) {
        __builtin_prefetch(next_x + c);
        __builtin_prefetch(next_dy + c);
        if (!streams) __builtin_prefetch(next_dx + c, 1);
        Vector<A> h = load(x + c, part) * factor, centre = h;
        if (centered) centre = h - load(center + c, part);
        Vector<A> dh = load(dy + c, part) * load(scale + c, part);
        if (sloped) dh = dh - centre * load(slope + c, part);
        if (sloped && centered) dh = dh - load(offset + c, part);
        write(dx + c, (dh - h * projection) * factor, part, streams);
      });
    }
  }
}

template <class S, class A, bool scaled, bool writes, bool sums_up, bool sloped, bool centered>
void backward_rows(const Backward<S, A>& b, int64_t begin, int64_t end, Sums<A>& sums) {
  const int64_t ahead = rows_ahead<S>(b.channels);
  std::vector<A> projections(scaled && writes ? b.groups : 0);
  const bool streams = writes && b.stream && are_aligned<A>(b.dx, b.channels / (scaled ? b.groups : 1));
  rows_with_sums(begin, end, sums_up ? 4 * b.channels : 0, sums, [&](int64_t row) {
    const int64_t next = std::min(row + ahead, end - 1);
    const bool padding = b.padding.data && *b.padding[row];
    A* sum = sums.narrow + (padding ? 2 * b.channels : 0);
    if ((padding || !sloped) && is_unused(b.dy[row], b.channels)) {
      if (writes) std::fill_n(b.dx + row * b.channels, b.channels, S{});
    } else if (sloped && padding) {
      backward_row<S, A, scaled, writes, sums_up, false, centered>(b, row, next, sum, projections.data(), streams);
    } else {
      backward_row<S, A, scaled, writes, sums_up, sloped, centered>(b, row, next, sum, projections.data(), streams);
    }
  });
  if (streams) end_of_stream();
}

template <class S, class A>
void backward(const Backward<S, A>& b, int64_t begin, int64_t end, Sums<A>& sums) {
  with_constants([&](auto scaled, auto writes, auto sums_up, auto sloped, auto centered) {
    if constexpr (writes || sums_up) {
      backward_rows<S, A, scaled, writes, sums_up, writes && sloped, centered>(b, begin, end, sums);
    }
  }, b.groups, b.dx, sums.narrow, b.slope, b.center);
}

// A row is fetched while another is computed, and the memory of its result.
template <class S>
PN_INLINE void fetch(const S* x, const S* dy, const S* out, int64_t at, bool streams) {
  __builtin_prefetch(x + at);
  if (dy) __builtin_prefetch(dy + at);
  if (!streams) __builtin_prefetch(out + at, 1);
}

template <class S, class A, bool centered, bool affine>
PN_INLINE void standardize_row(const PerToken<S, A>& p, int64_t row, int64_t next, bool streams) {
  const int64_t size = p.channels / p.groups, all = p.rows * p.groups;
  const S *x = p.x[row], *next_x = p.x[next];
  S *y = p.out + row * p.channels, *next_y = p.out + next * p.channels;
  const A *scale = p.scale, *bias = p.bias;
  const A gain = p.gain, gain_slope = p.gain_slope;
  for (int64_t g = 0; g < p.groups; ++g) {
    const int64_t begin = g * size, end = begin + size;
    A mean(0), square;
    if (centered) {
      Vector<A> sum{};
      for_span<A>(begin, end, [&](int64_t c, auto part) { sum += load(x + c, part); });
      mean = total(sum) / static_cast<A>(size);
      Vector<A> squares{};
      for (int64_t c = begin; c + kWidth<A> <= end; c += kWidth<A>) {
        const Vector<A> v = widen(x + c) - mean;
        squares += v * v;
      }
      square = total(squares);
      for (int64_t c = end - size % kWidth<A>; c < end; ++c) {  // zeros behind the end would count
        const A v = load(x + c, Part{1})[0] - mean;
        square += v * v;
      }
    } else {
      square = sum_of_squares<S, A>(x, begin, end);
    }
    const A second = p.square_factor * (square / static_cast<A>(size)) + p.eps_in_root;
    const A root = std::sqrt(second), divisor = root + p.eps_outside < p.min_divisor ? p.min_divisor : root + p.eps_outside;
    const A inverse = A(1) / (divisor > A(0) ? divisor : divisor + std::sqrt(std::numeric_limits<A>::min()));
    const bool moves = second > std::numeric_limits<A>::min() && root + p.eps_outside >= p.min_divisor;
    A* stats = p.stats + row * p.groups + g;
    stats[0] = mean;
    stats[all] = inverse;
    stats[2 * all] = moves ? p.square_factor * divisor / root : A(0);
    for_span<A>(begin, end, [&](int64_t c, auto part) {
      fetch<S>(next_x, nullptr, next_y, c, streams);
      Vector<A> z = load(x + c, part);
      if (centered) z = z - mean;
      z = z * inverse;
      z = z * (gain + gain_slope * z);
      if (affine) z = z * load(scale + c, part) + load(bias + c, part);
      write(y + c, z, part, streams);
    });
  }
}

template <class S, class A, bool centered, bool affine>
void standardize_rows(const PerToken<S, A>& p, int64_t begin, int64_t end) {
  const int64_t ahead = rows_ahead<S>(p.channels);
  const bool streams = p.stream && are_aligned<A>(p.out, p.channels / p.groups);
  for (int64_t row = begin; row < end; ++row) {
    standardize_row<S, A, centered, affine>(p, row, std::min(row + ahead, end - 1), streams);
  }
  if (streams) end_of_stream();
}

template <class S, class A>
void standardize(const PerToken<S, A>& p, int64_t begin, int64_t end) {
  with_constants([&](auto centered, auto affine) {
    standardize_rows<S, A, centered, affine>(p, begin, end);
  }, p.centered, p.scale);
}

template <class S, class A, bool weighted, bool sums_up>
PN_INLINE void standardize_gradient_row(const PerToken<S, A>& p, int64_t row, int64_t next, A* sum, bool streams) {
  const int64_t size = p.channels / p.groups, all = p.rows * p.groups;
  const S *dy = p.dy[row], *x = p.x[row], *next_dy = p.dy[next], *next_x = p.x[next];
  S *dx = p.out + row * p.channels, *next_dx = p.out + next * p.channels;
  const A* scale = p.scale;
  A* sum_dy = sum + p.channels;
  const A gain = p.gain, gain_slope = p.gain_slope;
  for (int64_t g = 0; g < p.groups; ++g) {
    const int64_t begin = g * size, end = begin + size;
    const A* stats = p.stats + row * p.groups + g;
    const A mean = stats[0], inverse = stats[all], share = stats[2 * all];
    Vector<A> plain{}, along{};
    for_span<A>(begin, end, [&](int64_t c, auto part) {
      const Vector<A> z = (load(x + c, part) - mean) * inverse, grad = load(dy + c, part), curved = gain + gain_slope * z;
      if (sums_up) {
        store(sum + c, load(sum + c, part) + grad * (z * curved), part);
        store(sum_dy + c, load(sum_dy + c, part) + grad, part);
      }
      Vector<A> dz = grad * curved;
      if (weighted) dz = dz * load(scale + c, part);
      plain += dz;
      along += dz * z;
    });
    const A offset = p.through_mean ? total(plain) / static_cast<A>(size) : A(0);
    const A slope = p.through_divisor ? share * (total(along) / static_cast<A>(size)) : A(0);
    for_span<A>(begin, end, [&](int64_t c, auto part) {
      fetch<S>(next_x, next_dy, next_dx, c, streams);
      const Vector<A> z = (load(x + c, part) - mean) * inverse;
      Vector<A> dz = load(dy + c, part) * (gain + gain_slope * z);
      if (weighted) dz = dz * load(scale + c, part);
      write(dx + c, (dz - offset - slope * z) * inverse, part, streams);
    });
  }
}

template <class S, class A, bool weighted, bool sums_up>
void standardize_gradient_rows(const PerToken<S, A>& p, int64_t begin, int64_t end, Sums<A>& sums) {
  const int64_t ahead = rows_ahead<S>(p.channels);
  const bool streams = p.stream && are_aligned<A>(p.out, p.channels / p.groups);
  rows_with_sums(begin, end, sums_up ? 2 * p.channels : 0, sums, [&](int64_t row) {
    if (is_unused(p.dy[row], p.channels)) {
      std::fill_n(p.out + row * p.channels, p.channels, S{});
      return;
    }
    standardize_gradient_row<S, A, weighted, sums_up>(p, row, std::min(row + ahead, end - 1), sums.narrow, streams);
  });
  if (streams) end_of_stream();
}

template <class S, class A>
void standardize_gradient(const PerToken<S, A>& p, int64_t begin, int64_t end, Sums<A>& sums) {
  with_constants([&](auto weighted, auto sums_up) {
    standardize_gradient_rows<S, A, weighted, sums_up>(p, begin, end, sums);
  }, p.scale, sums.narrow);
}

// Functions of the elements of a vector.

template <class V, int terms>
PN_INLINE V polynomial(const float (&coefficients)[terms], V at) {
  V value = V{} + coefficients[terms - 1];
  for (int k = terms - 2; k >= 0; --k) value = value * at + coefficients[k];
  return value;
}

// v P(v^2) / Q(v^2) up to `limit`, from where on it is 1 in float; minimax fits of the relative error.
template <int p, int q>
PN_INLINE Vector<float> odd_ratio(Vector<float> v, float limit, const float (&numerator)[p], const float (&denominator)[q]) {
  const Vector<float> bound = Vector<float>{} + limit, one = Vector<float>{} + 1.0f;
  v = v > bound ? bound : v;
  v = v < -bound ? -bound : v;
  const Vector<float> square = v * v;
  Vector<float> value = v * polynomial(numerator, square) / polynomial(denominator, square);
  value = value > one ? one : value;
  return value < -one ? -one : value;
}

PN_INLINE Vector<float> tanh_of(Vector<float> v) {
  static const float numerator[] = {
      0.9999999794604087f, 0.13381021463903342f, 0.0034955831823927372f, 2.0609002329642954e-05f, 1.335455486525957e-08f};
  static const float denominator[] = {
      1.0f, 0.4671433705822931f, 0.025876963340752308f, 0.0003285626780359558f, 7.776513690747828e-07f};
  return odd_ratio(v, 9.0f, numerator, denominator);
}

PN_INLINE Vector<float> erf_of(Vector<float> v) {
  static const float numerator[] = {1.128379139311044f,    0.19354571270163212f,   0.05310181635520784f,
                                    0.003883366998576359f, 0.00028456570736083454f, 1.9867689946089487e-06f};
  static const float denominator[] = {1.0f,                  0.5048579774239728f,    0.11535025503954488f,
                                      0.015207298393439473f, 0.0011855753302128646f, 3.742002387785169e-05f};
  return odd_ratio(v, 4.0f, numerator, denominator);
}

// exp(-v^2). 2^n times a polynomial of what is left, at most log(2) / 2: a minimax fit to 2e-9.
PN_INLINE Vector<float> gaussian_of(Vector<float> v) {
  static const float fit[] = {
      1.0f, 1.000000032f, 0.4999999419f, 0.166664308f, 0.04166800473f, 0.008374195825f, 0.001384360695f};
  const Vector<float> least = Vector<float>{} - 87.0f;
  const float round = 12582912.0f;  // 1.5 * 2^23: the sum with it has no digits behind the point
  Vector<float> at = -(v * v);
  at = at < least ? least : at;
  const Vector<float> shifted = at * 1.44269504f + round, whole = shifted - round;
  const Vector<float> rest = (at - whole * 0.693359375f) + whole * 2.12194440e-4f;
  const Bits32 power = (as<Bits32>(shifted) - as<uint32_t>(round) + 127u) << 23;
  return polynomial(fit, rest) * as<Vector<float>>(power);
}

#ifdef PN_FLOAT64
template <class F>
PN_INLINE Vector<double> each(Vector<double> v, F&& f) {
  for (int k = 0; k < kWidth<double>; ++k) v[k] = f(v[k]);
  return v;
}

PN_INLINE Vector<double> tanh_of(Vector<double> v) {
  return each(v, [](double x) { return std::tanh(x); });
}
PN_INLINE Vector<double> erf_of(Vector<double> v) {
  return each(v, [](double x) { return std::erf(x); });
}
PN_INLINE Vector<double> gaussian_of(Vector<double> v) {
  return each(v, [](double x) { return std::exp(-x * x); });
}
#endif

template <class S, class A, bool erf>
void squash_rows(const Squash<S, A>& s, int64_t begin, int64_t end) {
  const int64_t ahead = rows_ahead<S>(s.channels);
  const bool streams = s.stream && are_aligned<A>(s.out, s.channels);
  const A *scale = s.scale, *bias = s.bias;
  const A alpha = s.alpha, shift = s.shift;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t next = std::min(row + ahead, end - 1);
    const S *x = s.x[row], *next_x = s.x[next];
    S *y = s.out + row * s.channels, *next_y = s.out + next * s.channels;
    for_span<A>(0, s.channels, [&](int64_t c, auto part) {
      fetch<S>(next_x, nullptr, next_y, c, streams);
      const Vector<A> argument = load(x + c, part) * alpha + shift;
      const Vector<A> value = erf ? erf_of(argument) : tanh_of(argument);
      write(y + c, value * load(scale + c, part) + load(bias + c, part), part, streams);
    });
  }
  if (streams) end_of_stream();
}

template <class S, class A>
void squash(const Squash<S, A>& s, int64_t begin, int64_t end) {
  (s.erf ? squash_rows<S, A, true> : squash_rows<S, A, false>)(s, begin, end);
}

template <class S, class A, bool erf>
void squash_gradient_rows(const Squash<S, A>& s, int64_t begin, int64_t end, Sums<A>& sums) {
  const int64_t ahead = rows_ahead<S>(s.channels), channels = s.channels;
  const bool streams = s.stream && are_aligned<A>(s.out, channels);
  const A* scale = s.scale;
  const A alpha = s.alpha, shift = s.shift, steepness = erf ? A(1.1283791670955126) : A(1);
  A *sum = sums.narrow, *sum_dy = sum + channels;
  rows_with_sums(begin, end, 4 * channels, sums, [&](int64_t row) {
    const int64_t next = std::min(row + ahead, end - 1);
    const S *dy = s.dy[row], *x = s.x[row], *next_dy = s.dy[next], *next_x = s.x[next];
    S *dx = s.out + row * channels, *next_dx = s.out + next * channels;
    if (is_unused(dy, channels)) {
      std::fill_n(dx, channels, S{});
      return;
    }
    Vector<A> steep{}, plain{};
    for_span<A>(0, channels, [&](int64_t c, auto part) {
      fetch<S>(next_x, next_dy, next_dx, c, streams);
      const Vector<A> h = load(x + c, part), grad = load(dy + c, part), argument = h * alpha + shift;
      const Vector<A> value = erf ? erf_of(argument) : tanh_of(argument);
      store(sum + c, load(sum + c, part) + grad * value, part);
      store(sum_dy + c, load(sum_dy + c, part) + grad, part);
      const Vector<A> slope = erf ? gaussian_of(argument) * steepness : steepness - value * value;
      const Vector<A> inner = grad * load(scale + c, part) * slope;
      steep += inner * h;
      plain += inner;
      write(dx + c, inner * alpha, part, streams);
    });
    sum[2 * channels] += total(steep);
    sum[3 * channels] += total(plain);
  });
  if (streams) end_of_stream();
}

template <class S, class A>
void squash_gradient(const Squash<S, A>& s, int64_t begin, int64_t end, Sums<A>& sums) {
  (s.erf ? squash_gradient_rows<S, A, true> : squash_gradient_rows<S, A, false>)(s, begin, end, sums);
}

template <class S, class A>
constexpr Passes<S, A> kPasses = {
    forward<S, A>, backward<S, A>, standardize<S, A>, standardize_gradient<S, A>, squash<S, A>, squash_gradient<S, A>};

}  // namespace

const Implementation& PN_IMPLEMENTATION() {
#ifdef PN_FLOAT64
  const Passes<double, double> float64 = kPasses<double, double>;
#else
  const Passes<double, double> float64 = baseline().float64;  // for tests, which do not wait for it
#endif
  static const Implementation implementation = {
      PN_NAME, kPasses<float, float>, float64, kPasses<BFloat16, float>, kPasses<Half, float>};
  return implementation;
}

}  // namespace pn
