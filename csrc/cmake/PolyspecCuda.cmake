# Decides POLYSPEC_CUDA: the environment wins, then -DPOLYSPEC_CUDA=..., then whether torch was built for CUDA and
# nvcc is there; without torch it is off. Where it was asked for, a missing nvcc is an error. Else the kernels are left
# out with a warning, and looked for again at the next configuration.
set(POLYSPEC_CUDA_LEFT_OUT "" CACHE INTERNAL "Why a torch with CUDA gets no kernels")
set(asked ON)
if(DEFINED ENV{POLYSPEC_CUDA} AND NOT "$ENV{POLYSPEC_CUDA}" STREQUAL "")
  set(POLYSPEC_CUDA "$ENV{POLYSPEC_CUDA}" CACHE BOOL "Compile the CUDA kernels" FORCE)
elseif(NOT DEFINED POLYSPEC_CUDA)
  set(asked OFF)
  set(POLYSPEC_CUDA OFF)
  if(POLYSPEC_BUILD_PYTHON AND NOT POLYSPEC_TORCH_CUDA STREQUAL "none")
    set(POLYSPEC_CUDA ON)
  endif()
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
  set(remedy "Install the CUDA toolkit >= 12.8 and put its bin folder on PATH (or set CUDACXX to nvcc)")
  if(NOT CMAKE_CUDA_COMPILER AND asked)
    message(FATAL_ERROR "POLYSPEC_CUDA is on but no CUDA compiler (nvcc) was found. ${remedy}, or build without "
                        "kernels: POLYSPEC_CUDA=OFF.")
  elseif(NOT CMAKE_CUDA_COMPILER)
    unset(CMAKE_CUDA_COMPILER CACHE)
    set(POLYSPEC_CUDA OFF)
    set(POLYSPEC_CUDA_LEFT_OUT "torch ${POLYSPEC_TORCH_VERSION} has CUDA, but no CUDA compiler (nvcc) was found, so \
polyspec_ext is built WITHOUT CUDA KERNELS and runs on the CPU only. ${remedy} and install again; POLYSPEC_CUDA=ON \
makes a missing nvcc an error, POLYSPEC_CUDA=OFF is the build without kernels." CACHE INTERNAL "")
    message(WARNING "${POLYSPEC_CUDA_LEFT_OUT}")
  endif()
endif()

if(POLYSPEC_CUDA)
  enable_language(CUDA)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
    message(FATAL_ERROR "nvcc ${CMAKE_CUDA_COMPILER_VERSION} is too old: the kernels need CUDA >= 12.8, or set POLYSPEC_CUDA=OFF.")
  endif()
  find_package(CUDAToolkit REQUIRED)
  # Named as a link dependency below, so that an embedder who does not enable CUDA gets it as well.
  set(CMAKE_CUDA_RUNTIME_LIBRARY None)
endif()
