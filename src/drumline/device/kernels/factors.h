// What rows bring to lines: queries for keys, and weights for values, in the lines' own type.
//
// Floats are floats. Integers meet queries of 15 bits with their sign, and weights of 14 without
// one, whose sums are exact; pairs of bfloat16 meet rounded ones.
#pragma once

#include "lines.h"

namespace drumline {

constexpr int kStretch = 256;           // positions that are attended by themselves
constexpr int kLevels = 127 * 128;      // of an integer query or weight
constexpr int64_t kMostSize = 1024;     // of a head
static_assert(std::max<int64_t>(kMostSize, kStretch) * 127 * kLevels <= INT32_MAX, "sums of integers are exact");

// Sixteen integers of 16 bits, in the order that lines of integers take; see ShortLines.
inline void put_shorts(int16_t* to, __m256i a, __m256i b) {
  __m256i v = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
  v = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(v, 0xd8), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), v);
}

// A query head's vector as factors; returns what they are multiples of.
inline float ask(const float* x, int64_t size, float* to) {
  std::copy_n(x, size, to);
  return 1;
}
inline float ask(const float* x, int64_t size, int16_t* to) {
  const float most = largest_size(x, size);
  const bool finite = most < INFINITY;
  const Floats by = all(finite && most > kLeastStored ? kLevels / most : 0.f);
  const auto whole = [&](int64_t d) { return _mm256_cvtps_epi32(_mm256_mul_ps(load(x + d), by)); };
  int64_t d = 0;
  for (; d + kPage <= size; d += kPage) put_shorts(to + d, whole(d), whole(d + kLanes));
  if (d < size) {
    alignas(32) int16_t last[kPage];
    put_shorts(last, whole(d), _mm256_setzero_si256());
    std::copy_n(last, kLanes, to + d);
  }
  return finite ? most / kLevels : kNone;
}

// Positions [from, to), whole pages, of weights as factors, which are not negative, times the
// steps of what they weigh. What weighs nothing is not read, and has no step.
inline float weigh_by(float* weights, const float* steps, int from, int to, int16_t* out) {
  Floats most = _mm256_setzero_ps(), total = _mm256_setzero_ps();
  for (int t = from; t < to; t += kLanes) {
    const Floats weight = load(weights + t);
    const Floats read = _mm256_cmp_ps(weight, _mm256_setzero_ps(), _CMP_NEQ_UQ);
    const Floats scaled = _mm256_and_ps(read, _mm256_mul_ps(weight, load(steps + t)));
    store(weights + t, scaled);
    most = _mm256_max_ps(most, scaled);
    total = _mm256_add_ps(total, scaled);
  }
  const float peak = largest(most);
  const Floats by = all(peak > 0 ? kLevels / peak : 0.f);
  const auto whole = [&](int t) { return _mm256_cvtps_epi32(_mm256_mul_ps(load(weights + t), by)); };
  for (int t = from; t < to; t += kPage) put_shorts(out + t, whole(t), whole(t + kLanes));
  // Times zero, a sum is zero, or no number where one of them was none.
  return peak / kLevels + sum(total) * 0.f;
}

#ifdef __AVX512BF16__
// Round whole lanes of floats, and return the sum of what they became.
inline float round_all(const float* from, int64_t first, int64_t last, uint16_t* to) {
  Floats total = _mm256_setzero_ps();
  for (int64_t i = first; i < last; i += kLanes) {
    const __m128i rounded = (__m128i)_mm256_cvtneps_pbh(load(from + i));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), rounded);
    total = _mm256_add_ps(total, bfloats(to + i));
  }
  return sum(total);
}

inline float ask(const float* x, int64_t size, uint16_t* to) {
  round_all(x, 0, size, to);
  return 1;
}
#endif

}  // namespace drumline
