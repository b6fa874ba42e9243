// Blocks of a GGUF file in the layout of the product, 16 adjacent outputs, and rows read back.
#include <array>
#include <cstring>

#include "cpu/block_dispatch.hpp"
#include "cpu/block_layout.hpp"
#include "cpu/float_mode.hpp"
#include "cpu/spread.hpp"

namespace polyspec::cpu {
namespace {

using core::BlockForm;
using core::BlockLayout;

constexpr int kMost = 256;       // inputs of a block
constexpr int kMostGroups = 16;  // of a block

// One block of one output.
struct Unpacked {
  uint16_t scale = 0, minimum = 0;  // float16
  std::array<uint8_t, kMostGroups> scales{}, minima{};
  std::array<uint8_t, kMost> values{};
};

uint16_t half_at(const uint8_t* from) {
  uint16_t half;
  std::memcpy(&half, from, 2);
  return half;
}

uint8_t byte(int value) { return static_cast<uint8_t>(value); }

// Two of 32 values to a byte: the second half in the high bits.
void read_nibbles(const uint8_t* from, uint8_t* values) {
  for (int i = 0; i < 16; ++i) {
    values[i] = from[i] & 15;
    values[16 + i] = from[i] >> 4;
  }
}

// The fifth bit of 32 values, eight at a time: value i keeps bit i of a byte, which carries into
// bit 7 where it is set.
void read_fifth(const uint8_t* from, uint8_t* values) {
  constexpr uint64_t kOnes = 0x0101010101010101u;
  for (int i = 0; i < 4; ++i) {
    const uint64_t bits = from[i] * kOnes & 0x8040201008040201u;
    uint64_t eight;
    std::memcpy(&eight, values + 8 * i, 8);
    eight |= ((bits + 0x7f * kOnes) >> 7 & kOnes) << 4;
    std::memcpy(values + 8 * i, &eight, 8);
  }
}

void read_simple(BlockType type, const uint8_t* from, Unpacked& block) {
  block.scale = half_at(from);
  from += 2;
  if (type == BlockType::kQ4_1 || type == BlockType::kQ5_1) {
    block.minimum = half_at(from);
    from += 2;
  }
  if (type == BlockType::kQ8_0) {
    for (int i = 0; i < 32; ++i) block.values[i] = from[i] ^ 0x80;
    return;
  }
  const bool fifth = type == BlockType::kQ5_0 || type == BlockType::kQ5_1;
  read_nibbles(from + (fifth ? 4 : 0), block.values.data());
  if (fifth) read_fifth(from, block.values.data());
}

// Eight scales and minima of 6 bits in 12 bytes.
void read_six_bits(const uint8_t* from, Unpacked& block) {
  for (int j = 0; j < 8; ++j) {
    block.scales[j] = j < 4 ? from[j] & 63 : byte((from[j + 4] & 15) | (from[j - 4] >> 6) << 4);
    block.minima[j] = j < 4 ? from[j + 4] & 63 : byte(from[j + 4] >> 4 | (from[j] >> 6) << 4);
  }
}

void read_k(BlockType type, const uint8_t* from, Unpacked& block) {
  block.scale = half_at(from);
  block.minimum = half_at(from + 2) ^ 0x8000;  // it is subtracted
  read_six_bits(from + 4, block);
  const uint8_t* high = from + 16;
  const uint8_t* low = type == BlockType::kQ5_K ? high + 32 : high;
  for (int group = 0; group < kMost / 32; ++group) {
    uint8_t* const values = block.values.data() + 32 * group;
    for (int lane = 0; lane < 32; ++lane)
      values[lane] = low[group / 2 * 32 + lane] >> group % 2 * 4 & 15;
    if (type != BlockType::kQ5_K) continue;
    for (int lane = 0; lane < 32; ++lane) values[lane] |= byte((high[lane] >> group & 1) << 4);
  }
}

void read_q6_k(const uint8_t* from, Unpacked& block) {
  const uint8_t* high = from + 128;
  for (int run = 0; run < kMost / 32; ++run) {
    const int half = run / 4, quarter = run % 4;
    for (int lane = 0; lane < 32; ++lane) {
      const int low = from[half * 64 + quarter % 2 * 32 + lane] >> quarter / 2 * 4 & 15;
      block.values[32 * run + lane] = byte(low | (high[half * 32 + lane] >> quarter * 2 & 3) << 4);
    }
  }
  std::memcpy(block.scales.data(), from + 192, 16);
  block.scale = half_at(from + 208);
}

void read(BlockType type, const uint8_t* from, Unpacked& block) {
  switch (type) {
    case BlockType::kQ4_K:
    case BlockType::kQ5_K:
      return read_k(type, from, block);
    case BlockType::kQ6_K:
      return read_q6_k(from, block);
    default:
      return read_simple(type, from, block);
  }
}

// Four values of 8 bits. No shift below moves a bit to the next value.
uint32_t four_at(const uint8_t* from) {
  uint32_t four;
  std::memcpy(&four, from, 4);
  return four;
}

// `values` of an output's group, by steps of four inputs.
void write_group(int bits, int64_t group, const uint8_t* values, int64_t lane, uint8_t* to) {
  constexpr int64_t kVector = 64;
  const auto put = [&](int64_t vector, uint32_t four) {
    std::memcpy(to + vector * kVector + 4 * lane, &four, 4);
  };
  const int64_t steps = group / 4;
  if (bits == 8) {
    for (int64_t step = 0; step < steps; ++step) put(step, four_at(values + 4 * step));
    return;
  }
  if (bits == 4) {
    for (int64_t step = 0; step < steps; step += 2)
      put(step / 2, four_at(values + 4 * step) | four_at(values + 4 * step + 4) << 4);
    return;
  }
  for (int64_t step = 0; step < steps; step += 4) {
    uint32_t high = 0, low[4];
    for (int i = 0; i < 4; ++i) {
      const uint32_t four = four_at(values + 4 * (step + i));
      high |= (four >> 4 & 0x03030303u) << 2 * i;
      low[i] = four & 0x0f0f0f0fu;
    }
    put(step / 4 * 3, high);
    put(step / 4 * 3 + 1, low[0] | low[1] << 4);
    put(step / 4 * 3 + 2, low[2] | low[3] << 4);
  }
}

void write(const BlockLayout& layout, const Unpacked& block, int64_t lane, uint8_t* to) {
  std::memcpy(to + 2 * lane, &block.scale, 2);
  std::memcpy(to + core::kHeadBytes / 2 + 2 * lane, &block.minimum, 2);
  uint8_t* const weights = to + layout.head_bytes;
  for (int64_t g = 0; g < layout.groups; ++g) {
    if (layout.form.scaled) {
      uint8_t* const scales = to + core::kHeadBytes + g * layout.scale_bytes;
      scales[lane] = block.scales[static_cast<size_t>(g)];
      if (layout.form.minima)
        scales[core::kBlockOutputs + lane] = block.minima[static_cast<size_t>(g)];
    }
    write_group(layout.form.bits, layout.form.group, block.values.data() + g * layout.form.group,
                lane, weights + g * layout.group_bytes);
  }
}

// The packed weight of input i of a group.
int weight_at(int bits, const uint8_t* weights, int64_t lane, int64_t i) {
  const auto at = [&](int64_t vector) { return weights[64 * vector + 4 * lane + i % 4]; };
  const int64_t step = i / 4;
  if (bits == 8) return at(step);
  if (bits == 4) return at(step / 2) >> step % 2 * 4 & 15;
  const int64_t run = step / 4 * 3, of_run = step % 4;
  return (at(run) >> 2 * of_run & 3) << 4 | (at(run + 1 + of_run / 2) >> of_run % 2 * 4 & 15);
}

void read_row(const BlockLayout& layout, const uint8_t* tile, int64_t lane, float* to) {
  const BlockForm& form = layout.form;
  const auto half = [&](const uint8_t* from) {
    return core::to_float(core::Float16{half_at(from + 2 * lane)});
  };
  for (int64_t i = 0; i < layout.blocks; ++i, tile += layout.block_bytes) {
    for (int64_t g = 0; g < layout.groups; ++g) {
      float scale = half(tile), minimum = half(tile + core::kHeadBytes / 2);
      if (form.scaled) {
        const uint8_t* const whole = tile + core::kHeadBytes + g * layout.scale_bytes + lane;
        scale *= form.minima ? static_cast<float>(*whole)
                             : static_cast<float>(static_cast<int8_t>(*whole));
        if (form.minima) minimum *= static_cast<float>(whole[core::kBlockOutputs]);
      }
      const uint8_t* const weights = tile + layout.head_bytes + g * layout.group_bytes;
      for (int64_t input = 0; input < form.group; ++input) {
        const int value = weight_at(form.bits, weights, lane, input) - form.offset;
        const float weight = scale * static_cast<float>(value);
        *to++ = form.minima ? weight + minimum : weight;
      }
    }
  }
}

}  // namespace

void block_pack(const BlockPackParams& params, const Executor& executor) {
  const BlockLayout layout(params.shape);
  const int64_t row_bytes = layout.blocks * layout.form.file_bytes;
  const int64_t tiles = (params.rows + core::kBlockOutputs - 1) / core::kBlockOutputs;
  uint8_t* const packed = params.packed + params.first / core::kBlockOutputs * layout.tile_bytes;
  spread(executor, tiles, 1, [&](int64_t begin, int64_t end) {
    std::memset(packed + begin * layout.tile_bytes, 0,
                static_cast<size_t>((end - begin) * layout.tile_bytes));
    Unpacked block;  // fields that a type lacks stay 0
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t first = tile * core::kBlockOutputs;
      const int64_t count = std::min(core::kBlockOutputs, params.rows - first);
      for (int64_t lane = 0; lane < count; ++lane) {
        const uint8_t* from = params.blocks + (first + lane) * row_bytes;
        uint8_t* to = packed + tile * layout.tile_bytes;
        for (int64_t i = 0; i < layout.blocks; ++i) {
          read(params.shape.type, from, block);
          write(layout, block, lane, to);
          from += layout.form.file_bytes;
          to += layout.block_bytes;
        }
      }
    }
  });
}

void block_rows(const BlockRowsParams& params, const Executor& executor) {
  constexpr int64_t kAtOnce = 8;
  const BlockLayout layout(params.shape);
  spread(executor, params.count, kAtOnce, [&](int64_t begin, int64_t end) {
    const core::FloatMode mode;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = params.rows[i];
      read_row(layout, params.packed + row / core::kBlockOutputs * layout.tile_bytes,
               row % core::kBlockOutputs, params.y + i * params.shape.inputs);
    }
  });
}

}  // namespace polyspec::cpu
