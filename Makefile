# Everything a developer does. `make run` and `make test` set up what they need.

PYTHON ?= python3
# The CPU build of torch. Where the package index offers only CUDA builds under this version, name PyTorch's own index:
#   make setup PIP_TORCH="--index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0
PIP_TORCH ?=
MODEL ?= SmolLM2-135M-Instruct

VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.setup
KERNEL_SOURCES := $(wildcard setup.py kernels/cpu/*.cpp kernels/cpu/*.h kernels/cpu/src/*)

.PHONY: setup run test test-all test-kernels test-kernels-interpreted test-kernels-compiled test-compose check format protos docs clean

setup: $(SETUP)

$(SETUP): pyproject.toml $(KERNEL_SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(PIP_TORCH) $(TORCH)
	$(BIN)/pip install --quiet --editable '.[all,dev]'
	touch $@

run: setup  ## The whole stack on the default model, one answer streamed, then serving until Ctrl-C.
	$(BIN)/octavo serve $(MODEL) --demo

test: setup
	$(BIN)/python -m pytest -m "not slow and not gpu and not compose" $(ARGS)

test-all: setup
	$(BIN)/python -m pytest -m "not gpu and not compose" $(ARGS)

# Triton's interpreter and its compiler cannot share a process. ARGS="-k matrix" and the like choose among the tests.
test-kernels: test-kernels-interpreted test-kernels-compiled  ## The Triton kernels without a GPU, every case.

KERNEL_TESTS := $(addprefix tests/kernels/test_kernel_,$(addsuffix .py,blocks dense attention invariance sampling))
test-kernels-interpreted: setup
	KERNEL_JOB=interpreted TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -v -m "slow or not slow" \
		tests/kernels/triton/interpreted $(KERNEL_TESTS) $(ARGS)

test-kernels-compiled: setup
	KERNEL_JOB=compiled OMP_NUM_THREADS=1 $(BIN)/python -m pytest -v -m "slow or not slow" \
		tests/kernels/triton/compiled $(ARGS)

test-compose: setup  ## The containers, for real; as root on Debian or Ubuntu, for it may install an engine.
	$(BIN)/python -m pytest -m compose tests/compose $(ARGS)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/python tools/gen_protos.py --check
	$(BIN)/python -m octavo.checks.docs --check
	$(BIN)/python tools/gen_metrics_docs.py --check

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

protos: setup  ## Regenerates the stubs under octavo/v1 and octavo/internal.
	$(BIN)/python tools/gen_protos.py

docs: setup  ## Regenerates docs/troubleshooting.md from the check registry and docs/metrics.md from the catalogues.
	$(BIN)/python -m octavo.checks.docs
	$(BIN)/python tools/gen_metrics_docs.py

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
