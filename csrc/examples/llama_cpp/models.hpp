// GGUF files as engines: the settings of llama.cpp.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "options.hpp"
#include "polyspec/engines/llama.hpp"

// The engines of a chain, and the threads that they take turns with. The constructor loads, and
// throws std::runtime_error that names the file.
class Models {
 public:
  explicit Models(const Options& options);
  ~Models();
  Models(const Models&) = delete;
  Models& operator=(const Models&) = delete;

  std::vector<polyspec::Engine*> engines() const;
  std::vector<int64_t> end_tokens() const { return engines_[0]->end_tokens(); }

  // The target's tokens of a prompt, in its chat template unless `raw`.
  std::vector<int64_t> encode(const std::string& prompt, const Options& options) const;
  std::string decode(const int64_t* tokens, int64_t count) const;

 private:
  struct Level;
  void load(const std::string& path, const Options& options, int64_t rows);
  std::string chat(const std::string& prompt, const std::string& system) const;

  struct Free {
    void operator()(llama_model* model) const { llama_model_free(model); }
    void operator()(llama_context* context) const { llama_free(context); }
  };
  ggml_threadpool* threads_ = nullptr;
  void (*free_threads_)(ggml_threadpool*) = nullptr;
  // Freed in the reverse order.
  std::vector<std::unique_ptr<llama_model, Free>> models_;
  std::vector<std::unique_ptr<llama_context, Free>> contexts_;
  std::vector<std::unique_ptr<polyspec::LlamaEngine>> engines_;
};
