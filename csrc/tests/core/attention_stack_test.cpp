// Attention on a thread with no more stack than attention.hpp asks for: the largest heads, and more
// queries than a task takes at once.
#include <pthread.h>

#include <vector>

#include "polyspec/attention.hpp"
#include "support/check.hpp"

namespace {

// For the thread itself and the call's frames.
constexpr int64_t kSpare = 48 << 10;

struct Call {
  polyspec::AttentionParams params;
  bool ok = false;
};

}  // namespace

int main() {
  constexpr int64_t kWidth = polyspec::kAttentionWidth, kHeads = 8, kTokens = 40, kLength = 300;
  const std::vector<float> query(static_cast<size_t>(kHeads * kTokens * kWidth), 0.5f);
  const std::vector<float> cached(static_cast<size_t>(kLength * kWidth), 0.25f);
  std::vector<float> out(query.size(), -1.0f);
  Call call;
  call.params.batch = call.params.groups = 1;
  call.params.heads = kHeads;
  call.params.tokens = kTokens;
  call.params.length = kLength;
  call.params.width = call.params.value_width = kWidth;
  call.params.query = query.data();
  call.params.key = call.params.value = cached.data();
  call.params.query_stride[1] = kTokens * kWidth;
  call.params.query_stride[2] = call.params.key_stride[2] = call.params.value_stride[2] = kWidth;
  call.params.out = out.data();

  pthread_attr_t attributes;
  CHECK_EQ(0, pthread_attr_init(&attributes));
  const size_t stack = static_cast<size_t>(polyspec::kAttentionStack + kSpare);
  CHECK_EQ(0, pthread_attr_setstacksize(&attributes, stack));
  pthread_t thread;
  const auto run = [](void* context) -> void* {
    Call& mine = *static_cast<Call*>(context);
    mine.ok = polyspec::attention(mine.params).ok();
    return nullptr;
  };
  CHECK_EQ(0, pthread_create(&thread, &attributes, run, &call));
  CHECK_EQ(0, pthread_join(thread, nullptr));
  CHECK(call.ok);
  for (const float value : out) CHECK_NEAR(0.25, value, 1e-6);
  return 0;
}
