// Telling log probabilities of a row of logits: of its token, of the likeliest, of ids by name.
//
// A row is read as a draw reads it, and no more than its likeliest few are put in order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "sampling.h"

namespace drumline {

// Log probabilities of a row: `own` of its token, the `count` likeliest, and those of `named` ids.
struct Asked {
  int64_t token, count, named;
  const int64_t* ids;
  float *own, *values, *of_named;
  int64_t* likeliest;
};

inline void tell_row(const float* x, int64_t size, const Asked& asked, DrawScratch& memory) {
  const float best = row_largest(x, size, memory.maxima);
  double mass = 0;
  if (std::isfinite(best)) mass = whole_mass({x, best, 1}, size);
  const float log_mass = std::isfinite(best) ? static_cast<float>(std::log(mass)) : NAN;
  const auto of = [&](int64_t id) { return x[id] - best - log_mass; };
  *asked.own = of(asked.token);
  for (int64_t i = 0; i < asked.named; i++) asked.of_named[i] = of(asked.ids[i]);
  if (!asked.count) return;
  // Pieces tell nothing of a row that holds what is no number.
  if (std::isnan(best) || !likeliest(x, size, asked.count, memory)) {
    memory.tokens.clear();
    for (int64_t i = 0; i < size; i++) memory.tokens.push_back({x[i], 0, static_cast<int32_t>(i)});
    // What is no number comes last.
    std::partial_sort(memory.tokens.begin(), memory.tokens.begin() + asked.count, memory.tokens.end(),
                      [](const Token& a, const Token& b) {
                        const float x = std::isnan(a.value) ? -INFINITY : a.value;
                        const float y = std::isnan(b.value) ? -INFINITY : b.value;
                        return x > y || (x == y && a.place < b.place);
                      });
  }
  for (int64_t i = 0; i < asked.count; i++) {
    asked.likeliest[i] = memory.tokens[i].place;
    asked.values[i] = of(memory.tokens[i].place);
  }
}

}  // namespace drumline
