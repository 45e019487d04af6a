# Two commands matter: `make demo` and `make test`. Both set everything up by themselves.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
NEWEST := .venv-newest
PIP    := -m pip install --quiet --disable-pip-version-check
PYTEST := -m pytest --numprocesses 2 --dist worksteal
# What failed beside other tests is tried once more with nothing beside it, and has failed if it fails there. Only that:
# another status than 1 says that tests did not run.
AGAIN  := -m pytest --last-failed --last-failed-no-failures none --maxfail 5
TESTS   = $(1) $(PYTEST) $(2) || { test $$? -eq 1 && $(1) $(AGAIN) $(2); }

.PHONY: demo test test-all test-newest newest constraints check format bench proof figures docs clean

demo: $(READY)
	@$(BIN)/lopsided demo

test: check
	@$(call TESTS,$(BIN)/python)

test-all: check
	@$(call TESTS,$(BIN)/python,--all)

# Against the newest of everything that pyproject.toml allows, in an environment of its own.
test-newest: newest
	@$(call TESTS,$(NEWEST)/bin/python)

newest:
	@$(PYTHON) -m venv --clear $(NEWEST)
	@$(NEWEST)/bin/python $(PIP) --upgrade --editable ".[dev]"

# Writes down the newest versions, without the label of a build (torch's +cpu), for `make demo` and `make test` to use.
# Run `make test-newest` first: what it passed with is what is written.
constraints: newest
	@{ echo "# The versions that the tests passed with. Written by make constraints."; \
	   $(NEWEST)/bin/python -m pip freeze --exclude lopsided | sed 's/+[A-Za-z0-9.]*$$//'; } > constraints.txt

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
	@$(BIN)/python benchmarks/scripts/run.py
	@$(BIN)/python benchmarks/shapes.py

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

$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(PIP) --constraint constraints.txt --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) $(NEWEST) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
