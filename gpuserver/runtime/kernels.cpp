// What a runtime computes on the CPU, for fp32 and bf16: products, attention over scattered blocks, whole layers. Plain C
// interface, no torch.

#include "layer.h"

using namespace dormouse;

namespace {

template <typename T>
void attend_all(const Shape& s, const Step& step, const T* q, T* out) {
  Team::run([&](auto stage) {
    Attend attend;
    stage(step.items * s.kv_heads, [&](int64_t i) {
      attend.operator()<T>(s, step, q, out, i / s.kv_heads, i % s.kv_heads);
    });
  });
}

// x as products read it: itself, or converted to `made`.
template <typename X, typename T>
const X* rows_of(const T* x, int64_t numel, X* made) {
  if constexpr (std::is_same_v<X, T>) {
    return x;
  } else {
    convert(x, made, numel);
    return made;
  }
}

template <typename T, typename Out>
void multiply(const T* x, const T* w, const T* bias, Out* out, int64_t rows, int64_t inputs, int64_t outputs,
              const int64_t* adapters, const Lora* loras, int64_t most_rank) {
  using X = typename Rows<T>::type;
  const int64_t low_numel = adapters == nullptr || loras == nullptr ? 0 : rows * most_rank;
  Room room(Room::nbytes<X>(rows * inputs) + Room::nbytes<float>(low_numel));
  const X* from = rows_of(x, rows * inputs, room.take<X>(rows * inputs));
  const Low low{adapters, loras, room.take<float>(low_numel), most_rank};
  const std::vector<Segment> some = segments(low.any() ? rows : 0, adapters);
  const Pieces pieces(rows, outputs, inputs * static_cast<int64_t>(sizeof(X)));
  Team::run([&](auto stage) {
    std::vector<float> sums;
    if (low.any()) stage(some.size(), [&](int64_t i) { low.shrink<T>(some[i], from, inputs, outputs); });
    stage(pieces.count, [&](int64_t piece) {
      piece_of<X, T>(pieces, piece, from, w, bias, inputs, sums, low, [&](int64_t r, int64_t n, const float* sum) {
        convert(sum, out + r * outputs + n, pieces.end(piece) - n);
      });
    });
  });
}

template <typename T>
void run_gated(const Gated& g, const T* in, T* out, int64_t rows, const int64_t* adapters, int64_t most_rank) {
  using X = typename Rows<T>::type;
  const int64_t low_numel = adapters == nullptr ? 0 : rows * most_rank;
  Room room(Room::nbytes<X>(rows * g.hidden) + Room::nbytes<X>(rows * g.inner) + Room::nbytes<float>(3 * low_numel));
  const X* x = rows_of(in, rows * g.hidden, room.take<X>(rows * g.hidden));
  X* inner = room.take<X>(rows * g.inner);
  float* inners = room.take<float>(3 * low_numel);
  const auto low_of = [&](const Lora* loras, int64_t number) {
    return Low{adapters, loras, inners + number * low_numel, most_rank};
  };
  const std::vector<Segment> some = segments(rows, adapters);
  const GatedLow low{low_of(g.gate_loras, 0), low_of(g.up_loras, 1), low_of(g.down_loras, 2), some};
  Team::run([&](auto stage) {
    std::vector<float> sums;
    if (low.gate.any() || low.up.any())
      stage(some.size(), [&](int64_t i) {
        low.gate.shrink<T>(some[i], x, g.hidden, g.inner);
        low.up.shrink<T>(some[i], x, g.hidden, g.inner);
      });
    gated<X, T>(g, rows, x, inner, low, sums, stage, [&](int64_t r, int64_t n, int64_t end, const float* sum) {
      convert(sum, out + r * g.hidden + n, end - n);
    });
  });
}

template <typename T>
void normalize_all(const T* in, const void* weights, T* out, int64_t rows, int64_t numel, float epsilon, float one) {
  const auto each = [&](int64_t r) { normalize<T>(in + r * numel, weights, numel, epsilon, one, out + r * numel); };
  if (rows * numel < 1 << 16)  // less than it costs to wake the others
    for (int64_t r = 0; r < rows; ++r) each(r);
  else
    Team::run([&](auto stage) { stage(rows, each); });
}

template <typename T>
void rotate_all(const T* in, const T* cos, const T* sin, T* out, int64_t tokens, int64_t heads, int64_t dim) {
  std::vector<float> head(dim);
  for (int64_t row = 0; row < tokens * heads; ++row) {
    convert(in + row * dim, head.data(), dim);
    rotate(head.data(), cos + row / heads * dim, sin + row / heads * dim, dim);
    convert(head.data(), out + row * dim, dim);
  }
}

}  // namespace

extern "C" {

// q and out: [tokens][heads][dim], contiguous.
void dormouse_attend(int bf16, const Shape* shape, const Step* step, const void* q, void* out) {
  if (bf16)
    attend_all(*shape, *step, static_cast<const Bf16*>(q), static_cast<Bf16*>(out));
  else
    attend_all(*shape, *step, static_cast<const float*>(q), static_cast<float*>(out));
}

// Keys and values of new tokens to their places: k and v are [kv_heads][tokens][dim] with these strides, in elements.
void dormouse_write(int bf16, const Shape* shape, const Step* step, const void* k, int64_t k_head, int64_t k_token,
                    const void* v, int64_t v_head, int64_t v_token) {
  const auto all = [&](auto* keys, auto* values) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(keys)>>;
    for (int64_t t = 0; t < step->tokens; ++t)
      write<T>(*shape, *step, t, keys + t * k_token, k_head, values + t * v_token, v_head);
  };
  if (bf16)
    all(static_cast<const Bf16*>(k), static_cast<const Bf16*>(v));
  else
    all(static_cast<const float*>(k), static_cast<const float*>(v));
}

// in and out: [tokens][hidden]; cos and sin: [tokens][dim]. All of type T.
void dormouse_layer(int bf16, const Layer* layer, const Step* step, const void* in, void* out, const void* cos,
                    const void* sin) {
  if (bf16)
    run_layer(*layer, *step, static_cast<const Bf16*>(in), static_cast<Bf16*>(out), static_cast<const Bf16*>(cos),
              static_cast<const Bf16*>(sin));
  else
    run_layer(*layer, *step, static_cast<const float*>(in), static_cast<float*>(out), static_cast<const float*>(cos),
              static_cast<const float*>(sin));
}

// out = x w^T + bias: x [rows][inputs], w [outputs][inputs]. `wide`: out is fp32. For the last three see lora.h.
void dormouse_linear(int bf16, int wide, const void* x, const void* w, const void* bias, void* out, int64_t rows,
                     int64_t inputs, int64_t outputs, const int64_t* adapters, const Lora* loras, int64_t most_rank) {
  if (!bf16)
    multiply(static_cast<const float*>(x), static_cast<const float*>(w), static_cast<const float*>(bias),
             static_cast<float*>(out), rows, inputs, outputs, adapters, loras, most_rank);
  else if (wide)
    multiply(static_cast<const Bf16*>(x), static_cast<const Bf16*>(w), static_cast<const Bf16*>(bias),
             static_cast<float*>(out), rows, inputs, outputs, adapters, loras, most_rank);
  else
    multiply(static_cast<const Bf16*>(x), static_cast<const Bf16*>(w), static_cast<const Bf16*>(bias),
             static_cast<Bf16*>(out), rows, inputs, outputs, adapters, loras, most_rank);
}

// in and out: [rows][hidden].
void dormouse_gated(int bf16, const Gated* mlp, const void* in, void* out, int64_t rows, const int64_t* adapters,
                    int64_t most_rank) {
  if (bf16)
    run_gated(*mlp, static_cast<const Bf16*>(in), static_cast<Bf16*>(out), rows, adapters, most_rank);
  else
    run_gated(*mlp, static_cast<const float*>(in), static_cast<float*>(out), rows, adapters, most_rank);
}

// out = in / its root mean square * (weights + one), for rows of this many numbers.
void dormouse_norm(int bf16, const void* in, const void* weights, void* out, int64_t rows, int64_t numel, float epsilon,
                   float one) {
  if (bf16)
    normalize_all(static_cast<const Bf16*>(in), weights, static_cast<Bf16*>(out), rows, numel, epsilon, one);
  else
    normalize_all(static_cast<const float*>(in), weights, static_cast<float*>(out), rows, numel, epsilon, one);
}

// in and out: [tokens][heads][dim]; cos and sin: [tokens][dim]. The second half of each head is turned against its first.
void dormouse_rotate(int bf16, const void* in, const void* cos, const void* sin, void* out, int64_t tokens, int64_t heads,
                     int64_t dim) {
  if (bf16)
    rotate_all(static_cast<const Bf16*>(in), static_cast<const Bf16*>(cos), static_cast<const Bf16*>(sin),
               static_cast<Bf16*>(out), tokens, heads, dim);
  else
    rotate_all(static_cast<const float*>(in), static_cast<const float*>(cos), static_cast<const float*>(sin),
               static_cast<float*>(out), tokens, heads, dim);
}

// The index of each row's largest number (the first of them), or -1 if the row has one that is not finite.
void dormouse_largest(const float* rows, int64_t count, int64_t numel, int64_t* largest) {
  Team::run([&](auto stage) {
    stage(count, [&](int64_t r) {
      const float* row = rows + r * numel;
      Vec most = all(-INFINITY), zero{};
      int64_t i = 0;
      for (; i + LANES <= numel; i += LANES) {
        const Vec each = load(row + i);
        most = where(each > most, each, most);
        zero += each * 0.0f;  // NaN as soon as one is not finite
      }
      float peak = -INFINITY, bad = sum(zero);
      for (int lane = 0; lane < LANES; ++lane) peak = most[lane] > peak ? most[lane] : peak;
      for (; i < numel; ++i) {
        peak = row[i] > peak ? row[i] : peak;
        bad += row[i] * 0.0f;
      }
      largest[r] = -1;
      if (bad == 0.0f)
        for (largest[r] = 0; row[largest[r]] != peak; ++largest[r]) {
        }
    });
  });
}
}
