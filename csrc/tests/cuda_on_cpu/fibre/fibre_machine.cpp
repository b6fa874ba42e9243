#include "cuda_on_cpu/fibre/fibre_machine.hpp"

#include <cstring>

namespace fibre {
namespace {

constexpr size_t kStack = 128 * 1024;
Machine* running = nullptr;  // makecontext hands over integers only

}  // namespace

Machine::Machine(int size, int lanes, Order order, uint64_t seed, int block)
    : size_(size),
      lanes_(lanes),
      block_(block > 0 ? block : size),
      order_(order),
      random_(seed),
      group_(size),
      blocks_(size / block_, Meeting(block_)),
      teams_(size / lanes, Meeting(lanes)),
      fibres_(size) {
  CHECK_EQ(0, size % block_);
  CHECK_EQ(0, block_ % lanes);
  for (Fibre& fibre : fibres_) fibre.stack.reset(new char[kStack]);
}

void Machine::enter() {
  Machine& machine = *running;
  const int rank = machine.current_;
  (*machine.body_)(rank);
  machine.fibres_[rank].done = true;
  swapcontext(&machine.fibres_[rank].context, &machine.home_);
}

void Machine::run(const std::function<void(int)>& body) {
  body_ = &body;
  running = this;
  for (Fibre& fibre : fibres_) {
    getcontext(&fibre.context);
    fibre.context.uc_stack.ss_sp = fibre.stack.get();
    fibre.context.uc_stack.ss_size = kStack;
    fibre.context.uc_link = nullptr;
    fibre.done = false;
    fibre.waits_for = nullptr;
    makecontext(&fibre.context, &Machine::enter, 0);
  }
  current_ = order_ == Order::kDescending ? 0 : size_ - 1;
  if (order_ == Order::kRandom) laggard_ = static_cast<int>(random_.below(size_));
  for (int next = next_fibre(); next >= 0; next = next_fibre()) {
    current_ = next;
    fibres_[next].waits_for = nullptr;
    swapcontext(&home_, &fibres_[next].context);
  }
  for (int rank = 0; rank < size_; ++rank) {
    const Fibre& fibre = fibres_[rank];
    if (fibre.done) continue;
    check::fail(__FILE__, __LINE__, "every thread reaches every collective call",
                "thread " + std::to_string(rank) + " of " + std::to_string(size_) +
                    " waits alone in " + fibre.waits_for->operation);
  }
}

bool Machine::runnable(const Fibre& fibre) const {
  return !fibre.done &&
         (fibre.waits_for == nullptr || fibre.waits_for->generation != fibre.generation);
}

// The next fibre that can run, or -1.
int Machine::next_fibre() {
  const int step = order_ == Order::kDescending ? size_ - 1 : 1;
  int rank = order_ == Order::kRandom ? static_cast<int>(random_.below(size_)) : current_;
  for (int i = 0; i < size_; ++i) {
    rank = (rank + step) % size_;
    if (rank != laggard_ && runnable(fibres_[rank])) return rank;
  }
  const int last = laggard_;
  if (order_ == Order::kRandom) laggard_ = static_cast<int>(random_.below(size_));
  return last >= 0 && runnable(fibres_[last]) ? last : -1;
}

void Machine::yield() { swapcontext(&fibres_[current_].context, &home_); }

void Machine::pause() {
  if (order_ == Order::kRandom && size_ > 1 && random_.below(64) == 0) yield();
}

const std::vector<uint64_t>& Machine::meet(Meeting& meeting, int member, int rank,
                                           const char* operation, uint64_t given) {
  const uint64_t generation = meeting.generation;
  std::vector<uint64_t>& all = meeting.given[generation % 2];
  if (meeting.arrived == 0) meeting.operation = operation;
  if (std::strcmp(meeting.operation, operation) != 0) {
    check::fail(__FILE__, __LINE__, std::string("all threads call ") + meeting.operation,
                "thread " + std::to_string(rank) + " calls " + operation);
  }
  all[member] = given;
  if (++meeting.arrived == static_cast<int>(all.size())) {
    meeting.arrived = 0;
    ++meeting.generation;
    pause();  // the last to arrive may run ahead or not
  } else {
    fibres_[rank].waits_for = &meeting;
    fibres_[rank].generation = generation;
    yield();
  }
  return all;
}

const std::vector<uint64_t>& Machine::meet_group(int rank, const char* operation, uint64_t given) {
  return meet(group_, rank, rank, operation, given);
}

const std::vector<uint64_t>& Machine::meet_block(int rank, const char* operation, uint64_t given) {
  return meet(blocks_[rank / block_], rank % block_, rank, operation, given);
}

const std::vector<uint64_t>& Machine::meet_team(int rank, const char* operation, uint64_t given) {
  return meet(teams_[rank / lanes_], rank % lanes_, rank, operation, given);
}

}  // namespace fibre
