# demo: serve the bundled model and ask it three questions.
# test-all: linter, types and every test, which is what CI runs.
# test: the same without the files that carry the marker `slow`.
# Each installs what it needs first: install what runs, install-test the test tools too.
# KEEP=1 leaves the demo's server running, with its viewer.
# Variables: VENV (folder), PYTHON (interpreter), DIFFUPLUG_DEVICE (cpu or cuda), PYTEST_ARGS,
# WORKERS (processes that share the test files; each holds an engine of its own).
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest
# By file, for the tests of a file share engines, in the order of tests/spread.py. One session runs
# all folders, so that no core waits for the last of each.
SPREAD = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
QUICK = -m 'not slow'
export HF_HUB_OFFLINE := 1
# Bytecode is kept, also where the environment says no: without it each import of vLLM, which every
# server and engine process begins with, compiles thousands of files again.
export PYTHONDONTWRITEBYTECODE :=
# As our commands set it: a process whose OpenMP has other settings cannot be forked from one that runs.
export GOMP_SPINCOUNT ?= 1000

.PHONY: install install-test demo test test-all lint types tests unit kernels engine

install:
	@scripts/install.sh $(VENV)

install-test:
	@scripts/install.sh $(VENV) test

demo: install
	@$(BIN)/python scripts/demo.py $(if $(KEEP),--keep)

lint: install-test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: install-test
	@$(BIN)/mypy

# These three run every test of a folder.
unit: install-test
	@$(PYTEST) $(SPREAD) $(PYTEST_ARGS) tests/unit

kernels: install-test
	@$(PYTEST) $(PYTEST_ARGS) tests/kernels

engine: install-test
	@$(PYTEST) $(SPREAD) $(PYTEST_ARGS) tests/engine

tests: install-test
	@$(PYTEST) $(SPREAD) $(QUICK) $(PYTEST_ARGS)

# Types are checked beside the tests; both print what they find when they end.
test: install-test
	@$(MAKE) --no-print-directory -j2 lint types tests

test-all: install-test
	@$(MAKE) --no-print-directory -j2 lint types tests QUICK=
