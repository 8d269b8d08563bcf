# Two commands from a fresh clone: `make demo` and `make test`. Each makes the environment it needs.
PYTHON ?= python3
VENV ?= .venv
VENV_COMPAT ?= .venv-compat
COMPAT_TRANSFORMERS ?= 5.17.0

# one thread a process: two run side by side
TEST_ENV = OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
PYTEST = $(TEST_ENV) $(VENV)/bin/python -m pytest -q
PYTEST_COMPAT = $(TEST_ENV) $(VENV_COMPAT)/bin/python -m pytest -q
# two at a time, each free place taken by the next; the output of each appears in one piece when it
# ends, and a failure of one does not stop the others
SIDE_BY_SIDE = $(MAKE) --no-print-directory --jobs 2 --keep-going --output-sync=target

.DEFAULT_GOAL := help
.PHONY: help demo test test-matrix test-kernels test-engine test-rest compat compat-device compat-engine
.PHONY: mutants mutants-kernels mutants-rest archs archs-cuda archs-rocm deep deep-matrix deep-engine deep-families release gpu bench figure lint types format clean

help:  ## list the commands
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

demo: $(VENV)/.stamp  ## continuous batching of a real model, beside transformers' own
	$(VENV)/bin/python -m bench.demo

test: $(VENV)/.stamp  ## every test that needs no accelerator, in minutes
	@echo "kernels in Triton's interpreter and all other tests, side by side; results at the end"
	@$(SIDE_BY_SIDE) test-matrix test-kernels test-engine test-rest

# the interpreter is chosen when Triton is loaded, so these tests have a process of their own
MATRIX_TESTS = tests/kernels/test_matrix.py tests/kernels/test_edges.py
test-matrix: $(VENV)/.stamp
	$(PYTEST) $(MATRIX_TESTS)

test-kernels: $(VENV)/.stamp
	$(PYTEST) tests/kernels $(addprefix --ignore ,$(MATRIX_TESTS))

ENGINE_TESTS = tests/engine tests/service tests/compat tests/device tests/model tests/options tests/cli
test-engine: $(VENV)/.stamp
	$(PYTEST) $(ENGINE_TESTS)

test-rest: $(VENV)/.stamp
	$(PYTEST) tests $(addprefix --ignore ,tests/kernels $(ENGINE_TESTS))

compat: $(VENV_COMPAT)/.stamp  ## the device and engine tests under the oldest transformers supported
	@echo "device and engine tests under transformers $(COMPAT_TRANSFORMERS), side by side"
	@$(SIDE_BY_SIDE) compat-device compat-engine

compat-device: $(VENV_COMPAT)/.stamp
	$(PYTEST_COMPAT) tests/device tests/model tests/options

compat-engine: $(VENV_COMPAT)/.stamp
	$(PYTEST_COMPAT) tests/engine tests/service tests/compat

mutants: $(VENV)/.stamp  ## seed bugs one by one and see the tests catch each
	@$(SIDE_BY_SIDE) mutants-kernels mutants-rest

mutants-kernels: $(VENV)/.stamp
	$(PYTEST) -m mutants tests/kernels

mutants-rest: $(VENV)/.stamp
	$(PYTEST) -m mutants tests --ignore tests/kernels

archs: $(VENV)/.stamp  ## compile the kernels ahead of time for every architecture; 5 minutes
	@$(SIDE_BY_SIDE) archs-cuda archs-rocm

archs-cuda: $(VENV)/.stamp
	$(PYTEST) -m archs tests/kernels -k sm_

archs-rocm: $(VENV)/.stamp
	$(PYTEST) -m archs tests/kernels -k "not sm_"

deep: $(VENV)/.stamp  ## the matrix of kernels and the traced families in full, and make archs
	@$(SIDE_BY_SIDE) deep-matrix deep-engine deep-families archs-cuda archs-rocm

deep-matrix: $(VENV)/.stamp
	$(PYTEST) -m deep tests/kernels

deep-engine: $(VENV)/.stamp
	$(PYTEST) -m deep tests/engine

deep-families: $(VENV)/.stamp
	$(PYTEST) -m deep tests/device

release: $(VENV)/.stamp  ## build sdist and wheel, install the wheel alone, serve with it; a minute
	$(PYTEST) -m release tests/test_release.py

# needs no network: an environment made here before is used, else the machine's own Python
GPU_PYTHON ?= $(if $(wildcard $(VENV)/bin/python),$(VENV)/bin/python,$(PYTHON))
gpu:  ## check and time the kernels and serving on an accelerator, into one JSON file; 8 minutes
	$(GPU_PYTHON) -m bench.gpu

bench: $(VENV)/.stamp  ## time a step's host cost, attention, sampling and set-up on the CPU
	$(VENV)/bin/python -m bench.micro

figure: $(VENV)/.stamp  ## draw docs/serving.svg from what bench.serve --sweep measured
	$(VENV)/bin/python -m bench.report --figure

lint: $(VENV)/.stamp  ## ruff check and ruff format, nothing exempt
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.stamp  ## mypy over the package
	$(VENV)/bin/mypy

format: $(VENV)/.stamp  ## put the code in form
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:  ## remove what the commands made here; the cache of models stays
	rm -rf $(VENV) $(VENV_COMPAT) *.egg-info .pytest_cache .ruff_cache .hypothesis

# made again only when what it was made from changes
$(VENV)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[test,dev]'
	@touch $@

$(VENV_COMPAT)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV_COMPAT)
	sed 's/^transformers==.*/transformers==$(COMPAT_TRANSFORMERS)/' constraints.txt \
		> $(VENV_COMPAT)/constraints.txt
	$(VENV_COMPAT)/bin/python -m pip install --quiet --editable '.[test]' \
		--constraint $(VENV_COMPAT)/constraints.txt
	@touch $@
