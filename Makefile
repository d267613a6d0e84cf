# Every target makes its own .venv when there is none; `make PYTHON=python3.12 test` chooses the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# As many workers as cores, at most four: each holds a JAX runtime.
PYTEST_ARGS ?= -n logical --maxprocesses 4 --dist loadfile
# Compilations are alone each: a worker that is done takes some of another's.
AOT_ARGS ?= -n logical --maxprocesses 4 --dist worksteal --durations 10

.PHONY: demo demo-long test test-slow test-aot test-eval lint clean

# The tests bring compilers of chips that may not be here, and JAX would complain of each.
ACCELERATORS := $(wildcard /dev/nvidia[0-9]* /dev/accel[0-9]* /dev/vfio/[0-9]* /dev/dxg)
demo demo-long: export JAX_PLATFORMS := $(or $(JAX_PLATFORMS),$(if $(ACCELERATORS),,cpu))

demo: $(VENV)/.base
	$(BIN)/python demo/run.py

demo-long: $(VENV)/.base
	$(BIN)/python demo/run.py --long

test: $(VENV)/.test
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest $(PYTEST_ARGS)

test-slow: $(VENV)/.test
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest $(PYTEST_ARGS) -m slow

test-aot: $(VENV)/.aot
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest $(AOT_ARGS) -m aot

test-eval: $(VENV)/.eval
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest tests/engine/http/test_lm_eval.py

lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV) .cache build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "swiftkv-jax needs Python 3.11 or later; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

# One stamp per set of packages, so that a second run installs nothing.
$(VENV)/.base: pyproject.toml | $(BIN)/python
	$(PIP) --editable .
	touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/python
	$(PIP) --editable '.[test,aot]' || $(PIP) --editable '.[test]'  # where there are no compilers, their tests skip
	touch $@ $(VENV)/.base

$(VENV)/.aot: pyproject.toml | $(BIN)/python
	$(PIP) --editable '.[test,aot]'
	touch $@ $(VENV)/.test $(VENV)/.base

$(VENV)/.eval: pyproject.toml | $(BIN)/python
	$(PIP) --editable '.[test,eval]'
	touch $@ $(VENV)/.test $(VENV)/.base
