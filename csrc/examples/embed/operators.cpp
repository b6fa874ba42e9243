// A call of each operator of the C++ interface; polyspec's headers state shapes, strides and
// errors. A call runs on the caller's thread: Stream::cpu(executor) lends it more, Stream::on(cuda)
// queues it.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <vector>

#include "polyspec/polyspec.hpp"

// An operator returns errors of its arguments, and never throws.
static void run(const polyspec::Result& result) {
  if (!result.ok()) throw std::runtime_error(result.message);
}

// Packed weights and workspaces begin at a multiple of 64 bytes.
static auto aligned(int64_t bytes) {
  const auto whole = static_cast<size_t>((bytes + 63) / 64 * 64);
  return std::unique_ptr<void, decltype(&std::free)>(std::aligned_alloc(64, whole), &std::free);
}

// Level 2 draws a token, and level 1 verifies it.
static void sample_and_verify() {
  const std::vector<float> draft_logits{0, 1, 2, 3}, target_logits{0, 1, 5, 2, 3, 0, 0, 1};
  int64_t token, tokens[2], accepted;
  float logprob, logprobs[2];
  int32_t status;
  polyspec::RowStatistics statistics;

  polyspec::SampleParams draft;  // level 2 draws a token at position 7
  draft.batch = 1;
  draft.vocab = 4;
  draft.logits = draft_logits.data();
  draft.sampling.temperature.value = 0.8f;
  draft.draw.seed.value = 42;
  draft.draw.position.value = 7;
  draft.draw.level = 2;
  draft.tokens = &token;
  draft.logprobs = &logprob;
  draft.status = &status;
  draft.statistics = &statistics;  // spares the verification a pass over the row
  run(polyspec::sample(draft));

  polyspec::VerifyParams target;  // level 1 verifies it: rows for the token and for the bonus
  target.batch = 1;
  target.draft_len = 1;
  target.vocab = target.draft_vocab = 4;
  target.target_logits = target_logits.data();
  target.target_stride[1] = 4;
  target.draft_logits = draft_logits.data();
  target.draft_stride[1] = 4;
  target.draft_statistics = &statistics;
  target.draft_tokens = &token;
  target.sampling = draft.sampling;
  target.draw = draft.draw;
  target.draw.level = 1;
  target.tokens = tokens;
  target.num_accepted = &accepted;
  target.logprobs = logprobs;
  target.status = &status;
  run(polyspec::verify(target));
}

// A tree has parents, and the accepted path's nodes and rows as results.
static void verify_tree() {
  const std::vector<float> rows(3 * 4);  // for the root and both nodes
  const int64_t drafted[2] = {1, 2},
                parents[2] = {-1, 0};  // deterministic drafts, one below the other
  int64_t tokens[3], accepted, path[2], emitting_rows[3];
  float logprobs[3];
  int32_t status;
  polyspec::VerifyTreeParams params;
  params.batch = 1;
  params.nodes = params.depth = 2;
  params.vocab = 4;
  params.target_logits = rows.data();
  params.target_stride[1] = 4;
  params.draft_tokens = drafted;
  params.parents = parents;
  params.tokens = tokens;
  params.num_accepted = &accepted;
  params.path = path;
  params.rows = emitting_rows;
  params.logprobs = logprobs;
  params.status = &status;
  run(polyspec::verify_tree(params));
}

// A workspace, zeroed once, shares the rows of all requests over the device.
static void on_cuda() {
  using polyspec::Stream;
  if (!polyspec::supports(polyspec::Op::kVerify, Stream::Device::kCuda, polyspec::DType::kFloat32))
    return;
  const Stream stream = Stream::on(nullptr);  // a cudaStream_t
  void* workspace = nullptr;                  // VerifyParams::workspace, from cudaMalloc
  run(polyspec::clear_workspace(workspace, polyspec::kVerifyWorkspaceBytes, stream));
  if (polyspec::is_capturing(stream)) run(polyspec::when_graph_goes(stream, &std::free, workspace));

  polyspec::Int4ProductParams gates_and_ups;  // of no token: nothing is launched
  gates_and_ups.shape = {64, 32, 32, polyspec::DType::kBFloat16};
  gates_and_ups.dtype = polyspec::DType::kBFloat16;
  run(polyspec::int4_gated_product(gates_and_ups, stream));

  polyspec::Int4RotaryParams with_heads;  // likewise of no row
  with_heads.product = gates_and_ups;
  with_heads.product.shape.outputs = 3 * 64;  // one head of queries, keys and values each
  polyspec::RotaryParams& turn = with_heads.append.turn;
  turn.tokens = turn.heads = turn.groups = turn.angles = with_heads.append.capacity = 1;
  turn.width = 64;
  turn.dtype = polyspec::DType::kBFloat16;
  run(polyspec::int4_rotary_product(with_heads, stream));
}

// Appends to one run of slots and to pages, rolls back, and keeps the accepted path of a tree.
static void caches() {
  constexpr int64_t kTokens = 2, kHeads = 1, kWidth = 4, kCapacity = 8;
  std::vector<float> fresh(kTokens * kHeads * kWidth, 1), keys(kCapacity * kHeads * kWidth),
      values(keys);
  const int64_t length = 3;
  int64_t longer;
  int32_t status;
  polyspec::AppendParams params;
  params.in.batch = 1;
  params.in.heads = kHeads;
  params.in.tokens = kTokens;
  params.in.key_dim = params.in.value_dim = kWidth;
  params.in.element_size = sizeof(float);
  params.in.keys = params.in.values = {fresh.data(), {}};  // strides of 0: side by side
  params.in.lengths = &length;
  params.in.new_lengths = &longer;
  params.in.status = &status;
  params.capacity = kCapacity;
  params.keys = {keys.data(), {}};
  params.values = {values.data(), {}};
  run(polyspec::append(params));

  int64_t cut = 5, before;  // a rollback to 3, then a pass of 2 tokens
  polyspec::LengthsParams lengths;
  lengths.batch = 1;
  lengths.tokens = kTokens;
  lengths.lengths = &cut;
  lengths.most = &length;
  lengths.base = &before;
  run(polyspec::update_lengths(lengths));

  polyspec::CopyRowsParams rows;  // 2 of 8 rows, from the 4th on
  rows.batch = 1;
  rows.width = kTokens;
  rows.slots = kCapacity;
  rows.bytes = kWidth * sizeof(float);
  rows.at = &length;
  rows.from = keys.data();
  rows.to = fresh.data();
  rows.from_stride[1] = rows.to_stride[1] = rows.bytes;
  run(polyspec::copy_rows(rows));

  polyspec::PagesParams pages;  // the same in pages of 4 tokens
  int32_t table[2] = {-1, -1}, free_pages[2] = {0, 1};
  int64_t held = 0, free_count = 2;
  pages.batch = 1;
  pages.pages = pages.max_pages = pages.block_table_stride = 2;
  pages.page_size = 4;
  pages.lengths = &longer;
  pages.block_table = table;
  pages.held = &held;
  pages.free_pages = free_pages;
  pages.free_count = &free_count;
  pages.status = &status;
  run(polyspec::reserve_pages(pages));

  polyspec::PagedAppendParams paged;
  paged.in = params.in;
  paged.pages = paged.max_pages = paged.block_table_stride = 2;
  paged.page_size = 4;
  paged.keys = params.keys;
  paged.values = params.values;
  paged.block_table = table;
  run(polyspec::append_paged(paged));

  pages.lengths = &length;  // a rollback gives pages back
  run(polyspec::truncate_pages(pages));

  void* const layers_keys[1] = {keys.data()};  // nodes 0 and 2 of a tree of three were accepted
  void* const layers_values[1] = {values.data()};
  const int64_t path[2] = {0, 2};
  polyspec::CompactTreeParams tree;
  tree.layers = tree.batch = tree.heads = 1;
  tree.capacity = kCapacity;
  tree.key_dim = tree.value_dim = kWidth;
  tree.element_size = sizeof(float);
  tree.keys = layers_keys;
  tree.values = layers_values;
  tree.path_len = 2;
  tree.lengths = &length;
  tree.path = path;
  tree.new_lengths = &longer;
  tree.status = &status;
  run(polyspec::compact_tree(tree));
}

// Size, pack, workspace, product; so are the other packed weights multiplied.
static void dense_product() {
  const polyspec::DenseShape shape{16, 64, polyspec::DType::kFloat32};
  const std::vector<float> weights(16 * 64, 0.5f), x(2 * 64, 1);  // two tokens
  std::vector<float> y(2 * 16);
  const int64_t bytes = polyspec::dense_packed_bytes(shape);
  const auto packed = aligned(bytes);
  run(polyspec::dense_pack({shape, weights.data(), 64, packed.get()}));
  run(polyspec::dense_packed_check(shape, packed.get(), bytes));  // as of a file

  const auto workspace = aligned(polyspec::dense_workspace_bytes(shape, 2));
  polyspec::DenseProductParams params;
  params.shape = shape;
  params.tokens = 2;
  params.x = x.data();
  params.x_stride = 64;
  params.packed = packed.get();
  params.y = y.data();
  params.y_stride = 16;
  params.workspace = workspace.get();
  run(polyspec::dense_product(params));
  if (y[0] != 32) throw std::runtime_error("64 times 0.5");
}

// Weights rounded to 4 bits.
static void int4_product() {
  const polyspec::Int4Shape shape{16, 64, 32, polyspec::DType::kFloat32};
  const std::vector<float> weights(16 * 64, 0.5f), x(64, 1);
  std::vector<uint8_t> values(16 * 64);
  std::vector<float> scales(16 * 2), zeros(16 * 2), y(16);
  polyspec::Int4RoundParams round;
  round.shape = shape;
  round.weights = weights.data();
  round.stride = 64;
  round.values = values.data();
  round.scales = scales.data();
  round.zeros = zeros.data();
  run(polyspec::int4_round(round));

  const int64_t bytes = polyspec::int4_packed_bytes(shape);
  const auto packed = aligned(bytes);
  auto* const at = static_cast<uint8_t*>(packed.get());
  run(polyspec::int4_pack({shape, values.data(), scales.data(), zeros.data(), at}));
  run(polyspec::int4_packed_check(shape, at, bytes));
  run(polyspec::int4_unpack({shape, at, values.data(), scales.data(), zeros.data()}));

  const auto workspace = aligned(polyspec::int4_workspace_bytes(shape, 1));
  polyspec::Int4ProductParams params;
  params.shape = shape;
  params.tokens = 1;
  params.x = x.data();
  params.x_stride = 64;
  params.packed = at;
  params.y = y.data();
  params.y_stride = 16;
  params.workspace = workspace.get();
  run(polyspec::int4_product(params));
}

// Blocks of a GGUF file, multiplied and looked up.
static void block_product() {
  const polyspec::BlockShape shape{16, 64, polyspec::BlockType::kQ8_0};
  const std::vector<uint8_t> file(static_cast<size_t>(16 * polyspec::block_row_bytes(shape)));
  const auto packed = aligned(polyspec::block_packed_bytes(shape));
  auto* const at = static_cast<uint8_t*>(packed.get());
  run(polyspec::block_pack({shape, file.data(), at}));  // or by ranges of 16 rows

  const std::vector<float> x(64, 1);
  std::vector<float> y(16), embeddings(2 * 64);
  const auto workspace = aligned(polyspec::block_workspace_bytes(shape, 1));
  polyspec::BlockProductParams params;
  params.shape = shape;
  params.tokens = 1;
  params.x = x.data();
  params.x_stride = 64;
  params.packed = at;
  params.y = y.data();
  params.y_stride = 16;
  params.workspace = workspace.get();
  run(polyspec::block_product(params));

  const int64_t ids[2] = {3, 15};  // rows of the same matrix, as embeddings
  run(polyspec::block_rows({shape, 2, ids, at, embeddings.data()}));
}

// The parts of a layer; one head of queries, one of keys and values.
static void layer() {
  constexpr int64_t kTokens = 2, kWidth = 32;  // one head of queries, one of keys and values
  std::vector<float> x(kTokens * 3 * kWidth, 1), weight(kWidth, 1), y(x), query(kTokens * kWidth);
  std::vector<float> cosine(8 * kWidth, 1), sine(8 * kWidth), keys(8 * kWidth), values(keys);
  const int64_t length = 3;
  int32_t status = 0;
  run(polyspec::rms_norm({kTokens, kWidth, polyspec::DType::kFloat32, 1e-6f, x.data(), nullptr,
                          weight.data(), nullptr, y.data()}));
  run(polyspec::gated({kTokens, kWidth, polyspec::DType::kFloat32, x.data(), y.data()}));

  polyspec::RotaryParams turn;
  turn.batch = turn.heads = turn.groups = 1;
  turn.tokens = kTokens;
  turn.width = kWidth;
  turn.x = x.data();
  turn.angles = 8;
  turn.cosine = cosine.data();
  turn.sine = sine.data();
  turn.positions = &length;  // of the first token
  turn.position_step = 1;
  turn.query = query.data();
  turn.key = y.data();
  turn.value = y.data() + kTokens * kWidth;
  run(polyspec::rotary(turn));

  turn.key = turn.value = nullptr;  // or into a cache at once
  run(polyspec::rotary_append(
      {turn, 8, {keys.data(), {}}, {values.data(), {}}, &length, nullptr, &status}));

  polyspec::AttentionParams params;
  params.batch = params.heads = params.groups = 1;
  params.tokens = kTokens;
  params.length = length + kTokens;
  params.width = params.value_width = kWidth;
  params.causal = true;
  params.query = query.data();
  params.key = keys.data();
  params.value = values.data();
  params.out = y.data();
  const auto workspace = aligned(polyspec::attention_workspace_bytes(params));
  params.workspace = workspace.get();  // spreads a long cache over the threads
  run(polyspec::attention(params));
}

// All layers of a Llama in one call, here one layer with packed dense weights.
static void decoder_layers() {
  constexpr int64_t kWidth = 32, kCapacity = 8;
  const auto matrix = [](int64_t outputs, void* packed) {
    const std::vector<float> weights(static_cast<size_t>(outputs * kWidth), 0.1f);
    run(polyspec::dense_pack(
        {{outputs, kWidth, polyspec::DType::kFloat32}, weights.data(), kWidth, packed}));
    polyspec::PackedMatrix made;
    made.outputs = outputs;
    made.inputs = kWidth;
    made.packed = packed;
    return made;
  };
  const auto of = [](int64_t outputs) {
    return aligned(polyspec::dense_packed_bytes({outputs, kWidth, polyspec::DType::kFloat32}));
  };
  const auto in = of(3 * kWidth), gate = of(2 * kWidth), out = of(kWidth);
  const polyspec::PackedMatrix attention_in = matrix(3 * kWidth, in.get());
  const polyspec::PackedMatrix gated_in = matrix(2 * kWidth, gate.get()),
                               square = matrix(kWidth, out.get());
  std::vector<float> norm(kWidth, 1), x(kWidth, 1), y(kWidth), cosine(kWidth, 1), sine(kWidth);
  std::vector<float> keys(kCapacity * kWidth), values(keys);
  const int64_t length = 0;
  int32_t status;
  polyspec::DecoderLayer layer;
  layer.attention_norm = layer.gated_norm = norm.data();
  layer.attention_in = {&attention_in, 1};
  layer.attention_out = layer.gated_out = {&square, 1};
  layer.gated_in = {&gated_in, 1};
  layer.keys = keys.data();
  layer.values = values.data();
  polyspec::DecoderParams params;
  params.layers = &layer;
  params.count = params.batch = params.tokens = params.heads = params.groups = 1;
  params.width = params.head_width = params.gated_width = kWidth;
  params.epsilon = 1e-6f;
  params.x = x.data();
  params.angles = 1;
  params.cosine = cosine.data();
  params.sine = sine.data();
  params.positions = &length;
  params.capacity = kCapacity;
  params.span = 1;
  params.key_stride[0] = params.key_stride[1] = kCapacity * kWidth;
  params.key_stride[2] = kWidth;
  for (int i = 0; i < 3; ++i) params.value_stride[i] = params.key_stride[i];
  params.lengths = &length;
  params.causal = true;
  params.y = y.data();
  params.status = &status;
  const auto workspace = aligned(polyspec::decoder_workspace_bytes(params));
  params.workspace = workspace.get();
  run(polyspec::decoder_layers(params));
}

// Counts for one chain, with levels that accept everything here; and windows by a policy.
static void schedule() {
  polyspec::Scheduler scheduler({5, 3});  // three levels
  scheduler.start(32);
  while (!scheduler.done()) {
    const polyspec::Step step = scheduler.next();
    const bool drafts = step.kind == polyspec::Step::Kind::kDraft;
    scheduler.report(step.level, drafts ? step.count : step.count + 1);
  }

  polyspec::PolicyOptions options;
  options.windows = {5, 3};
  const auto policy = polyspec::make_policy(options);
  int64_t windows[2];
  polyspec::RoundReport report;
  report.begins = true;
  policy->next(report, windows);  // the windows of the first round; later with its steps and tokens

  const polyspec::RenewalRound round = polyspec::renewal_round({0.8, 0.6}, {5, 3});
  std::printf("%.1f tokens a pass, with %s\n", round.tokens, polyspec::isa(polyspec::Op::kDense));
}

// Counts for a batch, in rows that may lie on a device.
static void schedule_rows() {
  using polyspec::RoundShape;
  const RoundShape shape{2, 8, 64};  // levels, steps of the log, tokens of the text
  std::vector<int64_t> row(static_cast<size_t>(shape.words()));
  row[RoundShape::kTotal] = 1;  // a prompt of one token
  row[RoundShape::kRoom] = 16;
  row[static_cast<size_t>(shape.level_at(1) + RoundShape::kWindow)] = 3;
  const polyspec::RoundParams in{shape, 1, row.data()};
  int64_t due[2], ids[4], plan[polyspec::kPlanRows], appended[2];
  run(polyspec::schedule_due({in, due}));
  run(polyspec::schedule_next({in, static_cast<int32_t>(due[0]), 4, ids, plan}));

  const int64_t drafted[3] = {5, 6, 7};
  const int32_t status[3] = {};
  polyspec::ScheduleReportParams report;
  report.in = in;
  report.level = static_cast<int32_t>(due[0]);
  report.plan = plan;
  report.width = 3;
  report.tokens = drafted;
  report.status = status;
  report.appended = appended;
  run(polyspec::schedule_report(report));
}

int main() {
  sample_and_verify();
  verify_tree();
  on_cuda();
  caches();
  dense_product();
  int4_product();
  block_product();
  layer();
  decoder_layers();
  schedule();
  schedule_rows();
}
