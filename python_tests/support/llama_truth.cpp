// What llama.cpp makes of a GGUF file: `FILE id ...` prints the logits of every position, a line
// each; `-t FILE` prints the ids of the texts on standard input, which a NUL byte separates.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <iostream>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "llama.h"

int main(int count, char** words) {
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  ggml_backend_load_all_from_path(std::getenv("LLAMA_BACKENDS"));
  llama_backend_init();
  const bool texts = std::string(words[1]) == "-t";
  llama_model_params model_params = llama_model_default_params();
  model_params.vocab_only = texts;
  model_params.use_extra_bufts = false;
  llama_model* model = llama_model_load_from_file(words[texts ? 2 : 1], model_params);
  if (model == nullptr) return 2;
  const llama_vocab* vocab = llama_model_get_vocab(model);
  if (texts) {
    const std::string all{std::istreambuf_iterator<char>(std::cin), {}};
    for (size_t begin = 0; begin <= all.size();) {
      const size_t end = std::min(all.find('\0', begin), all.size());
      std::vector<llama_token> ids(end - begin + 8);
      ids.resize(llama_tokenize(vocab, all.data() + begin, static_cast<int>(end - begin),
                                ids.data(), static_cast<int>(ids.size()), true, true));
      for (const llama_token id : ids) std::printf("%d ", id);
      std::printf("\n");
      begin = end + 1;
    }
    return 0;
  }
  llama_context_params params = llama_context_default_params();
  params.n_ctx = params.n_batch = params.n_ubatch = 512;
  params.n_threads = params.n_threads_batch = 1;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
  params.type_k = params.type_v = GGML_TYPE_F32;
  llama_context* context = llama_init_from_model(model, params);
  llama_batch batch = llama_batch_init(count - 2, 0, 1);
  for (int i = 0; i + 2 < count; ++i) {
    batch.token[i] = std::atoi(words[i + 2]);
    batch.pos[i] = i;
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = 0;
    batch.logits[i] = 1;
    ++batch.n_tokens;
  }
  if (context == nullptr || llama_decode(context, batch) != 0) return 3;
  for (int i = 0; i < batch.n_tokens; ++i) {
    const float* row = llama_get_logits_ith(context, i);
    for (int id = 0; id < llama_vocab_n_tokens(vocab); ++id) std::printf("%.9g ", row[id]);
    std::printf("\n");
  }
  return 0;
}
