// What ThreadSanitizer is told. It sees every access that the kernels make, since they are compiled
// with -fsanitize=thread; this runtime is not, and tells it who runs and what orders whom. Without
// ThreadSanitizer in the program all of this does nothing.
#pragma once

#include <cstddef>

namespace stand_in::race {

bool watched();  // whether ThreadSanitizer is there

// Somebody whose accesses are told apart from those of others.
using Context = void*;
Context make_context();
Context make_unwatched_context();
Context current_context();
void switch_to(Context context);  // does not order anything

// What a context did before it released a clock comes before what another does once it has acquired
// it. A clock is any address that nothing else is kept at.
void release(const void* clock);
void acquire(const void* clock);

// What a context does in the scope of one of these is not watched: the runtime's own bookkeeping.
class Unwatched {
 public:
  Unwatched();
  ~Unwatched();
  Unwatched(const Unwatched&) = delete;
  Unwatched& operator=(const Unwatched&) = delete;
};

// Fresh memory: accesses before this are forgotten. Whole pages; reads zero. In an Unwatched scope.
void forget(void* pages, size_t bytes);

}  // namespace stand_in::race
