// Resident state: the clusters of the launches that run, their CTAs, warps and threads.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda_runtime.h"
#include "fibre.hpp"
#include "race.hpp"

namespace stand_in {

struct Cluster;
struct Cta;
struct Stream;
struct Thread;
struct Warp;

constexpr int kLanes = 32;
constexpr int kMaxClusterCtas = 16;
constexpr unsigned kMaxThreads = 1024;        // of a CTA
constexpr size_t kStaticMemory = 48 * 1024;   // of a CTA: declared, or asked for without leave
constexpr size_t kSharedMemory = 228 * 1024;  // of a CTA, on the devices that have most

// Threads that wait for something, in no order. It takes no memory, which would be seen as passed
// from one thread to another.
struct Queue {
  Thread* first = nullptr;
};

struct Launch {
  std::function<void()> thread;
  const char* kernel;
  dim3 grid;
  unsigned threads, ctas;  // of a CTA, of a cluster
  size_t dynamic;          // bytes of shared memory of a CTA
  uint64_t clusters;

  bool dependent;  // may begin when all CTAs of the launch before it have said so or ended
  std::shared_ptr<Launch> before;  // in the stream, of a dependent launch
  uint64_t released = 0;           // CTAs that have said so or ended
  Queue waiting;                   // threads of the launch after this one

  Stream* stream = nullptr;
  std::vector<uint64_t> order;  // in which the clusters begin
  uint64_t begun = 0, ended = 0;
  char submitted, end;  // clocks

  bool all_begun() const { return begun == clusters; }
  bool all_ended() const { return ended == clusters; }
  bool all_released() const { return released == clusters * ctas; }
};

// Threads meet; with the clocks of this generation and of the previous.
struct Barrier {
  explicit Barrier(int threads) : threads(threads), missing(threads) {}
  int threads, missing;
  uint64_t generation = 0;
  Queue waiting;
  char clocks[2];
};

struct Warp {
  Shuffle kind;
  int argument;
  int arrived = 0;
  uint64_t generation = 0;
  Words given[2][kLanes];  // by generation: slow readers of the last one are left in peace
  Queue waiting;
  Barrier lanes{kLanes};
  race::Context copies = nullptr;  // accesses of its bulk copies
  char copies_begun;               // clock
};

// Counts bulk copies. The memory of the kernel has its number in the CTA.
struct CopyBarrier {
  uint64_t* at;
  int arrivals = 1;   // missing in this phase
  int64_t bytes = 0;  // begun and not there
  uint64_t phase = 0;
  Queue waiting;
  char clocks[2];  // by the parity of the phase that has ended
};

struct Thread {
  Thread(Cta* cta, Warp* warp, unsigned rank, void (*body)())
      : cta(cta), warp(warp), index{rank, 0, 0}, fibre(body) {}
  int lane() const { return static_cast<int>(index.x % kLanes); }

  Cta* cta;
  Warp* warp;
  Index index;
  Fibre fibre;
  race::Context context = nullptr;
  race::Context interrupted = nullptr;  // during a bulk copy
  Warp* copying = nullptr;              // the warp of the copy
  int64_t copied = 0;                   // its bytes
  size_t declared = 0;                  // bytes of shared memory
  std::vector<Copy> copies;             // that it has not waited for, in their order
  std::vector<uint64_t> batch_of;       // of each
  uint64_t batch = 0;
  bool at_cluster_barrier = false;
  uint64_t cluster_generation = 0;
  bool fenced = false;                // no atomic since its last fence
  std::vector<const void*> observed;  // addresses that its atomics since then have read
  bool waited = false;                // for the launches before this one
  bool ended = false;
  Thread* next = nullptr;  // in the queue it waits in
};

struct Cta {
  Cta(Cluster* cluster, unsigned rank, int threads)
      : cluster(cluster), rank(rank), alive(threads), barrier(threads) {}
  Cluster* cluster;
  unsigned rank;
  Index index{};
  unsigned char* shared = nullptr;
  size_t declared = 0;
  bool begun = false;
  bool released = false;  // the launch after this one may begin
  bool lags = false;      // runs only when no other can
  int alive;
  Barrier barrier;
  int counted[2] = {};  // by generation of the barrier: arguments that hold
  std::vector<Warp> warps;
  std::vector<std::unique_ptr<CopyBarrier>> copy_barriers;
  struct Begun {
    BulkCopy copy;
    Warp* warp;
  };
  std::vector<Begun> bulk_copies;  // not carried out yet
};

struct Cluster {
  Cluster(std::shared_ptr<Launch> launch, unsigned char* shared)
      : launch(std::move(launch)),
        shared(shared),
        alive(static_cast<int>(this->launch->threads * this->launch->ctas)),
        barrier(alive) {}
  std::shared_ptr<Launch> launch;
  unsigned char* shared;  // [ctas][kSharedMemory]
  int alive;
  Barrier barrier;
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<std::unique_ptr<Thread>> threads;
  char start;  // clock
};

}  // namespace stand_in
