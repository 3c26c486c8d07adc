# Each target sets itself up: a virtual environment in .venv, installed under constraints.txt.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# A process a core (at most four: each takes about 1 GB). PYTEST_ARGS of your own replace this: one process.
SHARED := --numprocesses logical --maxprocesses 4 --dist loadfile
PYTEST_ARGS ?= $(SHARED) -m "not long"
# Tests start Python many times, and each time would compile retime anew: 0.8 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all check docs wheel release-check matrix size clean

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

# What `make test` leaves out: rows, random models and signals beside those that run each line of code once, long tests of
# several ranks, whole recipes.
test-all: $(STAMP)
	$(BIN)/python -m pytest $(SHARED) -m long

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/typed
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --target build/typed .
	cd build/typed && MYPYPATH=. ../../$(BIN)/mypy --config-file ../../pyproject.toml -p retime

# The documentation site, without a warning, and looked at in a browser if there is one; its front page is
# outputs/site/index.html.
docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	rm -rf outputs/site
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -d outputs/doctrees -c docs . outputs/site
	$(BIN)/python -m pytest -q tests/test_documentation.py -k sideways

# dist/: the source archive, and from it the wheel, with its C++ parts compiled for the torch of this environment.
wheel: $(STAMP)
	rm -rf build dist
	$(BIN)/python -m build --no-isolation > /dev/null

# What a release has to be; with RELEASE_ARGS=--borrow the environment in which the wheel is tried takes what it depends on from here.
release-check: wheel
	$(BIN)/python tests/support/release.py $(RELEASE_ARGS)

# The smoke set on each combination of versions, which it writes into docs/versions.md. Downloads gigabytes.
matrix: $(STAMP)
	$(BIN)/python -m pip install --quiet nox uv
	PATH="$(abspath $(BIN)):$$PATH" nox

# Lines of each room, beside what pyproject.toml allows.
size:
	$(PYTHON) tests/support/size.py

clean:
	rm -rf $(VENV) build dist *.egg-info outputs multirun
