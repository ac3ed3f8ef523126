// Matrix products with weights as they lie in a model's file, [outputs][inputs]: nothing is repacked, since weights are
// shared and read-only. Each output is one sum along the inputs, in an order that depends neither on the number of rows
// nor on the number of threads: a row's result is the same alone and in a batch.

#pragma once

#include <algorithm>
#include <utility>

#include "vectors.h"

namespace dormouse {

// What rows are converted to before they are multiplied by weights of type T.
template <typename T>
struct Rows {
  typedef float type;
};
// What one instruction multiplies: a vector of each side, and the number of elements in it.
struct Single {  // fp32, or bf16 that becomes it
  static constexpr int64_t NUMEL = LANES;
  template <typename T>
  static Vec get(const T* from) {
    return load(from);
  }
  template <typename T>
  static Vec get_some(const T* from, int64_t numel) {
    return load_some(from, numel);
  }
  static void add(Vec& sum, Vec x, Vec w) { sum = madd(x, w, sum); }
};
#ifdef DORMOUSE_DOTS_BF16
struct Pairs {
  static constexpr int64_t NUMEL = 32;
  static __m512bh get(const Bf16* from) { return (__m512bh)_mm512_loadu_si512(from); }
  static __m512bh get_some(const Bf16* from, int64_t numel) {
    const __mmask32 mask = static_cast<__mmask32>((uint64_t{1} << numel) - 1);
    return (__m512bh)_mm512_maskz_loadu_epi16(mask, from);
  }
  static void add(Vec& sum, __m512bh x, __m512bh w) { sum = (Vec)_mm512_dpbf16_ps((__m512)sum, x, w); }
};
template <>
struct Rows<Bf16> {
  typedef Bf16 type;
};
template <typename T>
struct Multiply : Single {};
template <>
struct Multiply<Bf16> : Pairs {};
#else
template <typename T>
struct Multiply : Single {};
#endif

#if defined(__AVX512F__)
constexpr int TILE_M = 6;  // with four columns: 24 of 32 registers are sums
#else
constexpr int TILE_M = 2;  // 8 of 16
#endif
constexpr int TILE_N = 4;

// Rows of weights that will be wanted soon. They are fetched a line at a time, beside the products: processors do not see
// by themselves which ones these are, and many lines at once would wait for each other.
template <typename T>
struct Ahead {
  static constexpr int64_t LINE = 64 / static_cast<int64_t>(sizeof(T));
  const T* rows;
  int64_t stride;
  int count;
  Ahead take(int most) {
    const Ahead taken{rows, stride, std::min(count, most)};
    rows += taken.count * stride;
    count -= taken.count;
    return taken;
  }
  void fetch(int64_t k) const {
    for (int row = 0; row < count; ++row) __builtin_prefetch(rows + row * stride + k, 0, 2);
  }
};

// The products of some rows of x and TILE_N rows of w. The indices are packs, not loops: so compilers keep the sums in
// registers. Not inlined for the same reason.
template <typename X, typename T, size_t... M, size_t... I, size_t... J>
[[gnu::noinline]] void products(const X* x, int64_t x_stride, const T* w, int64_t w_stride, int64_t numel,
                                Ahead<T> ahead, Four* found, std::index_sequence<M...>, std::index_sequence<I...>,
                                std::index_sequence<J...>) {
  constexpr int64_t N = TILE_N;
  using Way = Multiply<T>;
  Vec kept[sizeof...(I)] = {(static_cast<void>(I), Vec{})...};
  int64_t k = 0;
  for (; k + Way::NUMEL <= numel; k += Way::NUMEL) {
    if (Way::NUMEL >= Ahead<T>::LINE || k % Ahead<T>::LINE == 0) ahead.fetch(k);
    const decltype(Way::get(w)) each[N] = {Way::get(w + static_cast<int64_t>(J) * w_stride + k)...};
    (Way::add(kept[I], Way::get(x + static_cast<int64_t>(I) / N * x_stride + k), each[I % N]), ...);
  }
  if (const int64_t rest = numel - k)
    (Way::add(kept[I], Way::get_some(x + static_cast<int64_t>(I) / N * x_stride + k, rest),
              Way::get_some(w + static_cast<int64_t>(I) % N * w_stride + k, rest)),
     ...);
  ((found[M] = sums(kept[M * N], kept[M * N + 1], kept[M * N + 2], kept[M * N + 3])), ...);
}

// One tile: M rows, four columns, each sum to done(m, Four).
template <int M, typename X, typename T, typename Done>
inline void tile(const X* x, int64_t x_stride, const T* w, int64_t w_stride, int64_t numel, Ahead<T> ahead, Done done) {
  Four found[M];
  products(x, x_stride, w, w_stride, numel, ahead, found, std::make_index_sequence<M>{},
           std::make_index_sequence<M * TILE_N>{}, std::make_index_sequence<TILE_N>{});
  for (int m = 0; m < M; ++m) done(m, found[m]);
}

// All rows against four rows of weights: done(row, Four).
template <typename X, typename T, typename Done>
inline void column(const X* x, int64_t x_stride, int64_t rows, const T* w, int64_t w_stride, int64_t numel,
                   Ahead<T> ahead, Done done) {
  const int share = static_cast<int>(std::max<int64_t>(1, (TILE_N * TILE_M + rows - 1) / rows));
  int64_t m = 0;
  const auto some = [&]<int M>(std::integral_constant<int, M>) {
    tile<M>(x + m * x_stride, x_stride, w, w_stride, numel, ahead.take(share),
            [&](int row, Four sum) { done(m + row, sum); });
    m += M;
  };
  while (m + TILE_M <= rows) some(std::integral_constant<int, TILE_M>{});
  switch (rows - m) {
    case 1: some(std::integral_constant<int, 1>{}); break;
    case 2: some(std::integral_constant<int, 2>{}); break;
    case 3: some(std::integral_constant<int, 3>{}); break;
    case 4: some(std::integral_constant<int, 4>{}); break;
    case 5: some(std::integral_constant<int, 5>{}); break;
    default: break;
  }
}

constexpr int64_t DISTANCE = 2 * TILE_N;  // columns; what two cores' memory needs, measured

// Columns `first` to `end`: done(row, column, sums, their count). `after`: the weights that this thread wants next, or
// nullptr. A last few columns are computed one by one, where the order of sums is the same.
template <typename X, typename T, typename Done>
inline void columns(const X* x, int64_t rows, const T* w, int64_t numel, int64_t first, int64_t end, const T* after,
                    Done done) {
  for (int64_t n = first; n < end; n += TILE_N) {
    const int64_t next = n + DISTANCE;
    const T* from = next < end ? w + next * numel : after == nullptr ? nullptr : after + (next - end) * numel;
    if (end - n >= TILE_N) {
      column(x, numel, rows, w + n * numel, numel, numel, Ahead<T>{from, numel, from == nullptr ? 0 : TILE_N},
             [&](int64_t m, Four sum) { done(m, n, sum, TILE_N); });
    } else {
      for (int64_t one = n; one < end; ++one)
        column(x, numel, rows, w + one * numel, 0, numel, Ahead<T>{},
               [&](int64_t m, Four sum) { done(m, one, sum, 1); });
    }
  }
}

constexpr int64_t PANEL_NBYTES = 256 << 10;  // of rows: a quarter of a core's second-level cache
constexpr int64_t CHUNK = 32;                // columns of one piece of work

// How a product is cut into pieces of work: all panels of rows for a chunk of columns, then the next chunk.
struct Pieces {
  int64_t rows, columns, panel, panels, count;
  Pieces(int64_t rows_, int64_t columns_, int64_t row_nbytes) : rows(rows_), columns(columns_) {
    panel = std::max<int64_t>(TILE_M, PANEL_NBYTES / row_nbytes / TILE_M * TILE_M);
    panels = (rows + panel - 1) / panel;
    count = panels * ((columns + CHUNK - 1) / CHUNK);
  }
  int64_t row(int64_t piece) const { return piece % panels * panel; }
  int64_t row_count(int64_t piece) const { return std::min(panel, rows - row(piece)); }
  int64_t first(int64_t piece) const { return piece / panels * CHUNK; }
  int64_t end(int64_t piece) const { return std::min(columns, first(piece) + CHUNK); }
  // The first column of the piece that its thread will probably take next, or -1: all of them take one in turn.
  int64_t next(int64_t piece, int threads) const {
    const int64_t other = piece + threads;
    return other < count ? first(other) : -1;
  }
};

}  // namespace dormouse
