# Everything on a fresh machine with Python >= 3.10, git and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DEMO   := $(VENV)/.demo
READY  := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help install demo figures test torture check format clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "bayesattn needs Python 3.10 or newer; set PYTHON=..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(DEMO): pyproject.toml constraints.txt | $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo]'
	@touch $@

$(READY): pyproject.toml constraints.txt | $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $(DEMO) $@

install: $(READY)  ## set up .venv with the package (editable) and what the tests need

demo: $(DEMO)  ## find keys in up to 64,000 tokens with models trained on 128
	$(BIN)/bayesattn demo

figures: $(DEMO)  ## remake tables and the picture of pass keys from docs/data, and pictures for dark pages
	$(BIN)/python -m tools.figures

check: $(READY)  ## ruff and mypy
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check  ## check, then every test that is not marked slow
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow" -n 2  # more threads than cores would wait for each other

torture: $(READY)  ## the long random tests, with a count of what was tried; eleven minutes
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow -n 2

format: $(READY)  ## let ruff rewrite the sources
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove the environment and everything made by runs
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
