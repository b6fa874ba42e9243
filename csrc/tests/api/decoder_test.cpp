// decoder_layers over small float32 layers: a block of tokens has the bits of the same tokens one
// by one; the states that enter a layer are the outputs of the layers below it; refusals.
#include "polyspec/decoder.hpp"

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "support/aligned.hpp"
#include "support/check.hpp"

namespace {

using polyspec::DecoderLayer;
using polyspec::DecoderParams;
using polyspec::DenseShape;
using polyspec::DType;
using polyspec::PackedMatrices;
using polyspec::PackedMatrix;
using support::Aligned;
using support::aligned;

constexpr int64_t kLayers = 3, kWidth = 24, kHeads = 4, kGroups = 2, kHead = 32, kGated = 40;
constexpr int64_t kCapacity = 16;

std::vector<float> random_values(std::mt19937& engine, int64_t count) {
  std::normal_distribution<float> normal(0.0f, 0.3f);
  std::vector<float> made(static_cast<size_t>(count));
  for (float& value : made) value = normal(engine);
  return made;
}

// A matrix in parts, one below the other.
struct Matrix {
  Matrix(std::mt19937& engine, int64_t outputs, int64_t inputs, int64_t count) {
    const std::vector<float> weights = random_values(engine, outputs * inputs);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t begin = outputs * i / count, end = outputs * (i + 1) / count;
      const DenseShape shape{end - begin, inputs, DType::kFloat32};
      packed.push_back(aligned(polyspec::dense_packed_bytes(shape)));
      polyspec::DensePackParams pack;
      pack.shape = shape;
      pack.weights = weights.data() + begin * inputs;
      pack.weights_stride = inputs;
      pack.packed = packed.back().get();
      CHECK(polyspec::dense_pack(pack).ok());
      PackedMatrix part;
      part.outputs = shape.outputs;
      part.inputs = inputs;
      part.packed = pack.packed;
      parts.push_back(part);
    }
  }
  PackedMatrices view() const { return {parts.data(), static_cast<int64_t>(parts.size())}; }

  std::vector<Aligned> packed;
  std::vector<PackedMatrix> parts;
};

// The layers of a model, without a cache: the same for any split of its matrices.
struct Model {
  explicit Model(int64_t parts) {
    std::mt19937 engine(1);
    for (int64_t i = 0; i < kLayers; ++i) {
      matrices.emplace_back(engine, (kHeads + 2 * kGroups) * kHead, kWidth, parts);
      matrices.emplace_back(engine, kWidth, kHeads * kHead, parts);
      matrices.emplace_back(engine, 2 * kGated, kWidth, parts);
      matrices.emplace_back(engine, kWidth, kGated, parts);
      norms.push_back(random_values(engine, kWidth));
      norms.push_back(random_values(engine, kWidth));
      norms.push_back(random_values(engine, kHead));
      norms.push_back(random_values(engine, kHead));
    }
  }
  std::vector<Matrix> matrices;
  std::vector<std::vector<float>> norms;
};

// One text, and its tokens read so far.
struct Text {
  explicit Text(const Model& model) {
    for (int64_t i = 0; i < kLayers; ++i) {
      const size_t at = static_cast<size_t>(i);
      DecoderLayer layer;
      layer.attention_norm = model.norms[4 * at].data();
      layer.gated_norm = model.norms[4 * at + 1].data();
      layer.query_norm = model.norms[4 * at + 2].data();
      layer.key_norm = model.norms[4 * at + 3].data();
      layer.attention_in = model.matrices[4 * at].view();
      layer.attention_out = model.matrices[4 * at + 1].view();
      layer.gated_in = model.matrices[4 * at + 2].view();
      layer.gated_out = model.matrices[4 * at + 3].view();
      keys.emplace_back(kGroups * kCapacity * kHead);
      values.emplace_back(kGroups * kCapacity * kHead);
      layer.keys = keys.back().data();
      layer.values = values.back().data();
      layers.push_back(layer);
    }
  }

  DecoderParams params(const float* x, int64_t tokens) {
    turns.assign(static_cast<size_t>(2 * kCapacity * kHead), 0.0f);
    for (int64_t t = 0; t < kCapacity; ++t) {
      for (int64_t i = 0; i < kHead; ++i) {
        const float angle = static_cast<float>(t) / static_cast<float>(1 + i % (kHead / 2));
        turns[static_cast<size_t>(t * kHead + i)] = std::cos(angle);
        turns[static_cast<size_t>((kCapacity + t) * kHead + i)] = std::sin(angle);
      }
    }
    DecoderParams p;
    p.layers = layers.data();
    p.count = kLayers;
    p.batch = 1;
    p.tokens = tokens;
    p.width = kWidth;
    p.heads = kHeads;
    p.groups = kGroups;
    p.head_width = kHead;
    p.gated_width = kGated;
    p.epsilon = 1e-5f;
    p.scale = 0.2f;
    p.x = x;
    p.angles = kCapacity;
    p.cosine = turns.data();
    p.sine = turns.data() + kCapacity * kHead;
    p.positions = &length;
    p.position_step = 1;
    p.capacity = kCapacity;
    p.span = length + tokens;
    for (int64_t (*stride)[3] : {&p.key_stride, &p.value_stride}) {
      (*stride)[2] = kHead;
      (*stride)[1] = kCapacity * kHead;
      (*stride)[0] = kGroups * kCapacity * kHead;
    }
    p.lengths = &length;
    p.causal = true;
    p.taken = taken.data();
    p.num_taken = static_cast<int64_t>(taken.size());
    return p;
  }

  // The states after the last layer.
  std::vector<float> read(const float* x, int64_t tokens) {
    DecoderParams p = params(x, tokens);
    std::vector<float> y(static_cast<size_t>(tokens * kWidth));
    states.assign(taken.size() * y.size(), 0.0f);
    int32_t status = -1;
    const Aligned workspace = aligned(polyspec::decoder_workspace_bytes(p));
    p.y = y.data();
    p.states = states.data();
    p.status = &status;
    p.workspace = workspace.get();
    const polyspec::Result result = polyspec::decoder_layers(p);
    CHECK_EQ(std::string(), result.message);
    CHECK_EQ(0, status);
    length += tokens;
    return y;
  }

  std::vector<DecoderLayer> layers;
  std::vector<std::vector<float>> keys, values;
  std::vector<float> turns, states;
  std::vector<int64_t> taken;
  int64_t length = 0;
};

void test_a_block_is_its_tokens_one_by_one(const Model& model, const std::vector<float>& x) {
  Text block(model), single(model);
  const std::vector<float> whole = block.read(x.data(), 6);
  for (int64_t t = 0; t < 6; ++t) {
    const std::vector<float> one = single.read(x.data() + t * kWidth, 1);
    CHECK(std::memcmp(one.data(), whole.data() + t * kWidth, sizeof(float) * kWidth) == 0);
  }
  for (const float value : whole) CHECK(std::isfinite(value));
}

void test_parts_are_one_matrix(const Model& model, const std::vector<float>& x) {
  const Model whole(1);
  Text in_parts(model), at_once(whole);
  const std::vector<float> given = in_parts.read(x.data(), 6);
  const std::vector<float> wanted = at_once.read(x.data(), 6);
  CHECK(std::memcmp(given.data(), wanted.data(), sizeof(float) * wanted.size()) == 0);
}

void test_states_that_enter_a_layer(const Model& model, const std::vector<float>& x) {
  Text all(model), lower(model);
  all.taken = {0, 2};
  all.read(x.data(), 6);
  const size_t size = static_cast<size_t>(6 * kWidth);
  CHECK(std::memcmp(all.states.data(), x.data(), sizeof(float) * size) == 0);
  DecoderParams p = lower.params(x.data(), 6);
  p.count = 2;  // the layers below the third
  std::vector<float> y(size);
  int32_t status = -1;
  const Aligned workspace = aligned(polyspec::decoder_workspace_bytes(p));
  p.y = y.data();
  p.status = &status;
  p.workspace = workspace.get();
  const polyspec::Result result = polyspec::decoder_layers(p);
  CHECK_EQ(std::string(), result.message);
  CHECK(std::memcmp(all.states.data() + size, y.data(), sizeof(float) * size) == 0);
}

void refused(const DecoderParams& params, const std::string& message) {
  CHECK_EQ(int64_t{-1}, polyspec::decoder_workspace_bytes(params));
  CHECK_EQ(message, std::string(polyspec::decoder_layers(params).message));
}

void test_refusals(const Model& model, const std::vector<float>& x) {
  Text text(model);
  DecoderParams p = text.params(x.data(), 2);
  p.count = 0;
  refused(p, "count: expected >= 1, given 0");
  p = text.params(x.data(), 2);
  p.gated_width = kGated + 1;
  refused(p, "gated_in: expected outputs of the layer's shape, given 80");
  const int64_t wrong[] = {1, 1};
  p = text.params(x.data(), 2);
  p.taken = wrong;
  p.num_taken = 2;
  refused(p, "taken: expected ascending numbers of layers, given 1");
  p = text.params(x.data(), 2);
  CHECK_EQ(std::string("y: expected a pointer, given null"),
           std::string(polyspec::decoder_layers(p).message));
  p.tokens = 0;
  CHECK(polyspec::decoder_layers(p).ok());
  for (const int64_t span : {int64_t{-1}, int64_t{0}, kCapacity + 1, int64_t{400}}) {
    p = text.params(x.data(), 2);
    p.span = span;
    refused(p, "span: expected [1, capacity], given " + std::to_string(span));
  }
  p = text.params(x.data(), 2);
  p.capacity = 0;
  refused(p, "capacity: expected >= 1, given 0");
  p = text.params(x.data(), 2);
  p.batch = p.tokens = int64_t{1} << 32;  // 2^64 is no 0
  refused(p,
          "batch, tokens, width: expected at most 2^56 elements in all, given 4294967296 times "
          "4294967296 or more");
  p = text.params(x.data(), 2);
  PackedMatrix older = text.layers[1].gated_out.parts[0];
  older.layout = static_cast<polyspec::PackedLayout>(1);  // of an earlier release
  text.layers[1].gated_out = {&older, 1};
  refused(p, "layout: expected that of a packed matrix, given 1");
  p.heads = p.groups = int64_t{1} << 62;
  CHECK_EQ(int64_t{-1}, polyspec::decoder_workspace_bytes(p));
}

}  // namespace

int main() {
  const Model model(3);
  std::mt19937 engine(2);
  const std::vector<float> x = random_values(engine, 6 * kWidth);
  test_a_block_is_its_tokens_one_by_one(model, x);
  test_parts_are_one_matrix(model, x);
  test_states_that_enter_a_layer(model, x);
  test_refusals(model, x);
  return 0;
}
