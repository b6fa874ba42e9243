#include "fibre.hpp"

#include <sys/mman.h>

#include <vector>

#include "fault.hpp"
#include "race.hpp"

// Saves the callee-saved registers on the present stack, stores its top, and switches to the other.
extern "C" void stand_in_switch(void** left, void* next);
asm(R"(
.text
.globl stand_in_switch
.type stand_in_switch,@function
stand_in_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size stand_in_switch, .-stand_in_switch
)");

namespace stand_in {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kStack = 128 * 1024;
constexpr size_t kOfKernels = 16 * 1024;  // no kernel uses more; ThreadSanitizer itself does
constexpr int kSavedRegisters = 6;

std::vector<unsigned char*> free_stacks;
void* host_stack_pointer;

unsigned char* take_stack() {
  unsigned char* stack;
  if (free_stacks.empty()) {
    void* pages = mmap(nullptr, kPage + kStack, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED || mprotect(pages, kPage, PROT_NONE) != 0)
      fault("no memory for stacks");
    stack = static_cast<unsigned char*>(pages) + kPage;
  } else {
    stack = free_stacks.back();
    free_stacks.pop_back();
  }
  if (race::watched()) race::forget(stack + kStack - kOfKernels, kOfKernels);
  return stack;
}

}  // namespace

Fibre::Fibre(void (*body)()) : stack_(take_stack()) {
  void** top = reinterpret_cast<void**>(stack_ + kStack);
  *--top = nullptr;  // return address of body; aligned as after a call
  *--top = reinterpret_cast<void*>(body);
  stack_pointer_ = top - kSavedRegisters;
}

Fibre::~Fibre() { free_stacks.push_back(stack_); }

void Fibre::resume() { stand_in_switch(&host_stack_pointer, stack_pointer_); }
void Fibre::suspend() { stand_in_switch(&stack_pointer_, host_stack_pointer); }

}  // namespace stand_in
