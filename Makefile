# `make demo` and `make test` need a Python (3.11 to 3.13) with its headers and g++, and set up all else themselves.

VENV ?= .venv
BAZEL ?= bazel
python := $(VENV)/bin/python

.PHONY: help demo docs test test-all sanitize fuzz lint format build wheel bench bazel clean

help:
	@echo 'make demo     train a small network on the CPU under a memory budget, with and without tfmem'
	@echo 'make test     run the short tests; ARGS="tests/pure -k plan" chooses'
	@echo 'make test-all run the long tests too; make test LONG=2/5 runs the second fifth of the long tests alone'
	@echo 'make sanitize what is C++ and its CPU tests under AddressSanitizer and UndefinedBehaviorSanitizer'
	@echo 'make fuzz     a million mutated cells and programs, read under the same; FUZZ="--seed 2" chooses others'
	@echo 'make lint     ruff, mypy and clang-format; make format mends what can be mended'
	@echo 'make docs     the documentation as a site in build/site, built strictly'
	@echo 'make build    the environment in $(VENV), the op library and the extension module'
	@echo 'make wheel    a wheel in dist/, which installs without a compiler'
	@echo 'make bench    the benchmarks that need no GPU'
	@echo 'make bazel    the same libraries and the pure tests with Bazel'
	@echo 'make clean    remove what was built, but for the environment'

demo: build
	$(python) -m examples.train_cnn --preset demo

# Two processes: most tests keep one core busy. One where there is a GPU: TensorFlow takes all of its memory.
WORKERS ?= $(if $(wildcard /dev/nvidia0),0,2)

# Tests are in the order of their files, and a process takes half of what another has not begun when it has none left:
# few files are divided, so what a file prepares is prepared once or twice.
LONG ?= none
# Bytecode is kept, whatever the environment says: processes that tests start would each compile all of tfmem.
run_tests = PYTHONDONTWRITEBYTECODE= $(python) -m pytest --numprocesses $(WORKERS) --dist worksteal

test: build
	$(run_tests) --long $(LONG) $(ARGS)

test-all: build
	$(run_tests) --long all $(ARGS)

# The op library and its tests in a copy of the tree, where all C++ is compiled with sanitizers
# (tools/sanitized_g++ says which, and what TensorFlow's library, built without them, forces off).
# Off for the same reason: leak checks (TensorFlow and Python keep much until the end), container
# overflow, the one definition rule, new against delete (both sides allocate for each other). The
# test of a thousand steps is left out: it holds memory that AddressSanitizer keeps for a while;
# and so is NVRTC, whose own memory is not looked at. Generated kernels, compiled for the CPU, are.
sanitize_folder := build/sanitize
sanitize_tests = $(patsubst %,tests/tf/test_%.py,dynamic_extension dynamic_nodes dynamic_faults dynamic_ops dynamic_random \
  dynamic_recorded extreme_attributes fusion_gpu \
  fusion_hostile fusion_op fusion_products fusion_semantics fusion_variables lifetimes matmul_op memops memops_faults recurrent_gradient \
  recurrent_op recurrent_parts spill_directories stream_order tile_arithmetic tile_programs tile_random) \
  $(patsubst %,tests/jit/test_%.py,fusion_rows fusion_templates)
# An allocation that fails is no error of ours: TensorFlow sees it, and so does the op.
sanitize_options = detect_leaks=0:detect_container_overflow=0:detect_odr_violation=0:alloc_dealloc_mismatch=0:allocator_may_return_null=1

sanitize: build
	mkdir -p $(sanitize_folder)
	tar -c --exclude='*.so' --exclude=__pycache__ setup.py pyproject.toml README.md custom_ops graph_passes tfmem tests \
	  examples benchmarks tools | tar -x -C $(sanitize_folder)
	cd $(sanitize_folder) && CXX=$(abspath tools/sanitized_g++) $(abspath $(python)) setup.py --quiet build_ext --inplace
	cd $(sanitize_folder) && CXX=$(abspath tools/sanitized_g++) ASAN_OPTIONS=$(sanitize_options) \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	  $(abspath $(python)) -m pytest -p no:cacheprovider --numprocesses $(WORKERS) --dist loadfile --long all --timeout 1200 \
	  $(or $(ARGS),$(sanitize_tests) -k 'not thousand_steps and not nvrtc')

fuzz: build
	$(python) -m tests.tf.fuzz_parsers $(FUZZ)

bench: build
	$(python) -m benchmarks.offload.ir_scaling
	$(python) -m benchmarks.offload --tiny --output build/offload_tiny.json

cpp_sources = $(shell find custom_ops tests -name '*.cc' -o -name '*.h' -o -name '*.cuh')

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(cpp_sources)

format: $(VENV)/.installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(cpp_sources)

# Bazel builds against the TensorFlow of the environment, and runs the tests with its Python.
bazel: $(VENV)/.installed
	@command -v $(firstword $(BAZEL)) >/dev/null || \
	  { echo 'Bazel is not installed; on Debian: apt-get install bazel-bootstrap'; exit 1; }
	TFMEM_PYTHON=$(abspath $(python)) $(BAZEL) test //:all

docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --quiet --strict
	@echo build/site/index.html

build: $(VENV)/.built

# `make build WERROR=1` takes no warnings of the compiler's.
compile = $(python) setup.py --quiet build_ext --inplace $(if $(WERROR),--werror)

$(VENV)/.built: $(VENV)/.installed setup.py tools/build_units.py tools/compile_units.py $(wildcard custom_ops/build_flags.py custom_ops/ops/*.* \
  custom_ops/ops/*/* custom_ops/extension/*.* custom_ops/expr/*.py)
	$(compile)
	@touch $@

# What setuptools gathered for an older wheel goes first: it would put modules that are gone into the new one.
wheel: build
	rm -rf build/lib* build/bdist*
	$(python) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls -t dist/*.whl | head -n 1

# What tfmem needs comes first, so that its library is built against the TensorFlow that is there. The library comes
# before pip asks for it: pip would not show how far the compiler is.
needed = import tomllib; t = tomllib.load(open("pyproject.toml", "rb")); \
  print(*t["build-system"]["requires"], *t["project"]["dependencies"], sep="\n")

# TensorFlow Addons, for the tests: its last wheel is Python 3.11's, and pip takes it for another Python by --target alone.
packages = import sysconfig; print(sysconfig.get_path("purelib"))
addons = --upgrade --no-deps --only-binary=:all: --python-version 3.11 tensorflow-addons==0.23.0

$(VENV)/.installed: pyproject.toml | $(python)
	$(python) -c '$(needed)' > $(VENV)/needed.txt
	$(python) -m pip install --quiet --requirement $(VENV)/needed.txt
	$(compile)
	$(python) -m pip install --quiet --no-build-isolation --editable '.[dev]'
	$(python) -m pip install --quiet $(addons) --target "$$($(python) -c '$(packages)')"
	@touch $@

# The first Python that is new enough and can make environments. It is tried, not only looked for:
# a version manager's shim may be on the path and fail.
usable = import sys, venv, ensurepip; \
  sys.exit(print(sys.executable) if (3, 11) <= sys.version_info < (3, 14) else 1)

$(python):
	@for name in $(PYTHON) python3.12 python3.11 python3.13 python3 python; do \
	  found=$$($$name -c '$(usable)' 2>/dev/null) && break; \
	done; \
	[ -n "$$found" ] || { echo 'No Python from 3.11 to 3.13 with venv was found; name one with PYTHON='; exit 1; }; \
	echo "$(VENV) is made with $$found"; \
	"$$found" -m venv $(VENV)

clean:
	rm -rf build dist bazel-out custom_ops/_tfmem_ops.*.so custom_ops/_extension.abi3.so *.egg-info $(VENV)/.built
