// Vectors of fp32 as wide as the compiler's target has them, and how fp32 and bf16 become them. GCC's and clang's vector
// extensions: the same code for AVX-512, AVX2 and whatever else there is.

#pragma once

#include <cstdint>
#include <cstring>
#if defined(__FMA__)
#include <immintrin.h>
#endif
#if defined(__AVX512F__) && defined(__AVX512BF16__)
#define DORMOUSE_DOTS_BF16 1  // products of bf16 pairs, summed in fp32, are one instruction
#endif

namespace dormouse {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef float VecAnywhere __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef float Four __attribute__((vector_size(16)));

struct Bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(Bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}
inline void store(float* to, float x) { *to = x; }
inline void store(Bf16* to, float x) {  // to nearest even
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  to->bits = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline Vec all(float x) { return Vec{} + x; }
inline Vec load(const float* from) { return *reinterpret_cast<const VecAnywhere*>(from); }
inline Vec load(const Bf16* from) {
  const Words words = __builtin_convertvector(*reinterpret_cast<const Halves*>(from), Words) << 16;
  return (Vec)words;
}
inline void store(float* to, Vec x) { *reinterpret_cast<VecAnywhere*>(to) = x; }
inline void store(Bf16* to, Vec x) {
#ifdef DORMOUSE_DOTS_BF16
  const __m256bh half = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(to, &half, sizeof half);
#else
  const Words bits = (Words)x, nan = (Words)((bits & 0x7fffffffu) > 0x7f800000u);
  const Words near = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, quiet = (bits >> 16) | 0x40u;
  const Words chosen = (nan & quiet) | (~nan & near);
  *reinterpret_cast<Halves*>(to) = __builtin_convertvector(chosen, Halves);
#endif
}

// Numbers of one type become those of another.
template <typename From, typename To>
inline void convert(const From* from, To* to, int64_t numel) {
  int64_t i = 0;
  for (; i + LANES <= numel; i += LANES) store(to + i, load(from + i));
  for (; i < numel; ++i) store(to + i, to_float(from[i]));
}

// to = from + more, and so on.
template <typename From, typename To>
inline void add(const From* from, const float* more, To* to, int64_t numel) {
  int64_t i = 0;
  for (; i + LANES <= numel; i += LANES) store(to + i, load(from + i) + load(more + i));
  for (; i < numel; ++i) store(to + i, to_float(from[i]) + more[i]);
}

// a b + c. Compilers are told not to make these by themselves: where they did, and where not, results would differ.
inline Vec madd(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// Some of a vector, the rest of which is zero.
template <typename T>
inline Vec load_some(const T* from, int64_t numel) {
  T padded[LANES] = {};
  for (int64_t i = 0; i < numel; ++i) padded[i] = from[i];
  return load(padded);
}
inline void store_some(float* to, Vec x, int64_t numel) { std::memcpy(to, &x, numel * sizeof(float)); }

// The sum of all lanes, as four partial sums: halves are added to halves, always in this order.
inline Four quarters(Vec x) {
  float at[LANES];
  std::memcpy(at, &x, sizeof x);
#if defined(__AVX512F__)
  typedef float Eight __attribute__((vector_size(32)));
  Eight low, high;
  std::memcpy(&low, at, 32);
  std::memcpy(&high, at + 8, 32);
  low += high;
  std::memcpy(at, &low, 32);
#endif
  Four first, second;
  std::memcpy(&first, at, 16);
  if constexpr (LANES == 4) return first;
  std::memcpy(&second, at + LANES / 4 * (LANES == 16 ? 1 : 2), 16);
  return first + second;
}

// The sums of four vectors.
inline Four sums(Vec a, Vec b, Vec c, Vec d) {
#if defined(__AVX512F__)
  // Both halves of each quarter's pairs meet where their number's place is; then the quarters are added.
  const auto pairs = [](Vec x, Vec y) {
    return (__m512d)((Vec)_mm512_unpacklo_ps((__m512)x, (__m512)y) + (Vec)_mm512_unpackhi_ps((__m512)x, (__m512)y));
  };
  const __m512d ab = pairs(a, b), cd = pairs(c, d);
  const Vec all = (Vec)_mm512_unpacklo_pd(ab, cd) + (Vec)_mm512_unpackhi_pd(ab, cd);
  typedef float Eight __attribute__((vector_size(32)));
  const Eight half = (Eight)_mm512_castps512_ps256((__m512)all) + (Eight)_mm512_extractf32x8_ps((__m512)all, 1);
  return (Four)_mm256_castps256_ps128((__m256)half) + (Four)_mm256_extractf128_ps((__m256)half, 1);
#else
  const Four p = quarters(a), q = quarters(b), r = quarters(c), s = quarters(d);
  typedef int32_t Pick __attribute__((vector_size(16)));
  const Four pq = __builtin_shuffle(p, q, Pick{0, 4, 1, 5}) + __builtin_shuffle(p, q, Pick{2, 6, 3, 7});
  const Four rs = __builtin_shuffle(r, s, Pick{0, 4, 1, 5}) + __builtin_shuffle(r, s, Pick{2, 6, 3, 7});
  return __builtin_shuffle(pq, rs, Pick{0, 1, 4, 5}) + __builtin_shuffle(pq, rs, Pick{2, 3, 6, 7});
#endif
}

inline float sum(Vec x) {
  const Four q = quarters(x);
  return (q[0] + q[2]) + (q[1] + q[3]);
}

inline Vec where(Ints mask, Vec yes, Vec no) { return mask ? yes : no; }

// e^x to about one unit in the last place: 2^n e^r with |r| <= ln 2 / 2, and a polynomial for e^r. NaN stays NaN.
inline Vec exponential(Vec x) {
  const Vec low = all(-87.0f), high = all(88.0f);
  const Vec inside = where(x > high, high, where(x < low, low, x));
  const Vec magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec n = madd(inside, all(1.44269504088896341f), magic) - magic;
  const Vec r = madd(n, all(2.12194440e-4f), madd(n, all(-0.693359375f), inside));
  Vec p = all(1.9875691500e-4f);
  for (const float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = madd(p, r, all(next));
  const Vec power = madd(p * r, r, r) + 1.0f;
  const Vec tame = where(n == n, n, Vec{});
  const Ints bits = (__builtin_convertvector(tame, Ints) + 127) << 23;
  return power * (Vec)bits;
}

inline Vec hyperbolic_tangent(Vec x) {
  const Vec e = exponential(where(x < Vec{}, x, -x) * 2.0f);  // of -2|x|: never too large
  const Vec result = (1.0f - e) / (1.0f + e);
  return where(x < Vec{}, -result, result);
}

}  // namespace dormouse
