// The overhead of calls from C++: time and allocations of each, with 1 to 64 requests.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "inputs.hpp"
#include "polyspec/kv_cache.hpp"
#include "polyspec/round_state.hpp"
#include "polyspec/scheduler.hpp"
#include "polyspec/verify_tree.hpp"

// ---- Allocations: every operator new of the program, the library's among them ----

namespace {
int64_t allocations = 0;  // one thread

void* counted(std::size_t size, std::size_t alignment) {
  ++allocations;
  void* made = nullptr;
  if (posix_memalign(&made, std::max(alignment, sizeof(void*)), size) != 0) throw std::bad_alloc();
  return made;
}
}  // namespace

void* operator new(std::size_t size) { return counted(size, alignof(std::max_align_t)); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return counted(size, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace {

const char* const kHelp =
    "Usage: call_bench [options]\n"
    "\n"
    "Times each call and counts its allocations, fp32, on one thread of the CPU.\n"
    "\n"
    "  --requests N,N,...  requests of a call          [1,4,16,64]\n"
    "  --draft-len N       draft tokens of a request   [4]\n"
    "  --vocab N           vocabulary                  [32000]\n"
    "  --repeats N         calls of each               [50]\n"
    "  --json              lines of JSON in place of the table\n"
    "  --help              this text\n";

struct Options {
  std::vector<int64_t> requests = {1, 4, 16, 64};
  int64_t draft_len = 4, vocab = 32000, repeats = 50;
  bool json = false, help = false;
};

int64_t to_integer(const std::string& flag, const std::string& text, int64_t least) {
  char* end = nullptr;
  const long long value = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || value < least) {
    throw std::runtime_error(flag + ": expected an integer >= " + std::to_string(least) +
                             ", given '" + text + "'");
  }
  return value;
}

Options parse(int argc, char** argv) {
  Options out;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--help") {
      out.help = true;
    } else if (flag == "--json") {
      out.json = true;
    } else if (flag == "--requests" || flag == "--draft-len" || flag == "--vocab" ||
               flag == "--repeats") {
      const std::string value = i + 1 < argc ? argv[++i] : "";
      if (flag == "--requests") {
        out.requests.clear();
        for (size_t begin = 0, comma = 0; comma != std::string::npos; begin = comma + 1) {
          comma = value.find(',', begin);
          out.requests.push_back(to_integer(flag, value.substr(begin, comma - begin), 1));
        }
      } else if (flag == "--draft-len") {
        out.draft_len = to_integer(flag, value, 2);
      } else if (flag == "--vocab") {
        out.vocab = to_integer(flag, value, 64);
      } else {
        out.repeats = to_integer(flag, value, 1);
      }
    } else {
      throw std::runtime_error("unknown option " + flag + "; --help lists all");
    }
  }
  return out;
}

void require(const polyspec::Result& result) {
  if (!result.ok()) throw std::runtime_error(result.message);
}

std::vector<int64_t> kept;  // so that no compiler leaves the comparison's allocation out

struct Entry {
  std::string name;
  std::function<void()> prepare, call;  // prepare is not measured
};

void measure(const Entry& entry, int64_t requests, const Options& options) {
  std::vector<double> micros;
  int64_t made = 0;
  for (int64_t turn = -3; turn < options.repeats; ++turn) {  // three warm up
    if (entry.prepare) entry.prepare();
    const int64_t before = allocations;
    const auto begin = std::chrono::steady_clock::now();
    entry.call();
    const auto end = std::chrono::steady_clock::now();
    const int64_t after = allocations;
    if (turn < 0) continue;
    made += after - before;
    micros.push_back(std::chrono::duration<double, std::micro>(end - begin).count());
  }
  std::sort(micros.begin(), micros.end());
  const double median = micros[micros.size() / 2];
  const double each = static_cast<double>(made) / static_cast<double>(options.repeats);
  const char* const form = options.json
                               ? "{\"call\": \"%s\", \"requests\": %lld, \"microseconds\": %.3f, "
                                 "\"microseconds_per_request\": %.3f, \"allocations\": %.2f}\n"
                               : "| %s | %lld | %.2f | %.2f | %.2f |\n";
  std::printf(form, entry.name.c_str(), static_cast<long long>(requests), median,
              median / static_cast<double>(requests), each);
}

// Caches of bfloat16: heads of 128 numbers, as many tokens as a verification adds.
struct Cache {
  static constexpr int64_t kHeads = 8, kWidth = 128, kCapacity = 512, kPage = 16;

  int64_t batch, tokens;
  std::vector<uint16_t> fresh, keys, values;
  std::vector<int64_t> lengths, after, held;
  std::vector<int32_t> status, table, pool;
  int64_t free_count = 0;

  Cache(int64_t requests, int64_t new_tokens)
      : batch(requests),
        tokens(new_tokens),
        fresh(static_cast<size_t>(batch * kHeads * tokens * kWidth)),
        keys(static_cast<size_t>(batch * kHeads * kCapacity * kWidth)),
        values(keys.size()),
        lengths(static_cast<size_t>(batch), kCapacity / 2),
        after(lengths),
        held(static_cast<size_t>(batch)),
        status(static_cast<size_t>(batch)),
        table(static_cast<size_t>(batch * pages_of_row()), -1),
        pool(static_cast<size_t>(batch * pages_of_row())) {
    for (size_t i = 0; i < pool.size(); ++i) pool[i] = static_cast<int32_t>(i);
    free_count = static_cast<int64_t>(pool.size());
  }

  static int64_t pages_of_row() { return kCapacity / kPage; }

  polyspec::NewTokens in() {
    polyspec::NewTokens in;
    in.batch = batch;
    in.heads = kHeads;
    in.tokens = tokens;
    in.key_dim = in.value_dim = kWidth;
    in.element_size = 2;
    in.keys = {fresh.data(), {kHeads * tokens * kWidth, tokens * kWidth, kWidth}};
    in.values = in.keys;
    in.lengths = lengths.data();
    in.new_lengths = after.data();
    in.status = status.data();
    return in;
  }
  polyspec::AppendParams append() {
    polyspec::AppendParams p;
    p.in = in();
    p.capacity = kCapacity;
    p.keys = {keys.data(), {kHeads * kCapacity * kWidth, kCapacity * kWidth, kWidth}};
    p.values = {values.data(), {kHeads * kCapacity * kWidth, kCapacity * kWidth, kWidth}};
    return p;
  }
  polyspec::PagedAppendParams append_paged() {
    polyspec::PagedAppendParams p;
    p.in = in();
    p.pages = static_cast<int64_t>(pool.size());
    p.page_size = kPage;
    p.max_pages = p.block_table_stride = pages_of_row();
    p.keys = {keys.data(), {kHeads * kPage * kWidth, kPage * kWidth, kWidth}};
    p.values = {values.data(), {kHeads * kPage * kWidth, kPage * kWidth, kWidth}};
    p.block_table = table.data();
    return p;
  }
  polyspec::PagesParams pages(const std::vector<int64_t>& wanted) {
    polyspec::PagesParams p;
    p.batch = batch;
    p.pages = static_cast<int64_t>(pool.size());
    p.page_size = kPage;
    p.max_pages = p.block_table_stride = pages_of_row();
    p.lengths = wanted.data();
    p.block_table = table.data();
    p.held = held.data();
    p.free_pages = pool.data();
    p.free_count = &free_count;
    p.status = status.data();
    return p;
  }
};

// State rows of a chain of two levels, each before its first draft.
struct Rounds {
  polyspec::RoundParams in;
  std::vector<int64_t> fresh, state, due, input_ids, plan, tokens, appended;
  std::vector<int32_t> status;

  Rounds(int64_t batch, int64_t draft_len) {
    using Shape = polyspec::RoundShape;
    in.shape.levels = 2;
    in.shape.steps = 2;
    in.shape.capacity = 64 + draft_len;
    in.batch = batch;
    fresh.assign(static_cast<size_t>(batch * in.shape.words()), 0);
    for (int64_t row = 0; row < batch; ++row) {
      int64_t* const words = fresh.data() + row * in.shape.words();
      words[Shape::kTotal] = 8;
      words[Shape::kRoom] = 32;
      words[in.shape.level_at(1) + Shape::kWindow] = draft_len;
    }
    state = fresh;
    in.state = state.data();
    const auto size = [batch](int64_t each) { return static_cast<size_t>(batch * each); };
    due.resize(size(2));
    input_ids.resize(size(8));
    plan.resize(size(polyspec::kPlanRows));
    tokens.assign(size(draft_len), 3);
    appended.resize(size(2));
    status.assign(size(draft_len), 0);
  }

  void restore() { std::copy(fresh.begin(), fresh.end(), state.begin()); }

  void step(int64_t draft_len) {
    polyspec::ScheduleDueParams what;
    what.in = in;
    what.due = due.data();
    require(polyspec::schedule_due(what));
    polyspec::ScheduleNextParams next;
    next.in = in;
    next.level = 2;
    next.width = 8;
    next.input_ids = input_ids.data();
    next.plan = plan.data();
    require(polyspec::schedule_next(next));
    polyspec::ScheduleReportParams report;
    report.in = in;
    report.level = 2;
    report.plan = plan.data();
    report.width = draft_len;
    report.tokens = tokens.data();
    report.status = status.data();
    report.appended = appended.data();
    require(polyspec::schedule_report(report));
  }
};

// Binary trees over the rows of `inputs`, with other outputs.
struct Trees {
  std::vector<int64_t> tokens, parents, out, path, rows, accepted;
  std::vector<float> logprobs;
  std::vector<int32_t> status;
  polyspec::VerifyTreeParams params;

  explicit Trees(Inputs* inputs) {
    const int64_t batch = inputs->shape.batch, nodes = inputs->shape.draft_len;
    for (int64_t i = 0; i < batch * nodes; ++i) {
      tokens.push_back((i * 37 + i % nodes) % inputs->shape.vocab);
      parents.push_back((i % nodes + 1) / 2 - 1);
    }
    out.resize(static_cast<size_t>(batch * (nodes + 1)));
    path.resize(static_cast<size_t>(batch * nodes));
    rows.resize(out.size());
    logprobs.resize(out.size());
    accepted.resize(static_cast<size_t>(batch));
    status.resize(accepted.size());
    params.batch = batch;
    params.nodes = params.depth = nodes;
    params.vocab = inputs->shape.vocab;
    params.target_logits = inputs->target.data();
    params.target_stride[0] = (nodes + 1) * params.vocab;
    params.target_stride[1] = params.vocab;
    params.draft_tokens = tokens.data();
    params.parents = parents.data();
    params.draw.seed.data = inputs->seeds.data();
    params.tokens = out.data();
    params.num_accepted = accepted.data();
    params.path = path.data();
    params.rows = rows.data();
    params.logprobs = logprobs.data();
    params.status = status.data();
  }
};

void measure_all(int64_t requests, const Options& options) {
  Shape shape;
  shape.batch = requests;
  shape.draft_len = options.draft_len;
  shape.vocab = options.vocab;
  Inputs inputs(shape);
  uint64_t turn = 0;
  const auto load = [&] { inputs.load(turn++, polyspec::Stream::cpu()); };
  Trees trees(&inputs);
  Cache cache(requests, options.draft_len + 1);
  std::vector<int64_t> longer = cache.lengths;
  for (int64_t& length : longer) length += cache.tokens;
  Cache paged(requests, options.draft_len + 1);
  Rounds rounds(requests, options.draft_len);
  std::vector<polyspec::Scheduler> schedulers(static_cast<size_t>(requests),
                                              polyspec::Scheduler({options.draft_len}));
  for (polyspec::Scheduler& one : schedulers) one.start(int64_t{1} << 40);

  const std::vector<Entry> entries = {
      {"a std::vector, for comparison", nullptr, [] { std::vector<int64_t>(16, 1).swap(kept); }},
      {"sample", load, [&] { require(polyspec::sample(inputs.sample())); }},
      {"verify, token rule", load,
       [&] { require(polyspec::verify(inputs.verify(polyspec::Rule::kToken, true))); }},
      {"verify, block rule", load,
       [&] { require(polyspec::verify(inputs.verify(polyspec::Rule::kBlock, true))); }},
      {"verify_tree", load, [&] { require(polyspec::verify_tree(trees.params)); }},
      {"append", nullptr, [&] { require(polyspec::append(cache.append())); }},
      {"roll back", [&] { std::swap(cache.lengths, longer); },  // its lengths, and nothing else
       [&] { std::swap(cache.lengths, longer); }},
      {"reserve_pages, append_paged, truncate_pages", nullptr,
       [&] {
         require(polyspec::reserve_pages(paged.pages(longer)));
         require(polyspec::append_paged(paged.append_paged()));
         require(polyspec::truncate_pages(paged.pages(paged.lengths)));
       }},
      {"schedule_due, _next, _report", [&] { rounds.restore(); },
       [&] { rounds.step(options.draft_len); }},
      {"Scheduler::next, report", nullptr,
       [&] {
         for (polyspec::Scheduler& one : schedulers) {
           const polyspec::Step step = one.next();
           const bool drafts = step.kind == polyspec::Step::Kind::kDraft;
           one.report(step.level, drafts ? step.count : step.count + 1);
         }
       }},
  };
  for (const Entry& entry : entries) measure(entry, requests, options);
  const std::vector<int32_t>* const every[] = {&inputs.status, &trees.status, &cache.status,
                                               &paged.status};
  for (const std::vector<int32_t>* status : every) {
    for (const int32_t bits : *status) {
      if ((bits & (polyspec::kStatusNotes - 1)) != 0)
        throw std::runtime_error("status " + std::to_string(bits));
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options options = parse(argc, argv);
    if (options.help) {
      std::fputs(kHelp, stdout);
      return 0;
    }
    if (!options.json) {
      std::printf("V %lld, %lld draft tokens, float32, one thread, medians of %lld calls\n\n",
                  static_cast<long long>(options.vocab), static_cast<long long>(options.draft_len),
                  static_cast<long long>(options.repeats));
      std::printf(
          "| call | requests | us | us per request | allocations |\n|---|---|---|---|---|\n");
    }
    for (const int64_t requests : options.requests) measure_all(requests, options);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "call_bench: %s\n", error.what());
    return 2;
  }
}
