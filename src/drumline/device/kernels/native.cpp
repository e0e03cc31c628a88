// The C interface of the kernels, for ctypes: plain values and addresses in, a status out.
//
// No function here keeps Python's lock or knows a tensor library. 0 is success, 1 a want of memory,
// 2 an id that is no row's.

#include <new>
#include <system_error>

#include "decoder.h"
#include "logprobs.h"
#include "penalties.h"

using namespace drumline;

namespace {

template <class Do>
int32_t guarded(Do&& work) {
  try {
    work();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  } catch (const std::system_error&) {
    return 1;
  }
}

// Do `work` for each of `rows` rows of logits: on the caller alone where there is one row.
template <class Do>
void for_rows(Machine& machine, int64_t rows, int64_t vocab, Do&& work) {
  for (auto& memory : machine.draws) memory.fit(vocab);
  if (rows == 1) return work(0, machine.draws[0]);
  Taken* taken = machine.phases(1);
  machine.team.run([&](int member) { taken[0].each(rows, [&](int64_t i) { work(i, machine.draws[member]); }); });
}

bool within(const int64_t* ids, int64_t count, int64_t rows) {
  return std::all_of(ids, ids + count, [rows](int64_t id) { return 0 <= id && id < rows; });
}

}  // namespace

extern "C" {

Machine* drumline_machine(int32_t threads) {
  Machine* made = nullptr;
  guarded([&] { made = new Machine(threads); });
  return made;
}

void drumline_machine_free(Machine* machine) { delete machine; }

// The memory that packed weights of such a shape take.
int64_t drumline_packed_bytes(const Matrix* shape) { return shape->groups() * shape->group_bytes(); }

// Pack output `row` of blocks that lie `step` bytes apart: a scale, a minimum if the kind has any,
// integers. Where 4-bit integers are `centred` they count from -8, and no minimum is stored. The
// packed memory is blank before, as its last group may have outputs that nothing stands for.
void drumline_pack_row(uint8_t* packed, const Matrix* shape, int64_t row, const uint8_t* stored, int64_t step,
                       int32_t centred) {
  const int64_t group = shape->group_of(row), lane = shape->lane_of(row);
  for (int64_t b = 0; b < shape->columns / kBlock; b++) {
    const uint8_t* from = stored + b * step;
    uint8_t* block = packed + group * shape->group_bytes() + b * block_bytes(shape->kind);
    uint8_t* of = block + quads(shape->kind) * kGroup * 4 + lane * 2;
    std::memcpy(of, from, 2);
    from += 2;
    if (centred) {
      // The minimum is -8 times the scale, which is exact.
      uint16_t raw;
      std::memcpy(&raw, of, 2);
      raw = _cvtss_sh(-8.f * _cvtsh_ss(raw), 0);
      std::memcpy(of + kGroup * 2, &raw, 2);
    } else if (from_least(shape->kind)) {
      std::memcpy(of + kGroup * 2, from, 2);
      from += 2;
    }
    for (int q = 0; q < quads(shape->kind); q++) std::memcpy(block + q * kGroup * 4 + lane * 4, from + 4 * q, 4);
  }
}

void drumline_pack(uint8_t* packed, const Matrix* shape, int64_t first, int64_t count, const uint8_t* stored,
                   const int64_t* offsets, int64_t step, int32_t centred) {
  for (int64_t i = 0; i < count; i++)
    drumline_pack_row(packed, shape, first + i, stored + offsets[i], step, centred);
}

int32_t drumline_rows(const Matrix* matrix, const int64_t* ids, int64_t count, float* out) {
  if (!within(ids, count, matrix->rows)) return 2;
  for (int64_t i = 0; i < count; i++) read_row(*matrix, ids[i], out + i * matrix->columns);
  return 0;
}

int32_t drumline_linear(Machine* machine, const Matrix* matrix, const float* x, int64_t rows, float* out) {
  return guarded([&] {
    const Inputs inputs = Inputs::in(machine->inputs(0, rows, matrix->columns), rows, *matrix);
    Taken* taken = machine->phases(1);
    const int members = machine->team.size();
    machine->team.run([&](int member) {
      for (int64_t t = rows * member / members; t < rows * (member + 1) / members; t++)
        inputs.set(t, x + t * matrix->columns);
      machine->team.meet();
      multiply_all(taken[0], members, *matrix, inputs, rows, out, false);
    });
  });
}

// Queries of `query_stride` floats a token; keys and values are in the cache already.
int32_t drumline_attention(Machine* machine, const Heads* heads, const Cache* cache, const Batch* batch,
                           const float* query, const float* key, const float* value, float* out) {
  return guarded([&] {
    const int64_t width = heads->queries * heads->size, kept = heads->keys * heads->size;
    machine->work.plan(*batch, *heads);
    Taken* taken = machine->phases(1);
    float* partial = machine->room<float>(6, machine->work.part_floats);
    for (auto& scratch : machine->scratch) scratch.fit(*heads);
    const int members = machine->team.size();
    machine->team.run([&](int member) {
      Scratch& memory = machine->scratch[member];
      const int64_t begin = batch->tokens * member / members, end = batch->tokens * (member + 1) / members;
      for (int64_t t = begin; t < end; t++) keep(*heads, *cache, batch->slots[t], key + t * kept, value + t * kept);
      machine->team.meet();
      taken[0].each(machine->work.tiles.size() * heads->keys, [&](int64_t task) {
        attend_task(*heads, *cache, *batch, machine->work, task, query, width, out, partial, memory);
      });
      machine->team.meet();
      for (int64_t t = begin; t < end; t++) gathered(*heads, *batch, machine->work, t, partial, out, memory);
    });
  });
}

int32_t drumline_layers(Machine* machine, const Model* model, const Batch* batch, float* x, int64_t first, int64_t last) {
  if (batch->ids && !within(batch->ids, batch->tokens, model->embedding.rows)) return 2;
  return guarded([&] { run_layers(*machine, *model, *batch, x, first, last); });
}

int32_t drumline_head(Machine* machine, const Model* model, const float* x, int64_t rows, float* out) {
  return guarded([&] { run_head(*machine, *model, x, rows, out); });
}

// Draw a token for each row; see draw_row.
int32_t drumline_draw(Machine* machine, const Rows* rows, const Ways* ways, int64_t* tokens, float* best) {
  return guarded([&] {
    for_rows(*machine, rows->count, rows->vocab, [&](int64_t i, DrawScratch& memory) {
      draw_row(*rows, *ways, i, tokens + i, best + i, memory);
    });
  });
}

// Log probabilities of rows `places` of the logits: of `tokens`, of the `top[i]` likeliest, whose
// columns are `most` wide, and of the ids of row i, which are `named[starts[i]]` and on.
int32_t drumline_tell(Machine* machine, const float* logits, int64_t vocab, int64_t count, const int64_t* places,
                      const int64_t* tokens, const int32_t* top, int64_t most, const int64_t* starts,
                      const int64_t* named, float* own, float* values, int64_t* ids, float* of_named) {
  return guarded([&] {
    for_rows(*machine, count, vocab, [&](int64_t i, DrawScratch& memory) {
      const int64_t first = starts[i];
      tell_row(logits + places[i] * vocab, vocab,
               {tokens[i], top[i], starts[i + 1] - first, named + first, own + i, values + i * most, of_named + first,
                ids + i * most},
               memory);
    });
  });
}

// Penalize rows `places` of the logits by what slots `slots` have read and said, `[slots, vocab]`.
int32_t drumline_penalize(Machine* machine, float* logits, int64_t vocab, int64_t count, const int64_t* places,
                          const int64_t* slots, const uint8_t* read, const int32_t* said, const float* repetition,
                          const float* frequency, const float* presence) {
  return guarded([&] {
    for_rows(*machine, count, vocab, [&](int64_t i, DrawScratch&) {
      penalize_row(logits + places[i] * vocab, vocab, read + slots[i] * vocab, said + slots[i] * vocab, repetition[i],
                   frequency[i], presence[i]);
    });
  });
}

}  // extern "C"
