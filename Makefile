# demo: serve the bundled model and ask it three questions.  test: what CI runs.
# Each installs what it needs first: install what runs, install-test the test tools too.
# Variables: VENV (folder), PYTHON (interpreter), DIFFUPLUG_DEVICE (cpu or cuda), PYTEST_ARGS,
# WORKERS (processes that share the test files; each holds an engine of its own).
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest
# By file: the tests of a file share engines.
SPREAD = -n $(WORKERS) --dist loadfile
export HF_HUB_OFFLINE := 1

.NOTPARALLEL:
.PHONY: install install-test demo test lint types unit kernels engine

install:
	@scripts/install.sh $(VENV)

install-test:
	@scripts/install.sh $(VENV) test

demo: install
	@$(BIN)/python scripts/demo.py

lint: install-test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: install-test
	@$(BIN)/mypy

unit: install-test
	@$(PYTEST) $(SPREAD) $(PYTEST_ARGS) tests/unit

# In one process, which starts another one that interprets: more would import vLLM again and again.
kernels: install-test
	@$(PYTEST) $(PYTEST_ARGS) tests/kernels

engine: install-test
	@$(PYTEST) $(SPREAD) $(PYTEST_ARGS) tests/engine

# Units first, and apart: they build models in their own process, as an engine does.
test: lint types unit kernels engine
