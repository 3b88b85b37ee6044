# `make train` and `make test` do all set-up: they create .venv, install the dependencies and write a
# stamp file, so that a second run installs nothing and an interrupted first run resumes.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory --no-builtin-rules
# With this variable each of about a hundred processes would compile this package and its tests again.
unexport PYTHONDONTWRITEBYTECODE

# From 0.18 on, Megatron's training program needs Python 3.12; without it, tests of that program are skipped.
PYTHON ?= $(shell for p in python3.12 $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python); do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$p && exit; \
  done; echo python3)
# For the oldest supported releases, in a second environment: Python 3.11 or newer.
PYTHON_OLDEST ?= python3
# The torch requirement that pip installs into an environment without torch.
TORCH ?= torch==2.13.0
# The releases of Megatron-core in both environments.
MCORE ?= 0.19.2
MCORE_OLDEST ?= 0.16.1
# Processes of the CPU test run, three for two cores, since ranks wait for each other; and of the GPU
# test run, whose processes share the GPUs.
JOBS ?= 3
GPU_JOBS ?= $(shell expr `nproc` / 2)
CONFIG ?= configs/cpu/gpt_pp2_vpp2_cpu.yaml

, := ,
VENV := .venv
VENV_OLDEST := .venv-oldest
VENV_RL := .venv-rl
PIP_QUIET := -m pip --disable-pip-version-check -qq
# Python compiles modules at their first import; only a third of the installed ones are ever imported.
PIP_INSTALL := $(PIP_QUIET) install --no-compile
# A process without tests takes over some of another's, so that all processes end together.
PYTEST := -m pytest -q -n $(JOBS) --dist worksteal

.PHONY: help train test test-slow test-rl test-all test-gpu lint docs pictures dist clean
.DEFAULT_GOAL := help

help: ## Show this
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|' \
	  || grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST)
	@echo "  Variables: PYTHON=$(PYTHON) TORCH=$(TORCH) MCORE=$(MCORE) JOBS=$(JOBS) CONFIG=$(CONFIG)"

train: $(VENV)/.installed ## Train a tiny GPT through a pipeline on this CPU
	@$(VENV)/bin/chunkgraph train $(CONFIG)

# Tests marked `every_release` run with few cases here; with all of them, and in both environments, in test-slow.
test: ## Lint, types, unit tests, and one job of each feature; needs no GPU
	@$(MAKE) -j2 lint $(VENV)/.compiled
	@echo "== tests (megatron-core $(MCORE))"
	@$(VENV)/bin/python $(PYTEST) -m "not slow"

test-slow: $(VENV)/.installed $(VENV_OLDEST)/.installed ## Larger jobs, and the oldest releases; needs no GPU
	@$(VENV)/bin/python $(PYTEST) -m "slow or every_release"
	@$(VENV_OLDEST)/bin/python $(PYTEST) -m "every_release or not (megatron or slow)"

test-rl: $(VENV_RL)/.installed ## verl's own engine with graphs, in an environment with verl; needs no GPU
	@$(VENV_RL)/bin/python -m pytest -q tests/rl/test_verl.py

test-all: ## Everything that needs no GPU, as a release runs it
	@$(MAKE) test
	@$(MAKE) test-slow
	@$(MAKE) test-rl

test-gpu: $(VENV)/.installed ## The tests that need GPUs; fails where there is none
	@# In order: the tests that need the most GPUs run first.
	@CHUNKGRAPH_REQUIRE_GPU=1 $(VENV)/bin/python -m pytest -q -n $(GPU_JOBS) --dist load \
	  --maxschedchunk 1 --durations 0 -m "gpu or multigpu"

# The site links to where this clone came from, if that is a web address.
REPOSITORY_URL ?= $(shell git remote get-url origin 2>/dev/null | sed -n 's|^git@\([^:]*\):|https://\1/|; s|\.git$$||; /^https:/p')

docs: $(VENV)/.docs ## The documentation as a site in site/; fails for a broken link
	@NO_MKDOCS_2_WARNING=1 REPOSITORY_URL="$(REPOSITORY_URL)" $(VENV)/bin/mkdocs build --strict --quiet

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
	@rm -rf $(VENV) $(VENV_OLDEST) $(VENV_RL) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache \
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

# $(call install,folder,python,extras,release): the package, and Megatron-core with what its training
# program imports. The metadata of newer releases asks for Python 3.12; megatron.core runs on 3.11.
define install
$(call make_venv,$(1),$(2)); \
echo "== $(1): installing chunkgraph[$(3)] and megatron-core $(4)"; \
$(1)/bin/python $(PIP_INSTALL) -e '.[$(3)]' packaging psutil tensorboard; \
$(1)/bin/python $(PIP_INSTALL) --no-deps --ignore-requires-python megatron-core==$(4)
endef

$(VENV)/.installed: pyproject.toml
	@$(call install,$(VENV),$(PYTHON),dev$(,)plot,$(MCORE))
	@touch $@

$(VENV_OLDEST)/.installed: pyproject.toml
	@$(call install,$(VENV_OLDEST),$(PYTHON_OLDEST),test,$(MCORE_OLDEST))
	@touch $@

# verl and what its Megatron engine imports, beside the packages of the first environment.
$(VENV_RL)/.installed: $(VENV)/.installed tests/rl/verl.txt
	@echo "== $(VENV_RL): installing verl"
	@$(VENV)/bin/python -m venv --clear $(VENV_RL)
	@$(VENV)/bin/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
	  > `$(VENV_RL)/bin/python -c 'import site; print(*site.getsitepackages())'`/first.pth
	@$(VENV_RL)/bin/python $(PIP_INSTALL) --no-deps -r tests/rl/verl.txt
	@touch $@

# Compile what tests import once; processes that start together would each compile all of it. Errors are
# ignored here, since the test run reports them.
$(VENV)/.compiled: $(VENV)/.installed
	@echo "== $(VENV): compiling what tests import"
	@$(VENV)/bin/python -m pytest --collect-only -q >/dev/null 2>&1 || true
	@touch $@
