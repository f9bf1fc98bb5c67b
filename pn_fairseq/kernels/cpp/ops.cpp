// The operators of pn_fairseq for the CPU. pn_fairseq/kernels/reference.py defines what they compute.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "rows.h"

namespace pn {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

// The implementation with the widest vectors that the CPU has, and that torch's own variable for its kernels allows.
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

// Memory that begins at a multiple of 64 bytes: reading a vector of AVX-512 that lies in two lines of the cache takes twice
// as long.
template <class T>
struct Aligned {
  using value_type = T;
  static constexpr std::align_val_t kBytes{64};
  Aligned() = default;
  template <class U>
  Aligned(const Aligned<U>&) {}
  T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), kBytes)); }
  void deallocate(T* values, size_t) { ::operator delete(values, kBytes); }
  bool operator==(const Aligned&) const { return true; }
  bool operator!=(const Aligned&) const { return false; }
};

template <class A>
using Values = std::vector<A, Aligned<A>>;

// Calls `compute(storage, accumulator, passes)` with the types that belong to `x`; `storage` is a null pointer.
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

at::ScalarType acc_dtype(const Tensor& x) { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

Tensor new_acc(const Tensor& x, at::IntArrayRef sizes) { return at::empty(sizes, x.options().dtype(acc_dtype(x))); }

// The shape (..., groups) of a number for each token and group.
std::vector<int64_t> sizes_of_groups(const Tensor& x, int64_t groups) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = groups;
  return sizes;
}

Tensor new_inv_rms(const Tensor& x, int64_t groups) { return new_acc(x, sizes_of_groups(x, groups)); }

int64_t rows_of(const Tensor& x) { return x.size(-1) ? x.numel() / x.size(-1) : 0; }

// A result like `x`, contiguous for all strides of `x`, as the result of torch's layer_norm.
Tensor new_like(const Tensor& x) { return at::empty(x.sizes(), x.options()); }

// The tokens of `x` where they lie, or of a contiguous copy in `held` where Rows cannot describe them.
template <class S>
Rows<S> rows_in(const Tensor& x, Tensor& held) {
  const int64_t channels = x.size(-1);
  if (x.is_contiguous()) return {static_cast<const S*>(x.const_data_ptr()), 0, 0, channels};
  const bool fits = (x.dim() == 2 || x.dim() == 3) && (channels == 1 || x.stride(-1) == 1) && rows_of(x) <= std::numeric_limits<uint32_t>::max();
  held = fits ? x : x.contiguous();
  const S* data = static_cast<const S*>(held.const_data_ptr());
  if (!fits) return {data, 0, 0, channels};
  if (x.dim() == 2) return {data, 0, 0, x.stride(0)};
  return {data, static_cast<uint32_t>(x.size(1)), x.stride(0), x.stride(1)};
}

// The callers have checked what users gave them; this keeps a wrong call from reading memory that is not its own.
void check_sizes(
    const Tensor& x, int64_t groups, const Optional& like_x, const Optional& padding, const Optional& inv_rms,
    std::initializer_list<const Optional*> vectors) {
  bool fits = x.dim() > 0 && groups >= 0 && (groups == 0 || x.size(-1) % groups == 0);
  if (like_x) fits = fits && like_x->sizes() == x.sizes() && like_x->dtype() == x.dtype();
  if (padding) fits = fits && padding->numel() == rows_of(x) && padding->dtype() == at::kBool;
  if (inv_rms) {
    fits = fits && inv_rms->numel() == rows_of(x) * groups && inv_rms->is_contiguous() &&
        inv_rms->scalar_type() == acc_dtype(x);
  }
  for (const Optional* vector : vectors) fits = fits && (!*vector || (*vector)->numel() == x.size(-1));
  TORCH_CHECK_VALUE(fits, "arguments of an operator of pn_fairseq do not fit x of shape ", x.sizes());
}

// A mask where it lies, as rows of one channel.
Rows<bool> mask_in(const Optional& padding, Tensor& held) {
  if (!padding) return {nullptr, 0, 0, 1};
  const bool fits = (padding->dim() == 1 || padding->dim() == 2) && padding->numel() <= std::numeric_limits<uint32_t>::max();
  held = fits ? *padding : padding->contiguous();
  const bool* data = held.const_data_ptr<bool>();
  if (!fits) return {data, 0, 0, 1};
  if (held.dim() == 1) return {data, 0, 0, held.stride(0)};
  return {data, static_cast<uint32_t>(held.size(1)), held.stride(0), held.stride(1)};
}

// The loss scale, or 1.
double value_of(const Optional& loss_scale) { return loss_scale ? loss_scale->item().toDouble() : 1.0; }

// A result in the type of `weight`.
Tensor in_type_of(const Optional& weight, const Tensor& values) { return weight ? values.to(weight->scalar_type()) : values; }

// A vector over channels in the accumulation dtype; null where it is not given.
template <class A>
struct Vector {
  Tensor held;
  const A* data = nullptr;

  Vector(const Optional& vector, const Tensor& x) {
    if (!vector) return;
    held = vector->to(acc_dtype(x)).contiguous();
    data = held.const_data_ptr<A>();
  }
};

// A vector over channels, or `otherwise` in every channel.
template <class A>
Values<A> filled(const Optional& vector, const Tensor& x, A otherwise) {
  Values<A> result(x.size(-1), otherwise);
  const Vector<A> given(vector, x);
  if (given.data) std::copy(given.data, given.data + x.size(-1), result.begin());
  return result;
}

// 1 / sqrt(moment + eps), or 1 without a moment.
template <class A>
Values<A> inverse_root(const Vector<A>& moment, double eps, int64_t channels) {
  Values<A> result(channels, A(1));
  if (moment.data) {
    for (int64_t c = 0; c < channels; ++c) result[c] = A(1) / std::sqrt(moment.data[c] + static_cast<A>(eps));
  }
  return result;
}

template <class A>
void multiply(A* values, const A* factors, int64_t size) {
  for (int64_t c = 0; c < size; ++c) values[c] *= factors[c];
}

// A thread that gets fewer elements than this costs more than it gives.
constexpr int64_t kWorthAThread = 32768;

// Sums over all tokens. Those of the threads are added up in their order: the same for the same number of threads.
struct Total {
  std::vector<double> sums;  // as in Sums
  int64_t real = 0;

  double tokens() const { return static_cast<double>(std::max<int64_t>(1, real)); }
};

// Calls `pass(begin, end, sums)` on a share of the rows in each thread; `vectors` sums over channels are kept.
template <class A, class F>
Total over_tokens(const Tensor& x, int64_t vectors, F&& pass) {
  const int64_t rows = rows_of(x), size = vectors * x.size(-1);
  const int64_t worth_it = std::max<int64_t>(1, x.numel() / kWorthAThread);
  const int64_t threads = at::in_parallel_region() ? 1 : std::min<int64_t>(at::get_num_threads(), worth_it);
  Values<A> narrow(threads * size);
  std::vector<double> wide(threads * size);
  std::vector<int64_t> real(threads);
  auto share = [&](int64_t thread) {
    Sums<A> sums;
    if (vectors) sums = {narrow.data() + thread * size, wide.data() + thread * size};
    const int64_t begin = rows * thread / threads, end = rows * (thread + 1) / threads;
    if (begin < end) pass(begin, end, sums);
    real[thread] = sums.real;
  };
  if (threads == 1) {
    share(0);
  } else {
    at::parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
      for (int64_t thread = first; thread < last; ++thread) share(thread);
    });
  }
  Total total;
  for (int64_t thread = 0; thread < threads; ++thread) {
    total.real += real[thread];
    for (int64_t k = 0; thread && k < size; ++k) wide[k] += wide[thread * size + k];
  }
  wide.resize(size);
  total.sums = std::move(wide);
  return total;
}

// What one core can count on of the largest cache, which the system does not tell: sysconf may name that of all cores.
constexpr int64_t kCacheBytes = int64_t{32} << 20;

// Whether `tensors` like `x`, each read or written once in a pass, push its beginning out of all caches.
bool exceeds_cache(const Tensor& x, int64_t tensors) {
  return tensors * x.numel() * static_cast<int64_t>(x.element_size()) >= kCacheBytes;
}

// What is read where it lies, or of contiguous copies.
struct Held {
  Tensor x, dy, padding;
};

template <class S, class A>
Forward<S, A> forward_of(
    const Tensor& x, Held& held, const Optional& padding, const Tensor& inv_rms, bool given, int64_t groups, double eps) {
  Forward<S, A> f{};
  f.channels = x.size(-1);
  f.groups = groups;
  f.eps = static_cast<A>(eps);
  f.x = rows_in<S>(x, held.x);
  f.padding = mask_in(padding, held.padding);
  f.inv_rms = static_cast<A*>(inv_rms.data_ptr());
  f.given = given;
  f.stream = exceeds_cache(x, 2);
  return f;
}

template <class S, class A>
Total run(const Tensor& x, const Passes<S, A>& passes, const Forward<S, A>& f, Kind kind) {
  return over_tokens<A>(x, kind == Kind::none ? 0 : 2, [&](int64_t begin, int64_t end, Sums<A>& sums) {
    passes.forward(f, begin, end, kind, sums);
  });
}

// A mean over the real tokens, (C,).
template <class A>
Tensor mean_of(const Tensor& x, const Total& total) {
  Tensor mean = new_acc(x, {x.size(-1)});
  A* data = mean.data_ptr<A>();
  for (int64_t c = 0; c < x.size(-1); ++c) data[c] = static_cast<A>(total.sums[c] / total.tokens());
  return mean;
}

template <class A>
Tensor count_of(const Tensor& x, const Total& total) {
  Tensor count = new_acc(x, {});
  *count.data_ptr<A>() = static_cast<A>(total.real);
  return count;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> normalize(
    const Tensor& x, const Optional& weight, const Optional& bias, const Optional& mean, const Optional& moment,
    const Optional& padding, const Optional& inv_rms, int64_t groups, double eps, bool sums) {
  check_sizes(x, groups, std::nullopt, sums ? padding : std::nullopt, inv_rms, {&weight, &bias, &mean, &moment});
  const int64_t channels = x.size(-1);
  const Tensor y = new_like(x), scales = inv_rms ? *inv_rms : new_inv_rms(x, groups);
  Tensor batch_moment, count;
  for_type_of(x, [&](auto* storage, auto accumulator, const auto& passes) {
    using S = std::remove_pointer_t<decltype(storage)>;
    using A = decltype(accumulator);
    const Vector<A> gain(weight, x), center(mean, x), second(moment, x);
    const Values<A> offset = filled<A>(bias, x, A(0));
    Values<A> scale = inverse_root(second, eps, channels);
    if (gain.data) multiply(scale.data(), gain.data, channels);
    Held held;
    Forward<S, A> f = forward_of<S, A>(x, held, padding, scales, inv_rms.has_value(), groups, eps);
    f.y = static_cast<S*>(y.data_ptr());
    f.scale = scale.data();
    f.bias = offset.data();
    f.center = center.data;
    const Total total = run(x, passes, f, sums ? Kind::squares : Kind::none);
    if (!sums) return;
    batch_moment = mean_of<A>(x, total);
    count = count_of<A>(x, total);
  });
  if (!sums) batch_moment = new_acc(x, {0}), count = new_acc(x, {0});
  return {y, inv_rms ? new_acc(x, {0}) : scales, batch_moment, count};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> moments(
    const Tensor& x, const Optional& padding, int64_t groups, double eps, bool centered) {
  check_sizes(x, groups, std::nullopt, padding, std::nullopt, {});
  const Tensor inv_rms = new_inv_rms(x, groups);
  Tensor mean = new_acc(x, {0}), moment, count;
  for_type_of(x, [&](auto* storage, auto accumulator, const auto& passes) {
    using S = std::remove_pointer_t<decltype(storage)>;
    using A = decltype(accumulator);
    Held held;
    Forward<S, A> f = forward_of<S, A>(x, held, padding, inv_rms, false, groups, eps);
    if (centered) {
      mean = mean_of<A>(x, run(x, passes, f, Kind::values));
      f.given = true;
      f.center = mean.const_data_ptr<A>();
    }
    const Total total = run(x, passes, f, centered ? Kind::deviations : Kind::squares);
    moment = mean_of<A>(x, total);
    count = count_of<A>(x, total);
  });
  return {inv_rms, mean, moment, count};
}

// dx if `dx` has memory, and the sums if `parameters` and `products` have.
void backward(
    const Tensor& dy, const Tensor& x, const Optional& padding, const Optional& weight, const Optional& mean,
    const Optional& moment, const Optional& nu, const Optional& offset, const Optional& count, const Optional& loss_scale,
    const Tensor& inv_rms, int64_t groups, double eps, const Tensor& dx, const Tensor& parameters, const Tensor& products) {
  check_sizes(x, groups, dy, padding, inv_rms, {&weight, &mean, &moment, &nu, &offset});
  const int64_t channels = x.size(-1);
  const double unscaled = value_of(loss_scale);
  for_type_of(x, [&](auto* storage, auto accumulator, const auto& passes) {
    using S = std::remove_pointer_t<decltype(storage)>;
    using A = decltype(accumulator);
    const Vector<A> gain(weight, x), center(mean, x), second(moment, x), along(nu, x), across(offset, x);
    // dh = scale * dy - 1_real * (slope * (h - center) + shift), and x_hat = (h - center) * factor.
    const Values<A> factor = inverse_root(second, eps, channels);
    Values<A> scale(factor), slope(channels), shift(channels), zeros;
    if (gain.data) multiply(scale.data(), gain.data, channels);
    const A loss = static_cast<A>(unscaled), tokens = count ? std::max(A(1), *count->const_data_ptr<A>()) : A(1);
    if (along.data) {
      for (int64_t c = 0; c < channels; ++c) slope[c] = along.data[c] / tokens * loss * factor[c] * factor[c];
    }
    if (across.data) {
      for (int64_t c = 0; c < channels; ++c) shift[c] = across.data[c] / tokens * loss * factor[c];
    }
    Held held;
    Backward<S, A> b{};
    b.channels = channels;
    b.groups = groups;
    b.dy = rows_in<S>(dy, held.dy);
    b.x = rows_in<S>(x, held.x);
    b.padding = mask_in(padding, held.padding);
    b.inv_rms = inv_rms.const_data_ptr<A>();
    b.dx = dx.defined() ? static_cast<S*>(dx.data_ptr()) : nullptr;
    b.scale = scale.data();
    b.slope = along.data ? slope.data() : nullptr;
    b.offset = shift.data();
    b.center = center.data;
    if (across.data && !center.data) {  // the passes look at the offset where there is a center
      zeros.resize(channels);
      b.center = zeros.data();
    }
    b.stream = exceeds_cache(x, 3);
    const Total total = over_tokens<A>(x, parameters.defined() ? 4 : 0, [&](int64_t begin, int64_t end, Sums<A>& sums) {
      passes.backward(b, begin, end, sums);
    });
    if (!parameters.defined()) return;
    A *all = parameters.data_ptr<A>(), *real = products.data_ptr<A>();
    const double* sums = total.sums.data();
    for (int64_t c = 0; c < channels; ++c) {
      const double products[] = {sums[c], sums[channels + c]};
      all[c] = static_cast<A>(products[0] + sums[2 * channels + c]) * factor[c];
      all[channels + c] = static_cast<A>(products[1] + sums[3 * channels + c]);
      real[c] = static_cast<A>(products[0]) * factor[c];
      real[channels + c] = static_cast<A>(products[1]);
    }
    if (gain.data) {
      multiply(real, gain.data, channels);
      multiply(real + channels, gain.data, channels);
    }
    for (int64_t c = 0; loss_scale && c < 2 * channels; ++c) real[c] /= loss;
  });
}

std::tuple<Tensor, Tensor> gradient_sums(
    const Tensor& dy, const Tensor& x, const Optional& padding, const Optional& weight, const Optional& mean,
    const Optional& moment, const Optional& loss_scale, const Tensor& inv_rms, int64_t groups, double eps) {
  const Optional none;
  const Tensor parameters = new_acc(x, {2, x.size(-1)}), products = new_acc(x, {2, x.size(-1)});
  backward(
      dy, x, padding, weight, mean, moment, none, none, none, loss_scale, inv_rms, groups, eps, Tensor(), parameters, products);
  return {parameters, products};
}

std::tuple<Tensor, Tensor, Tensor> gradient(
    const Tensor& dy, const Tensor& x, const Optional& padding, const Optional& weight, const Optional& mean,
    const Optional& moment, const Optional& nu, const Optional& offset, const Optional& count, const Optional& loss_scale,
    const Tensor& inv_rms, int64_t groups, double eps, bool sums) {
  const Tensor dx = new_like(x);
  const Tensor parameters = sums ? new_acc(x, {2, x.size(-1)}) : Tensor(), products = sums ? at::empty_like(parameters) : Tensor();
  backward(
      dy, x, padding, weight, mean, moment, nu, offset, count, loss_scale, inv_rms, groups, eps, dx, parameters, products);
  if (sums) return {dx, parameters, products};
  return {dx, new_acc(x, {0}), new_acc(x, {0})};
}

// Norms of each token by itself. The gradients of parameters are sums over all tokens.

template <class S, class A>
PerToken<S, A> per_token(
    const Tensor& x, Tensor& held, const Tensor& out, const Tensor& stats, int64_t groups, double gain, double gain_slope) {
  PerToken<S, A> p{};
  p.channels = x.size(-1);
  p.groups = groups;
  p.rows = rows_of(x);
  p.x = rows_in<S>(x, held);
  p.out = static_cast<S*>(out.data_ptr());
  p.stats = static_cast<A*>(stats.data_ptr());
  p.gain = static_cast<A>(gain);
  p.gain_slope = static_cast<A>(gain_slope);
  return p;
}

template <class A>
void write_sums(A* to, const Total& total, int64_t size) {
  for (int64_t k = 0; k < size; ++k) to[k] = static_cast<A>(total.sums[k]);
}

std::tuple<Tensor, Tensor> standardize(
    const Tensor& x, const Optional& weight, const Optional& bias, int64_t groups, bool centered, double square_factor,
    double eps_in_root, double eps_outside, double min_divisor, double gain, double gain_slope) {
  TORCH_CHECK_VALUE(groups > 0, "groups=", groups, " has to be greater than 0");
  check_sizes(x, groups, std::nullopt, std::nullopt, std::nullopt, {&weight, &bias});
  std::vector<int64_t> sizes = sizes_of_groups(x, groups);
  sizes.insert(sizes.begin(), 3);
  const Tensor y = new_like(x), stats = new_acc(x, sizes);
  for_type_of(x, [&](auto* storage, auto accumulator, const auto& passes) {
    using S = std::remove_pointer_t<decltype(storage)>;
    using A = decltype(accumulator);
    const Values<A> scale = filled<A>(weight, x, A(1)), offset = filled<A>(bias, x, A(0));
    Tensor held;
    PerToken<S, A> p = per_token<S, A>(x, held, y, stats, groups, gain, gain_slope);
    if (weight || bias) p.scale = scale.data(), p.bias = offset.data();
    p.centered = centered;
    p.square_factor = static_cast<A>(square_factor);
    p.eps_in_root = static_cast<A>(eps_in_root);
    p.eps_outside = static_cast<A>(eps_outside);
    p.min_divisor = static_cast<A>(min_divisor);
    p.stream = exceeds_cache(x, 2);
    over_tokens<A>(x, 0, [&](int64_t begin, int64_t end, Sums<A>&) { passes.standardize(p, begin, end); });
  });
  return {y, stats};
}

std::tuple<Tensor, Tensor> standardize_gradient(
    const Tensor& dy, const Tensor& x, const Optional& weight, const Tensor& stats, int64_t groups, double gain,
    double gain_slope, bool through_mean, bool through_divisor, bool sums) {
  TORCH_CHECK_VALUE(groups > 0, "groups=", groups, " has to be greater than 0");
  check_sizes(x, groups, dy, std::nullopt, std::nullopt, {&weight});
  TORCH_CHECK_VALUE(
      stats.numel() == 3 * rows_of(x) * groups && stats.is_contiguous() && stats.scalar_type() == acc_dtype(x),
      "arguments of an operator of pn_fairseq do not fit x of shape ", x.sizes());
  const Tensor dx = new_like(x), parameters = sums ? new_acc(x, {2, x.size(-1)}) : new_acc(x, {0});
  for_type_of(x, [&](auto* storage, auto accumulator, const auto& passes) {
    using S = std::remove_pointer_t<decltype(storage)>;
    using A = decltype(accumulator);
    const Vector<A> scale(weight, x);
    Tensor held_x, held_dy;
    PerToken<S, A> p = per_token<S, A>(x, held_x, dx, stats, groups, gain, gain_slope);
    p.dy = rows_in<S>(dy, held_dy);
    p.scale = scale.data;
    p.through_mean = through_mean;
    p.through_divisor = through_divisor;
    p.stream = exceeds_cache(x, 3);
    const Total total = over_tokens<A>(x, sums ? 2 : 0, [&](int64_t begin, int64_t end, Sums<A>& sums) {
      passes.standardize_gradient(p, begin, end, sums);
    });
    write_sums(parameters.data_ptr<A>(), total, parameters.numel());
  });
  return {dx, parameters};
}

template <class S, class A>
Squash<S, A> squash_of(
    const Tensor& x, Tensor& held, const Tensor& out, const Tensor& alpha, const Optional& shift, bool erf) {
  Squash<S, A> s{};
  s.channels = x.size(-1);
  s.x = rows_in<S>(x, held);
  s.out = static_cast<S*>(out.data_ptr());
  s.alpha = alpha.item().to<A>();
  s.shift = shift ? shift->item().to<A>() : A(0);
  s.erf = erf;
  return s;
}

Tensor squash(
    const Tensor& x, const Optional& weight, const Optional& bias, const Tensor& alpha, const Optional& shift, bool erf) {
  check_sizes(x, 0, std::nullopt, std::nullopt, std::nullopt, {&weight, &bias});
  const Tensor y = new_like(x);
  for_type_of(x, [&](auto* storage, auto accumulator, const auto& passes) {
    using S = std::remove_pointer_t<decltype(storage)>;
    using A = decltype(accumulator);
    const Values<A> scale = filled<A>(weight, x, A(1)), offset = filled<A>(bias, x, A(0));
    Tensor held;
    Squash<S, A> s = squash_of<S, A>(x, held, y, alpha, shift, erf);
    s.scale = scale.data();
    s.bias = offset.data();
    s.stream = exceeds_cache(x, 2);
    over_tokens<A>(x, 0, [&](int64_t begin, int64_t end, Sums<A>&) { passes.squash(s, begin, end); });
  });
  return y;
}

std::tuple<Tensor, Tensor, Tensor> squash_gradient(
    const Tensor& dy, const Tensor& x, const Optional& weight, const Tensor& alpha, const Optional& shift, bool erf) {
  check_sizes(x, 0, dy, std::nullopt, std::nullopt, {&weight});
  const int64_t channels = x.size(-1);
  const Tensor dx = new_like(x), parameters = new_acc(x, {2, channels}), scalars = new_acc(x, {2});
  for_type_of(x, [&](auto* storage, auto accumulator, const auto& passes) {
    using S = std::remove_pointer_t<decltype(storage)>;
    using A = decltype(accumulator);
    const Values<A> scale = filled<A>(weight, x, A(1));
    Tensor held_x, held_dy;
    Squash<S, A> s = squash_of<S, A>(x, held_x, dx, alpha, shift, erf);
    s.dy = rows_in<S>(dy, held_dy);
    s.scale = scale.data();
    s.stream = exceeds_cache(x, 3);
    const Total total = over_tokens<A>(x, 4, [&](int64_t begin, int64_t end, Sums<A>& sums) {
      passes.squash_gradient(s, begin, end, sums);
    });
    write_sums(parameters.data_ptr<A>(), total, 2 * channels);
    for (int64_t k = 0; k < 2; ++k) {
      scalars.data_ptr<A>()[k] = channels ? static_cast<A>(total.sums[(2 + k) * channels]) : A(0);
    }
  });
  return {dx, parameters, scalars};
}

// Operators on the state, which is float32; the batch is in its accumulation dtype.

template <class A>
bool all_finite(const A* values, int64_t size) {
  int faults = 0;  // counted without a branch: the compiler makes vectors of it
  for (int64_t k = 0; k < size; ++k) faults += !(std::abs(static_cast<float>(values[k])) <= std::numeric_limits<float>::max());
  return faults == 0;
}

template <class A>
bool all_finite(const Tensor& values) {
  return all_finite(values.const_data_ptr<A>(), values.numel());
}

// The memory of state, which autograd is told will be changed.
template <class T>
T* changed(const Tensor& state) {
  TORCH_CHECK_VALUE(state.is_contiguous(), "the state of an operator of pn_fairseq has to be contiguous");
  state.unsafeGetTensorImpl()->bump_version();
  return state.data_ptr<T>();
}

template <class A>
void move(float* running, const A* batch, A share, int64_t channels) {
  for (int64_t c = 0; c < channels; ++c) running[c] = static_cast<float>(running[c] + share * (batch[c] - running[c]));
}

// The entries 0 and 2 of the diagnostics. The sum of |log(b / r)| is the logarithm of a product, which is taken before
// the product overflows: a factor is at most 2^255.
template <class A>
void note(float* diagnostics, const float* running, const A* batch, int64_t channels, bool real, bool counted) {
  if (real && !counted) diagnostics[0] += 1.0f;
  const float tiny = std::numeric_limits<float>::min();
  double sum = 0.0, product = 1.0;
  for (int64_t c = 0; c < channels; ++c) {
    const float of_batch = static_cast<float>(batch[c]);
    const double numerator = of_batch < tiny ? tiny : of_batch, denominator = running[c] < tiny ? tiny : running[c];
    product *= numerator < denominator ? denominator / numerator : numerator / denominator;
    if (product > 0x1p512) {
      sum += std::log(product);
      product = 1.0;
    }
  }
  diagnostics[2] = static_cast<float>(0.5 * (sum + std::log(product)) / static_cast<double>(channels));
}

void running_average_(
    const Tensor& moment, const Optional& mean, const Tensor& num_batches, const Optional& diagnostics,
    const Tensor& batch_moment, const Optional& batch_mean, const Tensor& products, const Tensor& count, double alpha,
    bool unbiased) {
  const int64_t channels = moment.numel();
  for_type_of(batch_moment, [&](auto*, auto accumulator, const auto&) {
    using A = decltype(accumulator);
    const A tokens = *count.const_data_ptr<A>(), share = static_cast<A>(1.0 - alpha);
    const Tensor squares = batch_moment.contiguous(), sums = products.contiguous();
    const Vector<A> center(mean ? batch_mean : std::nullopt, squares);
    Values<A> entering(squares.const_data_ptr<A>(), squares.const_data_ptr<A>() + channels);
    const A bias = tokens / (tokens - A(1));  // infinite for one token
    for (int64_t c = 0; unbiased && c < channels; ++c) entering[c] *= bias;
    const bool counted = tokens > A(0) && all_finite(entering.data(), channels) && all_finite<A>(sums) &&
        (!mean || all_finite(center.data, channels));
    if (diagnostics) {
      const float* running = moment.const_data_ptr<float>();
      note(changed<float>(*diagnostics), running, entering.data(), channels, tokens > A(0), counted);
    }
    float *of_moment = changed<float>(moment), *of_mean = mean ? changed<float>(*mean) : nullptr;
    *changed<int64_t>(num_batches) += counted;
    if (!counted) return;
    move(of_moment, entering.data(), share, channels);
    if (mean) move(of_mean, center.data, share, channels);
  });
}

void power_update_(
    const Tensor& psi2, const Tensor& nu, const Tensor& num_batches, const Optional& diagnostics, const Tensor& batch_psi2,
    const Tensor& used_psi2, const Tensor& products, const Tensor& count, double eps, int64_t warmup, double alpha_fwd,
    double alpha_bwd, bool has_gradient) {
  const int64_t channels = psi2.numel();
  for_type_of(batch_psi2, [&](auto*, auto accumulator, const auto&) {
    using A = decltype(accumulator);
    const Tensor batch = batch_psi2.contiguous(), sums = products.contiguous();
    const Vector<A> used(used_psi2, batch);
    const A tokens = *count.const_data_ptr<A>(), rate = static_cast<A>(1.0 - alpha_bwd);
    const A *squares = batch.const_data_ptr<A>(), *lambda = sums.const_data_ptr<A>();
    Values<A> gamma(channels);
    for (int64_t c = 0; c < channels; ++c) gamma[c] = squares[c] / (used.data[c] + static_cast<A>(eps));
    const bool counted =
        tokens > A(0) && all_finite<A>(batch) && all_finite<A>(sums) && all_finite(gamma.data(), channels);
    if (diagnostics) {
      float* entries = changed<float>(*diagnostics);
      note(entries, psi2.const_data_ptr<float>(), squares, channels, tokens > A(0), counted);
      A largest = channels ? gamma[0] : A(0);
      for (const A value : gamma) largest = value > largest || value != value ? value : largest;
      if (counted && rate * largest > A(1)) entries[1] += 1.0f;
      entries[3] = static_cast<float>(largest);
    }
    float *of_psi2 = changed<float>(psi2), *of_nu = changed<float>(nu);
    int64_t& batches = *changed<int64_t>(num_batches);
    if (!counted) return;
    move(of_psi2, squares, batches < warmup ? A(1) / static_cast<A>(batches + 1) : static_cast<A>(1.0 - alpha_fwd), channels);
    for (int64_t c = 0; has_gradient && c < channels; ++c) {
      const A kept = static_cast<A>(of_nu[c]) * std::max(A(0), A(1) - rate * gamma[c]);
      of_nu[c] = static_cast<float>(kept + rate * (lambda[c] / tokens));
    }
    ++batches;
  });
}

// Several of the operators above in one call.

std::tuple<Tensor, Tensor> power_step_(
    const Tensor& dy, const Tensor& x, const Optional& padding, const Optional& weight, const Tensor& used_psi2,
    const Tensor& nu, const Optional& loss_scale, const Tensor& inv_rms, const Tensor& psi2, const Tensor& running_nu,
    const Tensor& num_batches, const Optional& diagnostics, const Tensor& batch_psi2, const Tensor& count, int64_t groups,
    double eps, int64_t warmup, double alpha_fwd, double alpha_bwd) {
  const Optional none;
  const auto [dx, parameters, products] =
      gradient(dy, x, padding, weight, none, used_psi2, nu, none, none, loss_scale, inv_rms, groups, eps, true);
  power_update_(
      psi2, running_nu, num_batches, diagnostics, batch_psi2, used_psi2, products, count, eps, warmup, alpha_fwd, alpha_bwd,
      true);
  return {dx, in_type_of(weight, parameters)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> batch_normalize(
    const Tensor& x, const Optional& weight, const Optional& bias, const Optional& padding, int64_t groups, double eps,
    bool centered) {
  const auto [inv_rms, mean, moment, count] = moments(x, padding, groups, eps, centered);
  const Optional none, center = centered ? Optional(mean) : none;
  const Tensor y = std::get<0>(normalize(x, weight, bias, center, moment, none, inv_rms, groups, eps, false));
  return {y, inv_rms, mean, moment, count};
}

std::tuple<Tensor, Tensor> batch_step_(
    const Tensor& dy, const Tensor& x, const Optional& padding, const Optional& weight, const Optional& mean,
    const Tensor& moment, const Tensor& count, const Optional& loss_scale, const Tensor& inv_rms,
    const Tensor& running_moment, const Optional& running_mean, const Tensor& num_batches, const Optional& diagnostics,
    int64_t groups, double eps, double alpha, bool unbiased) {
  const auto [parameters, products] = gradient_sums(dy, x, padding, weight, mean, moment, loss_scale, inv_rms, groups, eps);
  const Optional offset = mean ? Optional(products.select(0, 1)) : Optional();
  const Tensor dx = std::get<0>(gradient(
      dy, x, padding, weight, mean, moment, products.select(0, 0), offset, count, loss_scale, inv_rms, groups, eps, false));
  running_average_(
      running_moment, running_mean, num_batches, diagnostics, moment, mean, products, count, alpha, unbiased);
  return {dx, in_type_of(weight, parameters)};
}

// Functions with a gradient made of the operators, which compute on any device: the autograd functions of ops.py, with a
// third of their overhead on a few tokens.

// An operator as a function that autograd does not look at: these functions have gradients of their own.
template <class Function>
auto operator_of(const char* name, Function&) {
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Function>();
  return [handle](auto&&... arguments) {
    const at::AutoDispatchBelowAutograd unrecorded;
    return handle.call(arguments...);
  };
}

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Which inputs need a gradient; `given` tells which inputs there are.
std::vector<bool> needed(const AutogradContext* context, std::initializer_list<bool> given) {
  std::vector<bool> result;
  size_t number = 0;
  for (const bool exists : given) result.push_back(exists && context->needs_input_grad(number++));
  return result;
}

void refuse_second_derivative() {
  TORCH_CHECK(!c10::GradMode::is_enabled(), "the norms of pn_fairseq have no second derivative (create_graph=True)");
}

Tensor row_of(const Tensor& sums, int64_t row, bool needed, const Tensor& like) {
  const at::AutoDispatchBelowADInplaceOrView untracked;
  return needed ? sums.select(0, row).to(like.scalar_type()) : Tensor();
}

// The gradients of a function of so many arguments, which begin with x, weight and bias.
variable_list gradients_of(
    size_t arguments, const std::vector<bool>& needs, const Tensor& dx, const Tensor& sums, const Tensor& weight) {
  variable_list result(arguments);
  result[0] = dx;
  for (int64_t row = 0; row < 2; ++row) result[1 + row] = row_of(sums, row, needs[1 + row], weight);
  return result;
}

Tensor or_nothing(const Optional& tensor) { return tensor.value_or(Tensor()); }
Optional if_defined(const Tensor& tensor) { return tensor.defined() ? Optional(tensor) : Optional(); }

struct Evaluate : torch::autograd::Function<Evaluate> {
  static Tensor forward(
      AutogradContext* context, const Tensor& x, const Optional& weight, const Optional& bias, const Optional& mean,
      const Optional& moment, int64_t groups, double eps) {
    static const auto operation = operator_of("pn_fairseq::normalize", normalize);
    const Optional none;
    const auto [y, inv_rms, _, __] = operation(x, weight, bias, mean, moment, none, none, groups, eps, false);
    // The running statistics may change before the backward pass, which needs their values in this forward.
    const Tensor kept_mean = mean ? mean->clone() : Tensor(), kept = moment ? moment->clone() : Tensor();
    context->save_for_backward({x, or_nothing(weight), kept_mean, kept, inv_rms});
    context->saved_data["groups"] = groups;
    context->saved_data["eps"] = eps;
    context->saved_data["bias"] = bias.has_value();
    return y;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    static const auto operation = operator_of("pn_fairseq::gradient", gradient);
    refuse_second_derivative();
    const variable_list saved = context->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], &inv_rms = saved[4];
    const int64_t groups = context->saved_data["groups"].toInt();
    const double eps = context->saved_data["eps"].toDouble();
    const auto needs = needed(context, {true, weight.defined(), context->saved_data["bias"].toBool()});
    const Optional none, mean = if_defined(saved[2]), moment = if_defined(saved[3]);
    const auto [dx, sums, _] = operation(
        gradients[0], x, none, if_defined(weight), mean, moment, none, none, none, none, inv_rms, groups, eps,
        needs[1] || needs[2]);
    return gradients_of(7, needs, dx, sums, weight);
  }
};

struct Standardized : torch::autograd::Function<Standardized> {
  static Tensor forward(
      AutogradContext* context, const Tensor& x, const Optional& weight, const Optional& bias, int64_t groups, bool centered,
      double square_factor, double eps_in_root, double eps_outside, double min_divisor, double gain, double gain_slope,
      bool through_mean, bool through_divisor) {
    static const auto operation = operator_of("pn_fairseq::standardize", standardize);
    const auto [y, stats] = operation(
        x, weight, bias, groups, centered, square_factor, eps_in_root, eps_outside, min_divisor, gain, gain_slope);
    context->save_for_backward({x, or_nothing(weight), stats});
    context->saved_data["groups"] = groups;
    context->saved_data["gain"] = gain;
    context->saved_data["gain_slope"] = gain_slope;
    context->saved_data["through_mean"] = centered && through_mean;
    context->saved_data["through_divisor"] = through_divisor;
    context->saved_data["bias"] = bias.has_value();
    return y;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    static const auto operation = operator_of("pn_fairseq::standardize_gradient", standardize_gradient);
    refuse_second_derivative();
    const variable_list saved = context->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], &stats = saved[2];
    auto& rest = context->saved_data;
    const auto needs = needed(context, {true, weight.defined(), rest["bias"].toBool()});
    const auto [dx, sums] = operation(
        gradients[0], x, if_defined(weight), stats, rest["groups"].toInt(), rest["gain"].toDouble(),
        rest["gain_slope"].toDouble(), rest["through_mean"].toBool(), rest["through_divisor"].toBool(), needs[1] || needs[2]);
    return gradients_of(13, needs, dx, sums, weight);
  }
};

struct Squashed : torch::autograd::Function<Squashed> {
  static Tensor forward(
      AutogradContext* context, const Tensor& x, const Optional& weight, const Optional& bias, const Tensor& alpha,
      const Optional& shift, bool erf) {
    static const auto operation = operator_of("pn_fairseq::squash", squash);
    context->save_for_backward({x, or_nothing(weight), alpha, or_nothing(shift)});
    context->saved_data["erf"] = erf;
    context->saved_data["bias"] = bias.has_value();
    return operation(x, weight, bias, alpha, shift, erf);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    static const auto operation = operator_of("pn_fairseq::squash_gradient", squash_gradient);
    refuse_second_derivative();
    const variable_list saved = context->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], &alpha = saved[2], &shift = saved[3];
    auto& rest = context->saved_data;
    const auto needs = needed(context, {true, weight.defined(), rest["bias"].toBool(), true, shift.defined()});
    const auto [dx, sums, scalars] =
        operation(gradients[0], x, if_defined(weight), alpha, if_defined(shift), rest["erf"].toBool());
    variable_list result = gradients_of(6, needs, dx, sums, weight);
    for (int64_t row = 0; row < 2; ++row) result[3 + row] = row_of(scalars.unsqueeze(1), row, needs[3 + row], alpha);
    return result;
  }
};

// Training steps of which each way is one operator: Training of pn_fairseq/norms/core/step.py, without Python. The forward
// changes no state, and the backward moves it. The state, and the copies of it that the forward has read, are no saved
// tensors: autograd compares the versions of these, and hooks may move them.

// What the backward of a norm has to know of it.
struct Norm {
  at::TensorList state;          // what it moves; the number of batches comes last
  const Optional& diagnostics;   // what it notes there, if there are any
  const Tensor& epoch;           // whether the state was replaced since
  const Tensor& has_loss_scale;  // whether there is one
  const Tensor& handle;          // by which the loss scale is found
  bool ignored;                  // the batch must not count

  // Also what the forwards of all norms keep.
  void keep_in(
      AutogradContext* context, const Tensor& x, const Optional& weight, const Optional& bias, const Optional& padding,
      const Tensor& inv_rms, const Tensor& count, int64_t groups, double eps) const {
    context->save_for_backward({x, or_nothing(weight), or_nothing(padding), inv_rms});
    auto& kept = context->saved_data;
    kept.reserve(32);
    kept["bias"] = bias.has_value();
    kept["count"] = count;
    kept["groups"] = groups;
    kept["eps"] = eps;
    kept["state"] = state.vec();
    kept["diagnostics"] = diagnostics;
    kept["epoch"] = epoch;
    kept["has_loss_scale"] = has_loss_scale;
    kept["handle"] = handle;
    kept["counts"] = !ignored;
  }
};

// A flag that Python sets, on the CPU.
bool is_set(const c10::IValue& flag) { return *flag.toTensor().const_data_ptr<bool>(); }

Optional loss_scale_of(AutogradContext* context) {
  static const auto operation =
      c10::Dispatcher::singleton().findSchemaOrThrow("pn_fairseq::scaled", "").typed<Tensor(const Tensor&, const Tensor&)>();
  auto& kept = context->saved_data;
  if (!is_set(kept["has_loss_scale"])) return {};
  return operation.call(kept["handle"].toTensor(), kept["state"].toTensorVector().back());
}

// Calls `step(state, diagnostics)`, of one thread at a time. A step that must not count, or has counted already, gets
// copies: its batch was ignored, the state was replaced after its forward, or its graph is retained.
template <class Step>
auto move_once(AutogradContext* context, Step&& step) {
  static std::mutex moving;
  const std::lock_guard<std::mutex> lock(moving);
  auto& kept = context->saved_data;
  std::vector<Tensor> state = kept["state"].toTensorVector();
  Optional diagnostics = kept["diagnostics"].toOptional<Tensor>();
  if (is_set(kept["epoch"]) || !kept["counts"].toBool()) {
    for (Tensor& each : state) each = each.clone();
    diagnostics.reset();
  }
  const auto results = step(state, diagnostics);
  kept["counts"] = false;
  return results;
}

// What the backward of such a norm begins with: what Norm::keep_in has saved, and the loss scale of the backward pass.
struct Backward {
  AutogradContext* context;
  Tensor x, inv_rms;
  Optional weight, padding, loss_scale;

  explicit Backward(AutogradContext* context) : context(context) {
    refuse_second_derivative();
    variable_list saved = context->get_saved_variables();
    x = std::move(saved[0]);
    weight = if_defined(saved[1]);
    padding = if_defined(saved[2]);
    inv_rms = std::move(saved[3]);
    loss_scale = loss_scale_of(context);
  }

  variable_list gradients(size_t arguments, const Tensor& dx, const Tensor& sums) const {
    const auto needs = needed(context, {true, weight.has_value(), context->saved_data["bias"].toBool()});
    return gradients_of(arguments, needs, dx, sums, or_nothing(weight));
  }
};

struct PowerTrain : torch::autograd::Function<PowerTrain> {
  // Copies of the state for the forward and its backward.
  struct Read {
    Tensor psi2, nu;

    Read(const Tensor& running_psi2, const Tensor& running_nu) {
      const at::AutoDispatchBelowADInplaceOrView no_gradient;
      const Tensor copies = at::stack({running_psi2, running_nu});
      psi2 = copies.select(0, 0);
      nu = copies.select(0, 1);
    }
  };

  static Tensor forward(
      AutogradContext* context, const Tensor& x, const Optional& weight, const Optional& bias, const Optional& padding,
      const Norm& norm, const Read& read, int64_t groups, double eps, double alpha_fwd, double alpha_bwd) {
    static const auto operation = operator_of("pn_fairseq::normalize", normalize);
    const Optional none;
    const auto [y, inv_rms, batch_psi2, count] =
        operation(x, weight, bias, none, read.psi2, padding, none, groups, eps, true);
    norm.keep_in(context, x, weight, bias, padding, inv_rms, count, groups, eps);
    auto& kept = context->saved_data;
    kept["psi2"] = read.psi2;
    kept["nu"] = read.nu;
    kept["batch_psi2"] = batch_psi2;
    kept["alpha_fwd"] = alpha_fwd;
    kept["alpha_bwd"] = alpha_bwd;
    return y;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    static const auto operation = operator_of("pn_fairseq::power_step_", power_step_);
    const Backward pass(context);
    auto& kept = context->saved_data;
    const auto [dx, sums] = move_once(context, [&](const std::vector<Tensor>& state, const Optional& diagnostics) {
      return operation(
          gradients[0], pass.x, pass.padding, pass.weight, kept["psi2"].toTensor(), kept["nu"].toTensor(), pass.loss_scale,
          pass.inv_rms, state[0], state[1], state[2], diagnostics, kept["batch_psi2"].toTensor(), kept["count"].toTensor(),
          kept["groups"].toInt(), kept["eps"].toDouble(), 0, kept["alpha_fwd"].toDouble(),
          kept["alpha_bwd"].toDouble());
    });
    return pass.gradients(10, dx, sums);
  }
};

struct BatchTrain : torch::autograd::Function<BatchTrain> {
  static Tensor forward(
      AutogradContext* context, const Tensor& x, const Optional& weight, const Optional& bias, const Optional& padding,
      const Norm& norm, int64_t groups, double eps, double alpha, bool unbiased) {
    static const auto operation = operator_of("pn_fairseq::batch_normalize", batch_normalize);
    const bool centered = norm.state.size() == 3;
    const auto [y, inv_rms, mean, moment, count] = operation(x, weight, bias, padding, groups, eps, centered);
    norm.keep_in(context, x, weight, bias, padding, inv_rms, count, groups, eps);
    auto& kept = context->saved_data;
    kept["mean"] = centered ? Optional(mean) : Optional();
    kept["moment"] = moment;
    kept["alpha"] = alpha;
    kept["unbiased"] = unbiased;
    return y;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    static const auto operation = operator_of("pn_fairseq::batch_step_", batch_step_);
    const Backward pass(context);
    auto& kept = context->saved_data;
    const auto [dx, sums] = move_once(context, [&](const std::vector<Tensor>& state, const Optional& diagnostics) {
      const Optional running_mean = state.size() == 3 ? Optional(state[1]) : Optional();
      return operation(
          gradients[0], pass.x, pass.padding, pass.weight, kept["mean"].toOptional<Tensor>(), kept["moment"].toTensor(),
          kept["count"].toTensor(), pass.loss_scale, pass.inv_rms, state[0], running_mean, state.back(), diagnostics,
          kept["groups"].toInt(), kept["eps"].toDouble(), kept["alpha"].toDouble(), kept["unbiased"].toBool());
    });
    return pass.gradients(9, dx, sums);
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(pn_fairseq, library) {
  library.def("cpu_capability() -> str", &cpu_capability);
  library.def(
      "evaluate(Tensor x, Tensor? weight, Tensor? bias, Tensor? mean, Tensor? moment, int groups, float eps) -> Tensor");
  library.def(
      "standardized(Tensor x, Tensor? weight, Tensor? bias, int groups, bool centered, float square_factor, "
      "float eps_in_root, float eps_outside, float min_divisor, float gain, float gain_slope, bool through_mean, "
      "bool through_divisor) -> Tensor");
  library.def(
      "squashed(Tensor x, Tensor? weight, Tensor? bias, Tensor alpha, Tensor? shift, bool erf) -> Tensor");
  library.def(
      "power_train(Tensor x, Tensor? weight, Tensor? bias, Tensor? padding, Tensor[] state, Tensor? diagnostics, "
      "Tensor epoch, Tensor has_loss_scale, Tensor handle, bool ignored, Tensor psi2, Tensor nu, int groups, float eps, "
      "float alpha_fwd, float alpha_bwd) -> (Tensor, Tensor, Tensor)");
  library.def(
      "batch_train(Tensor x, Tensor? weight, Tensor? bias, Tensor? padding, Tensor[] state, Tensor? diagnostics, "
      "Tensor epoch, Tensor has_loss_scale, Tensor handle, bool ignored, int groups, float eps, float alpha, "
      "bool unbiased) -> Tensor");
}

TORCH_LIBRARY_IMPL(pn_fairseq, Autograd, library) {
  library.impl("evaluate", [](const Tensor& x, const Optional& weight, const Optional& bias, const Optional& mean,
                              const Optional& moment, int64_t groups, double eps) {
    return Evaluate::apply(x, weight, bias, mean, moment, groups, eps);
  });
  library.impl("standardized", [](const Tensor& x, const Optional& weight, const Optional& bias, int64_t groups, bool centered,
                                  double square_factor, double eps_in_root, double eps_outside, double min_divisor,
                                  double gain, double gain_slope, bool through_mean, bool through_divisor) {
    return Standardized::apply(
        x, weight, bias, groups, centered, square_factor, eps_in_root, eps_outside, min_divisor, gain, gain_slope,
        through_mean, through_divisor);
  });
  library.impl("squashed", [](const Tensor& x, const Optional& weight, const Optional& bias, const Tensor& alpha,
                              const Optional& shift, bool erf) { return Squashed::apply(x, weight, bias, alpha, shift, erf); });
  library.impl("power_train", [](const Tensor& x, const Optional& weight, const Optional& bias, const Optional& padding,
                                 at::TensorList state, const Optional& diagnostics, const Tensor& epoch,
                                 const Tensor& has_loss_scale, const Tensor& handle, bool ignored, const Tensor& psi2,
                                 const Tensor& nu, int64_t groups, double eps, double alpha_fwd, double alpha_bwd) {
    const Norm norm{state, diagnostics, epoch, has_loss_scale, handle, ignored};
    const PowerTrain::Read read(psi2, nu);
    const Tensor y = PowerTrain::apply(x, weight, bias, padding, norm, read, groups, eps, alpha_fwd, alpha_bwd);
    return std::make_tuple(y, read.psi2, read.nu);
  });
  library.impl("batch_train", [](const Tensor& x, const Optional& weight, const Optional& bias, const Optional& padding,
                                 at::TensorList state, const Optional& diagnostics, const Tensor& epoch,
                                 const Tensor& has_loss_scale, const Tensor& handle, bool ignored, int64_t groups,
                                 double eps, double alpha, bool unbiased) {
    const Norm norm{state, diagnostics, epoch, has_loss_scale, handle, ignored};
    return BatchTrain::apply(x, weight, bias, padding, norm, groups, eps, alpha, unbiased);
  });
}

TORCH_LIBRARY_IMPL(pn_fairseq, CPU, library) {
  library.impl("normalize", &normalize);
  library.impl("moments", &moments);
  library.impl("gradient_sums", &gradient_sums);
  library.impl("gradient", &gradient);
  library.impl("standardize", &standardize);
  library.impl("standardize_gradient", &standardize_gradient);
  library.impl("squash", &squash);
  library.impl("squash_gradient", &squash_gradient);
  library.impl("running_average_", &running_average_);
  library.impl("power_update_", &power_update_);
  library.impl("power_step_", &power_step_);
  library.impl("batch_normalize", &batch_normalize);
  library.impl("batch_step_", &batch_step_);
}

}  // namespace pn
