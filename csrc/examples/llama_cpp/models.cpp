#include "models.hpp"

#include <cstdio>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "ggml-backend.h"
#include "ggml-cpu.h"

Models::Models(const Options& options) {
  if (!options.verbose) {
    llama_log_set(
        [](ggml_log_level level, const char* text, void*) {
          if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
        },
        nullptr);
  }
  const std::string backends = options.backends.empty() ? DEFAULT_BACKENDS : options.backends;
  ggml_backend_load_all_from_path(backends.c_str());  // before anything else of llama.cpp
  llama_backend_init();
  ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
  if (cpu == nullptr) throw std::runtime_error("--backends: no CPU backend of ggml in " + backends);

  // One pool for all levels, which run in turn: two that spin at once slow each other down.
  ggml_backend_reg_t registry = ggml_backend_dev_backend_reg(cpu);
  const auto make = reinterpret_cast<decltype(&ggml_threadpool_new)>(
      ggml_backend_reg_get_proc_address(registry, "ggml_threadpool_new"));
  free_threads_ = reinterpret_cast<decltype(&ggml_threadpool_free)>(
      ggml_backend_reg_get_proc_address(registry, "ggml_threadpool_free"));
  const int32_t processors = static_cast<int32_t>(std::thread::hardware_concurrency());
  ggml_threadpool_params threads =
      ggml_threadpool_params_default(options.threads > 0 ? options.threads : processors);
  if (make != nullptr && free_threads_ != nullptr) threads_ = make(&threads);
  if (threads_ == nullptr) throw std::runtime_error("ggml has no threads to give");

  // A verification keeps a row for each pending token and one more. Blocks may overshoot a window
  // by the tokens that the level below hands up, and a policy goes up to 32 above a drafter's 16.
  int64_t rows = 1 + options.settings.tail;
  rows += std::accumulate(options.windows.begin(), options.windows.end(), int64_t{0});
  if (!options.policy.empty()) rows += 32 * static_cast<int64_t>(options.windows.size());
  for (const std::string& path : options.models) load(path, options, rows);
}

Models::~Models() {
  engines_.clear();
  contexts_.clear();
  models_.clear();
  if (threads_ != nullptr) free_threads_(threads_);
  llama_backend_free();
}

void Models::load(const std::string& path, const Options& options, int64_t rows) {
  llama_model_params model_params = llama_model_default_params();
  model_params.use_extra_bufts = !options.exact;  // repacked weights: other sums from 4 rows on
  models_.emplace_back(llama_model_load_from_file(path.c_str(), model_params));
  llama_model* model = models_.back().get();
  if (model == nullptr) throw std::runtime_error("cannot load the model '" + path + "'");

  const int64_t trained = llama_model_n_ctx_train(model);
  llama_context_params params = llama_context_default_params();
  params.n_ctx = static_cast<uint32_t>(
      options.context > 0 ? options.context
                          : std::min<int64_t>(4096, std::max<int64_t>(trained, 2)));
  params.n_batch = params.n_ubatch = static_cast<uint32_t>(std::max<int64_t>(512, rows));
  params.n_outputs_max = static_cast<uint32_t>(rows);
  params.n_threads = params.n_threads_batch =
      options.threads > 0 ? options.threads
                          : static_cast<int32_t>(std::thread::hardware_concurrency());
  params.flash_attn_type =
      options.exact ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_AUTO;
  params.swa_full = true;  // a rollback may go back beyond a sliding window
  if (llama_model_is_recurrent(model) || llama_model_is_hybrid(model)) {
    params.n_rs_seq = static_cast<uint32_t>(rows);  // as far as a verification takes back
  }
  contexts_.emplace_back(llama_init_from_model(model, params));
  llama_context* context = contexts_.back().get();
  if (context == nullptr) {
    throw std::runtime_error("cannot make a context of " + std::to_string(params.n_ctx) +
                             " tokens for '" + path + "'");
  }
  llama_attach_threadpool(context, threads_, nullptr);
  engines_.push_back(std::make_unique<polyspec::LlamaEngine>(context, rows));

  const llama_vocab* own = llama_model_get_vocab(model);
  const llama_vocab* targets = llama_model_get_vocab(models_[0].get());
  const auto word = [](const llama_vocab* vocab, llama_token id) -> std::string {
    if (llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_NONE) return "";
    return llama_vocab_get_text(vocab, id);
  };
  const int32_t ids = std::min(llama_vocab_n_tokens(own), llama_vocab_n_tokens(targets));
  for (llama_token id = 0; id < ids; ++id) {
    if (word(own, id) == word(targets, id)) continue;
    throw std::runtime_error("'" + path + "': expected the target's vocabulary, but id " +
                             std::to_string(id) + " is '" + word(own, id) + "' and not '" +
                             word(targets, id) + "'");
  }
}

std::vector<polyspec::Engine*> Models::engines() const {
  std::vector<polyspec::Engine*> out;
  for (const auto& engine : engines_) out.push_back(engine.get());
  return out;
}

std::string Models::chat(const std::string& prompt, const std::string& system) const {
  const char* form = llama_model_chat_template(models_[0].get(), nullptr);
  if (form == nullptr) throw std::runtime_error("the target has no chat template: give --raw");
  std::vector<llama_chat_message> messages;
  if (!system.empty()) messages.push_back({"system", system.c_str()});
  messages.push_back({"user", prompt.c_str()});
  std::string text(2 * (prompt.size() + system.size()) + 256, '\0');
  for (int attempt = 0; attempt < 2; ++attempt) {
    const int32_t size = llama_chat_apply_template(form, messages.data(), messages.size(), true,
                                                   text.data(), static_cast<int32_t>(text.size()));
    if (size < 0) throw std::runtime_error("llama.cpp does not know the chat template: give --raw");
    const bool fits = static_cast<size_t>(size) <= text.size();
    text.resize(static_cast<size_t>(size));
    if (fits) break;
  }
  return text;
}

std::vector<int64_t> Models::encode(const std::string& prompt, const Options& options) const {
  std::vector<int64_t> ids;
  if (options.ids) {
    std::istringstream words(prompt);
    for (int64_t id = 0; words >> id;) ids.push_back(id);
    if (!words.eof()) {
      throw std::runtime_error("--ids: expected token ids, given '" + prompt + "'");
    }
    return ids;
  }
  const llama_vocab* vocab = llama_model_get_vocab(models_[0].get());
  const std::string text = options.raw ? prompt : chat(prompt, options.system);
  std::vector<llama_token> tokens(text.size() + 8);
  const int32_t count =
      llama_tokenize(vocab, text.c_str(), static_cast<int32_t>(text.size()), tokens.data(),
                     static_cast<int32_t>(tokens.size()), true, true);
  if (count < 0) throw std::runtime_error("llama.cpp cannot tokenize the prompt");
  ids.assign(tokens.begin(), tokens.begin() + count);
  return ids;
}

std::string Models::decode(const int64_t* tokens, int64_t count) const {
  const llama_vocab* vocab = llama_model_get_vocab(models_[0].get());
  std::string text;
  char piece[256];
  for (int64_t i = 0; i < count; ++i) {
    const int32_t size = llama_token_to_piece(vocab, static_cast<llama_token>(tokens[i]), piece,
                                              sizeof piece, 0, false);
    if (size > 0) text.append(piece, static_cast<size_t>(size));
  }
  return text;
}
