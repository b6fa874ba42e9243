# Each *_test.cpp or *_test.c below csrc/tests is one executable and one CTest; every other source there serves
# all of them. A test that needs a GPU returns 77 without one and is reported as skipped.
if(BUILD_SHARED_LIBS)
  message(FATAL_ERROR "POLYSPEC_BUILD_TESTS: the tests call what a shared library hides; BUILD_SHARED_LIBS=OFF")
endif()
enable_testing()
enable_language(C)

file(GLOB_RECURSE polyspec_tests CONFIGURE_DEPENDS csrc/tests/*_test.cpp csrc/tests/*_test.c)
file(GLOB_RECURSE support_sources CONFIGURE_DEPENDS csrc/tests/*.cpp)
list(REMOVE_ITEM support_sources ${polyspec_tests})

find_package(Threads REQUIRED)
add_library(polyspec_test_support INTERFACE)
target_link_libraries(polyspec_test_support INTERFACE Threads::Threads)
if(support_sources)
  add_library(polyspec_test_objects STATIC ${support_sources})
  target_include_directories(polyspec_test_objects PRIVATE csrc/tests csrc/src)
  target_compile_options(polyspec_test_objects PRIVATE ${POLYSPEC_CXX_FLAGS})
  target_link_libraries(polyspec_test_objects PUBLIC polyspec)
  target_link_libraries(polyspec_test_support INTERFACE polyspec_test_objects)
endif()
target_link_libraries(polyspec_test_support INTERFACE polyspec)
if(POLYSPEC_CUDA)
  target_link_libraries(polyspec_test_support INTERFACE CUDA::cudart_static)
  target_compile_definitions(polyspec_test_support INTERFACE POLYSPEC_WITH_CUDA=1)
endif()

foreach(source IN LISTS polyspec_tests)
  get_filename_component(name "${source}" NAME_WE)
  add_executable(${name} "${source}")
  target_link_libraries(${name} PRIVATE polyspec_test_support)
  target_include_directories(${name} PRIVATE csrc/tests csrc/src)
  target_compile_options(${name} PRIVATE ${POLYSPEC_CXX_FLAGS})
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 300)
endforeach()

# The longest first: begun last it would run alone in the end.
set_tests_properties(enumeration_test PROPERTIES COST 20)
set_tests_properties(cta_group_test last_block_test fibre_test int4_test PROPERTIES COST 10)

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
endif()
