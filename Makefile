# `make demo` and `make test` do all set-up from a bare clone with Python 3.11; the second time they start at once.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN     = $(VENV)/bin
DATA   ?= shapes
READY   = $(VENV)/.ready
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help install demo test test-all lint format clean

help:            ## show this list
	@grep -E '^[a-z-]+: .*##' Makefile | sed -E 's/^([a-z-]+):[^#]*## */  make \1\t/'

install: $(READY) ## create .venv and install everything (CPU)

$(READY): requirements/cpu.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v == (3, 11) else "error: Python %d.%d found, 3.11 wanted: make PYTHON=/path/to/python3.11" % v)'
	@echo "installing into $(VENV): $$(grep -c == requirements/cpu.txt) packages, about 4 GB, two to four minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --upgrade pip setuptools wheel
	@$(BIN)/python -m pip install -qq --no-deps --requirement requirements/cpu.txt
	@$(BIN)/python -m pip install -qq --no-deps --no-build-isolation --editable .
	@$(BIN)/python -c 'import torch' || { echo "error: torch does not import: point pip at PyTorch'\''s CPU wheels (PIP_EXTRA_INDEX_URL), then make clean install"; exit 1; }
	@touch $(READY)

demo: $(READY)   ## the whole ReaLVR job on two CPU cores, report in runs/demo/report.html (DATA=shapes|digits)
	$(BIN)/realvr demo --data $(DATA)

test: $(READY)   ## lint and the tests of CI (under 40 minutes on two cores)
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/python -m pytest -m "not slow"

test-all: $(READY) ## every test, the long ones too
	$(BIN)/python -m pytest

lint: $(READY)   ## ruff check and format check
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

format: $(READY) ## ruff fixes and formats
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

clean:           ## remove the virtual environment and build leftovers (runs stay)
	rm -rf $(VENV) build ./*.egg-info
