# rtp: `make run` serves a small real model on this machine, `make test` runs the tests. Both set up
# everything they need in .venv first.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# A plain CPU build of torch. On a machine whose index has only CUDA builds:
#   make run TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export HF_HUB_OFFLINE := 1

.DEFAULT_GOAL := help
.PHONY: help install run format lint types test slow clients soak fidelity bench check clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints/cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "rtp needs Python 3.11 or newer as $(PYTHON) (PYTHON=python3.12 make ... picks another)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "rtp needs Python's venv module: apt-get install python3-venv"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing rtp and what it needs into $(VENV) (about 1.5 GB, once) ..."
	@$(BIN)/pip install --quiet -c constraints/cpu.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e '.[dev]'
	@$(BIN)/python -c 'import rtp.master'  # compiles the kernels, once
	@touch $(STAMP)

install: $(STAMP) ## Make .venv with all that rtp and its tests need

run: $(STAMP) ## Serve smollm2-135m with a Master and two workers on http://127.0.0.1:8000
	@exec $(BIN)/python -m rtp.local --workers 2 $(ARGS)

format: $(STAMP) ## Format the code
	$(BIN)/ruff format rtp tests bench traces
	$(BIN)/ruff check --fix --quiet rtp tests bench traces

lint: $(STAMP) ## Check format and lint
	$(BIN)/ruff format --check rtp tests bench traces
	$(BIN)/ruff check rtp tests bench traces

types: $(STAMP) ## Check types
	$(BIN)/mypy

test: $(STAMP) ## The fast tests
	$(BIN)/pytest -m 'not slow and not clients and not soak and not gpu' -n 2 --dist loadgroup $(ARGS)

slow: $(STAMP) ## The slow tests that CI runs after the fast ones
	$(BIN)/pytest -m 'slow and not clients and not soak and not gpu' $(ARGS)

clients: $(STAMP) ## Outside clients against a real server (lm-eval, aiperf, guidellm in their own venvs)
	$(BIN)/python -m tests.clients.setup
	$(BIN)/pytest -m clients --timeout 1800 $(ARGS)

soak: $(STAMP) ## Long runs: 100,000 fault seeds on all cores, 10 minutes of mixed traffic with disconnects
	$(BIN)/pytest -m soak --timeout 7200 -s $(ARGS)

fidelity: $(STAMP) ## Whether a simulated replay tells what two real workers do; ten quiet minutes
	$(BIN)/python -m bench.fidelity $(ARGS)

bench: $(STAMP) ## Benchmarks; each prints its ratio to a peer first
	$(BIN)/python -m bench.engine $(ARGS)

check: lint types test ## What a commit must pass

clean: ## Remove what the build made
	rm -rf $(VENV) .hypothesis .mypy_cache .ruff_cache
