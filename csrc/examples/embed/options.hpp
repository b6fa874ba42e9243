// The command line of the example.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "polyspec/engines/chain.hpp"

struct Options {
  std::string text_file;
  std::string prompt;  // empty: the first 32 bytes of the text
  std::vector<int64_t> orders{5, 3, 2};
  std::vector<int64_t> windows{8, 3};
  std::string policy;  // empty: the windows stay
  std::string stop;    // empty, or one byte
  int64_t trials = 0;  // 0: no comparison of distributions
  polyspec::ChainSettings settings;
  bool help = false;
};

// Throws std::runtime_error that names the flag.
Options parse_options(int argc, char** argv);

const std::map<std::string, polyspec::PolicyKind>& policy_kinds();

extern const char* const kHelp;
