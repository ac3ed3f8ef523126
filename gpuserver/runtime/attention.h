// Attention over scattered blocks (Tangram, section 3.3), for single tokens and for pieces of prompts.
//
// A block holds, per layer, keys and then values: [2][kv_heads][block_tokens][dim]. Offsets count elements from `base`.
// Each query token's result is computed over the same tiles of 16 tokens in the same order, whatever else is computed
// with it: in a batch, in another piece of its prompt, or alone.

#pragma once

#include <cmath>
#include <vector>

#include "linear.h"

namespace dormouse {

constexpr int64_t SPAN = 16;  // tokens of a tile; blocks have a multiple of it

// The step's tables, made once for all layers. An item is a few tokens of one sequence: `rows` is the first one's row,
// `contexts` what the last one sees, `starts` where the sequence's blocks begin in `blocks`. `adapters` and
// `most_rank`: see lora.h.
struct Step {
  void* base;
  const int64_t *places, *blocks, *rows, *counts, *contexts, *starts, *adapters;
  int64_t tokens, items, most_rank;
};

struct Shape {
  int64_t heads, kv_heads, dim, block_tokens, layer_offset, window;
  float scale, softcap;
};

// sums += weights x values: R rows, V vectors of each, over `count` tokens.
template <int V, typename T, size_t... I, size_t... J>
inline void add_values(const float* weights, const T* values, int64_t count, int64_t dim, float* sums, int64_t at,
                       std::index_sequence<I...>, std::index_sequence<J...>) {
  Vec kept[sizeof...(I)] = {load(sums + static_cast<int64_t>(I / V) * dim + at + static_cast<int64_t>(I % V) * LANES)...};
  for (int64_t t = 0; t < count; ++t) {
    const Vec each[V] = {load(values + t * dim + at + static_cast<int64_t>(J) * LANES)...};
    ((kept[I] = madd(all(weights[static_cast<int64_t>(I / V) * SPAN + t]), each[I % V], kept[I])), ...);
  }
  (store(sums + static_cast<int64_t>(I / V) * dim + at + static_cast<int64_t>(I % V) * LANES, kept[I]), ...);
}

template <int R, typename T>
inline void add_values(const float* weights, const T* values, int64_t count, int64_t dim, float* sums) {
  constexpr int V = LANES == 4 ? 2 : 4;
  int64_t at = 0;
  for (; at + V * LANES <= dim; at += V * LANES)
    add_values<V>(weights, values, count, dim, sums, at, std::make_index_sequence<R * V>{}, std::make_index_sequence<V>{});
  for (; at + LANES <= dim; at += LANES)
    add_values<1>(weights, values, count, dim, sums, at, std::make_index_sequence<R>{}, std::make_index_sequence<1>{});
  if (const int64_t rest = dim - at)
    for (int r = 0; r < R; ++r) {
      Vec kept = load_some(sums + r * dim + at, rest);
      for (int64_t t = 0; t < count; ++t)
        kept = madd(all(weights[r * SPAN + t]), load_some(values + t * dim + at, rest), kept);
      store_some(sums + r * dim + at, kept, rest);
    }
}

// The query heads that share one key head, of one item's tokens.
class Attend {
 public:
  template <typename T, typename Q, typename Out>
  void operator()(const Shape& s, const Step& step, const Q* q, Out* out, int64_t item, int64_t kv_head) {
    using X = typename Rows<T>::type;
    const int64_t group = s.heads / s.kv_heads, tokens = step.counts[item], count = tokens * group, dim = s.dim;
    const int64_t last = step.contexts[item], first = last - tokens + 1;  // contexts of its first and last token
    const int64_t *blocks = step.blocks + step.starts[item], tile = s.block_tokens * dim;
    const T* base = static_cast<const T*>(step.base) + s.layer_offset + kv_head * tile;
    room_.resize(count * (2 * dim + SPAN + 2));
    float *sums = room_.data(), *scores = sums + count * dim, *most = scores + count * SPAN, *total = most + count;
    X* queries = reinterpret_cast<X*>(total + count);
    for (int64_t row = 0; row < count; ++row) {
      const Q* from = q + ((step.rows[item] + row / group) * s.heads + kv_head * group + row % group) * dim;
      convert(from, queries + row * dim, dim);
    }
    std::fill(sums, sums + count * dim, 0.0f);
    std::fill(most, most + count, -INFINITY);
    std::fill(total, total + count, 0.0f);
    const int64_t begin = s.window > 0 ? std::max<int64_t>(0, first - s.window) / SPAN * SPAN : 0;
    for (int64_t at = begin; at < last; at += SPAN) {
      const T* keys = base + blocks[at / s.block_tokens] + at % s.block_tokens * dim;
      const T* values = keys + s.kv_heads * tile;
      for (int64_t t = 0; t < std::min(SPAN, last - at); t += TILE_N)
        column(queries, dim, count, keys + t * dim, dim, dim, Ahead<T>{values + t * dim, dim, TILE_N},
               [&](int64_t row, Four sum) { std::memcpy(scores + row * SPAN + t, &sum, sizeof sum); });
      for (int64_t row = 0; row < count; ++row) {
        const int64_t end = first + row / group;  // what this token sees
        const int64_t low = s.window > 0 ? std::max<int64_t>(0, end - s.window - at) : 0, high = std::min(SPAN, end - at);
        weigh(s, scores + row * SPAN, low, high, most[row], total[row], sums + row * dim);
      }
      const int64_t seen = std::min(SPAN, last - at);
      int64_t row = 0;
      for (; row + 4 <= count; row += 4) add_values<4>(scores + row * SPAN, values, seen, dim, sums + row * dim);
      for (; row < count; ++row) add_values<1>(scores + row * SPAN, values, seen, dim, sums + row * dim);
    }
    for (int64_t row = 0; row < count; ++row) {
      Out* to = out + ((step.rows[item] + row / group) * s.heads + kv_head * group + row % group) * dim;
      const float inverse = 1.0f / total[row];
      for (int64_t d = 0; d < dim; ++d) store(to + d, sums[row * dim + d] * inverse);
    }
  }

 private:
  // Scores of a tile become weights; what was summed before is scaled to the new largest score.
  static void weigh(const Shape& s, float* scores, int64_t low, int64_t high, float& most, float& total, float* sums) {
    if (low >= high) {
      std::fill(scores, scores + SPAN, 0.0f);
      return;
    }
    for (int64_t t = 0; t < low; ++t) scores[t] = -INFINITY;
    for (int64_t t = high; t < SPAN; ++t) scores[t] = -INFINITY;
    float peak = most;
    for (int64_t t = 0; t < SPAN; t += LANES) {
      Vec each = load(scores + t) * s.scale;
      if (s.softcap > 0.0f) each = hyperbolic_tangent(each / s.softcap) * s.softcap;
      store(scores + t, each);
    }
    for (int64_t t = low; t < high; ++t) peak = scores[t] > peak ? scores[t] : peak;
    if (peak > most) {
      const float shrink = std::exp(most - peak);
      for (int64_t d = 0; d < s.dim; ++d) sums[d] *= shrink;
      total *= shrink;
      most = peak;
    }
    for (int64_t t = 0; t < SPAN; t += LANES) store(scores + t, exponential(load(scores + t) - peak));
    std::fill(scores, scores + low, 0.0f);
    std::fill(scores + high, scores + SPAN, 0.0f);
    float added = 0.0f;
    for (int64_t t = low; t < high; ++t) added += scores[t];
    total += added;
  }

  std::vector<float> room_;
};

// Keys and values of one new token to their place: k and v are its heads, one behind the other.
template <typename T, typename From>
inline void write(const Shape& s, const Step& step, int64_t token, const From* k, int64_t k_head, const From* v,
                  int64_t v_head) {
  const int64_t tile = s.block_tokens * s.dim;
  T* to = static_cast<T*>(step.base) + step.places[token] + s.layer_offset;
  for (int64_t h = 0; h < s.kv_heads; ++h) {
    convert(k + h * k_head, to + h * tile, s.dim);
    convert(v + h * v_head, to + (s.kv_heads + h) * tile, s.dim);
  }
}

}  // namespace dormouse
