# Python 3.11 and make are all it needs: `make demo` shows a run, `make test-fast` and `make test` check the code.
# The demo installs the program only; checks and tests install what they need on top.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_ARGS ?= --regions 4 --seconds 90
PROGRAM := $(VENV)/.program
TOOLS := $(VENV)/.tools
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
# A file's tests share what is costly, so they stay with one worker. The order of files is that of tests/conftest.py.
PARALLEL := --dist loadfile --no-loadscope-reorder --numprocesses
# Bytecode is kept, also where the environment forbids it: pytest rewrites 38,000 lines of tests.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

.PHONY: demo test-fast test test-all test-rest test-system check bench format clean

demo: $(PROGRAM)
	$(BIN)/diloco-node demo $(DEMO_ARGS)

# Everything below the end-to-end tier and the simulated worlds: four minutes. Half of it is waiting, so three workers
# share two cores.
test-fast: $(STAMP)
	$(PYTEST) $(PARALLEL) 3 -m 'not e2e and not world and not seeds and not system' $(PYTEST_ARGS)

# The gate: with daemons and learners in processes of their own. Each promise has a test here; what takes minutes more,
# or shows it once more on other seeds, is for `make test-all`.
test: $(STAMP)
	$(PYTEST) $(PARALLEL) 3 -m 'not seeds and not system and not long' $(PYTEST_ARGS)

# The learner's tests once more on devices in software (tests/kit/fakecuda), and what these find. g++ builds them once.
.PHONY: test-device
test-device: $(TOOLS)
	$(PYTEST) $(PARALLEL) 2 -p tests.kit.fakecuda.plugin -m 'not e2e and not seeds and not system' $(PYTEST_ARGS) \
	  tests/learner tests/kit/test_fakecuda.py

test-all: test-device test-rest

# Every other test: first all that may run beside others, then what wants the machine for itself, from the files that
# say so.
test-rest: $(STAMP)
	$(PYTEST) $(PARALLEL) 3 -m 'not alone' --hypothesis-profile thorough $(PYTEST_ARGS)
	$(PYTEST) -m alone $(PYTEST_ARGS) $$(grep -rl --include='*.py' 'mark\.alone' tests)

# What measures links or needs root, one at a time: namespaces and containers. .ci/system installs what they need; what a
# machine lacks is skipped with the reason.
test-system: $(STAMP)
	$(PYTEST) -m system $(PYTEST_ARGS)

test-rest test-system: export DILOCO_CI_DOCKER ?= 1

# mypy takes as long as the rest together: `make --jobs 2 check` does both at once. .ci/run does `types` beside `test`.
.PHONY: style types
check: style types

style: $(TOOLS) docs
	$(BIN)/ruff format --check diloco_node tests benchmarks examples
	$(BIN)/ruff check diloco_node tests benchmarks examples
	$(BIN)/lint-imports
	$(PYTEST) --quiet tests/test_language.py tests/test_names.py

types: $(TOOLS)
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python benchmarks/codec.py
	$(BIN)/python benchmarks/peers.py --links loopback

# The site in site/. Strict: a broken link, a missing anchor or a page outside the navigation fails.
.PHONY: docs
docs: $(TOOLS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

format: $(TOOLS)
	$(BIN)/ruff format diloco_node tests benchmarks examples
	$(BIN)/ruff check --fix diloco_node tests benchmarks examples

# torch is named with its version: without it pip would look at newer builds that bring gigabytes of CUDA. pip shows its
# progress: the first time takes a minute or two.
$(PROGRAM): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0 --editable .
	touch $(PROGRAM)

$(TOOLS): $(PROGRAM)
	$(PIP) --quiet --editable '.[dev,docs,store]'
	touch $(TOOLS)

# The libraries that only tests use, beside what runs already: without a look at the program's own installation.
$(STAMP): $(TOOLS)
	$(BIN)/python -c "import tomllib; extras = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; \
	  print(*(need for name in 'hf peft lightning titan'.split() for need in extras[name]), sep='\n')" \
	  > $(VENV)/.needs
	$(PIP) --quiet --requirement $(VENV)/.needs
	touch $(STAMP)

# Wheel and sdist in dist/. tests/deploy/test_release.py builds them the same way, installs the wheel in a clean environment and
# runs it.
.PHONY: dist
dist: $(STAMP)
	$(BIN)/python -m build --outdir dist .

clean:
	rm -rf $(VENV) runs build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
