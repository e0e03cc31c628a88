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

#include "lanes.h"

namespace drumline {

constexpr int kPage = 16;
constexpr int kStretch = 256;
constexpr int kTileQueries = 24;  // query rows whose scores of a stretch fit the nearest cache
constexpr int kMostShared = 64;   // query heads of a KV head

enum PoolKind : int32_t { kFloat32 = 0, kBfloat16 = 1 };

// Where a forward's tokens lie: row r feeds lengths[r] tokens from starts[r] on, behind
// prefixes[r] earlier ones; blocks has `columns` entries a row.
struct Batch {
  int64_t tokens, rows, columns;
  const int64_t *ids, *positions, *slots, *blocks;
  const int32_t *starts, *lengths, *prefixes;
};

struct Heads {
  int64_t queries, keys, size;
  int64_t block_rows;  // tokens' rows from a block of the pool to the next
  int32_t pool;        // PoolKind
  int32_t reserved;

  int64_t shared() const { return queries / keys; }
  int64_t block_values() const { return block_rows * keys * size; }
};

// One layer's part of the pool, `[kPage, keys, size]` of each block, and how far it looks back.
struct Cache {
  void *keys, *values;
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
  std::vector<float> scores, page, made, joined;

  void fit(const Heads& heads) {
    const int64_t queries = std::max<int64_t>(kTileQueries, heads.shared());
    scores.resize(queries * kStretch);
    page.resize(kPage * heads.size);
    made.resize(queries * heads.size);
    joined.resize(queries * heads.size);
  }
};

inline const float* unpacked(const float* from, int64_t, int64_t, float*) { return from; }
inline const float* unpacked(const uint16_t* from, int64_t apart, int64_t size, float* to) {
  for (int i = 0; i < kPage; i++)
    for (int64_t d = 0; d < size; d += kLanes) store(to + i * size + d, bfloats(from + i * apart + d));
  return to;
}
inline int64_t apart_of(const float*, int64_t apart, int64_t) { return apart; }
inline int64_t apart_of(const uint16_t*, int64_t, int64_t size) { return size; }

template <int N>
inline void weigh(const float* values, int64_t apart, const float* weights, int first, int last, float* out) {
  Floats sums[N];
  for (int j = 0; j < N; j++) sums[j] = load(out + j * kLanes);
  for (int i = first; i < last; i++) {
    const Floats weight = all(weights[i]);
    for (int j = 0; j < N; j++) sums[j] = fma(weight, load(values + i * apart + j * kLanes), sums[j]);
  }
  for (int j = 0; j < N; j++) store(out + j * kLanes, sums[j]);
}

// Positions [first, last) that a query reads.
struct Seen { int64_t first, last; };

// Attend `queries` rows to one stretch, of which each reads a part; `made` is their weighted sums,
// `peak` and `mass` the largest score and the weights' sum. A row that reads nothing is left out.
template <class T>
void attend(const Heads& heads, const T* keys, const T* values, const int64_t* blocks, int64_t stretch, int queries,
            const float* const* query, const Seen* seen, Scratch& memory, float* made, float* peak, float* mass) {
  const int64_t begin = stretch * kStretch, size = heads.size, between = heads.keys * size;
  const float scale = 1.f / std::sqrt(static_cast<float>(size));
  int first[kMostShared], last[kMostShared];
  int from = kStretch, to = 0;
  for (int r = 0; r < queries; r++) {
    first[r] = static_cast<int>(std::clamp<int64_t>(seen[r].first - begin, 0, kStretch));
    last[r] = static_cast<int>(std::clamp<int64_t>(seen[r].last - begin, 0, kStretch));
    if (last[r] <= first[r]) continue;
    from = std::min(from, first[r]);
    to = std::max(to, last[r]);
  }
  float* scores = memory.scores.data();
  for (int p = from / kPage * kPage; p < to; p += kPage) {
    const T* stored = keys + blocks[(begin + p) / kPage] * heads.block_values();
    if (p + kPage < to) {
      const T* next = keys + blocks[(begin + p) / kPage + 1] * heads.block_values();
      for (int i = 0; i < kPage; i++)
        for (int64_t d = 0; d < size; d += 64 / static_cast<int64_t>(sizeof(T))) _mm_prefetch(next + i * between + d, _MM_HINT_T0);
    }
    const int64_t apart = apart_of(stored, between, size);
    const float* page = unpacked(stored, between, size, memory.page.data());
    for (int r = 0; r < queries; r++)
      for (int k = p; k < p + kPage; k += kLanes) {
        if (k >= last[r] || k + kLanes <= first[r]) continue;
        Floats products[8];
        for (auto& each : products) each = _mm256_setzero_ps();
        const float* key = page + (k - p) * apart;
        for (int64_t d = 0; d < size; d += kLanes) {
          const Floats q = load(query[r] + d);
#pragma GCC unroll 8
          for (int i = 0; i < 8; i++) products[i] = fma(q, load(key + i * apart + d), products[i]);
        }
        store(scores + r * kStretch + k, _mm256_mul_ps(sums(products), all(scale)));
      }
  }
  for (int r = 0; r < queries; r++) {
    if (last[r] <= first[r]) continue;
    float* row = scores + r * kStretch;
    const int a = first[r] / kLanes * kLanes, b = (last[r] + kLanes - 1) / kLanes * kLanes;
    for (int k = a; k < first[r]; k++) row[k] = -INFINITY;
    for (int k = last[r]; k < b; k++) row[k] = -INFINITY;
    Floats most = all(-INFINITY);
    // What is no number stands second, and so stays.
    for (int k = a; k < b; k += kLanes) most = _mm256_max_ps(most, load(row + k));
    peak[r] = largest(most);
    Floats total = _mm256_setzero_ps();
    for (int k = a; k < b; k += kLanes) {
      const Floats score = load(row + k);
      const Floats weight = _mm256_andnot_ps(_mm256_cmp_ps(score, all(-INFINITY), _CMP_EQ_OQ),
                                             exponential(_mm256_sub_ps(score, all(peak[r]))));
      store(row + k, weight);
      total = _mm256_add_ps(total, weight);
    }
    mass[r] = sum(total);
    std::fill(made + r * size, made + (r + 1) * size, 0.f);
  }
  for (int p = from / kPage * kPage; p < to; p += kPage) {
    const T* stored = values + blocks[(begin + p) / kPage] * heads.block_values();
    if (p + kPage < to) {
      const T* next = values + blocks[(begin + p) / kPage + 1] * heads.block_values();
      for (int i = 0; i < kPage; i++)
        for (int64_t d = 0; d < size; d += 64 / static_cast<int64_t>(sizeof(T))) _mm_prefetch(next + i * between + d, _MM_HINT_T0);
    }
    const int64_t apart = apart_of(stored, between, size);
    const float* page = unpacked(stored, between, size, memory.page.data());
    for (int r = 0; r < queries; r++) {
      const int a = std::max(first[r], p) - p, b = std::min(last[r], p + kPage) - p;
      if (b <= a) continue;
      const float* weights = scores + r * kStretch + p;
      int64_t d = 0;
      for (; d + 64 <= size; d += 64) weigh<8>(page + d, apart, weights, a, b, made + r * size + d);
      for (; d + 32 <= size; d += 32) weigh<4>(page + d, apart, weights, a, b, made + r * size + d);
      for (; d < size; d += 8) weigh<1>(page + d, apart, weights, a, b, made + r * size + d);
    }
  }
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

// A task: the query heads of KV head `head`, of a tile's tokens. `query` and `out` have rows of
// `stride` and `queries * size` floats. A lone token's stretch goes to `partial`.
template <class T>
void attend_tile(const Heads& heads, const Cache& cache, const Batch& batch, const Tile& tile, int64_t head,
                 const float* query, int64_t stride, float* out, float* partial, Scratch& memory) {
  const int64_t size = heads.size, shared = heads.shared(), offset = head * size;
  const T* keys = static_cast<const T*>(cache.keys) + offset;
  const T* values = static_cast<const T*>(cache.values) + offset;
  const int64_t* blocks = batch.blocks + tile.row * batch.columns;
  const int64_t limit = std::max<int64_t>(1, kTileQueries / shared);
  const float* rows[kMostShared];
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
    if (tile.stretch >= 0) {
      // One token: a place for each of its query heads, mass and peak behind the sums.
      float* at = partial + tile.part + head * shared * (size + kLanes);
      const bool read = from < (tile.stretch + 1) * kStretch && to > tile.stretch * kStretch;
      if (read) attend<T>(heads, keys, values, blocks, tile.stretch, queries, rows, seen, memory, memory.made.data(), peak, mass);
      for (int r = 0; r < queries; r++) {
        float* place = at + r * (size + kLanes);
        if (read) std::copy_n(memory.made.data() + r * size, size, place);
        place[size] = read ? peak[r] : 0;
        place[size + 1] = read ? mass[r] : 0;
        place[size + 2] = read;
      }
      continue;
    }
    float* joined = memory.joined.data();
    for (int r = 0; r < queries; r++) mass[r] = -1;  // nothing yet
    for (int64_t s = from / kStretch; s * kStretch < to; s++) {
      attend<T>(heads, keys, values, blocks, s, queries, rows, seen, memory, memory.made.data(), other_peak, other_mass);
      for (int r = 0; r < queries; r++) {
        if (seen[r].first >= (s + 1) * kStretch || seen[r].last <= s * kStretch) continue;
        const float* made = memory.made.data() + r * size;
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

// Put one token's keys and values into the pool.
inline void keep(const Heads& heads, const Cache& cache, int64_t slot, const float* key, const float* value) {
  const int64_t width = heads.keys * heads.size;
  if (heads.pool == kFloat32) {
    std::copy_n(key, width, static_cast<float*>(cache.keys) + slot * width);
    std::copy_n(value, width, static_cast<float*>(cache.values) + slot * width);
    return;
  }
  auto* keys = static_cast<uint16_t*>(cache.keys) + slot * width;
  auto* values = static_cast<uint16_t*>(cache.values) + slot * width;
  for (int64_t d = 0; d < width; d++) {
    keys[d] = bfloat(key[d]);
    values[d] = bfloat(value[d]);
  }
}

}  // namespace drumline
