// llama.cpp as an engine: a llama_context of yours is a level of a chain.
//
//   polyspec::LlamaEngine target(large), draft(small);  // llama_context*, one vocabulary
//   polyspec::Chain chain({&target, &draft}, {4});      // four drafted tokens a verification
//   polyspec::ChainSettings settings;
//   settings.eos = target.end_tokens();
//   std::vector<int64_t> text;
//   const polyspec::Outcome outcome = chain.generate(prompt, settings, &text);
//
// A context needs n_outputs_max of at least the rows that one verification keeps: the window, and
// one. Logits of a position depend on how many rows the pass has, unless the model was loaded with
// use_extra_bufts = false and the context has flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED: with
// other settings a chain is exact for the logits that its passes give, which at temperature 0 can
// differ from plain decoding. Levels run in turn, so all contexts may share one ggml_threadpool.
#pragma once

#include <algorithm>
#include <vector>

#include "llama.h"
#include "polyspec/engines/engine.hpp"

namespace polyspec {

class LlamaEngine final : public Engine {
 public:
  // context: not owned. Its sequence `sequence` is the engine's from now on, and begins empty;
  // other sequences are left alone. max_rows: its n_outputs_max, beyond which llama_decode ends the
  // process; 0 is n_batch, as there. The call allocates, decode and truncate do not.
  explicit LlamaEngine(llama_context* context, int64_t max_rows = 0, llama_seq_id sequence = 0)
      : context_(context), sequence_(sequence) {
    const llama_model* model = llama_get_model(context);
    vocab_ = llama_model_get_vocab(model);
    recurrent_ = llama_model_is_recurrent(model) || llama_model_is_hybrid(model);
    sliding_window_ = llama_model_n_swa(model);
    const size_t most = llama_n_batch(context);
    max_rows_ = max_rows > 0 ? std::min<int64_t>(max_rows, llama_n_batch(context))
                             : static_cast<int64_t>(most);
    tokens_.resize(most);
    positions_.resize(most);
    outputs_.resize(most);
    sequence_counts_.assign(most, 1);
    sequences_.assign(most, &sequence_);
    llama_memory_seq_rm(llama_get_memory(context_), sequence_, -1, -1);
  }
  LlamaEngine(const LlamaEngine&) = delete;
  LlamaEngine& operator=(const LlamaEngine&) = delete;

  int64_t vocab_size() const noexcept override { return llama_vocab_n_tokens(vocab_); }
  int64_t max_length() const noexcept override { return llama_n_ctx_seq(context_); }
  int64_t length() const noexcept override { return length_; }
  const float* logits() const noexcept override { return logits_; }

  // The ids that end a text, for ChainSettings::eos.
  std::vector<int64_t> end_tokens() const {
    std::vector<int64_t> found;
    for (llama_token id = 0; id < llama_vocab_n_tokens(vocab_); ++id) {
      if (llama_vocab_is_eog(vocab_, id)) found.push_back(id);
    }
    return found;
  }

  Outcome decode(const int64_t* tokens, int64_t count, int64_t rows) noexcept override {
    const int64_t most = static_cast<int64_t>(tokens_.size());
    if (rows > max_rows_) {
      return Outcome::failure(
          Outcome::Code::kInvalidArgument,
          "rows of logits: expected at most n_batch and n_outputs_max, %lld, given %lld",
          static_cast<long long>(max_rows_), static_cast<long long>(rows));
    }
    logits_ = nullptr;
    while (count > 0) {
      int64_t now = std::min(count, most);
      if (now < count) now = std::min(now, count - rows);  // the last batch has all rows of logits
      for (int64_t i = 0; i < now; ++i) {
        const size_t at = static_cast<size_t>(i);
        tokens_[at] = static_cast<llama_token>(tokens[i]);
        positions_[at] = static_cast<llama_pos>(length_ + i);
        outputs_[at] = count - i <= rows;
      }
      llama_batch batch{};
      batch.n_tokens = static_cast<int32_t>(now);
      batch.token = tokens_.data();
      batch.pos = positions_.data();
      batch.n_seq_id = sequence_counts_.data();
      batch.seq_id = sequences_.data();
      batch.logits = outputs_.data();
      const int32_t code = llama_decode(context_, batch);
      if (code != 0) {
        forget_from(length_);  // an aborted or failed batch leaves a part of itself
        return failed(code, now);
      }
      tokens += now;
      count -= now;
      length_ += now;
      if (count == 0 && rows > 0) {
        logits_ = llama_get_logits_ith(context_, static_cast<int32_t>(now - rows));
        if (logits_ == nullptr) {
          return Outcome::failure(Outcome::Code::kEngine, "llama_get_logits_ith gave no logits");
        }
      }
    }
    return {};
  }

  void truncate(int64_t length) noexcept override {
    if (length < length_) forget_from(length);
  }

 private:
  // Recurrent states go back n_rs_seq tokens at most, and once between two passes; a cache of a
  // sliding window reports success even where it has lost the earlier tokens. Either begins anew.
  void forget_from(int64_t length) noexcept {
    const llama_memory_t memory = llama_get_memory(context_);
    bool whole = llama_memory_seq_rm(memory, sequence_, static_cast<llama_pos>(length), -1);
    if (whole && sliding_window_ > 0 && !recurrent_ && length > 0) {
      const int64_t needed = std::max<int64_t>(length - sliding_window_, 0);
      const int64_t oldest = llama_memory_seq_pos_min(memory, sequence_);
      whole = oldest >= 0 && oldest <= needed;
    }
    length_ = whole ? length : 0;
    if (!whole) llama_memory_seq_rm(memory, sequence_, -1, -1);
  }

  Outcome failed(int32_t code, int64_t count) const noexcept {
    const Outcome::Code kind = code == 1   ? Outcome::Code::kNoRoom
                               : code == 2 ? Outcome::Code::kAborted
                                           : Outcome::Code::kEngine;
    const char* what = code == 1    ? "no room in the context"
                       : code == 2  ? "aborted"
                       : code == -1 ? "an input that it refuses"
                                    : "a failure of its own";
    return Outcome::failure(kind, "llama_decode returned %d, %s, for %lld tokens behind %lld", code,
                            what, static_cast<long long>(count), static_cast<long long>(length_));
  }

  llama_context* context_;
  const llama_vocab* vocab_ = nullptr;
  llama_seq_id sequence_;
  bool recurrent_ = false;
  int64_t sliding_window_ = 0;
  int64_t max_rows_ = 0;
  int64_t length_ = 0;
  const float* logits_ = nullptr;
  // [n_batch], the arrays of a llama_batch
  std::vector<llama_token> tokens_;
  std::vector<llama_pos> positions_;
  std::vector<int8_t> outputs_;
  std::vector<int32_t> sequence_counts_;
  std::vector<llama_seq_id*> sequences_;
};

}  // namespace polyspec
