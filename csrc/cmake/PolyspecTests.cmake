# Each *_test.cpp or *_test.c below csrc/tests is one executable and one CTest. A test that needs a GPU returns 77
# without one and is reported as skipped.
if(BUILD_SHARED_LIBS)
  message(FATAL_ERROR "POLYSPEC_BUILD_TESTS: the tests call what a shared library hides; BUILD_SHARED_LIBS=OFF")
endif()
enable_testing()
enable_language(C)

file(GLOB_RECURSE polyspec_tests CONFIGURE_DEPENDS csrc/tests/*_test.cpp csrc/tests/*_test.c)
list(FILTER polyspec_tests EXCLUDE REGEX "/csrc/tests/cuda_on_cpu/")  # PolyspecCudaOnCpu.cmake

find_package(Threads REQUIRED)
add_library(polyspec_test_support INTERFACE)
target_link_libraries(polyspec_test_support INTERFACE polyspec Threads::Threads)
target_compile_definitions(polyspec_test_support INTERFACE ${isa_definitions})  # which copies there are
if(POLYSPEC_CUDA)
  target_link_libraries(polyspec_test_support INTERFACE CUDA::cudart_static)
  target_compile_definitions(polyspec_test_support INTERFACE POLYSPEC_WITH_CUDA=1)
endif()

foreach(source IN LISTS polyspec_tests)
  get_filename_component(name "${source}" NAME_WE)
  add_executable(${name} "${source}")
  target_link_libraries(${name} PRIVATE polyspec_test_support)
  target_include_directories(${name} PRIVATE csrc/tests csrc/src)
  target_compile_options(${name} PRIVATE "$<$<NOT:$<COMPILE_LANGUAGE:CUDA>>:${POLYSPEC_CXX_FLAGS}>")
  # After the build type's options, for half the build time; but not for tests that compute for long.
  if(NOT name MATCHES "enumeration_test$|^int4_test$")
    target_compile_options(${name} PRIVATE "$<$<NOT:$<COMPILE_LANGUAGE:CUDA>>:-O1>")
  endif()
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 300)
endforeach()

# The longest first: begun last it would run alone in the end.
set_tests_properties(enumeration_test PROPERTIES COST 20)
set_tests_properties(int4_test PROPERTIES COST 10)

# Exactness rests on IEEE arithmetic: a build without it is refused.
add_test(NAME fast_math_test
         COMMAND "${CMAKE_CXX_COMPILER}" -std=c++17 -ffast-math -fsyntax-only -I "${CMAKE_CURRENT_SOURCE_DIR}/csrc/include"
                 -I "${CMAKE_CURRENT_SOURCE_DIR}/csrc/src" "${CMAKE_CURRENT_SOURCE_DIR}/csrc/src/api/int4.cpp")
set_tests_properties(fast_math_test PROPERTIES PASS_REGULAR_EXPRESSION "polyspec: not with -ffast-math")

# The products once more, with ThreadSanitizer; the baseline, since threads share the same data for
# every instruction set.
include(CheckCXXSourceRuns)
set(CMAKE_REQUIRED_FLAGS -fsanitize=thread)
set(CMAKE_REQUIRED_LIBRARIES Threads::Threads)
check_cxx_source_runs("#include <thread>\nint main() { std::thread([] {}).join(); }" POLYSPEC_HAS_TSAN)
unset(CMAKE_REQUIRED_FLAGS)
unset(CMAKE_REQUIRED_LIBRARIES)
if(POLYSPEC_HAS_TSAN)
  add_library(product_races_copies OBJECT "${dense_source}" "${int4_source}" "${attention_source}" "${layer_source}")
  target_compile_definitions(product_races_copies PRIVATE POLYSPEC_ISA=baseline POLYSPEC_CORE=core_baseline)
  add_executable(product_races_test csrc/tests/core/product_threads_test.cpp csrc/src/cpu/isa.cpp
                                    csrc/src/cpu/int4_round.cpp csrc/src/cuda/stub.cpp
                                    $<TARGET_OBJECTS:product_races_copies>)
  foreach(product IN ITEMS dense int4 attention layer)
    target_sources(product_races_test PRIVATE csrc/src/api/${product}.cpp csrc/src/cpu/${product}_dispatch.cpp)
  endforeach()
  foreach(target IN ITEMS product_races_test product_races_copies)
    target_compile_features(${target} PRIVATE cxx_std_17)
    target_include_directories(${target} PRIVATE csrc/include csrc/tests csrc/src)
    target_compile_options(${target} PRIVATE ${POLYSPEC_CXX_FLAGS} -fno-trapping-math -fsanitize=thread -g
                                             $<$<CXX_COMPILER_ID:GNU>:-Wno-uninitialized -Wno-maybe-uninitialized>)
  endforeach()
  target_link_options(product_races_test PRIVATE -fsanitize=thread)
  target_link_libraries(product_races_test PRIVATE Threads::Threads)
  add_test(NAME product_races_test COMMAND product_races_test)
  set_tests_properties(product_races_test PROPERTIES TIMEOUT 300 ENVIRONMENT "TSAN_OPTIONS=halt_on_error=1")
else()
  add_test(NAME product_races_test COMMAND "${CMAKE_COMMAND}" -E echo "skipped: no ThreadSanitizer here")
  set_tests_properties(product_races_test PROPERTIES SKIP_REGULAR_EXPRESSION "skipped")
endif()

if("avx2" IN_LIST isas)
  target_compile_options(cpu_masses_test PRIVATE ${isa_avx2})
endif()

if(POLYSPEC_CUDA)
  list(LENGTH polyspec_kernels kernel_files)
  target_compile_definitions(
    kernel_budget_test
    PRIVATE POLYSPEC_KERNEL_LOGS="${CMAKE_BINARY_DIR}/CMakeFiles/polyspec.dir"
            POLYSPEC_KERNEL_BUDGET="${CMAKE_CURRENT_SOURCE_DIR}/csrc/tests/gpu/kernel_budget.txt"
            POLYSPEC_KERNEL_FILES=${kernel_files})
  set_tests_properties(kernel_budget_test PROPERTIES LABELS rest)  # by architecture
  target_sources(cuda_test PRIVATE csrc/tests/gpu/intrinsics.cu)
  set_target_properties(cuda_test PROPERTIES CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON)
  polyspec_generate_code(cuda_test)
  add_executable(verify_shapes csrc/tests/gpu/verify_shapes.cpp)
  target_link_libraries(verify_shapes PRIVATE polyspec_test_support)
  target_include_directories(verify_shapes PRIVATE csrc/tests csrc/src)
endif()

include(PolyspecCudaOnCpu)
