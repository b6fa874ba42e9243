// Random calls of every operator on the simulated device against the CPU backend, bit for bit;
// attention in bfloat16 to rounding. Each array ends before a page that faults, each call runs
// twice, each time in a random launch shape and order of threads. The calls are captured in a graph
// after kernels that write their inputs and outputs, and begin before these have ended.
//
//   random_calls_test [calls [vocabulary [kinds]]]    `calls` of each kind, vocabularies up to this
//                                                     size; kinds: all, verify_f32, layers, int4
//                                                     or dense
// clang-format off: first, as nvcc includes it
#include "cuda_runtime.h"
// clang-format on
#include <sys/mman.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cuda/launch.hpp"
#include "cuda/launch_shape.hpp"
#include "polyspec/verify_tree.hpp"
#include "support/random_cache.hpp"
#include "support/random_dense.hpp"
#include "support/random_indexed.hpp"
#include "support/random_int4.hpp"
#include "support/random_layer.hpp"
#include "support/random_schedule.hpp"

namespace {

using polyspec::Result;
using polyspec::Stream;

// A copy of a block with guards that fault.
class Guarded {
 public:
  explicit Guarded(const cases::Block& block)
      : bytes_(block.bytes), guards_(block.guards), size_(block.bytes.size()) {
    void* pages =
        mmap(nullptr, size_ + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pages != MAP_FAILED);
    data_ = static_cast<unsigned char*>(pages);
    std::memcpy(data_, block.bytes.data(), size_);
    for (const size_t guard : block.guards) mprotect(data_ + guard, cases::Block::kPage, PROT_NONE);
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() { munmap(data_, size_ + 1); }

  // Launches a kernel that writes the arrays, of which `constant` is in none; until then they hold
  // poison.
  void launch_writes(const void* constant = nullptr) const {
    constexpr int kNoValue = 0xee;
    for_each_array(constant, [&](size_t begin, size_t end) {
      std::memset(data_ + begin, kNoValue, end - begin);
    });
    cudaLaunchConfig_t config = {};
    config.blockDim = dim3(32);
    const auto write = [this, constant] {
      stand_in::launch_dependents();
      if (threadIdx.x > 0) return;
      for_each_array(constant, [&](size_t begin, size_t end) {
        // By calls of memcpy, which ThreadSanitizer sees.
        for (size_t at = begin; at < end; at += cases::Block::kPage)
          std::memcpy(data_ + at, bytes_.data() + at, (blockIdx.x + 1) * cases::Block::kPage);
      });
    };
    CHECK(stand_in::launch(config, write, "write") == cudaSuccess);
  }

  unsigned char* data() const { return data_; }
  std::vector<unsigned char> read() const {
    mprotect(data_, size_, PROT_READ | PROT_WRITE);
    return {data_, data_ + size_};
  }

 private:
  template <class Run>
  void for_each_array(const void* constant, const Run& run) const {
    size_t begin = 0;
    for (const size_t guard : guards_) {
      if (constant < data_ + begin || constant >= data_ + guard) run(begin, guard);
      begin = guard + cases::Block::kPage;
    }
  }

  std::vector<unsigned char> bytes_;
  std::vector<size_t> guards_;
  size_t size_;
  unsigned char* data_;
};

cases::Block with_bytes(cases::Block block, std::vector<unsigned char> bytes) {
  block.bytes = std::move(bytes);
  return block;
}

void* workspace() {
  static void* memory = nullptr;
  if (memory == nullptr) {
    CHECK(cudaMalloc(&memory, polyspec::kVerifyWorkspaceBytes) == cudaSuccess);
    CHECK(polyspec::clear_workspace(memory, polyspec::kVerifyWorkspaceBytes, Stream::on(nullptr))
              .ok());
  }
  return memory;
}

// Inputs that a call reads before earlier kernels have ended, and that these do not write.
template <class Params>
const void* constant_of(const Params&) {
  return nullptr;
}
const void* constant_of(const polyspec::RmsNormParams& params) { return params.weight; }

template <class Launch>
void in_graph(const Launch& launch) {
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  CHECK(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  launch();
  CHECK(cudaStreamEndCapture(nullptr, &graph) == cudaSuccess);
  CHECK(cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess);
  CHECK(cudaGraphLaunch(executable, nullptr) == cudaSuccess);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  CHECK(cudaGraphExecDestroy(executable) == cudaSuccess);
  CHECK(cudaGraphDestroy(graph) == cudaSuccess);
}

// `in` and `out` are where the call finds its memory. A call that also reads its outputs runs once.
template <class Operator, class Case>
void compare(Operator run, const Case& call, const std::string& name, bool in_place = false) {
  std::vector<unsigned char> expected = call.outputs.bytes;
  const std::vector<unsigned char> in = cases::inputs_for(call, expected.data());
  CHECK(run(call.params(in.data(), expected.data()), Stream::cpu()).ok());

  const Guarded outputs(call.outputs);
  const Guarded inputs(with_bytes(call.inputs, cases::inputs_for(call, outputs.data())));
  const auto params = call.params(inputs.data(), outputs.data());
  in_graph([&] {
    outputs.launch_writes();
    inputs.launch_writes(constant_of(params));
    for (int time = 0; time < (in_place ? 1 : 2); ++time) {
      const Result result = run(params, Stream::on(nullptr));
      CHECK_EQ(std::string(""), result.message);
    }
  });
  std::vector<unsigned char> made = outputs.read();
  cases::allow_rounding(call, expected, &made);
  cases::check_same(expected, made, name);
}

template <class Params>
Params with_workspace(Params params, const Stream& stream) {
  if (stream.device == Stream::Device::kCuda) params.workspace = workspace();
  return params;
}
const auto kVerify = [](const auto& params, Stream s) {
  return polyspec::verify(with_workspace(params, s), s);
};
const auto kSample = [](const auto& params, Stream s) { return polyspec::sample(params, s); };
const auto kTree = [](const auto& params, Stream s) {
  return polyspec::verify_tree(with_workspace(params, s), s);
};

// The sizes of a call with at most so many logits in its target's rows.
cases::Extent random_extent(cases::Random& random, int64_t vocabulary) {
  constexpr int64_t kMostLogits = 300000;
  if (vocabulary == 0 || random.chance(0.5)) return {};
  const int64_t edges[] = {1024, 1025, 4096, 8192, 8193, 32000, 131072, 131073};
  int64_t vocab = static_cast<int64_t>(std::exp(random.unit() * std::log(1.0 * vocabulary)));
  const int64_t edge = random.one_of(edges);
  if (edge <= vocabulary && random.chance(0.3)) vocab = edge;
  int64_t batch = 1 + random.below(12), drafted = 1 + random.below(10);
  while (batch > 1 && batch * (drafted + 1) * vocab > kMostLogits) --batch;
  while (drafted > 1 && batch * (drafted + 1) * vocab > kMostLogits) --drafted;
  return {vocab, batch, drafted};
}

// Returns how the calls are spread.
std::string force_random_shape(cases::Random& random) {
  int sizes = 1;  // 1, 2, 4 ...
  while (1 << sizes <= polyspec::cuda::kMaxClusterCtas) ++sizes;
  const int ctas = random.chance(0.2) ? 0 : 1 << random.below(sizes);
  constexpr int kGroups[] = {-1, 0, 1, 2, 3, 5, 8, 1 << 20};
  const int groups = random.one_of(kGroups);
  constexpr int kMemory[] = {0, 99 << 10, 60 << 10};
  const int memory = random.one_of(kMemory);
  polyspec::cuda::force_shape(ctas, groups, memory);
  return ", " + std::to_string(ctas) + " CTAs per group, groups " + std::to_string(groups) + ", " +
         std::to_string(memory) + " bytes";
}

void check_caches_and_state_rows(uint64_t seed) {
  const std::string name = " case " + std::to_string(seed);
  compare([](const auto& p, Stream s) { return polyspec::schedule_due(p, s); },
          cases::ScheduleDueCase(seed), "schedule_due" + name);
  compare([](const auto& p, Stream s) { return polyspec::schedule_next(p, s); },
          cases::ScheduleNextCase(seed), "schedule_next" + name);
  compare([](const auto& p, Stream s) { return polyspec::schedule_report(p, s); },
          cases::ScheduleReportCase(seed), "schedule_report" + name, true);
  compare([](const auto& p, Stream s) { return polyspec::append(p, s); }, cases::AppendCase(seed),
          "append" + name);
  compare([](const auto& p, Stream s) { return polyspec::append_paged(p, s); },
          cases::PagedAppendCase(seed), "append_paged" + name);
  compare([](const auto& p, Stream s) { return polyspec::compact_tree(p, s); },
          cases::CompactTreeCase(seed), "compact_tree" + name, true);
  compare([](const auto& p, Stream s) { return polyspec::update_lengths(p, s); },
          cases::LengthsCase(seed), "update_lengths" + name, true);
  compare([](const auto& p, Stream s) { return polyspec::copy_rows(p, s); },
          cases::CopyRowsCase(seed), "copy_rows" + name, true);
  compare([](const auto& p, Stream s) { return polyspec::reserve_pages(p, s); },
          cases::PagesCase<true>(seed), "reserve_pages" + name, true);
  compare([](const auto& p, Stream s) { return polyspec::truncate_pages(p, s); },
          cases::PagesCase<false>(seed), "truncate_pages" + name, true);
}

constexpr int64_t kSumBytes = 64 << 20;
void* sums() {
  static void* memory = nullptr;
  if (memory == nullptr) CHECK(cudaMalloc(&memory, kSumBytes) == cudaSuccess);
  return memory;
}
const auto kAttention = [](cases::AttentionCase::Params params, Stream stream) {
  if (stream.device == Stream::Device::kCuda) params.use(sums(), kSumBytes);
  return params.run(stream);
};

void check_layers(uint64_t seed) {
  const std::string name = " case " + std::to_string(seed);
  compare([](const auto& p, Stream s) { return polyspec::rms_norm(p, s); },
          cases::RmsNormCase(seed), "rms_norm" + name);
  compare([](const auto& p, Stream s) { return polyspec::rotary(p, s); }, cases::RotaryCase(seed),
          "rotary" + name);
  compare([](const auto& p, Stream s) { return polyspec::rotary_append(p, s); },
          cases::RotaryAppendCase(seed), "rotary_append" + name, true);
  compare([](const auto& p, Stream s) { return polyspec::gated(p, s); }, cases::GatedCase(seed),
          "gated" + name);
  compare(kAttention, cases::AttentionCase(seed), "attention" + name);
}

// The CPU's product rounds activations; this one is compared with sums in the kernel's order.
void check_int4(uint64_t seed) {
  const cases::Int4Case call(seed);
  const Guarded inputs(call.inputs), outputs(call.outputs);
  const Stream stream = Stream::on(nullptr);
  CHECK(call.pack(inputs.data(), outputs.data(), stream).ok());
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  in_graph([&] {
    outputs.launch_writes(call.packed(outputs.data()));
    inputs.launch_writes(call.weight(inputs.data()));
    const Result result = call.multiply(inputs.data(), outputs.data(), stream);
    CHECK_EQ(std::string(""), result.message);
  });
  const std::string fault = call.fault(outputs.read(), true);
  if (!fault.empty()) check::fail(__FILE__, __LINE__, "int4 case " + std::to_string(seed), fault);
}

// Returns whether it was multiplied: the device may have no bulk copies, or too little memory.
bool check_dense(uint64_t seed) {
  const cases::DenseCase call(seed);
  const Guarded inputs(call.inputs), outputs(call.outputs);
  Result result;
  in_graph([&] {
    outputs.launch_writes();
    inputs.launch_writes(call.weights(inputs.data()));
    result = call.multiply(inputs.data(), outputs.data(), Stream::on(nullptr));
  });
  if (result.code == Result::Code::kUnsupported) return false;
  CHECK_EQ(std::string(""), result.message);
  const std::string fault = call.fault(outputs.read(), true);
  if (!fault.empty()) check::fail(__FILE__, __LINE__, "dense case " + std::to_string(seed), fault);
  return true;
}

void check_int4_heads(uint64_t seed) {
  const cases::Int4HeadsCase call(seed);
  const Guarded inputs(call.inputs), memory(call.memory), outputs(call.outputs),
      apart(call.outputs);
  const Stream stream = Stream::on(nullptr);
  CHECK(call.pack(inputs.data(), memory.data(), stream).ok());
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  in_graph([&] {
    outputs.launch_writes();
    memory.launch_writes(call.packed(memory.data()));
    inputs.launch_writes(call.weight(inputs.data()));
    const Result result =
        call.multiply(inputs.data(), memory.data(), outputs.data(), false, stream);
    CHECK_EQ(std::string(""), result.message);
  });
  CHECK(call.multiply(inputs.data(), memory.data(), apart.data(), true, stream).ok());
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  cases::check_same(apart.read(), outputs.read(), "int4 case with heads " + std::to_string(seed));
}

// Whether there was one: the case may be of another type.
bool check_verify_f32(uint64_t seed, cases::Extent extent, const std::string& name) {
  const cases::VerifyCase call(seed, extent);
  unsigned char unused[1] = {};
  if (call.params(unused, unused).target_dtype != polyspec::DType::kFloat32) return false;
  compare(kVerify, call, "verify" + name);
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t calls = argc > 1 ? std::atoll(argv[1]) : 12;
  const int64_t vocabulary = argc > 2 ? std::atoll(argv[2]) : 140000;
  const char* const kinds = argc > 3 ? argv[3] : "all";
  const bool all = std::strcmp(kinds, "all") == 0, layers = std::strcmp(kinds, "layers") == 0;
  const bool int4 = std::strcmp(kinds, "int4") == 0, dense = std::strcmp(kinds, "dense") == 0;
  cases::Block::with_guards = true;
  workspace();  // no memory is asked for in a capture
  sums();
  int64_t done = 0, dense_products = 0;
  for (uint64_t seed = 0; done < calls; ++seed) {
    cases::Random random(~seed);
    stand_in::seed(seed);
    const cases::Extent extent = random_extent(random, vocabulary);
    const std::string name = " case " + std::to_string(seed) + force_random_shape(random);
    if ((int4 || dense) && seed % 3 == 0) polyspec::cuda::force_shape(1, 1);  // a CTA has all tiles
    if (all || layers) check_layers(seed);
    if (all || int4) {
      check_int4(seed);
      check_int4_heads(seed);
    }
    if (all || dense) dense_products += check_dense(seed);
    if (layers || int4 || dense) {
      ++done;
      continue;
    }
    if (!all) {
      done += check_verify_f32(seed, extent, name);
      continue;
    }
    check_caches_and_state_rows(seed);
    compare(kSample, cases::SampleCase(seed, extent), "sample" + name);
    compare(kVerify, cases::VerifyCase(seed, extent), "verify" + name);
    compare(kVerify, cases::IndexedVerifyCase(seed, extent), "indexed verify" + name);
    compare(kTree, cases::TreeCase(seed, extent), "verify_tree" + name);
    compare(kTree, cases::IndexedTreeCase(seed, extent), "indexed verify_tree" + name);
    ++done;
  }
  std::printf("%lld calls of each kind; clusters that ran", static_cast<long long>(calls));
  for (int ctas = 1; ctas <= 16; ctas *= 2) {
    std::printf("%s of %d CTAs: %llu", ctas > 1 ? "," : "", ctas,
                static_cast<unsigned long long>(stand_in::clusters_run(ctas)));
  }
  std::printf("; %lld dense products; %llu kernels began early\n",
              static_cast<long long>(dense_products),
              static_cast<unsigned long long>(stand_in::early_kernels()));
  return 0;
}
