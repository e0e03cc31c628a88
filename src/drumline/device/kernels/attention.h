// Attention over paged keys and values, for rows of any lengths at once.
//
// A token reads its context in stretches of kStretch positions, each attended by itself and
// joined front to back. Stretches begin at multiples of their length, so what a token reads
// comes to the same bits in a prompt or an answer, in any chunk, beside anything, and one
// token's stretches can be computed by several threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "pages.h"

namespace drumline {

constexpr int kTileQueries = 24;  // query rows whose scores of a stretch fit the nearest cache
constexpr int kMostShared = 64;   // query heads of a KV head

enum PoolKind : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };

// Where a forward's tokens lie: row r feeds lengths[r] tokens from starts[r] on, behind
// prefixes[r] earlier ones; blocks has `columns` entries a row.
struct Batch {
  int64_t tokens, rows, columns;
  const int64_t *ids, *positions, *slots, *blocks;
  const int32_t *starts, *lengths, *prefixes;
};

struct Heads {
  int64_t queries, keys, size;
  int64_t block_rows;  // slots from a block of the pool to the next: its tokens in every layer
  int32_t pool;        // PoolKind
  int32_t reserved;

  int64_t shared() const { return queries / keys; }
  template <class T>
  int64_t block_bytes() const { return block_rows / kPage * keys * page_bytes<T>(size); }
  int64_t padded() const { return (size + 15) / 16 * 16; }  // floats a row of sums takes
};

// One layer's part of the pool, and how far it looks back.
struct Cache {
  void *keys, *values;  // of block 0: a page of each KV head
  int64_t window;  // positions read, own included; 0 is all
};

// Consecutive tokens of a row that one KV head's task takes; a lone token's stretches are apart.
struct Tile {
  int32_t row, token, count, stretch;  // stretch: the only one to read, or -1 for all
  int64_t part;                        // where a lone token's result of it goes
  int64_t cost;
};

// What a batch's attention is cut into. Made once a forward, for all layers.
struct Work {
  std::vector<Tile> tiles;
  std::vector<int64_t> parts;  // [tokens + 1]: a lone token's stretches, in `partial`
  int64_t part_floats = 0;

  void plan(const Batch& batch, const Heads& heads) {
    tiles.clear();
    parts.assign(batch.tokens + 1, -1);
    part_floats = 0;
    const int64_t step = std::max<int64_t>(1, kTileQueries / heads.shared());
    for (int32_t row = 0; row < batch.rows; row++) {
      const int32_t length = batch.lengths[row], start = batch.starts[row];
      const int64_t prefix = batch.prefixes[row];
      if (length == 1) {
        const int32_t stretches = static_cast<int32_t>(prefix / kStretch + 1);
        parts[start] = part_floats;
        for (int32_t s = 0; s < stretches; s++) {
          tiles.push_back({row, start, 1, s, part_floats, std::min<int64_t>(kStretch, prefix + 1 - s * kStretch)});
          part_floats += heads.queries * (heads.size + kLanes);
        }
        continue;
      }
      for (int32_t t = 0; t < length; t += static_cast<int32_t>(step)) {
        const int32_t count = static_cast<int32_t>(std::min<int64_t>(step, length - t));
        tiles.push_back({row, start + t, count, -1, -1, count * (prefix + t + count)});
      }
    }
    // Dear ones first, so that the members end together.
    std::stable_sort(tiles.begin(), tiles.end(), [](const Tile& a, const Tile& b) { return a.cost > b.cost; });
  }
};

// One member's memory.
struct Scratch {
  std::vector<float> scores, made, joined, steps;
  std::vector<int8_t> bytes;
  std::vector<Planes> queries;
  std::vector<WeightPlanes> weights;
  std::vector<uint16_t> asked, weighed;  // queries and weights, where they meet pairs

  void fit(const Heads& heads) {
    const int64_t count = std::max<int64_t>(kTileQueries, heads.shared());
    scores.resize(count * kStretch);
    made.resize(count * heads.padded());
    joined.resize(count * heads.size);
    if (kPairs && heads.pool == kBfloat16) {
      asked.resize(count * heads.size);
      weighed.resize(count * kStretch);
    }
    if (heads.pool != kInt8) return;
    steps.resize(kStretch);
    bytes.resize(2 * count * heads.size);
    weights.resize(count);
    queries.resize(count);
    for (int64_t i = 0; i < count; i++) {
      queries[i].high = bytes.data() + 2 * i * heads.size;
      queries[i].low = queries[i].high + heads.size;
    }
  }
};

// Positions [first, last) that a query reads.
struct Seen { int64_t first, last; };

// Turn a row's scores into weights, of which the largest is 1; what it does not read weighs none.
inline void soften(float* row, const Span& span, int from, int to, float& peak, float& mass) {
  const int a = span.first / kLanes * kLanes, b = (span.last + kLanes - 1) / kLanes * kLanes;
  std::fill(row + a, row + span.first, -INFINITY);
  std::fill(row + span.last, row + b, -INFINITY);
  Floats most = all(-INFINITY);
  for (int k = a; k < b; k += kLanes) most = _mm256_max_ps(most, load(row + k));
  peak = largest(most);
  Floats total = _mm256_setzero_ps();
  for (int k = a; k < b; k += kLanes) {
    const Floats weight = falling(_mm256_sub_ps(load(row + k), all(peak)));
    store(row + k, weight);
    total = _mm256_add_ps(total, weight);  // beside 1, what is not read is lost in it
  }
  mass = sum(total);
  std::fill(row + from, row + span.first, 0.f);
  std::fill(row + span.last, row + to, 0.f);
}

template <class T>
void weigh_all(const Values<T>& values, int queries, const Span* spans, Scratch& memory, float* made, int64_t stride,
               float* mass) {
  const int64_t size = values.size;
  if constexpr (kHasSteps<T>) {
    float* steps = memory.steps.data();
    for (int p = values.from; p < values.to; p += kPage)
      std::copy_n(steps_of(values.page(p), size), kPage, steps + p);
    for (int r = 0; r < queries; r++) {
      if (spans[r].last > spans[r].first)
        memory.weights[r].set(memory.scores.data() + r * kStretch, steps, values.from, values.to);
    }
    by_rows(queries, [&]<int N>(int first) {
      constexpr int C = columns_at_once(N);
      const WeightPlanes* weights = memory.weights.data() + first;
      float* out = made + first * stride;
      int64_t d = 0;
      for (; d + C * kWide <= size; d += C * kWide) weigh<N, C>(values, d, weights, out, stride, first == 0);
      for (; d < size; d += kWide) weigh<N, 1>(values, d, weights, out, stride, first == 0);
    });
  } else if constexpr (kInPairs<T>) {
#ifdef __AVX512BF16__
    for (int r = 0; r < queries; r++)
      if (spans[r].last > spans[r].first)
        mass[r] = round_all(memory.scores.data() + r * kStretch, values.from, values.to, memory.weighed.data() + r * kStretch);
    by_rows(queries, [&]<int N>(int first) {
      constexpr int C = 4;
      const uint16_t* weights = memory.weighed.data() + first * kStretch;
      float* out = made + first * stride;
      int64_t d = 0;
      for (; d + C * WidePairs::kCount <= size; d += C * WidePairs::kCount)
        weigh<WidePairs, N, C>(values, d, weights, spans + first, out, stride, first == 0);
      for (; d + WidePairs::kCount <= size; d += WidePairs::kCount)
        weigh<WidePairs, N, 1>(values, d, weights, spans + first, out, stride, false);
      for (; d < size; d += EightPairs::kCount)
        weigh<EightPairs, N, 1>(values, d, weights, spans + first, out, stride, false);
    });
#endif
  } else {
    by_rows(queries, [&]<int N>(int first) {
      constexpr int C = columns_at_once(N);
      const float* weights = memory.scores.data() + first * kStretch;
      float* out = made + first * stride;
      int64_t d = 0;
      for (; d + C * kWide <= size; d += C * kWide)
        weigh<WideLanes, N, C>(values, d, weights, spans + first, out, stride, first == 0);
      for (; d + kWide <= size; d += kWide)
        weigh<WideLanes, N, 1>(values, d, weights, spans + first, out, stride, false);
      for (; d < size; d += kLanes)
        weigh<EightLanes, N, 1>(values, d, weights, spans + first, out, stride, false);
    });
  }
}

// Attend `queries` rows to one stretch, of which each reads a part; `made` is their weighted sums,
// `peak` and `mass` the largest score and the weights' sum. A row that reads nothing is left out.
// `query` is of floats, of Planes where the pool holds integers, or of bfloat16 where pairs of them
// are multiplied.
template <class T, class Query>
void attend(const Heads& heads, const T* keys, const T* values, const int64_t* blocks, int64_t stretch, int queries,
            const Query* query, const Seen* seen, Scratch& memory, float* peak, float* mass) {
  const int64_t begin = stretch * kStretch, size = heads.size, stride = heads.padded();
  const float scale = 1.f / std::sqrt(static_cast<float>(size));
  Span spans[kMostShared];
  int from = kStretch, to = 0;
  for (int r = 0; r < queries; r++) {
    spans[r] = {static_cast<int>(std::clamp<int64_t>(seen[r].first - begin, 0, kStretch)),
                static_cast<int>(std::clamp<int64_t>(seen[r].last - begin, 0, kStretch))};
    if (spans[r].last <= spans[r].first) continue;
    from = std::min(from, spans[r].first);
    to = std::max(to, spans[r].last);
  }
  from = from / kPage * kPage;
  to = (to + kPage - 1) / kPage * kPage;
  const int64_t block_bytes = heads.block_bytes<T>();
  const Values<T> key_pages{keys, blocks + begin / kPage, block_bytes, size, from, to};
  const Values<T> value_pages{values, blocks + begin / kPage, block_bytes, size, from, to};
  float* scores = memory.scores.data();
  for (int p = from; p < to; p += kPage) {
    key_pages.fetch_behind(p);
    if (p + kPage >= to) fetch(value_pages.page(from), size);
    const T* page = key_pages.page(p);
    by_rows(queries, [&]<int N>(int first) { score<N>(page, size, query + first, scale, scores + first * kStretch + p); });
  }
  for (int r = 0; r < queries; r++)
    if (spans[r].last > spans[r].first) soften(scores + r * kStretch, spans[r], from, to, peak[r], mass[r]);
  weigh_all<T>(value_pages, queries, spans, memory, memory.made.data(), stride, mass);
}

// Join what a further stretch came to with what those before it did.
inline void join(float* sums, float& peak, float& mass, const float* others, float other_peak, float other_mass, int64_t size) {
  const float most = std::max(other_peak, peak);
  // One of both is 1.
  Floats weights = _mm256_setr_ps(peak - most, other_peak - most, 0, 0, 0, 0, 0, 0);
  weights = exponential(weights);
  alignas(32) float w[8];
  store(w, weights);
  for (int64_t d = 0; d < size; d += kLanes)
    store(sums + d, fma(load(others + d), all(w[1]), _mm256_mul_ps(load(sums + d), all(w[0]))));
  mass = std::fma(other_mass, w[1], mass * w[0]);
  peak = most;
}

inline void finish(const float* sums, float mass, float* out, int64_t size) {
  const Floats by = all(1.f / mass);
  for (int64_t d = 0; d < size; d += kLanes) store(out + d, _mm256_mul_ps(load(sums + d), by));
}

// A KV head's page of a block.
template <class T>
T* page_of(const Heads& heads, void* side, int64_t block, int64_t head) {
  char* bytes = static_cast<char*>(side) + block * heads.block_bytes<T>() + head * page_bytes<T>(heads.size);
  return reinterpret_cast<T*>(bytes);
}

// A task: the query heads of KV head `head`, of a tile's tokens. `query` and `out` have rows of
// `stride` and `queries * size` floats. A lone token's stretch goes to `partial`.
template <class T>
void attend_tile(const Heads& heads, const Cache& cache, const Batch& batch, const Tile& tile, int64_t head,
                 const float* query, int64_t stride, float* out, float* partial, Scratch& memory) {
  const int64_t size = heads.size, shared = heads.shared(), stride_made = heads.padded();
  const T* keys = page_of<T>(heads, cache.keys, 0, head);
  const T* values = page_of<T>(heads, cache.values, 0, head);
  const int64_t* blocks = batch.blocks + tile.row * batch.columns;
  const int64_t limit = std::max<int64_t>(1, kTileQueries / shared);
  const float* rows[kMostShared];
  [[maybe_unused]] const uint16_t* paired[kMostShared];
  Seen seen[kMostShared];
  float peak[kMostShared], mass[kMostShared], other_peak[kMostShared], other_mass[kMostShared];
  for (int64_t t = 0; t < tile.count; t += limit) {
    const int64_t count = std::min<int64_t>(limit, tile.count - t);
    const int queries = static_cast<int>(count * shared);
    int64_t from = INT64_MAX, to = 0;
    for (int64_t i = 0; i < count; i++) {
      const int64_t token = tile.token + t + i;
      const int64_t position = batch.prefixes[tile.row] + token - batch.starts[tile.row];
      const Seen mine{cache.window ? std::max<int64_t>(0, position - cache.window + 1) : 0, position + 1};
      from = std::min(from, mine.first);
      to = std::max(to, mine.last);
      for (int64_t g = 0; g < shared; g++) {
        rows[i * shared + g] = query + token * stride + (head * shared + g) * size;
        seen[i * shared + g] = mine;
      }
    }
    const auto asking = [&] {
      if constexpr (kHasSteps<T>) {
        for (int r = 0; r < queries; r++) memory.queries[r].set(rows[r], size);
        return static_cast<const Planes*>(memory.queries.data());
#ifdef __AVX512BF16__
      } else if constexpr (kInPairs<T>) {
        for (int r = 0; r < queries; r++) {
          uint16_t* rounded = memory.asked.data() + r * size;
          round_all(rows[r], 0, size, rounded);
          paired[r] = rounded;
        }
        return static_cast<const uint16_t* const*>(paired);
#endif
      } else {
        return static_cast<const float* const*>(rows);
      }
    }();
    if (tile.stretch >= 0) {
      // One token: a place for each of its query heads, mass and peak behind the sums.
      float* at = partial + tile.part + head * shared * (size + kLanes);
      const bool read = from < (tile.stretch + 1) * kStretch && to > tile.stretch * kStretch;
      if (read) attend<T>(heads, keys, values, blocks, tile.stretch, queries, asking, seen, memory, peak, mass);
      for (int r = 0; r < queries; r++) {
        float* place = at + r * (size + kLanes);
        if (read) std::copy_n(memory.made.data() + r * stride_made, size, place);
        place[size] = read ? peak[r] : 0;
        place[size + 1] = read ? mass[r] : 0;
        place[size + 2] = read;
      }
      continue;
    }
    float* joined = memory.joined.data();
    for (int r = 0; r < queries; r++) mass[r] = -1;  // nothing yet
    for (int64_t s = from / kStretch; s * kStretch < to; s++) {
      attend<T>(heads, keys, values, blocks, s, queries, asking, seen, memory, other_peak, other_mass);
      for (int r = 0; r < queries; r++) {
        if (seen[r].first >= (s + 1) * kStretch || seen[r].last <= s * kStretch) continue;
        const float* made = memory.made.data() + r * stride_made;
        if (mass[r] == -1) {
          std::copy_n(made, size, joined + r * size);
          peak[r] = other_peak[r];
          mass[r] = other_mass[r];
        } else {
          join(joined + r * size, peak[r], mass[r], made, other_peak[r], other_mass[r], size);
        }
      }
    }
    for (int r = 0; r < queries; r++) {
      const int64_t token = tile.token + t + r / shared;
      finish(joined + r * size, mass[r], out + token * heads.queries * size + (head * shared + r % shared) * size, size);
    }
  }
}

// Join a lone token's stretches, each head's front to back.
inline void join_parts(const Heads& heads, int64_t stretches, const float* partial, float* out, float* joined) {
  const int64_t size = heads.size, each = size + kLanes;
  for (int64_t h = 0; h < heads.queries; h++) {
    float peak = 0, mass = -1;
    for (int64_t s = 0; s < stretches; s++) {
      const float* at = partial + (s * heads.queries + h) * each;
      if (at[size + 2] == 0) continue;
      if (mass == -1) {
        std::copy_n(at, size, joined);
        peak = at[size];
        mass = at[size + 1];
      } else {
        join(joined, peak, mass, at, at[size], at[size + 1], size);
      }
    }
    finish(joined, mass, out + h * size, size);
  }
}

template <class T>
void keep_as(const Heads& heads, const Cache& cache, int64_t slot, const float* key, const float* value) {
  const int64_t block = slot / heads.block_rows, token = slot % heads.block_rows;
  for (int64_t h = 0; h < heads.keys; h++) {
    keep_key(page_of<T>(heads, cache.keys, block, h), heads.size, token, key + h * heads.size);
    keep_value(page_of<T>(heads, cache.values, block, h), heads.size, token, value + h * heads.size);
  }
}

// Put one token's keys and values into the pool.
inline void keep(const Heads& heads, const Cache& cache, int64_t slot, const float* key, const float* value) {
  switch (heads.pool) {
    case kFloat32: return keep_as<float>(heads, cache, slot, key, value);
    case kBfloat16: return keep_as<uint16_t>(heads, cache, slot, key, value);
    default: return keep_as<int8_t>(heads, cache, slot, key, value);
  }
}

}  // namespace drumline
