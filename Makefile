# Everything a developer runs, by name. `make` and `make help` list the targets; CONTRIBUTING.md describes them.
#
# PYTHON  the interpreter to build for and to run the tools with. It needs setuptools, and the extras `test` and `dev` of
#         pyproject.toml for `test` and `lint`.
# CC      the compiler

SHELL := bash
.SHELLFLAGS := -o pipefail -c

PYTHON ?= python
CC := $(if $(filter default,$(origin CC)),gcc,$(CC))
CLANG_FORMAT ?= clang-format
PYTEST_ARGUMENTS ?=

# Asked once, and only by what needs it: setup.py knows where cuda.h is, and nvtx3 if it is there.
CUDA_INCLUDES = $(eval CUDA_INCLUDES := \
	$$(shell $(PYTHON) -c 'import setup; print(*setup.include_options())'))$(CUDA_INCLUDES)
INTERFACE = $(shell $(PYTHON) -c 'import setup; print(setup.interface())')
PYTHON_INCLUDE = $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')
IN_TREE = PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON)

C_FILES = $(shell find csrc torch_memory_saver tests tools benchmarks -name '*.[ch]')
PYTHON_FILES = setup.py torch_memory_saver_pytest.py $(wildcard torch_memory_saver tests tools benchmarks examples docs/*.py)

.PHONY: help
help: ## this list
	@echo "make <target>, where <target> is one of"
	@sed -nE 's/^##@ (.*)/\n\1/p; s/^([a-z0-9-]+):.*## (.*)/  \1\t\2/p' Makefile | expand -t 24

##@ Build

.PHONY: build
build: ## the three libraries, built in the source tree
	$(PYTHON) setup.py -q build_ext --inplace

.PHONY: stub
stub: ## the functions in _core.pyi, generated from csrc/include
	$(PYTHON) tools/core_stub.py

.PHONY: clean
clean: ## removes everything that was built
	rm -rf build dist *.egg-info *.so torch_memory_saver/*.so

##@ Test on the simulated GPU
.PHONY: test
test: build ## the Python tests on the simulated GPU, with the package of the source tree
	$(IN_TREE) -m pytest $(PYTEST_ARGUMENTS)

.PHONY: slow
slow: build ## the Python tests that plain pytest leaves out: more failures, the demo, random operations
	$(IN_TREE) -m pytest -m slow $(PYTEST_ARGUMENTS)

.PHONY: faults
faults: build ## every call of the driver and the C library fails in every known way, a signal at every bytecode (30 min)
	$(IN_TREE) -m pytest -m faults tests/fault_injection tests/unit/python/torch/test_interrupted_regions.py $(PYTEST_ARGUMENTS)
	TMS_EVERY_CALL=1 $(MAKE) ctest C_TESTS=tests/unit/core/test_driver_calls.c

MUTANTS_ARGUMENTS ?=
.PHONY: mutants
mutants: ## plants one bug at a time; the tests named for it must fail (MUTANTS_ARGUMENTS=NAME for some)
	$(PYTHON) -u tools/mutants.py $(MUTANTS_ARGUMENTS)

SIMULATE = $(IN_TREE) -m torch_memory_saver simulate --devices 2 --memory 8GiB
# The two run side by side, because one leaves half of two cores idle. Their output is shown when they end.
.PHONY: torch-test torch-test-torch torch-test-preload
torch-test: build ## PyTorch on the simulated GPU, in both hook modes; PYTHON has PyTorch's CUDA build
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target --keep-going torch-test-torch torch-test-preload
torch-test-torch: ## torch-test in hook mode torch alone
	$(SIMULATE) -- python -m pytest --gpu tests/torch tests/gpu $(PYTEST_ARGUMENTS)
torch-test-preload: ## torch-test in hook mode preload alone
	$(SIMULATE) --preload -- python -m pytest --gpu tests/torch tests/gpu $(PYTEST_ARGUMENTS)

.PHONY: record-versions
record-versions: build ## tests/gpu in both hook modes, recorded in tests/versions.json and docs/tested-versions.md
	-TMS_GPU_RECORD=tests/versions.json $(SIMULATE) -- python -m pytest --gpu tests/gpu
	-TMS_GPU_RECORD=tests/versions.json $(SIMULATE) --preload -- python -m pytest --gpu tests/gpu
	$(PYTHON) docs/generated.py

.PHONY: torch-slow
torch-slow: build ## the tests with PyTorch that CI leaves out: large examples, 32B models in small (15 GiB)
	$(SIMULATE) -- python -m pytest --gpu -m slow tests/torch tests/gpu $(PYTEST_ARGUMENTS)

SOAK_SECONDS ?= 3600
SOAK_ARGUMENTS ?=
.PHONY: soak
soak: build ## random operations against a model for SOAK_SECONDS (3600); SOAK_ARGUMENTS="--seed N"
	$(IN_TREE) tools/soak.py --seconds $(SOAK_SECONDS) $(SOAK_ARGUMENTS)

.PHONY: torch-soak
torch-soak: build ## the same with tensors, through PyTorch on the simulated GPU: SOAK_SECONDS in each hook mode
	$(SIMULATE) -- python tests/torch/model_torch.py --seconds $(SOAK_SECONDS) $(SOAK_ARGUMENTS)
	$(SIMULATE) --preload -- python tests/torch/model_torch.py --seconds $(SOAK_SECONDS) $(SOAK_ARGUMENTS)

# RL_SOAK_SETTINGS turns on everything that records, checks or keeps something.
RL_SOAK := build/rl-soak
RL_SOAK_SETTINGS := TMS_HOST_MEMORY=retain TMS_VERIFY_BACKUPS=1 TMS_GUARD=1 TMS_RELEASE_CACHED=pause \
	TMS_LOG_LEVEL=error OMP_NUM_THREADS=1 TMS_DEBUG=events,snapshots,history \
	TMS_METRICS_FILE=$(abspath $(RL_SOAK))/metrics-{pid}.txt TMS_DEBUG_DIR=$(abspath $(RL_SOAK))
.PHONY: rl-soak
rl-soak: build ## examples/rl_loop.py with faults and every setting on, for SOAK_SECONDS in each hook mode
	@rm -rf $(RL_SOAK) && mkdir -p $(RL_SOAK)
	$(RL_SOAK_SETTINGS) $(SIMULATE) -- python tests/torch/rl_soak.py --seconds $(SOAK_SECONDS) $(SOAK_ARGUMENTS)
	$(RL_SOAK_SETTINGS) $(SIMULATE) --preload -- python tests/torch/rl_soak.py --seconds $(SOAK_SECONDS) $(SOAK_ARGUMENTS)

LIKE_ORDINARY_ARGUMENTS ?= --programs 1000
.PHONY: like-ordinary
like-ordinary: build ## programs that fit without regions must fit with them (LIKE_ORDINARY_ARGUMENTS="--seed 1")
	$(SIMULATE) -- python tests/torch/programs/like_ordinary.py $(LIKE_ORDINARY_ARGUMENTS)

OPINFO_ARGUMENTS ?=
.PHONY: opinfo
opinfo: build ## PyTorch's database of operators, compared with the CPU (OPINFO_ARGUMENTS="--share 1/10")
	$(SIMULATE) -- python tools/opinfo.py $(OPINFO_ARGUMENTS)

.PHONY: operator-speed
operator-speed: build ## what computing on the simulated GPU costs, beside the CPU
	$(SIMULATE) -- python tools/operator_speed.py $(OPERATOR_SPEED_ARGUMENTS)

.PHONY: torch-matrix
torch-matrix: ## the tests with several releases of PyTorch, each in an environment that is removed
	$(PYTHON) tools/torch_matrix.py

##@ On real GPUs
.PHONY: gpu-test
gpu-test: build ## the GPU tests on the GPUs of this machine, in both hook modes
	$(IN_TREE) -m pytest --gpu tests/gpu $(PYTEST_ARGUMENTS)
	$(IN_TREE) -m torch_memory_saver run --preload -- $(PYTHON) -m pytest --gpu tests/gpu $(PYTEST_ARGUMENTS)

RECORD ?= h100
.PHONY: conformance
conformance: ## records what a real GPU does, for the simulated one to be compared with (RECORD=h100)
	$(PYTHON) tools/record_gpu.py --output tests/conformance/driver/recorded_$(RECORD).json
	$(PYTHON) tools/record_gpu.py --suite pytorch --output tests/conformance/pytorch/recorded_$(RECORD).json

BENCH_ARGUMENTS ?=
.PHONY: bench
bench: build ## pause and resume beside the limits of the hardware; BENCH_ARGUMENTS="--peer PATH --json FILE"
	$(IN_TREE) benchmarks/run.py $(BENCH_ARGUMENTS)

VLLM_ARGUMENTS ?=
.PHONY: vllm-sleep
vllm-sleep: ## vLLM's sleep mode with this package and without it (VLLM_ARGUMENTS="--model 7B --json FILE")
	$(PYTHON) benchmarks/vllm_sleep.py $(VLLM_ARGUMENTS)

SGLANG_ARGUMENTS ?=
.PHONY: sglang-sleep
sglang-sleep: ## SGLang with this package and the C++ package (SGLANG_ARGUMENTS="--cpp FOLDER")
	$(PYTHON) benchmarks/sglang_sleep.py $(SGLANG_ARGUMENTS)

.PHONY: sleep-heap
sleep-heap: build ## what a sleep costs in Python in a large process, on the simulated GPU
	$(IN_TREE) -m torch_memory_saver simulate --memory 4GiB -- $(PYTHON) benchmarks/sleep_heap.py

.PHONY: event-cost
event-cost: ## the cost of an event of the ring and of an NVTX range without a tool, in nanoseconds
	@mkdir -p build && $(CC) -std=c11 -D_GNU_SOURCE -O2 -Wall -Wextra -Werror -pthread -Icsrc $(CUDA_INCLUDES) \
		tools/event_cost.c csrc/base/events.c csrc/base/nvtx.c csrc/base/status.c -ldl -o build/event_cost
	@build/event_cost

.PHONY: ledger-cost
ledger-cost: ## the cost of counting an allocation of another library, in nanoseconds
	@mkdir -p build && $(CC) -std=c11 -D_GNU_SOURCE -O2 -Wall -Wextra -Werror -pthread -Icsrc $(CUDA_INCLUDES) \
		tools/ledger_cost.c csrc/base/ledger.c csrc/base/callers.c -o build/ledger_cost
	@build/ledger_cost

##@ Test the C code
# ---- C unit tests
#
# Each test_*.c below tests/unit is a program, linked with the core and with tests/unit/support. A header for the tests of
# one folder is in the folder's support/, and the tests include it as support/x.h.
# Each VARIANT has a build of its own: plain, asan (with UBSan), tsan, coverage, aarch64.

VARIANT ?= plain
ALL_C_TESTS := $(shell find tests/unit -name 'test_*.c' | sort)
C_TESTS ?= $(ALL_C_TESTS)
# A program that takes longer than this hangs.
C_TEST_SECONDS := 600
# EMULATOR runs the programs of another processor, without the tests of NOT_EMULATED, each PROGRAM:TEST (make aarch64).
EMULATOR :=
NOT_EMULATED :=
C_BUILD := build/c/$(VARIANT)
C_FLAGS_plain := -O1
# Reports of the sanitizers need lines, but no variables: -g1 compiles faster.
C_FLAGS_asan := -O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined
C_FLAGS_tsan := -O1 -g1 -fno-omit-frame-pointer -fsanitize=thread
C_FLAGS_aarch64 := -O1
C_FLAGS_coverage := -O0 --coverage -fprofile-update=atomic
# Not fortified, although a distribution's compiler may do it by default: the sanitizers look at the plain calls.
C_FLAGS = -std=c11 -D_GNU_SOURCE -U_FORTIFY_SOURCE -g -pthread -fPIC -fvisibility=hidden -Wall -Wextra -Werror \
	$(C_FLAGS_$(VARIANT)) -Icsrc -Itests/unit/support $(CUDA_INCLUDES) -MMD -MP
C_LIBRARIES := -lcmocka -ldl -lrt -lm

CORE_LAYERS := $(addprefix csrc/,base device backup core abi)
CORE_SOURCES := $(shell find $(CORE_LAYERS) -name '*.c' | sort)
# The code that runs inside a user's process: everything but the simulated GPU.
SHIPPED_SOURCES := $(CORE_SOURCES) $(wildcard csrc/python/*.c csrc/preload/*.c)
C_CORE := $(patsubst %.c,$(C_BUILD)/%.o,$(CORE_SOURCES))
C_SUPPORT := $(patsubst %.c,$(C_BUILD)/%.o,$(wildcard tests/unit/support/*.c))
C_SIMULATOR := $(patsubst %.c,$(C_BUILD)/%.o,$(shell find csrc/simulator -name '*.c' | sort))
C_PROGRAMS := $(patsubst %.c,$(C_BUILD)/%,$(C_TESTS))
C_DRIVER := $(C_BUILD)/_simulated_cuda.so

$(C_BUILD)/csrc/abi/interface.o: C_FLAGS += -DTMS_INTERFACE=$(INTERFACE)
$(C_BUILD)/csrc/abi/interface.o: torch_memory_saver/_core.pyi $(wildcard csrc/include/*)
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
ctest-build: $(C_PROGRAMS) $(C_DRIVER) ## the C unit tests, compiled and not run
# The programs run side by side, because each waits for the disk or for threads for a part of its time.
C_TEST_JOBS ?= 2
define RUN_C_TEST
	export SKIPPED_TESTS=; for test in $(NOT_EMULATED); do case $$test in $${0##*/}:*) SKIPPED_TESTS=$${test#*:} ;; esac; done; \
	if TMS_CUDA_DRIVER="$(abspath $(C_DRIVER))" timeout $(C_TEST_SECONDS) $(EMULATOR) $$0 >$$0.log 2>&1; then \
		echo "$$0: $$(grep -E "PASSED|SKIPPED" $$0.log)"; \
	else \
		echo "$$0: exit status $$?"; \
		touch $$0.failed; \
	fi
endef
ctest: ctest-build ## the C unit tests (C_TESTS=tests/unit/core/model/test_region.c for one)
	@rm -f $(C_PROGRAMS:%=%.failed)
	@printf '%s\n' $(C_PROGRAMS) | xargs -P $(C_TEST_JOBS) -I{} $(SHELL) -c '$(RUN_C_TEST)' {}
	@failed=""; for program in $(C_PROGRAMS); do if [ -e $$program.failed ]; then failed="$$failed $$program"; fi; done; \
	for program in $$failed; do echo "== $$program" >&2; cat $$program.log >&2; done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi; \
	echo "$(words $(C_PROGRAMS)) C test programs passed ($(VARIANT))"

# ---- The package with the libraries of a variant, in $(SITE), linked from the objects of the C tests

SITE := $(C_BUILD)/site
SITE_CORE := $(SITE)/torch_memory_saver/_core.abi3.so
SITE_PRELOAD := $(SITE)/torch_memory_saver_hook_mode_preload.abi3.so
SITE_SIMULATOR := $(SITE)/torch_memory_saver/_simulated_cuda.so
C_GLUE := $(patsubst %.c,$(C_BUILD)/%.o,$(wildcard csrc/python/*.c))
C_PRELOAD := $(patsubst %.c,$(C_BUILD)/%.o,$(wildcard csrc/preload/*.c))
LINK_SHARED = mkdir -p $(@D) && echo "  LD $@" && \
	$(CC) $(C_FLAGS_$(VARIANT)) -shared -pthread -Wl,-Bsymbolic-functions -Wl,-z,nodelete \
	$(addprefix -Wl$(COMMA)--version-script=,$(filter %.map,$^)) $(filter %.o,$^) -ldl -lrt -o $@
COMMA := ,

$(C_GLUE): C_FLAGS += -DPy_LIMITED_API=0x030A0000 -isystem $(PYTHON_INCLUDE)
$(SITE_CORE): $(C_CORE) $(C_GLUE) csrc/python/exports.map
	@$(LINK_SHARED)
$(SITE_PRELOAD): $(C_CORE) $(C_PRELOAD) csrc/preload/exports.map
	@$(LINK_SHARED)
$(SITE_SIMULATOR): $(C_SIMULATOR) csrc/simulator/exports.map
	@$(LINK_SHARED)

# Tests of that package run in that folder: Python started in the source tree imports the package that lies there.
.PHONY: site
site: $(SITE_CORE) $(SITE_PRELOAD) $(SITE_SIMULATOR) ## the package with the libraries of VARIANT, in build/c/VARIANT/site
	@find torch_memory_saver torch_memory_saver_pytest.py \
		\( -name '*.py' -o -name '*.pyi' -o -name '*.html' -o -name '*.css' -o -name '*.js' -o -name py.typed \) \
		-exec cp --parents -t $(abspath $(SITE)) {} +
	@ln -sfn $(addprefix $(CURDIR)/,csrc tests tools benchmarks Makefile pyproject.toml setup.py) $(SITE)

# OF_SETUP excludes the tests of the libraries that setup.py builds, from runs with other libraries.
LIBRARY_TESTS := libraries_ mappings_of_libraries_ core_exports preload_library_exports simulator_exports
OF_SETUP := --ignore=tests/unit/preload/test_exports.py
OF_SETUP += --ignore=tests/unit/python/setup/test_installing.py
OF_SETUP += --deselect=tests/unit/python/simulate/test_elf.py::test_the_simulated_gpu
# A test is deselected if its name begins so.
OF_SETUP += $(addprefix --deselect=tests/unit/python/setup/test_libraries.py::test_,$(LIBRARY_TESTS))
OF_SETUP += --deselect=tests/unit/python/setup/test_setup.py::test_source_distribution

# ---- The processor of GH200 and GB200
#
# Debian has a cross compiler and an emulator of it:
#     dpkg --add-architecture arm64 && apt-get update
#     apt-get install gcc-aarch64-linux-gnu qemu-user libcmocka-dev:arm64

AARCH64 := CC=aarch64-linux-gnu-gcc EMULATOR=qemu-aarch64
# NOT_IN_QEMU excludes tests of what the emulator lacks:
# - a fork without some of the memory (MADV_DONTFORK)
# - io_uring
# - mutexes that survive a killed process (set_robust_list)
# - the start times of processes in /proc
# - the speed for an hour of calls that fail one after the other
NOT_IN_QEMU := test_store:a_forked_child_changes_nothing test_transition_log:each_call_is_one_line \
	test_process:processes_share_a_budget test_management:the_management_library_lists_the_processes_with_memory \
	test_nccl_setup:a_rank_that_dies_before_the_others_are_there test_driver_calls:every_call_may_fail
# These tests start a program without the emulator, or need a library of this machine.
NOT_IN_QEMU_PRELOADED := disk_backups_are_files or fork_and_exec or jemalloc or asan
.PHONY: aarch64
aarch64: build ## the libraries for aarch64, and their C and preload tests in qemu-aarch64 (10 min)
	$(MAKE) site VARIANT=aarch64 $(AARCH64)
	$(MAKE) ctest VARIANT=aarch64 $(AARCH64) NOT_EMULATED="$(NOT_IN_QEMU)"
	$(AARCH64) SITE=$(abspath build/c/aarch64/site) $(IN_TREE) -m pytest -m '' -k 'not ($(NOT_IN_QEMU_PRELOADED))' \
		$(PYTEST_ARGUMENTS) $(patsubst %,tests/unit/preload/test_%.py,capture ledger memory process)

.PHONY: shared-kills
shared-kills: ## the shared store: kills a process at each system call (10 min)
	TMS_EVERY_KILL=1 $(MAKE) ctest C_TEST_SECONDS=3600 C_TESTS="$(addprefix tests/unit/,backup/shared/test_kills.c \
		backup/shared/test_published.c abi/test_shared_kills.c)"

##@ Sanitizers, fuzzing, coverage
# ---- Sanitizers

.PHONY: sanitize sanitize-c sanitize-python sanitize-threads
sanitize: sanitize-c sanitize-python sanitize-threads ## the C and Python tests with ASan and UBSan, the C tests also with TSan

# Reports that a test does not look at lie in these files and fail the run. Faults (SIGSEGV, SIGBUS) are left to the tests,
# some of which expect them. strict_string_checks reports every text that is not terminated.
SANITIZER_REPORTS := $(abspath build/c/asan/reports)
ASAN_SETTINGS := abort_on_error=1:handle_segv=0:handle_sigbus=0:detect_stack_use_after_return=1:strict_string_checks=1
UBSAN_SETTINGS := halt_on_error=1:abort_on_error=1:print_stacktrace=1

sanitize-c: ## the C tests and the corpus of the fuzz targets, with ASan and UBSan
	ASAN_OPTIONS=$(ASAN_SETTINGS):detect_leaks=1 UBSAN_OPTIONS=$(UBSAN_SETTINGS) $(MAKE) ctest fuzz-corpus VARIANT=asan

# NOT_TSAN excludes tests without use under TSan, although threads of the library run in most programs:
# - TSan does not see what another process orders
# - calls of other programs, made once more for a minute
# - as many mappings as the system allows
# - computing, and work with files on one thread
# - cases that differ in contents or in the call that fails, and not in threads
NOT_TSAN := $(addprefix tests/unit/,abi/test_shared_kills.c core/test_driver_calls.c core/test_scale_runs.c \
	backup/host/test_gaps.c simulator/test_fingerprint.c simulator/test_ipc.c)
NOT_TSAN += $(patsubst %,tests/unit/backup/shared/test_%.c,clean_up entry folder full key kills names processes published)
NOT_TSAN += $(addprefix tests/unit/,backup/disk/test_failures_of_calls.c core/allocation/test_handles.c core/model/test_account.c)
NOT_TSAN += $(patsubst %,tests/unit/core/transition/test_%.c,backup_choice backup_choice_live by_fingerprint changed_chunks \
	changed_disk_blocks copy_order guard_failed layout nvtx_ranges pause_and_resume_failed verification)
sanitize-threads: ## the C tests with TSan
	TSAN_OPTIONS=halt_on_error=1:suppressions=$(abspath tests/sanitize/thread.suppressions) \
		$(MAKE) ctest VARIANT=tsan C_TESTS="$(filter-out $(NOT_TSAN),$(ALL_C_TESTS))"

# Python itself is not instrumented, so only the C tests look for leaks. The compiled programs of tests/unit/preload get the
# runtime by CFLAGS, with the preload library before it (verify_asan_link_order).
SANITIZED_PYTHON := $(abspath build/c/asan/python)
SANITIZED_TESTS ?= tests/unit/python tests/unit/preload
NOT_SANITIZED := $(OF_SETUP)
PYTHON_TESTS := tests/unit/python
# These tests start programs that have no runtime of ASan or a malloc of their own.
NOT_SANITIZED += --ignore=tests/unit/preload/test_harmless.py
NOT_SANITIZED += $(addprefix --deselect=tests/unit/preload/test_process.py::,test_beside_another_preloaded_library \
	test_beside_jemalloc test_allocations_inside_an_allocation_are_not_the_programs)
# These tests read files, compute, print or vote, have a stand-in for PyTorch, and call the libraries as other tests do.
NOT_SANITIZED += $(addprefix --ignore=$(PYTHON_TESTS)/,engine/test_arguments.py test_without_observers.py test_turns.py \
	setup cli layer_graphs ranks torch vllm observe/doctor observe/events/timeline observe/memory observe/store)
NOT_SANITIZED += $(patsubst %,--ignore=$(PYTHON_TESTS)/simulate/test_%.py,simulate pytest_plugin)
# ASan's own allocator can wait for ever in the forked child of a process with threads, which each process of pytest-xdist is.
NOT_SANITIZED += --ignore=$(PYTHON_TESTS)/two_users
NOT_SANITIZED += --deselect=$(PYTHON_TESTS)/test_exit.py::test_a_forked_child_leaves_its_parents_resources
NOT_SANITIZED += $(addprefix --deselect=$(PYTHON_TESTS)/backup/test_host_memory.py::test_a_forked_child_,\
	closes_nothing_of_its_parents inherits_copies_of_a_backup_and_not_its_memory)
sanitize-python: ## the Python tests on the simulated GPU, with ASan and UBSan in the libraries
	$(MAKE) site VARIANT=asan
	$(PYTHON) tools/sanitizer/make_python.py $(SANITIZED_PYTHON) "$$($(CC) -print-file-name=libasan.so)" $(CC)
	@rm -rf $(SANITIZER_REPORTS) && mkdir -p $(SANITIZER_REPORTS)
	@export PATH="$(SANITIZED_PYTHON)/bin:$$PATH" PYTHONPATH="$(abspath build/c/asan/site)" \
		PYTHONMALLOC=malloc CFLAGS=-fsanitize=address \
		ASAN_OPTIONS=$(ASAN_SETTINGS):detect_leaks=0:verify_asan_link_order=0:log_path=$(SANITIZER_REPORTS)/address \
		UBSAN_OPTIONS=$(UBSAN_SETTINGS):log_path=$(SANITIZER_REPORTS)/undefined; cd build/c/asan/site; set -x; \
	python -m pytest -q tests/sanitize/check_detection.py && \
	python -m pytest $(SANITIZED_TESTS) $(NOT_SANITIZED) $(PYTEST_ARGUMENTS)
	@if [ -n "$$(ls $(SANITIZER_REPORTS))" ]; then head -n 60 $(SANITIZER_REPORTS)/*; exit 1; \
	else echo "no reports of the sanitizers"; fi

# ---- Fuzzing, with clang's libFuzzer
#
# An input that crashed a parser goes to tests/fuzz/corpus, which `make fuzz-corpus` runs.

FUZZ_SECONDS ?= 60
FUZZ_CC ?= clang
FUZZ_TARGETS := $(patsubst tests/fuzz/fuzz_%.c,%,$(wildcard tests/fuzz/fuzz_*.c))
FUZZ_BUILD := build/fuzz
FUZZ_REPLAYERS := $(patsubst %,$(C_BUILD)/tests/fuzz/replay_%,$(FUZZ_TARGETS))

$(FUZZ_BUILD)/fuzz_%: tests/fuzz/fuzz_%.c $(CORE_SOURCES) Makefile
	@mkdir -p $(@D) && echo "  CC $@"
	@$(FUZZ_CC) -std=c11 -D_GNU_SOURCE -U_FORTIFY_SOURCE -g -O1 -pthread -Wall -Wextra -Werror -fsanitize=fuzzer,address,undefined \
		-fno-sanitize-recover=undefined -Icsrc $(CUDA_INCLUDES) $(filter %.c,$^) -ldl -lrt -o $@

$(C_BUILD)/tests/fuzz/replay_%: $(C_BUILD)/tests/fuzz/fuzz_%.o $(C_BUILD)/tests/fuzz/replay.o $(C_CORE)
	@echo "  LD $@"
	@$(CC) $(C_FLAGS_$(VARIANT)) -pthread $^ -ldl -lrt -o $@

.PHONY: fuzz fuzz-corpus
fuzz: $(addprefix $(FUZZ_BUILD)/fuzz_,$(FUZZ_TARGETS)) ## looks for inputs that break the parsers (FUZZ_SECONDS=60 for each)
	@for target in $(FUZZ_TARGETS); do \
		echo "== $$target"; found=$(FUZZ_BUILD)/corpus/$$target; mkdir -p $$found && \
		UBSAN_OPTIONS=print_stacktrace=1 $(FUZZ_BUILD)/fuzz_$$target -max_total_time=$(FUZZ_SECONDS) \
			-print_final_stats=1 -close_fd_mask=2 \
			-artifact_prefix=$(FUZZ_BUILD)/ $$found tests/fuzz/corpus/$$target 2>$(FUZZ_BUILD)/$$target.log || \
			{ tail -n 60 $(FUZZ_BUILD)/$$target.log; exit 1; }; \
		grep -E 'INITED|DONE|stat::number' $(FUZZ_BUILD)/$$target.log; \
	done
fuzz-corpus: $(FUZZ_REPLAYERS) ## runs the kept inputs of the fuzz targets once
	@for target in $(FUZZ_TARGETS); do \
		log=$(C_BUILD)/tests/fuzz/$$target.log; \
		$(C_BUILD)/tests/fuzz/replay_$$target tests/fuzz/corpus/$$target/* 2>$$log || { cat $$log; exit 1; }; \
	done

# ---- Coverage of the C code without the simulator, by the C tests and the Python tests, with gcov

COVERAGE_LINES := 95
COVERAGE_BRANCHES := 85
COVERAGE_TESTS ?= tests/unit/python tests/unit/preload $(wildcard tests/fault_injection)
# test_harmless.py compares the output of programs, and gcov's library has functions of its own that can fail.
NOT_COVERAGE := $(OF_SETUP) --ignore=tests/unit/preload/test_harmless.py \
	--deselect=tests/fault_injection/test_faults.py::test_nothing_that_can_fail_is_left_out
.PHONY: coverage coverage-report
coverage: ## the share of the C code that the tests reach; fails below the thresholds
	@find build/c/coverage -name '*.gcda' -delete 2>/dev/null || true
	$(MAKE) ctest site VARIANT=coverage
	cd build/c/coverage/site && \
	PYTHONPATH="$$PWD" $(PYTHON) -m pytest -q -m '' $(COVERAGE_TESTS) $(NOT_COVERAGE) $(PYTEST_ARGUMENTS)
	$(MAKE) coverage-report
coverage-report: ## the report of the runs so far
	$(PYTHON) tools/coverage_report.py --lines $(COVERAGE_LINES) --branches $(COVERAGE_BRANCHES) build/c/coverage \
		$(patsubst %/,%,$(sort $(dir $(SHIPPED_SOURCES))))

-include $(shell find $(C_BUILD) -name '*.d' 2>/dev/null)

##@ Style and static analysis
# ---- Lint
#
# A tool that is not installed is named. It is skipped if another tool looks for the same.

.PHONY: lint lint-format lint-c lint-python analyze layers layers-picture
lint: lint-format layers lint-c analyze lint-python ## formatting, the layers of csrc, static analysis of the C, ruff, mypy
layers: $(C_CORE) $(C_GLUE) $(C_PRELOAD) $(C_SIMULATOR) ## the order of the layers of csrc, and circles of files
	$(PYTHON) tools/check_layers.py --objects $(C_BUILD) --need-objects
layers-picture: layers ## docs/images/layers.svg and package-layers.svg, drawn again
	$(PYTHON) tools/check_layers.py --objects $(C_BUILD) --svg docs/images/layers.svg
	$(PYTHON) tools/package_picture.py
	$(PYTHON) docs/darken.py
lint-format: ## the format of the C files
	@echo "$(CLANG_FORMAT) --dry-run -Werror" && $(CLANG_FORMAT) --dry-run -Werror $(C_FILES)
lint-c: ## clang-tidy; if it is not installed, that is said, and it is skipped
	@if command -v clang-tidy >/dev/null; then \
		set -x; clang-tidy --warnings-as-errors='*' $(shell find csrc -name '*.c' | sort) -- -std=c11 -D_GNU_SOURCE \
			-DPy_LIMITED_API=0x030A0000 -Icsrc -isystem $(PYTHON_INCLUDE) $(CUDA_INCLUDES) 2>&1 | sed -E '/^[0-9]+ warnings? generated\.$$/d'; \
	else echo "skipped: clang-tidy is not installed"; fi
analyze: ## the C code without the simulator through gcc's analyzer, every report of which is an error
	@if gcc --version >/dev/null 2>&1; then \
		echo "gcc -fanalyzer"; failed=0; for file in $(SHIPPED_SOURCES); do \
			gcc -std=c11 -D_GNU_SOURCE -O1 -fanalyzer -Wall -Wextra -Werror -DPy_LIMITED_API=0x030A0000 -Icsrc -isystem $(PYTHON_INCLUDE) \
				$(CUDA_INCLUDES) -c $$file -o /dev/null || failed=1; \
		done; exit $$failed; \
	else echo "skipped: gcc is not installed"; fi
lint-python: ## ruff, mypy, pyright and the layers of the package
	$(PYTHON) -m ruff check $(PYTHON_FILES)
	$(PYTHON) -m ruff format --check $(PYTHON_FILES)
	$(PYTHON) -m mypy torch_memory_saver torch_memory_saver_pytest.py $(wildcard tools benchmarks)
# The types as users see them. The two type checkers read them differently.
	$(PYTHON) -m mypy tests/type_checks
	@if $(PYTHON) -c 'import pyright' 2>/dev/null; then \
		echo "$(PYTHON) -m pyright tests/type_checks" && $(PYTHON) -m pyright --pythonpath "$$(command -v $(PYTHON))" tests/type_checks; \
	else echo "skipped: pyright is not installed"; fi
# import-linter reads Python files only: the declarations of the native library stand for it.
	rm -rf build/imports && mkdir -p build/imports && cp -r torch_memory_saver build/imports
	mv build/imports/torch_memory_saver/_core.pyi build/imports/torch_memory_saver/_core.py
	cd build/imports && lint-imports --no-cache --config ../../pyproject.toml

# Code that compiles with the oldest cuda.h compiles with all, because cuda.h only grows. The package of pip is unpacked and
# not installed.
OLDEST_CUDA := 12.0.107
OLDEST_HEADERS := build/cuda-$(OLDEST_CUDA)
$(OLDEST_HEADERS)/nvidia/cuda_runtime/include/cuda.h:
	$(PYTHON) -m pip install --no-deps --target $(OLDEST_HEADERS) nvidia-cuda-runtime-cu12==$(OLDEST_CUDA)

.PHONY: oldest-cuda
oldest-cuda: $(OLDEST_HEADERS)/nvidia/cuda_runtime/include/cuda.h ## compiles all of the C with the oldest supported cuda.h
	@for file in $(filter-out tools/%,$(filter %.c,$(C_FILES))); do \
		$(CC) -std=c11 -D_GNU_SOURCE -Wall -Wextra -Werror -fsyntax-only -DPy_LIMITED_API=0x030A0000 -DTMS_INTERFACE=0 \
			-Icsrc -Itests/unit/support -I$(PYTHON_INCLUDE) -isystem $(<D) $$file || exit 1; \
	done; echo "all of the C compiles with the cuda.h of CUDA $(OLDEST_CUDA)"

.PHONY: format
format: ## the C and Python files, rewritten in their format
	$(CLANG_FORMAT) -i $(C_FILES)
	$(PYTHON) -m ruff format $(PYTHON_FILES)

##@ Release
.PHONY: pages
pages: ## the generated tables and the dark pictures of docs, written again (PYTHON has Pillow)
	$(PYTHON) docs/generated.py
	$(PYTHON) docs/darken.py

.PHONY: docs
docs: ## the documentation, in build/docs (PYTHON has the package and its extra `docs`)
	@$(PYTHON) -c 'import mkdocs, torch_memory_saver' 2>/dev/null || \
		{ echo "make docs needs the package and its extra: run $(PYTHON) -m pip install '.[docs]' first" >&2; exit 1; }
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict
	@echo "open build/docs/index.html"

.PHONY: wheel
wheel: ## a source distribution, its wheel and the debug data of the libraries, in dist
	TMS_SYMBOLS="$(CURDIR)/dist/symbols" $(PYTHON) -m build --outdir dist
