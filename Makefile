# `make help` lists what there is.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := $(shell find src setup.py pyproject.toml constraints-dev.txt -type f -not -path '*/__pycache__/*' -not -path '*.egg-info/*')

.PHONY: help demo check test lint report clean
.DEFAULT_GOAL := test

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.dependencies: pyproject.toml constraints-dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q torch==2.13.0
	$(BIN)/python -m pip install -q -c constraints-dev.txt '.[cu13,dev]'
	touch $@

# A real install, not an editable one: Liger finds the backend through a file the wheel puts into its folder.
$(VENV)/.installed: $(VENV)/.dependencies $(SOURCES)
	$(BIN)/python -m pip install -q --no-deps --force-reinstall .
	touch $@

demo: $(VENV)/.installed ## train a small Llama through the fused loss, next to plain PyTorch
	$(BIN)/python examples/finetune_tiny_llama.py

check: $(VENV)/.installed ## run a small call on this machine and say which class answered
	$(BIN)/python -m liger_cutedsl --check

# Two files at a time; a process each does with one thread.
test: lint $(VENV)/.installed ## ruff, then all tests that need no GPU
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/.dependencies ## ruff: rules and format
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

report: $(VENV)/.installed ## write README's table, docs/figures.md and the plots from benchmark/results
	$(BIN)/python -m benchmark report

clean: ## remove the environment and what was built
	rm -rf $(VENV) build dist src/*.egg-info
