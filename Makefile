# Two commands for a fresh machine: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Only a fifth of the packages' 14,000 modules is ever imported. Compiling them at their first import
# instead of at installation saves a minute of setup.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test pytest test-gpu lint fmt type docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: setup
	$(BIN)/specdec generate demo-sampled

# Tests marked slow are left out, to suit two cores; `pytest tests` runs them too. mypy runs beside
# tests that wait for processes.
test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory -j 2 type pytest

pytest: setup
	$(BIN)/python -m pytest -q -n 2 -m "not slow" --dist loadfile --no-loadscope-reorder

test-gpu: setup
	$(BIN)/python -m pytest -q -m gpu tests

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

fmt: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: setup
	$(BIN)/mypy

docs: setup
	$(BIN)/python scripts/docs/options.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache dist
