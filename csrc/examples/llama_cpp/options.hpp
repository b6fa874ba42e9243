// The command line.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "polyspec/engines/chain.hpp"

struct Options {
  std::vector<std::string> models;  // GGUF files, the target first
  bool lookup = false;              // prompt lookup is the last level
  std::vector<int64_t> windows;     // empty: 4 for the drafter, 8 above
  std::string policy;               // empty: the windows stay
  std::vector<std::string> prompts;
  std::string system;
  bool raw = false;  // the prompt as it is, without the model's chat template
  bool ids = false;  // prompts are token ids, and ids are printed
  bool ignore_eos = false;
  int64_t texts = 1;    // of each prompt, with seeds seed, seed + 1, ...
  int64_t context = 0;  // tokens; 0: 4096, or the model's training context if smaller
  int32_t threads = 0;  // 0: as many as there are processors
  bool exact = true;    // logits of a position do not depend on the rows of its pass
  std::string backends;
  bool json = false;
  bool verbose = false;
  bool help = false;
  polyspec::ChainSettings settings;
};

// Throws std::runtime_error that names the option.
Options parse_options(int argc, char** argv);

const std::map<std::string, polyspec::PolicyKind>& policy_kinds();

extern const char* const kHelp;
