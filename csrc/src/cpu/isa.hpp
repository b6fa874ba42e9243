// Instruction sets for which parts of the CPU backend are compiled, in ascending order.
#pragma once

namespace polyspec::cpu {

enum class Isa { kBaseline, kAvx2, kAvx512, kAvx512Vnni };

// The widest that this processor has, or a lower one that POLYSPEC_CPU_ISA asks for (baseline,
// avx2, avx512 or avx512vnni): the tests compare the copies with it.
Isa isa_in_use();

}  // namespace polyspec::cpu
