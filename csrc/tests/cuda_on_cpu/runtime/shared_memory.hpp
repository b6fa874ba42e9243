// The shared memory of clusters, poisoned when a CTA begins and when it ends.
#pragma once

#include <cstddef>

namespace stand_in {

unsigned char* take_shared_memory(unsigned ctas);  // [ctas][kSharedMemory]
void give_back_shared_memory(unsigned char* memory, unsigned ctas);
void poison(unsigned char* of_cta, size_t bytes);

}  // namespace stand_in
