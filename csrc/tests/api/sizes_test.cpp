// Sizes of 0, below 0 and so large that products of them overflow, for every operator: a call with
// null tensors is refused, or has nothing to do, and a workspace has the right number of bytes or
// is refused. And packed weights at the end of a page, read as weights of a larger shape.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "polyspec/blocks.hpp"
#include "polyspec/decoder.hpp"
#include "polyspec/kv_cache.hpp"
#include "polyspec/layer.hpp"
#include "polyspec/round_state.hpp"
#include "polyspec/verify_tree.hpp"
#include "support/aligned.hpp"
#include "support/check.hpp"

namespace {

using namespace polyspec;
__extension__ typedef __int128 Wide;

constexpr int kCalls = 4000;
constexpr int64_t kAddresses = int64_t{1} << 60;  // no workspace is larger

class Sizes {
 public:
  // A size that is often a small one, and then one that a check may forget.
  int64_t any() {
    static const int64_t kOdd[] = {INT64_MIN,      -1,        0,       INT64_MAX, 1ll << 20,
                                   1ll << 31,      1ll << 32, 1 << 30, 1ll << 40, 1ll << 62,
                                   (1ll << 62) + 3};
    const uint64_t number = engine_();
    return number % 4 == 0 ? kOdd[number / 4 % std::size(kOdd)]
                           : static_cast<int64_t>(number / 4 % 4);
  }
  int64_t multiple_of(int64_t step) { return step * (1 + static_cast<int64_t>(engine_() % 3)); }

 private:
  std::mt19937_64 engine_{7};
};

// Without tensors a call is good only where one of these sizes is 0.
void expect_nothing_to_do(const Result& result, std::initializer_list<int64_t> sizes) {
  bool nothing = false;
  for (const int64_t size : sizes) nothing = nothing || size == 0;
  if (result.ok()) CHECK(nothing);
  if (!result.ok()) CHECK(result.code == Result::Code::kInvalidArgument && result.message[0] != 0);
}

void test_layers(Sizes& sizes) {
  RmsNormParams norm;
  norm.epsilon = 1e-5f;
  norm.tokens = sizes.any();
  norm.width = sizes.any();
  expect_nothing_to_do(rms_norm(norm), {norm.tokens});
  RotaryParams turn;
  turn.batch = sizes.any();
  turn.tokens = sizes.any();
  turn.heads = sizes.any();
  turn.groups = sizes.any();
  turn.width = sizes.multiple_of(32);
  turn.angles = sizes.any();
  expect_nothing_to_do(rotary(turn), {turn.batch, turn.tokens});
  GatedParams gates;
  gates.tokens = sizes.any();
  gates.width = sizes.any();
  expect_nothing_to_do(gated(gates), {gates.tokens, gates.width});
}

void test_attention(Sizes& sizes) {
  AttentionParams p;
  p.batch = sizes.any();
  p.tokens = sizes.any();
  p.groups = sizes.any();
  p.heads = p.groups;
  p.length = sizes.any();
  p.width = sizes.multiple_of(32);
  p.value_width = sizes.multiple_of(32);
  expect_nothing_to_do(attention(p), {p.batch, p.tokens});
  const int64_t bytes = attention_workspace_bytes(p);
  if (bytes < 0) {
    CHECK_EQ(-1, bytes);
    CHECK(attention(p).code == Result::Code::kInvalidArgument);
    return;
  }
  const Wide spans = (Wide{p.length} + kAttentionSpan - 1) / kAttentionSpan;
  CHECK(Wide{bytes} == Wide{p.batch} * p.heads * p.tokens * spans * (p.value_width + 17) * 4);
  CHECK(bytes < kAddresses);
}

void test_products(Sizes& sizes) {
  const int64_t outputs = sizes.any(), inputs = sizes.any(), tokens = sizes.any();
  const DenseShape dense{outputs, inputs, DType::kFloat32};
  const Int4Shape int4{outputs, inputs, 32, DType::kFloat32};
  const BlockShape block{outputs, inputs, BlockType::kQ8_0};
  for (const int64_t bytes :
       {dense_packed_bytes(dense), int4_packed_bytes(int4), block_packed_bytes(block)}) {
    CHECK(bytes == -1 || Wide{bytes} >= Wide{outputs} * inputs / 2 + kPackedLabelBytes);
  }
  for (const int64_t bytes :
       {dense_workspace_bytes(dense, tokens), int4_workspace_bytes(int4, tokens),
        block_workspace_bytes(block, tokens)}) {
    CHECK(bytes >= -1 && bytes < kAddresses);
  }
  DenseProductParams p;
  p.shape = dense;
  p.tokens = tokens;
  expect_nothing_to_do(dense_product(p), {tokens});
}

void test_caches(Sizes& sizes) {
  const auto fill = [&](NewTokens* in) {
    in->batch = sizes.any();
    in->heads = sizes.any();
    in->tokens = sizes.any();
    in->key_dim = sizes.any();
    in->value_dim = sizes.any();
    in->element_size = 4;
  };
  AppendParams contiguous;
  fill(&contiguous.in);
  contiguous.capacity = sizes.any();
  expect_nothing_to_do(append(contiguous), {contiguous.in.batch});
  PagedAppendParams paged;
  fill(&paged.in);
  paged.pages = sizes.any();
  paged.page_size = sizes.any();
  paged.max_pages = sizes.any();
  expect_nothing_to_do(append_paged(paged), {paged.in.batch});
  PagesParams pages;
  pages.batch = sizes.any();
  pages.pages = sizes.any();
  pages.page_size = sizes.any();
  pages.max_pages = sizes.any();
  expect_nothing_to_do(reserve_pages(pages), {pages.batch});
  expect_nothing_to_do(truncate_pages(pages), {pages.batch});
  CompactTreeParams tree;
  tree.layers = sizes.any();
  tree.batch = sizes.any();
  tree.heads = sizes.any();
  tree.capacity = sizes.any();
  tree.key_dim = sizes.any();
  tree.value_dim = sizes.any();
  tree.path_len = sizes.any();
  tree.element_size = 4;
  expect_nothing_to_do(compact_tree(tree), {tree.layers, tree.batch});
}

void test_rounds(Sizes& sizes) {
  RoundParams in;
  in.shape.levels = static_cast<int32_t>(sizes.any());
  in.shape.steps = sizes.any();
  in.shape.capacity = sizes.any();
  in.batch = sizes.any();
  ScheduleDueParams due;
  due.in = in;
  expect_nothing_to_do(schedule_due(due), {in.batch});
  ScheduleNextParams next;
  next.in = in;
  next.level = 1;
  next.width = sizes.any();
  next.most = sizes.any();
  expect_nothing_to_do(schedule_next(next), {in.batch});
  ScheduleReportParams report;
  report.in = in;
  report.level = 1;
  report.width = sizes.any();
  report.num_eos = sizes.any();
  expect_nothing_to_do(schedule_report(report), {in.batch});
}

void test_sampling(Sizes& sizes) {
  SampleParams one;
  one.batch = sizes.any();
  one.vocab = sizes.any();
  expect_nothing_to_do(sample(one), {one.batch});
  VerifyParams chain;
  chain.batch = sizes.any();
  chain.draft_len = sizes.any();
  chain.vocab = sizes.any();
  chain.cut.eos_count = sizes.any();
  expect_nothing_to_do(verify(chain), {chain.batch});
  VerifyTreeParams tree;
  tree.batch = sizes.any();
  tree.nodes = sizes.any();
  tree.vocab = sizes.any();
  expect_nothing_to_do(verify_tree(tree), {tree.batch});
}

// Errors that null pointers would hide: tensors of impossible sizes, by name.
void test_messages() {
  float some[1] = {};
  int64_t ids[1] = {};
  int32_t status[1] = {};
  VerifyParams p;
  p.batch = int64_t{1} << 33;
  p.draft_len = int64_t{1} << 31;
  p.vocab = 1 << 20;
  p.target_logits = some;
  p.draft_tokens = p.tokens = p.num_accepted = ids;
  p.logprobs = some;
  p.status = status;
  CHECK_EQ(std::string("draft_len: expected at most 2^56 elements in all, given 8589934592 times "
                       "2147483648 or more"),
           std::string(verify(p).message));
  PagesParams pages;
  pages.batch = 4;
  pages.pages = pages.page_size = 1;
  pages.max_pages = int64_t{1} << 62;
  int32_t page = 0;
  int64_t lengths[4] = {1ll << 61, 1ll << 61, 1ll << 61, 1ll << 61}, held[4] = {}, count = 1;
  int32_t statuses[4] = {};
  pages.lengths = lengths;
  pages.block_table = pages.free_pages = &page;
  pages.held = held;
  pages.free_count = &count;
  pages.status = statuses;
  CHECK_EQ(std::string("batch, max_pages: expected at most 2^56 elements in all, given 4 times "
                       "4611686018427387904 or more"),
           std::string(reserve_pages(pages).message));
  CompactTreeParams tree;
  tree.layers = tree.batch = int64_t{1} << 32;
  tree.heads = tree.capacity = tree.key_dim = tree.value_dim = 1;
  tree.element_size = 4;
  void* layer[1] = {some};
  tree.keys = tree.values = layer;
  tree.lengths = lengths;
  tree.status = status;
  CHECK_EQ(std::string("layers, batch, heads, path_len, key_dim, value_dim: expected at most 2^56 "
                       "elements in all, given 4294967296 times 4294967296 or more"),
           std::string(compact_tree(tree).message));
}

// Memory that ends where an unreadable page begins.
class AtPageEnd {
 public:
  explicit AtPageEnd(int64_t bytes) : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
    pages_ = (static_cast<size_t>(bytes) + page_ - 1) / page_ + 1;
    memory_ = static_cast<char*>(
        mmap(nullptr, pages_ * page_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    CHECK(memory_ != MAP_FAILED);
    data = memory_ + (pages_ - 1) * page_ - bytes;
    CHECK(mprotect(memory_ + (pages_ - 1) * page_, page_, PROT_NONE) == 0);
  }
  ~AtPageEnd() { munmap(memory_, pages_ * page_); }
  AtPageEnd(const AtPageEnd&) = delete;
  AtPageEnd& operator=(const AtPageEnd&) = delete;

  char* data;

 private:
  size_t page_, pages_;
  char* memory_;
};

// A product, unpacking or check by a larger shape is refused before anything outside is read.
void test_a_larger_shape_than_the_packed_one() {
  constexpr int64_t kLarge = 1 << 16;
  std::vector<float> x(32), y(kLarge), scales(kLarge), zeros(kLarge);
  std::vector<uint8_t> values(static_cast<size_t>(kLarge * 32)), blocks(34);
  const support::Aligned workspace = support::aligned(1 << 20);
  const auto refused = [&](auto params) {
    params.tokens = 1;
    params.x = x.data();
    params.x_stride = 32;
    params.y = y.data();
    params.y_stride = kLarge;
    params.workspace = workspace.get();
    Result result;
    using Params = decltype(params);
    if constexpr (std::is_same_v<Params, DenseProductParams>) result = dense_product(params);
    if constexpr (std::is_same_v<Params, Int4ProductParams>) result = int4_product(params);
    if constexpr (std::is_same_v<Params, BlockProductParams>) result = block_product(params);
    CHECK(std::string(result.message).find("packed: expected layout") == 0);
  };
  DensePackParams dense;
  dense.shape = {1, 32, DType::kFloat32};
  dense.weights = x.data();
  dense.weights_stride = 32;
  const AtPageEnd dense_memory(dense_packed_bytes(dense.shape));
  dense.packed = dense_memory.data;
  CHECK(dense_pack(dense).ok());
  DenseProductParams dense_call;
  dense_call.shape = {kLarge, 32, DType::kFloat32};
  dense_call.packed = dense.packed;
  refused(dense_call);

  Int4PackParams int4;
  int4.shape = {1, 32, 32, DType::kFloat32};
  int4.values = values.data();
  int4.scales = scales.data();
  int4.zeros = zeros.data();
  const AtPageEnd int4_memory(int4_packed_bytes(int4.shape));
  int4.packed = reinterpret_cast<uint8_t*>(int4_memory.data);
  CHECK(int4_pack(int4).ok());
  Int4ProductParams int4_call;
  int4_call.shape = {kLarge, 32, 32, DType::kFloat32};
  int4_call.packed = int4.packed;
  refused(int4_call);
  Int4UnpackParams unpack;
  unpack.shape = int4_call.shape;
  unpack.packed = int4.packed;
  unpack.values = values.data();
  unpack.scales = scales.data();
  unpack.zeros = zeros.data();
  CHECK(!int4_unpack(unpack).ok());

  BlockPackParams block;
  block.shape = {1, 32, BlockType::kQ8_0};
  block.blocks = blocks.data();
  const AtPageEnd block_memory(block_packed_bytes(block.shape));
  block.packed = reinterpret_cast<uint8_t*>(block_memory.data);
  CHECK(block_pack(block).ok());
  BlockProductParams block_call;
  block_call.shape = {kLarge, 32, BlockType::kQ8_0};
  block_call.packed = block.packed;
  refused(block_call);
}

}  // namespace

int main() {
  Sizes sizes;
  for (int i = 0; i < kCalls; ++i) {
    test_layers(sizes);
    test_attention(sizes);
    test_products(sizes);
    test_caches(sizes);
    test_rounds(sizes);
    test_sampling(sizes);
  }
  test_messages();
  test_a_larger_shape_than_the_packed_one();
  return 0;
}
