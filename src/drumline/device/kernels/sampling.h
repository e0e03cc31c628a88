// Drawing a token from a row of logits.
//
// A row is read a few times from front to back and never sorted: pieces' maxima say above which
// value its likeliest tokens lie, and where those do not hold what a filter keeps, a histogram
// of weights says it. A row is one thread's, so that nothing depends on its neighbours.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "lanes.h"

namespace drumline {

constexpr int64_t kPiece = 64;       // ids whose largest logit is kept
constexpr int64_t kDrawn = 256;      // ids that are drawn from at once where nothing narrows a row
constexpr int64_t kFirst = 64, kSecond = 512;  // likeliest tokens that are looked at before all
constexpr float kLeast = -87.f;      // weights below e to the this are none; no draw reaches them

// How pool rows draw, one entry each; see DrawSettings.
struct Ways {
  const uint8_t* greedy;
  const float* temperature;
  const int32_t* top_k;
  const float *top_p, *min_p, *typical_p;
  const uint64_t* seeds;
};

// Rows of logits to draw from: row i of the call is row `places[i]` of `logits`, of pool row
// `rows[i]`. `names` are the ids that stand at the places of a row, null for their own numbers.
struct Rows {
  const float* logits;
  int64_t count, vocab;
  const int64_t* places;
  const int32_t *rows, *positions;
  const int64_t* names;
};

struct Token {
  float value, weight;
  int32_t place;
};

constexpr int kBins = 4096;  // of weights, where all of a row is looked at

// Memory of a thread that draws. Most of it is touched by rows alone that are looked at whole.
struct DrawScratch {
  std::vector<float> maxima, copy, values, weights;
  std::vector<Token> tokens;
  std::vector<double> masses;

  void fit(size_t size) {
    maxima.reserve(size / kPiece + 1);
    copy.reserve(size);
    values.reserve(size);
    weights.reserve(size);
    tokens.reserve(size);
    masses.reserve(kBins);
  }
};

namespace noise {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;

inline uint64_t mixed(uint64_t state) {
  state += kGolden;
  state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9;
  state = (state ^ state >> 27) * 0x94D049BB133111EB;
  return state ^ state >> 31;
}

inline uint64_t key(uint64_t seed, int64_t position) {
  return mixed(mixed(seed) ^ static_cast<uint64_t>(position) * kGolden);
}

inline double uniform(uint64_t key, int64_t id) {
  return ((mixed(key ^ static_cast<uint64_t>(id) * kGolden) >> 12) + 0.5) * 0x1p-52;
}

}  // namespace noise

// The largest of log weight plus Gumbel noise. As -log(u) >= 1 - u, most tokens are seen to lose
// without a logarithm; the margin covers what weights are rounded by.
struct Race {
  explicit Race(uint64_t key) : key_(key) {}

  void enter(double log_weight, double weight, int64_t name, int64_t place) {
    const double u = noise::uniform(key_, name);
    if (1 - u > weight * reach_) return;
    const double score = log_weight - std::log(-std::log(u));
    if (score <= best_) return;
    best_ = score;
    reach_ = std::exp(-score) * 1.001;
    winner = place;
  }

  int64_t winner = 0;

 private:
  const uint64_t key_;
  double best_ = -std::numeric_limits<double>::infinity();
  double reach_ = std::numeric_limits<double>::infinity();
};

// The largest value of a row, or NaN if there is one, and pieces' maxima.
inline float row_largest(const float* x, int64_t size, std::vector<float>& maxima) {
  maxima.resize((size + kPiece - 1) / kPiece);
  Floats odd = _mm256_setzero_ps();
  float best = -INFINITY;
  bool none = false;
  for (int64_t p = 0, i = 0; p < static_cast<int64_t>(maxima.size()); p++) {
    const int64_t end = std::min(size, i + kPiece);
    Floats most = all(-INFINITY);
    for (; i + kLanes <= end; i += kLanes) {
      const Floats v = load(x + i);
      most = _mm256_max_ps(most, v);
      odd = _mm256_or_ps(odd, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    }
    float found = largest(most);
    for (; i < end; i++) {
      found = std::max(found, x[i]);
      none |= std::isnan(x[i]);
    }
    maxima[p] = found;
    best = std::max(best, found);
  }
  return none || _mm256_movemask_ps(odd) ? NAN : best;
}

// Where a row's largest value stands first.
inline int64_t place_of(const float* x, int64_t size, const std::vector<float>& maxima, float best) {
  int64_t i = (std::find(maxima.begin(), maxima.end(), best) - maxima.begin()) * kPiece;
  while (i + 1 < size && x[i] != best) i++;
  return i;
}

// A row's logits, relative to the largest and over the temperature, and their weights.
struct Scaled {
  const float* x;
  float best, temperature;

  float value(int64_t i) const { return (x[i] - best) / temperature; }
  Floats values(int64_t i) const { return _mm256_div_ps(_mm256_sub_ps(load(x + i), all(best)), all(temperature)); }
};

inline Floats weights_of(Floats values) {
  return _mm256_and_ps(exponential(values), _mm256_cmp_ps(values, all(kLeast), _CMP_GE_OQ));
}

inline float weight_of(float value) { return _mm256_cvtss_f32(weights_of(all(value))); }

inline double sum_of(Floats v) {
  const __m256d both =
      _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(v)), _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)));
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(both), _mm256_extractf128_pd(both, 1));
  return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

// The mass of entries [first, last), of those whose weight is at least `least`.
inline double mass_of(const Scaled& row, int64_t first, int64_t last, float least) {
  Floats sum = _mm256_setzero_ps();
  int64_t i = first;
  for (; i + kLanes <= last; i += kLanes) {
    const Floats w = weights_of(row.values(i));
    sum = _mm256_add_ps(sum, _mm256_and_ps(w, _mm256_cmp_ps(w, all(least), _CMP_GE_OQ)));
  }
  double mass = sum_of(sum);
  for (; i < last; i++) {
    const float w = weight_of(row.value(i));
    if (w >= least) mass += w;
  }
  return mass;
}

inline double whole_mass(const Scaled& row, int64_t size) {
  double mass = 0;
  for (int64_t first = 0; first < size; first += kDrawn)
    mass += mass_of(row, first, std::min(size, first + kDrawn), 0);
  return mass;
}

// The same mass, with values and weights kept.
inline double kept_mass(const Scaled& row, int64_t size, DrawScratch& memory) {
  memory.values.resize(size);
  memory.weights.resize(size);
  double mass = 0;
  for (int64_t first = 0; first < size; first += kDrawn) {
    const int64_t last = std::min(size, first + kDrawn);
    Floats sum = _mm256_setzero_ps();
    int64_t i = first;
    for (; i + kLanes <= last; i += kLanes) {
      const Floats values = row.values(i), weights = weights_of(values);
      store(&memory.values[i], values);
      store(&memory.weights[i], weights);
      sum = _mm256_add_ps(sum, weights);
    }
    double part = sum_of(sum);
    for (; i < last; i++) {
      memory.values[i] = row.value(i);
      part += memory.weights[i] = weight_of(memory.values[i]);
    }
    mass += part;
  }
  return mass;
}

// Draw from a row that nothing narrows: a stretch of it by its mass, then a token of it.
inline int64_t draw_open(const Scaled& row, int64_t size, float min_p, uint64_t key, const int64_t* names) {
  Race stretches(key);
  for (int64_t s = 0, first = 0; first < size; s++, first += kDrawn) {
    const double mass = mass_of(row, first, std::min(size, first + kDrawn), min_p);
    // Numbers below zero are no ids: a stretch and a token never share their noise.
    if (mass > 0) stretches.enter(std::log(mass), mass, -1 - s, first);
  }
  const int64_t first = stretches.winner, last = std::min(size, first + kDrawn);
  Race tokens(key);
  for (int64_t i = first; i < last; i++) {
    const float w = weight_of(row.value(i));
    if (w >= min_p && w > 0) tokens.enter(std::log(static_cast<double>(w)), w, names ? names[i] : i, i);
  }
  return tokens.winner;
}

// Append the entries of a row whose logits are at least `bound`.
inline void collect(const float* x, int64_t size, const std::vector<float>& maxima, float bound,
                    std::vector<Token>& into) {
  for (int64_t p = 0; p < static_cast<int64_t>(maxima.size()); p++) {
    if (!(maxima[p] >= bound)) continue;
    const int64_t end = std::min(size, (p + 1) * kPiece);
    int64_t i = p * kPiece;
    for (; i + kLanes <= end; i += kLanes) {
      unsigned found = _mm256_movemask_ps(_mm256_cmp_ps(load(x + i), all(bound), _CMP_GE_OQ));
      for (; found; found &= found - 1) {
        const int64_t at = i + __builtin_ctz(found);
        into.push_back({x[at], 0, static_cast<int32_t>(at)});
      }
    }
    for (; i < end; i++)
      if (x[i] >= bound) into.push_back({x[i], 0, static_cast<int32_t>(i)});
  }
}

// The likeliest tokens of a row, at least `count` and all that are as likely as the last of them,
// the largest first; false where pieces are too few to tell which they are.
inline bool likeliest(const float* x, int64_t size, int64_t count, DrawScratch& memory) {
  memory.tokens.clear();
  if (count > static_cast<int64_t>(memory.maxima.size())) return false;
  memory.copy = memory.maxima;
  std::nth_element(memory.copy.begin(), memory.copy.begin() + count - 1, memory.copy.end(), std::greater<float>());
  const float bound = memory.copy[count - 1];
  if (bound == -INFINITY) return false;
  collect(x, size, memory.maxima, bound, memory.tokens);
  std::sort(memory.tokens.begin(), memory.tokens.end(), [](const Token& a, const Token& b) {
    return a.value > b.value || (a.value == b.value && a.place < b.place);
  });
  return true;
}

struct Way {
  int64_t top_k;  // the whole row where it is off
  double top_p, typical_p;
  float min_p;
};

// The least value that top-k and top-p leave among a row's likeliest tokens, whose logits become
// values here; NaN where more tokens must be looked at. `mass` is the whole row's, and is needed
// where top-k is off.
inline float least_kept(const Scaled& row, std::vector<Token>& tokens, const Way& way, bool limited, double mass) {
  for (Token& token : tokens) {
    token.value = row.value(token.place);
    token.weight = weight_of(token.value);
  }
  const float limit = limited ? tokens[way.top_k - 1].value : -INFINITY;
  if (limited) {
    mass = 0;
    for (const Token& token : tokens)
      if (token.value >= limit) mass += token.weight;
  }
  const double nucleus = way.top_p * mass;
  double before = 0;
  float least = tokens.front().value;
  for (const Token& token : tokens) {
    if (token.value < limit || !(before < nucleus)) break;
    least = token.value;
    before += token.weight;
  }
  if (!limited && before < nucleus) return NAN;
  return std::max(least, limit);
}

// The same from the whole row, whose values and weights are kept, by a histogram: only one bin
// of it is ever sorted.
inline float least_of_all(int64_t size, const Way& way, bool limited, DrawScratch& memory) {
  constexpr float kScale = (kBins - 1) / -kLeast;
  const std::vector<float>&values = memory.values, &weights = memory.weights;
  float limit = kLeast;
  if (limited) {
    memory.copy = values;
    std::nth_element(memory.copy.begin(), memory.copy.begin() + way.top_k - 1, memory.copy.end(),
                     std::greater<float>());
    limit = std::max(limit, memory.copy[way.top_k - 1]);
  }
  if (way.top_p >= 1) return limit;
  const auto bin = [](float value) { return static_cast<int>(value * -kScale); };
  memory.masses.assign(kBins, 0);
  for (int64_t i = 0; i < size; i++)
    if (values[i] >= limit) memory.masses[bin(values[i])] += weights[i];
  double mass = 0, before = 0;
  for (const double part : memory.masses) mass += part;
  const double nucleus = way.top_p * mass;
  int crossed = 0;
  while (crossed + 1 < kBins && before + memory.masses[crossed] < nucleus) before += memory.masses[crossed++];
  memory.copy.clear();
  for (int64_t i = 0; i < size; i++)
    if (values[i] >= limit && bin(values[i]) == crossed) memory.copy.push_back(values[i]);
  std::sort(memory.copy.begin(), memory.copy.end(), std::greater<float>());
  float least = crossed ? limit : 0;
  for (const float value : memory.copy) {
    if (!(before < nucleus)) break;
    least = value;
    before += weight_of(value);
  }
  return least;
}

// Leave of the tokens those whose surprise is closest to what is expected, `share` of them.
inline void keep_typical(std::vector<Token>& tokens, double share) {
  double mass = 0, expected = 0;
  for (const Token& token : tokens) mass += std::exp(static_cast<double>(token.value));
  for (const Token& token : tokens)
    expected += std::exp(static_cast<double>(token.value)) / mass * (std::log(mass) - token.value);
  const auto distance = [&](const Token& token) { return std::abs(std::log(mass) - token.value - expected); };
  std::sort(tokens.begin(), tokens.end(), [&](const Token& a, const Token& b) { return distance(a) < distance(b); });
  double before = 0;
  size_t kept = 0;
  for (; kept < tokens.size() && (kept == 0 || before < share); kept++)
    before += std::exp(static_cast<double>(tokens[kept].value)) / mass;
  const double farthest = distance(tokens[kept - 1]);
  while (kept < tokens.size() && distance(tokens[kept]) <= farthest) kept++;
  tokens.resize(kept);
}

inline int64_t draw_narrowed(const Scaled& row, int64_t size, const Way& way, uint64_t key, const int64_t* names,
                             DrawScratch& memory) {
  const bool limited = way.top_k < size, shared = way.top_p < 1;
  const double mass = limited ? 0 : kept_mass(row, size, memory);
  float least = NAN;
  std::vector<Token>& tokens = memory.tokens;
  if (limited) {
    if (likeliest(row.x, size, way.top_k, memory)) least = least_kept(row, tokens, way, true, 0);
  } else if (shared) {
    for (const int64_t count : {kFirst, kSecond})
      if (std::isnan(least) && likeliest(row.x, size, count, memory)) least = least_kept(row, tokens, way, false, mass);
  }
  if (std::isnan(least)) {
    if (limited) kept_mass(row, size, memory);
    least = least_of_all(size, way, limited, memory);
    tokens.clear();
    for (int64_t i = 0; i < size; i++)
      if (memory.values[i] >= least)
        tokens.push_back({memory.values[i], memory.weights[i], static_cast<int32_t>(i)});
  }
  size_t kept = 0;
  for (const Token& token : tokens)
    if (token.value >= least && token.weight > 0 && token.weight >= way.min_p) tokens[kept++] = token;
  tokens.resize(kept);
  if (way.typical_p < 1) keep_typical(tokens, way.typical_p);
  Race race(key);
  for (const Token& token : tokens)
    race.enter(token.value, token.weight, names ? names[token.place] : token.place, token.place);
  return race.winner;
}

// Draw from row `i`: the token's place and the row's largest logit. Where that is not finite, the
// place means nothing, but lies in the row.
inline void draw_row(const Rows& rows, const Ways& ways, int64_t i, int64_t* token, float* best, DrawScratch& memory) {
  const float* x = rows.logits + rows.places[i] * rows.vocab;
  const int64_t size = rows.vocab, row = rows.rows[i];
  *best = row_largest(x, size, memory.maxima);
  *token = 0;
  if (!std::isfinite(*best)) return;
  if (ways.greedy[row]) {
    *token = place_of(x, size, memory.maxima, *best);
    return;
  }
  const Way way{ways.top_k[row], ways.top_p[row], ways.typical_p[row], ways.min_p[row]};
  const uint64_t key = noise::key(ways.seeds[row], rows.positions[i]);
  const int64_t* names = rows.names ? rows.names + i * size : nullptr;
  const Scaled scaled{x, *best, ways.temperature[row]};
  const bool narrowed = way.top_k < size || way.top_p < 1 || way.typical_p < 1;
  *token = narrowed ? draw_narrowed(scaled, size, way, key, names, memory)
                    : draw_open(scaled, size, way.min_p, key, names);
}

}  // namespace drumline
