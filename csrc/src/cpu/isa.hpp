// Instruction sets for which parts of the CPU backend are compiled, in ascending order.
#pragma once

namespace polyspec::cpu {

enum class Isa { kBaseline, kAvx2, kAvx512, kAvx512Vnni, kAvx512Bf16 };

// The widest that this processor has, or a lower one that POLYSPEC_CPU_ISA asks for (baseline,
// avx2, avx512, avx512vnni or avx512bf16): the tests compare the copies with it.
Isa isa_in_use();

}  // namespace polyspec::cpu
