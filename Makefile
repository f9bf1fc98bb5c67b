# Every target sets up what it needs. Variables: VENV, PYTHON and TORCH (scripts/make_venv.sh explains them), and RUN
# (where the demo's results go).
VENV ?= .venv
PYTHON ?=
TORCH ?=
RUN ?= runs/demo

export VENV PYTHON TORCH

.PHONY: help venv demo test test-all test-machines test-pythons docs lint format

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile
	@echo "variables:         VENV=$(VENV) PYTHON=$(PYTHON) TORCH=$(TORCH) RUN=$(RUN)"

venv: ## create the environment $(VENV) from constraints.txt (instant if it is there)
	@bash scripts/make_venv.sh

demo: venv ## train a small PN transformer on the verses, decode, print BLEU (about 7 minutes on 2 cores)
	@bash scripts/pn reproduce demo --run "$(RUN)"

# A worker for each core, each taking whole files, so that what the tests of a file share is made once.
IN_PARALLEL = --numprocesses auto --maxprocesses 8 --dist loadfile
PYTEST = "$(VENV)/bin/python" -m pytest $(IN_PARALLEL)

test: venv ## run the tests
	@$(PYTEST) -m "not slow and not ci"

test-all: venv ## run the tests and the slow ones
	@$(PYTEST)

test-machines: venv ## run the numeric tests as every kind of processor does (more than half an hour)
	@"$(VENV)/bin/python" -m tests.machines $(IN_PARALLEL)

# Only the norms and the models, in one environment for each Python: $(VENV)-3.11 and so on.
test-pythons: ## run a short selection of the tests with each of Python 3.11, 3.12 and 3.13 that is installed
	@for version in 3.11 3.12 3.13; do \
	    "python$$version" --version >/dev/null 2>&1 || { echo "python$$version is not installed"; continue; }; \
	    VENV="$(VENV)-$$version" PYTHON="python$$version" bash scripts/make_venv.sh && \
	    "$(VENV)-$$version/bin/python" -m pytest -q -m "not slow" tests/norms tests/models || exit 1; \
	done

docs: venv ## build the documentation in site/ (installs mkdocs first)
	@"$(VENV)/bin/python" -c 'import ipykernel, latex2mathml, material, mkdocstrings, nbclient' 2>/dev/null || \
	    "$(VENV)/bin/python" -m pip install --quiet -c constraints.txt \
	        ipykernel latex2mathml mkdocs-material 'mkdocstrings[python]' nbclient
	@NO_MKDOCS_2_WARNING=1 "$(VENV)/bin/python" -m mkdocs build --strict

lint: venv ## check style and floors: ruff, import-linter, shellcheck
	@"$(VENV)/bin/ruff" check .
	@"$(VENV)/bin/ruff" format --check .
	@"$(VENV)/bin/lint-imports"
	@"$(VENV)/bin/shellcheck" .ci/run scripts/pn scripts/*.sh benchmarks/*.sh

format: venv ## let ruff format the Python files
	@"$(VENV)/bin/ruff" format .
	@"$(VENV)/bin/ruff" check --fix .
