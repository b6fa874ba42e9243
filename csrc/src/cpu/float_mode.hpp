// The floating-point mode of the row algorithms: round to nearest, denormals kept, nothing trapped.
// (The bfloat16 product flushes denormals, as its instruction does.)
//
// A caller's thread may have another mode, since flushing denormals to zero makes some models
// faster. Its rows would then have other masses than the rows of other threads.
#pragma once

#include "core/numeric.hpp"

namespace polyspec::POLYSPEC_CORE {

// Sets the mode of this thread, and restores the previous mode at the end of the scope.
class FloatMode {
 public:
  enum Denormals { kKept, kFlushed };
  POLYSPEC_FN explicit FloatMode(Denormals denormals = kKept)
      : given_(read()), changed_((given_ & ~kFlags) != word_of(denormals)) {
    if (changed_) write(word_of(denormals));
  }
  POLYSPEC_FN ~FloatMode() {
    if (changed_) write(given_);
  }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
  // Computations have their operands in memory, which keeps them from crossing the switch.
#if defined(__x86_64__)
  using Word = uint32_t;  // MXCSR
  static constexpr Word kPlain = 0x1f80, kFlush = 0x8040, kFlags = 0x3f;
  POLYSPEC_FN static Word read() {
    Word word;
    asm volatile("stmxcsr %0" : "=m"(word));
    return word;
  }
  POLYSPEC_FN static void write(Word word) { asm volatile("ldmxcsr %0" : : "m"(word) : "memory"); }
#elif defined(__aarch64__)
  using Word = uint64_t;  // FPCR
  static constexpr Word kPlain = 0, kFlush = 1u << 24, kFlags = 0;
  POLYSPEC_FN static Word read() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  POLYSPEC_FN static void write(Word word) {
    asm volatile("msr fpcr, %0" : : "r"(word) : "memory");
  }
#else
  using Word = uint32_t;
  static constexpr Word kPlain = 0, kFlush = 0, kFlags = 0;
  POLYSPEC_FN static Word read() { return kPlain; }
  POLYSPEC_FN static void write(Word) {}
#endif
  POLYSPEC_FN static Word word_of(Denormals denormals) {
    return denormals == kKept ? kPlain : kPlain | kFlush;
  }
  Word given_;
  bool changed_;
};

}  // namespace polyspec::POLYSPEC_CORE
