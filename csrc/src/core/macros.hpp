// Macros of the row algorithms.
#pragma once

// Device functions in a CUDA file, inline functions elsewhere. (Tests that run the CUDA sources on
// a CPU ask for less inlining, to compile fast.)
#ifdef __CUDACC__
#define POLYSPEC_FN __device__ __forceinline__
#elif !defined(POLYSPEC_FN)
#define POLYSPEC_FN inline __attribute__((always_inline))
#endif

// A function that kernels call and do not inline, since they call it often. Arguments are small and
// by value: references would force their objects into memory.
#ifndef POLYSPEC_CALLED
#ifdef __CUDACC__
#define POLYSPEC_CALLED __device__ __noinline__ inline
#else
#define POLYSPEC_CALLED POLYSPEC_FN
#endif
#endif

// Before a loop that nvcc is to unroll, or to leave as it is, when it compiles for the device.
#if defined(__CUDACC__) && defined(__CUDA_ARCH__)
#define POLYSPEC_UNROLL _Pragma("unroll")
#define POLYSPEC_ROLLED _Pragma("unroll 1")
#else
#define POLYSPEC_UNROLL
#define POLYSPEC_ROLLED
#endif

// The row algorithms are compiled once per instruction set; each copy needs distinct names, or the
// linker would merge them and run one set's instructions on a processor without it.
#ifndef POLYSPEC_CORE
#define POLYSPEC_CORE core
#endif
