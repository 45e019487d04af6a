# Two commands matter: `make demo` and `make test`. Both set everything up by themselves.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test test-all check format bench docs clean

demo: $(READY)
	@$(BIN)/lopsided demo

test: check
	@$(BIN)/python -m pytest -m "not slow"

test-all: check
	@$(BIN)/python -m pytest

check: $(READY)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: $(READY)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(READY)
	@$(BIN)/python benchmarks/algebra.py
	@$(BIN)/python benchmarks/planner.py
	@$(BIN)/python benchmarks/runtime.py

docs: $(READY)
	@$(BIN)/python docs/generate.py

$(READY): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
