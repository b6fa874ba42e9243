// A separate stack to run a function on, and the switch to it and back. x86-64.
#pragma once

#include <cstddef>

namespace stand_in {

class Fibre {
 public:
  // The fibre begins with body(), which must not return. Stacks are used again.
  explicit Fibre(void (*body)());
  ~Fibre();
  Fibre(const Fibre&) = delete;
  Fibre& operator=(const Fibre&) = delete;

  void resume();   // from the host; returns when the fibre suspends
  void suspend();  // from the fibre

 private:
  unsigned char* stack_;
  void* stack_pointer_;
};

}  // namespace stand_in
