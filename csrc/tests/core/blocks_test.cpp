// The product with GGUF blocks of every instruction set of this processor: the baseline's bytes,
// for any number of rows and threads; whole numbers exactly; rows that are not finite; refusals.
// (Against weights that another reader dequantises: python_tests/ops.)
#include "polyspec/blocks.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "api/packed_label.hpp"
#include "cpu/block_layout.hpp"
#include "cpu/block_tables.hpp"
#include "cpu/isa.hpp"
#include "support/aligned.hpp"
#include "support/check.hpp"

namespace {

using polyspec::BlockProductParams;
using polyspec::BlockShape;
using polyspec::BlockType;
using polyspec::cpu::Blocks;
using support::Aligned;
using support::aligned;

constexpr BlockType kTypes[] = {BlockType::kQ4_0, BlockType::kQ4_1, BlockType::kQ5_0,
                                BlockType::kQ5_1, BlockType::kQ8_0, BlockType::kQ4_K,
                                BlockType::kQ5_K, BlockType::kQ6_K};
constexpr uint16_t kHalf = 0x3800;  // 0.5 in float16

// A random matrix of blocks with scales and minima from 1/2 to 1, and activations.
struct Case {
  BlockShape shape;
  int64_t tokens;
  std::vector<uint8_t> blocks;
  std::vector<float> x;
  Aligned packed;

  Case(BlockType type, int64_t outputs, int64_t inputs, int64_t tokens)
      : shape{outputs, inputs, type}, tokens(tokens) {
    std::mt19937_64 random(static_cast<uint64_t>(type));
    std::normal_distribution<float> normal;
    blocks.resize(static_cast<size_t>(outputs * polyspec::block_row_bytes(shape)));
    for (uint8_t& byte : blocks) byte = static_cast<uint8_t>(random());
    const polyspec::core::BlockForm form = polyspec::core::form_of(type);
    const bool last = type == BlockType::kQ6_K;
    for (size_t i = 0; i < blocks.size(); i += static_cast<size_t>(form.file_bytes)) {
      const auto scale = static_cast<uint16_t>(kHalf + random() % 1024);
      const auto minimum = static_cast<uint16_t>(kHalf + random() % 1024);
      std::memcpy(&blocks[i + (last ? 208 : 0)], &scale, 2);
      if (form.minima) std::memcpy(&blocks[i + 2], &minimum, 2);
    }
    for (int64_t i = 0; i < tokens * inputs; ++i) x.push_back(normal(random));
    pack();
  }

  void pack() {
    packed = aligned(polyspec::block_packed_bytes(shape));
    CHECK(polyspec::block_pack({shape, blocks.data(), packed.get()}).ok());
  }

  BlockProductParams params(float* y, const Aligned& workspace) const {
    BlockProductParams made;
    made.shape = shape;
    made.tokens = tokens;
    made.x = x.data();
    made.x_stride = shape.inputs;
    made.packed = packed.get();
    made.y = y;
    made.y_stride = shape.outputs;
    made.workspace = workspace.get();
    return made;
  }

  // `count` rows from `first` on, by one copy; as threads would, in two parts.
  std::vector<float> run(const Blocks& copy, int64_t first, int64_t count) const {
    std::vector<float> y(static_cast<size_t>(count * shape.outputs), 1e30f);
    const Aligned workspace = aligned(polyspec::block_workspace_bytes(shape, count));
    BlockProductParams call = polyspec::at_weights(params(y.data(), workspace));
    call.x = x.data() + first * shape.inputs;
    // In any order, one row by itself.
    if (count > 1) copy.prepare(call, 0, count, 1, count);
    copy.prepare(call, 0, count, 0, 1);
    const int64_t tiles = (shape.outputs + 15) / 16, cut = tiles / 2;
    copy.multiply(call, 0, count, cut, tiles);
    copy.multiply(call, 0, count, 0, cut);
    return y;
  }
};

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void test_copy(const Blocks& copy) {
  for (const BlockType type : kTypes) {
    for (const int64_t outputs : {1, 37, 200}) {
      const Case call(type, outputs, 512, 16);
      const std::vector<float> all = call.run(copy, 0, 16);
      CHECK(same(call.run(polyspec::cpu::kBlocksBaseline, 0, 16), all));
      for (int64_t count = 1; count < 16; ++count) {
        const std::vector<float> some = call.run(copy, 16 - count, count);
        CHECK(same({all.end() - static_cast<ptrdiff_t>(some.size()), all.end()}, some));
      }
    }
  }
  std::printf("%s: baseline's bits, rows alike\n", copy.isa);
}

// The largest weights with the largest activations: no sum overflows or saturates. Outputs have
// scales from 1/2 to 8.
void test_largest(const Blocks& copy) {
  Case call(BlockType::kQ8_0, 16, 64, 2);
  for (size_t block = 0; block < 32; ++block) {
    const auto scale = static_cast<uint16_t>(kHalf + block / 2 % 5 * 1024);
    std::memcpy(&call.blocks[34 * block], &scale, 2);
  }
  for (const int8_t weight : {int8_t{-128}, int8_t{127}}) {
    for (size_t i = 0; i < call.blocks.size(); ++i)
      if (i % 34 > 1) call.blocks[i] = static_cast<uint8_t>(weight);
    call.pack();
    for (const float value : {127.0f, -127.0f}) {
      std::fill(call.x.begin(), call.x.end(), value);
      const std::vector<float> y = call.run(copy, 0, 2);
      for (size_t i = 0; i < y.size(); ++i)
        CHECK_EQ(std::ldexp(32 * value * weight, static_cast<int>(i % 16 % 5)), y[i]);
    }
  }
}

void test_not_finite(const Blocks& copy) {
  for (const BlockType type : {BlockType::kQ4_K, BlockType::kQ6_K}) {
    Case call(type, 20, 256, 3);
    const std::vector<float> before = call.run(copy, 0, 3);
    call.x[256 + 77] = std::numeric_limits<float>::infinity();
    const std::vector<float> after = call.run(copy, 0, 3);
    for (size_t i = 0; i < 60; ++i) {
      if (i / 20 == 1) CHECK(std::isnan(after[i]));
      if (i / 20 != 1) CHECK_EQ(before[i], after[i]);
    }
  }
}

void test_instruction_set(const Blocks& copy) {
  test_copy(copy);
  test_largest(copy);
  test_not_finite(copy);
}

void test_threads() {
  const Case call(BlockType::kQ5_K, 1000, 512, 37);
  const Aligned workspace = aligned(polyspec::block_workspace_bytes(call.shape, call.tokens));
  std::vector<float> serial(static_cast<size_t>(call.tokens * call.shape.outputs));
  std::vector<float> shared = serial;
  static int64_t most = 0;
  const polyspec::Executor backwards{
      [](void*, int64_t n, polyspec::Executor::Body body, void* context) {
        most = n;
        while (n-- > 0) body(context, n);
      },
      nullptr};
  const polyspec::Stream stream = polyspec::Stream::cpu(backwards);
  CHECK(polyspec::block_product(call.params(serial.data(), workspace)).ok());
  CHECK(polyspec::block_product(call.params(shared.data(), workspace), stream).ok());
  CHECK(most > 1);
  CHECK(serial == shared);
  const int64_t bytes = polyspec::block_packed_bytes(call.shape);
  const Aligned packed = aligned(bytes);
  CHECK(polyspec::block_pack({call.shape, call.blocks.data(), packed.get()}, stream).ok());
  CHECK_EQ(0, std::memcmp(packed.get(), call.packed.get(), static_cast<size_t>(bytes)));
  std::vector<int64_t> rows(static_cast<size_t>(call.shape.outputs));
  std::iota(rows.rbegin(), rows.rend(), 0);
  std::vector<float> weights(rows.size() * static_cast<size_t>(call.shape.inputs)), alone = weights;
  const polyspec::BlockRowsParams all{call.shape, call.shape.outputs, rows.data(), packed.get(),
                                      weights.data()};
  most = 0;
  CHECK(polyspec::block_rows(all, stream).ok());
  CHECK(most > 1);
  for (size_t i = 0; i < rows.size(); ++i)
    CHECK(polyspec::block_rows({call.shape, 1, &rows[i], packed.get(), &alone[512 * i]}).ok());
  CHECK(same(weights, alone));
}

// A matrix that is packed by ranges, in any order, over memory that holds something else.
void test_ranges() {
  for (const BlockType type : kTypes) {
    const Case call(type, 37, 512, 1);
    const int64_t bytes = polyspec::block_packed_bytes(call.shape);
    const Aligned packed = aligned(bytes);
    std::memset(packed.get(), 0xa5, static_cast<size_t>(bytes));
    for (const int64_t first : {32, 0}) {
      const uint8_t* from = call.blocks.data() + first * polyspec::block_row_bytes(call.shape);
      const int64_t rows = first == 0 ? 32 : -1;
      CHECK(polyspec::block_pack({call.shape, from, packed.get(), first, rows}).ok());
    }
    CHECK_EQ(0, std::memcmp(packed.get(), call.packed.get(), static_cast<size_t>(bytes)));
  }
}

void test_refusals() {
  for (const BlockShape& shape :
       {BlockShape{16, 128, BlockType::kQ4_K}, BlockShape{16, 48, BlockType::kQ8_0},
        BlockShape{0, 256, BlockType::kQ6_K}, BlockShape{16, 256, static_cast<BlockType>(10)}}) {
    CHECK_EQ(int64_t{-1}, polyspec::block_row_bytes(shape));
    CHECK_EQ(int64_t{-1}, polyspec::block_packed_bytes(shape));
    CHECK_EQ(int64_t{-1}, polyspec::block_workspace_bytes(shape, 1));
  }
  const Case call(BlockType::kQ4_K, 20, 256, 1);
  const Aligned workspace = aligned(polyspec::block_workspace_bytes(call.shape, 1));
  std::vector<float> y(20);
  const BlockProductParams good = call.params(y.data(), workspace);
  CHECK(polyspec::block_product(good).ok());
  const auto refused = [](const BlockProductParams& params, const char* why) {
    const polyspec::Result result = polyspec::block_product(params);
    CHECK(!result.ok());
    CHECK(std::strstr(result.message, why) != nullptr);
  };
  BlockProductParams bad = good;
  bad.shape.type = BlockType::kQ5_K;
  refused(bad, "packed: expected");
  bad = good;
  bad.shape.inputs = 100;
  refused(bad, "inputs: expected whole blocks of 256, given 100");
  bad = good;
  bad.shape.type = static_cast<BlockType>(10);
  refused(bad, "type: expected Q4_0 (2)");
  bad = good;
  bad.x = nullptr;
  refused(bad, "x: expected a pointer");
  bad = good;
  bad.y = workspace.get();
  refused(bad, "y: expected memory apart");
  const polyspec::Stream cuda = polyspec::Stream::on(nullptr);
  CHECK_EQ(static_cast<int>(polyspec::Result::Code::kUnsupported),
           static_cast<int>(polyspec::block_product(good, cuda).code));
  CHECK(!polyspec::block_pack({call.shape, nullptr, call.packed.get()}).ok());
  CHECK(!polyspec::block_pack({call.shape, call.blocks.data(), call.packed.get()}, cuda).ok());
  for (const auto& [first, count] :
       {std::pair{4, 16}, {-16, 16}, {32, 1}, {0, 21}, {0, 15}, {0, 0}})
    CHECK(!polyspec::block_pack({call.shape, call.blocks.data(), call.packed.get(), first, count})
               .ok());
  std::vector<float> weights(256);
  for (const int64_t row : {int64_t{0}, int64_t{19}, int64_t{-1}, int64_t{20}}) {
    const polyspec::BlockRowsParams rows{call.shape, 1, &row, call.packed.get(), weights.data()};
    CHECK_EQ(row >= 0 && row < 20, polyspec::block_rows(rows).ok());
    CHECK(!polyspec::block_rows(rows, cuda).ok());
  }
  const int64_t row = 0;
  polyspec::BlockRowsParams rows{
      {20, 100, BlockType::kQ4_K}, 1, &row, call.packed.get(), weights.data()};
  CHECK(!polyspec::block_rows(rows).ok());
  rows.shape = {20, 256, BlockType::kQ5_K};
  CHECK(!polyspec::block_rows(rows).ok());
  rows = {call.shape, 1, &row, call.packed.get(), nullptr};
  CHECK(!polyspec::block_rows(rows).ok());
}

}  // namespace

int main() {
  for (const auto& copy : polyspec::cpu::kBlocksCopies) {
    if (polyspec::cpu::usable(copy.isa)) test_instruction_set(*copy.table);
  }
  test_threads();
  test_ranges();
  test_refusals();
  return 0;
}
