#include "race.hpp"

#include <sys/mman.h>

#include "fault.hpp"

extern "C" {
void* __tsan_create_fiber(unsigned flags) __attribute__((weak));
void* __tsan_get_current_fiber() __attribute__((weak));
void __tsan_switch_to_fiber(void* fiber, unsigned flags) __attribute__((weak));
void __tsan_acquire(void* clock) __attribute__((weak));
void __tsan_release(void* clock) __attribute__((weak));
void __tsan_ignore_thread_begin() __attribute__((weak));
void __tsan_ignore_thread_end() __attribute__((weak));
}

namespace stand_in::race {

constexpr unsigned kNoOrder = 1;  // __tsan_switch_to_fiber_no_sync

bool watched() { return __tsan_create_fiber != nullptr; }
Context make_context() { return watched() ? __tsan_create_fiber(0) : nullptr; }
Context make_unwatched_context() {
  const Context made = make_context(), caller = current_context();
  switch_to(made);
  if (watched()) __tsan_ignore_thread_begin();
  switch_to(caller);
  return made;
}
Context current_context() { return watched() ? __tsan_get_current_fiber() : nullptr; }
void switch_to(Context context) {
  if (watched()) __tsan_switch_to_fiber(context, kNoOrder);
}
void release(const void* clock) {
  if (watched()) __tsan_release(const_cast<void*>(clock));
}
void acquire(const void* clock) {
  if (watched()) __tsan_acquire(const_cast<void*>(clock));
}
Unwatched::Unwatched() {
  if (watched()) __tsan_ignore_thread_begin();
}
Unwatched::~Unwatched() {
  if (watched()) __tsan_ignore_thread_end();
}

void forget(void* pages, size_t bytes) {  // ThreadSanitizer watches mmap
  if (mmap(pages, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) !=
      pages) {
    fault("no memory");
  }
}

}  // namespace stand_in::race
