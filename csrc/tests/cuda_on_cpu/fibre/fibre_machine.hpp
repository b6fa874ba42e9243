// Runs N cooperating threads as fibres of one thread, with barriers that only the fibres' own code
// makes.
//
// A real block of threads hides most barrier mistakes; fibres in an adverse order show them, the
// same way in every run. A fibre runs until it waits; who runs next is the order's choice. In
// random order a fibre is also interrupted anywhere it asks its group something. Calls that must be
// made together but are not end the program.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "support/random_case.hpp"

namespace fibre {

enum class Order { kAscending, kDescending, kRandom };
constexpr Order kOrders[] = {Order::kAscending, Order::kDescending, Order::kRandom};

class Machine {
 public:
  // Threads 0 ... size - 1 in teams of `lanes` consecutive ones, and blocks of `block` (0: one
  // block of all); lanes divides block, block divides size.
  Machine(int size, int lanes, Order order, uint64_t seed, int block = 0);

  // Runs body(rank) in every fibre until all have returned.
  void run(const std::function<void(int)>& body);

  // Waits for the other threads of the group (block, team); returns what each of them gave, by rank
  // (within it). `operation` must be the same in all. The answer stays valid until the second
  // meeting after this one.
  const std::vector<uint64_t>& meet_group(int rank, const char* operation, uint64_t given);
  const std::vector<uint64_t>& meet_block(int rank, const char* operation, uint64_t given);
  const std::vector<uint64_t>& meet_team(int rank, const char* operation, uint64_t given);

  // A point at which a fibre may be interrupted.
  void pause();

  int current() const { return current_; }  // rank of the fibre that runs
  int size() const { return size_; }
  int lanes() const { return lanes_; }
  int block() const { return block_; }

 private:
  struct Meeting {
    explicit Meeting(int members)
        : given{std::vector<uint64_t>(members), std::vector<uint64_t>(members)} {}
    std::vector<uint64_t>
        given[2];  // by generation: slow readers of the last meeting are left in peace
    const char* operation = "";
    int arrived = 0;
    uint64_t generation = 0;
  };
  struct Fibre {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool done = false;
    Meeting* waits_for = nullptr;
    uint64_t generation = 0;
  };

  static void enter();
  const std::vector<uint64_t>& meet(Meeting& meeting, int member, int rank, const char* operation,
                                    uint64_t given);
  bool runnable(const Fibre& fibre) const;
  int next_fibre();
  void yield();

  int size_, lanes_, block_;
  Order order_;
  cases::Random random_;
  Meeting group_;
  std::vector<Meeting> blocks_;
  std::vector<Meeting> teams_;
  std::vector<Fibre> fibres_;
  ucontext_t home_;
  int current_ = 0;
  int laggard_ = -1;  // runs only when nobody else can; in random order there always is one
  const std::function<void(int)>* body_ = nullptr;
};

}  // namespace fibre
