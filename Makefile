# make test | test-all | test-versions | test-targets | lint | docs | demo | studies | gpu | zoo | clean    Each sets up .venv first, when it is missing or out of date.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.stamp

# Processes that share the tests; a test with ranks of its own starts more.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

# One thread each: worker processes share few cores, and sums come out in the same order every time.
export OMP_NUM_THREADS := 1
# Compiled files are kept, whatever the shell says: tests are many processes, and each would compile everything again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup test test-all test-versions test-oldest test-targets lint docs demo studies gpu zoo clean

setup: $(STAMP)

# Always with the constraints: an open torch range would fetch a newer build of several gigabytes.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test,dev,docs]'
	touch $@

test: $(STAMP)
	$(PYTEST)

test-all: $(STAMP)
	$(PYTEST) -m ""

# A slice of the tests on the oldest and the newest torch, in environments of their own (build/versions, gigabytes).
test-versions:
	$(PYTHON) tests/versions.py

test-oldest:
	$(PYTHON) tests/versions.py --smoke 2.11.0

# The trainers' own parsers on what is exported to them, in environments of their own (.venvs, gigabytes); or some:
# make test-targets TARGETS=torchtitan
test-targets: $(STAMP)
	$(BIN)/python tests/targets/own_code/run.py $(TARGETS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

# The reference of the public names, from their docstrings: build/docs/index.html. A warning is an error.
docs: $(STAMP)
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs/reference build/docs

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# Each script with a main() in examples/studies draws docs/studies/NAME.svg: at most fifteen minutes on two cores.
studies: $(STAMP)
	for study in $$(grep -l '^def main' examples/studies/*.py); do \
	    echo "== $$study"; \
	    $(BIN)/python $$study docs/studies/$$(basename $$study .py).svg || exit 1; \
	done

# The first hour on GPUs (docs/guides/gpus.md): checks and times as one table; says so where there is no GPU.
gpu: $(STAMP)
	$(BIN)/python benchmarks/first_hour.py

# What is made of some 200 families of models: docs/zoo.md. About half an hour; goes on where it was broken off.
zoo: $(STAMP)
	$(BIN)/python benchmarks/families.py
	$(BIN)/python benchmarks/families.py --table docs/zoo.md

clean:
	rm -rf .venv .venvs build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
