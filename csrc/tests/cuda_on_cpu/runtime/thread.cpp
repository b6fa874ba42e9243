// Functions that a thread of the device calls.
#include "cuda_runtime.h"
#include "fault.hpp"
#include "scheduler.hpp"
#include "streams.hpp"

namespace stand_in {
namespace {

Barriers passed;
uint64_t copied = 0;

uint64_t arrive(Barrier& barrier) {
  const uint64_t generation = barrier.generation;
  race::release(&barrier.clocks[generation % 2]);
  if (--barrier.missing == 0) {
    barrier.missing = barrier.threads;
    ++barrier.generation;
    wake(barrier.waiting);
  }
  return generation;
}

void wait(Barrier& barrier, uint64_t generation) {
  if (barrier.generation == generation) wait_in(barrier.waiting);
  race::acquire(&barrier.clocks[generation % 2]);
}

int source_lane(Shuffle kind, int lane, int argument) {
  switch (kind) {
    case Shuffle::kFrom:
      return argument % kLanes;
    case Shuffle::kXor:
      return lane ^ argument;
    case Shuffle::kUp:
      return lane < argument ? lane : lane - argument;
    case Shuffle::kAll:
      break;
  }
  return lane;
}

bool is_shared(const Cluster& cluster, const void* at) {
  const unsigned char* byte = static_cast<const unsigned char*>(at);
  return byte >= cluster.shared && byte < cluster.shared + cluster.ctas.size() * kSharedMemory;
}

// At the barrier of a CTA; how many threads of it came with an argument that holds.
int meet(Cta& cta, bool holds) {
  const uint64_t generation = cta.barrier.generation;
  int& counted = cta.counted[generation % 2];
  counted += holds ? 1 : 0;
  arrive(cta.barrier);
  if (cta.barrier.generation != generation) {  // this thread was the last
    cta.counted[cta.barrier.generation % 2] = 0;
    ++passed.of_ctas;
  }
  wait(cta.barrier, generation);
  return counted;
}

// Lanes of a warp meet; returns the value of each. Does not order memory accesses.
const Words* meet_lanes(Shuffle kind, int argument, const Words& mine) {
  Thread& thread = current();
  Warp& warp = *thread.warp;
  if (warp.arrived == 0) {
    warp.kind = kind;
    warp.argument = argument;
  }
  const bool same = warp.kind == kind && (kind == Shuffle::kFrom || warp.argument == argument);
  if (!same) fault("the lanes of a warp are in different shuffles");
  const uint64_t generation = warp.generation;
  warp.given[generation % 2][thread.lane()] = mine;
  if (++warp.arrived == kLanes) {
    warp.arrived = 0;
    ++warp.generation;
    wake(warp.waiting);
    pause();
  } else {
    wait_in(warp.waiting);
  }
  return warp.given[generation % 2];
}

}  // namespace

Barriers barriers_passed() { return passed; }
uint64_t bytes_copied() { return copied; }

const Index& thread_index() {
  pause();
  return current().index;
}

const Index& block_index() {
  pause();
  return current().cta->index;
}

const Index& grid_size() {
  const dim3& grid = current().cta->cluster->launch->grid;
  static Index index;
  index = {grid.x, grid.y, grid.z};
  return index;
}

// The threads of a CTA declare the same variables in the same order.
void* shared_memory(size_t bytes, size_t alignment) {
  Thread& thread = current();
  const size_t at = (thread.declared + alignment - 1) / alignment * alignment;
  thread.declared = at + bytes;
  if (thread.declared > kStaticMemory) fault("more than 48 KB of static shared memory");
  if (thread.cta->declared < thread.declared) thread.cta->declared = thread.declared;
  return thread.cta->shared + at;
}

// After the static declarations.
void* dynamic_shared_memory(size_t bytes) {
  Thread& thread = current();
  const size_t asked = thread.cta->cluster->launch->dynamic;
  if (bytes > asked) fault("more dynamic shared memory than the launch asked for");
  const size_t at = (thread.declared + 127) / 128 * 128;
  if (at + asked > kSharedMemory) fault("more shared memory than a CTA has");
  if (thread.cta->declared < at + asked) thread.cta->declared = at + asked;
  return thread.cta->shared + at;
}

uint64_t shuffle(Shuffle kind, unsigned mask, uint64_t value, int argument) {
  if (mask != 0xffffffffu) fault("a shuffle is not of the whole warp");
  const Words mine{{static_cast<uint32_t>(value), static_cast<uint32_t>(value >> 32)}};
  const Words& other =
      meet_lanes(kind, argument, mine)[source_lane(kind, current().lane(), argument)];
  return other.of[0] | uint64_t{other.of[1]} << 32;
}

const Words* exchange(const Words& mine) { return meet_lanes(Shuffle::kAll, 0, mine); }

bool comes_early(const Copy& copy) {
  Thread& thread = current();
  const auto at = [](const void* address) { return reinterpret_cast<uintptr_t>(address); };
  if (at(copy.to) % 16 != 0 || at(copy.from) % 16 != 0 || copy.bytes > 16)
    fault("an asynchronous copy is not of 16 aligned bytes");
  if (!is_shared(*thread.cta->cluster, copy.to))
    fault("an asynchronous copy is not to shared memory");
  copied += copy.bytes;
  pause();
  if (draw() % 2 == 0) return true;
  thread.copies.push_back(copy);
  thread.batch_of.push_back(thread.batch);
  return false;
}

void end_batch() { ++current().batch; }

bool take_copy(int left, Copy* copy) {
  Thread& thread = current();
  const bool due =
      !thread.copies.empty() && thread.batch_of[0] + static_cast<uint64_t>(left) < thread.batch;
  if (!due) return false;
  *copy = thread.copies[0];
  thread.copies.erase(thread.copies.begin());
  thread.batch_of.erase(thread.batch_of.begin());
  return true;
}

void make_barrier(uint64_t* at) {
  Cta& cta = *current().cta;
  if (!is_shared(*cta.cluster, at) || reinterpret_cast<uintptr_t>(at) % 8 != 0)
    fault("a barrier of bulk copies is not 8 aligned bytes of shared memory");
  pause();
  const race::Unwatched bookkeeping;
  *at = ~cta.copy_barriers.size();
  cta.copy_barriers.push_back(std::make_unique<CopyBarrier>());
  cta.copy_barriers.back()->at = at;
}

namespace {

CopyBarrier& copy_barrier(const uint64_t* at) {
  const Cta& cta = *current().cta;
  const uint64_t number = is_shared(*cta.cluster, at) ? ~*at : ~uint64_t{0};
  if (number >= cta.copy_barriers.size() || cta.copy_barriers[number]->at != at)
    fault("a barrier of bulk copies was not made, or has been overwritten");
  return *cta.copy_barriers[number];
}

void end_phase(CopyBarrier& barrier) {
  if (barrier.arrivals > 0 || barrier.bytes > 0) return;
  barrier.arrivals = 1;
  ++barrier.phase;
  wake(barrier.waiting);
}

bool in_phase(const CopyBarrier& barrier, int parity) {
  return barrier.phase % 2 == static_cast<uint64_t>(parity);
}

}  // namespace

void note_bulk(const BulkCopy& copy) {
  Thread& thread = current();
  const auto at = [](const void* address) { return reinterpret_cast<uintptr_t>(address); };
  if (at(copy.to) % 16 != 0 || at(copy.from) % 16 != 0 || copy.bytes % 16 != 0 || copy.bytes == 0)
    fault("a bulk copy is not of 16 aligned bytes or a multiple");
  if (!is_shared(*thread.cta->cluster, copy.to)) fault("a bulk copy is not to shared memory");
  pause();
  CopyBarrier& barrier = copy_barrier(copy.barrier);
  if (--barrier.arrivals < 0) fault("a barrier of bulk copies counts two in a phase");
  barrier.bytes += copy.bytes;
  race::release(&barrier.clocks[barrier.phase % 2]);  // waiting threads see this thread's accesses
  race::release(&thread.warp->copies_begun);
  const race::Unwatched bookkeeping;
  thread.cta->bulk_copies.push_back({copy, thread.warp});
}

bool take_bulk(const uint64_t* awaited, int parity, BulkCopy* copy) {
  pause();
  Cta& cta = *current().cta;
  if (cta.bulk_copies.empty()) return false;
  size_t which = draw() % cta.bulk_copies.size();
  if (draw() % 2 == 0) {  // only copies that this thread waits for
    if (awaited == nullptr || !in_phase(copy_barrier(awaited), parity)) return false;
    which = 0;
    while (which < cta.bulk_copies.size() && cta.bulk_copies[which].copy.barrier != awaited)
      ++which;
    if (which == cta.bulk_copies.size()) return false;
  }
  *copy = cta.bulk_copies[which].copy;
  Warp& warp = *cta.bulk_copies[which].warp;
  {
    const race::Unwatched bookkeeping;
    cta.bulk_copies.erase(cta.bulk_copies.begin() + static_cast<std::ptrdiff_t>(which));
    if (warp.copies == nullptr) warp.copies = race::make_context();
  }
  current().copying = &warp;
  current().copied = copy->bytes;
  return true;
}

void begin_bulk() {
  Thread& thread = current();
  thread.interrupted = race::current_context();
  race::switch_to(thread.copying->copies);
  race::acquire(&thread.copying->copies_begun);
}

void end_bulk(const uint64_t* at) {
  CopyBarrier& barrier = copy_barrier(at);
  race::release(&barrier.clocks[barrier.phase % 2]);
  race::switch_to(current().interrupted);
  barrier.bytes -= current().copied;
  end_phase(barrier);
  pause();
}

void await_phase(const uint64_t* at, int parity) {
  CopyBarrier& barrier = copy_barrier(at);
  if (in_phase(barrier, parity)) wait_in(barrier.waiting);
  race::acquire(&barrier.clocks[parity]);
  pause();
}

void launch_dependents() {
  release_dependents(*current().cta);
  pause();
}

void wait_for_prerequisites() {
  Thread& thread = current();
  thread.waited = true;
  Launch* const before = thread.cta->cluster->launch->before.get();
  if (before == nullptr) return;
  if (!before->all_ended()) wait_in(before->waiting);
  race::acquire(&before->end);
  pause();
}

// Accesses before a fence come before other threads' accesses after their fence, when an atomic
// before their fence has read a value that an atomic after the first fence wrote.
void before_atomic(const void* at) {
  pause();
  Thread& thread = current();
  if (thread.fenced) race::release(at);
  thread.fenced = false;
}

void after_atomic(const void* at) {
  Thread& thread = current();
  if (race::watched() && !is_shared(*thread.cta->cluster, at)) thread.observed.push_back(at);
  pause();
}

}  // namespace stand_in

using stand_in::current;
using stand_in::fault;

void __threadfence() {
  stand_in::Thread& thread = current();
  for (const void* at : thread.observed) stand_in::race::acquire(at);
  thread.observed.clear();
  thread.fenced = true;
  stand_in::pause();
}

void __syncthreads() {
  stand_in::meet(*current().cta, false);
  stand_in::pause();
}

void __syncwarp() {
  stand_in::Barrier& lanes = current().warp->lanes;
  stand_in::wait(lanes, stand_in::arrive(lanes));
  stand_in::pause();
}

int __syncthreads_count(int predicate) {
  const int count = stand_in::meet(*current().cta, predicate != 0);
  stand_in::pause();
  return count;
}

void __cluster_barrier_arrive() {
  stand_in::Thread& thread = current();
  if (thread.at_cluster_barrier) fault("a thread arrives twice at the barrier of the cluster");
  thread.at_cluster_barrier = true;
  stand_in::Barrier& barrier = thread.cta->cluster->barrier;
  thread.cluster_generation = stand_in::arrive(barrier);
  if (barrier.generation != thread.cluster_generation) ++stand_in::passed.of_clusters;
  stand_in::pause();
}

void __cluster_barrier_wait() {
  stand_in::Thread& thread = current();
  if (!thread.at_cluster_barrier)
    fault("a thread waits at the barrier of the cluster without having arrived");
  stand_in::wait(thread.cta->cluster->barrier, thread.cluster_generation);
  thread.at_cluster_barrier = false;
  stand_in::pause();
}

unsigned __clusterRelativeBlockRank() { return current().cta->rank; }
unsigned __clusterSizeInBlocks() {
  return static_cast<unsigned>(current().cta->cluster->ctas.size());
}

void* __cluster_map_shared_rank(const void* mine, unsigned rank) {
  stand_in::pause();
  const stand_in::Cta& cta = *current().cta;
  const stand_in::Cluster& cluster = *cta.cluster;
  const size_t at =
      static_cast<size_t>(static_cast<const unsigned char*>(mine) - cta.shared);  // wraps below
  if (at >= cta.declared)
    fault("what is mapped into another CTA is not in this one's shared memory");
  if (rank >= cluster.ctas.size()) fault("the cluster has no CTA of this rank");
  const stand_in::Cta& other = *cluster.ctas[rank];
  if (!other.begun) fault("a CTA reaches into the shared memory of one that has not begun");
  if (other.alive == 0) fault("a CTA reaches into the shared memory of one that has ended");
  return other.shared + at;
}
