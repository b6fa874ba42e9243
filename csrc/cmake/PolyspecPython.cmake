# Python, pybind11 and torch. find_package(Torch) would ask for the whole CUDA toolkit, so the
# interpreter itself is asked for torch's paths; nothing of torch reaches the library `polyspec`.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)

# Sets `out` to the output of the Python code; on failure stops with `hint`.
function(polyspec_ask_python out code hint)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "${code}"
    OUTPUT_VARIABLE answer ERROR_VARIABLE trouble RESULT_VARIABLE failed OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(failed)
    message(FATAL_ERROR "${hint}\n(${Python_EXECUTABLE} said: ${trouble})")
  endif()
  set(${out} "${answer}" PARENT_SCOPE)
endfunction()

polyspec_ask_python(
  torch_answer
  "import os, torch; d = os.path.dirname(torch.__file__); print(d, torch.__version__, torch.version.cuda or 'none', sep=';')"
  "polyspec_ext needs torch >= 2.11 in the interpreter that builds it: pip install 'torch>=2.11'")
list(GET torch_answer 0 POLYSPEC_TORCH_DIR)
list(GET torch_answer 1 POLYSPEC_TORCH_VERSION)
list(GET torch_answer 2 POLYSPEC_TORCH_CUDA)
string(REGEX MATCH "^[0-9]+\\.[0-9]+" torch_release "${POLYSPEC_TORCH_VERSION}")
if(torch_release VERSION_LESS 2.11)
  message(FATAL_ERROR "polyspec_ext needs torch >= 2.11, found ${POLYSPEC_TORCH_VERSION}: pip install 'torch>=2.11'")
endif()

polyspec_ask_python(pybind11_DIR "import pybind11; print(pybind11.get_cmake_dir())"
                    "polyspec_ext needs pybind11 to build: pip install pybind11")
find_package(pybind11 CONFIG REQUIRED)

# polyspec_add_python_module(<target> [DEFINE <definition>...] [OBJECTS <objects>...] [LINK <library>...]): the module
# polyspec_ext._C; objects and libraries come before the library `polyspec`.
function(polyspec_add_python_module name)
  cmake_parse_arguments(PARSE_ARGV 1 module "" "" "DEFINE;OBJECTS;LINK")
  # Only the operators see torch's headers and its target version. torch ships a copy of pybind11 that older
  # releases refuse to compile with that macro, so that the two never meet in one file. One binary for torch 2.11
  # and every later release: no symbol newer than 2.11 is used.
  set(operators ${name}_torch_ops)
  add_library(${operators} OBJECT csrc/bindings/torch_ops.cpp csrc/bindings/attention_ops.cpp
                                  csrc/bindings/block_ops.cpp csrc/bindings/cache_ops.cpp csrc/bindings/dense_ops.cpp
                                  csrc/bindings/decoder_ops.cpp csrc/bindings/int4_ops.cpp
                                  csrc/bindings/layer_ops.cpp
                                  csrc/bindings/schedule_ops.cpp)
  target_compile_options(${operators} PRIVATE ${POLYSPEC_CXX_WARNINGS})
  target_include_directories(${operators} SYSTEM PRIVATE "${POLYSPEC_TORCH_DIR}/include")
  target_compile_definitions(${operators} PRIVATE TORCH_TARGET_VERSION=0x020b000000000000 ${module_DEFINE})
  target_link_libraries(${operators} PRIVATE ${module_LINK} polyspec)

  list(TRANSFORM module_OBJECTS REPLACE "(.+)" "$<TARGET_OBJECTS:\\1>")
  pybind11_add_module(${name} MODULE csrc/bindings/module.cpp csrc/bindings/host_rounds.cpp csrc/bindings/policy.cpp
                                     $<TARGET_OBJECTS:${operators}> ${module_OBJECTS})
  target_compile_features(${name} PRIVATE cxx_std_17)
  target_compile_options(${name} PRIVATE ${POLYSPEC_CXX_WARNINGS})
  list(JOIN CMAKE_CUDA_ARCHITECTURES " " architectures)
  target_compile_definitions(
    ${name} PRIVATE POLYSPEC_VERSION="${PROJECT_VERSION}" POLYSPEC_TORCH_VERSION="${POLYSPEC_TORCH_VERSION}"
               POLYSPEC_CUDA_ARCHITECTURES="${architectures}" ${module_DEFINE})
  # libtorch stays a needed library although no symbol of it is used by name: on a CUDA torch it is
  # the one that brings libtorch_cuda, where the weak reference to the current stream is resolved. No
  # rpath: `import torch` has loaded these libraries before, wherever they are.
  target_link_libraries(
    ${name} PRIVATE ${module_LINK} polyspec "-Wl,--push-state,--no-as-needed" "${POLYSPEC_TORCH_DIR}/lib/libtorch.so"
               "${POLYSPEC_TORCH_DIR}/lib/libtorch_cpu.so" "-Wl,--pop-state" "-Wl,--exclude-libs,ALL")
  # Instantiations of the standard library are visible to others unless they are kept back here.
  set(module_map "${CMAKE_CURRENT_SOURCE_DIR}/csrc/cmake/module.map")
  target_link_options(${name} PRIVATE "-Wl,--version-script=${module_map}")
  set_target_properties(${name} PROPERTIES SKIP_BUILD_RPATH ON LINK_DEPENDS "${module_map}")
endfunction()
