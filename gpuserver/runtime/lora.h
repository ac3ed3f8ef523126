// What adapters add to products: to each row the low-rank product of its own adapter, if it has one (LoRA). Weights stay as
// they are; a step has rows of many adapters (ServerlessLoRA, section 4.1).

#pragma once

#include <vector>

#include "linear.h"

namespace dormouse {

// As kernels.py declares it: of one product and one adapter, scale * (b^T a x + added). a: [rank][inputs], b: [rank][outputs],
// so that neighbouring outputs lie beside each other. `bias` stands for the product's own. Pointers can be nullptr, and the
// rank 0: all are, where this adapter adds nothing.
struct Lora {
  const void *a, *b, *added, *bias;
  int64_t rank;
  float scale;
};

// Rows beside each other that one adapter adds to, or none: they are computed together, for its tensors are read once then.
struct Segment {
  int64_t row, count;
};

// All rows of a step, in segments of at most a tile. `adapters`: the number of each row's, -1 for none, or nullptr.
inline std::vector<Segment> segments(int64_t rows, const int64_t* adapters) {
  const int64_t most = adapters == nullptr ? 1 : TILE_M;
  std::vector<Segment> found;
  for (int64_t row = 0; row < rows;) {
    int64_t count = 1;
    while (count < most && row + count < rows && adapters[row + count] == adapters[row]) ++count;
    found.push_back({row, count});
    row += count;
  }
  return found;
}

// For one product of a step. `loras`: by number of an adapter, or nullptr; `inner`: room for `most_rank` numbers of each row.
struct Low {
  const int64_t* adapters;
  const Lora* loras;
  float* inner;
  int64_t most_rank;

  bool any() const { return adapters != nullptr && loras != nullptr; }

  const Lora* of(int64_t row) const {
    if (!any() || adapters[row] < 0) return nullptr;
    return loras + adapters[row];
  }

  // What is added to the row's sums: its adapter's or the product's.
  const void* bias(int64_t row, const void* otherwise) const {
    const Lora* lora = of(row);
    return lora == nullptr || lora->bias == nullptr ? otherwise : lora->bias;
  }

  // Before any piece of these rows: a x. `x`: of all rows. b is fetched in one go: pieces would have it line by line, from
  // as many places as it has rows.
  template <typename T, typename X>
  void shrink(Segment rows, const X* x, int64_t inputs, int64_t outputs) const {
    const Lora* lora = of(rows.row);
    if (lora == nullptr) return;
    if (rows.row == 0 || of(rows.row - 1) != lora)
      for (int64_t i = 0; i < lora->rank * outputs; i += Ahead<T>::LINE)
        __builtin_prefetch(static_cast<const T*>(lora->b) + i, 0, 2);
    float* to = inner + rows.row * most_rank;
    columns(x + rows.row * inputs, rows.count, static_cast<const T*>(lora->a), inputs, 0, lora->rank,
            static_cast<const T*>(nullptr), [&](int64_t m, int64_t r, Four sum, int count) {
              for (int i = 0; i < count; ++i) to[m * most_rank + r + i] = sum[i] * lora->scale;
            });
  }

  // To the sums of columns `first` to `end` of these rows: what b makes of that. `sums`: `stride` for each row.
  template <typename T>
  void expand(int64_t row, int64_t rows, int64_t outputs, int64_t first, int64_t end, float* sums, int64_t stride) const {
    for (int64_t m = 0; m < rows;) {
      const Lora* lora = of(row + m);
      int64_t count = 1;
      while (m + count < rows && of(row + m + count) == lora) ++count;
      for (int64_t done = 0; lora != nullptr && done < count;) {
        const float* from = inner + (row + m + done) * most_rank;
        float* to = sums + (m + done) * stride;
        const auto some = [&]<int M>(std::integral_constant<int, M>) {
          expand_some<M, T>(*lora, from, outputs, first, end - first, to, stride);
          done += M;
        };
        if (count - done >= 4)
          some(std::integral_constant<int, 4>{});
        else if (count - done >= 2)
          some(std::integral_constant<int, 2>{});
        else
          some(std::integral_constant<int, 1>{});
      }
      m += count;
    }
  }

 private:
  template <int M, typename T>
  void expand_some(const Lora& lora, const float* from, int64_t outputs, int64_t first, int64_t count, float* to,
                   int64_t stride) const {
    const T* b = static_cast<const T*>(lora.b) + first;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
      Vec kept[M];
      for (int m = 0; m < M; ++m) kept[m] = load(to + m * stride + i);
      for (int64_t r = 0; r < lora.rank; ++r) {
        const Vec w = load(b + r * outputs + i);
        for (int m = 0; m < M; ++m) kept[m] = madd(w, all(from[m * most_rank + r]), kept[m]);
      }
      for (int m = 0; m < M; ++m) store(to + m * stride + i, kept[m]);
    }
    for (; i < count; ++i)
      for (int m = 0; m < M; ++m)
        for (int64_t r = 0; r < lora.rank; ++r) to[m * stride + i] += from[m * most_rank + r] * to_float(b[r * outputs + i]);
    if (const T* added = static_cast<const T*>(lora.added))
      for (int m = 0; m < M; ++m)
        for (i = 0; i < count; ++i) to[m * stride + i] += lora.scale * to_float(added[first + i]);
  }
};

}  // namespace dormouse
