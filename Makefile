PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-
TRACES ?=
OUT ?= replay-report

.PHONY: replay test lint slow clean

$(STAMP)run: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable .
	touch $@

$(STAMP)dev: pyproject.toml | $(STAMP)run
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

replay: $(STAMP)run
	$(BIN)/python scripts/replay_traces.py --out=$(OUT) $(if $(TRACES),--traces=$(TRACES)) $(ARGS)

test: $(STAMP)dev
	$(BIN)/python -m pytest -n 2 --dist loadscope -m "not slow" $(ARGS)

slow: $(STAMP)dev
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: $(STAMP)dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(OUT)
