// Who runs next. Everything runs on one thread of the host, in an order drawn at random.
#pragma once

#include "grid.hpp"

namespace stand_in {

uint64_t draw();

// Runs all launches of all streams to their end. Only the host may ask for that.
void run_all();

// The thread that runs; a fault on the host.
Thread& current();

// A point at which the thread that runs may be interrupted.
void pause();
// The thread that runs waits in the queue until another thread wakes it.
void wait_in(Queue& queue);
void wake(Queue& queue);
int length(const Queue& queue);

// The launch after this CTA's need no longer wait for this one to begin.
void release_dependents(Cta& cta);

}  // namespace stand_in
