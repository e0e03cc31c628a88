// Attention over paged keys and values, for rows of any lengths at once.
//
// A token reads its context in stretches of kStretch positions, each attended by itself and
// joined front to back. Stretches begin at multiples of their length, so what a token reads
// comes to the same bits in a prompt or an answer, in any chunk, beside anything, and one
// token's stretches can be computed by several threads.
#pragma once

#include "stretch.h"

namespace drumline {

// Where a forward's tokens lie: row r feeds lengths[r] tokens from starts[r] on, behind
// prefixes[r] earlier ones; blocks has `columns` entries a row.
struct Batch {
  int64_t tokens, rows, columns;
  const int64_t *ids, *positions, *slots, *blocks;
  const int32_t *starts, *lengths, *prefixes;
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
    // Large tiles where there are enough of them for all members.
    const int64_t pass = heads.pass(), step = std::clamp(batch.tokens / 16 / pass * pass, pass, heads.tile());
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

// Attend a tile's queries of KV head `head`; kMany of them share what is spread out of a stretch.
template <class T, bool kMany>
void attend_as(const Heads& heads, const Cache& cache, const Batch& batch, const Tile& tile, int64_t head,
               const float* query, int64_t stride, float* out, float* partial, Scratch& memory) {
  using Factor = typename Reading<T, kMany>::Factor;
  const int64_t size = heads.size, shared = heads.shared(), padded = padded_size(size), rows = tile.count * shared;
  const Kept<T> kept{page_of<T>(heads, cache.keys, 0, head), page_of<T>(heads, cache.values, 0, head),
                     batch.blocks + tile.row * batch.columns, heads.block_bytes<T>(), size};
  // Where a row's query heads lie, side by side in all tokens.
  const auto place = [&](int64_t r) { return (head * shared + r % shared) * size; };
  Factor* asked = memory.asked.as<Factor>();
  for (int64_t r = 0; r < rows; r++)
    memory.steps[r] = ask(query + (tile.token + r / shared) * stride + place(r), size, asked + r * size);
  const int64_t position = batch.prefixes[tile.row] + tile.token - batch.starts[tile.row];
  // What tokens [first, last) of the tile read of the stretch at `begin`.
  const auto seen = [&](int64_t first, int64_t last, int64_t begin) {
    const int64_t from = cache.window ? position + first - cache.window + 1 : 0;
    return Span{std::clamp<int64_t>(from - begin, 0, kStretch), std::clamp<int64_t>(position + last - begin, 0, kStretch)};
  };
  Reading<T, kMany> reading(kept, memory);
  Span spans[kMostPass];
  float peak[kMostPass], mass[kMostPass];
  // Attend the tile's tokens to a stretch, and call `take(row, sums, peak, mass)` for what each row read.
  const auto stretch = [&](int64_t begin, auto&& take) {
    const Span all = seen(0, tile.count, begin);
    if (all.empty()) return;
    reading.open(begin, all);
    for (int64_t t = 0; t < tile.count; t += heads.pass()) {
      const int64_t first = t * shared, count = std::min(heads.pass(), tile.count - t) * shared;
      for (int64_t r = 0; r < count; r++) spans[r] = seen(t + r / shared, t + r / shared + 1, begin);
      reading.attend(static_cast<int>(count), asked + first * size, memory.steps.data() + first, spans, peak, mass);
      for (int64_t r = 0; r < count; r++)
        if (!spans[r].empty()) take(first + r, memory.made.as<float>() + r * padded, peak[r], mass[r]);
    }
  };
  if (tile.stretch >= 0) {
    float* at = partial + tile.part + head * shared * (size + kLanes);
    for (int64_t r = 0; r < rows; r++) at[r * (size + kLanes) + size + 2] = 0;
    stretch(tile.stretch * kStretch, [&](int64_t r, const float* sums, float most, float weight) {
      float* to = at + r * (size + kLanes);
      std::copy_n(sums, size, to);
      to[size] = most;
      to[size + 1] = weight;
      to[size + 2] = 1;
    });
    return;
  }
  float* joined = memory.joined.as<float>();
  auto* totals = memory.totals.data();
  std::fill_n(totals, rows, Scratch::Total{0, -1});  // nothing yet
  const int64_t from = cache.window ? std::max<int64_t>(0, position - cache.window + 1) : 0;
  for (int64_t begin = from / kStretch * kStretch; begin < position + tile.count; begin += kStretch)
    stretch(begin, [&](int64_t r, const float* sums, float most, float weight) {
      if (totals[r].mass == -1) {
        std::copy_n(sums, size, joined + r * size);
        totals[r] = {most, weight};
      } else {
        join(joined + r * size, totals[r].peak, totals[r].mass, sums, most, weight, size);
      }
    });
  for (int64_t r = 0; r < rows; r++)
    finish(joined + r * size, totals[r].mass, out + (tile.token + r / shared) * heads.queries * size + place(r), size);
}

// A task: the query heads of KV head `head`, of a tile's tokens. `query` and `out` have rows of
// `stride` and `queries * size` floats. A lone token's stretch goes to `partial`: a place for each
// query head, of its sums, the largest score, the weights' sum, and whether it read any.
template <class T>
void attend_tile(const Heads& heads, const Cache& cache, const Batch& batch, const Tile& tile, int64_t head,
                 const float* query, int64_t stride, float* out, float* partial, Scratch& memory) {
  if (tile.count == 1 && heads.size % kPage == 0)
    attend_as<T, false>(heads, cache, batch, tile, head, query, stride, out, partial, memory);
  else
    attend_as<T, true>(heads, cache, batch, tile, head, query, stride, out, partial, memory);
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
