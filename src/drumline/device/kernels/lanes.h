// Eight floats at a time, and the integer products that processors differ in.
//
// Everything in floats is done in eight lanes on every processor, so that a wider one gets the
// same bits. Only dot products of small integers, which are exact, use what is widest.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>

namespace drumline {

using Floats = __m256;
constexpr int kLanes = 8;

inline Floats load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(float* to, Floats v) { _mm256_storeu_ps(to, v); }
inline Floats all(float v) { return _mm256_set1_ps(v); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }

// Half-precision scales of weights, as they stand in the file.
inline Floats halves(const uint8_t* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

inline Floats bfloats(const uint16_t* from) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}

inline uint16_t bfloat(float v) {
  uint32_t bits;
  __builtin_memcpy(&bits, &v, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 64);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // to nearest, ties to even
}

inline void store(uint16_t* to, Floats v) {
#ifdef __AVX512BF16__
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), (__m128i)_mm256_cvtneps_pbh(v));
#else
  alignas(32) float each[kLanes];
  store(each, v);
  for (int i = 0; i < kLanes; i++) to[i] = bfloat(each[i]);
#endif
}

inline float sum(Floats v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

inline float largest(Floats v) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

// The sums of eight vectors, as one.
inline Floats sums(const Floats (&v)[8]) {
  const Floats a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  const Floats b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

// e to the x: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]. Not a number stays none.
inline Floats exponential(Floats x) {
  // The operand that may be no number stands second: it is what min and max return then.
  x = _mm256_min_ps(all(88.f), _mm256_max_ps(all(-87.f), x));
  const Floats n =
      _mm256_round_ps(_mm256_mul_ps(x, all(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Floats r = _mm256_fnmadd_ps(n, all(-2.12194440e-4f), _mm256_fnmadd_ps(n, all(0.693359375f), x));
  Floats p = all(1.9875691500e-4f);
  p = fma(p, r, all(1.3981999507e-3f));
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  p = fma(p, _mm256_mul_ps(r, r), _mm256_add_ps(r, all(1.f)));
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(p, _mm256_castsi256_ps(power));
}

// e to the x where x is at most 0; what is below -86 comes to what that does. As above, with the
// power added to the exponent of the polynomial, which is between 0.7 and 1.42.
inline Floats falling(Floats x) {
  const Floats shift = all(12582912.f);  // 1.5 * 2^23: a sum's last bits are the nearest integer
  x = _mm256_max_ps(all(-86.f), x);
  const Floats t = fma(x, all(1.44269504f), shift);
  const Floats r = _mm256_fnmadd_ps(_mm256_sub_ps(t, shift), all(0.69314718f), x);
  Floats p = all(1.3981999507e-3f);
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  p = fma(p, r, all(1.f));
  p = fma(p, r, all(1.f));
  const __m256i power = _mm256_slli_epi32(_mm256_castps_si256(t), 23);
  // Not a number stays none, whatever its bits become.
  return _mm256_or_ps(_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), power)),
                      _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

inline Floats silu(Floats x) {
  return _mm256_div_ps(x, _mm256_add_ps(all(1.f), exponential(_mm256_sub_ps(_mm256_setzero_ps(), x))));
}

// Four bytes as one value, wherever they lie.
inline int32_t word(const void* from) {
  int32_t made;
  __builtin_memcpy(&made, from, 4);
  return made;
}

// Products of weights with activations: a lane of 32 bits holds four inputs of one output.
#ifdef __AVX512VNNI__
constexpr int kWide = 16;
using Ints = __m512i;
using WideFloats = __m512;
inline Ints wide(const uint8_t* from) { return _mm512_loadu_si512(from); }
inline Ints none() { return _mm512_setzero_si512(); }
inline Ints low_nibbles(Ints w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
inline Ints high_nibbles(Ints w) { return low_nibbles(_mm512_srli_epi16(w, 4)); }
inline Ints four(const int8_t* x) { return _mm512_set1_epi32(word(x)); }
// Nibbles times signed bytes: a block's sums.
inline Ints add_nibbles(Ints sums, Ints w, Ints x) { return _mm512_dpbusd_epi32(sums, w, x); }
inline Ints of_nibbles(Ints sums) { return sums; }
// Signed bytes times signed bytes: the instruction takes unsigned ones, so weights are raised by
// 128, and `begin_bytes` takes it off again.
struct Bytes { Ints raised; };
inline Bytes bytes(Ints w) { return {_mm512_xor_si512(w, _mm512_set1_epi8(-128))}; }
inline Ints begin_bytes(int32_t activations) { return _mm512_set1_epi32(-128 * activations); }
inline Ints add_bytes(Ints sums, const Bytes& w, Ints x) { return _mm512_dpbusd_epi32(sums, w.raised, x); }
inline WideFloats floats(Ints v) { return _mm512_cvtepi32_ps(v); }
inline WideFloats wide_all(float v) { return _mm512_set1_ps(v); }
inline WideFloats wide_fma(WideFloats a, WideFloats b, WideFloats c) { return _mm512_fmadd_ps(a, b, c); }
inline WideFloats wide_mul(WideFloats a, WideFloats b) { return _mm512_mul_ps(a, b); }
inline WideFloats wide_halves(const uint8_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline WideFloats wide_load(const float* from) { return _mm512_loadu_ps(from); }
inline WideFloats wide_add(WideFloats a, WideFloats b) { return _mm512_add_ps(a, b); }
inline void wide_store(float* to, WideFloats v) { _mm512_storeu_ps(to, v); }
#else
constexpr int kWide = 8;
using Ints = __m256i;
using WideFloats = Floats;
inline Ints wide(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline Ints none() { return _mm256_setzero_si256(); }
inline Ints low_nibbles(Ints w) { return _mm256_and_si256(w, _mm256_set1_epi8(15)); }
inline Ints high_nibbles(Ints w) { return low_nibbles(_mm256_srli_epi16(w, 4)); }
inline Ints four(const int8_t* x) { return _mm256_set1_epi32(word(x)); }
// Pairs are summed in 16 bits: a block's eight come to at most 8 * 2 * 15 * 127, which fits.
inline Ints add_nibbles(Ints sums, Ints w, Ints x) {
  sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(w, x));
  // Sums stay in the order they are written in: compilers know that it is of no matter, and keep
  // a block's products in memory to add them in another.
  asm("" : "+x"(sums));
  return sums;
}
inline Ints of_nibbles(Ints sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
// The instruction takes unsigned bytes first: the weight's sign goes to the activation. One pair
// comes to at most 2 * 128 * 127, which fits.
struct Bytes { Ints sign, size; };
inline Bytes bytes(Ints w) { return {w, _mm256_abs_epi8(w)}; }
inline Ints begin_bytes(int32_t) { return none(); }
inline Ints add_bytes(Ints sums, const Bytes& w, Ints x) {
  const Ints pairs = _mm256_maddubs_epi16(w.size, _mm256_sign_epi8(x, w.sign));
  sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  asm("" : "+x"(sums));
  return sums;
}
inline WideFloats floats(Ints v) { return _mm256_cvtepi32_ps(v); }
inline WideFloats wide_all(float v) { return all(v); }
inline WideFloats wide_fma(WideFloats a, WideFloats b, WideFloats c) { return fma(a, b, c); }
inline WideFloats wide_mul(WideFloats a, WideFloats b) { return _mm256_mul_ps(a, b); }
inline WideFloats wide_halves(const uint8_t* from) { return halves(from); }
inline WideFloats wide_load(const float* from) { return load(from); }
inline WideFloats wide_add(WideFloats a, WideFloats b) { return _mm256_add_ps(a, b); }
inline void wide_store(float* to, WideFloats v) { store(to, v); }
#endif

}  // namespace drumline
