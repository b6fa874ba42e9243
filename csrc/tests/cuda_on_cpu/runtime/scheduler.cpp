#include "scheduler.hpp"

#include <algorithm>
#include <list>
#include <string>

#include "fault.hpp"
#include "shared_memory.hpp"
#include "streams.hpp"

namespace stand_in {
namespace {

// Threads, but for a cluster that is larger. ThreadSanitizer takes longer with more contexts.
constexpr size_t kMaxResident = 4096, kMaxWatched = 768;
constexpr int kPausesPerSwitch = 64;
// Contexts are used again, but not at once.
constexpr size_t kSpareContexts = 64;

uint64_t state = 1;
Thread* running = nullptr;
race::Context host;
std::vector<Thread*> ready;
std::vector<Thread*> held;  // of CTAs that lag: run only when no other can
std::list<Cluster> resident;
size_t resident_threads = 0;
std::vector<race::Context> contexts;
uint64_t clusters_of[kMaxClusterCtas + 1];
uint64_t early = 0;  // kernels

template <class T>
T take_any(std::vector<T>& from) {
  std::swap(from[draw() % from.size()], from.back());
  T taken = from.back();
  from.pop_back();
  return taken;
}

// Among the threads that can run.
void put_back(Thread* thread) { (thread->cta->lags ? held : ready).push_back(thread); }

void yield() {
  race::switch_to(host);
  running->fibre.suspend();
}

// The body of a fibre.
void run_thread() {
  Thread& thread = *running;
  Cta& cta = *thread.cta;
  const Launch& launch = *cta.cluster->launch;
  race::acquire(&cta.cluster->start);
  if (!cta.begun) poison(cta.shared, kStaticMemory + launch.dynamic);
  cta.begun = true;
  launch.thread();
  if (thread.at_cluster_barrier) fault("a thread ends between the halves of the cluster barrier");
  if (!thread.copies.empty()) fault("a thread ends without having waited for its copies");
  if (launch.dependent && !thread.waited)
    fault("a thread ends without having waited for the kernels before");
  race::release(&launch.end);
  if (--cta.alive == 0) {
    release_dependents(cta);
    if (!cta.bulk_copies.empty()) fault("a CTA ends without having waited for its bulk copies");
    poison(cta.shared, kStaticMemory + launch.dynamic);
  }
  thread.ended = true;
  yield();
  fault("a thread runs that has ended");
}

void begin_cluster(const std::shared_ptr<Launch>& launch) {
  const uint64_t number = launch->order[launch->begun++];
  resident.emplace_back(launch, take_shared_memory(launch->ctas));
  Cluster& cluster = resident.back();
  const unsigned laggard = static_cast<unsigned>(draw() % (2 * launch->ctas));  // if there is one
  for (unsigned rank = 0; rank < launch->ctas; ++rank) {
    cluster.ctas.push_back(
        std::make_unique<Cta>(&cluster, rank, static_cast<int>(launch->threads)));
    Cta& cta = *cluster.ctas.back();
    cta.lags = rank == laggard;
    cta.shared = cluster.shared + rank * kSharedMemory;
    const uint64_t at = number * launch->ctas + rank;
    const dim3& grid = launch->grid;
    cta.index = {static_cast<unsigned>(at % grid.x), static_cast<unsigned>(at / grid.x % grid.y),
                 static_cast<unsigned>(at / grid.x / grid.y)};
    cta.warps.resize(launch->threads / kLanes);
    for (unsigned i = 0; i < launch->threads; ++i) {
      cluster.threads.push_back(
          std::make_unique<Thread>(&cta, &cta.warps[i / kLanes], i, run_thread));
      Thread* thread = cluster.threads.back().get();
      thread->context =
          contexts.size() > kSpareContexts ? take_any(contexts) : race::make_context();
      put_back(thread);
    }
  }
  race::release(&cluster.start);
  resident_threads += cluster.threads.size();
  ++clusters_of[launch->ctas];
}

// Begins a cluster of some launch, if there is one and room for it.
bool begin_any() {
  std::vector<std::shared_ptr<Launch>> launches = beginning_launches();
  if (launches.empty()) return false;
  const std::shared_ptr<Launch> launch = take_any(launches);
  const size_t threads = launch->threads * launch->ctas;
  const size_t most = race::watched() ? kMaxWatched : kMaxResident;
  if (resident_threads > 0 && resident_threads + threads > most) return false;
  // Of a dependent launch the host, which knows nothing of the launches before it.
  if (!launch->dependent) race::switch_to(context_of(*launch->stream));
  if (launch->begun == 0 && launch->before != nullptr && !launch->before->all_ended()) ++early;
  begin_cluster(launch);
  race::switch_to(host);
  return true;
}

void end_thread(Thread& thread) {
  Cluster& cluster = *thread.cta->cluster;
  contexts.push_back(thread.context);
  if (--cluster.alive > 0) return;
  for (const auto& cta : cluster.ctas) {
    for (const Warp& warp : cta->warps) {
      if (warp.copies != nullptr) contexts.push_back(warp.copies);
    }
  }
  Launch& launch = *cluster.launch;  // its stream keeps it
  resident_threads -= cluster.threads.size();
  race::switch_to(context_of(*launch.stream));
  race::acquire(&launch.end);
  give_back_shared_memory(cluster.shared, launch.ctas);
  resident.remove_if([&](const Cluster& other) { return &other == &cluster; });
  ++launch.ended;
  if (launch.all_ended()) wake(launch.waiting);
  end_launches(*launch.stream);
  race::switch_to(host);
}

[[noreturn]] void deadlock() {
  std::string what = "deadlock: no thread can run";
  for (const Cluster& cluster : resident) {
    what += std::string("\n  ") + cluster.launch->kernel;
    for (const auto& cta : cluster.ctas) {
      int in_shuffles = 0;
      for (const Warp& warp : cta->warps) in_shuffles += length(warp.waiting);
      int in_copies = 0;
      for (const auto& barrier : cta->copy_barriers) in_copies += length(barrier->waiting);
      what += "\n    CTA " + std::to_string(cta->index.x) + ": of " +
              std::to_string(cta->barrier.threads) + " threads " + std::to_string(cta->alive) +
              " run, " + std::to_string(length(cta->barrier.waiting)) + " wait in __syncthreads, " +
              std::to_string(in_shuffles) + " in shuffles, " + std::to_string(in_copies) +
              " for bulk copies";
    }
    what += "\n    " + std::to_string(length(cluster.barrier.waiting)) +
            " wait at the barrier of the cluster";
  }
  fault(what);
}

}  // namespace

void seed(uint64_t seed) { state = seed; }

uint64_t draw() {  // SplitMix64
  uint64_t z = state += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

uint64_t clusters_run(int ctas) { return clusters_of[ctas]; }
uint64_t early_kernels() { return early; }

void run_all() {
  if (running != nullptr) fault("a thread of the device calls the host's side of the runtime");
  const race::Unwatched bookkeeping;
  host = race::current_context();
  // Threads add to it, and are not to be seen passing memory to each other.
  ready.reserve(std::max<size_t>(kMaxResident, kMaxClusterCtas * kMaxThreads));
  held.reserve(ready.capacity());
  for (;;) {
    while (begin_any()) {
    }
    if (ready.empty()) ready.swap(held);
    if (ready.empty()) break;
    running = take_any(ready);
    race::switch_to(running->context);
    running->fibre.resume();
    Thread& last = *running;
    running = nullptr;
    if (last.ended) end_thread(last);
  }
  if (!resident.empty()) deadlock();
}

Thread& current() {
  if (running == nullptr) fault("the host asks what only a thread of the device knows");
  return *running;
}

void pause() {
  if (draw() % kPausesPerSwitch != 0) return;
  ready.push_back(&current());
  yield();
}

void wait_in(Queue& queue) {
  Thread& thread = current();
  thread.next = queue.first;
  queue.first = &thread;
  yield();
}

void wake(Queue& queue) {
  for (Thread* thread = queue.first; thread != nullptr; thread = thread->next) put_back(thread);
  queue.first = nullptr;
}

void release_dependents(Cta& cta) {
  if (!cta.released) ++cta.cluster->launch->released;
  cta.released = true;
}

int length(const Queue& queue) {
  int n = 0;
  for (const Thread* thread = queue.first; thread != nullptr; thread = thread->next) ++n;
  return n;
}

}  // namespace stand_in
