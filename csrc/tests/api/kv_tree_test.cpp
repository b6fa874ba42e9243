// polyspec::compact_tree against separate copies; and the work of one CUDA thread.
#include "support/check.hpp"
#include "support/kv_blocks.hpp"

namespace {

using namespace kv_blocks;

void test_compact_tree() {
  std::mt19937_64 random(23);
  const int64_t layers = 3, rows = 6, heads = 2, capacity = 20, path_len = 9;
  for (const int32_t size : {1, 2, 4}) {
    for (int repeat = 0; repeat < 24; ++repeat) {
      const int64_t key_dim = repeat % 3 == 0 ? 16 : 6, value_dim = repeat % 3 == 1 ? 16 : 5;
      std::vector<Block> keys, values;
      for (int64_t l = 0; l < layers; ++l) {
        keys.emplace_back(rows, heads, capacity, key_dim, size, repeat % 2);
        values.emplace_back(rows, heads, capacity, value_dim, size, repeat % 2);
        keys.back().fill(random);
        values.back().fill(random);
      }
      std::vector<int64_t> lengths, path(rows * path_len, -1);
      for (int64_t b = 0; b < rows; ++b) {
        lengths.push_back(static_cast<int64_t>(random() % 8));
        int64_t node = static_cast<int64_t>(random() % 3);
        for (int64_t j = 0; j < path_len && node < capacity - lengths[b]; ++j) {
          if (random() % 8 == 0) break;
          path[b * path_len + j] = node;
          node += 1 + static_cast<int64_t>(random() % 3);
        }
      }
      std::vector<int32_t> expected_status(rows, 0);
      path[1 * path_len] = capacity - lengths[1];  // one past the cache
      path[2 * path_len] = 4, path[2 * path_len + 1] = 4;
      lengths[3] = -1;
      expected_status[1] = expected_status[2] = kStatusBadPath;
      expected_status[3] = kStatusBadLength;

      std::vector<Block> wanted_keys = keys, wanted_values = values;
      std::vector<int64_t> wanted_lengths = lengths;
      for (int64_t b = 0; b < rows; ++b) {
        for (int64_t j = 0; expected_status[b] == 0 && j < path_len && path[b * path_len + j] >= 0;
             ++j) {
          wanted_lengths[b] = lengths[b] + j + 1;
          for (int64_t l = 0; l < layers; ++l)
            for (int64_t h = 0; h < heads; ++h) {
              const int64_t from = lengths[b] + path[b * path_len + j], to = lengths[b] + j;
              std::memcpy(wanted_keys[l].at(b, h, to), keys[l].at(b, h, from), key_dim * size);
              std::memcpy(wanted_values[l].at(b, h, to), values[l].at(b, h, from),
                          value_dim * size);
            }
        }
      }
      // Run `body` on copies of the layers and compare.
      const auto run = [&](auto body) {
        std::vector<Block> k = keys, v = values;
        std::vector<void*> key_bases, value_bases;
        for (Block& block : k) key_bases.push_back(block.data());
        for (Block& block : v) value_bases.push_back(block.data());
        std::vector<int64_t> new_lengths(rows, -77);
        std::vector<int32_t> status(rows, -77);
        CompactTreeParams p;
        p.layers = layers;
        p.batch = rows;
        p.heads = heads;
        p.capacity = capacity;
        p.key_dim = key_dim;
        p.value_dim = value_dim;
        p.element_size = size;
        p.keys = key_bases.data();
        p.values = value_bases.data();
        std::copy_n(k[0].stride, 3, p.key_stride);
        std::copy_n(v[0].stride, 3, p.value_stride);
        p.path_len = path_len;
        p.lengths = lengths.data();
        p.path = path.data();
        p.new_lengths = new_lengths.data();
        p.status = status.data();
        body(p);
        for (int64_t l = 0; l < layers; ++l) {
          CHECK(wanted_keys[l] == k[l]);
          CHECK(wanted_values[l] == v[l]);
        }
        CHECK(wanted_lengths == new_lengths);
        CHECK(expected_status == status);
      };
      run([](const CompactTreeParams& p) { CHECK(compact_tree(p).ok()); });
      run([&](const CompactTreeParams& p) {
        with_lane(core::lane_bytes(p), [&](auto lane) {
          using Lane = decltype(lane);
          const int64_t lanes = core::token_lanes<Lane>(key_dim, value_dim, size).all();
          for (const int64_t i : shuffled(layers * rows * heads * lanes, random)) {
            core::compact_lane<Lane>(p, i / lanes / heads / rows, i / lanes / heads % rows,
                                     i / lanes % heads, static_cast<int32_t>(i % lanes));
          }
        });
      });
    }
  }
}

void test_arguments() {
  CompactTreeParams tree;
  tree.heads = tree.capacity = tree.key_dim = tree.value_dim = 1;
  tree.element_size = 4;
  CHECK(compact_tree(tree).ok());  // no layers: nothing to do
  tree.alignment = 2;
  CHECK(compact_tree(tree).code == Result::Code::kInvalidArgument);
}

}  // namespace

int main() {
  test_compact_tree();
  test_arguments();
  return 0;
}
