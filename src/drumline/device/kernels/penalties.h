// Penalizing a row of logits for the tokens of a prompt and its answer, in one pass.
#pragma once

#include <cstdint>

#include "lanes.h"

namespace drumline {

// Penalize a row for what its request has read and said; see Histories.
inline void penalize_row(float* x, int64_t size, const uint8_t* read, const int32_t* said, float repetition,
                         float frequency, float presence) {
  const __m256i nothing = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const __m256i counts = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(said + i));
    const __m256i known =
        _mm256_or_si256(counts, _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(read + i))));
    if (_mm256_testz_si256(known, known)) continue;
    const Floats v = load(x + i), absent = _mm256_castsi256_ps(_mm256_cmpeq_epi32(known, nothing)),
                 unsaid = _mm256_castsi256_ps(_mm256_cmpeq_epi32(counts, nothing)),
                 below = _mm256_cmp_ps(v, _mm256_setzero_ps(), _CMP_NGT_UQ);
    const Floats repeated =
        _mm256_blendv_ps(_mm256_div_ps(v, all(repetition)), _mm256_mul_ps(v, all(repetition)), below);
    const Floats fewer = _mm256_mul_ps(all(frequency), _mm256_cvtepi32_ps(counts));
    store(x + i, _mm256_sub_ps(_mm256_sub_ps(_mm256_blendv_ps(repeated, v, absent), fewer),
                               _mm256_andnot_ps(unsaid, all(presence))));
  }
  for (; i < size; i++) {
    const float repeated = x[i] > 0 ? x[i] / repetition : x[i] * repetition;
    x[i] = (read[i] || said[i] ? repeated : x[i]) - frequency * static_cast<float>(said[i]);
    if (said[i]) x[i] -= presence;
  }
}

}  // namespace drumline
