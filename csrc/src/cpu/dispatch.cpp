// Picks the widest instruction set this processor has and runs the requests of a batch on the
// caller's threads.
#include "cpu/dispatch.hpp"

#include <cstdlib>
#include <cstring>

#include "cpu/rows.hpp"

namespace polyspec::cpu {
namespace {

// POLYSPEC_CPU_ISA=baseline|avx2 asks for less than the processor has; the tests compare the copies
// with it.
const Rows& choose() {
#ifdef POLYSPEC_X86
  const char* wanted = std::getenv("POLYSPEC_CPU_ISA");
  const bool any = wanted == nullptr;
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512 && (any || std::strcmp(wanted, "avx512") == 0)) return kRowsAvx512;
  if (avx2 && (any || std::strcmp(wanted, "baseline") != 0)) return kRowsAvx2;
#endif
  return kRowsBaseline;
}

const Rows& rows() {
  static const Rows& chosen = choose();
  return chosen;
}

template <class Params>
struct Call {
  void (*request)(const Params&, int64_t);
  const Params* params;
};

template <class Params>
void run(void (*request)(const Params&, int64_t), const Params& params, const Executor& executor) {
  if (executor.run == nullptr || params.batch == 1) {
    for (int64_t i = 0; i < params.batch; ++i) request(params, i);
    return;
  }
  Call<Params> call{request, &params};
  executor.run(
      executor.pool, params.batch,
      [](void* context, int64_t i) {
        const auto& call = *static_cast<const Call<Params>*>(context);
        call.request(*call.params, i);
      },
      &call);
}

}  // namespace

void sample(const SampleParams& params, const Executor& executor) {
  run(rows().sample_request, params, executor);
}

void verify(const VerifyParams& params, const Executor& executor) {
  run(rows().verify_request, params, executor);
}

const char* isa() { return rows().isa; }

}  // namespace polyspec::cpu
