# demo: serve the bundled model and ask it three questions.  test: what CI runs.
# Variables: VENV (folder), PYTHON (interpreter), DIFFUPLUG_DEVICE (cpu or cuda), PYTEST_ARGS,
# WORKERS (processes that share the test files; each holds an engine of its own).
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
# By file: the tests of a file share engines.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)
export HF_HUB_OFFLINE := 1

.NOTPARALLEL:
.PHONY: install demo test lint types unit engine

install:
	@scripts/install.sh $(VENV)

demo: install
	@$(BIN)/python scripts/demo.py

lint: install
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: install
	@$(BIN)/mypy

unit: install
	@$(PYTEST) tests/unit

engine: install
	@$(PYTEST) tests/engine

# Units first, and apart: they build models in their own process, as an engine does.
test: lint types unit engine
