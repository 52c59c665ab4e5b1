# Everything a developer runs, by name. `make` alone lists it.
#
# PYTHON is the interpreter to build for and to run the tools with; it needs setuptools, and for `test` and `lint` what the
# extras `test` and `dev` of pyproject.toml name. CC is the compiler.

SHELL := bash
.SHELLFLAGS := -o pipefail -c

PYTHON ?= python
CC := $(if $(filter default,$(origin CC)),gcc,$(CC))
CLANG_FORMAT ?= clang-format
PYTEST_ARGUMENTS ?=

# Asked once, and only by what needs it: setup.py knows where the package and cuda.h are.
PACKAGE_ROOT = $(eval PACKAGE_ROOT := $$(shell $(PYTHON) -c 'import setup; print(setup.PACKAGE_ROOT)'))$(PACKAGE_ROOT)
CUDA_INCLUDE = $(eval CUDA_INCLUDE := $$(shell $(PYTHON) -c 'import setup; print(setup.find_cuda_include())'))$(CUDA_INCLUDE)
PYTHON_INCLUDE = $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')
IN_TREE = PYTHONPATH="$(abspath $(PACKAGE_ROOT))$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON)

C_FILES = $(shell find csrc tests -name '*.[ch]')
PYTHON_FILES = setup.py $(wildcard $(PACKAGE_ROOT)/torch_memory_saver tests examples benchmarks)

.PHONY: help
help: ## this list
	@echo "make <target>, where <target> is one of"
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' Makefile | expand -t 14

.PHONY: build
build: ## the three libraries, built in the source tree
	$(PYTHON) setup.py -q build_ext --inplace

.PHONY: test
test: build ## the Python tests on the simulated GPU, with the package of the source tree
	$(IN_TREE) -m pytest $(PYTEST_ARGUMENTS)

SIMULATE = $(IN_TREE) -m torch_memory_saver simulate --devices 2 --memory 8GiB
# Side by side, because one leaves half of two cores idle; what each prints is shown when it has ended.
.PHONY: torch-test torch-test-torch torch-test-preload
torch-test: build ## PyTorch on the simulated GPU, in both hook modes; PYTHON has PyTorch's CUDA build
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target --keep-going torch-test-torch torch-test-preload
torch-test-torch:
	$(SIMULATE) -- python -m pytest --gpu tests/torch tests/gpu $(PYTEST_ARGUMENTS)
torch-test-preload:
	$(SIMULATE) --preload -- python -m pytest --gpu tests/torch tests/gpu $(PYTEST_ARGUMENTS)

.PHONY: torch-matrix
torch-matrix: ## the same with several releases of PyTorch, each in an environment of its own that is removed
	$(PYTHON) tests/torch/matrix.py

.PHONY: gpu-test
gpu-test: build ## the GPU tests on the GPUs of this machine, in both hook modes
	$(IN_TREE) -m pytest --gpu tests/gpu $(PYTEST_ARGUMENTS)

RECORD ?= h200
.PHONY: faithful
faithful: ## on a real GPU: records what it does in tests/faithful, for the simulated one to be compared with (RECORD=h200)
	$(PYTHON) tests/faithful/record.py --output tests/faithful/recorded_$(RECORD).json

.PHONY: bench
bench: build ## what pause and resume cost beside the bare driver calls, on a real GPU
	$(IN_TREE) benchmarks/pause_resume.py

# ---- C unit tests. Each tests/c/test_*.c is a program, linked with the core and the other files of tests/c. One build a
# variant: plain, asan (with UBSan), tsan.

VARIANT ?= plain
C_TESTS ?= $(wildcard tests/c/test_*.c)
C_BUILD := build/c/$(VARIANT)
C_FLAGS_plain := -O1
C_FLAGS_asan := -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined
C_FLAGS_tsan := -O1 -fno-omit-frame-pointer -fsanitize=thread
C_FLAGS = -std=c11 -D_GNU_SOURCE -g -pthread -fPIC -fvisibility=hidden -Wall -Wextra -Werror $(C_FLAGS_$(VARIANT)) \
	-Icsrc -isystem $(CUDA_INCLUDE) -MMD -MP
C_LIBRARIES := -lcmocka -ldl -lrt

C_CORE := $(patsubst %.c,$(C_BUILD)/%.o,$(wildcard csrc/*.c))
C_SUPPORT := $(patsubst %.c,$(C_BUILD)/%.o,$(filter-out tests/c/test_%,$(wildcard tests/c/*.c)))
C_SIMULATOR := $(patsubst %.c,$(C_BUILD)/%.o,$(wildcard csrc/simulator/*.c))
C_PROGRAMS := $(patsubst %.c,$(C_BUILD)/%,$(C_TESTS))
C_DRIVER := $(C_BUILD)/_simulated_cuda.so

# Objects are made again when the flags or the compiler of this file change.
$(C_BUILD)/%.o: %.c Makefile
	@mkdir -p $(@D) && echo "  CC $@"
	@$(CC) $(C_FLAGS) -c $< -o $@

$(C_DRIVER): $(C_SIMULATOR) csrc/simulator/exports.map
	@echo "  LD $@"
	@$(CC) $(C_FLAGS_$(VARIANT)) -shared -pthread -Wl,--version-script=csrc/simulator/exports.map $(C_SIMULATOR) -ldl -lrt -o $@

$(C_PROGRAMS): %: %.o $(C_CORE) $(C_SUPPORT)
	@echo "  LD $@"
	@$(CC) $(C_FLAGS_$(VARIANT)) -pthread -rdynamic $^ $(C_LIBRARIES) -o $@

.PHONY: ctest-build ctest
ctest-build: $(C_PROGRAMS) $(C_DRIVER)
ctest: ctest-build ## the C unit tests (C_TESTS=tests/c/test_x.c for one)
	@failed=""; for program in $(C_PROGRAMS); do \
		echo "== $$program"; \
		TMS_CUDA_DRIVER="$(abspath $(C_DRIVER))" $$program || failed="$$failed $$program"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi; \
	echo "$(words $(C_PROGRAMS)) C test programs passed ($(VARIANT))"

# Ordered by another process, which TSan does not see.
TSAN_BLIND := tests/c/test_simulator_ipc.c
.PHONY: sanitize
sanitize: ## the C unit tests with ASan and UBSan, and those with threads with TSan
	ASAN_OPTIONS=detect_leaks=1 $(MAKE) ctest VARIANT=asan
	TSAN_OPTIONS=halt_on_error=1 $(MAKE) ctest VARIANT=tsan C_TESTS="$$(grep -l pthread_create $(filter-out $(TSAN_BLIND),$(wildcard tests/c/test_*.c)) | xargs)"

-include $(shell find $(C_BUILD) -name '*.d' 2>/dev/null)

# ---- Lint. A tool that is not there is named, and skipped where it is one of two that look for the same.

.PHONY: lint lint-format lint-c lint-python
lint: lint-format lint-c lint-python ## formatting, static analysis of the C, ruff, mypy
lint-format:
	@echo "$(CLANG_FORMAT) --dry-run -Werror" && $(CLANG_FORMAT) --dry-run -Werror $(C_FILES)
lint-c:
	@if command -v cppcheck >/dev/null; then \
		set -x; cppcheck --quiet --std=c11 --library=python --enable=warning,performance,portability --inline-suppr --error-exitcode=1 \
			--suppress=missingIncludeSystem -D_GNU_SOURCE -Icsrc csrc; \
	else echo "skipped: cppcheck is not installed"; fi
	@if command -v clang-tidy >/dev/null; then \
		set -x; clang-tidy --quiet --warnings-as-errors='*' $(wildcard csrc/*.c csrc/*/*.c) -- -std=c11 -D_GNU_SOURCE \
			-DPy_LIMITED_API=0x030A0000 -Icsrc -isystem $(PYTHON_INCLUDE) -isystem $(CUDA_INCLUDE) 2>&1 | sed -E '/^[0-9]+ warnings? generated\.$$/d'; \
	else echo "skipped: clang-tidy is not installed"; fi
lint-python:
	$(PYTHON) -m ruff check $(PYTHON_FILES)
	$(PYTHON) -m ruff format --check $(PYTHON_FILES)
	$(PYTHON) -m mypy $(PACKAGE_ROOT)/torch_memory_saver

# What compiles with it compiles with all: cuda.h only grows. pip has it as a package, which is unpacked and not installed.
OLDEST_CUDA := 12.0.107
OLDEST_HEADERS := build/cuda-$(OLDEST_CUDA)
$(OLDEST_HEADERS)/nvidia/cuda_runtime/include/cuda.h:
	$(PYTHON) -m pip install --quiet --no-deps --target $(OLDEST_HEADERS) nvidia-cuda-runtime-cu12==$(OLDEST_CUDA)

.PHONY: oldest-cuda
oldest-cuda: $(OLDEST_HEADERS)/nvidia/cuda_runtime/include/cuda.h ## compiles all of the C against the oldest cuda.h that will do
	@for file in $(filter %.c,$(C_FILES)); do \
		$(CC) -std=c11 -D_GNU_SOURCE -Wall -Wextra -Werror -fsyntax-only -DPy_LIMITED_API=0x030A0000 -Icsrc -I$(PYTHON_INCLUDE) \
			-isystem $(<D) $$file || exit 1; \
	done; echo "all of the C compiles with the cuda.h of CUDA $(OLDEST_CUDA)"

.PHONY: format
format: ## the C and Python files, rewritten in their format
	$(CLANG_FORMAT) -i $(C_FILES)
	$(PYTHON) -m ruff format $(PYTHON_FILES)

.PHONY: wheel
wheel: ## dist/: a source distribution, and the wheel built from it
	$(PYTHON) -m build --outdir dist

.PHONY: clean
clean: ## removes everything that was built
	rm -rf build dist *.egg-info $(PACKAGE_ROOT)/*.egg-info $(PACKAGE_ROOT)/*.so $(PACKAGE_ROOT)/torch_memory_saver/*.so
