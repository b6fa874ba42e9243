# The CUDA sources on a simulated CUDA (csrc/tests/cuda_on_cpu): cuda_test itself, random calls, and a build with
# ThreadSanitizer, in which faults planted into the sources have to be found.
if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU" OR NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  add_test(NAME cuda_on_cpu COMMAND "${CMAKE_COMMAND}" -E echo "skipped: the stand-in for CUDA needs gcc on x86-64")
  set_tests_properties(cuda_on_cpu PROPERTIES SKIP_REGULAR_EXPRESSION "skipped")
  return()
endif()

set(cuda_on_cpu "${CMAKE_CURRENT_SOURCE_DIR}/csrc/tests/cuda_on_cpu")
file(GLOB stand_in_sources CONFIGURE_DEPENDS "${cuda_on_cpu}/runtime/*.cpp")
file(GLOB cuda_sources CONFIGURE_DEPENDS csrc/src/cuda/*.cu)
list(APPEND cuda_sources "${CMAKE_CURRENT_SOURCE_DIR}/csrc/src/cuda/capture.cpp")
# Fewer threads than on a device run sooner, and results do not depend on it.
set(small_ctas POLYSPEC_SAMPLE_THREADS=64 POLYSPEC_VERIFY_THREADS=64 POLYSPEC_RESIDUAL_THREADS=64
               POLYSPEC_CANDIDATES=96)

# Never watched: ThreadSanitizer is to see the kernels' accesses only.
add_library(cuda_stand_in STATIC ${stand_in_sources})
target_compile_features(cuda_stand_in PRIVATE cxx_std_17)
target_include_directories(cuda_stand_in PUBLIC "${cuda_on_cpu}/runtime")
target_compile_options(cuda_stand_in PRIVATE ${POLYSPEC_CXX_FLAGS} -O2)

# polyspec_add_kernels(<name> [SOURCES <.cu>...] [DEFINE <definition>...] [OPTIONS <option>...] [PLANTED <folder>]):
# object files of the CUDA sources. Headers of the folder, if any, replace headers of csrc/src.
function(polyspec_add_kernels name)
  cmake_parse_arguments(PARSE_ARGV 1 kernels "" "PLANTED" "SOURCES;DEFINE;OPTIONS")
  set(copies "")
  set(folder "${CMAKE_BINARY_DIR}/cuda_on_cpu")
  if(kernels_PLANTED)
    set(folder "${kernels_PLANTED}")
  endif()
  foreach(source IN LISTS kernels_SOURCES)
    # CMake compiles a .cu as CUDA in the whole folder, or nowhere.
    get_filename_component(file "${source}" NAME_WE)
    set(copy "${folder}/${file}.cpp")
    file(CONFIGURE OUTPUT "${copy}" CONTENT "#include \"${source}\"\n" @ONLY)
    list(APPEND copies "${copy}")
  endforeach()
  add_library(${name} OBJECT ${copies})
  target_compile_features(${name} PRIVATE cxx_std_17)
  target_include_directories(${name} PRIVATE ${kernels_PLANTED} csrc/src csrc/include "${cuda_on_cpu}/runtime")
  target_compile_definitions(${name} PRIVATE POLYSPEC_FN=inline ${kernels_DEFINE})
  # nvcc includes cuda_runtime.h by itself; histograms are added to by halves of their 64-bit bins; more optimisation
  # takes longer than it saves.
  target_compile_options(${name} PRIVATE ${POLYSPEC_CXX_FLAGS} "SHELL:-include cuda_runtime.h" -fno-strict-aliasing -O1
                                         ${kernels_OPTIONS})
endfunction()

# polyspec_use_stand_in(<target> [<definition>...]): a test's main, compiled for the device.
function(polyspec_use_stand_in target)
  target_compile_features(${target} PRIVATE cxx_std_17)
  target_include_directories(${target} PRIVATE csrc/tests csrc/src)
  target_compile_definitions(${target} PRIVATE POLYSPEC_WITH_CUDA=1 ${ARGN})
  target_compile_options(${target} PRIVATE ${POLYSPEC_CXX_FLAGS} -O1)
  # The simulation first: no symbol is left for a real CUDA runtime.
  target_link_libraries(${target} PRIVATE cuda_stand_in polyspec Threads::Threads)
endfunction()

# polyspec_add_cuda_program(<name> <source or objects> [KERNELS <objects>...] [DEFINE <definition>...] [LINK <option>...]):
# a test's main, on the device.
function(polyspec_add_cuda_program name source)
  cmake_parse_arguments(PARSE_ARGV 2 program "" "" "KERNELS;DEFINE;LINK")
  list(TRANSFORM program_KERNELS REPLACE "(.+)" "$<TARGET_OBJECTS:\\1>" OUTPUT_VARIABLE objects)
  add_executable(${name} "${source}" ${objects})
  target_link_options(${name} PRIVATE ${program_LINK})
  polyspec_use_stand_in(${name} ${program_DEFINE})
endfunction()

polyspec_add_cuda_program(cuda_stand_in_test csrc/tests/cuda_on_cpu/runtime_test.cpp)
add_test(NAME cuda_on_cpu.runtime COMMAND cuda_stand_in_test)

# sm_90, with clusters up to the 16 CTAs that its largest devices run.
set(sm_90 ${small_ctas} POLYSPEC_CLUSTER_CTAS=16)
polyspec_add_kernels(kernels_sm_90 SOURCES ${cuda_sources} DEFINE ${sm_90})
polyspec_add_kernels(intrinsics_sm_90 SOURCES "${CMAKE_CURRENT_SOURCE_DIR}/csrc/tests/gpu/intrinsics.cu" DEFINE ${sm_90})
target_include_directories(intrinsics_sm_90 PRIVATE csrc/tests)
polyspec_add_cuda_program(cuda_test_sm_90 csrc/tests/gpu/cuda_test.cpp KERNELS kernels_sm_90 intrinsics_sm_90
                          DEFINE ${sm_90})
add_test(NAME cuda_on_cpu.cuda_test COMMAND cuda_test_sm_90 2 9000)
polyspec_add_cuda_program(graph_life_sm_90 csrc/tests/gpu/graph_life_test.cpp KERNELS kernels_sm_90)
add_test(NAME cuda_on_cpu.graph_life COMMAND graph_life_sm_90)
polyspec_add_cuda_program(random_calls_test csrc/tests/cuda_on_cpu/random_calls_test.cpp KERNELS kernels_sm_90
                          DEFINE ${sm_90})
add_test(NAME cuda_on_cpu.random_calls COMMAND random_calls_test)
set_tests_properties(cuda_on_cpu.random_calls PROPERTIES FAIL_REGULAR_EXPRESSION "; 0 (kernels began early|dense products)")
add_test(NAME cuda_on_cpu.random_calls_plain COMMAND random_calls_test 1)
set_tests_properties(cuda_on_cpu.random_calls_plain PROPERTIES ENVIRONMENT POLYSPEC_DEPENDENT_LAUNCH=0
                                                               FAIL_REGULAR_EXPRESSION "; [1-9][0-9]* kernels began early")
polyspec_add_cuda_program(shared_rows_test csrc/tests/cuda_on_cpu/shared_rows_test.cpp KERNELS kernels_sm_90
                          DEFINE ${sm_90})
add_test(NAME cuda_on_cpu.shared_rows COMMAND shared_rows_test)
polyspec_add_cuda_program(barrier_budget_test csrc/tests/cuda_on_cpu/barrier_budget_test.cpp KERNELS kernels_sm_90
                          DEFINE ${sm_90})
add_test(NAME cuda_on_cpu.barrier_budget COMMAND barrier_budget_test)
polyspec_add_cuda_program(attention_reads_test csrc/tests/cuda_on_cpu/attention_reads_test.cpp KERNELS kernels_sm_90)
add_test(NAME cuda_on_cpu.attention_reads COMMAND attention_reads_test)

# The Python module with these kernels for tensors on the CPU, for tests of whole chains.
if(POLYSPEC_BUILD_PYTHON)
  polyspec_add_python_module(module_on_stand_in DEFINE POLYSPEC_CUDA_ON_CPU=1 POLYSPEC_WITH_CUDA=1 OBJECTS kernels_sm_90
                             LINK cuda_stand_in)
  set_target_properties(module_on_stand_in PROPERTIES OUTPUT_NAME _C
                                                      LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/cuda_on_cpu")
  # Operators against their reference; rounds of chains and trees, with steps that are recorded and replayed.
  set(runtime python_tests/runtime)
  add_test(
    NAME cuda_on_cpu.python
    COMMAND
      "${Python_EXECUTABLE}" -m pytest -q -p on_stand_in -k "not (one_by_one and bfloat16)" # the CPU attends otherwise
      python_tests/ops/test_verify_tree.py
      python_tests/ops/test_indexed_verify.py python_tests/ops/test_properties.py python_tests/ops/test_draw.py
      ${runtime}/test_batches.py
      "${runtime}/test_device_rounds.py::test_caches_hold_what_they_hold_step_by_step"
      "${runtime}/test_device_trees.py::test_its_steps_are_captured[third tree]"
      python_tests/ops/test_layer.py::test_heads_are_appended_as_by_themselves
      python_tests/ops/test_layer.py::test_is_the_norm
      python_tests/ops/test_attention.py::test_lengths_are_what_their_mask_is
      "python_tests/ops/test_attention.py::test_a_row_is_what_it_is_alone[270-torch.bfloat16]"
      python_tests/ops/test_dense.py::test_multiplies_the_weights_themselves_on_cuda
      python_tests/ops/test_int4.py::test_multiplies_where_the_weights_are
      python_tests/ops/test_int4.py::test_a_product_of_a_layer_is_its_operators
      python_tests/ops/test_int4.py::test_heads_after_a_product_are_its_operators
      python_tests/levels/test_cuda_layers.py::test_operators_one_by_one_have_the_bits_of_one_call
    WORKING_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}")
  set(support "${CMAKE_CURRENT_SOURCE_DIR}:${CMAKE_CURRENT_SOURCE_DIR}/python_tests/support")
  set_tests_properties(
    cuda_on_cpu.python PROPERTIES ENVIRONMENT
                                  "POLYSPEC_MODULE=$<TARGET_FILE:module_on_stand_in>;PYTHONPATH=${support}")
endif()

# sm_80, which has no clusters, with as many threads as there.
polyspec_add_kernels(kernels_sm_80 SOURCES ${cuda_sources} DEFINE __CUDA_ARCH__=800)
polyspec_add_cuda_program(cuda_test_sm_80 csrc/tests/gpu/cuda_test.cpp KERNELS kernels_sm_80 intrinsics_sm_90)
add_test(NAME cuda_on_cpu.cuda_test_sm_80 COMMAND cuda_test_sm_80 1 0)
polyspec_add_cuda_program(random_calls_sm_80 csrc/tests/cuda_on_cpu/random_calls_test.cpp KERNELS kernels_sm_80)
add_test(NAME cuda_on_cpu.random_calls_sm_80 COMMAND random_calls_sm_80 10)

# The race detector, with the clusters that every device runs.
if(NOT POLYSPEC_HAS_TSAN)
  add_test(NAME cuda_on_cpu.races COMMAND "${CMAKE_COMMAND}" -E echo "skipped: no ThreadSanitizer here")
  set_tests_properties(cuda_on_cpu.races PROPERTIES SKIP_REGULAR_EXPRESSION "skipped")
  return()
endif()
set(sanitizer "exitcode=66 history_size=3 report_thread_leaks=0")
# A planted fault recompiles its kernels only, and neither the others nor the calls.
set(faulty verify_f32 layer attention int4 dense)
foreach(kernels IN LISTS faulty)
  polyspec_add_kernels(kernels_watched_${kernels} SOURCES "${CMAKE_CURRENT_SOURCE_DIR}/csrc/src/cuda/${kernels}.cu"
                       DEFINE ${small_ctas} OPTIONS -fsanitize=thread)
endforeach()
list(JOIN faulty "|" names)
list(FILTER cuda_sources EXCLUDE REGEX "/(${names}).cu$")
polyspec_add_kernels(kernels_watched_others SOURCES ${cuda_sources} DEFINE ${small_ctas} OPTIONS -fsanitize=thread)
add_library(random_calls_watched OBJECT csrc/tests/cuda_on_cpu/random_calls_test.cpp)
polyspec_use_stand_in(random_calls_watched ${small_ctas})
list(TRANSFORM faulty PREPEND kernels_watched_ OUTPUT_VARIABLE kernels_watched)
polyspec_add_cuda_program(races_test "$<TARGET_OBJECTS:random_calls_watched>"
                          KERNELS ${kernels_watched} kernels_watched_others LINK -fsanitize=thread)
add_test(NAME cuda_on_cpu.races COMMAND races_test 8 5000)
set_tests_properties(cuda_on_cpu.races PROPERTIES ENVIRONMENT "TSAN_OPTIONS=${sanitizer}")

# One fault of each kind and kernel: races, fences, bounds. POLYSPEC_ALL_TESTS builds all.
set(planted_always cta_slots_not_doubled record_without_fence one_vector_more marks_left squares_not_awaited
                   padding_appended keys_overwritten one_key_more chunk_not_awaited output_tail_not_masked
                   stream_not_awaited stage_overwritten row_overwritten never_waits reads_before_the_wait writes_before_the_wait)

# polyspec_plant(<name> <file of csrc/src> <text> <replacement> <expected output> [<kernels> <calls>]): a program
# with the fault in one source, and a test of so many random calls that passes when the fault is found. The source is that
# of <kernels>, one of ${faulty}.
function(polyspec_plant name header text planted found)
  set(kernels verify_f32)
  set(arguments 120 9000 verify_f32)
  if(ARGC GREATER 5)
    set(kernels ${ARGV5})
    set(arguments ${ARGV6} 0 layers)
    if(kernels MATCHES "^(int4|dense)$")
      set(arguments ${ARGV6} 0 ${kernels})
    endif()
  endif()
  set(source "${CMAKE_CURRENT_SOURCE_DIR}/csrc/src/${header}")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${source}")
  file(READ "${source}" content)
  string(REPLACE "${text}" "${planted}" changed "${content}")
  if(changed STREQUAL content)
    message(FATAL_ERROR "the fault ${name} cannot be planted: ${header} has no \"${text}\"")
  endif()
  if(NOT POLYSPEC_ALL_TESTS AND NOT name IN_LIST planted_always)
    return()
  endif()
  set(folder "${CMAKE_BINARY_DIR}/cuda_on_cpu/${name}")
  file(CONFIGURE OUTPUT "${folder}/${header}" CONTENT "${changed}" @ONLY)
  set(kernel_source "${CMAKE_CURRENT_SOURCE_DIR}/csrc/src/cuda/${kernels}.cu")
  if(kernel_source STREQUAL source)
    set(kernel_source "${folder}/${header}")
  endif()
  set(others ${kernels_watched})
  list(REMOVE_ITEM others kernels_watched_${kernels})
  # The planted source comes first: of duplicate symbols the linker takes the first.
  polyspec_add_kernels(planted_${name} SOURCES "${kernel_source}" DEFINE ${small_ctas} OPTIONS -fsanitize=thread
                       PLANTED "${folder}")
  polyspec_add_cuda_program(planted_${name}_test "$<TARGET_OBJECTS:random_calls_watched>"
                            KERNELS planted_${name} ${others} kernels_watched_others LINK -fsanitize=thread)
  add_test(NAME cuda_on_cpu.planted.${name} COMMAND planted_${name}_test ${arguments})
  set_tests_properties(cuda_on_cpu.planted.${name} PROPERTIES ENVIRONMENT "TSAN_OPTIONS=${sanitizer} halt_on_error=1"
                       PASS_REGULAR_EXPRESSION "${found}")
  if(NOT name IN_LIST planted_always)
    set_tests_properties(cuda_on_cpu.planted.${name} PROPERTIES LABELS rest)
  endif()
endfunction()

polyspec_plant(cta_slots_not_doubled cuda/cluster_group.cuh "cta.slots[buffer]" "cta.slots[0]" "data race")
polyspec_plant(cluster_slots_not_doubled cuda/cluster_group.cuh "shared->slots[buffer]" "shared->slots[0]" "data race")
polyspec_plant(begins_without_the_others cuda/kernels.cuh
               "  group.sync();  // the other CTAs of a cluster have begun: their shared memory is there\n" ""
               "has not begun")
polyspec_plant(leaves_before_the_others cuda/kernels.cuh
               "  group.sync();  // no CTA leaves while another may reach into its shared memory\n" "" "has ended|SEGV")
polyspec_plant(digit_without_barrier core/select.hpp "  group.sync();  // the bin is found\n" "" "data race")
polyspec_plant(bins_read_before_counted core/select.hpp "  group.sync();  // all are counted\n" "" "data race")
polyspec_plant(candidates_not_awaited cuda/candidates.cuh "  group.sync();\n  statistics->threshold" "  statistics->threshold"
               "data race")
polyspec_plant(candidates_counted_early cuda/cluster_group.cuh "    __syncthreads();\n    buffer_ ^= 1;\n" "    buffer_ ^= 1;\n" "data race|check failed")
polyspec_plant(pick_not_awaited cuda/cta_group.cuh "    __syncthreads();\n    return shared_.picked;" "    return shared_.picked;"
               "data race|check failed|SEGV")
polyspec_plant(record_without_fence cuda/row_tickets.cuh "      __threadfence();  // the record" "      // the record"
               "data race")
polyspec_plant(mark_without_fence cuda/row_tickets.cuh "      __threadfence();  // and other" "      // and other"
               "data race")
polyspec_plant(buffers_used_again cuda/row_tickets.cuh "    group.sync();  // it goes on" "    // it goes on"
               "data race|check failed")
polyspec_plant(marks_left cuda/row_tickets.cuh "tickets->marks[request] = 0;" ";" "check failed")
polyspec_plant(one_vector_more cuda/row_reader.cuh "v + u * lanes < split.vectors" "v + u * lanes <= split.vectors"
               "SEGV|check failed")
# Dependent launch.
set(stream cuda/int4_stream.cuh)
set(norm_waits "  wait_for_prerequisites();\n  POLYSPEC_ROLLED\n")
polyspec_plant(never_waits cuda/layer.cu "${norm_waits}" "" "data race|without having waited" layer 20)
polyspec_plant(reads_before_the_wait cuda/attention.cu
               "  wait_for_prerequisites();\n  int64_t end"
               "  if (threadIdx.x == 0) shared.factors[0] = to_float(*static_cast<const T*>(p.query));\n  wait_for_prerequisites();\n  int64_t end"
               "data race" attention 20)
polyspec_plant(writes_before_the_wait cuda/layer.cu "${norm_waits}"
               "  if (threadIdx.x < n) y[threadIdx.x] = {};\n${norm_waits}" "data race" layer 20)
polyspec_plant(activations_before_the_wait ${stream} "  wait_for_prerequisites();\n\n  {\n"
               "  {\n    copy_async(x, p.x, 16);\n    end_batch();\n    wait_for_batches<0>();\n    wait_for_prerequisites();\n" "data race" int4 40)
polyspec_plant(tickets_before_the_wait cuda/kernels.cuh
               "  wait_for_prerequisites();\n  group.sync();\n  const Workspace<core::RowTickets, core::RowRecord> workspace(params.workspace);\n"
               "  const Workspace<core::RowTickets, core::RowRecord> workspace(params.workspace);\n  core::add_marks(workspace.tickets->marks, 0);\n  wait_for_prerequisites();\n  group.sync();\n"
               "data race")
polyspec_plant(squares_not_awaited cuda/layer.cu "  __syncthreads();  // all squares are there\n" "" "data race" layer 20)
polyspec_plant(lanes_not_awaited cuda/layer.cu "  __syncthreads();  // all lanes are there\n" "" "data race" layer 20)
polyspec_plant(squares_overwritten cuda/layer.cu "    if (begin > 0) __syncthreads();  // the squares before are added up\n" "" "data race" layer 40)
polyspec_plant(padding_appended core/layer_math.hpp "token >= plan.count" "plan.count == 0" "check failed|SEGV" layer 40)
polyspec_plant(keys_not_awaited cuda/attention.cu "      __syncthreads();  // the keys are there, and the queries\n" "" "data race" attention 20)
polyspec_plant(keys_overwritten cuda/attention.cu "      __syncthreads();  // the keys are read, and the scores there\n" "" "data race" attention 20)
polyspec_plant(weights_not_awaited cuda/attention.cu "      __syncthreads();  // the values are there, and the weights\n" "" "data race" attention 20)
polyspec_plant(values_overwritten cuda/attention.cu "      __syncthreads();  // the values are read\n" "" "data race" attention 20)
polyspec_plant(tiles_not_awaited cuda/attention.cu "wait_for_batches<kTiles - 1>();" "wait_for_batches<kTiles>();" "data race|check failed|without having waited" attention 20)
polyspec_plant(one_key_more cuda/attention.cu "if (key < seen)" "if (key <= seen)" "check failed" attention 20)
polyspec_plant(hidden_from_the_first_token cuda/attention.cu "m < of.count && static_cast<unsigned>(m) < tokens; ++m" "m < 1; ++m" "check failed" attention 80)
polyspec_plant(tokens_not_awaited cuda/attention.cu "  __syncthreads();  // the queries' tokens are there\n" "" "data race|SEGV" attention 20)
polyspec_plant(highest_overwritten cuda/attention.cu "  __syncwarp();  // all lanes have the highest score before\n" "" "data race" attention 20)
polyspec_plant(scores_overwritten cuda/attention.cu "__syncwarp();  // all lanes have their scores" "{}" "data race" attention 20)
polyspec_plant(lower_halves_left_out cuda/attention.cu "half < 2; ++half" "half < 1; ++half" "check failed" attention 60)
polyspec_plant(zeros_added cuda/attention.cu "< count ? weight : -0.0f" "< count ? weight : weight" "check failed" attention 60)
polyspec_plant(rows_beyond_the_end cuda/attention.cu "row + u * kRows < end ? 16 : 0" "row + u * kRows < end + 64 ? 16 : 0" "SEGV|check failed|data race" attention 20)
polyspec_plant(attention_sums_not_awaited cuda/attention.cu "  __syncthreads();  // the sums are there\n" "" "data race" attention 20)
polyspec_plant(spans_not_awaited cuda/attention.cu "    __syncthreads();  // the spans are there\n" "" "data race" attention 20)
polyspec_plant(spans_overwritten cuda/attention.cu "    if (first > 0) __syncthreads();  // the spans before are merged\n" "" "data race" attention 60)
polyspec_plant(chunk_not_awaited cuda/int4.cu "wait_for_batches<kAhead - 1>();" "wait_for_batches<kAhead>();"
               "data race|int4 case" int4 20)
polyspec_plant(chunk_overwritten cuda/int4.cu "stages[stage == 0 ? kAhead : stage - 1]" "stages[stage]"
               "data race|int4 case" int4 20)
polyspec_plant(scale_of_the_group_before cuda/int4.cu "(chunk + 1) >> of.shift, i" "chunk >> of.shift, i" "int4 case" int4 20)
polyspec_plant(token_tail_not_masked cuda/int4.cu "t * kTokenTile < left ? 16 : 0" "t * kTokenTile < left + 64 ? 16 : 0" "SEGV|int4 case" int4 20)
polyspec_plant(output_tail_not_masked cuda/int4.cu "output < outputs)" "output < outputs + 64)"
               "SEGV|data race|int4 case" int4 20)
polyspec_plant(stages_not_awaited cuda/int4.cu "  __syncthreads();  // all chunks are read\n" "" "data race|int4 case" int4 20)
polyspec_plant(upper_sums_not_awaited cuda/int4.cu "  __syncthreads();  // the upper slices' sums are there\n" "" "data race"
               int4 20)
polyspec_plant(lower_sums_not_awaited cuda/int4.cu "  __syncthreads();  // the lower slices' sums are written\n" "" "data race" int4 20)
# Streamed weights.
set(wrong "data race|int4 case|FAULT|SEGV")
polyspec_plant(stream_not_awaited ${stream} "    wait_for_phase(full_ + stage_, parity_);\n" "" "${wrong}" int4 20)
polyspec_plant(stream_of_the_other_phase ${stream} "wait_for_phase(full_ + stage_, parity_)" "wait_for_phase(full_ + stage_, parity_ ^ 1)"
               "${wrong}" int4 20)
polyspec_plant(phase_not_turned ${stream} "      parity_ ^= 1;\n" "" "${wrong}" int4 20)
polyspec_plant(stage_overwritten ${stream} "    __syncwarp();  // all lanes have read the stage\n" "" "${wrong}" int4 20)
polyspec_plant(stage_copied_too_early ${stream} "    wait_for_phase(full_ + stage_, parity_);\n"
               "    wait_for_phase(full_ + stage_, parity_);\n    __syncwarp();\n    load(ring_ + stage_ * kGroups * bytes_, full_ + stage_);\n" "${wrong}" int4 20)
polyspec_plant(next_tile_not_found ${stream} "    from_ += int64_t{jump_} * core::kVectorBytes;\n" "" "${wrong}" int4 20)
polyspec_plant(last_group_multiplied_twice ${stream} "        if (i > 0 && x_sums_of >= last) break;\n" "" "${wrong}" int4 40)
polyspec_plant(activations_not_awaited ${stream} "    __syncthreads();  // the activations are there\n" "" "data race" int4 20)
polyspec_plant(sums_of_activations_not_awaited ${stream} "  __syncthreads();  // the sums of activations are there\n" ""
               "data race" int4 20)
polyspec_plant(sums_of_squares_not_awaited ${stream} "    __syncthreads();  // the sums of squares are there\n" "" "data race" int4 40)
polyspec_plant(factors_not_awaited ${stream} "    __syncthreads();  // the factors are there\n" "" "data race" int4 40)
polyspec_plant(normed_not_awaited ${stream} "    __syncthreads();  // all are normed\n" "" "data race" int4 40)
polyspec_plant(norm_left_out cuda/int4.cu "  if (ctas > 1) *result = norm_first(&p, stream);" "  if (ctas > 1) p.norm = nullptr;" "int4 case" int4 40)
polyspec_plant(streamed_sums_not_doubled ${stream} "turn ^= Shared::kBuffers - 1" "turn ^= 0" "data race|int4 case" int4 40)
polyspec_plant(streamed_sums_not_awaited ${stream} "    meet();  // the sums are written" "    // the sums are written" "${wrong}" int4 20)
polyspec_plant(streamed_sums_overwritten ${stream} "    if (Shared::kBuffers == 1) meet();  // the sums are read\n" "" "${wrong}" int4 40)
polyspec_plant(second_tokens_at_the_first cuda/int4.cu "    p.x = static_cast<const T*>(p.x) + p.tokens * p.x_stride;\n" "" "int4 case" int4 40)
polyspec_plant(streams_leave_early ${stream} "if (ctas > 1) meet();" "if (ctas > 8) meet();"
               "${wrong}" int4 40)
polyspec_plant(streamed_tokens_not_masked ${stream} "lane / 4 < p.tokens ? 16 : 0" "lane / 4 < p.tokens + 64 ? 16 : 0" "SEGV|int4 case"
               int4 40)
polyspec_plant(ups_not_found ${stream} "    jump_ = both_ - jump_;\n" "" "${wrong}" int4 60)
polyspec_plant(ups_are_the_gates cuda/int4.cu "sum_of(f + kWritten, l, j)" "sum_of(f, l, j)" "int4 case" int4 40)
polyspec_plant(streamed_outputs_not_masked ${stream} "in_tile >= outputs)" "in_tile >= outputs + 64)"
               "${wrong}" int4 40)
polyspec_plant(padding_appended_by_a_product ${stream} "append, plan, row" "append, {plan.begin, turn.tokens, 0}, row"
               "SEGV|int4 case" int4 20)
polyspec_plant(halves_not_found ${stream} "tile + (tile & -apart)" "tile" "${wrong}" int4 20)
polyspec_plant(halves_of_other_turns cuda/int4.cu "std::max(clusters / least, int64_t{1}) * least" "std::max(clusters, least / least)" "${wrong}" int4 40)
polyspec_plant(turned_by_the_other_half core/layer_math.hpp "to_float(cosine[j])" "to_float(cosine[i])" "int4 case" int4 20)
polyspec_plant(status_of_every_token ${stream} "output == 0 && in_row == 0" "output == 0" "data race|int4 case" int4 40)
polyspec_plant(product_never_waits ${stream} "  wait_for_prerequisites();\n\n  {\n" "  {\n" "data race|without having waited" int4 20)
# bfloat16 weights.
set(wrong "data race|dense case|FAULT|SEGV")
polyspec_plant(second_row_not_awaited cuda/dense.cu "    wait_for_phase(barrier_of(at_, lane() / 4 + kRows / 2), parity_);\n" "" "${wrong}" dense 40)
polyspec_plant(row_overwritten cuda/dense.cu "    __syncwarp();  // all lanes have read the rows\n" "" "${wrong}" dense 40)
polyspec_plant(rows_beyond_the_last cuda/dense.cu "(row < outputs_ ? row : outputs_ - 1)" "row" "${wrong}" dense 40)
polyspec_plant(end_of_a_slice_not_found cuda/dense.cu "        if (i > 0 && i >= left) break;\n" "" "${wrong}" dense 40)
polyspec_plant(dense_activations_before_the_wait cuda/dense.cu "  wait_for_prerequisites();\n" "  copy_async(x, p.x, 16);\n  end_batch();\n  wait_for_batches<0>();\n  wait_for_prerequisites();\n"
               "data race" dense 40)
polyspec_plant(dense_sums_not_doubled cuda/dense.cu "turn ^= 1) {" "turn ^= 0) {" "${wrong}" dense 40)
