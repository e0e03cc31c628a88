// Attention to one stretch of a row's context, for the queries of one KV head that read it.
//
// Few queries read pages where they lie; many have them spread out into panels first, of which a
// register's lines stand one behind the other. The sums are the same ones.
#pragma once

#include <vector>

#include "factors.h"

namespace drumline {

constexpr int kPassQueries = 24;      // query rows whose scores of a stretch stay close by
constexpr int kMostShared = 64;       // query heads of a KV head
constexpr int kMostPass = std::max(kPassQueries, kMostShared);
constexpr int kMostPasses = 4;        // of a tile, which share what is spread out of a stretch
constexpr int kPages = kStretch / kPage;

enum PoolKind : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };

struct Heads {
  int64_t queries, keys, size;
  int64_t block_rows;  // slots from a block of the pool to the next: its tokens in every layer
  int32_t pool;        // PoolKind
  int32_t reserved;

  int64_t shared() const { return queries / keys; }
  template <class T>
  int64_t block_bytes() const { return block_rows / kPage * keys * page_bytes<T>(size); }
  // Tokens whose queries pass a stretch at once, and of a whole tile.
  int64_t pass() const { return std::max<int64_t>(1, kPassQueries / shared()); }
  int64_t tile() const { return kMostPasses * pass(); }
};

// Memory in whole cache lines, as what begins within one takes two.
struct alignas(64) Line { char bytes[64]; };
class Room {
 public:
  void fit(int64_t bytes) { lines_.resize((bytes + 63) / 64); }
  template <class T>
  T* as() { return reinterpret_cast<T*>(lines_.data()); }

 private:
  std::vector<Line> lines_;
};

inline int64_t padded_size(int64_t size) { return (size + kPage - 1) / kPage * kPage; }

// One member's memory.
struct Scratch {
  struct Total { float peak, mass; };

  // `made` is what a pass came to, `joined` a tile's rows over stretches, of which `totals` tell.
  Room scores, weighed, made, joined, asked, keys, values, blank;
  std::vector<Total> totals;
  std::vector<float> steps;  // of queries
  float key_steps[kStretch], value_steps[kStretch];

  void fit(const Heads& heads) {
    const int64_t size = heads.size, padded = padded_size(size), rows = heads.tile() * heads.shared();
    scores.fit(kMostPass * kStretch * 4);
    weighed.fit(kMostPass * kStretch * 2);
    made.fit(kMostPass * padded * 4);
    joined.fit(rows * size * 4);
    asked.fit(rows * size * 4);
    keys.fit(kStretch * size * 4);
    values.fit(kStretch * padded * 4);
    blank.fit(2 * kPage * size * 4);
    totals.resize(rows);
    steps.resize(rows);
  }
};

// Positions [first, last), of a row or of a stretch.
struct Span {
  int64_t first, last;
  bool empty() const { return last <= first; }
  bool operator==(const Span&) const = default;
};

// Turn a row's scores into weights, of which the largest is 1; what it does not read weighs none.
inline void soften(float* row, const Span& span, int64_t from, int64_t to, float& peak, float& mass) {
  const int64_t a = span.first / kLanes * kLanes, b = (span.last + kLanes - 1) / kLanes * kLanes;
  std::fill(row + a, row + span.first, -INFINITY);
  std::fill(row + span.last, row + b, -INFINITY);
  Floats most = all(-INFINITY);
  for (int64_t k = a; k < b; k += kLanes) most = _mm256_max_ps(most, load(row + k));
  peak = largest(most);
  Floats total = _mm256_setzero_ps();
  for (int64_t k = a; k < b; k += kLanes) {
    const Floats weight = falling(_mm256_sub_ps(load(row + k), all(peak)));
    store(row + k, weight);
    total = _mm256_add_ps(total, weight);  // beside 1, what is not read is lost in it
  }
  mass = sum(total);
  std::fill(row + from, row + span.first, 0.f);
  std::fill(row + span.last, row + to, 0.f);
}

// A row's keys and values of one KV head.
template <class T>
struct Kept {
  const T *keys, *values;  // of block 0
  const int64_t* blocks;   // of the row
  int64_t block_bytes, size;

  const T* page(const T* side, int64_t position) const {
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(side) + blocks[position / kPage] * block_bytes);
  }
};

// A stretch as a task's queries read it; kMany of them have it spread out.
template <class T, bool kMany>
class Reading {
 public:
  using Lines = std::conditional_t<kMany, typename LinesOf<T>::Panel, typename LinesOf<T>::Page>;
  using Value = typename Lines::Value;
  using Factor = typename Lines::Factor;

  Reading(const Kept<T>& kept, Scratch& memory) : kept_(kept), memory_(memory) {}

  // Begin the stretch at position `begin`, of which `seen` is all that is read.
  void open(int64_t begin, const Span& seen) {
    begin_ = begin;
    seen_ = seen;
    finite_ = kUnknown;
    const int64_t from = seen.first / kPage * kPage;
    for (int64_t p = from; p < seen.last; p += kPage) {
      const T* page = kept_.page(kept_.keys, begin + p);
      if (kMany || p < from + kAhead * kPage) fetch_key(kMany ? p + kPage : p);
      if constexpr (kHasSteps<T>) {
        std::copy_n(steps_of(page, kept_.size), kPage, memory_.key_steps + p);
        std::copy_n(steps_of(kept_.page(kept_.values, begin + p), kept_.size), kPage, memory_.value_steps + p);
      }
      keys_[p / kPage] = key_page(page, p);
    }
    read_values(seen);
  }

  // Attend `queries` rows, of which row r reads `spans[r]`: `made` are their weighted sums, `peak`
  // and `mass` their largest scores and their weights' sums. A row that reads nothing is left out.
  void attend(int queries, const Factor* asked, const float* steps, const Span* spans, float* peak, float* mass) {
    Span all{kStretch, 0};
    for (int r = 0; r < queries; r++) {
      if (spans[r].empty()) continue;
      all = {std::min(all.first, spans[r].first), std::max(all.last, spans[r].last)};
    }
    if (all.empty()) return;
    score(queries, asked, steps, all);
    const int64_t from = all.first / kPage * kPage, to = (all.last + kPage - 1) / kPage * kPage;
    bool alike = true;
    for (int r = 0; r < queries; r++) {
      if (spans[r].empty()) continue;
      float* row = memory_.scores.template as<float>() + r * kStretch;
      soften(row, spans[r], from, to, peak[r], mass[r]);
      weight_steps_[r] = weigh_by(row, from, to, r, mass[r]);
      alike &= spans[r] == seen_;
    }
    if (alike || finite()) return weigh(queries, 0, all);
    // What a row does not read may be no number, so it has no part in it, not even none.
    for (int r = 0; r < queries;) {
      int like = r + 1;
      while (like < queries && spans[like] == spans[r]) like++;
      if (!spans[r].empty()) {
        read_values(spans[r]);
        weigh(like - r, r, spans[r]);
      }
      r = like;
    }
    read_values(seen_);
  }

 private:
  enum Finite { kUnknown, kYes, kNo };
  static constexpr int64_t kAhead = 4;  // pages, of what is fetched while others are read
  // Blocks of sixteen columns that pass before the next rows: few rows take more at once.
  static constexpr int kBlocks = kMany ? blocks_at_once(6) : blocks_at_once(1);

  void fetch_key(int64_t p) const {
    if (p < seen_.last) fetch(kept_.page(kept_.keys, begin_ + p), kept_.size);
  }
  void fetch_value(int64_t p) const {
    if (p < seen_.last) fetch(kept_.page(kept_.values, begin_ + p), kept_.size);
  }

  const Value* key_page(const T* page, int64_t p) {
    if constexpr (!kMany || kSpread<T> == 1) {
      return page;
    } else {
      constexpr int64_t kLineValues = kLine / sizeof(T);
      Value* to = memory_.keys.template as<Value>() + p * kept_.size;
      for (int64_t at = 0; at < kPage * kept_.size; at += kLineValues) spread(page + at, to + at);
      return to;
    }
  }

  // Find the values of what `seen` says, the others of its pages being zeros.
  void read_values(const Span& seen) {
    T* blank = memory_.blank.template as<T>();
    for (int64_t p = seen.first / kPage * kPage; p < seen.last; p += kPage) {
      const T* page = kept_.page(kept_.values, begin_ + p);
      if constexpr (kMany) fetch_value(p + kPage);
      if (!kHasSteps<T> && (p < seen.first || p + kPage > seen.last)) {
        copy_seen(page, seen.first - p, seen.last - p, blank);
        page = blank;
        blank += kPage * kept_.size;
      }
      if constexpr (kMany)
        spread_values(page, p);
      else
        values_[p / kPage] = page;
    }
  }

  void copy_seen(const T* page, int64_t first, int64_t last, T* to) const {
    constexpr int64_t kGroup = 4 / sizeof(T);
    const int64_t size = kept_.size;
    std::copy_n(page, kPage * size, to);
    for (int64_t t = 0; t < kPage; t += kGroup) {
      if (t >= first && t + kGroup <= last) continue;
      for (int64_t i = 0; i < kGroup; i++)
        if (t + i < first || t + i >= last)
          for (int64_t d = 0; d < size; d++) to[t * size + d * kGroup + i] = 0;
    }
  }

  // A panel has a block's lines one behind the other, for all of the stretch.
  Value* panel(int64_t block, int64_t p) { return memory_.values.template as<Value>() + (block * kStretch + p) * kPage; }

  void spread_values(const T* page, int64_t p) {
    constexpr int64_t kGroup = 4 / sizeof(T), kLineValues = kLine / sizeof(T);
    const int64_t size = kept_.size, whole = size / kPage;
    for (int64_t t = 0; t < kPage; t += kGroup, page += size * kGroup) {
      for (int64_t b = 0; b < whole; b++) spread(page + b * kLineValues, panel(b, p + t));
      if (whole * kPage == size) continue;
      T half[kLineValues] = {};
      std::copy_n(page + whole * kLineValues, kLineValues / 2, half);
      spread(half, panel(whole, p + t));
    }
  }

  bool finite() {
    if constexpr (kHasSteps<T>) return true;
    if (finite_ == kUnknown) {
      const int64_t blocks = padded_size(kept_.size) / kPage;
      const int64_t from = seen_.first / kPage * kPage, to = (seen_.last + kPage - 1) / kPage * kPage;
      const Factor none[Lines::kDeep] = {};
      bool zero = true;
      for (int64_t b = 0; b < blocks; b++) {
        // Times zero, each is zero, or no number.
        alignas(64) float sums[kPage];
        sum_lines<Lines, 1, 1>(
            [&](auto&& add) {
              for (int64_t p = from; p < to; p += Lines::kDeep) {
                const Value* const line[1] = {panel(b, p)};
                add(none, 0, line, 0, Lines::kDeep);
              }
            },
            [&](int, int column, auto sum) { wide_store(sums + column, as_floats(sum)); });
        for (float each : sums) zero &= each == 0;
      }
      finite_ = zero ? kYes : kNo;
    }
    return finite_ == kYes;
  }

  static WideFloats as_floats(WideFloats v) { return v; }
  static WideFloats as_floats(Ints v) { return floats(v); }

  void score(int queries, const Factor* asked, const float* steps, const Span& all) {
    const float scale = 1.f / std::sqrt(static_cast<float>(kept_.size));
    const int64_t size = kept_.size, first_page = all.first / kPage, pages = (all.last + kPage - 1) / kPage;
    for (int64_t i = first_page; i < pages; i += kBlocks) {
      if constexpr (!kMany) {
        for (int64_t next = i + kAhead; next < i + kAhead + kBlocks; next++)
          next < pages ? fetch_key(next * kPage) : fetch_value((next - pages + first_page) * kPage);
      }
      by_rows(queries, [&]<int N>(int first) {
        by_blocks<N>(std::min<int64_t>(kBlocks, pages - i), [&]<int B>(int64_t block) {
          const Value* from[B];
          for (int j = 0; j < B; j++) from[j] = keys_[i + block + j];
          const int64_t p = (i + block) * kPage;
          float* out = memory_.scores.template as<float>() + first * kStretch + p;
          sum_lines<Lines, N, B>(
              [&](auto&& add) {
                add(asked + first * size, size, from, kPage * Lines::kDeep, size);
              },
              [&](int r, int column, auto sum) {
                WideFloats made = as_floats(sum);
                if constexpr (kHasSteps<T>) made = wide_mul(made, wide_load(memory_.key_steps + p + column));
                wide_store(out + r * kStretch + column, wide_mul(made, wide_all(steps[first + r] * scale)));
              });
        });
      });
    }
  }
  // Weights of row r as factors; returns what they are multiples of.
  float weigh_by(float* row, int64_t from, int64_t to, int r, float& mass) {
    if constexpr (kHasSteps<T>) {
      return drumline::weigh_by(row, memory_.value_steps, from, to, memory_.weighed.template as<Factor>() + r * kStretch);
#ifdef __AVX512BF16__
    } else if constexpr (sizeof(T) == 2) {
      mass = round_all(row, from, to, memory_.weighed.template as<Factor>() + r * kStretch);
#endif
    }
    return 1;
  }

  void weigh(int queries, int row, const Span& all) {
    const Factor* weights;
    if constexpr (std::is_same_v<Factor, float>)
      weights = memory_.scores.template as<float>();
    else
      weights = memory_.weighed.template as<Factor>();
    weights += row * kStretch;
    const int64_t size = kept_.size, padded = padded_size(size), blocks = padded / kPage;
    const int64_t first_page = all.first / kPage, pages = (all.last + kPage - 1) / kPage;
    const int64_t begin = first_page * kPage, count = (all.last - begin + 3) / 4 * 4;  // factors may stand in fours
    float* out = memory_.made.template as<float>() + row * padded;
    for (int64_t b = 0; b < blocks; b += kBlocks)
      by_rows(queries, [&]<int N>(int first) {
        by_blocks<N>(std::min<int64_t>(kBlocks, blocks - b), [&]<int B>(int64_t block) {
          block += b;
          const Factor* factors = weights + first * kStretch + begin;
          const Value* from[B];
          sum_lines<Lines, N, B>(
              [&](auto&& add) {
                if constexpr (kMany) {
                  for (int j = 0; j < B; j++) from[j] = panel(block + j, begin);
                  add(factors, kStretch, from, kPage * Lines::kDeep, count);
                } else {
                  for (int64_t i = first_page; i < pages; i++, factors += kPage) {
                    if (first == 0 && block == 0) fetch_value((i + kAhead) * kPage);
                    for (int j = 0; j < B; j++) from[j] = values_[i] + (block + j) * kPage * Lines::kDeep;
                    add(factors, kStretch, from, size * Lines::kDeep, kPage);
                  }
                }
              },
              [&](int r, int column, auto sum) {
                const int at = first + r;
                wide_store(out + at * padded + block * kPage + column,
                           wide_mul(as_floats(sum), wide_all(weight_steps_[row + at])));
              });
        });
      });
  }

  const Kept<T>& kept_;
  Scratch& memory_;
  int64_t begin_ = 0;
  Span seen_{0, 0};
  Finite finite_ = kUnknown;
  const Value* keys_[kPages];
  const Value* values_[kPages];
  float weight_steps_[kMostPass];
};

}  // namespace drumline
