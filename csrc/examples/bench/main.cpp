// A microbenchmark in C++ alone: the operators and a textbook implementation, in turns.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "inputs.hpp"
#include "pool.hpp"
#include "textbook.hpp"

namespace {

const char* const kHelp =
    "Usage: kernel_bench [options]\n"
    "\n"
    "Times polyspec's operators beside a textbook implementation, fp32, on the CPU.\n"
    "\n"
    "  --batch N          requests                                            [1]\n"
    "  --draft-len N      draft tokens, >= 1                                  [10]\n"
    "  --vocab N          vocabulary                                          [128256]\n"
    "  --acceptance X     probability that a draft token is accepted          [0.7]\n"
    "  --top-k N          0 is off                                            [0]\n"
    "  --top-p X          1 is off                                            [1]\n"
    "  --min-p X          0 is off                                            [0]\n"
    "  --repeats N        turns                                               [40]\n"
    "  --threads N        threads lent to the library                         [1]\n"
    "  --seed N           of logits and draws                                 [0]\n"
    "  --help             this text\n";

struct Options {
  Shape shape;
  int64_t repeats = 40;
  int threads = 1;
  bool help = false;
};

double number(const std::string& flag, const char* text) {
  char* end = nullptr;
  const double value = text == nullptr ? 0.0 : std::strtod(text, &end);
  if (text == nullptr || end == text || *end != '\0')
    throw std::runtime_error(flag + ": expected a number");
  return value;
}

Options parse(int argc, char** argv) {
  Options out;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--help" || flag == "-h") {
      out.help = true;
      return out;
    }
    const char* const next = i + 1 < argc ? argv[++i] : nullptr;
    const auto value = [&] { return number(flag, next); };
    const auto count = [&](int64_t least) {
      const double given = value();
      const int64_t whole = given >= 0 && given < 1e15 ? static_cast<int64_t>(given) : -1;
      if (static_cast<double>(whole) != given || whole < least) {
        throw std::runtime_error(flag + ": expected an integer >= " + std::to_string(least));
      }
      return whole;
    };
    const auto share = [&] {
      const double given = value();
      if (!(given >= 0.0 && given <= 1.0))
        throw std::runtime_error(flag + ": expected a number in [0, 1]");
      return given;
    };
    polyspec::SamplingParams& sampling = out.shape.sampling;
    if (flag == "--batch")
      out.shape.batch = count(1);
    else if (flag == "--draft-len")
      out.shape.draft_len = count(1);
    else if (flag == "--vocab")
      out.shape.vocab = count(2);
    else if (flag == "--acceptance")
      out.shape.acceptance = share();
    else if (flag == "--top-k")
      sampling.top_k.value = count(0);
    else if (flag == "--top-p")
      sampling.top_p.value = static_cast<float>(share());
    else if (flag == "--min-p")
      sampling.min_p.value = static_cast<float>(share());
    else if (flag == "--repeats")
      out.repeats = count(1);
    else if (flag == "--threads")
      out.threads = static_cast<int>(count(1));
    else if (flag == "--seed")
      out.shape.seed = static_cast<uint64_t>(count(0));
    else
      throw std::runtime_error("unknown option " + flag + "; --help lists all");
  }
  return out;
}

struct Entry {
  std::string name;
  std::function<void()> call;
  double bytes;  // per call; that of verification is added up over turns
  bool verifies;
  size_t against;  // entry that the ratio is taken against
  std::vector<double> micros;
};

double quantile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  const double at = share * static_cast<double>(values.size() - 1);
  const size_t low = static_cast<size_t>(at);
  const size_t high = std::min(low + 1, values.size() - 1);
  return values[low] + (at - static_cast<double>(low)) * (values[high] - values[low]);
}

double mean(const std::vector<double>& values) {
  double sum = 0.0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

double micros_of(const std::function<void()>& call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin)
      .count();
}

// GB/s of memcpy between buffers that no cache holds, bytes read plus bytes written.
double copy_bandwidth() {
  const size_t size = size_t{128} << 20;
  std::vector<char> from(size, 1), to(size, 2);
  std::vector<double> micros;
  for (int i = 0; i < 7; ++i) {
    micros.push_back(micros_of([&] { std::memcpy(to.data(), from.data(), size); }));
  }
  if (to != from) throw std::runtime_error("memcpy failed");  // and so the copies are not dead code
  return 2.0 * static_cast<double>(size) / quantile(micros, 0.5) * 1e-3;
}

void require(const polyspec::Result& result) {
  if (!result.ok()) throw std::runtime_error(result.message);
}

// Bytes that a rule must move for the acceptances in `inputs`: needed rows once, whole; per
// verified token its id, its distribution's statistics and its logit; and the outputs.
double verify_bytes(const Inputs& inputs, bool statistics, bool block) {
  const int64_t k = inputs.shape.draft_len;
  int64_t rows = 0, verified = 0;
  for (const int64_t n : inputs.accepted) {
    const int64_t tested = block ? k : std::min(n + 1, k);
    verified += tested;
    rows += block ? k + (n == k) : n + 1;
    rows += !statistics ? tested : block ? k - 1 + (n == 0) : n < k;
  }
  const int64_t out = inputs.shape.batch * ((k + 1) * (8 + 4) + 8 + 4);
  return static_cast<double>(rows * inputs.shape.vocab * 4 + verified * (8 + 16 + 4) + out);
}

void print(const std::vector<Entry>& entries, double copy) {
  std::printf(
      "| | median | quartiles | mean | GB/s | %% copy | x polyspec "
      "|\n|---|---|---|---|---|---|---|\n");
  for (const Entry& entry : entries) {
    const double median = quantile(entry.micros, 0.5);
    const double speed = entry.bytes / median * 1e-3;
    std::vector<double> ratios;
    for (size_t i = 0; i < entry.micros.size(); ++i) {
      ratios.push_back(entry.micros[i] / entries[entry.against].micros[i]);
    }
    std::printf("| %s | %.1f | %.1f to %.1f | %.1f | %.2f | %.1f | %.2f (%.2f to %.2f) |\n",
                entry.name.c_str(), median, quantile(entry.micros, 0.25),
                quantile(entry.micros, 0.75), mean(entry.micros), speed, 100.0 * speed / copy,
                quantile(ratios, 0.5), quantile(ratios, 0.25), quantile(ratios, 0.75));
  }
}

int run(const Options& options) {
  Pool pool(options.threads);
  const polyspec::Stream stream =
      polyspec::Stream::cpu(options.threads > 1 ? pool.executor() : polyspec::Executor{});
  Inputs inputs(options.shape);
  std::mt19937_64 engine(options.shape.seed);
  const int64_t batch = options.shape.batch;
  const auto verify = [&](polyspec::Rule rule, bool statistics) {
    return [&inputs, stream, rule, statistics] {
      require(polyspec::verify(inputs.verify(rule, statistics), stream));
    };
  };
  const double row = static_cast<double>(batch * (options.shape.vocab * 4 + 8 + 4 + 4));
  std::vector<Entry> entries = {
      {"sample", [&] { require(polyspec::sample(inputs.sample(), stream)); }, row, false, 0, {}},
      {"sample, textbook",
       [&] {
         for (int64_t i = 0; i < batch; ++i) textbook::sample(inputs, i, engine);
       },
       row,
       false,
       0,
       {}},
      {"verify-token", verify(polyspec::Rule::kToken, true), 0.0, true, 2, {}},
      {"verify-token-bare", verify(polyspec::Rule::kToken, false), 0.0, true, 2, {}},
      {"verify-block", verify(polyspec::Rule::kBlock, true), 0.0, true, 2, {}},
      {"verify-token, textbook",
       [&] {
         int64_t emitted;
         for (int64_t i = 0; i < batch; ++i) {
           inputs.accepted[static_cast<size_t>(i)] = textbook::verify(inputs, i, engine, &emitted);
         }
       },
       0.0,
       true,
       2,
       {}},
  };
  int64_t accepted = 0, rejected = 0;
  const double turns = static_cast<double>(options.repeats);
  for (int64_t turn = -2; turn < options.repeats; ++turn) {  // two turns warm up
    inputs.load(static_cast<uint64_t>(turn + 2), stream);
    for (size_t i = 0; i < entries.size(); ++i) {
      const size_t at = (i + static_cast<size_t>(turn + 2)) % entries.size();
      Entry& entry = entries[at];
      const double micros = micros_of(entry.call);
      for (const int32_t bits : inputs.status) {
        if ((bits & (polyspec::kStatusNotes - 1)) != 0) {
          throw std::runtime_error(entry.name + ": status " + std::to_string(bits));
        }
      }
      if (turn < 0) continue;
      entry.micros.push_back(micros);
      if (!entry.verifies) continue;
      const bool block = entry.name == "verify-block";
      entry.bytes += verify_bytes(inputs, at == 2 || block, block) / turns;
      if (at != 2) continue;
      for (const int64_t n : inputs.accepted) {
        accepted += n;
        rejected += n < options.shape.draft_len;
      }
    }
  }
  const double copy = copy_bandwidth();
  std::printf("batch %lld, K %lld, V %lld, float32, %d thread(s), %lld turns\n",
              static_cast<long long>(batch), static_cast<long long>(options.shape.draft_len),
              static_cast<long long>(options.shape.vocab), options.threads,
              static_cast<long long>(options.repeats));
  std::printf("acceptance %.3f asked, %.3f measured; copy bandwidth %.1f GB/s\n",
              options.shape.acceptance,
              static_cast<double>(accepted) /
                  static_cast<double>(std::max<int64_t>(accepted + rejected, 1)),
              copy);
  std::printf(
      "microseconds per call; GB/s of the bytes that must be moved; ratios of turns, median and "
      "quartiles\n\n");
  print(entries, copy);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options options = parse(argc, argv);
    if (options.help) {
      std::fputs(kHelp, stdout);
      return 0;
    }
    return run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kernel_bench: %s\n", error.what());
    return 2;
  }
}
