# Everything from a bare checkout: `make test` and `make demo` need Python 3.10 or newer and nothing else.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help install test test-lab test-all test-browser lint format demo bench clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' | awk -F'|' '{printf "make %-12s %s\n", $$1, $$2}'
	@echo
	@echo "Another Python: make test PYTHON=python3.12"

install: $(STAMP) ## create .venv with the package, its extras and the tools (the others do this when needed)

# The stamp is newer than both files exactly when .venv holds what they ask for.
$(STAMP): pyproject.toml setup.py laboratory/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "error: Python 3.10 or newer is needed, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | head -n 1); try make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,hf,lightning,dev]' -e './laboratory[report]'
	@touch $@

# Three for two cores: some tests wait for other processes. Those import the package anew, so its bytecode is kept.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal

test: lint ## lint, then the tests of library and device but the slow ones
	$(PYTEST) -m 'not slow'

test-lab: $(STAMP) ## the tests of the laboratory but the slow ones
	$(PYTEST) -m 'not slow and not browser' laboratory

test-all: lint ## all of these with the slow ones
	$(PYTEST) -m 'not browser'
	$(PYTEST) -m 'not browser' laboratory

test-browser: $(STAMP) ## the page of results in Debian's chromium, with pictures in browser-out; skipped where it is absent
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e './laboratory[browser]'
	$(BIN)/python -m pytest -m browser laboratory/tests/browser

lint: $(STAMP) ## ruff, mypy and the direction of the imports (lint-imports)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

format: $(STAMP) ## put the code in ruff's format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: $(STAMP) ## the demonstration
	$(BIN)/decomposable demo

bench: $(STAMP) ## every benchmark, one after the other (files that start with _ are helpers)
	@for file in benchmarks/[!_]*.py; do \
	  if [ -e "$$file" ]; then echo "== $$file"; $(BIN)/python "$$file" || exit 1; fi; \
	done

clean: ## remove .venv, caches, builds and the demonstration's output
	rm -rf .venv build dist demo-out browser-out src/*.egg-info laboratory/src/*.egg-info laboratory/build edge/build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests laboratory -name __pycache__ -type d -prune -exec rm -rf {} +
