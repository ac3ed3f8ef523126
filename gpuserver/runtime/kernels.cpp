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

template <typename T, typename Out>
void multiply(const T* x, const T* w, const T* bias, Out* out, int64_t rows, int64_t inputs, int64_t outputs) {
  using X = typename Rows<T>::type;
  const X* from = reinterpret_cast<const X*>(x);
  if constexpr (!std::is_same_v<X, T>) {
    X* made = Room(Room::nbytes<X>(rows * inputs)).take<X>(rows * inputs);
    for (int64_t i = 0; i < rows * inputs; ++i) made[i] = to_float(x[i]);
    from = made;
  }
  const Pieces pieces(rows, outputs, inputs * static_cast<int64_t>(sizeof(X)));
  Team::run([&](auto stage) {
    std::vector<float> sums;
    stage(pieces.count, [&](int64_t piece) {
      piece_of<X, T>(pieces, piece, from, w, bias, inputs, sums, [&](int64_t r, int64_t n, const float* sum) {
        for (int64_t i = n; i < pieces.end(piece); ++i) store(out + r * outputs + i, sum[i - n]);
      });
    });
  });
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

// out = x w^T + bias: x [rows][inputs], w [outputs][inputs]. `wide`: out is fp32.
void dormouse_linear(int bf16, int wide, const void* x, const void* w, const void* bias, void* out, int64_t rows,
                     int64_t inputs, int64_t outputs) {
  if (!bf16)
    multiply(static_cast<const float*>(x), static_cast<const float*>(w), static_cast<const float*>(bias),
             static_cast<float*>(out), rows, inputs, outputs);
  else if (wide)
    multiply(static_cast<const Bf16*>(x), static_cast<const Bf16*>(w), static_cast<const Bf16*>(bias),
             static_cast<float*>(out), rows, inputs, outputs);
  else
    multiply(static_cast<const Bf16*>(x), static_cast<const Bf16*>(w), static_cast<const Bf16*>(bias),
             static_cast<Bf16*>(out), rows, inputs, outputs);
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
