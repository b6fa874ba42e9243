// Equal slices of one piece of memory, lent one by one and returned from any thread.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

namespace bindings {

class Slices {
 public:
  // `memory`: `count` slices of `bytes` each.
  Slices(char* memory, int64_t count, int64_t bytes) : free_(static_cast<size_t>(count)) {
    for (int64_t i = 0; i < count; ++i)
      free_[static_cast<size_t>(i)] = memory + (count - 1 - i) * bytes;
  }

  // nullptr: all are lent.
  void* lend() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) return nullptr;
    void* const slice = free_.back();
    free_.pop_back();
    return slice;
  }

  // There is room for it, so this allocates nothing.
  void give_back(void* slice) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(slice);
  }

 private:
  std::mutex mutex_;
  std::vector<void*> free_;
};

}  // namespace bindings
