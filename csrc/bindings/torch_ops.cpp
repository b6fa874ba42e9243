// The operators polyspec::sample, verify and verify_tree for torch's dispatcher, on the LibTorch
// stable ABI (target 2.11): one binary serves torch 2.11 and every later release.
//
// All tensors of a call are checked here: shapes, strides, devices and data types. An error begins
// with the argument's name in Python (polyspec_ext/ops), which makes it a TypeError or ValueError.
// No tensor's value is read on the host; errors in the data come back as status bits.
#include <cstring>
#include <tuple>
#include <vector>

#include "polyspec/philox.hpp"
#include "polyspec/verify_tree.hpp"
#include "stable.hpp"
#include "workspace.hpp"

namespace {

using namespace bindings;

// A call's device, by the logits, its batch, and the number of requests that its parameters are
// for: the batch, or the slots with the batch's parameters.
struct Batch : Place {
  int64_t batch = 0;
  int64_t holders = 0;
  mutable std::vector<Tensor> copies;  // of strided tensors, for the call
  explicit Batch(const Tensor& logits)
      : Place(logits), batch(logits.size(0)), holders(logits.size(0)) {}
};

template <class T>
int32_t dtype_for() {
  if constexpr (std::is_same_v<T, float>) return aoti_torch_dtype_float32();
  if constexpr (std::is_same_v<T, int32_t>) return aoti_torch_dtype_int32();
  return aoti_torch_dtype_int64();  // int64_t, and uint64_t as its two's complement
}

std::string place_name(const Place& place) {
  if (place.device_type == aoti_torch_device_type_cpu()) return "cpu";
  if (place.device_type != aoti_torch_device_type_cuda()) return "another device";
  return "cuda:" + std::to_string(place.device_index);
}

void expect_place(const Tensor& tensor, const char* name, const Place& place) {
  const Place own(tensor);
  STD_TORCH_CHECK(own == place, name, ": expected the logits' device ", place_name(place),
                  ", given ", place_name(own));
}

// `form` names the shape in messages, for example "[B, K]".
void expect_shape(const Tensor& tensor, const char* name, const char* form, const Place& place,
                  std::initializer_list<int64_t> shape) {
  bool fits = tensor.dim() == static_cast<int64_t>(shape.size());
  for (size_t axis = 0; fits && axis < shape.size(); ++axis)
    fits = tensor.size(static_cast<int64_t>(axis)) == shape.begin()[axis];
  if (!fits) {
    std::string wanted;
    for (const int64_t size : shape) wanted += (wanted.empty() ? "" : ", ") + std::to_string(size);
    STD_TORCH_CHECK(false, name, ": expected shape ", form, " = [", wanted, "], given ",
                    shape_name(tensor));
  }
  expect_place(tensor, name, place);
}

void expect_kind(const Tensor& tensor, const char* name, int32_t wanted) {
  const int32_t own = dtype_of(tensor);
  STD_TORCH_CHECK(own == wanted, name, ": expected a tensor of dtype torch.", dtype_name(wanted),
                  ", given a tensor of dtype torch.", dtype_name(own));
}

template <class T>
bool reads(int32_t dtype) {
  if (std::is_same_v<T, uint64_t> && dtype == aoti_torch_dtype_uint64()) return true;
  return dtype == dtype_for<T>();
}

// A number of another width as T.
template <class T>
Tensor converted(const Tensor& tensor, const char* name) {
  using torch::headeronly::ScalarType;
  const int32_t own = dtype_of(tensor);
  if constexpr (std::is_same_v<T, float>) {
    STD_TORCH_CHECK(own == aoti_torch_dtype_float64() || own == aoti_torch_dtype_float16() ||
                        own == aoti_torch_dtype_bfloat16(),
                    name,
                    ": expected a number or a floating-point tensor, given a tensor of dtype "
                    "torch.",
                    dtype_name(own));
    return torch::stable::to(tensor, ScalarType::Float);
  }
  STD_TORCH_CHECK(own == aoti_torch_dtype_int64() || own == aoti_torch_dtype_int32() ||
                      own == aoti_torch_dtype_int16() || own == aoti_torch_dtype_int8() ||
                      own == aoti_torch_dtype_uint8(),
                  name, ": expected an integer tensor, given a tensor of dtype torch.",
                  dtype_name(own));
  return torch::stable::to(tensor, sizeof(T) == 4 ? ScalarType::Int : ScalarType::Long);
}

// Data of a tensor as elements T, or nullptr for none. `exact`: of the same type.
template <class T>
const T* data_of(const OptTensor& tensor, const char* name, const char* form, const Batch& place,
                 std::initializer_list<int64_t> shape, bool exact = false) {
  if (!tensor.has_value()) return nullptr;
  const bool same = reads<T>(dtype_of(*tensor));
  if (!same && exact) expect_kind(*tensor, name, dtype_for<T>());
  if (!same) place.copies.push_back(converted<T>(*tensor, name));
  const Tensor& read = same ? *tensor : place.copies.back();
  expect_shape(read, name, form, place, shape);
  if (read.is_contiguous()) return static_cast<const T*>(read.const_data_ptr());
  place.copies.push_back(torch::stable::contiguous(read));
  return static_cast<const T*>(place.copies.back().const_data_ptr());
}

template <class T, class Scalar>
polyspec::PerRequest<T> per_request(Scalar value, const OptTensor& values, const char* name,
                                    const Batch& place) {
  constexpr const char* kForm = "[B] or [S], a value per request or slot,";
  return {data_of<T>(values, name, kForm, place, {place.holders}), static_cast<T>(value)};
}

// Type of logits of a valid shape, with the vocabulary as the last dimension.
polyspec::DType logits_type(const Tensor& logits, const char* name) {
  const int64_t last = logits.dim() - 1;
  // (The strides of numpy's empty arrays are 0.)
  STD_TORCH_CHECK(logits.size(last) == 1 || logits.stride(last) == 1 || logits.numel() == 0, name,
                  ": expected unit stride along the vocabulary, given stride ", logits.stride(last),
                  "; call .contiguous() on it");
  const int32_t dtype = dtype_of(logits);
  if (dtype == aoti_torch_dtype_float32()) return polyspec::DType::kFloat32;
  if (dtype == aoti_torch_dtype_bfloat16()) return polyspec::DType::kBFloat16;
  STD_TORCH_CHECK(dtype == aoti_torch_dtype_float16(), name,
                  ": expected a float32, bfloat16 or float16 tensor, given a tensor of dtype "
                  "torch.",
                  dtype_name(dtype));
  return polyspec::DType::kFloat16;
}

void expect_logits(const Tensor& logits, const char* name, const char* form, int64_t rank) {
  STD_TORCH_CHECK(logits.dim() == rank && logits.size(rank - 1) >= 1 &&
                      logits.size(rank - 1) < int64_t{1} << 31,
                  name, ": expected shape ", form, " with 1 <= V < 2**31, given ",
                  shape_name(logits));
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

// `count` draws of the caller per request, if any.
void set_draw(polyspec::DrawParams* draw, const Batch& place, int64_t seed, const OptTensor& seeds,
              int64_t position, const OptTensor& positions, int64_t round, const OptTensor& rounds,
              int64_t level, const OptTensor& draws, const char* form, int64_t count) {
  draw->seed = per_request<uint64_t>(seed, seeds, "seed", place);
  draw->position = per_request<int64_t>(position, positions, "position", place);
  draw->round = per_request<int64_t>(round, rounds, "round", place);
  draw->level = static_cast<int32_t>(level);
  draw->bits = data_of<uint64_t>(draws, "draws", form, place, {place.batch, count}, true);
}

// Names in messages: `letter`, the maximum draft tokens of a request, by the argument `most`, of
// `drafted`. Shapes of the target's logits and the draft tokens without offsets (`even`) and with
// offsets (`ragged`).
struct Form {
  const char *letter, *most, *drafted, *even, *ragged, *even_tokens, *ragged_tokens;
};
constexpr Form kBlock{"K",      "draft_len", "draft tokens", "[B, K+1, V]", "[N, V] (with offsets)",
                      "[B, K]", "[N]"};
constexpr Form kTree{"N",      "nodes", "nodes", "[B, N+1, V]", "[M, V] (with offsets)",
                     "[B, N]", "[M]"};

// The target's rows of a verification: [B, most+1, V], or with offsets [N, V], which need `most`.
template <class Params>
Batch set_rows(const Tensor& target_logits, const OptTensor& offsets, const Form& form,
               const std::optional<int64_t>& most, Params* params) {
  const bool ragged = offsets.has_value();
  expect_logits(target_logits, "target_logits", ragged ? form.ragged : form.even, ragged ? 2 : 3);
  Batch place(target_logits);
  if (ragged) {
    STD_TORCH_CHECK(offsets->dim() == 1 && offsets->size(0) >= 1,
                    "offsets: expected an integer tensor [B+1], given ", shape_name(*offsets));
    STD_TORCH_CHECK(most.has_value(), form.most, ": expected the most ", form.drafted,
                    " of a request, given None");
    STD_TORCH_CHECK(*most >= 0, form.most, ": expected an integer in [0, 2**31), given ", *most);
    params->offsets = data_of<int64_t>(offsets, "offsets", "[B+1]", place, {offsets->size(0)});
    params->num_rows = target_logits.size(0);
    params->target_stride[1] = target_logits.stride(0);
    place.batch = place.holders = offsets->size(0) - 1;
  } else {
    const int64_t rows = target_logits.size(1);
    STD_TORCH_CHECK(rows >= 1, "target_logits: expected ", form.letter, "+1 >= 1 rows, given ",
                    shape_name(target_logits));
    STD_TORCH_CHECK(!most.has_value() || *most == rows - 1, form.most, ": expected ", form.letter,
                    " = ", rows - 1, " or None, given ", most.value_or(0));
    params->target_stride[0] = target_logits.stride(0);
    params->target_stride[1] = target_logits.stride(1);
  }
  params->batch = place.batch;
  params->vocab = target_logits.size(target_logits.dim() - 1);
  params->target_dtype = logits_type(target_logits, "target_logits");
  params->target_logits = target_logits.const_data_ptr();
  return place;
}

// The allowed ids of each row of the target, words [.., ceil(V / 32)].
template <class Params>
void set_allowed(const OptTensor& allowed, const Batch& place, int64_t rows, Params* params) {
  const int64_t words = (params->vocab + 31) / 32;
  const char* const form = "[.., ceil(V / 32)]";
  params->allowed =
      params->offsets != nullptr
          ? data_of<int32_t>(allowed, "allowed", form, place, {params->num_rows, words}, true)
          : data_of<int32_t>(allowed, "allowed", form, place, {place.batch, rows, words}, true);
  params->allowed_stride[0] = rows * words;
  params->allowed_stride[1] = words;
}

// Draft logits [B, most, Vd] (`rank` 3) or a pool [R, Vd]; without logits, nothing belongs to them.
template <class Params>
void expect_draft(const OptTensor& draft, int64_t rank, int64_t most, const OptTensor& statistics,
                  const OptTensor& target_to_draft, const Batch& place, const Params& params) {
  if (!draft.has_value()) {
    const char* const given = statistics.has_value()        ? "draft_statistics"
                              : target_to_draft.has_value() ? "target_to_draft"
                                                            : nullptr;
    STD_TORCH_CHECK(given == nullptr, given == nullptr ? "" : given,
                    ": expected None without draft_logits, given a tensor");
    return;
  }
  const char* const form = rank == 3 ? "[B, K, Vd]" : "[R, Vd] (with draft_rows)";
  expect_logits(*draft, "draft_logits", form, rank);
  STD_TORCH_CHECK(rank == 2 || (draft->size(0) == place.batch && draft->size(1) == most),
                  "draft_logits: expected shape ", form, " = [", place.batch, ", ", most,
                  ", Vd], given ", shape_name(*draft));
  STD_TORCH_CHECK(draft->size(rank - 1) <= params.vocab,
                  "draft_logits: expected Vd <= V = ", params.vocab, ", given ",
                  draft->size(rank - 1));
  expect_place(*draft, "draft_logits", place);
}

template <class Params>
void set_draft(const Tensor& draft, const OptTensor& statistics, const OptTensor& target_to_draft,
               const Batch& place, Params* params) {
  const int64_t last = draft.dim() - 1;
  params->draft_vocab = draft.size(last);
  params->draft_dtype = logits_type(draft, "draft_logits");
  params->draft_logits = draft.const_data_ptr();
  const int64_t* const known =
      last == 2 ? data_of<int64_t>(statistics, "draft_statistics", "[B, K, 2]", place,
                                   {draft.size(0), draft.size(1), 2}, true)
                : data_of<int64_t>(statistics, "draft_statistics", "[R, 2]", place,
                                   {draft.size(0), 2}, true);
  params->draft_statistics = reinterpret_cast<const polyspec::RowStatistics*>(known);
  params->target_to_draft =
      data_of<int32_t>(target_to_draft, "target_to_draft", "[V]", place, {params->vocab});
}

// Where the requests' parameters lie: as many as the first of `values` has.
template <class Params>
void set_slots(const OptTensor& slots, std::initializer_list<const OptTensor*> values, Batch* place,
               Params* params) {
  params->slots = data_of<int64_t>(slots, "slots", "[B]", *place, {place->batch});
  if (!slots.has_value()) return;
  for (const OptTensor* value : values) {
    if (!value->has_value() || (*value)->dim() == 0) continue;
    params->num_slots = place->holders = (*value)->size(0);
    return;
  }
  STD_TORCH_CHECK(false, "slots: expected parameters that lie at slots, [S] tensors, given none");
}

// Reads where texts end and makes the outputs of that, int64 [5, B].
Tensor set_cut(const Batch& place, const OptTensor& eos, int64_t room, const OptTensor& rooms,
               polyspec::CutParams* cut) {
  if (eos.has_value()) {
    STD_TORCH_CHECK(eos->dim() == 2 && (eos->size(0) == 1 || eos->size(0) == place.holders),
                    "eos: expected shape [E] or [B, E] = [", place.holders, ", E], given ",
                    shape_name(*eos));
    cut->eos_count = eos->size(1);
    cut->eos_stride = eos->size(0) == 1 ? 0 : cut->eos_count;
    cut->eos = data_of<int64_t>(eos, "eos", "[B, E]", place, {eos->size(0), cut->eos_count});
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

// The outputs of every verification, for so many tokens of each request.
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
  params->batch = place.batch;
  params->vocab = logits.size(logits.dim() - 1);
  params->dtype = logits_type(logits, "logits");
  params->logits = logits.const_data_ptr();
  params->logits_stride = logits.stride(0);
}

Sampled sample(const Tensor& rows, double temperature, const OptTensor& temperatures, int64_t top_k,
               const OptTensor& top_ks, double top_p, const OptTensor& top_ps, double min_p,
               const OptTensor& min_ps, int64_t seed, const OptTensor& seeds, int64_t position,
               const OptTensor& positions, int64_t round, const OptTensor& rounds, int64_t node,
               const OptTensor& nodes, int64_t level, const OptTensor& draws,
               const OptTensor& allowed) {
  expect_logits(rows, "logits", "[B, V]", 2);
  const Tensor logits = unexpanded(rows);
  const Batch place(logits);
  polyspec::SampleParams params;
  set_sampling(&params.sampling, place, temperature, temperatures, top_k, top_ks, top_p, top_ps,
               min_p, min_ps);
  set_draw(&params.draw, place, seed, seeds, position, positions, round, rounds, level, draws,
           "[B, 1]", 1);
  params.node = per_request<int64_t>(node, nodes, "node", place);
  set_logits(logits, place, &params);
  params.allowed_stride = (params.vocab + 31) / 32;
  params.allowed = data_of<int32_t>(allowed, "allowed", "[B, ceil(V / 32)]", place,
                                    {place.batch, params.allowed_stride}, true);
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
  // On the host a call of torch's would cost more than most of its copies.
  const int64_t step = logits.stride(0) * element, next = rows.stride(0) * element;
  char* const into =
      static_cast<char*>(rows.mutable_data_ptr()) + column * rows.stride(1) * element;
  const char* const from = static_cast<const char*>(logits.const_data_ptr());
  for (int64_t b = 0; b < logits.size(0); ++b)
    std::memcpy(into + b * next, from + b * step, static_cast<size_t>(logits.size(2) * element));
}

// A contiguous tensor of elements T, to write to.
template <class T>
void expect_table(const Tensor& tensor, const char* name, const char* form, const Place& place,
                  std::initializer_list<int64_t> shape) {
  expect_shape(tensor, name, form, place, shape);
  expect_kind(tensor, name, dtype_for<T>());
  STD_TORCH_CHECK(tensor.is_contiguous(), name, ": expected a contiguous tensor, given strides");
}

Tensor draw(const Tensor& latest, const OptTensor& temperatures, const OptTensor& top_ks,
            const OptTensor& top_ps, const OptTensor& min_ps, const Tensor& seeds,
            const Tensor& positions, const Tensor& rounds, int64_t level, int64_t column,
            Tensor tokens, Tensor status, OptTensor rows, OptTensor statistics, bool readable) {
  expect_logits(latest, "logits", "[B, 1, V]", 3);
  const Tensor logits = unexpanded(latest);
  const Batch place(logits);
  const int64_t batch = place.batch, vocab = logits.size(2);
  expect_shape(logits, "logits", "[B, 1, V]", place, {batch, 1, vocab});
  const bool wide = logits_type(logits, "logits") == polyspec::DType::kFloat32;
  STD_TORCH_CHECK(tokens.dim() == 2, "tokens: expected shape [B, W], given ", shape_name(tokens));
  const int64_t width = tokens.size(1);
  STD_TORCH_CHECK(column >= 0 && column < width, "column: expected an integer in [0, ", width - 1,
                  "], given ", column);
  expect_table<int64_t>(tokens, "tokens", "[B, W]", place, {batch, width});
  expect_table<int32_t>(status, "status", "[B, W]", place, {batch, width});
  STD_TORCH_CHECK(rows.has_value() == statistics.has_value(),
                  "statistics: expected both or none of rows and statistics, given one");
  if (rows.has_value()) {
    STD_TORCH_CHECK(rows->dim() == 3 && rows->size(1) >= width,
                    "rows: expected shape [B, at least ", width, ", V], given ", shape_name(*rows));
    expect_shape(*rows, "rows", "[B, .., V]", place, {batch, rows->size(1), vocab});
    logits_type(*rows, "rows");
    expect_kind(*rows, "rows", dtype_of(logits));
    expect_table<int64_t>(*statistics, "statistics", "[B, .., 2]", place,
                          {batch, rows->size(1), 2});
  }
  polyspec::SampleParams params;
  set_sampling(&params.sampling, place, 0, temperatures, 0, top_ks, 1, top_ps, 0, min_ps);
  set_draw(&params.draw, place, 0, seeds, 0, positions, 0, rounds, level, std::nullopt, "", 1);
  params.ahead = column;
  set_logits(logits, place, &params);
  const Tensor next = empty<int64_t>(place, {batch, 1});
  const Tensor logprobs = empty<float>(place, {batch});
  params.next_ids = out_ptr<int64_t>(next);
  params.least_id = readable ? 0 : -1;
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

using Verified = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Verified verify(const Tensor& target_rows, const Tensor& draft_tokens, const OptTensor& offsets,
                std::optional<int64_t> most, const OptTensor& draft_logits,
                const OptTensor& draft_lengths, const OptTensor& draft_rows,
                const OptTensor& draft_statistics, const OptTensor& target_to_draft,
                double temperature, const OptTensor& temperatures, int64_t top_k,
                const OptTensor& top_ks, double top_p, const OptTensor& top_ps, double min_p,
                const OptTensor& min_ps, int64_t seed, const OptTensor& seeds, int64_t position,
                const OptTensor& positions, int64_t round, const OptTensor& rounds, int64_t level,
                int64_t rule, const OptTensor& draws, const OptTensor& slots, const OptTensor& eos,
                int64_t room, const OptTensor& rooms, const OptTensor& allowed) {
  const Tensor target_logits = unexpanded(target_rows);
  polyspec::VerifyParams params;
  Batch place = set_rows(target_logits, offsets, kBlock, most, &params);
  const int64_t draft_len = offsets.has_value() ? *most : target_logits.size(1) - 1;
  const bool ragged = params.offsets != nullptr;
  params.draft_len = draft_len;
  set_allowed(allowed, place, draft_len + 1, &params);

  // Draft tokens and, alike, the rows that they were drawn from.
  const auto by_token = [&](const Tensor& given, const char* name, int64_t* stride) {
    const bool same = reads<int64_t>(dtype_of(given));
    if (!same) place.copies.push_back(converted<int64_t>(given, name));
    Tensor table = same ? given : place.copies.back();
    if (ragged) expect_shape(table, name, kBlock.ragged_tokens, place, {params.num_rows});
    if (!ragged) expect_shape(table, name, kBlock.even_tokens, place, {place.batch, draft_len});
    const int64_t last = table.dim() - 1;
    if (table.size(last) > 1 && table.stride(last) != 1) {
      table = torch::stable::contiguous(table);
      place.copies.push_back(table);
    }
    *stride = table.stride(0);
    return static_cast<const int64_t*>(table.const_data_ptr());
  };
  const Tensor proposed = unexpanded(draft_tokens);
  params.draft_tokens = by_token(proposed, "draft_tokens", &params.draft_tokens_stride);
  const bool pooled = draft_rows.has_value();
  const Tensor rows_of = pooled ? unexpanded(*draft_rows) : proposed;
  int64_t rows_stride = 0;
  const int64_t* const pool_rows = pooled ? by_token(rows_of, "draft_rows", &rows_stride) : nullptr;
  expect_draft(draft_logits, pooled ? 2 : 3, draft_len, draft_statistics, target_to_draft, place,
               params);
  const Tensor draft = draft_logits.has_value() ? unexpanded(*draft_logits) : target_logits;
  if (draft_logits.has_value() && draft_len > 0) {
    set_draft(draft, draft_statistics, target_to_draft, place, &params);
    if (pooled) params.num_draft_rows = draft.size(0);
    if (!pooled) params.draft_stride[0] = draft.stride(0);
    params.draft_stride[1] = draft.stride(pooled ? 0 : 1);
  }
  if (pooled && draft_len > 0) {
    params.draft_rows = pool_rows;
    params.draft_rows_stride = rows_stride;
  }
  params.draft_lengths =
      data_of<int64_t>(draft_lengths, "draft_lengths", "[B]", place, {place.batch});
  set_slots(slots, {&temperatures, &top_ks, &top_ps, &min_ps, &seeds, &positions, &rounds, &rooms},
            &place, &params);
  set_sampling(&params.sampling, place, temperature, temperatures, top_k, top_ks, top_p, top_ps,
               min_p, min_ps);
  set_draw(&params.draw, place, seed, seeds, position, positions, round, rounds, level, draws,
           "[B, K+1]", draft_len + 1);
  params.rule = static_cast<polyspec::Rule>(rule);

  const Emitted out(place, draft_len + 1);
  out.point(&params);
  const Tensor ends = set_cut(place, eos, room, rooms, &params.cut);

  params.workspace = workspace_for(place, draft_len + 1);
  run<1>(&polyspec::verify, params, place);
  return {out.tokens, out.num_accepted, out.logprobs, out.status, out.statistics, ends};
}

using VerifiedTree = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

VerifiedTree verify_tree(const Tensor& target_rows, const Tensor& draft_tokens,
                         const Tensor& parents, const OptTensor& offsets,
                         std::optional<int64_t> most, std::optional<int64_t> longest,
                         const OptTensor& counts, const OptTensor& draft_logits,
                         const OptTensor& draft_rows, const OptTensor& draft_statistics,
                         const OptTensor& target_to_draft, double temperature,
                         const OptTensor& temperatures, int64_t top_k, const OptTensor& top_ks,
                         double top_p, const OptTensor& top_ps, double min_p,
                         const OptTensor& min_ps, int64_t seed, const OptTensor& seeds,
                         int64_t position, const OptTensor& positions, int64_t round,
                         const OptTensor& rounds, int64_t level, int64_t rule,
                         const OptTensor& draws, const OptTensor& slots, const OptTensor& eos,
                         int64_t room, const OptTensor& rooms, const OptTensor& allowed) {
  const Tensor target_logits = unexpanded(target_rows);
  polyspec::VerifyTreeParams params;
  STD_TORCH_CHECK(!offsets.has_value() || !counts.has_value(),
                  "counts: expected None with offsets, given a tensor");
  Batch place = set_rows(target_logits, offsets, kTree, most, &params);
  const int64_t nodes = offsets.has_value() ? *most : target_logits.size(1) - 1;
  const int64_t depth = longest.value_or(nodes);
  STD_TORCH_CHECK(nodes < polyspec::kDrawNodes,
                  "target_logits: expected N+1 rows, N < 2**14, given N = ", nodes);
  STD_TORCH_CHECK(depth >= 0 && depth <= nodes, "depth: expected an integer in [0, ", nodes,
                  "], given ", depth);
  params.rule = static_cast<polyspec::Rule>(rule);
  params.nodes = nodes;
  params.depth = depth;
  set_allowed(allowed, place, nodes + 1, &params);

  // By node, or by row of the target, which are one more.
  const auto table = [&](const OptTensor& values, const char* name, const char* form,
                         int64_t width) {
    if (params.offsets != nullptr)
      return data_of<int64_t>(values, name, kTree.ragged_tokens, place, {params.num_rows});
    return data_of<int64_t>(values, name, form, place, {place.batch, width});
  };
  params.draft_tokens = table(draft_tokens, "draft_tokens", kTree.even_tokens, nodes);
  params.parents = table(parents, "parents", kTree.even_tokens, nodes);
  params.draft_rows = table(draft_rows, "draft_rows", "[B, N+1]", nodes + 1);
  params.counts = data_of<int64_t>(counts, "counts", "[B]", place, {place.batch});
  STD_TORCH_CHECK(draft_logits.has_value() == draft_rows.has_value(),
                  "draft_logits, draft_rows: expected both or none, given ",
                  draft_rows.has_value() ? "draft_rows" : "draft_logits", " only");
  expect_draft(draft_logits, 2, 0, draft_statistics, target_to_draft, place, params);
  const Tensor draft = draft_logits.has_value() ? unexpanded(*draft_logits) : target_logits;
  if (draft_logits.has_value()) {
    set_draft(draft, draft_statistics, target_to_draft, place, &params);
    params.num_draft_rows = draft.size(0);
    params.draft_stride = draft.stride(0);
  }
  set_slots(slots, {&temperatures, &top_ks, &top_ps, &min_ps, &seeds, &positions, &rounds, &rooms},
            &place, &params);
  set_sampling(&params.sampling, place, temperature, temperatures, top_k, top_ks, top_p, top_ps,
               min_p, min_ps);
  set_draw(&params.draw, place, seed, seeds, position, positions, round, rounds, level, draws,
           "[B, N+D+1]", nodes + depth + 1);

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
// slots, that overrides it when present. So a scalar never has to become a tensor first.
STABLE_TORCH_LIBRARY(polyspec, m) {
  m.def(
      "sample(Tensor logits, float temperature, Tensor? temperatures, int top_k, Tensor? top_ks, "
      "float top_p, Tensor? top_ps, float min_p, Tensor? min_ps, int seed, Tensor? seeds, "
      "int position, Tensor? positions, int round, Tensor? rounds, int node, Tensor? nodes, "
      "int level, Tensor? draws, Tensor? allowed=None) "
      "-> (Tensor tokens, Tensor logprobs, Tensor status, Tensor distributions)");
  // `sample` of the next token of each row [B, 1, V], returned as [B, 1]; it is written to the next
  // column of the drafted tokens, with its row of logits and the row's statistics.
  m.def(
      "draw(Tensor logits, Tensor? temperatures, Tensor? top_ks, Tensor? top_ps, Tensor? min_ps, "
      "Tensor seeds, Tensor positions, Tensor rounds, int level, int column, Tensor(a!) tokens, "
      "Tensor(b!) status, Tensor(c!)? rows, Tensor(d!)? statistics, bool readable=False) -> "
      "Tensor");
  // Arguments that determine the outputs' shapes come first, for fake implementations.
  // ends: num_emitted, ended, cache_lengths, next_ids, next_positions; int64 [5, B].
  m.def(
      "verify(Tensor target_logits, Tensor draft_tokens, Tensor? offsets, int? draft_len, "
      "Tensor? draft_logits, Tensor? draft_lengths, Tensor? draft_rows, Tensor? draft_statistics, "
      "Tensor? target_to_draft, float temperature, Tensor? temperatures, int top_k, "
      "Tensor? top_ks, float top_p, Tensor? top_ps, float min_p, Tensor? min_ps, int seed, "
      "Tensor? seeds, int position, Tensor? positions, int round, Tensor? rounds, int level, "
      "int rule, Tensor? draws, Tensor? slots, Tensor? eos, int room, Tensor? rooms, "
      "Tensor? allowed=None) "
      "-> (Tensor tokens, Tensor num_accepted, Tensor logprobs, Tensor status, "
      "Tensor distributions, Tensor ends)");
  m.def(
      "verify_tree(Tensor target_logits, Tensor draft_tokens, Tensor parents, Tensor? offsets, "
      "int? nodes, int? depth, Tensor? counts, Tensor? draft_logits, Tensor? draft_rows, "
      "Tensor? draft_statistics, Tensor? target_to_draft, float temperature, "
      "Tensor? temperatures, int top_k, Tensor? top_ks, float top_p, Tensor? top_ps, "
      "float min_p, Tensor? min_ps, int seed, Tensor? seeds, int position, Tensor? positions, "
      "int round, Tensor? rounds, int level, int rule, Tensor? draws, Tensor? slots, "
      "Tensor? eos, int room, Tensor? rooms, Tensor? allowed=None) "
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
