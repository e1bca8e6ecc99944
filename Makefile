PYTHON ?= python3
VENV ?= .venv
AOT ?= .venv-aot
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-
TRACES ?=
OUT ?= replay-report

.PHONY: replay test golden mesh lint slow aot clean

$(STAMP)run: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable .
	touch $@

$(STAMP)dev: pyproject.toml | $(STAMP)run
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

# Apart from .venv: with these plugins there, every start of jax would look for a TPU and a GPU. The CUDA plugin is of the
# installed jax's version; its own dependencies are gigabytes that no compilation needs.
$(AOT)/.installed: pyproject.toml
	$(PYTHON) -m venv $(AOT)
	$(AOT)/bin/pip install --quiet --editable '.[dev,tpu]'
	version=$$($(AOT)/bin/python -c "import jax; print(jax.__version__)"); \
	$(AOT)/bin/pip install --quiet --no-deps jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version
	touch $@

replay: $(STAMP)run
	$(BIN)/python scripts/replay_traces.py --out=$(OUT) $(if $(TRACES),--traces=$(TRACES)) $(ARGS)

test: $(STAMP)dev
	$(BIN)/python -m pytest -n 2 --dist loadscope -m "not slow and not golden and not mesh and not aot" $(ARGS)

golden: $(STAMP)dev
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m golden $(ARGS)

mesh: $(STAMP)dev
	XLA_FLAGS=--xla_force_host_platform_device_count=8 $(BIN)/python -m pytest -n 2 -m mesh tests/parallel $(ARGS)

slow: $(STAMP)dev
	$(BIN)/python -m pytest -n 2 --dist loadscope -m slow $(ARGS)

aot: $(AOT)/.installed
	$(AOT)/bin/python -m pytest -n 2 -m aot tests/aot $(ARGS)

lint: $(STAMP)dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(AOT) $(OUT)
