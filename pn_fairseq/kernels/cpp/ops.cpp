// The operators of pn_fairseq/kernels/ops.py for the CPU. What they compute is defined in pn_fairseq/kernels/reference.py.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "rows.h"

namespace pn {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

// That of the widest vectors that the CPU has, or that torch's own variable for its kernels allows.
const Implementation& implementation() {
  static const Implementation& chosen = []() -> const Implementation& {
#ifdef PN_X86
    const char* variable = std::getenv("ATEN_CPU_CAPABILITY");
    const std::string allowed = variable ? variable : "avx512";
    if (allowed == "default") return baseline();
    __builtin_cpu_init();
    if (allowed != "avx2" && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      return avx512();
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2();
#endif
    return baseline();
  }();
  return chosen;
}

std::string cpu_capability() { return implementation().name; }

// Calls `compute(storage, wide, passes)` with the types that belong to `x`, of which the first two are null pointers.
template <class F>
auto for_type_of(const Tensor& x, F&& compute) {
  switch (x.scalar_type()) {
    case at::kFloat:
      return compute(static_cast<float*>(nullptr), float(), implementation().float32);
    case at::kDouble:
      return compute(static_cast<double*>(nullptr), double(), implementation().float64);
    case at::kBFloat16:
      return compute(static_cast<BFloat16*>(nullptr), float(), implementation().bfloat16);
    case at::kHalf:
      return compute(static_cast<Half*>(nullptr), float(), implementation().float16);
    default:
      TORCH_CHECK_VALUE(false, "x has to be float16, bfloat16, float32 or float64, got ", x.scalar_type());
  }
}

at::ScalarType wide_type(const Tensor& x) { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

// Refuses arguments that do not belong to `x`, with ValueError; what is asked of each is that of contract.py.
class Contract {
 public:
  Contract(const Tensor& x, int64_t groups) : x(x), groups(groups) {
    TORCH_CHECK_VALUE(x.dim() == 2 || x.dim() == 3, "x has to be (T, B, C) or (N, C), got ", x.sizes());
    channels = x.size(-1);
    TORCH_CHECK_VALUE(
        groups == 0 || (groups > 0 && channels % groups == 0), "groups=", groups, " has to divide the ", channels,
        " channels, or be 0");
  }

  const Contract& dy(const Tensor& dy) const { return fits("dy", dy, x.scalar_type(), x.sizes()); }

  const Contract& mask(const Optional& mask) const {
    if (!mask) return *this;
    const int64_t sizes[] = {x.size(-2), x.size(0)};  // (B, T), or only the first: (N,)
    return fits("padding_mask", *mask, at::kBool, {sizes, static_cast<size_t>(x.dim() - 1)});
  }

  const Contract& vector(const char* name, const Optional& vector) const {
    if (!vector) return *this;
    const bool floating = at::isFloatingType(vector->scalar_type());
    return fits(name, *vector, floating ? vector->scalar_type() : at::kFloat, channels);
  }

  const Contract& inv_rms(const Tensor& inv_rms) const {
    const bool flat = x.dim() == 2;
    const int64_t sizes[] = {x.size(0), flat ? groups : x.size(1), groups};
    return fits("inv_rms", inv_rms, wide_type(x), {sizes, static_cast<size_t>(x.dim())});
  }

  const Contract& vectors(const Tensor& vectors, int64_t rows) const {
    return side_by_side("vectors", vectors).fits("vectors", vectors, wide_type(x), {rows, channels});
  }

  const Contract& state(const char* name, const Optional& state) const {
    return state ? side_by_side(name, *state).fits(name, *state, at::kFloat, channels) : *this;
  }

  const Contract& steps(const Tensor& steps) const { return fits("steps", steps, at::kLong, {}); }

  const Contract& tally(const Tensor& tally) const {
    return side_by_side("tally", tally).fits("tally", tally, at::kLong, 4);
  }

 private:
  const Contract& fits(const char* name, const Tensor& tensor, at::ScalarType type, at::IntArrayRef sizes) const {
    TORCH_CHECK_VALUE(
        tensor.scalar_type() == type && tensor.sizes() == sizes && tensor.is_cpu(), name, " has to be ", type, " of shape ",
        sizes, " on cpu, got ", tensor.scalar_type(), " of shape ", tensor.sizes(), " on ", tensor.device());
    return *this;
  }

  const Contract& side_by_side(const char* name, const Tensor& tensor) const {
    TORCH_CHECK_VALUE(tensor.is_contiguous(), name, " has to be contiguous");
    return *this;
  }

  const Tensor& x;
  int64_t groups, channels;
};

Tensor new_wide(const Tensor& x, at::IntArrayRef sizes) { return at::empty(sizes, x.options().dtype(wide_type(x))); }

Tensor with_unit_stride(const Tensor& x) {
  return x.size(-1) == 1 || x.stride(-1) == 1 ? x : x.contiguous();
}

// The tokens of a (T, B, C) or (N, C) tensor, in the order in which they lie in memory.
struct Tokens {
  int64_t outer, inner, channels;
  bool swapped, flat;

  explicit Tokens(const Tensor& x) : channels(x.size(-1)), flat(x.dim() == 2) {
    outer = x.size(0);
    inner = flat ? 1 : x.size(1);
    swapped = !flat && x.stride(0) < x.stride(1);
    if (swapped) std::swap(outer, inner);
  }

  int64_t count() const { return outer * inner; }

  template <class T, class U>
  Rows<T> in_strides(U* data, int64_t first, int64_t second) const {
    return swapped ? Rows<T>{reinterpret_cast<T*>(data), second, first} : Rows<T>{reinterpret_cast<T*>(data), first, second};
  }

  template <class T>
  Rows<T> of(const Tensor& x) const {
    return in_strides<T>(static_cast<char*>(x.data_ptr()), x.stride(0), flat ? 0 : x.stride(1));
  }

  Rows<const bool> of_mask(const Optional& mask) const {
    if (!mask) return {};
    return in_strides<const bool>(mask->const_data_ptr<bool>(), mask->stride(-1), flat ? 0 : mask->stride(0));
  }
};

// A vector over channels in the wide type, or nothing.
template <class A>
struct Channels {
  Tensor held;
  const A* data = nullptr;

  Channels(const Optional& vector, const Tensor& x) {
    if (!vector) return;
    held = vector->to(wide_type(x)).contiguous();
    data = held.const_data_ptr<A>();
  }

  explicit operator bool() const { return data != nullptr; }
  A operator[](int64_t c) const { return data[c]; }
};

// A thread that gets fewer elements than this costs more than it gives.
constexpr int64_t kWorthAThread = 32768;

// Sums over all tokens, each thread's added up in the order of the threads: the same for the same number of threads.
struct Total {
  std::vector<double> sums;  // as in Sums
  int64_t real = 0;
};

// Calls `pass(begin, end, sums)` on a share of the tokens in each thread; `vectors` sums over channels are kept.
template <class A, class F>
Total over_tokens(const Tokens& tokens, int64_t vectors, F&& pass) {
  const int64_t rows = tokens.count(), size = vectors * tokens.channels;
  const int64_t worth_it = std::max<int64_t>(1, rows * tokens.channels / kWorthAThread);
  const int64_t threads = at::in_parallel_region() ? 1 : std::min<int64_t>(at::get_num_threads(), worth_it);
  std::vector<A> narrow(threads * size);
  std::vector<double> wide(threads * size);
  std::vector<Sums<A>> sums(threads);
  at::parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
    for (int64_t thread = first; thread < last; ++thread) {
      Sums<A> own;
      if (vectors) own = {narrow.data() + thread * size, wide.data() + thread * size};
      const int64_t begin = rows * thread / threads, end = rows * (thread + 1) / threads;
      if (begin < end) pass(begin, end, own);
      sums[thread] = own;
    }
  });
  Total total;
  for (int64_t thread = 0; thread < threads; ++thread) {
    total.real += sums[thread].real;
    for (int64_t k = 0; thread && k < size; ++k) wide[k] += wide[thread * size + k];
  }
  wide.resize(size);
  total.sums = std::move(wide);
  return total;
}

template <class A>
void copy_to(const Tensor& to, const double* from) {
  A* data = to.data_ptr<A>();
  const int64_t size = to.numel();
  for (int64_t k = 0; k < size; ++k) data[k] = static_cast<A>(from[k]);
}

// A result with the layout of `like`. The passes write to `rows`, whose channels lie side by side.
struct Result {
  Tensor whole, rows;

  Result(const Tensor& like, const Tensor& like_rows) : whole(at::empty_like(like)) {
    rows = with_unit_stride(whole).is_same(whole) ? whole : at::empty_like(like_rows);
  }

  const Tensor& get() {
    if (!rows.is_same(whole)) whole.copy_(rows);
    return whole;
  }
};

Tensor new_scales(const Tensor& x, int64_t groups) {
  return x.dim() == 2 ? new_wide(x, {x.size(0), groups}) : new_wide(x, {x.size(0), x.size(1), groups});
}

// What one core can count on of the largest cache, which the system does not tell: sysconf may name that of all cores.
constexpr int64_t kCacheBytes = int64_t{32} << 20;

// Whether `tensors` like `x`, each read or written once in a pass, push its beginning out of all caches.
bool exceeds_cache(const Tensor& x, int64_t tensors) {
  return tensors * x.numel() * static_cast<int64_t>(x.element_size()) >= kCacheBytes;
}

template <class S, class A>
Forward<S, A> forward_of(const Tokens& tokens, const Tensor& x, const Tensor& inv_rms, int64_t groups, double eps) {
  Forward<S, A> f{};
  f.inner = std::max<int64_t>(1, tokens.inner);
  f.channels = tokens.channels;
  f.groups = groups;
  f.eps = static_cast<A>(eps);
  f.x = tokens.of<const S>(x);
  f.inv_rms = tokens.of<A>(inv_rms);
  f.stream = exceeds_cache(x, 2);
  return f;
}

template <class S, class A>
Total run(const Tokens& tokens, const Passes<S, A>& passes, const Forward<S, A>& f, Kind kind) {
  return over_tokens<A>(tokens, kind == Kind::none ? 0 : 2, [&](int64_t begin, int64_t end, Sums<A>& sums) {
    passes.forward(f, begin, end, kind, sums);
  });
}

template <class S, class A>
Total run(const Tokens& tokens, const Passes<S, A>& passes, const Backward<S, A>& b, bool sums_wanted) {
  return over_tokens<A>(tokens, sums_wanted ? 4 : 0, [&](int64_t begin, int64_t end, Sums<A>& sums) {
    passes.backward(b, begin, end, sums);
  });
}

// weight / sqrt(moment + eps), where what is missing is 1.
template <class A>
std::vector<A> scale_of(const Channels<A>& weight, const A* moment, double eps, int64_t channels) {
  std::vector<A> scale(channels);
  for (int64_t c = 0; c < channels; ++c) {
    A gain = weight ? weight[c] : A(1);
    scale[c] = moment ? gain / std::sqrt(moment[c] + static_cast<A>(eps)) : gain;
  }
  return scale;
}

template <class A>
std::vector<A> bias_of(const Channels<A>& bias, int64_t channels) {
  std::vector<A> values(channels);
  if (bias) std::copy(bias.data, bias.data + channels, values.begin());
  return values;
}

std::tuple<Tensor, Tensor> normalize(
    const Tensor& given, const Optional& weight, const Optional& bias, const Optional& mean, const Optional& moment,
    const Optional& inv_rms, int64_t groups, double eps) {
  Contract contract(given, groups);
  contract.vector("weight", weight).vector("bias", bias).vector("mean", mean).vector("moment", moment);
  if (inv_rms) contract.inv_rms(*inv_rms);
  const Tensor x = with_unit_stride(given);
  const Tokens tokens(x);
  Result y(given, x);
  Tensor scales = inv_rms ? inv_rms->contiguous() : new_scales(x, groups);
  for_type_of(x, [&](auto* storage, auto wide, const auto& passes) {
    using S = std::remove_pointer_t<decltype(storage)>;
    using A = decltype(wide);
    const Channels<A> gain(weight, x), shift(bias, x), center(mean, x), second(moment, x);
    const std::vector<A> scale = scale_of<A>(gain, second.data, eps, tokens.channels);
    const std::vector<A> offset = bias_of<A>(shift, tokens.channels);
    Forward<S, A> f = forward_of<S, A>(tokens, x, scales, groups, eps);
    f.given = inv_rms.has_value();
    f.y = tokens.of<S>(y.rows);
    f.scale = scale.data();
    f.bias = offset.data();
    f.center = center.data;
    run(tokens, passes, f, Kind::none);
  });
  return {y.get(), inv_rms ? new_wide(x, {0}) : scales};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> moments(
    const Tensor& given, const Optional& padding_mask, int64_t groups, double eps, bool centered) {
  Contract(given, groups).mask(padding_mask);
  const Tensor x = with_unit_stride(given);
  const Tokens tokens(x);
  const int64_t channels = tokens.channels;
  Tensor inv_rms = new_scales(x, groups), mean = new_wide(x, {centered ? channels : 0});
  Tensor squares = new_wide(x, {2, channels}), count = new_wide(x, {});
  for_type_of(x, [&](auto* storage, auto wide, const auto& passes) {
    using S = std::remove_pointer_t<decltype(storage)>;
    using A = decltype(wide);
    Forward<S, A> f = forward_of<S, A>(tokens, x, inv_rms, groups, eps);
    f.padding = tokens.of_mask(padding_mask);
    if (centered) {
      Total values = run(tokens, passes, f, Kind::values);
      for (int64_t c = 0; c < channels; ++c) values.sums[c] /= static_cast<double>(std::max<int64_t>(1, values.real));
      copy_to<A>(mean, values.sums.data());
      f.given = true;
      f.center = mean.const_data_ptr<A>();
    }
    const Total total = run(tokens, passes, f, Kind::squares);
    copy_to<A>(squares, total.sums.data());
    *count.data_ptr<A>() = static_cast<A>(total.real);
  });
  return {inv_rms, mean, squares, count};
}

template <class S, class A>
Backward<S, A> backward_of(
    const Tokens& tokens, const Tensor& dy, const Tensor& x, const Optional& padding_mask, const Tensor& inv_rms,
    int64_t groups) {
  Backward<S, A> b{};
  b.inner = std::max<int64_t>(1, tokens.inner);
  b.channels = tokens.channels;
  b.groups = groups;
  b.dy = tokens.of<const S>(dy);
  b.x = tokens.of<const S>(x);
  b.padding = tokens.of_mask(padding_mask);
  b.inv_rms = tokens.of<const A>(inv_rms);
  b.stream = exceeds_cache(x, 3);
  return b;
}

Tensor gradient_sums(
    const Tensor& given_dy, const Tensor& given, const Optional& padding_mask, const Optional& mean,
    const Tensor& inv_rms, int64_t groups) {
  Contract(given, groups).dy(given_dy).mask(padding_mask).vector("mean", mean).inv_rms(inv_rms);
  const Tensor x = with_unit_stride(given), dy = with_unit_stride(given_dy), scales = inv_rms.contiguous();
  const Tokens tokens(x);
  Tensor result = new_wide(x, {2, 2, tokens.channels});
  for_type_of(x, [&](auto* storage, auto wide, const auto& passes) {
    using S = std::remove_pointer_t<decltype(storage)>;
    using A = decltype(wide);
    const Channels<A> center(mean, x);
    Backward<S, A> b = backward_of<S, A>(tokens, dy, x, padding_mask, scales, groups);
    b.center = center.data;
    const Total total = run(tokens, passes, b, true);
    copy_to<A>(result, total.sums.data());
  });
  return result;
}

std::tuple<Tensor, Tensor> gradient(
    const Tensor& given_dy, const Tensor& given, const Optional& padding_mask, const Optional& scale,
    const Optional& slope, const Optional& offset, const Optional& mean, const Tensor& inv_rms, int64_t groups,
    bool sums_wanted) {
  Contract contract(given, groups);
  contract.dy(given_dy).mask(padding_mask).inv_rms(inv_rms);
  contract.vector("scale", scale).vector("slope", slope).vector("offset", offset).vector("mean", mean);
  const Tensor x = with_unit_stride(given), dy = with_unit_stride(given_dy), scales = inv_rms.contiguous();
  const Tokens tokens(x);
  const int64_t channels = tokens.channels;
  Result dx(given, x);
  Tensor result = sums_wanted ? new_wide(x, {2, 2, channels}) : new_wide(x, {0});
  for_type_of(x, [&](auto* storage, auto wide, const auto& passes) {
    using S = std::remove_pointer_t<decltype(storage)>;
    using A = decltype(wide);
    const Channels<A> given_scale(scale, x), given_slope(slope, x), given_offset(offset, x), center(mean, x);
    const std::vector<A> gain = scale_of<A>(given_scale, nullptr, 0.0, channels);
    // An offset belongs to a slope, and the passes know it with a center only.
    const bool both = given_slope && (center || given_offset);
    std::vector<A> zero(both ? channels : 0);
    Backward<S, A> b = backward_of<S, A>(tokens, dy, x, padding_mask, scales, groups);
    b.dx = tokens.of<S>(dx.rows);
    b.scale = gain.data();
    b.slope = given_slope.data;
    b.offset = given_offset || !both ? given_offset.data : zero.data();
    b.center = center || !both ? center.data : zero.data();
    const Total total = run(tokens, passes, b, sums_wanted);
    copy_to<A>(result, total.sums.data());
  });
  return {dx.get(), result};
}

// Rows of `vectors` of PN, and of BN and PN-V, which has no mean; entries of `tally`.
enum { kSquares, kPsi2Used, kNu, kPsi2Before, kPsi2Batch, kVectors };
enum { kMoment, kMomentBefore, kMean, kMeanBefore, kBatchVectors };
enum { kTokens, kCounted, kCumulative, kStepsBefore, kEntries };

Tensor new_tally(const Tensor& x) { return at::empty({kEntries}, x.options().dtype(at::kLong)); }

// Writes the tally of a step of `tokens` real tokens, and returns the weight of its batch in the running statistics: 0 if
// they stay what they are. `finite` tells whether all statistics of the batch are.
float count_in(
    const Tensor& tally, int64_t tokens, bool finite, bool cumulative, double alpha, bool update, int64_t* steps) {
  int64_t* entries = tally.data_ptr<int64_t>();
  entries[kTokens] = tokens;
  entries[kCounted] = tokens && finite;
  entries[kCumulative] = cumulative;
  entries[kStepsBefore] = *steps;
  if (!update || !entries[kCounted]) return 0.0f;
  ++*steps;
  return cumulative ? 1.0f / static_cast<float>(*steps) : static_cast<float>(1.0 - alpha);
}

template <class A>
void move(float* running, const A* batch, float share, int64_t channels) {
  for (int64_t c = 0; c < channels; ++c) running[c] += share * (static_cast<float>(batch[c]) - running[c]);
}

template <class A>
bool all_finite(const A* values, int64_t size) {
  bool finite = true;
  for (int64_t k = 0; k < size; ++k) finite = finite && std::isfinite(values[k]);
  return finite;
}

// Whether they are as the float32 of a running statistic.
template <class A>
bool all_finite_as_state(const A* batch, int64_t channels) {
  bool finite = true;
  for (int64_t c = 0; c < channels; ++c) finite = finite && std::isfinite(static_cast<float>(batch[c]));
  return finite;
}

template <class A>
void restore(float* running, const A* before, int64_t channels) {
  for (int64_t c = 0; c < channels; ++c) running[c] = static_cast<float>(before[c]);
}

void take_back(int64_t* steps, int64_t* entries) {
  *steps = entries[kStepsBefore];
  entries[kCounted] = 0;
}

void note_changes(std::initializer_list<const Tensor*> changed) {
  for (const Tensor* each : changed) each->unsafeGetTensorImpl()->bump_version();
}

// Gradients of weight and bias, in the wide type until all of them are there; empty without.
struct ParameterGradients {
  const Optional& weight;
  Tensor gain, shift;

  ParameterGradients(const Optional& weight, const Tensor& x, int64_t channels)
      : weight(weight), gain(weight ? new_wide(x, {channels}) : at::empty({0}, x.options())), shift(at::empty_like(gain)) {}

  // From the four sums of a backward pass, and what is under the root that h is divided by.
  template <class A>
  void set(const double* sums, const A* moment, double eps, int64_t channels) {
    if (!weight) return;
    A *to_gain = gain.data_ptr<A>(), *to_shift = shift.data_ptr<A>();
    for (int64_t c = 0; c < channels; ++c) {
      to_gain[c] = static_cast<A>((sums[c] + sums[2 * channels + c]) / std::sqrt(moment[c] + static_cast<A>(eps)));
      to_shift[c] = static_cast<A>(sums[channels + c] + sums[3 * channels + c]);
    }
  }

  void narrow() {
    if (!weight || weight->scalar_type() == gain.scalar_type()) return;
    gain = gain.to(weight->scalar_type());
    shift = shift.to(weight->scalar_type());
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> power_forward(
    const Tensor& given, const Optional& padding_mask, const Optional& weight, const Optional& bias,
    const Tensor& running_psi2, const Tensor& nu, const Tensor& steps, int64_t groups, double eps, double alpha,
    int64_t warmup, bool update) {
  Contract contract(given, groups);
  contract.mask(padding_mask).vector("weight", weight).vector("bias", bias);
  contract.state("running_psi2", running_psi2).state("nu", nu).steps(steps);
  const Tensor x = with_unit_stride(given);
  const Tokens tokens(x);
  const int64_t channels = tokens.channels;
  float* psi2 = running_psi2.data_ptr<float>();
  const float* old_nu = nu.data_ptr<float>();
  int64_t* number = steps.data_ptr<int64_t>();
  const bool warming_up = *number < warmup;
  Result y(given, x);
  Tensor inv_rms = new_scales(x, groups), vectors = new_wide(x, {kVectors, channels});
  Tensor tally = new_tally(x);
  for_type_of(x, [&](auto* storage, auto wide, const auto& passes) {
    using S = std::remove_pointer_t<decltype(storage)>;
    using A = decltype(wide);
    A* rows = vectors.data_ptr<A>();
    A *squares = rows + kSquares * channels, *used = rows + kPsi2Used * channels, *batch = rows + kPsi2Batch * channels;
    for (int64_t c = 0; c < channels; ++c) {
      rows[kNu * channels + c] = static_cast<A>(old_nu[c]);
      used[c] = rows[kPsi2Before * channels + c] = static_cast<A>(psi2[c]);
    }
    const Channels<A> gain(weight, x), shift(bias, x);
    const std::vector<A> offset = bias_of<A>(shift, channels);
    Forward<S, A> f = forward_of<S, A>(tokens, x, inv_rms, groups, eps);
    f.padding = tokens.of_mask(padding_mask);
    f.bias = offset.data();
    std::vector<A> scale;
    auto write_y = [&] {
      scale = scale_of<A>(gain, used, eps, channels);
      f.scale = scale.data();
      f.y = tokens.of<S>(y.rows);
    };
    // The running psi is known before the batch is seen, so one pass does it all; its own is not.
    if (!warming_up) write_y();
    const Total total = run(tokens, passes, f, Kind::squares);
    const double count = static_cast<double>(std::max<int64_t>(1, total.real));
    for (int64_t c = 0; c < channels; ++c) {
      squares[c] = static_cast<A>(total.sums[c]);
      batch[c] = static_cast<A>(total.sums[c] / count);
      if (warming_up && total.real) used[c] = batch[c];
    }
    if (warming_up) {
      write_y();
      f.given = true;
      run(tokens, passes, f, Kind::none);
    }
    const bool finite = all_finite_as_state(batch, channels);
    const float share = count_in(tally, total.real, finite, warming_up, alpha, update, number);
    if (share != 0.0f) move(psi2, batch, share, channels);
  });
  if (update) note_changes({&running_psi2, &steps});
  return {y.get(), inv_rms, vectors, tally};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> power_backward(
    const Tensor& given_dy, const Tensor& given, const Optional& padding_mask, const Optional& weight,
    const Tensor& inv_rms, const Tensor& vectors, const Tensor& running_psi2, const Tensor& nu, const Tensor& steps,
    const Tensor& tally, int64_t groups, double eps, double alpha, bool update) {
  Contract contract(given, groups);
  contract.dy(given_dy).mask(padding_mask).vector("weight", weight).inv_rms(inv_rms).vectors(vectors, kVectors);
  contract.state("running_psi2", running_psi2).state("nu", nu).steps(steps).tally(tally);
  const Tensor x = with_unit_stride(given), dy = with_unit_stride(given_dy), scales = inv_rms.contiguous();
  const Tokens tokens(x);
  const int64_t channels = tokens.channels;
  float *psi2 = running_psi2.data_ptr<float>(), *present_nu = nu.data_ptr<float>();
  int64_t *number = steps.data_ptr<int64_t>(), *entries = tally.data_ptr<int64_t>();
  Result dx(given, x);
  ParameterGradients gradients(weight, x, channels);
  Tensor lambda_total = new_wide(x, {channels});
  for_type_of(x, [&](auto* storage, auto wide, const auto& passes) {
    using S = std::remove_pointer_t<decltype(storage)>;
    using A = decltype(wide);
    const A* rows = vectors.const_data_ptr<A>();
    const A *used = rows + kPsi2Used * channels, *batch = rows + kPsi2Batch * channels;
    const Channels<A> gain(weight, x);
    const std::vector<A> scale = scale_of<A>(gain, used, eps, channels);
    std::vector<A> slope(channels);
    for (int64_t c = 0; c < channels; ++c) slope[c] = rows[kNu * channels + c] / (used[c] + static_cast<A>(eps));
    Backward<S, A> b = backward_of<S, A>(tokens, dy, x, padding_mask, scales, groups);
    b.dx = tokens.of<S>(dx.rows);
    b.scale = scale.data();
    b.slope = slope.data();
    const Total total = run(tokens, passes, b, true);

    const double* sums = total.sums.data();
    A* lambda = lambda_total.data_ptr<A>();
    for (int64_t c = 0; c < channels; ++c) lambda[c] = static_cast<A>(sums[c] * scale[c]);
    gradients.set<A>(sums, used, eps, channels);
    if (!update) return;
    const A rate = static_cast<A>(1.0 - alpha), count = static_cast<A>(std::max<int64_t>(1, entries[kTokens]));
    std::vector<A> moved(channels);
    bool finite = true;
    for (int64_t c = 0; c < channels; ++c) {
      const A gamma_moment = batch[c] / (used[c] + static_cast<A>(eps)), lambda_moment = lambda[c] / count;
      finite = finite && std::isfinite(gamma_moment) && std::isfinite(lambda_moment);
      moved[c] = static_cast<A>(present_nu[c]) * std::max(A(0), A(1) - rate * gamma_moment) + rate * lambda_moment;
    }
    if (!finite) {
      restore(psi2, rows + kPsi2Before * channels, channels);
      take_back(number, entries);
    } else if (entries[kTokens]) {
      for (int64_t c = 0; c < channels; ++c) present_nu[c] = static_cast<float>(moved[c]);
    }
  });
  if (update) note_changes({&running_psi2, &nu, &steps, &tally});
  gradients.narrow();
  return {dx.get(), gradients.gain, gradients.shift, lambda_total};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_forward(
    const Tensor& given, const Optional& padding_mask, const Optional& weight, const Optional& bias,
    const Optional& running_mean, const Tensor& running_moment, const Tensor& steps, int64_t groups, double eps,
    double alpha, bool cumulative, bool update) {
  Contract contract(given, groups);
  contract.mask(padding_mask).vector("weight", weight).vector("bias", bias);
  contract.state("running_mean", running_mean).state("running_moment", running_moment).steps(steps);
  const Tensor x = with_unit_stride(given);
  const Tokens tokens(x);
  const int64_t channels = tokens.channels;
  float* old_moment = running_moment.data_ptr<float>();
  float* old_mean = running_mean ? running_mean->data_ptr<float>() : nullptr;
  Result y(given, x);
  Tensor inv_rms = new_scales(x, groups), tally = new_tally(x);
  Tensor vectors = new_wide(x, {old_mean ? kBatchVectors : kMean, channels});
  for_type_of(x, [&](auto* storage, auto wide, const auto& passes) {
    using S = std::remove_pointer_t<decltype(storage)>;
    using A = decltype(wide);
    A *rows = vectors.data_ptr<A>(), *moment = rows + kMoment * channels;
    const Channels<A> gain(weight, x), shift(bias, x);
    const std::vector<A> offset = bias_of<A>(shift, channels);
    Forward<S, A> f = forward_of<S, A>(tokens, x, inv_rms, groups, eps);
    f.padding = tokens.of_mask(padding_mask);
    f.bias = offset.data();
    auto write_means = [&](A* means, const Total& total) {
      const double count = static_cast<double>(std::max<int64_t>(1, total.real));
      for (int64_t c = 0; c < channels; ++c) means[c] = static_cast<A>(total.sums[c] / count);
    };
    if (old_mean) {
      A* mean = rows + kMean * channels;
      write_means(mean, run(tokens, passes, f, Kind::values));
      std::copy(old_mean, old_mean + channels, rows + kMeanBefore * channels);
      f.given = true;
      f.center = mean;
    }
    const Total total = run(tokens, passes, f, Kind::squares);
    write_means(moment, total);
    std::copy(old_moment, old_moment + channels, rows + kMomentBefore * channels);
    const std::vector<A> scale = scale_of<A>(gain, moment, eps, channels);
    f.scale = scale.data();
    f.y = tokens.of<S>(y.rows);
    f.given = true;
    run(tokens, passes, f, Kind::none);

    std::vector<A> batch(moment, moment + channels);
    bool finite = true;
    if (old_mean) {
      const A count = static_cast<A>(total.real), correction = count / (count - A(1));  // infinite for one token
      for (A& value : batch) value *= correction;
      finite = all_finite_as_state(f.center, channels);
    }
    finite = all_finite_as_state(batch.data(), channels) && finite;
    const float share = count_in(
        tally, total.real, finite, cumulative, alpha, update, steps.data_ptr<int64_t>());
    if (share == 0.0f) return;
    move(old_moment, batch.data(), share, channels);
    if (old_mean) move(old_mean, f.center, share, channels);
  });
  if (update) {
    note_changes({&running_moment, &steps});
    if (running_mean) note_changes({&*running_mean});
  }
  return {y.get(), inv_rms, vectors, tally};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_backward(
    const Tensor& given_dy, const Tensor& given, const Optional& padding_mask, const Optional& weight,
    const Tensor& inv_rms, const Tensor& vectors, const Optional& running_mean, const Tensor& running_moment,
    const Tensor& steps, const Tensor& tally, int64_t groups, double eps, bool update) {
  Contract contract(given, groups);
  contract.dy(given_dy).mask(padding_mask).vector("weight", weight).inv_rms(inv_rms);
  contract.vectors(vectors, running_mean ? kBatchVectors : kMean);
  contract.state("running_mean", running_mean).state("running_moment", running_moment).steps(steps).tally(tally);
  const Tensor x = with_unit_stride(given), dy = with_unit_stride(given_dy), scales = inv_rms.contiguous();
  const Tokens tokens(x);
  const int64_t channels = tokens.channels;
  float* present_moment = running_moment.data_ptr<float>();
  float* present_mean = running_mean ? running_mean->data_ptr<float>() : nullptr;
  int64_t* entries = tally.data_ptr<int64_t>();
  Result dx(given, x);
  ParameterGradients gradients(weight, x, channels);
  Tensor result = new_wide(x, {2, channels});
  for_type_of(x, [&](auto* storage, auto wide, const auto& passes) {
    using S = std::remove_pointer_t<decltype(storage)>;
    using A = decltype(wide);
    const A *rows = vectors.const_data_ptr<A>(), *moment = rows + kMoment * channels;
    Backward<S, A> b = backward_of<S, A>(tokens, dy, x, padding_mask, scales, groups);
    b.center = present_mean ? rows + kMean * channels : nullptr;
    const Total total = run(tokens, passes, b, true);
    const double* sums = total.sums.data();
    copy_to<A>(result, sums);
    gradients.set<A>(sums, moment, eps, channels);

    const Channels<A> gain(weight, x);
    const std::vector<A> scale = scale_of<A>(gain, moment, eps, channels);
    std::vector<A> slope(channels), offset(present_mean ? channels : 0);
    const double count = static_cast<double>(std::max<int64_t>(1, entries[kTokens]));
    for (int64_t c = 0; c < channels; ++c) {
      slope[c] = scale[c] * static_cast<A>(sums[c] / count) / (moment[c] + static_cast<A>(eps));
      if (present_mean) offset[c] = scale[c] * static_cast<A>(sums[channels + c] / count);
    }
    b.dx = tokens.of<S>(dx.rows);
    b.scale = scale.data();
    b.slope = slope.data();
    b.offset = present_mean ? offset.data() : nullptr;
    run(tokens, passes, b, false);

    if (!update || all_finite(result.const_data_ptr<A>(), 2 * channels)) return;
    restore(present_moment, rows + kMomentBefore * channels, channels);
    if (present_mean) restore(present_mean, rows + kMeanBefore * channels, channels);
    take_back(steps.data_ptr<int64_t>(), entries);
  });
  if (update) {
    note_changes({&running_moment, &steps, &tally});
    if (running_mean) note_changes({&*running_mean});
  }
  gradients.narrow();
  return {dx.get(), gradients.gain, gradients.shift, result};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(pn_fairseq, library) { library.def("cpu_capability() -> str", &cpu_capability); }

TORCH_LIBRARY_IMPL(pn_fairseq, CPU, library) {
  library.impl("normalize", &normalize);
  library.impl("moments", &moments);
  library.impl("gradient_sums", &gradient_sums);
  library.impl("gradient", &gradient);
  library.impl("power_forward", &power_forward);
  library.impl("power_backward", &power_backward);
  library.impl("batch_forward", &batch_forward);
  library.impl("batch_backward", &batch_backward);
}

}  // namespace pn
