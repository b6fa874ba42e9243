#include "options.hpp"

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <stdexcept>

const char* const kHelp =
    R"(Usage: polyspec_llama TARGET.gguf [MIDDLE.gguf ...] [DRAFT.gguf | prompt-lookup] [options]

Generates with a chain of GGUF models of one vocabulary. The text has the target's distribution;
with --exact and at temperature 0 it is the text of plain decoding. One model alone decodes plainly.

  --prompt TEXT      may be repeated                                  [required, or --prompts]
  --prompts FILE     one prompt a line
  --system TEXT      the system message of the chat                               [none]
  --raw              prompts as they are, without the model's chat template
  --ids              prompts are token ids with spaces between them; prints ids
  --tokens N         tokens to generate                                           [128]
  --ignore-eos       go on behind the end of the text
  --texts N          texts of each prompt, with seeds S, S+1, ...                 [1]

  --windows W,W,...  tokens that each level but the last waits for                [8,...,4]
  --tail N           unverified tokens that the drafter adds for the target       [0]
  --policy NAME      online, fsm, cached-fsm, q-learning or joint: chooses the windows, and
                     decodes plainly where drafts do not pay                      [none]
  --rule NAME        token, block, or llama.cpp: the draft's likeliest token stands if the
                     target's sample equals it                                    [token]
  --temperature X    0 is greedy                                                  [0]
  --top-k N          0 is off                                                     [0]
  --top-p X          1 is off                                                     [1]
  --min-p X          0 is off                                                     [0]
  --seed S           key of all random draws                                      [0]

  --exact            logits do not depend on the rows of a pass: flash attention, no repacked
                     weights                                                      [default]
  --fast             llama.cpp's own choice of both
  --context N        tokens of a context                                  [4096, or the model's]
  --threads N        of all levels together                              [all processors]
  --backends DIR     where ggml's backends lie                    [beside the library built with]
  --json             one line of JSON a text
  --verbose          llama.cpp's own messages
  --help             this text
)";

namespace {

int64_t to_integer(const std::string& text, int64_t least) {
  char* end = nullptr;
  errno = 0;
  const long long value = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || errno != 0 || value < least) {
    throw std::runtime_error("expected an integer of at least " + std::to_string(least));
  }
  return value;
}

float to_float(const std::string& text) {
  char* end = nullptr;
  const float value = std::strtof(text.c_str(), &end);
  if (text.empty() || *end != '\0') throw std::runtime_error("expected a number");
  return value;
}

std::vector<int64_t> to_list(const std::string& text) {
  std::vector<int64_t> values;
  for (size_t begin = 0, comma = 0; comma != std::string::npos; begin = comma + 1) {
    comma = text.find(',', begin);
    values.push_back(to_integer(text.substr(begin, comma - begin), 0));
  }
  return values;
}

void read_prompts(const std::string& path, std::vector<std::string>* prompts) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("expected a file that can be read");
  for (std::string line; std::getline(file, line);) {
    if (!line.empty()) prompts->push_back(line);
  }
}

void choose_rule(const std::string& name, polyspec::ChainSettings* settings) {
  if (name != "token" && name != "block" && name != "llama.cpp") {
    throw std::runtime_error("expected token, block or llama.cpp");
  }
  settings->rule = name == "block" ? polyspec::Rule::kBlock : polyspec::Rule::kToken;
  settings->greedy_drafts = name == "llama.cpp";
}

}  // namespace

const std::map<std::string, polyspec::PolicyKind>& policy_kinds() {
  static const std::map<std::string, polyspec::PolicyKind> kinds = {
      {"online", polyspec::PolicyKind::kOnline},
      {"fsm", polyspec::PolicyKind::kFsm},
      {"cached-fsm", polyspec::PolicyKind::kCachedFsm},
      {"q-learning", polyspec::PolicyKind::kQLearning},
      {"joint", polyspec::PolicyKind::kJoint},
  };
  return kinds;
}

Options parse_options(int argc, char** argv) {
  Options out;
  polyspec::ChainSettings& settings = out.settings;
  settings.max_new_tokens = 128;
  settings.sampling.temperature.value = 0;
  const std::map<std::string, std::function<void()>> switches = {
      {"--raw", [&] { out.raw = true; }},
      {"--ids", [&] { out.ids = true; }},
      {"--ignore-eos", [&] { out.ignore_eos = true; }},
      {"--exact", [&] { out.exact = true; }},
      {"--fast", [&] { out.exact = false; }},
      {"--json", [&] { out.json = true; }},
      {"--verbose", [&] { out.verbose = true; }},
      {"--help", [&] { out.help = true; }},
  };
  using Value = const std::string&;
  const std::map<std::string, std::function<void(Value)>> values = {
      {"--prompt", [&](Value v) { out.prompts.push_back(v); }},
      {"--prompts", [&](Value v) { read_prompts(v, &out.prompts); }},
      {"--system", [&](Value v) { out.system = v; }},
      {"--tokens", [&](Value v) { settings.max_new_tokens = to_integer(v, 1); }},
      {"--texts", [&](Value v) { out.texts = to_integer(v, 1); }},
      {"--windows", [&](Value v) { out.windows = to_list(v); }},
      {"--tail", [&](Value v) { settings.tail = to_integer(v, 0); }},
      {"--rule", [&](Value v) { choose_rule(v, &settings); }},
      {"--policy",
       [&](Value v) {
         if (policy_kinds().count(v) == 0) {
           throw std::runtime_error("expected online, fsm, cached-fsm, q-learning or joint");
         }
         out.policy = v;
       }},
      {"--temperature", [&](Value v) { settings.sampling.temperature.value = to_float(v); }},
      {"--top-k", [&](Value v) { settings.sampling.top_k.value = to_integer(v, 0); }},
      {"--top-p", [&](Value v) { settings.sampling.top_p.value = to_float(v); }},
      {"--min-p", [&](Value v) { settings.sampling.min_p.value = to_float(v); }},
      {"--seed", [&](Value v) { settings.seed = static_cast<uint64_t>(to_integer(v, 0)); }},
      {"--context", [&](Value v) { out.context = to_integer(v, 2); }},
      {"--threads", [&](Value v) { out.threads = static_cast<int32_t>(to_integer(v, 1)); }},
      {"--backends", [&](Value v) { out.backends = v; }},
  };
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (const auto found = switches.find(word); found != switches.end()) {
      found->second();
    } else if (const auto found = values.find(word); found != values.end()) {
      if (i + 1 == argc) throw std::runtime_error(word + ": expected a value, given none");
      const std::string value = argv[++i];
      try {
        found->second(value);
      } catch (const std::runtime_error& error) {
        throw std::runtime_error(word + ": " + error.what() + ", given '" + value + "'");
      }
    } else if (word.size() > 1 && word[0] == '-') {
      throw std::runtime_error("unknown option " + word + "; --help lists all");
    } else if (out.lookup) {
      throw std::runtime_error("prompt-lookup: expected as the last level, given " + word +
                               " behind");
    } else if (word == "prompt-lookup") {
      out.lookup = true;
    } else {
      out.models.push_back(word);
    }
  }
  if (out.help) return out;
  if (out.models.empty()) throw std::runtime_error("which GGUF file? --help shows the usage");
  if (out.prompts.empty()) throw std::runtime_error("--prompt: expected at least one, given none");
  const size_t levels = out.models.size() + (out.lookup ? 1 : 0);
  if (out.windows.empty() && levels > 1) {
    out.windows.assign(levels - 1, 8);
    out.windows.back() = 4;
  }
  return out;
}
