// Matrices as kernels are told of them, whatever their weights are.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lanes.h"

namespace drumline {

constexpr int kBlock = 32;  // inputs that share a scale
constexpr int kGroup = 32;  // outputs that are computed together

enum Kind : int32_t { kNibbles = 0, kBytes = 1, kOffsetBytes = 2, kFloats = 3, kBfloats = 4, kHalves = 5 };

constexpr bool in_blocks(int kind) { return kind <= kOffsetBytes; }

// Whether integers count from a minimum, one for each scale.
constexpr bool from_least(int kind) { return kind != kBytes; }

// The bytes of an output's integers in a block, in fours.
constexpr int quads(int kind) { return kind == kNibbles ? kBlock / 8 : kBlock / 4; }

constexpr int64_t block_bytes(int kind) {
  return kGroup * (quads(kind) * 4 + (from_least(kind) ? 4 : 2));
}

// `rows` outputs of `columns` inputs. Small integers are packed in whole groups; floats lie as
// they do anywhere, one output's inputs after another's.
struct Matrix {
  const uint8_t* data;
  const float* bias;  // one for each output, or null
  int64_t rows, columns;
  int32_t kind;
  int32_t paired;  // groups of the first half of the outputs alternate with those of the second

  int64_t half() const { return paired ? rows / 2 : rows; }
  int64_t groups() const { return (half() + kGroup - 1) / kGroup * (paired ? 2 : 1); }
  // Of packed ones.
  int64_t group_bytes() const { return columns / kBlock * block_bytes(kind); }
  const uint8_t* group(int64_t g) const { return data + g * group_bytes(); }
  int64_t group_of(int64_t row) const { return paired ? row % half() / kGroup * 2 + row / half() : row / kGroup; }
  int64_t lane_of(int64_t row) const { return row % half() % kGroup; }
  // The first output of a group, and how many there are.
  int64_t output(int64_t g) const { return paired ? g % 2 * half() + g / 2 * kGroup : g * kGroup; }
  int64_t outputs(int64_t g) const { return std::min<int64_t>(kGroup, half() - (paired ? g / 2 : g) * kGroup); }
};

}  // namespace drumline
