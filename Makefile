# Every target sets up what it needs. Variables: VENV (where the environment goes), PYTHON (which interpreter makes it),
# TORCH (a pip requirement for torch, for a CUDA or other build), RUN (where the demo's results go).
VENV ?= .venv
PYTHON ?=
TORCH ?=
RUN ?= runs/demo

export VENV PYTHON TORCH

.PHONY: help venv demo test test-slow lint format

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile
	@echo "variables:      VENV=$(VENV) PYTHON=$(PYTHON) TORCH=$(TORCH) RUN=$(RUN)"

venv: ## create the environment $(VENV) from constraints.txt (instant if it is there)
	@bash scripts/make_venv.sh

demo: venv ## train a small PN transformer on the verses, decode, print BLEU (about 10 minutes on 2 cores)
	@bash scripts/demo.sh --run "$(RUN)"

# A worker for each core, each taking whole files, so that what the tests of a file share is made once.
PYTEST = "$(VENV)/bin/python" -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile

test: venv ## run the tests
	@$(PYTEST) -m "not slow"

test-slow: venv ## run the slow tests too
	@$(PYTEST)

lint: venv ## check style: ruff and shellcheck
	@"$(VENV)/bin/ruff" check .
	@"$(VENV)/bin/ruff" format --check .
	@"$(VENV)/bin/shellcheck" -x -P SCRIPTDIR .ci/run scripts/*.sh scripts/lib/*.sh

format: venv ## let ruff format the Python files
	@"$(VENV)/bin/ruff" format .
	@"$(VENV)/bin/ruff" check --fix .
