#include "shared_memory.hpp"

#include <sys/mman.h>

#include <vector>

#include "fault.hpp"
#include "grid.hpp"

namespace stand_in {
namespace {

std::vector<unsigned char*> free_memory[kMaxClusterCtas + 1];

}  // namespace

unsigned char* take_shared_memory(unsigned ctas) {
  std::vector<unsigned char*>& free = free_memory[ctas];
  const size_t bytes = ctas * kSharedMemory;
  if (free.empty()) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fault("no memory");
    free.push_back(static_cast<unsigned char*>(memory));
  }
  unsigned char* memory = free.back();
  free.pop_back();
  if (race::watched()) race::forget(memory, bytes);
  return memory;
}

void give_back_shared_memory(unsigned char* memory, unsigned ctas) {
  free_memory[ctas].push_back(memory);
}

void poison(unsigned char* of_cta, size_t bytes) {
  if (bytes > kSharedMemory) bytes = kSharedMemory;
  // No memset: ThreadSanitizer would take it for an access of the kernel's.
  asm volatile("rep stosb" : "+D"(of_cta), "+c"(bytes) : "a"(0xa5) : "memory");
}

}  // namespace stand_in
