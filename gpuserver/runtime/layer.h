// One decoder layer of the gated families (Llama, Qwen, Mistral, Gemma2) in one go. Between its products it keeps fp32.

#pragma once

#include <memory>

#include "attention.h"
#include "lora.h"
#include "team.h"

namespace dormouse {

// down(activation(gate(x)) * up(x)), as kernels.py declares it. Weights of type T; nullptr where there are none.
struct Gated {
  const void *gate, *up, *down, *gate_bias, *up_bias, *down_bias;
  const Lora *gate_loras, *up_loras, *down_loras;
  int64_t hidden, inner, activation;
};

// As kernels.py declares it, too.
struct Layer {
  const void *before_attention, *q, *k, *v, *q_bias, *k_bias, *v_bias, *q_norm, *k_norm, *o, *o_bias, *after_attention;
  const void *before_mlp, *after_mlp;
  const Lora *q_loras, *k_loras, *v_loras, *o_loras;
  Gated mlp;
  Shape shape;
  float epsilon, one;  // `one` is added to the weights of norms: Gemma's are kept without it
};

enum Activation : int64_t { SILU, GELU_TANH, GELU, RELU };

inline float activated(int64_t kind, float x) {
  switch (kind) {
    case GELU: return 0.5f * x * (1.0f + std::erf(x * 0.70710678f));
    default: return x > 0.0f ? x : (x == x ? 0.0f : x);
  }
}

inline void activate(int64_t kind, float* gate, const float* up, int64_t numel) {
  int64_t i = 0;
  if (kind == SILU || kind == GELU_TANH)
    for (; i < numel; i += LANES) {  // the buffers are whole vectors long
      const Vec x = load(gate + i);
      const Vec on = kind == SILU ? x / (1.0f + exponential(-x))
                                  : 0.5f * x * (1.0f + hyperbolic_tangent(0.79788456f * (x + 0.044715f * x * x * x)));
      store(gate + i, on * load(up + i));
    }
  for (; i < numel; ++i) gate[i] = activated(kind, gate[i]) * up[i];
}

// to = from / its root mean square, times the weights.
template <typename T, typename From, typename To>
inline void normalize(const From* from, const void* weights, int64_t numel, float epsilon, float one, To* to) {
  const T* weight = static_cast<const T*>(weights);
  Vec squares{};
  int64_t i = 0;
  for (; i + LANES <= numel; i += LANES) squares = madd(load(from + i), load(from + i), squares);
  float total = sum(squares);
  for (; i < numel; ++i) total += to_float(from[i]) * to_float(from[i]);
  const float scale = 1.0f / std::sqrt(total / static_cast<float>(numel) + epsilon);
  for (i = 0; i + LANES <= numel; i += LANES) store(to + i, load(from + i) * scale * (load(weight + i) + one));
  for (; i < numel; ++i) store(to + i, to_float(from[i]) * scale * (to_float(weight[i]) + one));
}

template <typename T>
inline void rotate(float* head, const T* cos, const T* sin, int64_t dim) {
  const int64_t half = dim / 2;
  int64_t i = 0;
  for (; i + LANES <= half; i += LANES) {
    const Vec low = load(head + i), high = load(head + half + i);
    store(head + i, low * load(cos + i) - high * load(sin + i));
    store(head + half + i, high * load(cos + half + i) + low * load(sin + half + i));
  }
  for (; i < half; ++i) {
    const float low = head[i], high = head[half + i];
    head[i] = low * to_float(cos[i]) - high * to_float(sin[i]);
    head[half + i] = high * to_float(cos[half + i]) + low * to_float(sin[half + i]);
  }
}

// Memory that is kept from layer to layer: of the thread that computes them.
class Room {
 public:
  explicit Room(int64_t nbytes) {
    thread_local std::unique_ptr<char[]> kept;
    thread_local int64_t size = 0;
    if (size < nbytes) {
      kept.reset(new char[nbytes + 64]);
      size = nbytes;
    }
    next_ = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(kept.get()) + 63) / 64 * 64);
  }
  template <typename T>
  T* take(int64_t numel) {
    T* taken = reinterpret_cast<T*>(next_);
    next_ += nbytes<T>(numel);
    return taken;
  }
  template <typename T>
  static int64_t nbytes(int64_t numel) {
    return (numel * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
  }

 private:
  char* next_;
};

// done(row, first column, sums of the piece's columns of that row), for each row of a piece of x times w. `after`: what its
// thread multiplies by next, and from which column on; by itself, its next piece of the same product.
template <typename X, typename T, typename Done>
inline void piece_of(const Pieces& pieces, int64_t piece, const X* x, const void* w, const void* bias, int64_t inputs,
                     std::vector<float>& sums, const Low& low, Done done, const void* after = nullptr,
                     int64_t after_column = -1) {
  const int64_t row = pieces.row(piece), rows = pieces.row_count(piece), first = pieces.first(piece);
  if (after == nullptr) after = w, after_column = pieces.next(piece, omp_get_num_threads());
  const T* next = after_column < 0 ? nullptr : static_cast<const T*>(after) + after_column * inputs;
  sums.resize(rows * CHUNK);
  columns(x + row * inputs, rows, static_cast<const T*>(w), inputs, first, pieces.end(piece), next,
          [&](int64_t m, int64_t n, Four sum, int count) {
            std::memcpy(sums.data() + m * CHUNK + n - first, &sum, count * sizeof(float));
          });
  for (int64_t m = 0; m < rows; ++m)
    if (const T* own = static_cast<const T*>(low.bias(row + m, bias)))
      for (int64_t n = first; n < pieces.end(piece); ++n) sums[m * CHUNK + n - first] += to_float(own[n]);
  if (low.any()) low.expand<T>(row, rows, pieces.columns, first, pieces.end(piece), sums.data(), CHUNK);
  for (int64_t m = 0; m < rows; ++m) done(row + m, first, sums.data() + m * CHUNK);
}

// The three products' of a gated MLP, and the rows of their step.
struct GatedLow {
  Low gate, up, down;
  const std::vector<Segment>& rows;
};

// Stages of a product of all rows of x. done(row, first column, end, sums of these columns): the last product's.
template <typename X, typename T, typename Stage, typename Done>
inline void gated(const Gated& g, int64_t rows, const X* x, X* inner, const GatedLow& low, std::vector<float>& sums,
                  Stage stage, Done done) {
  constexpr int64_t nbytes = sizeof(X);
  const Pieces of_inner(rows, g.inner, g.hidden * nbytes), of_down(rows, g.hidden, g.inner * nbytes);
  std::vector<float> more;
  stage(of_inner.count, [&](int64_t piece) {
    const int64_t row = of_inner.row(piece), first = of_inner.first(piece), end = of_inner.end(piece);
    piece_of<X, T>(of_inner, piece, x, g.up, g.up_bias, g.hidden, more, low.up, [](int64_t, int64_t, const float*) {},
                   g.gate, first);
    const auto activated = [&](int64_t r, int64_t n, float* sum) {
      activate(g.activation, sum, more.data() + (r - row) * CHUNK, end - n);
      convert(sum, inner + r * g.inner + n, end - n);
    };
    piece_of<X, T>(of_inner, piece, x, g.gate, g.gate_bias, g.hidden, sums, low.gate, activated, g.up,
                   of_inner.next(piece, omp_get_num_threads()));
  });
  if (low.down.any()) stage(low.rows.size(), [&](int64_t s) { low.down.shrink<T>(low.rows[s], inner, g.inner, g.hidden); });
  stage(of_down.count, [&](int64_t piece) {
    piece_of<X, T>(of_down, piece, inner, g.down, g.down_bias, g.inner, sums, low.down,
                   [&](int64_t r, int64_t n, const float* sum) { done(r, n, of_down.end(piece), sum); });
  });
}

template <typename T>
void run_layer(const Layer& l, const Step& step, const T* in, T* out, const T* cos, const T* sin) {
  using X = typename Rows<T>::type;
  const Shape& s = l.shape;
  const int64_t rows = step.tokens, hidden = l.mlp.hidden, queries = s.heads * s.dim, keys = s.kv_heads * s.dim;
  const int64_t width = queries + 2 * keys, x_nbytes = static_cast<int64_t>(sizeof(X));
  Room room(Room::nbytes<float>(rows * width) + Room::nbytes<float>(rows * hidden) * 2 +
            Room::nbytes<float>(step.adapters == nullptr ? 0 : 7 * rows * step.most_rank) +
            Room::nbytes<X>(rows * std::max(hidden, queries)) + Room::nbytes<X>(rows * queries) + Room::nbytes<X>(rows * l.mlp.inner));
  float *qkv = room.take<float>(rows * width), *kept = room.take<float>(rows * hidden);
  float* product = room.take<float>(rows * hidden);
  X *x = room.take<X>(rows * std::max(hidden, queries)), *inner = room.take<X>(rows * l.mlp.inner);
  X* attended = room.take<X>(rows * queries);
  const int64_t low_numel = step.adapters == nullptr ? 0 : rows * step.most_rank;
  float* inners = room.take<float>(7 * low_numel);
  const auto low = [&](const Lora* loras, int64_t number) {
    return Low{step.adapters, loras, inners + number * low_numel, step.most_rank};
  };
  const Low low_qkv[] = {low(l.q_loras, 0), low(l.k_loras, 1), low(l.v_loras, 2)}, low_o = low(l.o_loras, 3);
  const std::vector<Segment> some = segments(rows, step.adapters);
  const GatedLow low_mlp{low(l.mlp.gate_loras, 4), low(l.mlp.up_loras, 5), low(l.mlp.down_loras, 6), some};
  const Pieces of_q(rows, queries, hidden * x_nbytes), of_k(rows, keys, hidden * x_nbytes);
  const Pieces of_o(rows, hidden, queries * x_nbytes);
  Team::run([&](auto stage) {
    std::vector<float> sums;
    Attend attend;
    stage(some.size(), [&](int64_t i) {
      for (int64_t r = some[i].row; r < some[i].row + some[i].count; ++r)
        normalize<T>(in + r * hidden, l.before_attention, hidden, l.epsilon, l.one, x + r * hidden);
      for (int which = 0; which < 3; ++which) low_qkv[which].template shrink<T>(some[i], x, hidden, which ? keys : queries);
    });
    stage(of_q.count + 2 * of_k.count, [&](int64_t piece) {
      const int64_t after = piece - of_q.count;
      const int which = after < 0 ? 0 : after < of_k.count ? 1 : 2;
      const void *w[] = {l.q, l.k, l.v}, *bias[] = {l.q_bias, l.k_bias, l.v_bias};
      const Pieces& pieces = which ? of_k : of_q;
      const int64_t own = which == 0 ? piece : which == 1 ? after : after - of_k.count;
      const int64_t start = which == 0 ? 0 : which == 1 ? queries : queries + keys;
      piece_of<X, T>(pieces, own, x, w[which], bias[which], hidden, sums, low_qkv[which],
                     [&](int64_t r, int64_t n, const float* sum) {
        convert(sum, qkv + r * width + start + n, pieces.end(own) - n);
      });
    });
    stage(rows, [&](int64_t r) {
      float* row = qkv + r * width;
      for (int64_t h = 0; h < s.heads + s.kv_heads; ++h) {
        float* head = row + h * s.dim;
        const void* norm = h < s.heads ? l.q_norm : l.k_norm;
        if (norm != nullptr) normalize<T>(head, norm, s.dim, l.epsilon, l.one, head);
        rotate(head, cos + r * s.dim, sin + r * s.dim, s.dim);
      }
      write<T>(s, step, r, row + queries, s.dim, row + queries + keys, s.dim);
      convert(row, x + r * queries, queries);
    });
    stage(step.items * s.kv_heads, [&](int64_t i) {
      attend.template operator()<T>(s, step, x, attended, i / s.kv_heads, i % s.kv_heads);
    });
    if (low_o.any()) stage(some.size(), [&](int64_t i) { low_o.shrink<T>(some[i], attended, queries, hidden); });
    stage(of_o.count, [&](int64_t piece) {
      piece_of<X, T>(of_o, piece, attended, l.o, l.o_bias, queries, sums, low_o, [&](int64_t r, int64_t n, const float* sum) {
        const int64_t at = r * hidden + n, numel = of_o.end(piece) - n;
        if (l.after_attention != nullptr)
          convert(sum, product + at, numel);
        else
          add(in + at, sum, kept + at, numel);
      });
    });
    stage(some.size(), [&](int64_t i) {
      for (int64_t r = some[i].row; r < some[i].row + some[i].count; ++r) {
        float* own = kept + r * hidden;
        if (l.after_attention != nullptr) {
          float* from = product + r * hidden;
          normalize<T>(from, l.after_attention, hidden, l.epsilon, l.one, from);
          add(in + r * hidden, from, own, hidden);
        }
        normalize<T>(own, l.before_mlp, hidden, l.epsilon, l.one, x + r * hidden);
      }
      low_mlp.gate.shrink<T>(some[i], x, hidden, l.mlp.inner);
      low_mlp.up.shrink<T>(some[i], x, hidden, l.mlp.inner);
    });
    gated<X, T>(l.mlp, rows, x, inner, low_mlp, sums, stage, [&](int64_t r, int64_t n, int64_t end, const float* sum) {
      const int64_t at = r * hidden + n;
      if (l.after_mlp != nullptr)
        convert(sum, product + at, end - n);
      else
        add(kept + at, sum, out + at, end - n);
    });
    if (l.after_mlp != nullptr)
      stage(rows, [&](int64_t r) {
        float* from = product + r * hidden;
        normalize<T>(from, l.after_mlp, hidden, l.epsilon, l.one, from);
        add(kept + r * hidden, from, out + r * hidden, hidden);
      });
  });
}

}  // namespace dormouse
