# `make train` and `make test` do all set-up: they create .venv, install the dependencies and write a
# stamp file, so that a second run installs nothing and an interrupted first run resumes.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory --no-builtin-rules
# With this variable each of about a hundred processes would compile this package and its tests again.
unexport PYTHONDONTWRITEBYTECODE

# Python 3.11 or newer.
PYTHON ?= python3
# For the second environment: from 0.18 on, Megatron's training program needs Python 3.12. Without it
# the tests of that program are skipped.
PYTHON_MCORE ?= $(shell for p in python3.12 $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python) $(PYTHON); do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$p && exit; \
  done; echo $(PYTHON))
# The torch requirement that pip installs into an environment without torch.
TORCH ?= torch==2.13.0
# The second Megatron-core release, for the tests marked `megatron`.
MCORE ?= 0.19.2
# Processes of the CPU test run, three for two cores, since ranks wait for each other; and of the GPU
# test run, whose processes share the GPUs.
JOBS ?= 3
GPU_JOBS ?= $(shell expr `nproc` / 2)
CONFIG ?= configs/cpu/gpt_pp2_vpp2_cpu.yaml

VENV := .venv
VENV_MCORE := .venv-mcore-0.19
PIP_QUIET := -m pip --disable-pip-version-check -qq
# Python compiles modules at their first import; only a third of the installed ones are ever imported.
PIP_INSTALL := $(PIP_QUIET) install --no-compile
# A process without tests takes over some of another's, so that all processes end together.
PYTEST := -m pytest -q -n $(JOBS) --dist worksteal

.PHONY: help train test test-first test-slow test-all test-gpu lint docs pictures dist clean
.DEFAULT_GOAL := help

help: ## Show this
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|' \
	  || grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST)
	@echo "  Variables: PYTHON=$(PYTHON) PYTHON_MCORE=$(PYTHON_MCORE) TORCH=$(TORCH) MCORE=$(MCORE) JOBS=$(JOBS) CONFIG=$(CONFIG)"

train: $(VENV)/.installed ## Train a tiny GPT through a pipeline on this CPU
	@$(VENV)/bin/chunkgraph train $(CONFIG)

# Tests marked `megatron` run with the newest Megatron, in the second run. Those also marked
# `every_release` run with the oldest one too, in `test-slow`.
test: ## Lint, types, unit tests, and one job of each feature; needs no GPU
	@# The second environment, some gigabytes, is created during lint and tests in the first one.
	@$(MAKE) -j2 test-first $(VENV_MCORE)/.installed
	@echo "== tests marked megatron (megatron-core $(MCORE))"
	@$(VENV_MCORE)/bin/python $(PYTEST) -m "megatron and not slow"

test-first: lint $(VENV)/.compiled
	@echo "== tests (megatron-core of $(VENV))"
	@$(VENV)/bin/python $(PYTEST) -m "not megatron and not slow"

test-slow: $(VENV)/.installed $(VENV_MCORE)/.installed ## The longer tests that need no GPU: larger jobs
	@$(VENV)/bin/python $(PYTEST) -m "every_release or (slow and not megatron)"
	@$(VENV_MCORE)/bin/python $(PYTEST) -m "megatron and slow"

test-all: ## Everything that needs no GPU, as a release runs it
	@$(MAKE) test
	@$(MAKE) test-slow

test-gpu: $(VENV)/.installed ## The tests that need GPUs; fails where there is none
	@# In order: the tests that need the most GPUs run first.
	@CHUNKGRAPH_REQUIRE_GPU=1 $(VENV)/bin/python -m pytest -q -n $(GPU_JOBS) --dist load \
	  --maxschedchunk 1 --durations 0 -m "gpu or multigpu"

docs: $(VENV)/.docs ## The documentation as a site in site/; fails for a broken link
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

$(VENV)/.docs: $(VENV)/.installed pyproject.toml
	@$(VENV)/bin/python $(PIP_QUIET) install -e '.[docs]'
	@touch $@

pictures: $(VENV)/.installed ## Draw the pictures of the documentation again
	@$(VENV)/bin/python scripts/pictures.py

dist: $(VENV)/.installed ## Build and check what would be published, in dist/
	@rm -rf dist
	@$(VENV)/bin/python $(PIP_QUIET) install build twine
	@$(VENV)/bin/python -m build --outdir dist . > /dev/null
	@$(VENV)/bin/twine check --strict dist/*

lint: $(VENV)/.installed ## ruff, mypy and import-linter
	@echo "== ruff"
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/ruff format --quiet --check .
	@echo "== mypy"
	@$(VENV)/bin/mypy
	@echo "== import contracts"
	@$(VENV)/bin/lint-imports --no-logo

clean: ## Remove the environments, caches and build output
	@rm -rf $(VENV) $(VENV_MCORE) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache \
	  .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call make_venv,folder,python): a folder whose pip works, and torch in it.
define make_venv
if ! $(1)/bin/python -m pip --version >/dev/null 2>&1; then \
  $(2) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
    || { echo "error: $(2) is missing or older than 3.11; name another: make PYTHON=python3.12"; exit 2; }; \
  echo "== $(1): making the environment"; \
  $(2) -m venv --clear $(1) \
    || { echo "error: no environment could be made; on Debian: apt install python3-venv"; exit 2; }; \
fi
if ! $(1)/bin/python -c 'import torch; torch.ones(1)' >/dev/null 2>&1; then \
  echo "== $(1): installing $(TORCH) (about a minute)"; \
  : "--force-reinstall repairs an interrupted installation"; \
  $(1)/bin/python $(PIP_INSTALL) --force-reinstall $(TORCH); \
fi
endef

$(VENV)/.installed: pyproject.toml
	@$(call make_venv,$(VENV),$(PYTHON))
	@echo "== $(VENV): installing chunkgraph[megatron,dev,plot]"
	@$(VENV)/bin/python $(PIP_INSTALL) -e '.[megatron,dev,plot]'
	@touch $@

# $(call compile,folder,options): compile what tests import once; processes that start together would
# each compile all of it. Errors are ignored here, since the test run reports them.
define compile
echo "== $(1): compiling what tests import"; \
$(1)/bin/python -m pytest --collect-only -q $(2) >/dev/null 2>&1 || true
endef

$(VENV)/.compiled: $(VENV)/.installed
	@$(call compile,$(VENV))
	@touch $@

$(VENV_MCORE)/.installed: pyproject.toml
	@$(call make_venv,$(VENV_MCORE),$(PYTHON_MCORE))
	@echo "== $(VENV_MCORE): installing chunkgraph[test] and megatron-core $(MCORE)"
	@$(VENV_MCORE)/bin/python $(PIP_INSTALL) -e '.[test]'
	@# Its metadata asks for Python 3.12; megatron.core itself runs on 3.11.
	@$(VENV_MCORE)/bin/python $(PIP_INSTALL) --no-deps --ignore-requires-python megatron-core==$(MCORE)
	@# Further imports of its training program, and the logger.
	@$(VENV_MCORE)/bin/python $(PIP_INSTALL) packaging psutil tensorboard
	@$(call compile,$(VENV_MCORE),-m megatron)
	@touch $@
