// polyspec::sample and polyspec::verify: check what the host can see, then hand over to the
// backend.
#include "api/checks.hpp"
#include "cpu/dispatch.hpp"
#include "cuda/launch.hpp"
#include "polyspec/philox.hpp"
#include "polyspec/verify_tree.hpp"

namespace polyspec {
namespace {

constexpr int64_t kVocabLimit = int64_t{1} << 31;

Result check_draw(const DrawParams& draw) {
  if (draw.level < 1 || draw.level >= (1 << 16)) return invalid("level must be in [1, 65536)");
  return {};
}

bool known(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

Result check(const SampleParams& p) {
  if (p.batch < 0) return invalid("batch must be >= 0");
  if (p.vocab < 1 || p.vocab >= kVocabLimit) return invalid("vocab must be in [1, 2^31)");
  if (!known(p.dtype)) return invalid("dtype is not a DType");
  if (p.batch > 0 && (p.logits == nullptr || p.tokens == nullptr || p.logprobs == nullptr ||
                      p.status == nullptr)) {
    return invalid("logits, tokens, logprobs and status must not be null");
  }
  return check_draw(p.draw);
}

Result check(const CutParams& cut, int64_t batch) {
  if (cut.eos_count < 0) return invalid("eos_count must be >= 0");
  if (batch > 0 && cut.eos_count > 0 && cut.eos == nullptr) {
    return invalid("eos must not be null when eos_count > 0");
  }
  if (cut.room.data == nullptr && cut.room.value < 0) return invalid("room must be >= 0");
  return {};
}

// Ragged requests and parameters at slots, of verify and verify_tree. The operators' own lengths
// are not for ragged requests.
template <class Params>
Result check_layout(const Params& p, bool has_lengths, const char* no_lengths) {
  if (p.offsets != nullptr) {
    if (p.num_rows < 0) return invalid("num_rows must be >= 0");
    if (has_lengths) return invalid(no_lengths);
  }
  if (p.slots != nullptr && p.num_slots < 0) return invalid("num_slots must be >= 0");
  return {};
}

Result check(const VerifyTreeParams& p) {
  if (p.batch < 0) return invalid("batch must be >= 0");
  if (p.nodes < 0 || p.nodes >= kDrawNodes) return invalid("nodes must be in [0, 2^14)");
  if (p.depth < 0 || p.depth > p.nodes) return invalid("depth must be in [0, nodes]");
  if (p.vocab < 1 || p.vocab >= kVocabLimit) return invalid("vocab must be in [1, 2^31)");
  if (!known(p.target_dtype)) return invalid("target_dtype is not a DType");
  if (p.draft_rows != nullptr) {
    if (p.num_draft_rows < 0) return invalid("num_draft_rows must be >= 0");
    if (p.num_draft_rows > 0 && p.draft_logits == nullptr)
      return invalid("draft_logits must not be null when draft_rows are given");
    if (p.num_draft_rows > 0 && !known(p.draft_dtype)) return invalid("draft_dtype is not a DType");
    if (p.num_draft_rows > 0 && (p.draft_vocab < 1 || p.draft_vocab > p.vocab))
      return invalid("draft_vocab must be in [1, vocab]");
  }
  const Result layout = check_layout(p, p.counts != nullptr, "counts must be null with offsets");
  if (!layout.ok()) return layout;
  if (p.batch > 0 &&
      (p.target_logits == nullptr || p.tokens == nullptr || p.num_accepted == nullptr ||
       p.rows == nullptr || p.logprobs == nullptr || p.status == nullptr)) {
    return invalid(
        "target_logits, tokens, num_accepted, rows, logprobs and status must not be null");
  }
  if (p.batch > 0 && p.depth > 0 && p.path == nullptr) {
    return invalid("path must not be null when depth > 0");
  }
  if (p.batch > 0 && p.nodes > 0 && (p.draft_tokens == nullptr || p.parents == nullptr)) {
    return invalid("draft_tokens and parents must not be null when nodes > 0");
  }
  const Result cut = check(p.cut, p.batch);
  return cut.ok() ? check_draw(p.draw) : cut;
}

Result check(const VerifyParams& p) {
  if (p.batch < 0 || p.draft_len < 0) return invalid("batch and draft_len must be >= 0");
  if (p.vocab < 1 || p.vocab >= kVocabLimit) return invalid("vocab must be in [1, 2^31)");
  if (!known(p.target_dtype)) return invalid("target_dtype is not a DType");
  if (p.rule != Rule::kToken && p.rule != Rule::kBlock) return invalid("rule is not a Rule");
  if (p.draft_logits != nullptr) {
    if (!known(p.draft_dtype)) return invalid("draft_dtype is not a DType");
    if (p.draft_vocab < 1 || p.draft_vocab > p.vocab)
      return invalid("draft_vocab must be in [1, vocab]");
  }
  if (p.draft_rows != nullptr) {
    if (p.num_draft_rows < 0) return invalid("num_draft_rows must be >= 0");
    if (p.num_draft_rows > 0 && p.draft_logits == nullptr)
      return invalid("draft_logits must not be null when draft_rows are given");
  }
  const Result layout =
      check_layout(p, p.draft_lengths != nullptr, "draft_lengths must be null with offsets");
  if (!layout.ok()) return layout;
  if (p.batch > 0 && (p.target_logits == nullptr || p.tokens == nullptr ||
                      p.num_accepted == nullptr || p.logprobs == nullptr || p.status == nullptr)) {
    return invalid("target_logits, tokens, num_accepted, logprobs and status must not be null");
  }
  if (p.batch > 0 && p.draft_len > 0 && p.draft_tokens == nullptr) {
    return invalid("draft_tokens must not be null when draft_len > 0");
  }
  const Result cut = check(p.cut, p.batch);
  if (!cut.ok()) return cut;
  if ((reinterpret_cast<uintptr_t>(p.workspace) & 15) != 0) {
    return invalid("workspace must be 16-byte aligned");
  }
  return check_draw(p.draw);
}

}  // namespace

Result sample(const SampleParams& params, Stream stream) {
  const Result result = check(params);
  if (!result.ok() || params.batch == 0) return result;
  if (stream.device == Stream::Device::kCuda) return cuda::sample(params, stream);
  cpu::sample(params, stream.executor);
  return {};
}

Result verify(const VerifyParams& params, Stream stream) {
  const Result result = check(params);
  if (!result.ok() || params.batch == 0) return result;
  if (stream.device == Stream::Device::kCuda) return cuda::verify(params, stream);
  cpu::verify(params, stream.executor);
  return {};
}

Result verify_tree(const VerifyTreeParams& params, Stream stream) {
  const Result result = check(params);
  if (!result.ok() || params.batch == 0) return result;
  if (stream.device == Stream::Device::kCuda) return cuda::verify_tree(params, stream);
  cpu::verify_tree(params, stream.executor);
  return {};
}

Result clear_workspace(void* workspace, int64_t bytes, Stream stream) {
  if (workspace == nullptr || bytes < 0) return invalid("workspace must not be null");
  return cuda::clear(workspace, bytes, stream);
}

bool is_capturing(Stream stream) {
  return stream.device == Stream::Device::kCuda && cuda::is_capturing(stream);
}

}  // namespace polyspec
