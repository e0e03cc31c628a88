// Products of rows with matrices of any kind.
//
// Inputs are brought into the form that a matrix's weights meet them in, once for all outputs.
#pragma once

#include "floats.h"
#include "quantized.h"

namespace drumline {

enum class Form { kIntegers, kFloats, kBfloats };

inline Form form_of(const Matrix& w) {
  if (in_blocks(w.kind)) return Form::kIntegers;
#ifdef __AVX512BF16__
  if (w.kind == kBfloats) return Form::kBfloats;
#endif
  return Form::kFloats;
}

// Rows of inputs in one form.
struct Inputs {
  Form form;
  int64_t columns;
  Activations integers;
  float* floats;
  Bfloat* bfloats;

  // Memory for any form, in whole lines.
  static int64_t bytes(int64_t rows, int64_t columns) {
    return (std::max<int64_t>(Activations::bytes(rows, columns), rows * columns * sizeof(float)) + 63) / 64 * 64;
  }
  static Inputs in(uint8_t* memory, int64_t rows, const Matrix& w) {
    Inputs made{form_of(w), w.columns, {}, reinterpret_cast<float*>(memory), reinterpret_cast<Bfloat*>(memory)};
    if (made.form == Form::kIntegers) made.integers = Activations::in(memory, rows, w.columns);
    return made;
  }

  // Set `count` inputs of a row from `at` on, which `value` gives eight at a time. Integers are set
  // in whole blocks.
  template <class Value>
  void set(int64_t row, int64_t at, int64_t count, Value&& value) const {
    switch (form) {
      case Form::kIntegers:
        for (int64_t k = 0; k < count; k += kBlock)
          integers.set(row, (at + k) / kBlock, value(k), value(k + 8), value(k + 16), value(k + 24));
        break;
      case Form::kFloats:
        for (int64_t k = 0; k < count; k += kLanes) store(floats + row * columns + at + k, value(k));
        break;
      case Form::kBfloats:
        for (int64_t k = 0; k < count; k += kLanes) store(bfloats + row * columns + at + k, value(k));
        break;
    }
  }
  void set(int64_t row, const float* x) const {
    set(row, 0, columns, [x](int64_t k) { return load(x + k); });
  }
};

// Rows [first, last) times group `g`; `out` is where the first row's first output of it goes.
// Packed groups are written to their end. Group `then`, if there is one, is fetched meanwhile.
inline void multiply(const Matrix& w, int64_t g, int64_t then, const Inputs& x, int64_t first, int64_t last, float* out,
                     int64_t stride, bool add) {
  const int64_t rows = last - first, columns = w.columns, start = w.output(g) * columns, count = w.outputs(g);
  const float* floats = x.floats + first * columns;
  switch (w.kind) {
    case kFloats:
      return multiply_floats<Widened<float>>(floats, rows, reinterpret_cast<const float*>(w.data) + start, columns,
                                             count, out, stride, add);
    case kBfloats: {
      const auto* weights = reinterpret_cast<const Bfloat*>(w.data) + start;
#ifdef __AVX512BF16__
      return multiply_floats<Paired>(x.bfloats + first * columns, rows, weights, columns, count, out, stride, add);
#else
      return multiply_floats<Widened<Bfloat>>(floats, rows, weights, columns, count, out, stride, add);
#endif
    }
    case kHalves:
      return multiply_floats<Widened<Half>>(floats, rows, reinterpret_cast<const Half*>(w.data) + start, columns,
                                            count, out, stride, add);
    default:
      return multiply_blocks(w, g, then, x.integers, first, last, out, stride, add);
  }
}

// The same, into rows of a whole output, with biases.
inline void multiply_into(const Matrix& w, int64_t g, int64_t then, const Inputs& x, int64_t first, int64_t last,
                          float* out, int64_t stride, bool add) {
  const int64_t start = w.output(g), count = w.outputs(g);
  const float* bias = w.bias ? w.bias + start : nullptr;
  if (count == kGroup || !in_blocks(w.kind)) {
    multiply(w, g, then, x, first, last, out + first * stride + start, stride, add);
    if (bias == nullptr) return;
    for (int64_t row = first; row < last; row++)
      for (int64_t i = 0; i < count; i++) out[row * stride + start + i] += bias[i];
    return;
  }
  alignas(64) float made[kTileRows * kGroup];
  for (int64_t a = first; a < last; a += kTileRows) {
    const int64_t b = std::min<int64_t>(last, a + kTileRows);
    multiply(w, g, w.groups(), x, a, b, made, kGroup, false);
    for (int64_t row = a; row < b; row++)
      for (int64_t i = 0; i < count; i++) {
        float& to = out[row * stride + start + i];
        const float plus = made[(row - a) * kGroup + i] + (bias ? bias[i] : 0.f);
        to = add ? to + plus : plus;
      }
  }
}

// Write the weights of output `row`, in floats.
inline void read_row(const Matrix& w, int64_t row, float* out) {
  const int64_t columns = w.columns;
  const auto copy = [&](auto* weights) {
    for (int64_t k = 0; k < columns; k += kLanes) store(out + k, first_eight(weights + row * columns + k));
  };
  switch (w.kind) {
    case kFloats: return copy(reinterpret_cast<const float*>(w.data));
    case kBfloats: return copy(reinterpret_cast<const Bfloat*>(w.data));
    case kHalves: return copy(reinterpret_cast<const Half*>(w.data));
    default: return dequantize(w, row, out);
  }
}

}  // namespace drumline
