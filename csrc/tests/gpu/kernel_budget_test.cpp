// Registers and shared memory of every kernel for every architecture, by the output of ptxas when
// the library was built, against kernel_budget.txt. A stack frame or a spill fails with any budget.
// Skipped (77) in a build without CUDA.
#include <cxxabi.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <vector>

#include "support/check.hpp"

namespace {

struct Usage {
  int registers = -1;
  int shared = 0;
};
struct Budget {
  std::vector<std::string> words;
  int registers, shared;
};
using Kernels = std::map<std::string, std::map<std::string, Usage>>;  // by name, architecture

// verify_kernel<BFloat16, (Rule)0, 384>
std::string readable(const std::string& symbol) {
  int failed = 0;
  char* text = abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &failed);
  std::string name = failed == 0 ? text : symbol;
  std::free(text);
  for (const char* part : {"void ", "polyspec::", "cuda::", "core::", "(anonymous namespace)::"}) {
    for (size_t at; (at = name.find(part)) != std::string::npos;) {
      name.erase(at, std::string(part).size());
    }
  }
  return name.substr(0, name.rfind('('));
}

// The number before `unit`, 0 if the line has none.
int number_before(const std::string& line, const std::string& unit) {
  const size_t end = line.find(" " + unit);
  if (end == std::string::npos) return 0;
  const size_t begin = line.find_last_not_of("0123456789", end - 1);
  return std::atoi(line.c_str() + (begin == std::string::npos ? 0 : begin + 1));
}

std::string quoted(const std::string& line, int which) {
  size_t begin = 0;
  for (int i = 0; i < 2 * which + 1; ++i) begin = line.find('\'', begin) + 1;
  return line.substr(begin, line.find('\'', begin) - begin);
}

// Adds the entries of a log; returns the number of kernels in it.
int read_log(std::istream& log, Kernels* kernels) {
  std::string line, name, architecture;
  int count = 0;
  while (std::getline(log, line)) {
    if (line.find("Compiling entry function '") != std::string::npos) {
      name = readable(quoted(line, 0));
      architecture = quoted(line, 1);
    }
    for (const char* fault : {"bytes stack frame", "bytes spill stores", "bytes spill loads"}) {
      if (number_before(line, fault) != 0)
        check::fail(__FILE__, __LINE__, name + " for " + architecture + " without local memory",
                    line);
    }
    if (line.find(" registers") == std::string::npos) continue;
    (*kernels)[name][architecture] = {number_before(line, "registers"),
                                      number_before(line, "bytes smem")};
    ++count;
  }
  return count;
}

std::vector<Budget> read_budget(std::istream& file) {
  std::vector<Budget> budget;
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream in(line.substr(0, line.find('#')));
    std::vector<std::string> words;
    for (std::string word; in >> word;) words.push_back(word);
    if (words.empty()) continue;
    CHECK(words.size() >= 3);
    const int shared = std::atoi(words.back().c_str());
    words.pop_back();
    const int registers = std::atoi(words.back().c_str());
    words.pop_back();
    budget.push_back({words, registers, shared});
  }
  return budget;
}

const Budget* budget_of(const std::string& name, const std::vector<Budget>& budget) {
  for (const Budget& line : budget) {
    const auto occurs = [&](const std::string& word) { return name.find(word) != name.npos; };
    if (std::all_of(line.words.begin(), line.words.end(), occurs)) return &line;
  }
  return nullptr;
}

// The usage of the first kernel over its budget; "" if there is none.
std::string first_over(const Kernels& kernels, const std::vector<Budget>& budget) {
  for (const auto& [name, usages] : kernels) {
    const Budget* line = budget_of(name, budget);
    if (line == nullptr) return name + " has no line in kernel_budget.txt";
    for (const auto& [architecture, usage] : usages) {
      if (usage.registers > line->registers || usage.shared > line->shared) {
        return name + " for " + architecture + ": " + std::to_string(usage.registers) +
               " registers, " + std::to_string(usage.shared) + " bytes of shared memory";
      }
    }
  }
  return "";
}

#ifdef POLYSPEC_KERNEL_LOGS
void print(const Kernels& kernels) {
  std::set<std::string> architectures;
  for (const auto& entry : kernels) {
    for (const auto& usage : entry.second) architectures.insert(usage.first);
  }
  std::printf("%-52s", "registers / bytes of shared memory");
  for (const std::string& architecture : architectures) std::printf(" %12s", architecture.c_str());
  std::printf("\n");
  for (const auto& [name, usages] : kernels) {
    std::printf("%-52s", name.c_str());
    for (const std::string& architecture : architectures) {
      const auto usage = usages.find(architecture);
      const std::string cell = usage == usages.end()
                                   ? "-"
                                   : std::to_string(usage->second.registers) + " / " +
                                         std::to_string(usage->second.shared);
      std::printf(" %12s", cell.c_str());
    }
    std::printf("\n");
  }
}
#endif

// The test itself, on invented logs.
void test_reading() {
  const std::string symbol = "_ZN8polyspec4cuda13verify_kernelIfLi384ENS_12VerifyParamsEEEvT1_";
  std::istringstream log("ptxas info    : Compiling entry function '" + symbol +
                         "' for 'sm_90'\nptxas info    : Function properties for x\n"
                         "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
                         "ptxas info    : Used 145 registers, used 1 barriers, 24792 bytes smem\n");
  Kernels kernels;
  CHECK_EQ(1, read_log(log, &kernels));
  const std::string name = "verify_kernel<float, 384, VerifyParams>";
  CHECK_EQ(name, kernels.begin()->first);
  CHECK_EQ(145, kernels[name]["sm_90"].registers);
  CHECK_EQ(24792, kernels[name]["sm_90"].shared);
  const auto over = [&](const char* lines) {
    std::istringstream file(lines);
    return first_over(kernels, read_budget(file));
  };
  CHECK_EQ(std::string(), over("# a remark\nverify_kernel Verify 145 24792\n"));
  CHECK(!over("verify_kernel Verify 144 24792\n").empty());
  CHECK(!over("verify_kernel Verify 145 24791\n").empty());
  CHECK(!over("verify_kernel Sample 145 24792\n").empty());
}

}  // namespace

int main() {
  test_reading();
#ifdef POLYSPEC_KERNEL_LOGS
  Kernels kernels;
  int logs = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(POLYSPEC_KERNEL_LOGS)) {
    if (entry.path().string().find(".cu.o.log") == std::string::npos) continue;
    std::ifstream log(entry.path());
    read_log(log, &kernels);
    ++logs;
  }
  std::ifstream file(POLYSPEC_KERNEL_BUDGET);
  CHECK(file.good());
  print(kernels);
  CHECK_EQ(POLYSPEC_KERNEL_FILES, logs);
  CHECK_EQ(std::string(), first_over(kernels, read_budget(file)));
  return 0;
#else
  std::printf("skipped: built without CUDA kernels\n");
  return 77;
#endif
}
