# Decides POLYSPEC_CUDA: the environment wins, then -DPOLYSPEC_CUDA=..., then whether torch was built for
# CUDA; without torch it is off. Once it is on, a missing nvcc is an error, never a silent fallback.
if(DEFINED ENV{POLYSPEC_CUDA} AND NOT "$ENV{POLYSPEC_CUDA}" STREQUAL "")
  set(POLYSPEC_CUDA "$ENV{POLYSPEC_CUDA}" CACHE BOOL "Compile the CUDA kernels" FORCE)
elseif(NOT DEFINED POLYSPEC_CUDA)
  set(wanted OFF)
  if(POLYSPEC_BUILD_PYTHON AND NOT POLYSPEC_TORCH_CUDA STREQUAL "none")
    set(wanted ON)
  endif()
  set(POLYSPEC_CUDA ${wanted} CACHE BOOL "Compile the CUDA kernels")
endif()

if(POLYSPEC_CUDA)
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
    set(CMAKE_CUDA_ARCHITECTURES 80 90 100 120 CACHE STRING "GPU architectures to compile for")
  endif()
  # CUDA_HOME, PATH, then where toolkits usually live; CUDACXX or -DCMAKE_CUDA_COMPILER come before both.
  if(NOT DEFINED CMAKE_CUDA_COMPILER AND "$ENV{CUDACXX}" STREQUAL "")
    find_program(POLYSPEC_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
    mark_as_advanced(POLYSPEC_NVCC)
    if(POLYSPEC_NVCC)
      set(CMAKE_CUDA_COMPILER "${POLYSPEC_NVCC}" CACHE FILEPATH "CUDA compiler")
    endif()
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    message(FATAL_ERROR
      "POLYSPEC_CUDA is on but no CUDA compiler (nvcc) was found. Install the CUDA toolkit >= 12.8 and put its bin "
      "folder on PATH (or set CUDACXX to nvcc), or build without kernels: POLYSPEC_CUDA=OFF.")
  endif()
  enable_language(CUDA)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
    message(FATAL_ERROR "nvcc ${CMAKE_CUDA_COMPILER_VERSION} is too old: the kernels need CUDA >= 12.8, or set POLYSPEC_CUDA=OFF.")
  endif()
  find_package(CUDAToolkit REQUIRED)
  # Named as a link dependency below, so that an embedder who does not enable CUDA gets it as well.
  set(CMAKE_CUDA_RUNTIME_LIBRARY None)
endif()
