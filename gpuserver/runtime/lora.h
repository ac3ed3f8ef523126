// What adapters add to products: to each row the low-rank product of its own adapter, if it has one (LoRA). Weights stay as
// they are; a step has rows of many adapters (ServerlessLoRA, section 4.1).

#pragma once

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

// For one product of a step. `adapters`: the number of each row's, -1 for none, or nullptr; `loras`: by that number, or
// nullptr. `inner`: room for `most_rank` numbers of each row.
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

  // Before any piece of the row: a x.
  template <typename T, typename X>
  void shrink(int64_t row, const X* x, int64_t inputs) const {
    const Lora* lora = of(row);
    if (lora == nullptr) return;
    float* to = inner + row * most_rank;
    columns(x, 1, static_cast<const T*>(lora->a), inputs, 0, lora->rank, static_cast<const T*>(nullptr),
            [&](int64_t, int64_t r, Four sum, int count) {
              for (int i = 0; i < count; ++i) to[r + i] = sum[i] * lora->scale;
            });
  }

  // To the sums of columns `first` to `end` of the row: what b makes of that.
  template <typename T>
  void expand(int64_t row, int64_t outputs, int64_t first, int64_t end, float* sums) const {
    const Lora* lora = of(row);
    if (lora == nullptr) return;
    const float* from = inner + row * most_rank;
    for (int64_t r = 0; r < lora->rank; ++r) {
      const T* b = static_cast<const T*>(lora->b) + r * outputs + first;
      int64_t i = 0;
      for (; i + LANES <= end - first; i += LANES) store(sums + i, madd(load(b + i), all(from[r]), load(sums + i)));
      for (; i < end - first; ++i) sums[i] += from[r] * to_float(b[i]);
    }
    if (const T* added = static_cast<const T*>(lora->added))
      for (int64_t n = first; n < end; ++n) sums[n - first] += lora->scale * to_float(added[n]);
  }
};

}  // namespace dormouse
