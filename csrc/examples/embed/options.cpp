#include "options.hpp"

#include <cerrno>
#include <cstdlib>
#include <functional>
#include <map>
#include <stdexcept>

const char* const kHelp =
    "Usage: ngram_chain TEXT_FILE [options]\n"
    "\n"
    "Trains byte n-gram models on TEXT_FILE, generates with a speculative chain of them, and "
    "compares with\n"
    "plain sampling from the target. At temperature 0 both texts must be equal, or the exit status "
    "is 1.\n"
    "\n"
    "  --orders N,N,...   orders of the models, target first, 1 to 8 each     [5,3,2]\n"
    "  --windows W,W,...  tokens that each level but the last waits for       [8,3]\n"
    "  --tail N           unverified tokens that the drafter adds for the target       [0]\n"
    "  --policy NAME      online, fsm, cached-fsm, q-learning or joint: chooses the windows    "
    "[none]\n"
    "  --rule NAME        token or block: how drafted blocks are verified       [token]\n"
    "  --tokens N         tokens to generate                                  [256]\n"
    "  --prompt TEXT      the text to go on from        [first 32 bytes of the file]\n"
    "  --stop BYTE        end after this byte; \\n is a newline                [none]\n"
    "  --temperature X    0 is greedy                                         [1]\n"
    "  --top-k N          0 is off                                            [0]\n"
    "  --top-p X          1 is off                                            [1]\n"
    "  --min-p X          0 is off                                            [0]\n"
    "  --seed N           key of all random draws                             [0]\n"
    "  --trials N         compare the distributions of chain and target on N texts     [0]\n"
    "  --help             this text\n";

namespace {

int64_t to_integer(const std::string& text) {
  char* end = nullptr;
  errno = 0;
  const long long value = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || errno != 0) throw std::runtime_error("expected an integer");
  return value;
}

float to_float(const std::string& text) {
  char* end = nullptr;
  errno = 0;
  const float value = std::strtof(text.c_str(), &end);
  if (text.empty() || *end != '\0' || errno != 0) throw std::runtime_error("expected a number");
  return value;
}

std::vector<int64_t> to_list(const std::string& text) {
  std::vector<int64_t> values;
  size_t begin = 0;
  while (true) {
    const size_t comma = text.find(',', begin);
    values.push_back(to_integer(text.substr(begin, comma - begin)));
    if (comma == std::string::npos) return values;
    begin = comma + 1;
  }
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
  const std::map<std::string, std::function<void(const std::string&)>> flags = {
      {"--orders", [&](const std::string& v) { out.orders = to_list(v); }},
      {"--windows", [&](const std::string& v) { out.windows = to_list(v); }},
      {"--prompt", [&](const std::string& v) { out.prompt = v; }},
      {"--tail", [&](const std::string& v) { settings.tail = to_integer(v); }},
      {"--tokens", [&](const std::string& v) { settings.max_new_tokens = to_integer(v); }},
      {"--trials", [&](const std::string& v) { out.trials = to_integer(v); }},
      {"--temperature",
       [&](const std::string& v) { settings.sampling.temperature.value = to_float(v); }},
      {"--top-k", [&](const std::string& v) { settings.sampling.top_k.value = to_integer(v); }},
      {"--top-p", [&](const std::string& v) { settings.sampling.top_p.value = to_float(v); }},
      {"--min-p", [&](const std::string& v) { settings.sampling.min_p.value = to_float(v); }},
      {"--seed",
       [&](const std::string& v) { settings.seed = static_cast<uint64_t>(to_integer(v)); }},
      {"--stop",
       [&](const std::string& v) {
         out.stop = v == "\\n" ? "\n" : v;
         if (out.stop.size() != 1) throw std::runtime_error("expected one byte");
       }},
      {"--policy",
       [&](const std::string& v) {
         if (policy_kinds().count(v) == 0) {
           throw std::runtime_error("expected online, fsm, cached-fsm, q-learning or joint");
         }
         out.policy = v;
       }},
      {"--rule",
       [&](const std::string& v) {
         if (v != "token" && v != "block") throw std::runtime_error("expected token or block");
         settings.rule = v == "block" ? polyspec::Rule::kBlock : polyspec::Rule::kToken;
       }},
  };
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--help" || word == "-h") {
      out.help = true;
      return out;
    }
    const auto flag = flags.find(word);
    if (flag != flags.end()) {
      if (i + 1 == argc) throw std::runtime_error(word + ": a value is missing");
      const std::string value = argv[++i];
      try {
        flag->second(value);
      } catch (const std::runtime_error& error) {
        throw std::runtime_error(word + ": " + error.what() + ", got '" + value + "'");
      }
    } else if (word.size() > 1 && word[0] == '-') {
      throw std::runtime_error("unknown option " + word + "; --help lists all");
    } else if (!out.text_file.empty()) {
      throw std::runtime_error("more than one text file: " + out.text_file + " and " + word);
    } else {
      out.text_file = word;
    }
  }
  if (out.text_file.empty()) throw std::runtime_error("which text file? --help shows the usage");
  return out;
}
