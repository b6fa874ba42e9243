#include "cpu/isa.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace polyspec::cpu {
namespace {

Isa of_processor() {
#ifdef POLYSPEC_X86
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  if (vnni && __builtin_cpu_supports("avx512bf16")) return Isa::kAvx512Bf16;
  if (vnni) return Isa::kAvx512Vnni;
  if (avx512) return Isa::kAvx512;
  if (avx2) return Isa::kAvx2;
#endif
  return Isa::kBaseline;
}

Isa asked_for() {
  const char* wanted = std::getenv("POLYSPEC_CPU_ISA");
  if (wanted == nullptr || std::strcmp(wanted, "avx512bf16") == 0) return Isa::kAvx512Bf16;
  if (std::strcmp(wanted, "baseline") == 0) return Isa::kBaseline;
  if (std::strcmp(wanted, "avx512vnni") == 0) return Isa::kAvx512Vnni;
  return std::strcmp(wanted, "avx512") == 0 ? Isa::kAvx512 : Isa::kAvx2;
}

}  // namespace

Isa isa_in_use() {
  static const Isa chosen = std::min(of_processor(), asked_for());
  return chosen;
}

}  // namespace polyspec::cpu
