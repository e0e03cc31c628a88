// Weights that are floats, as their checkpoint stores them: rows of inputs, one output after another.
//
// A product runs over inputs in sixteen lanes, lane i taking inputs i, i + 16 and so on, and lanes
// are folded in halves at its end; inputs beyond a fixed number begin another such sum. What an
// output of a row is made of, and in which order, depends on nothing but the row: the same bits
// come out whatever rows stand beside it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lanes.h"

namespace drumline {

using Bfloat = uint16_t;
struct Half { uint16_t bits; };

constexpr int kPanel = 8;            // outputs that are multiplied together
constexpr int64_t kRunBytes = 6144;  // of a row of weights that are summed at a time

#ifdef __AVX512F__
struct Lanes { __m512 v; };
constexpr int kFloatRows = 3;
constexpr int kFloatColumns = 8;
inline Lanes zeros() { return {_mm512_setzero_ps()}; }
inline Lanes lanes(const float* from) { return {_mm512_loadu_ps(from)}; }
inline Lanes lanes(const Bfloat* from) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}
inline Lanes lanes(const Half* from) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
}
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// With nothing in the other lanes.
inline Lanes eight(Floats v) { return {_mm512_zextps256_ps512(v)}; }
#else
struct Lanes { Floats low, high; };
constexpr int kFloatRows = 3;
constexpr int kFloatColumns = 2;
inline Lanes zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Lanes lanes(const float* from) { return {load(from), load(from + 8)}; }
inline Lanes lanes(const Bfloat* from) { return {bfloats(from), bfloats(from + 8)}; }
inline Lanes lanes(const Half* from) {
  const auto* raw = reinterpret_cast<const uint8_t*>(from);
  return {halves(raw), halves(raw + 16)};
}
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)}; }
inline Lanes eight(Floats v) { return {v, _mm256_setzero_ps()}; }
#endif

inline Floats first_eight(const float* from) { return load(from); }
inline Floats first_eight(const Bfloat* from) { return bfloats(from); }
inline Floats first_eight(const Half* from) { return halves(reinterpret_cast<const uint8_t*>(from)); }

// The sums of a panel's eight products, each folded in halves: 16, 8, 4, 2, 1 lanes.
#ifdef __AVX512F__
inline Floats folded(const Lanes (&v)[kPanel]) {
  __m512 a[4], b[2];
  for (int i = 0; i < 4; i++)
    a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[2 * i].v, v[2 * i + 1].v, 0x44),
                         _mm512_shuffle_f32x4(v[2 * i].v, v[2 * i + 1].v, 0xee));
  for (int i = 0; i < 2; i++)
    b[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0xdd));
  const __m512 c = _mm512_add_ps(_mm512_shuffle_ps(b[0], b[1], 0x44), _mm512_shuffle_ps(b[0], b[1], 0xee));
  const __m512 d = _mm512_add_ps(c, _mm512_shuffle_ps(c, c, 0xb1));
  // A quarter q holds outputs q and q + 4, each twice.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
  return _mm512_castps512_ps256(_mm512_permutexvar_ps(order, d));
}
#else
inline Floats folded(const Lanes (&v)[kPanel]) {
  Floats a[4], b[2];
  for (int i = 0; i < 4; i++) {
    const Floats x = _mm256_add_ps(v[2 * i].low, v[2 * i].high), y = _mm256_add_ps(v[2 * i + 1].low, v[2 * i + 1].high);
    a[i] = _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
  }
  for (int i = 0; i < 2; i++)
    b[i] = _mm256_add_ps(_mm256_shuffle_ps(a[2 * i], a[2 * i + 1], 0x44), _mm256_shuffle_ps(a[2 * i], a[2 * i + 1], 0xee));
  const Floats c = _mm256_add_ps(_mm256_shuffle_ps(b[0], b[1], 0x88), _mm256_shuffle_ps(b[0], b[1], 0xdd));
  // Halves hold outputs 0, 2, 4, 6 and 1, 3, 5, 7.
  return _mm256_permutevar8x32_ps(c, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
#endif

// How weights meet inputs: widened to float32, in which inputs are.
template <class T>
struct Widened {
  using Weight = T;
  using Input = float;
  using Some = Lanes;
  static constexpr int kStep = 16;
  static Some weights(const T* from) { return lanes(from); }
  static Some inputs(const float* from) { return lanes(from); }
  // The last ones, of which there are eight.
  static Some weights(const T* from, int64_t) { return eight(first_eight(from)); }
  static Some inputs(const float* from, int64_t) { return eight(load(from)); }
  static Lanes add(Some a, Some b, Lanes to) { return fma(a, b, to); }
};

#ifdef __AVX512BF16__
// In pairs of bfloat16, which inputs are rounded to; a lane takes two neighbours.
struct Paired {
  using Weight = Bfloat;
  using Input = Bfloat;
  using Some = __m512bh;
  static constexpr int kStep = 32;
  static Some weights(const Bfloat* from) { return (__m512bh)_mm512_loadu_si512(from); }
  static Some weights(const Bfloat* from, int64_t count) {
    return (__m512bh)_mm512_maskz_loadu_epi16((1u << count) - 1, from);
  }
  static Some inputs(const Bfloat* from) { return weights(from); }
  static Some inputs(const Bfloat* from, int64_t count) { return weights(from, count); }
  static Lanes add(Some a, Some b, Lanes to) { return {_mm512_dpbf16_ps(to.v, a, b)}; }
};
#endif

// R rows of inputs times a panel of outputs, whose weights begin at `weights`; `ahead` bytes
// further on lies what is needed next.
template <int R, class Way, bool fetch>
inline void panel(const typename Way::Input* x, const typename Way::Weight* const (&weights)[kPanel], int64_t columns,
                  int64_t size, int64_t ahead, int count, float* out, int64_t stride, bool add) {
  constexpr int C = kFloatColumns;
  Lanes made[R][kPanel];
  for (int first = 0; first < kPanel; first += C) {
    Lanes sums[R][C];
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) sums[r][c] = zeros();
    int64_t k = 0;
    for (; k + Way::kStep <= size; k += Way::kStep) {
      typename Way::Some inputs[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) inputs[r] = Way::inputs(x + r * columns + k);
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) {
        const auto* from = weights[first + c] + k;
        if (fetch) _mm_prefetch(reinterpret_cast<const char*>(from) + ahead, _MM_HINT_T0);
        const auto some = Way::weights(from);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) sums[r][c] = Way::add(some, inputs[r], sums[r][c]);
      }
    }
    if (k < size)
      for (int c = 0; c < C; c++) {
        const auto some = Way::weights(weights[first + c] + k, size - k);
        for (int r = 0; r < R; r++) sums[r][c] = Way::add(some, Way::inputs(x + r * columns + k, size - k), sums[r][c]);
      }
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) made[r][first + c] = sums[r][c];
  }
  for (int r = 0; r < R; r++) {
    Floats v = folded(made[r]);
    float* to = out + r * stride;
    if (count == kPanel) {
      store(to, add ? _mm256_add_ps(load(to), v) : v);
    } else {
      alignas(32) float each[kPanel];
      store(each, v);
      for (int c = 0; c < count; c++) to[c] = add ? to[c] + each[c] : each[c];
    }
  }
}

// Rows times `outputs` outputs whose weights begin at `weights`, `columns` inputs each.
template <class Way>
inline void multiply_floats(const typename Way::Input* x, int64_t rows, const typename Way::Weight* weights,
                            int64_t columns, int64_t outputs, float* out, int64_t stride, bool add) {
  constexpr int64_t kRun = kRunBytes / sizeof(typename Way::Weight);
  const int64_t strips = (rows + kFloatRows - 1) / kFloatRows;
  for (int64_t o = 0; o < outputs; o += kPanel) {
    const int count = static_cast<int>(std::min<int64_t>(kPanel, outputs - o));
    const typename Way::Weight* from[kPanel];
    for (int64_t k = 0; k < columns; k += kRun) {
      // A panel cut short reads its last output again, for nothing.
      for (int c = 0; c < kPanel; c++) from[c] = weights + (o + std::min(c, count - 1)) * columns + k;
      const int64_t size = std::min(kRun, columns - k), ahead = kPanel * columns * sizeof(typename Way::Weight);
      const bool more = add || k;
      for (int64_t s = 0; s < strips; s++) {
        const int64_t a = rows * s / strips, b = rows * (s + 1) / strips;
        const auto* inputs = x + a * columns + k;
        float* to = out + a * stride + o;
        // What comes next is fetched once.
        switch (2 * (b - a) + (s == 0)) {
          case 2: panel<1, Way, false>(inputs, from, columns, size, ahead, count, to, stride, more); break;
          case 3: panel<1, Way, true>(inputs, from, columns, size, ahead, count, to, stride, more); break;
          case 4: panel<2, Way, false>(inputs, from, columns, size, ahead, count, to, stride, more); break;
          case 5: panel<2, Way, true>(inputs, from, columns, size, ahead, count, to, stride, more); break;
          case 6: panel<3, Way, false>(inputs, from, columns, size, ahead, count, to, stride, more); break;
          default: panel<3, Way, true>(inputs, from, columns, size, ahead, count, to, stride, more); break;
        }
      }
    }
  }
}

}  // namespace drumline
