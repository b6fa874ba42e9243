#include "cpu/isa.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#ifdef POLYSPEC_X86
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif
#ifdef POLYSPEC_AARCH64
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace polyspec::cpu {
namespace {

constexpr struct Name {
  const char* name;
  Isa isa;
} kNames[] = {
    {"baseline", Isa::kBaseline},     {"dotprod", Isa::kDotprod}, {"avx2", Isa::kAvx2},
    {"avxvnni", Isa::kAvxVnni},       {"avx512", Isa::kAvx512},   {"avx512vnni", Isa::kAvx512Vnni},
    {"avx512bf16", Isa::kAvx512Bf16}, {"amx", Isa::kAmx}};

// The setting of the environment, read once.
struct Setting {
  std::string given;
  Isa isa = Isa::kAmx;
  bool known;

  Setting() {
    const char* const name = std::getenv("POLYSPEC_CPU_ISA");
    if (name != nullptr) given = name;
    known = parse_isa(name, &isa);
  }
};

const Setting& setting() {
  static const Setting read;
  return read;
}

#ifdef POLYSPEC_X86
// Linux gives a process the matrix registers, which are large, when it asks for them.
bool may_use_amx() {
#ifdef __linux__
  constexpr long kAskFor = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kAskFor, kTileData) == 0;
#else
  return false;
#endif
}
#endif

}  // namespace

Extensions extensions() {
  Extensions there{};
#ifdef POLYSPEC_X86
  there.avx2 = __builtin_cpu_supports("avx2");
  there.fma = __builtin_cpu_supports("fma");
  // Not every compiler knows this one by name. That the system saves its registers, avx2 says.
  unsigned int eax, ebx, ecx, edx;
  there.f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  there.avxvnni = __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & 1u << 4) != 0;
  there.avx512f = __builtin_cpu_supports("avx512f");
  there.avx512dq = __builtin_cpu_supports("avx512dq");
  there.avx512bw = __builtin_cpu_supports("avx512bw");
  there.avx512vl = __builtin_cpu_supports("avx512vl");
  there.avx512vnni = __builtin_cpu_supports("avx512vnni");
  there.avx512bf16 = __builtin_cpu_supports("avx512bf16");
  constexpr unsigned int kAmx = 1u << 22 | 1u << 24 | 1u << 25;  // bfloat16, tiles, whole numbers
  there.amx =
      __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kAmx) == kAmx && may_use_amx();
#endif
#ifdef POLYSPEC_AARCH64
  there.dotprod = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#endif
  return there;
}

bool has(const Extensions& there, Isa isa) {
  const bool avx2 = there.avx2 && there.fma && there.f16c;
  const bool avx512 = avx2 && there.avx512f && there.avx512dq && there.avx512bw && there.avx512vl;
  switch (isa) {
    case Isa::kBaseline:
      return true;
    case Isa::kDotprod:
      return there.dotprod;
    case Isa::kAvx2:
      return avx2;
    case Isa::kAvxVnni:
      return avx2 && there.avxvnni;
    case Isa::kAvx512:
      return avx512;
    case Isa::kAvx512Vnni:
      return avx512 && there.avx512vnni;
    case Isa::kAvx512Bf16:
      return avx512 && there.avx512vnni && there.avx512bf16;
    case Isa::kAmx:
      return avx512 && there.avx512vnni && there.avx512bf16 && there.amx;
  }
  return false;
}

bool parse_isa(const char* name, Isa* isa) {
  if (name == nullptr || *name == '\0') {
    *isa = Isa::kAmx;
    return true;
  }
  for (const Name& entry : kNames) {
    if (std::strcmp(name, entry.name) != 0) continue;
    *isa = entry.isa;
    return true;
  }
  return false;
}

bool usable(Isa isa) {
  static const Extensions there = extensions();
  return isa <= setting().isa && has(there, isa);
}

Result check_isa() {
  if (setting().known) return {};
  std::string names;
  for (const Name& entry : kNames) names += std::string(entry.name) + ", ";
  names.erase(names.size() - 2);
  Result out{Result::Code::kInvalidArgument};
  std::snprintf(out.message, sizeof out.message,
                "POLYSPEC_CPU_ISA: expected %s or nothing, given '%.40s'", names.c_str(),
                setting().given.c_str());
  return out;
}

}  // namespace polyspec::cpu
