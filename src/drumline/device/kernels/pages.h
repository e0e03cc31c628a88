// How keys and values lie in the pool, and how a token's are put there.
//
// A page is one KV head's keys, or values, of a block, in lines. A line of keys has four bytes of
// each token: one dimension of float32, two of bfloat16, four of int8. A line of values has four
// bytes of each dimension: of one token, two or four. Behind integers stand the sixteen tokens'
// steps, float32.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "lanes.h"

namespace drumline {

constexpr int kPage = 16;
constexpr int kLine = 4 * kPage;        // bytes
constexpr float kLeastStored = 1e-30f;  // vectors without a larger value are kept as zeros
constexpr float kNone = std::numeric_limits<float>::quiet_NaN();

template <class T>
constexpr bool kHasSteps = sizeof(T) == 1;

template <class T>
constexpr int64_t page_bytes(int64_t size) {
  return kPage * size * static_cast<int64_t>(sizeof(T)) + (kHasSteps<T> ? kLine : 0);
}

inline const float* steps_of(const int8_t* page, int64_t size) { return reinterpret_cast<const float*>(page + kPage * size); }
inline float* steps_of(int8_t* page, int64_t size) { return reinterpret_cast<float*>(page + kPage * size); }

template <class T>
inline void fetch(const T* page, int64_t size) {
  const char* bytes = reinterpret_cast<const char*>(page);
  for (int64_t at = 0; at < page_bytes<T>(size); at += 64) _mm_prefetch(bytes + at, _MM_HINT_T0);
}

inline float largest_size(const float* x, int64_t count) {
  // As integers: what is no number is larger than infinity then, and so stays.
  __m256i most = _mm256_setzero_si256();
  const __m256i size = _mm256_set1_epi32(0x7fffffff);
  for (int64_t d = 0; d < count; d += kLanes)
    most = _mm256_max_epu32(most, _mm256_and_si256(size, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + d))));
  __m128i half = _mm_max_epu32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0x4e));
  half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0xb1));
  return _mm_cvtss_f32(_mm_castsi128_ps(half));
}

// Keep a token's vector as that of token `t` of its page.
template <class T>
inline T stored(float v) {
  if constexpr (sizeof(T) == 2)
    return bfloat(v);
  else
    return v;
}
template <class T>
inline void keep_key(T* page, int64_t size, int64_t t, const float* x) {
  constexpr int64_t each = 4 / sizeof(T);
  for (int64_t d = 0; d < size; d++) page[d / each * each * kPage + t * each + d % each] = stored<T>(x[d]);
}
template <class T>
inline void keep_value(T* page, int64_t size, int64_t t, const float* x) {
  constexpr int64_t each = 4 / sizeof(T);
  T* line = page + t / each * each * size + t % each;
  for (int64_t d = 0; d < size; d++) line[d * each] = stored<T>(x[d]);
}

// The step of a vector, and what its values are multiplied by to be integers.
inline float step_of(const float* x, int64_t size, float& by) {
  const float most = largest_size(x, size);
  by = 0;
  if (!(most < INFINITY)) return kNone;
  if (most <= kLeastStored) return 0;
  by = 127 / most;
  return most / 127;
}
inline int8_t integer(float v, float by) { return by == 0 ? 0 : static_cast<int8_t>(_mm_cvtss_si32(_mm_set_ss(v * by))); }
inline void keep_key(int8_t* page, int64_t size, int64_t t, const float* x) {
  float by;
  steps_of(page, size)[t] = step_of(x, size, by);
  for (int64_t d = 0; d < size; d++) page[d / 4 * kLine + t * 4 + d % 4] = integer(x[d], by);
}
inline void keep_value(int8_t* page, int64_t size, int64_t t, const float* x) {
  float by;
  steps_of(page, size)[t] = step_of(x, size, by);
  for (int64_t d = 0; d < size; d++) page[(t / 4 * size + d) * 4 + t % 4] = integer(x[d], by);
}

}  // namespace drumline
