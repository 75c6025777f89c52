# Two commands do everything on a machine with Python 3.11 and make: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_ARGS ?= --regions 4 --seconds 90
STAMP := $(VENV)/.installed

.PHONY: demo test check e2e bench format clean

demo: $(STAMP)
	$(BIN)/diloco-node demo $(DEMO_ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(STAMP) docs
	$(BIN)/ruff format --check diloco_node tests benchmarks
	$(BIN)/ruff check diloco_node tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python benchmarks/codec.py
	$(BIN)/pip install --quiet --constraint constraints.txt '.[bench]'
	$(BIN)/python benchmarks/round.py

# The site in site/. Strict: a broken link, a missing anchor or a page outside the navigation fails.
.PHONY: docs
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

format: $(STAMP)
	$(BIN)/ruff format diloco_node tests benchmarks
	$(BIN)/ruff check --fix diloco_node tests benchmarks

# torch is named with its version here too: without it pip would look at newer builds that bring gigabytes of CUDA.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,docs]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) runs build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
