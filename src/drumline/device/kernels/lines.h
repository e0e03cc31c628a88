// Sums of products over lines of sixteen columns, for several rows at once.
//
// A column is a token of a page of keys, or a dimension of values. A row's sum of a column takes
// the column's values one after another, each times the row's factor for it: nothing crosses
// columns, and the order is one however many rows and columns stand side by side, so that wider
// registers and other company come to the same bits.
//
// Lines are those of a page, or wider ones of a panel: what several rows read is spread out for
// them once. Only where the processor multiplies pairs of bfloat16 are factors rounded to them, if
// the pool holds such.
#pragma once

#include <cstring>

#include "pages.h"

namespace drumline {

constexpr int kParts = kPage / kWide;  // registers for a value of each column

#ifdef __AVX512VNNI__
inline WideFloats wide_zero() { return _mm512_setzero_ps(); }
inline WideFloats low_halves(Ints v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); }
inline WideFloats high_halves(Ints v) {
  return _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}
inline Ints low_bytes(Ints v) { return _mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8); }
inline Ints high_bytes(Ints v) { return _mm512_srai_epi16(v, 8); }
// Pairs of integers of 16 bits.
inline Ints add_products(Ints sums, Ints a, Ints b) { return _mm512_dpwssd_epi32(sums, a, b); }
inline void wide_store(int16_t* to, Ints v) { _mm512_storeu_si512(to, v); }
constexpr int blocks_at_once(int) { return 4; }
#else
inline WideFloats wide_zero() { return _mm256_setzero_ps(); }
inline WideFloats low_halves(Ints v) { return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)); }
inline WideFloats high_halves(Ints v) {
  return _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}
inline Ints low_bytes(Ints v) { return _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8); }
inline Ints high_bytes(Ints v) { return _mm256_srai_epi16(v, 8); }
inline Ints add_products(Ints sums, Ints a, Ints b) {
  sums = _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
  asm("" : "+x"(sums));  // as in add_nibbles
  return sums;
}
inline void wide_store(int16_t* to, Ints v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), v); }
constexpr int blocks_at_once(int rows) { return rows <= 3 ? 2 : 1; }
#endif

// Kinds of lines. A line has kDeep values of each column, multiplied in kTurns.
struct FloatLines {
  using Value = float;
  using Factor = float;
  using Sum = WideFloats;
  using Some = WideFloats;
  static constexpr int kDeep = 1, kTurns = 1;
  static Sum nothing() { return wide_zero(); }
  static Some factor(const Factor* at) { return wide_all(*at); }
  static Some values(const Value* line, int) { return wide_load(line); }
  static Sum add(Sum sums, Some factor, Some values) { return wide_fma(factor, values, sums); }
};

struct BfloatLines : FloatLines {
  using Value = uint16_t;
  static constexpr int kDeep = 2, kTurns = 2;
  static Some values(const Value* line, int turn) {
    const Ints both = wide(reinterpret_cast<const uint8_t*>(line));
    return turn ? high_halves(both) : low_halves(both);
  }
};

// Factors of integers stand in fours, of which the second and the third are exchanged: those of
// even places are one turn's, as a register's even bytes are its values.
struct ShortLines {
  using Value = int16_t;
  using Factor = int16_t;
  using Sum = Ints;
  using Some = Ints;
  static constexpr int kDeep = 2, kTurns = 1;
  static Sum nothing() { return none(); }
  static Some factor(const Factor* at) { return four(reinterpret_cast<const int8_t*>(at)); }
  static Some values(const Value* line, int) { return wide(reinterpret_cast<const uint8_t*>(line)); }
  static Sum add(Sum sums, Some factor, Some values) { return add_products(sums, factor, values); }
};

struct ByteLines : ShortLines {
  using Value = int8_t;
  static constexpr int kDeep = 4, kTurns = 2;
  static Some values(const Value* line, int turn) {
    const Ints all = wide(reinterpret_cast<const uint8_t*>(line));
    return turn ? high_bytes(all) : low_bytes(all);
  }
};

#ifdef __AVX512BF16__
struct PairLines {
  using Value = uint16_t;
  using Factor = uint16_t;
  using Sum = __m512;
  using Some = __m512i;
  static constexpr int kDeep = 2, kTurns = 1;
  static Sum nothing() { return _mm512_setzero_ps(); }
  static Some factor(const Factor* at) { return four(reinterpret_cast<const int8_t*>(at)); }
  static Some values(const Value* line, int) { return _mm512_loadu_si512(line); }
  static Sum add(Sum sums, Some factor, Some values) {
    return _mm512_dpbf16_ps(sums, (__m512bh)factor, (__m512bh)values);
  }
};
#endif

// How what a pool holds is read: in its pages' lines by few rows, spread out in a panel's by many.
template <class T>
struct LinesOf;
template <>
struct LinesOf<float> {
  using Page = FloatLines;
  using Panel = FloatLines;
};
template <>
struct LinesOf<uint16_t> {
#ifdef __AVX512BF16__
  using Page = PairLines;
  using Panel = PairLines;
#else
  using Page = BfloatLines;
  using Panel = FloatLines;
#endif
};
template <>
struct LinesOf<int8_t> {
  using Page = ByteLines;
  using Panel = ShortLines;
};

template <class T>
constexpr int kSpread = LinesOf<T>::Page::kDeep / LinesOf<T>::Panel::kDeep;  // a panel's lines for one of a page

// Spread a line of a page, sixteen columns.
template <class T>
inline void spread(const T* line, typename LinesOf<T>::Panel::Value* to) {
  if constexpr (kSpread<T> == 1) {
    std::memcpy(to, line, kLine);
  } else {
    constexpr int kHigh = kLine / sizeof(*to);
    for (int part = 0; part < kParts; part++) {
      const auto* from = line + part * kWide * LinesOf<T>::Page::kDeep;
      wide_store(to + part * kHigh / kParts, LinesOf<T>::Page::values(from, 0));
      wide_store(to + part * kHigh / kParts + kHigh, LinesOf<T>::Page::values(from, 1));
    }
  }
}

// Add products of `count` values of each column to N rows' sums, of B blocks of sixteen columns.
template <class Lines, int N, int B>
[[gnu::always_inline]] inline void add_lines(typename Lines::Sum (&sums)[N][B * kParts],
                                             const typename Lines::Factor* factors, int64_t stride,
                                             const typename Lines::Value* const (&from)[B], int64_t pitch, int64_t count) {
  constexpr int R = B * kParts, kEach = Lines::kDeep / Lines::kTurns;
  int64_t line = 0;
  for (int64_t k = 0; k < count; k += Lines::kDeep, line += pitch) {
#pragma GCC unroll 2
    for (int turn = 0; turn < Lines::kTurns; turn++) {
      const auto values = [&](int j) {
        return Lines::values(from[j / kParts] + line + j % kParts * kWide * Lines::kDeep, turn);
      };
      const auto factor = [&](int r) { return Lines::factor(factors + r * stride + k + turn * kEach); };
      // What there is less of stays in registers.
      if constexpr (N < R) {
        typename Lines::Some each[N];
#pragma GCC unroll 8
        for (int r = 0; r < N; r++) each[r] = factor(r);
#pragma GCC unroll 8
        for (int j = 0; j < R; j++) {
          const auto some = values(j);
#pragma GCC unroll 8
          for (int r = 0; r < N; r++) sums[r][j] = Lines::add(sums[r][j], each[r], some);
        }
      } else {
        typename Lines::Some some[R];
#pragma GCC unroll 8
        for (int j = 0; j < R; j++) some[j] = values(j);
#pragma GCC unroll 8
        for (int r = 0; r < N; r++) {
          const auto each = factor(r);
#pragma GCC unroll 8
          for (int j = 0; j < R; j++) sums[r][j] = Lines::add(sums[r][j], each, some[j]);
        }
      }
    }
  }
}

// Sums of N rows over B blocks' columns: `lines(add)` calls `add(factors, stride, from, pitch,
// count)` for each run of lines, and `out(row, column, sums)` takes a register of what they came to.
template <class Lines, int N, int B, class Runs, class Out>
[[gnu::always_inline]] inline void sum_lines(Runs&& lines, Out&& out) {
  typename Lines::Sum sums[N][B * kParts];
#pragma GCC unroll 8
  for (int r = 0; r < N; r++)
#pragma GCC unroll 8
    for (int j = 0; j < B * kParts; j++) sums[r][j] = Lines::nothing();
  lines([&](const typename Lines::Factor* factors, int64_t stride, const typename Lines::Value* const (&from)[B],
            int64_t pitch, int64_t count) __attribute__((always_inline)) {
    add_lines<Lines, N, B>(sums, factors, stride, from, pitch, count);
  });
#pragma GCC unroll 8
  for (int r = 0; r < N; r++)
#pragma GCC unroll 8
    for (int j = 0; j < B * kParts; j++) out(r, j * kWide, sums[r][j]);
}

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

// Run `work<B>(first)` for blocks [0, count), some at a time where few rows leave registers.
template <int N, class Do>
inline void by_blocks(int64_t count, Do&& work) {
  constexpr int B = blocks_at_once(N);
  int64_t done = 0;
  for (; done + B <= count; done += B) work.template operator()<B>(done);
  if constexpr (B > 1)
    for (; done < count; done++) work.template operator()<1>(done);
}

}  // namespace drumline
