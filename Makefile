# Two commands matter: `make demo` and `make test`. Both set everything up by themselves.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test test-all check format bench proof figures docs clean

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

# Needs a quiet machine and root (unequal hosts); three hours or more. GPU labs: benchmarks/proof.py --lab lab-gpu
proof: $(READY)
	@for lab in lab-cpu lab-cpu-2link lab-even; do $(BIN)/python benchmarks/proof.py --lab $$lab || exit 1; done
	@for lab in lab-cpu lab-cpu-2link; do $(BIN)/python benchmarks/proof.py --lab $$lab --ablate all || exit 1; done
	@for lab in lab-cpu lab-cpu-2link lab-even; do $(BIN)/python benchmarks/proof.py --lab $$lab --zoo || exit 1; done
	@for lab in lab-cpu lab-cpu-2link; do $(BIN)/python benchmarks/accuracy.py --lab $$lab || exit 1; done

figures: $(READY)
	@$(BIN)/python benchmarks/figures.py

docs: $(READY)
	@$(BIN)/python docs/generate.py

$(READY): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
