// Weights of 4 and 8 bits times activations of 8 bits, in blocks of 32 inputs.
//
// A group is 32 outputs: for each block of inputs first the integers, four inputs of an output
// side by side and the 32 outputs in turn, then the outputs' scales, then their minima if they have any.
// Of 4 bits, a byte's low nibble is input i, its high one input i + 16, as GGUF pairs them.
//
// What an output of a row is made of, and in which order, depends on nothing but the row: the
// same bits come out whatever rows stand beside it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "matrix.h"

namespace drumline {

// Rows of activations, quantized: value = scale * integer.
struct Activations {
  int8_t* values;    // [rows, columns]
  float* scales;     // [rows, columns / 32]
  float* weighted;   // scale times the sum of the integers
  int32_t* totals;   // the sum of the integers
  int64_t columns;

  static int64_t bytes(int64_t rows, int64_t columns) {
    return rows * columns + 3 * 4 * rows * (columns / kBlock) + 4 * 64;
  }
  static Activations in(uint8_t* memory, int64_t rows, int64_t columns) {
    auto after = [](void* p, int64_t n) {
      return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(p) + n + 63) & ~uintptr_t{63});
    };
    const int64_t blocks = rows * (columns / kBlock);
    Activations a;
    a.columns = columns;
    a.values = reinterpret_cast<int8_t*>(after(memory, 0));
    a.scales = reinterpret_cast<float*>(after(a.values, rows * columns));
    a.weighted = reinterpret_cast<float*>(after(a.scales, 4 * blocks));
    a.totals = reinterpret_cast<int32_t*>(after(a.weighted, 4 * blocks));
    return a;
  }

  // Quantize 32 values as block `block` of `row`.
  void set(int64_t row, int64_t block, Floats a, Floats b, Floats c, Floats d) const {
    const auto size = [](Floats v) {
      return _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fffffff));
    };
    // Compared as integers, what is not finite is larger than any number, and is kept by the scale.
    const __m256i most = _mm256_max_epi32(_mm256_max_epi32(size(a), size(b)), _mm256_max_epi32(size(c), size(d)));
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
    const float peak = _mm_cvtss_f32(_mm_castsi128_ps(m));
    const Floats to = all(peak > 0 ? 127.f / peak : 0.f);
    const auto whole = [to](Floats v) { return _mm256_cvtps_epi32(_mm256_mul_ps(v, to)); };
    const __m256i wa = whole(a), wb = whole(b), wc = whole(c), wd = whole(d);
    const __m256i packed =
        _mm256_packs_epi16(_mm256_packs_epi32(wa, wb), _mm256_packs_epi32(wc, wd));
    // Packing works within halves of a register; put the quarters in order again.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(values + row * columns + block * kBlock),
                        _mm256_permutevar8x32_epi32(packed, order));
    const __m256i all_sums = _mm256_add_epi32(_mm256_add_epi32(wa, wb), _mm256_add_epi32(wc, wd));
    __m128i t = _mm_add_epi32(_mm256_castsi256_si128(all_sums), _mm256_extracti128_si256(all_sums, 1));
    t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0x4e));
    t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0xb1));
    const int32_t total = _mm_cvtsi128_si32(t);
    const int64_t at = row * (columns / kBlock) + block;
    scales[at] = peak / 127.f;
    weighted[at] = peak / 127.f * static_cast<float>(total);
    totals[at] = total;
  }

  void set(int64_t row, const float* x) const {
    for (int64_t k = 0; k < columns; k += kBlock)
      set(row, k / kBlock, load(x + k), load(x + k + 8), load(x + k + 16), load(x + k + 24));
  }
};

// Lines to fetch with each block of a tile.
struct Lines {
  const uint8_t* from;
  int64_t each;  // bytes

  void fetch(int64_t block) const {
    for (int64_t i = 0; i < each; i += 64)
      _mm_prefetch(reinterpret_cast<const char*>(from + block * each + i), _MM_HINT_T1);
  }
};

// What is multiplied next and fetched while a group is, a little with each block: asked for at once,
// more lines than a core awaits at a time would hold up what is computed.
class Ahead {
 public:
  // `bytes` from `from` on, during `tiles` tiles of `blocks` blocks; nothing where `from` is null.
  Ahead(const uint8_t* from, int64_t bytes, int64_t blocks, int64_t tiles)
      : next_(from),
        end_(from ? from + bytes : from),
        each_((bytes / 64 + blocks * tiles - 1) / (blocks * tiles) * 64) {}

  Lines share(int64_t blocks) {
    const Lines share{next_, next_ < end_ ? each_ : 0};
    next_ += blocks * share.each;
    return share;
  }

 private:
  const uint8_t *next_, *end_;
  int64_t each_;
};

// R rows times C vectors of a group's outputs, from vector `column` on; written to `out`, whose
// rows lie `stride` apart, or added to what stands there.
template <int R, int C, int kind>
inline void tile(const Activations& x, int64_t row, const uint8_t* group, int column, Ahead& ahead, float* out,
                 int64_t stride, bool add) {
  const int64_t blocks = x.columns / kBlock;
  const int8_t* values = x.values + row * x.columns;
  const float* scales = x.scales + row * blocks;
  const float* weighted = x.weighted + row * blocks;
  const int32_t* totals = x.totals + row * blocks;
  const Lines lines = ahead.share(blocks);
  constexpr int kQuads = kGroup * 4;  // bytes of four inputs, or of four pairs of them
  WideFloats made[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) made[r][c] = wide_all(0.f);
  for (int64_t b = 0; b < blocks; b++) {
    lines.fetch(b);
    const uint8_t* w = group + b * block_bytes(kind) + column * kWide * 4;
    const int8_t* v = values + b * kBlock;
    Ints sums[R][C];
    if constexpr (kind == kNibbles) {
      for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) sums[r][c] = none();
#pragma GCC unroll 4
      for (int q = 0; q < 4; q++) {
        Ints low[C], high[C];
        for (int c = 0; c < C; c++) {
          const Ints pairs = wide(w + q * kQuads + c * kWide * 4);
          low[c] = low_nibbles(pairs);
          high[c] = high_nibbles(pairs);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          const Ints first = four(v + r * x.columns + 4 * q);
          for (int c = 0; c < C; c++) sums[r][c] = add_nibbles(sums[r][c], low[c], first);
          const Ints second = four(v + r * x.columns + 16 + 4 * q);
          for (int c = 0; c < C; c++) sums[r][c] = add_nibbles(sums[r][c], high[c], second);
        }
      }
    } else {
      for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) sums[r][c] = begin_bytes(totals[r * blocks + b]);
#pragma GCC unroll 8
      for (int q = 0; q < 8; q++) {
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
          const Bytes weights = bytes(wide(w + q * kQuads + c * kWide * 4));
#pragma GCC unroll 8
          for (int r = 0; r < R; r++)
            sums[r][c] = add_bytes(sums[r][c], weights, four(v + r * x.columns + 4 * q));
        }
      }
    }
    const uint8_t* of = group + b * block_bytes(kind) + quads(kind) * kQuads + column * kWide * 2;
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      const WideFloats scale = wide_halves(of + c * kWide * 2);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const WideFloats both = wide_mul(scale, wide_all(scales[r * blocks + b]));
        if constexpr (kind == kNibbles)
          made[r][c] = wide_fma(floats(of_nibbles(sums[r][c])), both, made[r][c]);
        else
          made[r][c] = wide_fma(floats(sums[r][c]), both, made[r][c]);
        if constexpr (from_least(kind)) {
          const WideFloats least = wide_halves(of + kGroup * 2 + c * kWide * 2);
          made[r][c] = wide_fma(least, wide_all(weighted[r * blocks + b]), made[r][c]);
        }
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) {
      float* to = out + r * stride + (column + c) * kWide;
      wide_store(to, add ? wide_add(wide_load(to), made[r][c]) : made[r][c]);
    }
}

#ifdef __AVX512VNNI__
constexpr int kTileRows = 6;
template <int R>
constexpr int kTileColumns = 2;
#else
constexpr int kTileRows = 4;
template <int R>
constexpr int kTileColumns = R == 1 ? 4 : 2;
#endif

template <int R, int kind>
inline void strip(const Activations& x, int64_t row, const uint8_t* group, Ahead& ahead, float* out, int64_t stride,
                  bool add) {
  for (int c = 0; c < kGroup / kWide; c += kTileColumns<R>)
    tile<R, kTileColumns<R>, kind>(x, row, group, c, ahead, out, stride, add);
}

template <int kind>
inline void rows_of(const Activations& x, int64_t first, int64_t last, const uint8_t* group, const uint8_t* next,
                    float* out, int64_t stride, bool add) {
  const int64_t count = last - first, strips = (count + kTileRows - 1) / kTileRows;
  const int64_t blocks = x.columns / kBlock, tiles = kGroup / kWide / (count == 1 ? kTileColumns<1> : kTileColumns<2>);
  Ahead ahead(next, blocks * block_bytes(kind), blocks, tiles * strips);
  for (int64_t s = 0; s < strips; s++) {
    const int64_t a = first + count * s / strips, b = first + count * (s + 1) / strips;
    float* to = out + (a - first) * stride;
    switch (b - a) {
      case 1: strip<1, kind>(x, a, group, ahead, to, stride, add); break;
      case 2: strip<2, kind>(x, a, group, ahead, to, stride, add); break;
      case 3: strip<3, kind>(x, a, group, ahead, to, stride, add); break;
      case 4: strip<4, kind>(x, a, group, ahead, to, stride, add); break;
#ifdef __AVX512VNNI__
      case 5: strip<5, kind>(x, a, group, ahead, to, stride, add); break;
      default: strip<6, kind>(x, a, group, ahead, to, stride, add); break;
#else
      default: __builtin_unreachable();
#endif
    }
  }
}

// Rows [first, last) times group `g`; `out` is where the first row's first output of it goes. All
// outputs of a group are written, also those that are none. `then` is the group that is multiplied
// next, or none if there is no such.
inline void multiply_blocks(const Matrix& w, int64_t g, int64_t then, const Activations& x, int64_t first, int64_t last,
                            float* out, int64_t stride, bool add) {
  const uint8_t* next = then < w.groups() ? w.group(then) : nullptr;
  switch (w.kind) {
    case kNibbles: return rows_of<kNibbles>(x, first, last, w.group(g), next, out, stride, add);
    case kBytes: return rows_of<kBytes>(x, first, last, w.group(g), next, out, stride, add);
    default: return rows_of<kOffsetBytes>(x, first, last, w.group(g), next, out, stride, add);
  }
}

// Write output `row` of the matrix, in floats.
inline void dequantize(const Matrix& w, int64_t row, float* out) {
  const int64_t lane = w.lane_of(row);
  const uint8_t* group = w.group(w.group_of(row));
  for (int64_t b = 0; b < w.columns / kBlock; b++) {
    const uint8_t* block = group + b * block_bytes(w.kind);
    const uint8_t* of = block + quads(w.kind) * kGroup * 4 + lane * 2;
    uint16_t raw;
    std::memcpy(&raw, of, 2);
    const float scale = _cvtsh_ss(raw);
    float least = 0.f;
    if (from_least(w.kind)) {
      std::memcpy(&raw, of + kGroup * 2, 2);
      least = _cvtsh_ss(raw);
    }
    float* to = out + b * kBlock;
    if (w.kind == kNibbles) {
      for (int i = 0; i < 16; i++) {
        const uint8_t pair = block[i / 4 * kGroup * 4 + lane * 4 + i % 4];
        to[i] = static_cast<float>(pair & 15) * scale + least;
        to[i + 16] = static_cast<float>(pair >> 4) * scale + least;
      }
    } else {
      for (int i = 0; i < 32; i++)
        to[i] = static_cast<float>(static_cast<int8_t>(block[i / 4 * kGroup * 4 + lane * 4 + i % 4])) * scale + least;
    }
  }
}

}  // namespace drumline
