// Macros of the row algorithms.
#pragma once

// Device functions in a CUDA file, inline functions elsewhere. (The fibre tests ask for less
// inlining, to compile fast.)
#ifdef __CUDACC__
#define POLYSPEC_FN __device__ __forceinline__
#elif !defined(POLYSPEC_FN)
#define POLYSPEC_FN inline __attribute__((always_inline))
#endif

// The row algorithms are compiled once per instruction set; each copy needs names of its own, or
// the linker would merge them and run one set's instructions on a processor without it.
#ifndef POLYSPEC_CORE
#define POLYSPEC_CORE core
#endif
