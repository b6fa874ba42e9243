// The operators polyspec::sample, verify and verify_tree for torch's dispatcher, on the LibTorch
// stable ABI (target 2.11): one binary serves torch 2.11 and every later release.
//
// What is checked here is what memory safety needs: kinds, shapes and strides of every pointer.
// Python (polyspec_ext/ops) has raised the typed errors before. No tensor's value is read on the
// host; values that only the data can tell come back as status bits.
#include <cstring>
#include <tuple>

#include "polyspec/verify_tree.hpp"
#include "stable.hpp"
#include "workspace.hpp"

namespace {

using namespace bindings;

// A call's place, read off the logits, its batch, and how many requests its parameters are for:
// the batch, or the slots that the batch's parameters lie at.
struct Batch : Place {
  int64_t batch = 0;
  int64_t holders = 0;
  explicit Batch(const Tensor& logits)
      : Place(logits), batch(logits.size(0)), holders(logits.size(0)) {}
};

template <class T>
int32_t dtype_for() {
  if constexpr (std::is_same_v<T, float>) return aoti_torch_dtype_float32();
  if constexpr (std::is_same_v<T, int32_t>) return aoti_torch_dtype_int32();
  return aoti_torch_dtype_int64();  // int64_t, and uint64_t as its two's complement
}

// Data of a contiguous tensor of elements T, or nullptr for none.
template <class T>
const T* data_of(const OptTensor& tensor, const char* name, const Place& place,
                 std::initializer_list<int64_t> shape) {
  if (!tensor.has_value()) return nullptr;
  expect(*tensor, name, place, shape);
  expect_dtype(*tensor, name, dtype_for<T>());
  STD_TORCH_CHECK(tensor->is_contiguous(), name, ": expected a contiguous tensor");
  return static_cast<const T*>(tensor->const_data_ptr());
}

template <class T, class Scalar>
polyspec::PerRequest<T> per_request(Scalar value, const OptTensor& values, const char* name,
                                    const Batch& place) {
  return {data_of<T>(values, name, place, {place.holders}), static_cast<T>(value)};
}

template <class T>
Tensor empty(const Place& place, std::initializer_list<int64_t> shape) {
  return bindings::empty(place, shape, dtype_for<T>());
}

template <class T>
T* out_ptr(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

void set_sampling(polyspec::SamplingParams* sampling, const Batch& place, double temperature,
                  const OptTensor& temperatures, int64_t top_k, const OptTensor& top_ks,
                  double top_p, const OptTensor& top_ps, double min_p, const OptTensor& min_ps) {
  sampling->temperature = per_request<float>(temperature, temperatures, "temperature", place);
  sampling->top_k = per_request<int64_t>(top_k, top_ks, "top_k", place);
  sampling->top_p = per_request<float>(top_p, top_ps, "top_p", place);
  sampling->min_p = per_request<float>(min_p, min_ps, "min_p", place);
}

// `count` draws of the caller's own per request, where there are any.
void set_draw(polyspec::DrawParams* draw, const Batch& place, int64_t seed, const OptTensor& seeds,
              int64_t position, const OptTensor& positions, int64_t round, const OptTensor& rounds,
              int64_t level, const OptTensor& draws, int64_t count) {
  STD_TORCH_CHECK(level >= 1 && level < (1 << 16), "level: expected 1 to 65535, got ", level);
  draw->seed = per_request<uint64_t>(seed, seeds, "seed", place);
  draw->position = per_request<int64_t>(position, positions, "position", place);
  draw->round = per_request<int64_t>(round, rounds, "round", place);
  draw->level = static_cast<int32_t>(level);
  draw->bits = data_of<uint64_t>(draws, "draws", place, {place.batch, count});
}

// The target's rows of a verification: [B, most+1, V], or with offsets [N, V], `most` being given.
// `letter` is that of `most` in messages.
template <class Params>
Batch set_rows(const Tensor& target_logits, const OptTensor& offsets, const char* letter,
               int64_t* most, Params* params) {
  Batch place(target_logits);
  if (offsets.has_value()) {
    STD_TORCH_CHECK(target_logits.dim() == 2 && target_logits.size(1) >= 1,
                    "target_logits: expected shape [N, V] with V >= 1");
    STD_TORCH_CHECK(offsets->dim() == 1 && offsets->size(0) >= 1, "offsets: expected shape [B+1]");
    STD_TORCH_CHECK(*most >= 0, letter, ": expected at least 0, got ", *most);
    params->offsets = data_of<int64_t>(offsets, "offsets", place, {offsets->size(0)});
    params->num_rows = target_logits.size(0);
    params->target_stride[1] = target_logits.stride(0);
    place.batch = place.holders = offsets->size(0) - 1;
  } else {
    STD_TORCH_CHECK(
        target_logits.dim() == 3 && target_logits.size(1) >= 1 && target_logits.size(2) >= 1,
        "target_logits: expected shape [B, ", letter, "+1, V] with V >= 1");
    params->target_stride[0] = target_logits.stride(0);
    params->target_stride[1] = target_logits.stride(1);
    *most = target_logits.size(1) - 1;
  }
  expect_unit_stride(target_logits, "target_logits");
  params->batch = place.batch;
  params->vocab = target_logits.size(target_logits.dim() - 1);
  params->target_dtype = float_type(target_logits, "target_logits");
  params->target_logits = target_logits.const_data_ptr();
  return place;
}

// The allowed ids of each row of the target, words [.., ceil(V / 32)].
template <class Params>
void set_allowed(const OptTensor& allowed, const Batch& place, int64_t rows, Params* params) {
  const int64_t words = (params->vocab + 31) / 32;
  params->allowed = params->offsets != nullptr
                        ? data_of<int32_t>(allowed, "allowed", place, {params->num_rows, words})
                        : data_of<int32_t>(allowed, "allowed", place, {place.batch, rows, words});
  params->allowed_stride[0] = rows * words;
  params->allowed_stride[1] = words;
}

// Where the requests' parameters lie.
template <class Params>
void set_slots(const OptTensor& slots, int64_t num_slots, Batch* place, Params* params) {
  params->slots = data_of<int64_t>(slots, "slots", *place, {place->batch});
  if (!slots.has_value()) return;
  STD_TORCH_CHECK(num_slots >= 0, "num_slots: expected at least 0, got ", num_slots);
  params->num_slots = place->holders = num_slots;
}

// Reads where texts end and makes the outputs of that, int64 [5, B].
Tensor set_cut(const Batch& place, const OptTensor& eos, int64_t room, const OptTensor& rooms,
               polyspec::CutParams* cut) {
  if (eos.has_value()) {
    STD_TORCH_CHECK(eos->dim() == 2 && (eos->size(0) == 1 || eos->size(0) == place.holders),
                    "eos: expected shape [1, E] or [B, E], or [S, E] with slots");
    cut->eos_count = eos->size(1);
    cut->eos_stride = eos->size(0) == 1 ? 0 : cut->eos_count;
    cut->eos = data_of<int64_t>(eos, "eos", place, {eos->size(0), cut->eos_count});
  }
  cut->room = per_request<int64_t>(room, rooms, "room", place);
  const Tensor ends = empty<int64_t>(place, {5, place.batch});
  int64_t** const outputs[] = {&cut->num_emitted, &cut->ended, &cut->cache_lengths, &cut->next_ids,
                               &cut->next_positions};
  int64_t* row = out_ptr<int64_t>(ends);
  for (int64_t** const output : outputs) {
    *output = row;
    row += place.batch;
  }
  return ends;
}

// The workspace of a verification of so many rows a request, or nullptr.
void* workspace_for(const Batch& place, int64_t rows) {
  constexpr int64_t kFewRows = 256;  // about as many as a device has multiprocessors
  if (!place.cuda() || place.batch == 0 || place.batch > kFewRows || rows > kFewRows ||
      place.batch * rows > kFewRows) {
    return nullptr;
  }
  const DeviceGuard guard(place.device_index);
  return Workspaces::lend(place, current_stream(place));
}

// What every verification writes, of so many tokens for each request.
struct Emitted {
  Tensor tokens, num_accepted, logprobs, status, statistics;

  Emitted(const Batch& place, int64_t count)
      : tokens(empty<int64_t>(place, {place.batch, count})),
        num_accepted(empty<int64_t>(place, {place.batch})),
        logprobs(empty<float>(place, {place.batch, count})),
        status(empty<int32_t>(place, {place.batch})),
        statistics(empty<int64_t>(place, {place.batch, count, 2})) {}

  template <class Params>
  void point(Params* params) const {
    params->tokens = out_ptr<int64_t>(tokens);
    params->num_accepted = out_ptr<int64_t>(num_accepted);
    params->logprobs = out_ptr<float>(logprobs);
    params->status = out_ptr<int32_t>(status);
    params->statistics = out_ptr<polyspec::RowStatistics>(statistics);
  }
};

using Sampled = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// Points at rows [B, V] or [B, 1, V].
void set_logits(const Tensor& logits, const Batch& place, polyspec::SampleParams* params) {
  expect_unit_stride(logits, "logits");
  params->batch = place.batch;
  params->vocab = logits.size(logits.dim() - 1);
  params->dtype = float_type(logits, "logits");
  params->logits = logits.const_data_ptr();
  params->logits_stride = logits.stride(0);
}

Sampled sample(const Tensor& rows, double temperature, const OptTensor& temperatures, int64_t top_k,
               const OptTensor& top_ks, double top_p, const OptTensor& top_ps, double min_p,
               const OptTensor& min_ps, int64_t seed, const OptTensor& seeds, int64_t position,
               const OptTensor& positions, int64_t round, const OptTensor& rounds, int64_t node,
               const OptTensor& nodes, int64_t level, const OptTensor& draws,
               const OptTensor& allowed) {
  STD_TORCH_CHECK(rows.dim() == 2 && rows.size(1) >= 1,
                  "logits: expected shape [B, V] with V >= 1");
  const Tensor logits = unexpanded(rows);
  const Batch place(logits);
  polyspec::SampleParams params;
  set_sampling(&params.sampling, place, temperature, temperatures, top_k, top_ks, top_p, top_ps,
               min_p, min_ps);
  set_draw(&params.draw, place, seed, seeds, position, positions, round, rounds, level, draws, 1);
  params.node = per_request<int64_t>(node, nodes, "node", place);
  set_logits(logits, place, &params);
  params.allowed_stride = (params.vocab + 31) / 32;
  params.allowed =
      data_of<int32_t>(allowed, "allowed", place, {place.batch, params.allowed_stride});
  const Tensor tokens = empty<int64_t>(place, {place.batch});
  const Tensor logprobs = empty<float>(place, {place.batch});
  const Tensor status = empty<int32_t>(place, {place.batch});
  const Tensor statistics = empty<int64_t>(place, {place.batch, 2});
  params.tokens = out_ptr<int64_t>(tokens);
  params.logprobs = out_ptr<float>(logprobs);
  params.status = out_ptr<int32_t>(status);
  params.statistics = out_ptr<polyspec::RowStatistics>(statistics);
  run<1>(&polyspec::sample, params, place);
  return {tokens, logprobs, status, statistics};
}

// Copies logits [b, 1, v] to a column of rows [b, w, v].
void put_rows(const Tensor& logits, int64_t column, const Tensor& rows, const Place& place,
              int64_t element) {
  if (place.cuda()) {
    Tensor into = torch::stable::select(rows, 1, column);
    torch::stable::copy_(into, torch::stable::select(logits, 1, 0));
    return;
  }
  // On the host a call of torch's would cost more than most of what it copies.
  const int64_t step = logits.stride(0) * element, next = rows.stride(0) * element;
  char* const into =
      static_cast<char*>(rows.mutable_data_ptr()) + column * rows.stride(1) * element;
  const char* const from = static_cast<const char*>(logits.const_data_ptr());
  for (int64_t b = 0; b < logits.size(0); ++b)
    std::memcpy(into + b * next, from + b * step, static_cast<size_t>(logits.size(2) * element));
}

Tensor draw(const Tensor& latest, const OptTensor& temperatures, const OptTensor& top_ks,
            const OptTensor& top_ps, const OptTensor& min_ps, const Tensor& seeds,
            const Tensor& positions, const Tensor& rounds, int64_t level, int64_t column,
            Tensor tokens, Tensor status, OptTensor rows, OptTensor statistics) {
  STD_TORCH_CHECK(latest.dim() == 3 && latest.size(1) == 1 && latest.size(2) >= 1,
                  "logits: expected shape [B, 1, V] with V >= 1, got ", shape_name(latest));
  const Tensor logits = unexpanded(latest);
  const Batch place(logits);
  const int64_t batch = place.batch, vocab = logits.size(2);
  const bool wide = float_type(logits, "logits") == polyspec::DType::kFloat32;
  STD_TORCH_CHECK(tokens.dim() == 2, "tokens: expected shape [B, W], got ", shape_name(tokens));
  const int64_t width = tokens.size(1);
  STD_TORCH_CHECK(column >= 0 && column < width, "column: expected 0 to ", width - 1, ", got ",
                  column);
  integers<int64_t>(tokens, "tokens", place, {batch, width});
  integers<int32_t>(status, "status", place, {batch, width});
  STD_TORCH_CHECK(rows.has_value() == statistics.has_value(),
                  "statistics: expected both or none, got one");
  if (rows.has_value()) {
    STD_TORCH_CHECK(rows->dim() == 3 && rows->size(1) >= width,
                    "rows: expected shape [B, at least ", width, ", V], got ", shape_name(*rows));
    expect(*rows, "rows", place, {batch, rows->size(1), vocab});
    expect_unit_stride(*rows, "rows");
    expect_dtype(*rows, "rows", dtype_of(logits));
    integers<int64_t>(*statistics, "statistics", place, {batch, rows->size(1), 2});
  }
  polyspec::SampleParams params;
  set_sampling(&params.sampling, place, 0, temperatures, 0, top_ks, 1, top_ps, 0, min_ps);
  set_draw(&params.draw, place, 0, seeds, 0, positions, 0, rounds, level, std::nullopt, 1);
  params.ahead = column;
  set_logits(logits, place, &params);
  const Tensor next = empty<int64_t>(place, {batch, 1});
  const Tensor logprobs = empty<float>(place, {batch});
  params.next_ids = out_ptr<int64_t>(next);
  params.logprobs = out_ptr<float>(logprobs);
  params.tokens = out_ptr<int64_t>(tokens) + column;
  params.status = out_ptr<int32_t>(status) + column;
  params.stride = width;
  if (rows.has_value()) {
    params.statistics = out_ptr<polyspec::RowStatistics>(*statistics) + column;
    params.statistics_stride = rows->size(1);
  }
  run<1>(&polyspec::sample, params, place);
  if (rows.has_value())
    put_rows(logits, column, *rows, place, wide ? sizeof(float) : sizeof(uint16_t));
  return next;
}

polyspec::Rule rule_of(int64_t rule) {
  STD_TORCH_CHECK(rule == 0 || rule == 1, "rule: expected 0 (token) or 1 (block), got ", rule);
  return static_cast<polyspec::Rule>(rule);
}

using Verified = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Verified verify(const Tensor& target_rows, const Tensor& draft_tokens, const OptTensor& offsets,
                int64_t draft_len, const OptTensor& draft_logits, const OptTensor& draft_lengths,
                const OptTensor& draft_rows, const OptTensor& draft_statistics,
                const OptTensor& target_to_draft, double temperature, const OptTensor& temperatures,
                int64_t top_k, const OptTensor& top_ks, double top_p, const OptTensor& top_ps,
                double min_p, const OptTensor& min_ps, int64_t seed, const OptTensor& seeds,
                int64_t position, const OptTensor& positions, int64_t round,
                const OptTensor& rounds, int64_t level, int64_t rule, const OptTensor& draws,
                const OptTensor& slots, int64_t num_slots, const OptTensor& eos, int64_t room,
                const OptTensor& rooms, const OptTensor& allowed) {
  const Tensor target_logits = unexpanded(target_rows);
  polyspec::VerifyParams params;
  Batch place = set_rows(target_logits, offsets, "K", &draft_len, &params);
  const bool ragged = params.offsets != nullptr;
  const int64_t vocab = params.vocab;
  params.draft_len = draft_len;
  set_allowed(allowed, place, draft_len + 1, &params);

  // Draft tokens and, alike, the rows that they were drawn from.
  const auto by_token = [&](const Tensor& table, const char* name, int64_t* stride) {
    if (ragged) expect(table, name, place, {params.num_rows});
    if (!ragged) expect(table, name, place, {place.batch, draft_len});
    expect_unit_stride(table, name);
    STD_TORCH_CHECK(dtype_of(table) == aoti_torch_dtype_int64(), name, ": expected int64");
    *stride = table.stride(0);
    return static_cast<const int64_t*>(table.const_data_ptr());
  };
  const Tensor proposed = unexpanded(draft_tokens);
  params.draft_tokens = by_token(proposed, "draft_tokens", &params.draft_tokens_stride);
  const bool pooled = draft_rows.has_value() && draft_len > 0;
  const Tensor rows_of = pooled ? unexpanded(*draft_rows) : proposed;
  if (pooled) params.draft_rows = by_token(rows_of, "draft_rows", &params.draft_rows_stride);

  const bool sampled = draft_logits.has_value() && draft_len > 0;
  const Tensor draft = sampled ? unexpanded(*draft_logits) : target_logits;
  if (sampled) {
    const int64_t rank = pooled ? 2 : 3;
    STD_TORCH_CHECK(
        draft.dim() == rank && draft.size(rank - 1) >= 1 && draft.size(rank - 1) <= vocab,
        "draft_logits: expected shape [B, K, Vd], or [R, Vd] with draft_rows, and 1 <= Vd <= ",
        vocab);
    params.draft_vocab = draft.size(rank - 1);
    if (pooled) {
      params.num_draft_rows = draft.size(0);
      expect(draft, "draft_logits", place, {params.num_draft_rows, params.draft_vocab});
      params.draft_stride[1] = draft.stride(0);
    } else {
      expect(draft, "draft_logits", place, {place.batch, draft_len, params.draft_vocab});
      params.draft_stride[0] = draft.stride(0);
      params.draft_stride[1] = draft.stride(1);
    }
    expect_unit_stride(draft, "draft_logits");
    params.draft_dtype = float_type(draft, "draft_logits");
    params.draft_logits = draft.const_data_ptr();
    const int64_t* statistics = pooled ? data_of<int64_t>(draft_statistics, "draft_statistics",
                                                          place, {params.num_draft_rows, 2})
                                       : data_of<int64_t>(draft_statistics, "draft_statistics",
                                                          place, {place.batch, draft_len, 2});
    params.draft_statistics = reinterpret_cast<const polyspec::RowStatistics*>(statistics);
    params.target_to_draft = data_of<int32_t>(target_to_draft, "target_to_draft", place, {vocab});
  }
  params.draft_lengths = data_of<int64_t>(draft_lengths, "draft_lengths", place, {place.batch});
  set_slots(slots, num_slots, &place, &params);
  set_sampling(&params.sampling, place, temperature, temperatures, top_k, top_ks, top_p, top_ps,
               min_p, min_ps);
  set_draw(&params.draw, place, seed, seeds, position, positions, round, rounds, level, draws,
           draft_len + 1);
  params.rule = rule_of(rule);

  const Emitted out(place, draft_len + 1);
  out.point(&params);
  const Tensor ends = set_cut(place, eos, room, rooms, &params.cut);

  params.workspace = workspace_for(place, draft_len + 1);
  run<1>(&polyspec::verify, params, place);
  return {out.tokens, out.num_accepted, out.logprobs, out.status, out.statistics, ends};
}

using VerifiedTree = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

VerifiedTree verify_tree(
    const Tensor& target_rows, const Tensor& draft_tokens, const Tensor& parents,
    const OptTensor& offsets, int64_t nodes, int64_t depth, const OptTensor& counts,
    const OptTensor& draft_logits, const OptTensor& draft_rows, const OptTensor& draft_statistics,
    const OptTensor& target_to_draft, double temperature, const OptTensor& temperatures,
    int64_t top_k, const OptTensor& top_ks, double top_p, const OptTensor& top_ps, double min_p,
    const OptTensor& min_ps, int64_t seed, const OptTensor& seeds, int64_t position,
    const OptTensor& positions, int64_t round, const OptTensor& rounds, int64_t level, int64_t rule,
    const OptTensor& draws, const OptTensor& slots, int64_t num_slots, const OptTensor& eos,
    int64_t room, const OptTensor& rooms, const OptTensor& allowed) {
  const Tensor target_logits = unexpanded(target_rows);
  polyspec::VerifyTreeParams params;
  Batch place = set_rows(target_logits, offsets, "N", &nodes, &params);
  STD_TORCH_CHECK(!(params.offsets != nullptr && counts.has_value()),
                  "counts: expected none with offsets");
  STD_TORCH_CHECK(depth >= 0 && depth <= nodes, "depth: expected 0 to ", nodes, ", got ", depth);
  params.rule = rule_of(rule);
  const int64_t vocab = params.vocab;
  params.nodes = nodes;
  params.depth = depth;
  set_allowed(allowed, place, nodes + 1, &params);

  // By node, or by row of the target, which are one more.
  const auto table = [&](const OptTensor& values, const char* name, int64_t width) {
    if (params.offsets != nullptr) return data_of<int64_t>(values, name, place, {params.num_rows});
    return data_of<int64_t>(values, name, place, {place.batch, width});
  };
  params.draft_tokens = table(draft_tokens, "draft_tokens", nodes);
  params.parents = table(parents, "parents", nodes);
  params.draft_rows = table(draft_rows, "draft_rows", nodes + 1);
  params.counts = data_of<int64_t>(counts, "counts", place, {place.batch});
  const Tensor draft = draft_logits.has_value() ? unexpanded(*draft_logits) : target_logits;
  if (draft_logits.has_value()) {
    STD_TORCH_CHECK(draft.dim() == 2 && draft.size(1) >= 1 && draft.size(1) <= vocab,
                    "draft_logits: expected shape [R, Vd] with 1 <= Vd <= ", vocab);
    params.num_draft_rows = draft.size(0);
    params.draft_vocab = draft.size(1);
    expect(draft, "draft_logits", place, {params.num_draft_rows, params.draft_vocab});
    expect_unit_stride(draft, "draft_logits");
    params.draft_dtype = float_type(draft, "draft_logits");
    params.draft_logits = draft.const_data_ptr();
    params.draft_stride = draft.stride(0);
    params.draft_statistics = reinterpret_cast<const polyspec::RowStatistics*>(
        data_of<int64_t>(draft_statistics, "draft_statistics", place, {params.num_draft_rows, 2}));
    params.target_to_draft = data_of<int32_t>(target_to_draft, "target_to_draft", place, {vocab});
  }
  set_slots(slots, num_slots, &place, &params);
  set_sampling(&params.sampling, place, temperature, temperatures, top_k, top_ks, top_p, top_ps,
               min_p, min_ps);
  set_draw(&params.draw, place, seed, seeds, position, positions, round, rounds, level, draws,
           nodes + depth + 1);

  const Emitted out(place, depth + 1);
  out.point(&params);
  const Tensor path = empty<int64_t>(place, {place.batch, depth});
  const Tensor rows = empty<int64_t>(place, {place.batch, depth + 1});
  params.path = out_ptr<int64_t>(path);
  params.rows = out_ptr<int64_t>(rows);
  const Tensor ends = set_cut(place, eos, room, rooms, &params.cut);
  params.workspace = workspace_for(place, nodes + 1);
  run<1>(&polyspec::verify_tree, params, place);
  return {out.tokens, out.num_accepted, out.logprobs, out.status, out.statistics, path, rows, ends};
}

}  // namespace

// A parameter that may differ per request comes twice: as a scalar, and as a tensor [B], [S] with
// slots, that overrides it when given. So a scalar never has to become a tensor first.
STABLE_TORCH_LIBRARY(polyspec, m) {
  m.def(
      "sample(Tensor logits, float temperature, Tensor? temperatures, int top_k, Tensor? top_ks, "
      "float top_p, Tensor? top_ps, float min_p, Tensor? min_ps, int seed, Tensor? seeds, "
      "int position, Tensor? positions, int round, Tensor? rounds, int node, Tensor? nodes, "
      "int level, Tensor? draws, Tensor? allowed=None) "
      "-> (Tensor tokens, Tensor logprobs, Tensor status, Tensor distributions)");
  // `sample` of the next token of each row [B, 1, V], which is given back as [B, 1]; it is written
  // to the column of what is drawn one behind the other, with its row and what is known of that.
  m.def(
      "draw(Tensor logits, Tensor? temperatures, Tensor? top_ks, Tensor? top_ps, Tensor? min_ps, "
      "Tensor seeds, Tensor positions, Tensor rounds, int level, int column, Tensor(a!) tokens, "
      "Tensor(b!) status, Tensor(c!)? rows, Tensor(d!)? statistics) -> Tensor");
  // What the outputs' shapes depend on comes first, where fake implementations find it.
  // ends: num_emitted, ended, cache_lengths, next_ids, next_positions; int64 [5, B].
  m.def(
      "verify(Tensor target_logits, Tensor draft_tokens, Tensor? offsets, int draft_len, "
      "Tensor? draft_logits, Tensor? draft_lengths, Tensor? draft_rows, Tensor? draft_statistics, "
      "Tensor? target_to_draft, float temperature, Tensor? temperatures, int top_k, "
      "Tensor? top_ks, float top_p, Tensor? top_ps, float min_p, Tensor? min_ps, int seed, "
      "Tensor? seeds, int position, Tensor? positions, int round, Tensor? rounds, int level, "
      "int rule, Tensor? draws, Tensor? slots, int num_slots, Tensor? eos, int room, "
      "Tensor? rooms, Tensor? allowed=None) "
      "-> (Tensor tokens, Tensor num_accepted, Tensor logprobs, Tensor status, "
      "Tensor distributions, Tensor ends)");
  m.def(
      "verify_tree(Tensor target_logits, Tensor draft_tokens, Tensor parents, Tensor? offsets, "
      "int nodes, int depth, Tensor? counts, Tensor? draft_logits, Tensor? draft_rows, "
      "Tensor? draft_statistics, Tensor? target_to_draft, float temperature, "
      "Tensor? temperatures, int top_k, Tensor? top_ks, float top_p, Tensor? top_ps, "
      "float min_p, Tensor? min_ps, int seed, Tensor? seeds, int position, Tensor? positions, "
      "int round, Tensor? rounds, int level, int rule, Tensor? draws, Tensor? slots, "
      "int num_slots, Tensor? eos, int room, Tensor? rooms, Tensor? allowed=None) "
      "-> (Tensor tokens, Tensor num_accepted, Tensor logprobs, Tensor status, "
      "Tensor distributions, Tensor path, Tensor rows, Tensor ends)");
}

STABLE_TORCH_LIBRARY_IMPL(polyspec, CPU, m) {
  m.impl("verify_tree", TORCH_BOX(&verify_tree));
  m.impl("sample", TORCH_BOX(&sample));
  m.impl("draw", TORCH_BOX(&draw));
  m.impl("verify", TORCH_BOX(&verify));
}

STABLE_TORCH_LIBRARY_IMPL(polyspec, CUDA, m) {
  m.impl("verify_tree", TORCH_BOX(&verify_tree));
  m.impl("sample", TORCH_BOX(&sample));
  m.impl("draw", TORCH_BOX(&draw));
  m.impl("verify", TORCH_BOX(&verify));
}
