// The interface to ThreadSanitizer. It sees every access that the kernels make, since they are
// compiled with -fsanitize=thread; this runtime is not, and reports contexts and their order.
// Without ThreadSanitizer in the program all of this does nothing.
#pragma once

#include <cstddef>

namespace stand_in::race {

bool watched();  // whether ThreadSanitizer is there

// A context: its accesses are separate from other contexts' accesses.
using Context = void*;
Context make_context();
Context make_unwatched_context();
Context current_context();
void switch_to(Context context);  // does not order anything

// Accesses of a context before it released a clock come before accesses of another after it
// acquired the clock. A clock is any address without other data.
void release(const void* clock);
void acquire(const void* clock);

// Accesses in the scope of an object are not watched: the runtime's bookkeeping.
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
