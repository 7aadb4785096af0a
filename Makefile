# Short names for commands of CMake, pip and scripts.
#
#   make setup          installs what training needs (dev/setup.sh), as the targets below do if they need more
#   make train_llama3   builds the program for the device found (PLATFORM=cpu|amd|nvidia overrides), and prepares the text
#   make install        installs the program and its run configurations into PREFIX (default /usr/local)
#   make test           sets up and runs the tests: minutes on two cores
#   make test-more      what `make test` leaves out to be quick, and a change must pass, too; after it, as in .ci/run
#   make test-all       both, then slow tests, kernels with all combinations of flags, `make warp32`, `make chaos-short`,
#                       `make levels`, `make sanitize`, `make race` at both warp sizes, a minute of `make fuzz`, `make targets`
#   make warp32         every kernel on an emulated GPU whose warps have 32 lanes, as on NVIDIA and RDNA
#   make chaos          kills, failing system calls, damaged files, second owners, signals: docs/reliability.md
#   make sanitize       the program and its checks under ASan and UBSan (CHECKS: only these programs; SANITIZED: only these tests)
#   make levels         the program for every x86-64, its operations for each level of the CPU: docs/install.md
#   make race           every kernel, and two trainers in two threads, under TSan; WARP=32 as on NVIDIA and RDNA
#   make fuzz           every reader of files under libFuzzer, FUZZ_SECONDS (1800) each, then compares C with Python
#   make memcheck       on an NVIDIA GPU: every kernel under compute-sanitizer's four tools
#   make targets        compiles every kernel for AMD's GPUs and, if CUDA's compiler is installed, for sm_80 and sm_90a
#   make targets-amd    the same for gfx90a, gfx942, gfx950, gfx1100, as far as the compiler knows them (ARCHS), of all kernels
#                       (SOURCES); checks registers, scratch, spills, wide accesses
#   make rocm           makes a Debian with a real ROCm (as root, 3 GB) and tries a user's commands there, without a GPU; ARCHS, ROCM
#   make isa            runs the gfx942 code of every optimized kernel on an emulated MI300X (TINYGRAD: dev/hip/isa/README.md)
#   make validate       checks llamac's claims on this machine and packs the results into one file; QUICK=1: only what `make test` omits
#   make bench          times every kernel beside the device's copy, then llamac.ops beside PyTorch eager and torch.compile
#   make bench-train    compares training with PyTorch eager and torch.compile on this machine's GPU, in one table
#   make bench-cpu      compares tokens/s and peak memory with PyTorch, for the same model and batch, two threads
#   make reference      makes the reference tensors with which the C code is compared
#   make lint           checks formatting, spelling, types, and clang-tidy on the files changed since BASE; runs no tests
#   make format         formats with clang-format and ruff, as `make lint` requires
PLATFORM ?= auto
PYTHON   ?= python3
PREFIX   ?= /usr/local
JOBS     ?= $(shell getconf _NPROCESSORS_ONLN)
BUILD     = build/$(PLATFORM)
VENV      = .venv/bin/python
PIP       = $(VENV) -m pip --disable-pip-version-check --quiet install
SETUP     = PYTHON='$(PYTHON)' PLATFORM='$(PLATFORM)' GPUS='$(GPUS)' TOOLKIT='$(TOOLKIT)' TORCH='$(TORCH)' dev/setup.sh
# Side by side: a thread each, but where a test says otherwise. What measures a GPU's memory is not among them.
# One more worker than cores: some tests wait. A worker has whole files, whose fixtures are made once, until another is idle.
PYTEST    = OMP_NUM_THREADS=1 $(VENV) -m pytest -q -n $$(($(JOBS) + 1)) --maxprocesses 8 --dist worksteal

# Ninja compiles again what a kill left half written; a tree that another generator made is kept.
export CMAKE_GENERATOR ?= Ninja

# The program and the Python package compile the same sources with the same flags, in folders of their own: ccache, where
# it is installed, compiles them once. Paths under CCACHE_BASEDIR become relative, and the compiler needs one name.
export CMAKE_CXX_COMPILER_LAUNCHER = $(shell command -v ccache)
export CMAKE_HIP_COMPILER_LAUNCHER = $(CMAKE_CXX_COMPILER_LAUNCHER)
export CCACHE_DIR ?= $(CURDIR)/build/ccache
export CCACHE_BASEDIR ?= $(CURDIR)
ifeq ($(origin CXX),default)
export CXX := c++
endif

# A CMake that the set-up has put there, where the system's is too old for the platform.
export PATH := $(CURDIR)/.venv/cmake:$(PATH)

# pip installs sources only (dev/setup.sh): Python keeps what it compiles, or each process compiles PyTorch again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train_llama3 program checks install test test-more test-all warp32 chaos chaos-short levels sanitize race fuzz fuzz-smoke memcheck targets targets-amd rocm isa validate bench bench-train bench-cpu reference lint format clean setup setup-build setup-test text native

setup:
	@$(SETUP)

setup-build:
	@$(SETUP) build

setup-test: setup
	@$(SETUP) test

# Side by side: the other packages and the text keep one core busy.
train_llama3: setup-build
	$(MAKE) --no-print-directory --jobs 2 text program

# llamac._native in llamac/ is found where `make native` has installed none.
program: setup-build
	cmake -S . -B $(BUILD) -DLLAMAC_PLATFORM=$(PLATFORM) -DLLAMAC_PYTHON=native -DPython_EXECUTABLE='$(CURDIR)/$(VENV)'
	cmake --build $(BUILD) --parallel $(JOBS) --target train_llama3 llamac_python
	ln -sf $(BUILD)/train_llama3 train_llama3
	rm -f llamac/_native.*
	for part in $(BUILD)/csrc/python/_native.*; do ln -s ../$$part llamac/; done

install: setup
	cmake -S . -B $(BUILD) -DLLAMAC_PLATFORM=$(PLATFORM)
	cmake --build $(BUILD) --parallel $(JOBS) --target train_llama3
	cmake --install $(BUILD) --prefix '$(PREFIX)'

# Side by side: PyTorch arrives and the extension, one source, compiles while the check programs keep the other core busy.
test: train_llama3
	$(MAKE) --no-print-directory --jobs 2 checks native reference
	ctest --no-tests=error --test-dir $(BUILD) --parallel $(JOBS) --output-on-failure
	LLAMAC_BUILD=$(BUILD) $(PYTEST) tests --ignore tests/ops/test_gpu.py -m 'not slow and not more'
	LLAMAC_BUILD=$(BUILD) $(VENV) -m pytest -q tests/ops/test_gpu.py

checks:
	cmake --build $(BUILD) --parallel $(JOBS)

test-more:
	cmake --build $(BUILD) --parallel $(JOBS) --target benchmark
	ctest --no-tests=error --test-dir $(BUILD) -C more -R ^bench_ --parallel $(JOBS) --output-on-failure
	LLAMAC_BUILD=$(BUILD) $(PYTEST) tests -m 'more and not slow'

test-all: test test-more warp32 chaos-short levels sanitize race fuzz-smoke targets
	$(BUILD)/check_operations
	ctest --no-tests=error --test-dir $(BUILD) -C slow -R headers --output-on-failure
	LLAMAC_BUILD=$(BUILD) $(PYTEST) tests -m slow
	$(MAKE) race WARP=32

# Warps of 32 lanes, as on NVIDIA and RDNA; `make test` has the 64 of MI300X.
warp32: setup-test
	cmake -S . -B build/warp32 -DLLAMAC_PLATFORM=cpu -DLLAMAC_WARP=32 -DLLAMAC_EMULATE_FP16=ON
	cmake --build build/warp32 --parallel $(JOBS) --target kernel_checks
	ctest --no-tests=error --test-dir build/warp32 --parallel $(JOBS) --output-on-failure -R 'check_(operations|emulation|tile|quantize)'
	LLAMAC_BUILD=build/warp32 $(PYTEST) tests/ops/test_platform.py -m program

# One after the other: each starts a run per core.
chaos: CHAOS = kill=500 faults=300 corruption=2000 owners=200 preemption=100 ranks=100
chaos-short: CHAOS = kill=15 faults=15 corruption=30 owners=8 preemption=8 ranks=10
chaos chaos-short: train_llama3 setup-test
	for run in $(CHAOS); do LLAMAC_BUILD=$(BUILD) $(VENV) tests/chaos/$${run%=*}.py --count $${run#*=} || exit 1; done

levels: train_llama3 setup-test
	@$(SETUP) levels
	cmake -S . -B build/levels -DLLAMAC_PLATFORM=cpu -DLLAMAC_NATIVE=OFF -DLLAMAC_WERROR=ON
	cmake --build build/levels --parallel $(JOBS) --target train_llama3 check_operations
	LLAMAC_BUILD=build/levels $(PYTEST) tests/ops/test_cpu_level.py tests/train/test_resume.py

SANITIZED = tests
# LLAMAC_NATIVE=OFF: the checkpoint in tests/data resumes to its bits on every CPU.
sanitize: train_llama3 setup-test reference
	cmake -S . -B build/sanitize -DLLAMAC_PLATFORM=cpu -DLLAMAC_SANITIZE=address -DLLAMAC_NATIVE=OFF -DLLAMAC_WERROR=ON
	cmake --build build/sanitize --parallel $(JOBS) $(if $(CHECKS),--target train_llama3 read_inputs $(CHECKS))
	ctest --no-tests=error --test-dir build/sanitize --parallel $(JOBS) --output-on-failure $(if $(CHECKS),-R '$(shell echo $(CHECKS) | tr ' ' '|')')
	LLAMAC_BUILD=build/sanitize $(PYTEST) $(SANITIZED) -m program

WARP = 64
race: setup-test
	cmake -S . -B build/thread$(WARP) -DLLAMAC_PLATFORM=cpu -DLLAMAC_WARP=$(WARP) -DLLAMAC_SANITIZE=thread -DLLAMAC_WERROR=ON
	cmake --build build/thread$(WARP) --parallel $(JOBS) --target kernel_checks check_threads
	ctest --no-tests=error --test-dir build/thread$(WARP) --parallel $(JOBS) --output-on-failure -R 'check_(operations|emulation|tile|threads)'
	LLAMAC_BUILD=build/thread$(WARP) $(PYTEST) tests/ops/test_platform.py -m program

FUZZ_SECONDS = 1800
FUZZ_SEED = 0
fuzz: setup-test
	@$(SETUP) fuzz
	cmake -S . -B build/fuzz -DLLAMAC_FUZZ=ON -DCMAKE_CXX_COMPILER=clang++-19
	cmake --build build/fuzz --parallel $(JOBS)
	$(VENV) tests/fuzz/run.py build/fuzz --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED) --jobs $(JOBS)

fuzz-smoke: FUZZ_SECONDS = 6
fuzz-smoke: FUZZ_SEED = 1
fuzz-smoke: fuzz

memcheck: train_llama3
	cmake --build $(BUILD) --parallel $(JOBS) --target check_operations
	for tool in memcheck racecheck initcheck synccheck; do \
	    compute-sanitizer --tool $$tool --error-exitcode 1 $(BUILD)/check_operations --where device --once || exit 1; \
	done

ARCHS = all
SOURCES =
targets-amd: train_llama3 setup-test
	@$(SETUP) targets
	dev/hip/rccl_header.sh
	$(VENV) dev/hip/resources.py $(SOURCES) $(ARCHS:%=--arch %) --program $(BUILD)/train_llama3

# ROCM: a suite and a layout of dev/rocm_root.sh.
ROCM = experimental amd
rocm:
	dev/rocm_root.sh $(ROCM) 'dev/rocm_check.sh $(ARCHS)'

targets: targets-amd
	if [ -n "$$(dev/platform.sh compiler nvidia)" ]; then \
	    cmake -S . -B build/targets -DLLAMAC_PLATFORM=nvidia -DCMAKE_CUDA_ARCHITECTURES='80-real;90a-real' -DLLAMAC_WERROR=ON && \
	    bash -o pipefail -c 'cmake --build build/targets --parallel $(JOBS) --target train_llama3 2>&1 | \
	        tee build/targets/log' && \
	    ! grep 'Potential Performance Loss' build/targets/log; \
	else echo "no CUDA compiler: not compiled for NVIDIA"; fi

isa: setup-test
	@$(SETUP) targets
	$(VENV) dev/hip/isa/check.py --quick

validate: train_llama3 native
	cmake --build $(BUILD) --parallel $(JOBS)
	cmake --build $(BUILD) --parallel $(JOBS) --target benchmark
	$(VENV) dev/validate.py --build $(BUILD) $(if $(QUICK),--quick) $(STAGES)

bench: train_llama3 native
	cmake --build $(BUILD) --parallel $(JOBS) --target benchmark
	failed=0; $(BUILD)/benchmark || failed=1; \
	    $(VENV) -m llamac bench --out $(BUILD)/bench && exit $$failed

bench-train: train_llama3 setup-test
	$(VENV) dev/bench_train.py --build $(BUILD)

bench-cpu: train_llama3 setup-test
	$(VENV) dev/bench_train.py --build $(BUILD) --workload cpu --only llamac,eager --threads 2 --rounds 3 --steps 35 --warm-up 5

lint: setup-test
	@$(SETUP) lint
	cmake -S . -B build/lint -DLLAMAC_PLATFORM=cpu -DCMAKE_UNITY_BUILD=OFF
	cmake --build build/lint --target llamac_commit
	LLAMAC_BUILD=build/lint dev/lint.sh $(BASE)

# The same rounding on every processor, as tests/conftest.py explains.
reference: setup-test
	OMP_NUM_THREADS=1 MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=avx2 $(VENV) train_llama3.py

format: setup-test
	.venv/bin/clang-format -i $$(git ls-files '*.cpp' '*.h' '*.hip')
	.venv/bin/ruff check --fix . && .venv/bin/ruff format .

clean:
	rm -rf build train_llama3 llamac/_native.*

text: setup
	$(VENV) -m llamac data stdlib

# The Python package with its compiled modules, as `pip install -e .` gives it to a user.
native: setup-test
	$(PIP) --no-build-isolation --no-deps -e .
