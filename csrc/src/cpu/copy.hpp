// Names in a file that is compiled once per instruction set, POLYSPEC_ISA.
#pragma once

#define POLYSPEC_JOIN_(a, b) a##b
#define POLYSPEC_JOIN(a, b) POLYSPEC_JOIN_(a, b)
#define POLYSPEC_STRING_(a) #a
#define POLYSPEC_STRING(a) POLYSPEC_STRING_(a)

// The table of a copy, for kInt4 that is kInt4Avx2.
#define POLYSPEC_COPY(table) POLYSPEC_JOIN(table, POLYSPEC_JOIN(POLYSPEC_NAME_, POLYSPEC_ISA))
#define POLYSPEC_NAME_baseline Baseline
#define POLYSPEC_NAME_dotprod Dotprod
#define POLYSPEC_NAME_avx2 Avx2
#define POLYSPEC_NAME_avxvnni AvxVnni
#define POLYSPEC_NAME_avx512 Avx512
#define POLYSPEC_NAME_avx512vnni Avx512Vnni
#define POLYSPEC_NAME_avx512bf16 Avx512Bf16
