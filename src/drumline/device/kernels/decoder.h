// A decoder's layers, for a ragged batch, in one call: a team walks through them together.
//
// Each phase of a layer is shared out among the members and ends at a barrier; what is quicker
// done than a barrier passed is done by each member for itself. Which member computes what changes
// no bit of it.
#pragma once

#include <memory>

#include "attention.h"
#include "linear.h"
#include "sampling.h"
#include "team.h"

namespace drumline {

struct Layer {
  Matrix qkv, out, gate_up, down;
  const float *attention_norm, *mlp_norm;
  const float *query_norm, *key_norm;  // null where the model has none
  Cache cache;
};

struct Model {
  const Layer* layers;
  Matrix embedding, head;
  const float *norm, *frequencies;
  Heads heads;
  int64_t count, hidden, inner;
  float eps;
  int32_t reserved;
};

// What there is to do of a phase, taken piece by piece.
struct alignas(64) Taken {
  std::atomic<int64_t> next{0};

  template <class Do>
  void each(int64_t count, Do&& piece) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) piece(i);
  }
};

constexpr int64_t kFewValues = 4096;  // of a batch's hidden states: each member brings them into form for itself
constexpr int64_t kRowsAtOnce = 128;  // rows whose activations stay cached while groups pass

// A team with the memory it works in, which grows to what was needed most.
class Machine {
 public:
  explicit Machine(int threads)
      : team(threads),
        scratch(threads),
        draws(threads),
        pairs(threads, std::vector<float>(2 * kRowsAtOnce * kGroup)) {}

  // Memory for `count` values, kept until the next call; slot by slot.
  template <class T>
  T* room(int slot, int64_t count) {
    auto& memory = rooms_[slot];
    const size_t bytes = count * sizeof(T) + 128;
    if (memory.size() < bytes) memory.resize(bytes);
    return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t{63});
  }

  // Memory for inputs of any form.
  uint8_t* inputs(int slot, int64_t rows, int64_t columns) {
    return room<uint8_t>(slot, Inputs::bytes(rows, columns));
  }

  Taken* phases(int64_t count) {
    if (count > phases_) {
      taken_ = std::make_unique<Taken[]>(count);
      phases_ = count;
    }
    for (int64_t i = 0; i < count; i++) taken_[i].next.store(0, std::memory_order_relaxed);
    return taken_.get();
  }

  Team team;
  Work work;
  std::vector<Scratch> scratch;           // one for each member
  std::vector<DrawScratch> draws;
  std::vector<std::vector<float>> pairs;  // gates and ups of a member's rows

 private:
  static constexpr int kRooms = 8;
  std::vector<uint8_t> rooms_[kRooms];
  std::unique_ptr<Taken[]> taken_;
  int64_t phases_ = 0;
};

// Rows [0, rows) times the matrix, in pieces of some groups and some rows. A piece is told which
// group its member is likely to take next.
template <class Do>
void groups_of(Taken& taken, int members, int64_t rows, int64_t groups, Do&& piece) {
  const int64_t row_blocks = (rows + kRowsAtOnce - 1) / kRowsAtOnce;
  const int64_t size = std::max<int64_t>(1, rows < 8 ? groups / (4 * members) : 1);
  const int64_t pieces = (groups + size - 1) / size;
  taken.each(row_blocks * pieces, [&](int64_t i) {
    const int64_t first = i / pieces * kRowsAtOnce, last = std::min(rows, first + kRowsAtOnce);
    const int64_t begin = i % pieces * size, end = std::min(groups, begin + size);
    for (int64_t g = begin; g < end; g++) piece(g, g + 1 < end ? g + 1 : g + 1 + (members - 1) * size, first, last);
  });
}

inline void multiply_all(Taken& taken, int members, const Matrix& w, const Inputs& x, int64_t rows, float* out,
                         bool add) {
  groups_of(taken, members, rows, w.groups(), [&](int64_t g, int64_t then, int64_t first, int64_t last) {
    multiply_into(w, g, then, x, first, last, out, w.rows, add);
  });
}

inline Floats root(const float* x, int64_t size, float eps) {
  Floats squares = _mm256_setzero_ps();
  for (int64_t k = 0; k < size; k += kLanes) squares = fma(load(x + k), load(x + k), squares);
  return all(1.f / std::sqrt(sum(squares) / static_cast<float>(size) + eps));
}

inline void normalize(const float* x, const float* weight, int64_t size, float eps, float* out) {
  const Floats by = root(x, size, eps);
  for (int64_t k = 0; k < size; k += kLanes)
    store(out + k, _mm256_mul_ps(_mm256_mul_ps(load(x + k), by), load(weight + k)));
}

inline void normalize(const float* x, const float* weight, float eps, const Inputs& out, int64_t row) {
  const Floats by = root(x, out.columns, eps);
  out.set(row, 0, out.columns,
          [=](int64_t k) { return _mm256_mul_ps(_mm256_mul_ps(load(x + k), by), load(weight + k)); });
}

// Rotate a head by its token's angles; its halves are the pairs.
inline void rotate(float* x, const float* cosine, const float* sine, int64_t half) {
  for (int64_t i = 0; i < half; i++) {
    const float a = x[i], b = x[half + i];
    x[i] = std::fma(-b, sine[i], a * cosine[i]);
    x[half + i] = std::fma(a, sine[i], b * cosine[i]);
  }
}

// Norm, rotate and keep one token's queries, keys and values.
inline void prepare(const Model& model, const Layer& layer, float* qkv, const float* angles, int64_t slot) {
  const Heads& heads = model.heads;
  const int64_t size = heads.size, half = size / 2;
  for (int64_t h = 0; h < heads.queries + heads.keys; h++) {
    const float* norm = h < heads.queries ? layer.query_norm : layer.key_norm;
    if (norm) normalize(qkv + h * size, norm, size, model.eps, qkv + h * size);
    rotate(qkv + h * size, angles, angles + half, half);
  }
  const float* key = qkv + heads.queries * size;
  keep(heads, layer.cache, slot, key, key + heads.keys * size);
}

// Gates and ups of a group of the down projection's inputs, joined.
inline void gate(const Matrix& w, int64_t pair, int64_t then, const Inputs& x, int64_t first, int64_t last,
                 const Inputs& out, std::vector<float>& memory) {
  float *gates = memory.data(), *ups = gates + kRowsAtOnce * kGroup;
  multiply(w, 2 * pair, 2 * pair + 1, x, first, last, gates, kGroup, false);
  multiply(w, 2 * pair + 1, 2 * then, x, first, last, ups, kGroup, false);
  const float* bias = w.bias ? w.bias + pair * kGroup : nullptr;
  for (int64_t row = first; row < last; row++) {
    const float *mine = gates + (row - first) * kGroup, *beside = ups + (row - first) * kGroup;
    out.set(row, pair * kGroup, w.outputs(2 * pair), [=, &w](int64_t i) {
      Floats g = load(mine + i), u = load(beside + i);
      if (bias) {
        g = _mm256_add_ps(g, load(bias + i));
        u = _mm256_add_ps(u, load(bias + w.half() + i));
      }
      return _mm256_mul_ps(silu(g), u);
    });
  }
}

inline void attend_task(const Heads& heads, const Cache& cache, const Batch& batch, const Work& work, int64_t task,
                        const float* query, int64_t stride, float* out, float* partial, Scratch& memory) {
  const Tile& tile = work.tiles[task / heads.keys];
  const int64_t head = task % heads.keys;
  switch (heads.pool) {
    case kFloat32: return attend_tile<float>(heads, cache, batch, tile, head, query, stride, out, partial, memory);
    case kBfloat16: return attend_tile<uint16_t>(heads, cache, batch, tile, head, query, stride, out, partial, memory);
    default: return attend_tile<int8_t>(heads, cache, batch, tile, head, query, stride, out, partial, memory);
  }
}

// Bring a token's attended heads together, where several threads read its context.
inline void gathered(const Heads& heads, const Batch& batch, const Work& work, int64_t token, const float* partial,
                     float* out, Scratch& memory) {
  if (work.parts[token] < 0) return;
  join_parts(heads, batch.positions[token] / kStretch + 1, partial + work.parts[token],
             out + token * heads.queries * heads.size, memory.joined.as<float>());
}

// Layers [first, last) of the model, `x` being `[tokens, hidden]`; before the first one, ids
// become vectors, unless there are none: then `x` is what other layers made of them. A forward
// run in several calls comes to the same.
inline void run_layers(Machine& machine, const Model& model, const Batch& batch, float* x, int64_t first,
                       int64_t last) {
  constexpr int kPhases = 5;
  const Heads& heads = model.heads;
  const int64_t tokens = batch.tokens, attended = heads.queries * heads.size, half = heads.size / 2;
  const int64_t width = attended + 2 * heads.keys * heads.size;
  machine.work.plan(batch, heads);
  Taken* taken = machine.phases((last - first) * kPhases + 1);
  const int members = machine.team.size();
  const bool few = members > 1 && tokens * std::max(model.hidden, attended) <= kFewValues;
  const int copies = few ? members : 1;
  const int64_t hidden_bytes = Inputs::bytes(tokens, model.hidden), reads_bytes = Inputs::bytes(tokens, attended);
  uint8_t* hidden_memory = machine.room<uint8_t>(0, copies * hidden_bytes);
  uint8_t* reads_memory = machine.room<uint8_t>(1, copies * reads_bytes);
  uint8_t* inner_memory = machine.inputs(2, tokens, model.inner);
  float* qkv = machine.room<float>(3, tokens * width);
  float* out = machine.room<float>(4, tokens * attended);
  float* angles = machine.room<float>(5, tokens * heads.size);
  float* partial = machine.room<float>(6, machine.work.part_floats);
  float* joined = few ? machine.room<float>(7, members * tokens * attended) : out;
  for (auto& scratch : machine.scratch) scratch.fit(heads);
  machine.team.run([&](int member) {
    Team& team = machine.team;
    Scratch& memory = machine.scratch[member];
    const int64_t begin = tokens * member / members, end = tokens * (member + 1) / members;
    // What this member brings into form: its share, or with few tokens all of them in memory of its own.
    const int own = few ? member : 0;
    const int64_t from = few ? 0 : begin, to = few ? tokens : end;
    const auto shared = [&] { if (!few) team.meet(); };
    float* mine = joined + own * tokens * attended;
    for (int64_t t = begin; t < end; t++) {
      if (first == 0 && batch.ids) read_row(model.embedding, batch.ids[t], x + t * model.hidden);
      for (int64_t i = 0; i < half; i++) {
        const float angle = static_cast<float>(batch.positions[t]) * model.frequencies[i];
        angles[t * heads.size + i] = std::cos(angle);
        angles[t * heads.size + half + i] = std::sin(angle);
      }
    }
    if (few && first == 0 && batch.ids) team.meet();
    for (int64_t l = first; l < last; l++) {
      const Layer& layer = model.layers[l];
      Taken* phase = taken + (l - first) * kPhases;
      const Inputs asked = Inputs::in(hidden_memory + own * hidden_bytes, tokens, layer.qkv);
      const Inputs reads = Inputs::in(reads_memory + own * reads_bytes, tokens, layer.out);
      const Inputs gated = Inputs::in(hidden_memory + own * hidden_bytes, tokens, layer.gate_up);
      const Inputs inner = Inputs::in(inner_memory, tokens, layer.down);
      for (int64_t t = from; t < to; t++) normalize(x + t * model.hidden, layer.attention_norm, model.eps, asked, t);
      shared();
      multiply_all(phase[0], members, layer.qkv, asked, tokens, qkv, false);
      team.meet();
      for (int64_t t = begin; t < end; t++)
        prepare(model, layer, qkv + t * width, angles + t * heads.size, batch.slots[t]);
      team.meet();
      phase[1].each(machine.work.tiles.size() * heads.keys, [&](int64_t task) {
        attend_task(heads, layer.cache, batch, machine.work, task, qkv, width, out, partial, memory);
      });
      team.meet();
      for (int64_t t = from; t < to; t++) {
        gathered(heads, batch, machine.work, t, partial, mine, memory);
        reads.set(t, (machine.work.parts[t] < 0 ? out : mine) + t * attended);
      }
      shared();
      multiply_all(phase[2], members, layer.out, reads, tokens, x, true);
      team.meet();
      for (int64_t t = from; t < to; t++) normalize(x + t * model.hidden, layer.mlp_norm, model.eps, gated, t);
      shared();
      const int64_t pairs = layer.gate_up.groups() / 2;
      groups_of(phase[3], members, tokens, pairs, [&](int64_t pair, int64_t then, int64_t a, int64_t b) {
        gate(layer.gate_up, pair, then, gated, a, b, inner, machine.pairs[member]);
      });
      team.meet();
      multiply_all(phase[4], members, layer.down, inner, tokens, x, true);
      if (l + 1 < last) team.meet();
    }
  });
}

// Logits of `rows` rows of what the last layer made.
inline void run_head(Machine& machine, const Model& model, const float* x, int64_t rows, float* out) {
  const Inputs hidden = Inputs::in(machine.inputs(0, rows, model.hidden), rows, model.head);
  Taken* taken = machine.phases(1);
  const int members = machine.team.size();
  machine.team.run([&](int member) {
    for (int64_t t = rows * member / members; t < rows * (member + 1) / members; t++)
      normalize(x + t * model.hidden, model.norm, model.eps, hidden, t);
    machine.team.meet();
    multiply_all(taken[0], members, model.head, hidden, rows, out, false);
  });
}

}  // namespace drumline
