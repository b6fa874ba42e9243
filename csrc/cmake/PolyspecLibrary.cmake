# The library `polyspec`. C++17, no torch, no Python.
set(POLYSPEC_CXX_WARNINGS -Wall -Wextra)
if(POLYSPEC_WERROR)
  list(APPEND POLYSPEC_CXX_WARNINGS -Werror)
endif()
# Contraction into fused multiply-adds would make distributions depend on the instruction set (contract C3).
set(POLYSPEC_CXX_FLAGS ${POLYSPEC_CXX_WARNINGS} -ffp-contract=off)

file(GLOB polyspec_sources CONFIGURE_DEPENDS csrc/src/api/*.cpp csrc/src/cpu/*.cpp
     csrc/src/policy/*.cpp)
set(rows_source "${CMAKE_CURRENT_SOURCE_DIR}/csrc/src/cpu/rows.cpp")
set(int4_source "${CMAKE_CURRENT_SOURCE_DIR}/csrc/src/cpu/int4_product.cpp")
set(blocks_source "${CMAKE_CURRENT_SOURCE_DIR}/csrc/src/cpu/block_product.cpp")
set(dense_source "${CMAKE_CURRENT_SOURCE_DIR}/csrc/src/cpu/dense_product.cpp")
set(attention_source "${CMAKE_CURRENT_SOURCE_DIR}/csrc/src/cpu/attention.cpp")
set(layer_source "${CMAKE_CURRENT_SOURCE_DIR}/csrc/src/cpu/layer.cpp")
file(GLOB amx_sources CONFIGURE_DEPENDS csrc/src/cpu/*_amx.cpp)
list(REMOVE_ITEM polyspec_sources "${rows_source}" "${int4_source}" "${blocks_source}" "${dense_source}"
     "${attention_source}" "${layer_source}" ${amx_sources})

add_library(polyspec ${polyspec_sources})
add_library(polyspec::polyspec ALIAS polyspec)
# Before 1.0 a minor release may change the ABI.
set_target_properties(polyspec PROPERTIES VERSION ${PROJECT_VERSION}
                                          SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
                                          DEFINE_SYMBOL "")  # static and shared have the same objects
set(export_map "${CMAKE_CURRENT_SOURCE_DIR}/csrc/cmake/polyspec.map")
target_link_options(polyspec PRIVATE "-Wl,--version-script=${export_map}")
set_property(TARGET polyspec APPEND PROPERTY LINK_DEPENDS "${export_map}")
target_compile_features(polyspec PUBLIC cxx_std_17)
target_include_directories(polyspec PUBLIC "$<BUILD_INTERFACE:${CMAKE_CURRENT_SOURCE_DIR}/csrc/include>"
                                           "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")
target_include_directories(polyspec PRIVATE csrc/src)
target_compile_options(polyspec PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${POLYSPEC_CXX_FLAGS}>")
# Lets its comparisons vectorise (see polyspec_add_copies).
set_source_files_properties(csrc/src/cpu/int4_round.cpp PROPERTIES COMPILE_OPTIONS -fno-trapping-math)

# rows.cpp, int4_product.cpp, block_product.cpp, dense_product.cpp, attention.cpp and layer.cpp once per instruction set;
# dispatch.cpp and *_dispatch.cpp in csrc/src/cpu choose among the copies at run time.
set(isa_baseline "")
# Scheduled before register allocation, sums would need more registers than there are.
set(isa_dotprod -march=armv8.2-a+dotprod $<$<CXX_COMPILER_ID:GNU>:-fno-schedule-insns>)
set(isa_avx2 -mavx2 -mfma -mf16c)
set(isa_avxvnni ${isa_avx2} -mavxvnni)
set(isa_avx512 -mavx512f -mavx512dq -mavx512bw -mavx512vl -mavx2 -mfma -mf16c -mprefer-vector-width=512)
set(isa_avx512vnni ${isa_avx512} -mavx512vnni)
set(isa_avx512bf16 ${isa_avx512} -mavx512bf16)
set(isa_amx ${isa_avx512vnni} -mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16)
set(isas baseline)
set(int4_isas baseline)
set(dense_isas baseline)
set(isa_definitions "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  list(APPEND isas avx2 avx512)
  list(APPEND int4_isas avx2 avxvnni avx512vnni)
  list(APPEND dense_isas avx2 avx512 avx512bf16)
  set(isa_definitions POLYSPEC_X86=1)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$" AND CMAKE_SYSTEM_NAME STREQUAL "Linux")
  list(APPEND int4_isas dotprod)
  set(isa_definitions POLYSPEC_AARCH64=1)
endif()
target_compile_definitions(polyspec PRIVATE ${isa_definitions})

# polyspec_add_copies(<name> <source> <instruction set>...)
function(polyspec_add_copies name source)
  foreach(isa IN LISTS ARGN)
    set(copy polyspec_${name}_${isa})
    add_library(${copy} OBJECT "${source}")
    target_compile_features(${copy} PRIVATE cxx_std_17)
    target_include_directories(${copy} PRIVATE csrc/include csrc/src)
    target_compile_definitions(${copy} PRIVATE POLYSPEC_ISA=${isa} POLYSPEC_CORE=core_${isa} ${isa_definitions})
    # Nothing here throws; unwinding tables would bring a weak symbol that the instruction sets share.
    # No code reads the floating-point exception flags; preserving them would keep conditions out of AVX2's
    # registers. Values do not change.
    target_compile_options(${copy} PRIVATE ${POLYSPEC_CXX_FLAGS} -fno-trapping-math -fno-exceptions ${isa_${isa}})
    target_sources(polyspec PRIVATE $<TARGET_OBJECTS:${copy}>)
  endforeach()
endfunction()
polyspec_add_copies(rows "${rows_source}" ${isas})
polyspec_add_copies(int4 "${int4_source}" ${int4_isas})
set(blocks_isas ${int4_isas})
polyspec_add_copies(blocks "${blocks_source}" ${blocks_isas})
polyspec_add_copies(dense "${dense_source}" ${dense_isas})
set(amx_loops "")
if("avx512" IN_LIST isas)
  # Products with matrix registers have separate loops.
  foreach(amx_source IN LISTS amx_sources)
    get_filename_component(loops "${amx_source}" NAME_WE)
    list(APPEND amx_loops ${loops})
    polyspec_add_copies(${loops} "${amx_source}" amx)
    set(${loops}_isas amx)
  endforeach()
endif()
set(attention_isas ${isas})
polyspec_add_copies(attention "${attention_source}" ${attention_isas})
set(layer_isas ${isas})
polyspec_add_copies(layer "${layer_source}" ${layer_isas})
foreach(loops IN ITEMS attention blocks dense int4 layer ${amx_loops})
  foreach(isa IN LISTS ${loops}_isas)
    # GCC 12 takes the undefined lanes of its intrinsics for uninitialised variables (GCC bug 105593).
    target_compile_options(polyspec_${loops}_${isa} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-uninitialized
                                                            -Wno-maybe-uninitialized>)
  endforeach()
endforeach()

# polyspec_generate_code(<target>): the architectures of its CUDA sources. One PTX serves sm_90 and all later architectures,
# instead of one each: the kernels use nothing newer, and generating it takes as long as assembling it. Values other than
# numbers (90a, 90-real, native) are left to CMake.
function(polyspec_generate_code target)
  if(CMAKE_CUDA_ARCHITECTURES MATCHES "[^0-9;]")
    return()
  endif()
  foreach(architecture IN LISTS CMAKE_CUDA_ARCHITECTURES)
    set(virtual 90)
    if(architecture LESS 90)
      set(virtual ${architecture})
    endif()
    list(APPEND virtuals ${virtual})
    list(APPEND code_${virtual} sm_${architecture})
  endforeach()
  list(REMOVE_DUPLICATES virtuals)
  foreach(virtual IN LISTS virtuals)
    list(JOIN code_${virtual} "," code)
    target_compile_options(
      ${target}
      PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:--generate-code=arch=compute_${virtual},code=[compute_${virtual},${code}]>")
  endforeach()
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES OFF)
endfunction()

if(POLYSPEC_CUDA)
  file(GLOB polyspec_kernels CONFIGURE_DEPENDS csrc/src/cuda/*.cu)
  target_sources(polyspec PRIVATE ${polyspec_kernels} csrc/src/cuda/capture.cpp)
  target_link_libraries(polyspec PRIVATE CUDA::cudart_static)
  # A fused multiply-add on the device would round a distribution differently from the CPU (contract C3); a spill
  # or local memory is a silent performance fault, hence an error.
  target_compile_options(
    polyspec
    PRIVATE
      "$<$<COMPILE_LANGUAGE:CUDA>:-fmad=false;-Xcompiler=-Wall,-ffp-contract=off;-Xptxas=-v,-warn-spills,-warn-lmem-usage>")
  if(POLYSPEC_WERROR)
    target_compile_options(
      polyspec
      PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-Werror all-warnings;-Xptxas=--warning-as-error;-Xcompiler=-Werror>")
  endif()
  set_target_properties(polyspec PROPERTIES CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON)
  polyspec_generate_code(polyspec)
  # The output of ptxas on registers and shared memory is kept for csrc/tests/gpu/kernel_budget_test.cpp.
  set_property(TARGET polyspec PROPERTY CUDA_COMPILER_LAUNCHER
               sh "${CMAKE_CURRENT_SOURCE_DIR}/csrc/cmake/keep_ptxas_log.sh" ${CMAKE_CUDA_COMPILER_LAUNCHER})
else()
  target_sources(polyspec PRIVATE csrc/src/cuda/stub.cpp)
endif()
