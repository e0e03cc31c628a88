// How a page of the pool is read: scores of its sixteen tokens, and their values' weighted sums.
//
// A page is one KV head's keys, or values, of a block, in lines. A line of keys has four bytes of
// each token: one dimension of float32, two of bfloat16, four of int8. A line of values has four
// bytes of each dimension: of one token, two or four. Behind integers stand the sixteen tokens'
// steps, float32.
//
// A lane is a token, or a dimension: nothing is summed across lanes, so that wider registers come
// to the same bits. Only where the processor multiplies pairs of bfloat16 are queries and weights
// rounded to them, if the pool holds such.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "lanes.h"

namespace drumline {

constexpr int kPage = 16;
constexpr int kLine = 4 * kPage;         // bytes
constexpr int kStretch = 256;            // positions that are attended by themselves
constexpr int kParts = kPage / kWide;    // registers for a value of each token
constexpr int kLevels = 127 * 128;       // of what is kept as two integers of seven bits
constexpr float kLeastStored = 1e-30f;   // vectors without a larger value are kept as zeros
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

#ifdef __AVX512VNNI__
inline WideFloats wide_zero() { return _mm512_setzero_ps(); }
inline WideFloats low_halves(Ints v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); }
inline WideFloats high_halves(Ints v) {
  return _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}
// Integers of seven bits, four to a lane, times signed bytes.
inline Ints add_products(Ints sums, Ints small, Ints bytes) { return _mm512_dpbusd_epi32(sums, small, bytes); }
// What two planes came to: the first one's unit is 128 of the second one's.
inline Ints both(Ints high, Ints low) { return _mm512_add_epi32(_mm512_slli_epi32(high, 7), low); }
constexpr int columns_at_once(int rows) { return rows <= 3 ? 4 : 2; }
#else
inline WideFloats wide_zero() { return _mm256_setzero_ps(); }
inline WideFloats low_halves(Ints v) { return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)); }
inline WideFloats high_halves(Ints v) {
  return _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}
inline Ints add_products(Ints sums, Ints small, Ints bytes) {
  // A pair comes to at most 2 * 127 * 127, which fits.
  return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(small, bytes), _mm256_set1_epi16(1)));
}
inline Ints both(Ints high, Ints low) { return _mm256_add_epi32(_mm256_slli_epi32(high, 7), low); }
constexpr int columns_at_once(int rows) { return rows <= 3 ? 2 : 1; }
#endif

// Run `work<N>(first)` for rows [0, count), some at a time.
template <class Do>
inline void by_rows(int count, Do&& work) {
  int done = 0;
  for (; count - done >= 6; done += 6) work.template operator()<6>(done);
  switch (count - done) {
    case 5: work.template operator()<3>(done); work.template operator()<2>(done + 3); break;
    case 4: work.template operator()<4>(done); break;
    case 3: work.template operator()<3>(done); break;
    case 2: work.template operator()<2>(done); break;
    case 1: work.template operator()<1>(done); break;
    default: break;
  }
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

// Integers that fit bytes: those of `a` begin the lower half, those of `b` the upper one.
inline __m256i narrow(__m256i a, __m256i b) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
  return _mm256_packs_epi16(words, words);
}

inline int32_t total(__m256i v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

// A query head's vector where keys are integers: integers of 15 bits, in two planes of bytes.
struct Planes {
  int8_t *high, *low;
  int32_t high_sum, low_sum;
  float step;

  void set(const float* x, int64_t size) {
    const float most = largest_size(x, size);
    const bool finite = most < INFINITY;
    const Floats by = all(finite && most > kLeastStored ? kLevels / most : 0.f);
    step = finite ? most / kLevels : kNone;
    __m256i highs = _mm256_setzero_si256(), lows = highs;
    for (int64_t d = 0; d < size; d += kLanes) {
      const __m256i whole = _mm256_cvtps_epi32(_mm256_mul_ps(load(x + d), by));
      const __m256i a = _mm256_srai_epi32(_mm256_add_epi32(whole, _mm256_set1_epi32(64)), 7);
      const __m256i b = _mm256_sub_epi32(whole, _mm256_slli_epi32(a, 7));
      highs = _mm256_add_epi32(highs, a);
      lows = _mm256_add_epi32(lows, b);
      const __m256i bytes = narrow(a, b);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(high + d), _mm256_castsi256_si128(bytes));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(low + d), _mm256_extracti128_si256(bytes, 1));
    }
    high_sum = total(highs);
    low_sum = total(lows);
  }
};

inline void two_lines(const float* page, int64_t d, int part, WideFloats& a, WideFloats& b) {
  a = wide_load(page + d * kPage + part * kWide);
  b = wide_load(page + (d + 1) * kPage + part * kWide);
}
inline void two_lines(const uint16_t* page, int64_t d, int part, WideFloats& a, WideFloats& b) {
  const Ints pairs = wide(reinterpret_cast<const uint8_t*>(page + d * kPage + part * 2 * kWide));
  a = low_halves(pairs);
  b = high_halves(pairs);
}

// Scores of a page's tokens for N queries; a query's go kStretch floats behind the one before.
template <int N, class T>
inline void score(const T* page, int64_t size, const float* const* query, float scale, float* out) {
  for (int part = 0; part < kParts; part++) {
    WideFloats even[N], odd[N];
    for (int r = 0; r < N; r++) even[r] = odd[r] = wide_zero();
    for (int64_t d = 0; d < size; d += 2) {
      WideFloats a, b;
      two_lines(page, d, part, a, b);
#pragma GCC unroll 8
      for (int r = 0; r < N; r++) {
        even[r] = wide_fma(wide_all(query[r][d]), a, even[r]);
        odd[r] = wide_fma(wide_all(query[r][d + 1]), b, odd[r]);
      }
    }
    for (int r = 0; r < N; r++)
      wide_store(out + r * kStretch + part * kWide, wide_mul(wide_add(even[r], odd[r]), wide_all(scale)));
  }
}

template <int N>
inline void score(const int8_t* page, int64_t size, const Planes* query, float scale, float* out) {
  for (int part = 0; part < kParts; part++) {
    Ints high[N], low[N];
    for (int r = 0; r < N; r++) {
      high[r] = begin_bytes(query[r].high_sum);
      low[r] = begin_bytes(query[r].low_sum);
    }
    for (int64_t d = 0; d < size; d += 4) {
      const Bytes keys = bytes(wide(reinterpret_cast<const uint8_t*>(page + d * kPage + part * 4 * kWide)));
#pragma GCC unroll 8
      for (int r = 0; r < N; r++) {
        high[r] = add_bytes(high[r], keys, four(query[r].high + d));
        low[r] = add_bytes(low[r], keys, four(query[r].low + d));
      }
    }
    const WideFloats steps = wide_load(steps_of(page, size) + part * kWide);
    for (int r = 0; r < N; r++)
      wide_store(out + r * kStretch + part * kWide,
                 wide_mul(wide_mul(floats(both(high[r], low[r])), steps), wide_all(query[r].step * scale)));
  }
}

// Positions of a stretch that a row reads.
struct Span { int first, last; };

// What a stretch's values are: the pages, and which of its positions are read at all.
template <class T>
struct Values {
  const T* head;          // of block 0
  const int64_t* blocks;  // of the stretch
  int64_t block_bytes, size;
  int from, to;           // whole pages

  const T* page(int position) const {
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(head) + blocks[position / kPage] * block_bytes);
  }
  void fetch_behind(int position) const {
    if (position + kPage < to) fetch(page(position + kPage), size);
  }
};

// Kinds of registers for floats.
struct WideLanes {
  using V = WideFloats;
  static constexpr int kCount = kWide;
  static V zero() { return wide_zero(); }
  static V all(float v) { return wide_all(v); }
  static V fma(V a, V b, V c) { return wide_fma(a, b, c); }
  static void line(const float* from, V (&of)[1]) { of[0] = wide_load(from); }
  static void line(const uint16_t* from, V (&of)[2]) {
    const Ints pairs = wide(reinterpret_cast<const uint8_t*>(from));
    of[0] = low_halves(pairs);
    of[1] = high_halves(pairs);
  }
  static void store(float* to, V v) { wide_store(to, v); }
};

struct EightLanes {
  using V = Floats;
  static constexpr int kCount = kLanes;
  static V zero() { return _mm256_setzero_ps(); }
  static V all(float v) { return drumline::all(v); }
  static V fma(V a, V b, V c) { return drumline::fma(a, b, c); }
  static void line(const float* from, V (&of)[1]) { of[0] = load(from); }
  static void line(const uint16_t* from, V (&of)[2]) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    of[0] = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    of[1] = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
  }
  static void store(float* to, V v) { drumline::store(to, v); }
};

// Weighted sums of C registers' dimensions from `d` on, for N rows.
template <class L, int N, int C, class T>
inline void weigh(const Values<T>& values, int64_t d, const float* weights, const Span* spans, float* out, int64_t stride,
                  bool fetching) {
  constexpr int kGroup = 4 / sizeof(T);  // tokens of a line
  typename L::V sums[N][C];
  for (auto& row : sums)
    for (auto& each : row) each = L::zero();
  for (int p = values.from; p < values.to; p += kPage) {
    const T* page = values.page(p) + d * kGroup;
    if (fetching) values.fetch_behind(p);
    bool whole = true;
    for (int r = 0; r < N; r++) whole &= spans[r].first <= p && spans[r].last >= p + kPage;
    if (whole) {
      for (int t = 0; t < kPage; t += kGroup) {
        typename L::V value[C][kGroup];
        for (int c = 0; c < C; c++) L::line(page + t * values.size + c * L::kCount * kGroup, value[c]);
#pragma GCC unroll 8
        for (int r = 0; r < N; r++)
          for (int i = 0; i < kGroup; i++) {
            const auto weight = L::all(weights[r * kStretch + p + t + i]);
            for (int c = 0; c < C; c++) sums[r][c] = L::fma(weight, value[c][i], sums[r][c]);
          }
      }
      continue;
    }
    // What a row does not read may be no number, so it has no part in it, not even none.
#pragma GCC unroll 8
    for (int r = 0; r < N; r++)
      for (int t = std::max(spans[r].first - p, 0); t < std::min(spans[r].last - p, kPage); t++) {
        const auto weight = L::all(weights[r * kStretch + p + t]);
        for (int c = 0; c < C; c++) {
          typename L::V value[kGroup];
          L::line(page + t / kGroup * kGroup * values.size + c * L::kCount * kGroup, value);
          sums[r][c] = L::fma(weight, t % kGroup ? value[kGroup - 1] : value[0], sums[r][c]);
        }
      }
  }
  for (int r = 0; r < N; r++)
    for (int c = 0; c < C; c++) L::store(out + r * stride + d + c * L::kCount, sums[r][c]);
}

#ifdef __AVX512BF16__
constexpr bool kPairs = true;

inline __m512bh pairs(__m512i v) { return (__m512bh)v; }
inline __m256bh pairs(__m256i v) { return (__m256bh)v; }
inline int32_t pair(const uint16_t* from) {
  int32_t both;
  std::memcpy(&both, from, 4);
  return both;
}

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

template <int N>
inline void score(const uint16_t* page, int64_t size, const uint16_t* const* query, float scale, float* out) {
  WideFloats even[N], odd[N];
  for (int r = 0; r < N; r++) even[r] = odd[r] = wide_zero();
  for (int64_t d = 0; d < size; d += 4) {
    const auto a = pairs(_mm512_loadu_si512(page + d * kPage)), b = pairs(_mm512_loadu_si512(page + (d + 2) * kPage));
#pragma GCC unroll 8
    for (int r = 0; r < N; r++) {
      even[r] = _mm512_dpbf16_ps(even[r], a, pairs(_mm512_set1_epi32(pair(query[r] + d))));
      odd[r] = _mm512_dpbf16_ps(odd[r], b, pairs(_mm512_set1_epi32(pair(query[r] + d + 2))));
    }
  }
  for (int r = 0; r < N; r++) wide_store(out + r * kStretch, wide_mul(wide_add(even[r], odd[r]), wide_all(scale)));
}

struct WidePairs {
  using V = __m512;
  using Line = __m512i;
  static constexpr int kCount = 16;
  static V zero() { return _mm512_setzero_ps(); }
  static Line all(int32_t v) { return _mm512_set1_epi32(v); }
  static Line load(const uint16_t* from) { return _mm512_loadu_si512(from); }
  static Line only(Line v, int32_t mask) { return _mm512_and_si512(v, all(mask)); }
  static V dot(V sums, Line a, Line b) { return _mm512_dpbf16_ps(sums, pairs(a), pairs(b)); }
  static void store(float* to, V v) { _mm512_storeu_ps(to, v); }
};

struct EightPairs {
  using V = __m256;
  using Line = __m256i;
  static constexpr int kCount = 8;
  static V zero() { return _mm256_setzero_ps(); }
  static Line all(int32_t v) { return _mm256_set1_epi32(v); }
  static Line load(const uint16_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
  static Line only(Line v, int32_t mask) { return _mm256_and_si256(v, all(mask)); }
  static V dot(V sums, Line a, Line b) { return _mm256_dpbf16_ps(sums, pairs(a), pairs(b)); }
  static void store(float* to, V v) { drumline::store(to, v); }
};

// The same of bfloat16, two tokens at once.
template <class L, int N, int C>
inline void weigh(const Values<uint16_t>& values, int64_t d, const uint16_t* weights, const Span* spans, float* out,
                  int64_t stride, bool fetching) {
  typename L::V sums[N][C];
  for (auto& row : sums)
    for (auto& each : row) each = L::zero();
  for (int p = values.from; p < values.to; p += kPage) {
    const uint16_t* page = values.page(p) + 2 * d;
    if (fetching) values.fetch_behind(p);
    bool whole = true;
    for (int r = 0; r < N; r++) whole &= spans[r].first <= p && spans[r].last >= p + kPage;
    if (whole) {
      for (int t = 0; t < kPage; t += 2) {
        typename L::Line line[C];
        for (int c = 0; c < C; c++) line[c] = L::load(page + t * values.size + 2 * c * L::kCount);
#pragma GCC unroll 8
        for (int r = 0; r < N; r++) {
          const auto weight = L::all(pair(weights + r * kStretch + p + t));
          for (int c = 0; c < C; c++) sums[r][c] = L::dot(sums[r][c], weight, line[c]);
        }
      }
      continue;
    }
    // What a row does not read may be no number, so it has no part in it, not even none.
#pragma GCC unroll 8
    for (int r = 0; r < N; r++) {
      const int first = std::max(spans[r].first - p, 0), last = std::min(spans[r].last - p, kPage);
      for (int t = first / 2 * 2; t < last; t += 2) {
        const int32_t mask = (t >= first ? 0xffff : 0) | (t + 1 < last ? static_cast<int32_t>(0xffff0000) : 0);
        const auto weight = L::all(pair(weights + r * kStretch + p + t));
        for (int c = 0; c < C; c++)
          sums[r][c] = L::dot(sums[r][c], weight, L::only(L::load(page + t * values.size + 2 * c * L::kCount), mask));
      }
    }
  }
  for (int r = 0; r < N; r++)
    for (int c = 0; c < C; c++) L::store(out + r * stride + d + c * L::kCount, sums[r][c]);
}
#else
constexpr bool kPairs = false;
#endif

// Whether the processor multiplies pairs of what a pool holds.
template <class T>
constexpr bool kInPairs = kPairs && sizeof(T) == 2;

// Weights of a stretch as integers of 14 bits, in two planes of bytes.
struct WeightPlanes {
  uint8_t high[kStretch], low[kStretch];
  float step;

  // Positions [from, to), whole pages, of `weights`, which are not negative, times the steps of
  // what they weigh. What weighs nothing is not read, and has no step.
  void set(float* weights, const float* steps, int from, int to) {
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
    // Times zero, a sum is zero, or no number where one of them was none.
    step = peak / kLevels + sum(total) * 0.f;
    const Floats by = all(peak > 0 ? kLevels / peak : 0.f);
    for (int t = from; t < to; t += kPage) {
      const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(load(weights + t), by));
      const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(load(weights + t + kLanes), by));
      const __m256i whole = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
      const __m256i planes = _mm256_permute4x64_epi64(
          _mm256_packus_epi16(_mm256_srli_epi16(whole, 7), _mm256_and_si256(whole, _mm256_set1_epi16(127))), 0xd8);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(high + t), _mm256_castsi256_si128(planes));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(low + t), _mm256_extracti128_si256(planes, 1));
    }
  }
};

// The same of integers. Sums are exact: 256 * 127 * kLevels fits.
template <int N, int C>
inline void weigh(const Values<int8_t>& values, int64_t d, const WeightPlanes* weights, float* out, int64_t stride,
                  bool fetching) {
  Ints high[N][C], low[N][C];
  for (int r = 0; r < N; r++)
    for (int c = 0; c < C; c++) high[r][c] = low[r][c] = none();
  for (int p = values.from; p < values.to; p += kPage) {
    const int8_t* page = values.page(p) + 4 * d;
    if (fetching) values.fetch_behind(p);
    for (int t = 0; t < kPage; t += 4) {
      const int8_t* line = page + t * values.size;
      Ints value[C];
      for (int c = 0; c < C; c++) value[c] = wide(reinterpret_cast<const uint8_t*>(line + 4 * c * kWide));
#pragma GCC unroll 8
      for (int r = 0; r < N; r++) {
        const Ints a = four(reinterpret_cast<const int8_t*>(weights[r].high + p + t));
        const Ints b = four(reinterpret_cast<const int8_t*>(weights[r].low + p + t));
        for (int c = 0; c < C; c++) {
          high[r][c] = add_products(high[r][c], a, value[c]);
          low[r][c] = add_products(low[r][c], b, value[c]);
        }
      }
    }
  }
  for (int r = 0; r < N; r++)
    for (int c = 0; c < C; c++)
      wide_store(out + r * stride + d + c * kWide, wide_mul(floats(both(high[r][c], low[r][c])), wide_all(weights[r].step)));
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
