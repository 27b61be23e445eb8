# Every target sets up what it needs in .venv, so `make demo` and `make test` work on a machine with Python 3.10 or newer.
PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo test lint format bench traces-check clean

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/run.stamp ## Explain a bundled recording: where an MLA decode step's time goes
	@$(BIN)/mla-diag demo

test: .venv/dev.stamp ## Run the tests; those marked gpu need a GPU: make test PYTEST="-m gpu"
	$(BIN)/python -m pytest $(PYTEST)

lint: .venv/dev.stamp ## Check style, types and that each room imports only from those below
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/dev.stamp ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/dev.stamp ## Time the trace reader against json.load, in turns
	$(BIN)/python tests/bench_reader.py

traces-check: .venv/dev.stamp ## Hold every recording to its manifest, as CI does with recorded traces
	$(BIN)/python traces/check.py

clean: ## Remove the environment and all caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist

.venv/bin/python:
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip

.venv/run.stamp: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

.venv/dev.stamp: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@ .venv/run.stamp
