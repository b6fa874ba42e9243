// Instruction sets for which parts of the CPU backend are compiled, in ascending order.
#pragma once

#include "polyspec/status.hpp"

namespace polyspec::cpu {

enum class Isa { kBaseline, kDotprod, kAvx2, kAvxVnni, kAvx512, kAvx512Vnni, kAvx512Bf16, kAmx };

// Extensions that the copies are compiled for, all of them or the subset of one processor.
struct Extensions {
  bool dotprod;  // of ARM
  bool avx2, fma, f16c;
  bool avxvnni;
  bool avx512f, avx512dq, avx512bw, avx512vl;
  bool avx512vnni, avx512bf16;
  bool amx;  // tiles, and products of whole numbers and of bfloat16 with them
};

// Of the processor that runs, and that the system lets a process have: it is asked for AMX.
Extensions extensions();

// Whether all extensions of an instruction set are there. One that comes later in the order need
// not have them: a processor with AVX512 may lack AVX-VNNI.
bool has(const Extensions& there, Isa isa);

// Reads a name of POLYSPEC_CPU_ISA (baseline, dotprod, avx2, avxvnni, avx512, avx512vnni,
// avx512bf16 or amx); nullptr and "" are the last. Whether it is one.
bool parse_isa(const char* name, Isa* isa);

// Whether this processor has it and POLYSPEC_CPU_ISA, when first asked, names none before it: the
// tests compare the copies with it.
bool usable(Isa isa);

// The functions of one instruction set from a file that is compiled once for each.
template <class Table>
struct Copy {
  Isa isa;
  const Table* table;
};

// The last of them, in the order of instruction sets, that is usable.
template <class Table, int kCount>
const Table& chosen(const Copy<Table> (&copies)[kCount], bool (*taken)(Isa) = usable) {
  int last = kCount - 1;
  while (!taken(copies[last].isa)) --last;
  return *copies[last].table;
}

// kInvalidArgument where POLYSPEC_CPU_ISA is none of the names. The operators refuse then.
Result check_isa();

}  // namespace polyspec::cpu
