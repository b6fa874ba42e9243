// polyspec::sample and polyspec::verify: check arguments on the host, then call the backend.
#include "api/checks.hpp"
#include "cpu/dispatch.hpp"
#include "cpu/isa.hpp"
#include "cuda/launch.hpp"
#include "polyspec/philox.hpp"
#include "polyspec/verify_tree.hpp"

namespace polyspec {
namespace {

constexpr int64_t kVocabLimit = int64_t{1} << 31;

struct NamedSize {
  const char* name;
  int64_t size;
};

Result check_vocab(int64_t vocab) {
  return vocab < 1 || vocab >= kVocabLimit ? expected("vocab", "[1, 2^31)", vocab) : Result{};
}

Result check_draw(const DrawParams& draw) {
  return draw.level < 1 || draw.level >= (1 << 16) ? expected("level", "[1, 2^16)", draw.level)
                                                   : Result{};
}

Result check(const SampleParams& p) {
  if (p.batch < 0) return expected("batch", ">= 0", p.batch);
  if (p.ahead < 0) return expected("ahead", ">= 0", p.ahead);
  if (const Result vocab = check_vocab(p.vocab); !vocab.ok()) return vocab;
  if (const Result dtype = check_dtype("dtype", p.dtype); !dtype.ok()) return dtype;
  if (const Result sizes = check_sizes("batch, vocab", {p.batch, p.vocab}); !sizes.ok())
    return sizes;
  if (p.stride < 1) return expected("stride", ">= 1", p.stride);
  if (p.statistics_stride < 1) return expected("statistics_stride", ">= 1", p.statistics_stride);
  const bool any = p.batch > 0;
  const Result given = check_given({{"logits", p.logits, any},
                                    {"tokens", p.tokens, any},
                                    {"logprobs", p.logprobs, any},
                                    {"status", p.status, any}});
  return given.ok() ? check_draw(p.draw) : given;
}

Result check(const CutParams& cut, int64_t batch) {
  if (cut.eos_count < 0) return expected("eos_count", ">= 0", cut.eos_count);
  const Result ids = check_sizes("eos_count", {batch, cut.eos_count});
  if (!ids.ok()) return ids;
  const Result eos = check_given({{"eos", cut.eos, batch > 0 && cut.eos_count > 0}});
  if (!eos.ok()) return eos;
  if (cut.room.data == nullptr && cut.room.value < 0)
    return expected("room", ">= 0", cut.room.value);
  return {};
}

// Checks common to verify and verify_tree. `most`: draft tokens of a request, by name.
template <class Params>
Result check_both(const Params& p, const NamedSize& most, bool draft_logits_given) {
  if (p.batch < 0) return expected("batch", ">= 0", p.batch);
  if (const Result vocab = check_vocab(p.vocab); !vocab.ok()) return vocab;
  const Result dtype = check_dtype("target_dtype", p.target_dtype);
  if (!dtype.ok()) return dtype;
  const bool ragged = p.offsets != nullptr, pool = p.draft_rows != nullptr;
  if (ragged && p.num_rows < 0) return expected("num_rows", ">= 0", p.num_rows);
  if (most.size < 0) return expected(most.name, ">= 0", most.size);
  for (const Result& sizes :
       {check_sizes(most.name, {p.batch, most.size, ragged && pool ? 1 : p.vocab}),
        check_sizes("num_rows", {ragged ? p.num_rows : 1, p.vocab}),
        check_sizes("num_draft_rows", {pool ? p.num_draft_rows : 1, p.vocab})}) {
    if (!sizes.ok()) return sizes;
  }
  if (p.draft_rows != nullptr) {
    if (p.num_draft_rows < 0) return expected("num_draft_rows", ">= 0", p.num_draft_rows);
    const Result rows = check_given({{"draft_logits", p.draft_logits, p.num_draft_rows > 0}});
    if (!rows.ok()) return rows;
  }
  if (draft_logits_given) {
    const Result draft = check_dtype("draft_dtype", p.draft_dtype);
    if (!draft.ok()) return draft;
    if (p.draft_vocab < 1 || p.draft_vocab > p.vocab)
      return expected("draft_vocab", "[1, vocab]", p.draft_vocab);
  }
  if (p.slots != nullptr && p.num_slots < 0) return expected("num_slots", ">= 0", p.num_slots);
  const bool any = p.batch > 0;
  const Result given = check_given({{"target_logits", p.target_logits, any},
                                    {"tokens", p.tokens, any},
                                    {"num_accepted", p.num_accepted, any},
                                    {"logprobs", p.logprobs, any},
                                    {"status", p.status, any}});
  if (!given.ok()) return given;
  const Result cut = check(p.cut, p.batch);
  if (!cut.ok()) return cut;
  const Result draw = check_draw(p.draw);
  return draw.ok() ? check_aligned("workspace", p.workspace, 16) : draw;
}

Result check_rule(Rule rule) {
  return rule == Rule::kToken || rule == Rule::kBlock
             ? Result{}
             : expected("rule", "token (0) or block (1)", static_cast<int>(rule));
}

Result check(const VerifyTreeParams& p) {
  if (const Result rule = check_rule(p.rule); !rule.ok()) return rule;
  if (p.nodes < 0 || p.nodes >= kDrawNodes) return expected("nodes", "[0, 2^14)", p.nodes);
  if (p.depth < 0 || p.depth > p.nodes) return expected("depth", "[0, nodes]", p.depth);
  const bool pool = p.draft_rows != nullptr && p.num_draft_rows > 0;
  if (p.offsets != nullptr && p.counts != nullptr)
    return invalid("counts: expected null beside offsets, given a pointer");
  const Result both = check_both(p, {"nodes", p.nodes}, pool);
  if (!both.ok()) return both;
  const bool any = p.batch > 0;
  return check_given({{"rows", p.rows, any},
                      {"path", p.path, any && p.depth > 0},
                      {"draft_tokens", p.draft_tokens, any && p.nodes > 0},
                      {"parents", p.parents, any && p.nodes > 0}});
}

Result check(const VerifyParams& p) {
  if (const Result rule = check_rule(p.rule); !rule.ok()) return rule;
  const Result both = check_both(p, {"draft_len", p.draft_len}, p.draft_logits != nullptr);
  if (!both.ok()) return both;
  return check_given({{"draft_tokens", p.draft_tokens, p.batch > 0 && p.draft_len > 0}});
}

int64_t mask_words(int64_t vocab) { return (vocab + 31) / 32; }

}  // namespace

Result sample(const SampleParams& given, Stream stream) {
  const Result result = check(given);
  if (!result.ok() || given.batch == 0) return result;
  SampleParams params = given;
  fill_strides({params.vocab}, &params.logits_stride);
  fill_strides({mask_words(params.vocab)}, &params.allowed_stride);
  if (stream.device == Stream::Device::kCuda) return cuda::sample(params, stream);
  if (const Result isa = cpu::check_isa(); !isa.ok()) return isa;
  cpu::sample(params, stream.executor);
  return {};
}

Result verify(const VerifyParams& given, Stream stream) {
  const Result result = check(given);
  if (!result.ok() || given.batch == 0) return result;
  VerifyParams params = given;
  const int64_t rows = params.draft_len + 1;
  fill_strides({rows, params.vocab}, params.target_stride);
  fill_strides({rows, mask_words(params.vocab)}, params.allowed_stride);
  fill_strides({params.draft_len, params.draft_vocab}, params.draft_stride);
  fill_strides({params.draft_len}, &params.draft_tokens_stride);
  fill_strides({params.draft_len}, &params.draft_rows_stride);
  if (stream.device == Stream::Device::kCuda) return cuda::verify(params, stream);
  if (const Result isa = cpu::check_isa(); !isa.ok()) return isa;
  cpu::verify(params, stream.executor);
  return {};
}

Result verify_tree(const VerifyTreeParams& given, Stream stream) {
  const Result result = check(given);
  if (!result.ok() || given.batch == 0) return result;
  VerifyTreeParams params = given;
  fill_strides({params.nodes + 1, params.vocab}, params.target_stride);
  fill_strides({params.nodes + 1, mask_words(params.vocab)}, params.allowed_stride);
  fill_strides({params.draft_vocab}, &params.draft_stride);
  if (stream.device == Stream::Device::kCuda) return cuda::verify_tree(params, stream);
  if (const Result isa = cpu::check_isa(); !isa.ok()) return isa;
  cpu::verify_tree(params, stream.executor);
  return {};
}

Result clear_workspace(void* workspace, int64_t bytes, Stream stream) {
  if (const Result given = check_given({{"workspace", workspace}}); !given.ok()) return given;
  if (bytes < 0) return expected("bytes", ">= 0", bytes);
  return cuda::clear(workspace, bytes, stream);
}

bool is_capturing(Stream stream) {
  return stream.device == Stream::Device::kCuda && cuda::is_capturing(stream);
}

}  // namespace polyspec
