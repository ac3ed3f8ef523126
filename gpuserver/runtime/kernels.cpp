// Attention over scattered blocks on the CPU (Tangram, section 3.3), for fp32 and bf16. Plain C interface, no torch.
//
// A block holds, per layer, keys and then values: [2][kv_heads][block_tokens][dim]. Offsets count elements from `base`.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

struct Bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(Bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}
inline void store(float* to, float x) { *to = x; }
inline void store(Bf16* to, float x) {  // to nearest even
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    to->bits = static_cast<uint16_t>((bits >> 16) | 0x40u);
    return;
  }
  to->bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

struct Shape {
  int64_t heads, kv_heads, dim, block_tokens, layer_offset, window;
  float scale, softcap;
};

// One query token of one sequence, and the query heads that share one key head.
template <typename T>
void attend(const Shape& s, const T* q, T* out, const T* base, const int64_t* blocks, int64_t context, int64_t kv_head,
            std::vector<float>& room) {
  const int64_t group = s.heads / s.kv_heads, dim = s.dim, tile = s.block_tokens * dim;
  const int64_t first = s.window > 0 ? std::max<int64_t>(0, context - s.window) : 0, count = context - first;
  room.resize(group * (count + 2 * dim));
  float *scores = room.data(), *queries = scores + group * count, *sums = queries + group * dim;
  for (int64_t g = 0; g < group; ++g)
    for (int64_t d = 0; d < dim; ++d) queries[g * dim + d] = to_float(q[(kv_head * group + g) * dim + d]) * s.scale;
  for (int64_t at = first; at < context; ++at) {
    const T* key = base + blocks[at / s.block_tokens] + s.layer_offset + kv_head * tile + (at % s.block_tokens) * dim;
    for (int64_t g = 0; g < group; ++g) {
      const float* query = queries + g * dim;
      float sum = 0.0f;
      for (int64_t d = 0; d < dim; ++d) sum += query[d] * to_float(key[d]);
      scores[g * count + at - first] = sum;
    }
  }
  for (int64_t g = 0; g < group; ++g) {
    float* score = scores + g * count;
    if (s.softcap > 0.0f)
      for (int64_t i = 0; i < count; ++i) score[i] = s.softcap * std::tanh(score[i] / s.softcap);
    float most = score[0];
    for (int64_t i = 1; i < count; ++i) most = std::max(most, score[i]);
    float total = 0.0f;
    for (int64_t i = 0; i < count; ++i) {
      score[i] = std::exp(score[i] - most);
      total += score[i];
    }
    const float inverse = 1.0f / total;
    for (int64_t i = 0; i < count; ++i) score[i] *= inverse;
  }
  std::fill(sums, sums + group * dim, 0.0f);
  for (int64_t at = first; at < context; ++at) {
    const T* value = base + blocks[at / s.block_tokens] + s.layer_offset + (s.kv_heads + kv_head) * tile +
                     (at % s.block_tokens) * dim;
    for (int64_t g = 0; g < group; ++g) {
      const float weight = scores[g * count + at - first];
      float* sum = sums + g * dim;
      for (int64_t d = 0; d < dim; ++d) sum[d] += weight * to_float(value[d]);
    }
  }
  for (int64_t g = 0; g < group; ++g)
    for (int64_t d = 0; d < dim; ++d) store(out + (kv_head * group + g) * dim + d, sums[g * dim + d]);
}

template <typename T>
void attend_all(const Shape& s, const T* q, T* out, const T* base, const int64_t* blocks, const int64_t* starts,
                const int64_t* contexts, int64_t tokens) {
#pragma omp parallel
  {
    std::vector<float> room;
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < tokens * s.kv_heads; ++item) {
      const int64_t token = item / s.kv_heads, row = token * s.heads * s.dim;
      attend(s, q + row, out + row, base, blocks + starts[token], contexts[token], item % s.kv_heads, room);
    }
  }
}

}  // namespace

extern "C" {

// q and out: [tokens][heads][dim], contiguous. Token t sees `contexts[t]` tokens, in the blocks from `starts[t]` on.
void dormouse_attend(int bf16, const void* q, void* out, const void* base, const int64_t* blocks,
                     const int64_t* starts, const int64_t* contexts, int64_t tokens, int64_t heads, int64_t kv_heads,
                     int64_t dim, int64_t block_tokens, int64_t layer_offset, int64_t window, float scale,
                     float softcap) {
  const Shape s{heads, kv_heads, dim, block_tokens, layer_offset, window, scale, softcap};
  if (bf16)
    attend_all(s, static_cast<const Bf16*>(q), static_cast<Bf16*>(out), static_cast<const Bf16*>(base), blocks, starts,
               contexts, tokens);
  else
    attend_all(s, static_cast<const float*>(q), static_cast<float*>(out), static_cast<const float*>(base), blocks,
               starts, contexts, tokens);
}

// Keys and values of new tokens to their places: k and v are [kv_heads][tokens][dim] with these strides, in elements.
void dormouse_write(int64_t width, const char* k, const char* v, char* base, const int64_t* places, int64_t tokens,
                    int64_t kv_heads, int64_t dim, int64_t block_tokens, int64_t layer_offset, int64_t k_head,
                    int64_t k_token, int64_t v_head, int64_t v_token) {
  const int64_t tile = block_tokens * dim;
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t h = 0; h < kv_heads; ++h) {
      const int64_t place = places[t] + layer_offset + h * tile;
      std::memcpy(base + place * width, k + (h * k_head + t * k_token) * width, dim * width);
      std::memcpy(base + (place + kv_heads * tile) * width, v + (h * v_head + t * v_token) * width, dim * width);
    }
}
}
