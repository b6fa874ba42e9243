// Threads that an embedder lends to polyspec through its Executor.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "polyspec/types.hpp"

// `threads` workers including the caller; work is handed out index by index. One run at a time.
class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // For Stream::cpu; the pool must outlive the calls.
  polyspec::Executor executor() { return {&Pool::run, this}; }

 private:
  static void run(void* pool, int64_t n, polyspec::Executor::Body body, void* context);
  void work();   // takes indices until none is left
  void serve();  // a worker's life

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  uint64_t generation_ = 0;  // counts runs, so that a worker sees each once
  size_t busy_ = 0;
  bool stop_ = false;

  std::atomic<int64_t> next_{0};
  int64_t count_ = 0;
  polyspec::Executor::Body body_ = nullptr;
  void* context_ = nullptr;
};
