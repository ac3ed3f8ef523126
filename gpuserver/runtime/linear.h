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

// The products of rows of x and N rows of w, lane by lane. The indices are packs, not loops: so compilers keep the sums in
// registers.
template <int N, typename X, typename T, size_t... I, size_t... J>
inline void products(const X* x, int64_t x_stride, const T* w, int64_t w_stride, int64_t numel, Vec* lanes,
                     std::index_sequence<I...>, std::index_sequence<J...>) {
  using Way = Multiply<T>;
  Vec kept[sizeof...(I)] = {(static_cast<void>(I), Vec{})...};
  int64_t k = 0;
  for (; k + Way::NUMEL <= numel; k += Way::NUMEL) {
    const decltype(Way::get(w)) each[N] = {Way::get(w + static_cast<int64_t>(J) * w_stride + k)...};
    (Way::add(kept[I], Way::get(x + static_cast<int64_t>(I / N) * x_stride + k), each[I % N]), ...);
  }
  if (const int64_t rest = numel - k)
    (Way::add(kept[I], Way::get_some(x + static_cast<int64_t>(I / N) * x_stride + k, rest),
              Way::get_some(w + static_cast<int64_t>(I % N) * w_stride + k, rest)),
     ...);
  ((lanes[I] = kept[I]), ...);
}

#if defined(__AVX512F__)
constexpr int TILE_M = 6;  // with four columns: 24 of 32 registers are sums
#else
constexpr int TILE_M = 2;  // 8 of 16
#endif
constexpr int TILE_N = 4;

// One tile: M rows, four columns, each sum to done(m, Four).
template <int M, typename X, typename T, typename Done>
inline void tile(const X* x, int64_t x_stride, const T* w, int64_t w_stride, int64_t numel, Done done) {
  Vec lanes[M * TILE_N];
  products<TILE_N>(x, x_stride, w, w_stride, numel, lanes, std::make_index_sequence<M * TILE_N>{},
                   std::make_index_sequence<TILE_N>{});
  for (int m = 0; m < M; ++m) {
    const Vec* row = lanes + m * TILE_N;
    done(m, sums(row[0], row[1], row[2], row[3]));
  }
}

// All rows against four rows of weights: done(row, Four).
template <typename X, typename T, typename Done>
inline void column(const X* x, int64_t x_stride, int64_t rows, const T* w, int64_t w_stride, int64_t numel, Done done) {
  int64_t m = 0;
  const auto from = [&](int64_t first) {
    return [&done, first](int row, Four sum) { done(first + row, sum); };
  };
  for (; m + TILE_M <= rows; m += TILE_M) tile<TILE_M>(x + m * x_stride, x_stride, w, w_stride, numel, from(m));
  const X* last = x + m * x_stride;
  switch (rows - m) {
    case 1: tile<1>(last, x_stride, w, w_stride, numel, from(m)); break;
    case 2: tile<2>(last, x_stride, w, w_stride, numel, from(m)); break;
    case 3: tile<3>(last, x_stride, w, w_stride, numel, from(m)); break;
    case 4: tile<4>(last, x_stride, w, w_stride, numel, from(m)); break;
    case 5: tile<5>(last, x_stride, w, w_stride, numel, from(m)); break;
    default: break;
  }
}

// Several tiles read the same weights, so the processor does not see by itself that the next ones will be wanted.
template <typename T>
inline void ahead(const T* from, int64_t numel) {
  for (int64_t k = 0; k < numel; k += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(from + k, 0, 2);
}

// Columns `first` to `end`: done(row, column, sum). A last few are computed with the ones before them, so that their
// order of sums is the same, or one by one where there are fewer than four in all.
template <typename X, typename T, typename Done>
inline void columns(const X* x, int64_t rows, const T* w, int64_t numel, int64_t first, int64_t end, Done done) {
  for (int64_t n = first; n < end; n += TILE_N) {
    if (end - n >= TILE_N) {
      if (rows > TILE_M) ahead(w + (n + TILE_N) * numel, std::min<int64_t>(TILE_N, end - n - TILE_N) * numel);
      column(x, numel, rows, w + n * numel, numel, numel, [&](int64_t m, Four sum) { done(m, n, sum, TILE_N); });
    } else {
      for (int64_t one = n; one < end; ++one)
        column(x, numel, rows, w + one * numel, 0, numel, [&](int64_t m, Four sum) { done(m, one, sum, 1); });
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
};

}  // namespace dormouse
