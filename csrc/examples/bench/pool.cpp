#include "pool.hpp"

Pool::Pool(int threads) {
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { serve(); });
}

Pool::~Pool() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Pool::run(void* pool, int64_t n, polyspec::Executor::Body body, void* context) {
  Pool& self = *static_cast<Pool*>(pool);
  {
    const std::lock_guard<std::mutex> lock(self.mutex_);
    self.body_ = body;
    self.context_ = context;
    self.count_ = n;
    self.next_ = 0;
    self.busy_ = self.workers_.size();
    ++self.generation_;
  }
  self.wake_.notify_all();
  self.work();
  std::unique_lock<std::mutex> lock(self.mutex_);
  self.idle_.wait(lock, [&] { return self.busy_ == 0; });
}

void Pool::work() {
  for (int64_t i = next_++; i < count_; i = next_++) body_(context_, i);
}

void Pool::serve() {
  uint64_t seen = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    wake_.wait(lock, [&] { return stop_ || generation_ != seen; });
    if (stop_) return;
    seen = generation_;
    lock.unlock();
    work();
    lock.lock();
    if (--busy_ == 0) idle_.notify_one();
  }
}
