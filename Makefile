# Two commands are all a user needs: `make demo` and `make test`. Both build .venv first.
.PHONY: setup demo test test-slow test-nanotron test-torchtitan check format clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

setup: $(READY)

# torch is pinned to a release whose wheel needs no CUDA libraries, so that a first try is quick;
# Open MPI comes as a wheel too.
$(READY): pyproject.toml Makefile
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ReCoVer needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/recover demo

test: $(READY)  # a file's tests stay together: they share the jobs that their fixtures run
	$(BIN)/python -m pytest -n 2 --dist loadfile --durations 15

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

# Frameworks that need an environment of their own; not part of `test`.
NANOTRON := .venv-nanotron

test-nanotron: $(NANOTRON)/.ready
	$(NANOTRON)/bin/python -m pytest tests_nanotron

$(NANOTRON)/.ready: pyproject.toml Makefile
	test -x $(NANOTRON)/bin/python || $(PYTHON) -m venv $(NANOTRON)
	$(NANOTRON)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(NANOTRON)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[nanotron]' pytest pytest-timeout
	touch $@

TITAN := .venv-torchtitan

test-torchtitan: $(TITAN)/.ready
	$(TITAN)/bin/python -m pytest tests_torchtitan

$(TITAN)/.ready: pyproject.toml Makefile
	test -x $(TITAN)/bin/python || $(PYTHON) -m venv $(TITAN)
	$(TITAN)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.14.1
	$(TITAN)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[torchtitan]' pytest pytest-timeout
	touch $@

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_tidy.py

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(NANOTRON) $(TITAN) runs .mypy_cache .pytest_cache .ruff_cache .hypothesis
