# Every target sets up what it needs in .venv, so `make demo` and `make test` work on a machine with Python 3.10 or newer.
PYTHON ?= python3
PYTEST ?= -m "not network"
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo test lint format bench releases traces-check clean

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/run.stamp ## Explain bundled recordings: where an MLA decode step's time goes, and what the fix saves
	@$(BIN)/mla-diag demo

test: .venv/dev.stamp ## Run the tests that need neither a GPU nor a package index: see CONTRIBUTING.md
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

releases: .venv/dev.stamp ## Try the fix on every real SGLang release and write docs/compatibility.md
	$(BIN)/python tests/fix/releases.py --output docs/compatibility.md \
		--known-sites mla_diag/diagnose/known_sites.json

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
