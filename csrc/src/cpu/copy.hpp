// Names of what a file has that is compiled once per instruction set, POLYSPEC_ISA.
#pragma once

#define POLYSPEC_JOIN_(a, b) a##b
#define POLYSPEC_JOIN(a, b) POLYSPEC_JOIN_(a, b)
#define POLYSPEC_STRING_(a) #a
#define POLYSPEC_STRING(a) POLYSPEC_STRING_(a)
