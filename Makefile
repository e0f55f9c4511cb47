# demo: serve the bundled model and ask it three questions.  test: what CI runs.
# Variables: VENV (folder), PYTHON (interpreter), DIFFUPLUG_DEVICE (cpu or cuda), PYTEST_ARGS.
VENV ?= .venv
BIN := $(VENV)/bin
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
	@$(BIN)/python -m pytest tests/unit $(PYTEST_ARGS)

engine: install
	@$(BIN)/python -m pytest tests/engine $(PYTEST_ARGS)

# pytest is last, so that its summary is the last line.
test: lint types
	@$(BIN)/python -m pytest tests/unit tests/engine $(PYTEST_ARGS)
