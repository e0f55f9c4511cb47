# demo: serve the bundled model and ask it three questions.  test: what a change has to pass.
# test-slow: tests that carry the marker `slow`, which CI runs too.
# Each installs what it needs first: install what runs, install-test the test tools too.
# KEEP=1 leaves the demo's server running, with its viewer.
# Variables: VENV (folder), PYTHON (interpreter), DIFFUPLUG_DEVICE (cpu or cuda), PYTEST_ARGS,
# WORKERS (processes that share the test files; each holds an engine of its own).
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest
# By file, for the tests of a file share engines, in the order of tests/spread.py.
SPREAD = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
QUICK = -m 'not slow'
export HF_HUB_OFFLINE := 1
# Bytecode is kept, also where the environment says no: without it each import of vLLM, which every
# server and engine process begins with, compiles thousands of files again.
export PYTHONDONTWRITEBYTECODE :=
# As our commands set it: a process whose OpenMP has other settings cannot be forked from one that runs.
export GOMP_SPINCOUNT ?= 1000

.PHONY: install install-test demo test test-slow lint types tests unit kernels engine

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

unit: install-test
	@$(PYTEST) $(SPREAD) $(QUICK) $(PYTEST_ARGS) tests/unit

kernels: install-test
	@$(PYTEST) $(QUICK) $(PYTEST_ARGS) tests/kernels

engine: install-test
	@$(PYTEST) $(SPREAD) $(QUICK) $(PYTEST_ARGS) tests/engine

# Engines apart: units build models in their own process, as an engine does.
tests: install-test
	@$(PYTEST) $(SPREAD) $(QUICK) $(PYTEST_ARGS) tests/unit tests/kernels
	@$(MAKE) --no-print-directory engine

# Types are checked beside the tests; both print what they find when they end.
test: install-test
	@$(MAKE) --no-print-directory -j2 lint types tests

# In one session, units first, so that no core waits for the last of them.
test-slow: install-test
	@$(PYTEST) $(SPREAD) -m slow $(PYTEST_ARGS) tests/unit tests/kernels tests/engine
