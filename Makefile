# `make train` and `make test` need nothing but Debian or Ubuntu, and root or sudo for the system packages.
.DEFAULT_GOAL := help
.PHONY: help setup train test lint bench clean

help:  ## What can be made
	@grep -hE '^[a-z]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 10

setup:  ## Install what is missing into .venv
	@./bootstrap.sh

train: setup  ## Train the quickstart agent end to end on this machine (about six minutes)
	.venv/bin/farmhand train examples/quickstart.toml

lint: setup  ## ruff, mypy --strict, import contracts
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

test: lint  ## Lint, then every test, with real processes and sandboxes
	.venv/bin/python -m pytest -q -n 2 --dist loadfile

bench: setup  ## Run the benchmarks and renew benchmarks/README.md
	.venv/bin/python -m benchmarks

clean:  ## Remove the virtual environment and the caches; runs/ stays
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
