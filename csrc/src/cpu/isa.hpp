// Instruction sets for which parts of the CPU backend are compiled, in ascending order.
#pragma once

#include "polyspec/status.hpp"

namespace polyspec::cpu {

enum class Isa { kBaseline, kAvx2, kAvx512, kAvx512Vnni, kAvx512Bf16, kAmx };

// Extensions that the copies are compiled for, all of them or what one processor has.
struct Extensions {
  bool avx2, fma, f16c;
  bool avx512f, avx512dq, avx512bw, avx512vl;
  bool avx512vnni, avx512bf16;
  bool amx;  // tiles, and products of whole numbers and of bfloat16 with them
};

// Of the processor that runs, and that the system lets a process have: it is asked for AMX.
Extensions extensions();

// The widest instruction set all of whose extensions are there.
Isa widest(const Extensions& there);

// Reads a name of POLYSPEC_CPU_ISA (baseline, avx2, avx512, avx512vnni, avx512bf16 or amx); nullptr
// and "" are the widest. Whether it is one.
bool parse_isa(const char* name, Isa* isa);

// The widest that this processor has, or a lower one that POLYSPEC_CPU_ISA asks for when first
// called: the tests compare the copies with it.
Isa isa_in_use();

// What one instruction set has of a file that is compiled once for each.
template <class Table>
struct Copy {
  Isa isa;
  const Table* table;
};

// The last of them, which ascend, that the instruction set in use covers.
template <class Table, int kCount>
const Table& chosen(const Copy<Table> (&copies)[kCount]) {
  int last = kCount - 1;
  while (copies[last].isa > isa_in_use()) --last;
  return *copies[last].table;
}

// kInvalidArgument where POLYSPEC_CPU_ISA is none of the names. The operators refuse then.
Result check_isa();

}  // namespace polyspec::cpu
