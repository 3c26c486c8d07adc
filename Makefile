# Each target sets itself up: a virtual environment in .venv, installed under constraints.txt.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# All tests, a process a core (at most four: each takes about 1 GB). PYTEST_ARGS of your own replace this: one process.
PYTEST_ARGS ?= --numprocesses logical --maxprocesses 4 --dist loadfile

.PHONY: demo test check size clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "retime needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python -m retime.recipes experiment=demo

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/typed
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --target build/typed .
	cd build/typed && MYPYPATH=. ../../$(BIN)/mypy --config-file ../../pyproject.toml -p retime

# Lines of each room, beside what pyproject.toml allows.
size:
	$(PYTHON) tests/support/size.py

clean:
	rm -rf $(VENV) build dist *.egg-info outputs multirun
