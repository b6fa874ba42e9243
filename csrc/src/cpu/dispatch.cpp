// Picks the last instruction set that this processor has and runs the requests of a batch on the
// caller's threads.
#include "cpu/dispatch.hpp"

#include "cpu/rows.hpp"

namespace polyspec::cpu {
namespace {

const Rows& rows() {
  static const Rows& table = chosen(kRowsCopies);
  return table;
}

// The threads share the rows of a few large requests and take whole requests otherwise.
constexpr int64_t kFewRequests = 8;
constexpr int64_t kSharedVocab = 32768;

template <class Params>
bool shares_rows(const Params& params) {
  return params.batch == 1 || (params.batch < kFewRequests && params.vocab >= kSharedVocab);
}

template <class Params>
using Request = void (*)(const Params&, int64_t, const Executor*);

template <class Params>
void run(Request<Params> request, const Params& params, const Executor& executor) {
  if (executor.run == nullptr || shares_rows(params)) {
    const Executor* shared = executor.run != nullptr ? &executor : nullptr;
    for (int64_t i = 0; i < params.batch; ++i) request(params, i, shared);
    return;
  }
  struct Call {
    Request<Params> request;
    const Params* params;
  } call{request, &params};
  executor.run(
      executor.pool, params.batch,
      [](void* context, int64_t i) {
        const Call& mine = *static_cast<const Call*>(context);
        mine.request(*mine.params, i, nullptr);
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

void verify_tree(const VerifyTreeParams& params, const Executor& executor) {
  run(rows().tree_request, params, executor);
}

const char* isa() { return rows().isa; }

}  // namespace polyspec::cpu
