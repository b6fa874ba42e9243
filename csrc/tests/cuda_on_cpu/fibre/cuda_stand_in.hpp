// What the CUDA backend's thread groups ask of the hardware, asked of fibres instead: a block of
// fibres is a CTA, the machine is the cluster, shared memory is an array with one element per CTA.
// Include before the groups.
#pragma once

#include "cuda_on_cpu/fibre/fibre_machine.hpp"

#define __device__
#define __forceinline__ inline

namespace stand_in {

inline fibre::Machine* machine = nullptr;
inline unsigned char* shared_memory = nullptr;  // that of CTA 0; the others' follow
inline size_t shared_size = 0;                  // of one CTA

struct ThreadIdx {
  struct {
    operator unsigned() const {
      return static_cast<unsigned>(machine->current() % machine->block());
    }
  } x;
};

template <class T>
const std::vector<uint64_t>& of_the_warp(const char* name, unsigned mask, T value) {
  CHECK_EQ(0xffffffffu, mask);
  return machine->meet_team(machine->current(), name, static_cast<uint64_t>(value));
}

}  // namespace stand_in

inline stand_in::ThreadIdx threadIdx;

template <class T>
T __shfl_sync(unsigned mask, T value, int from) {
  return static_cast<T>(
      stand_in::of_the_warp("__shfl_sync", mask, value)[static_cast<size_t>(from)]);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int step) {
  const size_t lane =
      static_cast<size_t>(stand_in::machine->current() % stand_in::machine->lanes());
  return static_cast<T>(
      stand_in::of_the_warp("__shfl_xor_sync", mask, value)[lane ^ static_cast<size_t>(step)]);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int step) {
  const int lane = stand_in::machine->current() % stand_in::machine->lanes();
  return static_cast<T>(stand_in::of_the_warp(
      "__shfl_up_sync", mask, value)[static_cast<size_t>(lane < step ? lane : lane - step)]);
}
inline void __syncthreads() {
  stand_in::machine->meet_block(stand_in::machine->current(), "__syncthreads", 0);
}
// Not to be looked into by the optimiser: halves of 64-bit integers are added to as well.
__attribute__((noipa)) inline unsigned atomicAdd(unsigned* at, unsigned value) {
  stand_in::machine->pause();
  return (*at += value) - value;
}
inline void __threadfence() { stand_in::machine->pause(); }

inline unsigned __clusterRelativeBlockRank() {
  return static_cast<unsigned>(stand_in::machine->current() / stand_in::machine->block());
}
inline unsigned __clusterSizeInBlocks() {
  return static_cast<unsigned>(stand_in::machine->size() / stand_in::machine->block());
}
// The two halves of the barrier stand next to each other in the sources.
inline void __cluster_barrier_arrive() {}
inline void __cluster_barrier_wait() {
  stand_in::machine->meet_group(stand_in::machine->current(), "cluster barrier", 0);
}
inline void* __cluster_map_shared_rank(const void* mine, unsigned rank) {
  stand_in::machine->pause();
  const size_t own = __clusterRelativeBlockRank();
  const size_t at =
      static_cast<size_t>(static_cast<const unsigned char*>(mine) - stand_in::shared_memory) -
      own * stand_in::shared_size;
  CHECK_BELOW(static_cast<double>(stand_in::shared_size), static_cast<double>(at));
  CHECK_BELOW(__clusterSizeInBlocks(), rank);
  return stand_in::shared_memory + rank * stand_in::shared_size + at;
}
