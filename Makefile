# Foretrace: every target works from a bare clone with Python 3.11 or later (`make PYTHON=python3.12 ...`).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BROWSER := $(VENV)/.browser

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup test test-slow lint format demo llama bench docs clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 10

setup: $(STAMP) $(BROWSER)  ## install the project and everything its tests need into .venv

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(f"Python 3.11 or later is needed, this is {v}; try make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard src/foretrace/formats/*.c src/foretrace/formats/*/*.c src/foretrace/simulate/*/*.c) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,llama,pandas,polars,dev]'
	@touch $@

# Chromium is for the tests that open a report in a browser; without it they are skipped.
$(BROWSER): | $(BIN)/python
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  echo 'installing chromium and its driver'; \
	  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium chromium-driver; } >$(VENV)/browser.log 2>&1 \
	    || echo 'chromium could not be installed (see $(VENV)/browser.log): browser tests will be skipped'; \
	else echo 'chromium or chromedriver is missing: browser tests will be skipped'; fi
	@touch $@

test: setup  ## run the tests (make test ARGS="-k kineto")
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-slow: setup  ## run the tests that take minutes
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: setup  ## check style, types and the import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: setup  ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: setup  ## train a small model in two processes, then look at its traces
	$(BIN)/python demo/run.py

llama: setup  ## train a million parameters on a novel, then look at the model and its trace
	$(BIN)/python demo/llama.py $(ARGS)

bench: setup  ## measure against the peers, into docs/benchmarks.md
	$(BIN)/python benchmarks/run.py

docs: setup  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site

clean:  ## remove .venv and everything that was built
	rm -rf $(VENV) site build dist demo/out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests demo -name __pycache__ -type d -prune -exec rm -rf {} +
