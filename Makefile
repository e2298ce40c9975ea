# make demo: train a small Llama through the fused loss   make test: all tests   make lint: ruff
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := $(shell find src setup.py pyproject.toml constraints-dev.txt -type f -not -path '*/__pycache__/*' -not -path '*.egg-info/*')

.PHONY: demo test lint clean
.DEFAULT_GOAL := test

$(VENV)/.dependencies: pyproject.toml constraints-dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q torch==2.13.0
	$(BIN)/python -m pip install -q -c constraints-dev.txt '.[cu13,dev]'
	touch $@

# A real install, not an editable one: Liger finds the backend through a file the wheel puts into its folder.
$(VENV)/.installed: $(VENV)/.dependencies $(SOURCES)
	$(BIN)/python -m pip install -q --no-deps --force-reinstall .
	touch $@

demo: $(VENV)/.installed
	$(BIN)/python examples/finetune_tiny_llama.py

# Two files at a time; a process each does with one thread.
test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/.dependencies
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) build dist src/*.egg-info
