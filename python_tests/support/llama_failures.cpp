// What a chain says when a llama_context fails, and that it goes on as before afterwards. Argument:
// a GGUF file of more than 4 ids without a vocabulary. Exit status 0 if all is as it should be.
#include <cstdio>
#include <cstring>

#include "ggml-backend.h"
#include "polyspec/engines/chain.hpp"
#include "polyspec/engines/llama.hpp"

namespace {

int failures = 0;

void expect(bool holds, const char* what, const char* message) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s (message: '%s')\n", what, message);
  ++failures;
}

bool has(const polyspec::Outcome& outcome, const char* part) {
  return std::strstr(outcome.message, part) != nullptr;
}

}  // namespace

int main(int, char** arguments) {
  using Code = polyspec::Outcome::Code;
  ggml_backend_load_all_from_path(arguments[2]);
  llama_backend_init();
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  llama_model* model = llama_model_load_from_file(arguments[1], llama_model_default_params());
  llama_context_params params = llama_context_default_params();
  params.n_ctx = 256;  // llama.cpp rounds less up to that
  params.n_batch = params.n_ubatch = 16;
  params.n_seq_max = 2;
  params.kv_unified = true;  // sequences share the room
  params.n_threads = params.n_threads_batch = 1;
  llama_context* large = llama_init_from_model(model, params);
  llama_context* small = llama_init_from_model(model, params);
  polyspec::LlamaEngine target(large), draft(small);
  polyspec::Chain chain({&target, &draft}, {3});

  polyspec::ChainSettings settings;
  settings.max_new_tokens = 20;
  settings.sampling.temperature.value = 0;
  const std::vector<int64_t> prompt = {1, 2, 3};
  std::vector<int64_t> before, text;
  polyspec::Outcome outcome = chain.generate(prompt, settings, &before);
  expect(outcome.ok() && before.size() == 20, "a text of 20 tokens", outcome.message);

  const auto usable = [&](const char* what) {
    outcome = chain.generate(prompt, settings, &text);
    expect(outcome.ok() && text == before, what, outcome.message);
  };
  usable("the same text again");

  // The caller's abort callback, in the drafter and in the target, at the start and on the way.
  for (llama_context* context : {small, large}) {
    for (const int after : {0, 20, 150}) {
      static int left;
      left = after;
      llama_set_abort_callback(context, [](void*) { return left-- <= 0; }, nullptr);
      outcome = chain.generate(prompt, settings, &text);
      expect(outcome.code == Code::kAborted && has(outcome, "llama_decode returned 2, aborted"),
             "an abort", outcome.message);
      expect(chain.ended() == polyspec::Ended::kFailed, "ended as failed", outcome.message);
      expect(text.size() <= before.size() && std::equal(text.begin(), text.end(), before.begin()),
             "what the target had emitted", outcome.message);
      llama_set_abort_callback(context, nullptr, nullptr);
      usable("the same text after an abort");
    }
  }

  // Another sequence has taken the room that the context shares.
  polyspec::LlamaEngine other(large, 0, 1);
  const std::vector<int64_t> much(240, 1);
  target.truncate(0);
  expect(other.decode(much.data(), 240, 0).ok(), "240 tokens of another sequence", "");
  outcome = chain.generate(prompt, settings, &text);
  expect(outcome.code == Code::kNoRoom && has(outcome, "level 1, position") &&
             has(outcome, "llama_decode returned 1, no room in the context"),
         "no room", outcome.message);
  expect(!text.empty() && text.size() < before.size() &&
             std::equal(text.begin(), text.end(), before.begin()),
         "what the target had emitted before it", outcome.message);
  other.truncate(0);
  usable("the same text when there is room again");

  // An id that the model does not have, and more rows than there may be.
  const int64_t wrong[] = {1, 1 << 20};
  outcome = target.decode(wrong, 2, 1);
  expect(outcome.code == Code::kEngine && has(outcome, "llama_decode returned -1"), "a wrong id",
         outcome.message);
  usable("the same text after a wrong id");
  outcome = target.decode(much.data(), 40, 17);
  expect(outcome.code == Code::kInvalidArgument && has(outcome, "16, given 17"), "too many rows",
         outcome.message);

  // A prompt of several batches, one that fills the context, and one that does not fit.
  for (const int64_t length : {17, 40, 250, 256, 257}) {
    const std::vector<int64_t> longer(static_cast<size_t>(length), 2);
    outcome = chain.generate(longer, settings, &text);
    if (length == 257) {
      expect(outcome.code == Code::kNoRoom && has(outcome, "prompt: expected 1 to 256 tokens"),
             "a prompt too long", outcome.message);
    } else {
      const size_t room = static_cast<size_t>(std::min<int64_t>(20, 257 - length));
      expect(outcome.ok() && text.size() == room, "a longer prompt", outcome.message);
      expect((chain.ended() == polyspec::Ended::kContext) == (room < 20), "how it ended",
             outcome.message);
    }
  }
  outcome = chain.generate({}, settings, &text);
  expect(outcome.code == Code::kInvalidArgument, "an empty prompt", outcome.message);
  usable("the same text in the end");

  llama_free(small);
  llama_free(large);
  llama_model_free(model);
  return failures == 0 ? 0 : 1;
}
