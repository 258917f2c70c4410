# Needs Python 3.11 or 3.12 and make; everything else goes into .venv in this folder.
#
#   make quickstart PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"
#   make test VENV=.venv-2.12 TORCH="torch==2.12.0"
#   make wheelhouse PYTHON_VERSION=3.12 PRESENT=present.txt   and, where there is no internet,
#   make gpu WHEELHOUSE=runs/wheelhouse LIMIT=540

# The first of these that is Python 3.11 or 3.12 makes .venv. Or name one: make test PYTHON=...
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	"$$p" -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))" 2> /dev/null \
	&& echo "$$p" && break; done)
# By exact version, so that it can be another build (CPU, CUDA) than PyPI's; when VENV is made.
TORCH ?= torch==2.13.0
# Handed to every `pip install`.
PIP_FLAGS ?=
# Processes that share the tests.
JOBS ?= 2

# Of `make wheelhouse`: Python and installed packages (pip list --format=freeze) of the other machine.
PYTHON_VERSION ?= 3.12
PRESENT ?= benchmarks/machines/cuda13_torch2.11_python3.12.txt
# Of `make gpu`: folder of wheels (none: .venv is used), seconds for all of it, parts by name, full or
# tiny sizes, KEY=VALUE ... of all configurations, folder of the results.
WHEELHOUSE ?=
LIMIT ?= inf
PARTS ?=
SIZE ?= full
KEYS ?=
OUTPUT ?= docs/benchmarks

# Another torch or Python takes another folder: make test-newer VENV=.venv-2.11 TORCH=torch==2.11.0
VENV := .venv
PY := $(VENV)/bin/python
PIP_INSTALL = $(PY) -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS)
# Many tests start processes of their own: one thread each, or they fight over the cores. They import
# the same files, which Python compiles once, also where the environment forbids to keep the result.
# A worker that has nothing left takes from the other: the runs of several processes come first.
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -n $(JOBS) --dist worksteal
DIGITS := runs/digits

.DELETE_ON_ERROR:
.PHONY: help quickstart test test-all test-newer lint wheelhouse gpu clean

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' $(MAKEFILE_LIST) | awk -F': ' '{printf "make %-12s %s\n", $$1, $$2}'

# Pack, pretrain, generate, report. A second run reuses what is there: pretraining is finished then.
quickstart: $(VENV)/core $(DIGITS)/data/.nv-meta/dataset.yaml ## real digits -> shards -> training -> pictures (about six minutes, no GPU)
	$(PY) recipes/pretrain_dit.py --config-file conf/dit_digits.yaml
	@printf 'a handwritten %s\n' $(foreach digit,zero one two three four five six seven eight nine,\
		$(digit) $(digit) $(digit) $(digit) $(digit) $(digit) $(digit) $(digit)) > $(DIGITS)/prompts.txt
	$(PY) recipes/generate_dit.py --checkpoint_path $(DIGITS)/edm --prompts_file $(DIGITS)/prompts.txt --output_dir $(DIGITS)/samples
	$(PY) -m dit.report $(DIGITS)/edm --samples_dir $(DIGITS)/samples --output $(DIGITS)/report.html

$(DIGITS)/data/.nv-meta/dataset.yaml: | $(VENV)/core
	$(PY) -m data_prep digits --output_dir $(DIGITS)/data --overwrite

test: $(VENV)/dev ## the tests that take less than five seconds each (TESTS="FILE ...")
	$(PYTEST) -m "not slow" $(TESTS)

test-all: $(VENV)/dev ## every test
	$(PYTEST)

# Python 3.11 ends at Megatron-Core 0.16. Later releases ask for 3.12, and run on 3.11 all the same.
# Of all families outputs, gradients and training; files of adapters and pipelines meet Diffusers alone.
# And what computes numbers without it: CI runs this list on the kernels of another processor.
DESCRIBED := test_description.py::test_every_tensor_of_a_checkpoint_is_named_once
MEETING_MEGATRON := $(addprefix tests/contract/test_,parity.py finetuning.py preferences.py) \
	tests/contract/$(DESCRIBED) $(addprefix tests/,distributed unit/distributed unit/models unit/train) \
	$(addprefix tests/unit/,objectives sampling/test_ode_solvers.py)

test-newer: $(VENV)/newer ## the tests of what meets Megatron-Core, with its newest release (TESTS="FILE ...")
	PYTHONPATH=$(abspath $<) $(PYTEST) -m "not slow" $(or $(TESTS),$(MEETING_MEGATRON))

lint: $(VENV)/dev ## ruff and pyright
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m pyright

# pip judges wheels by the Python that it runs in, so that of the other machine's version is taken.
RESOLVER = $(if $(filter command line,$(origin PYTHON)),$(PYTHON),$(shell \
	for p in python$(PYTHON_VERSION) "$$(pyenv prefix $(PYTHON_VERSION) 2> /dev/null)/bin/python" $(PYTHON); do \
	"$$p" -c "" 2> /dev/null && echo "$$p" && break; done))

wheelhouse: ## the wheels that a machine without internet lacks (PYTHON_VERSION=3.12 PRESENT=FILE)
	$(if $(RESOLVER),,$(error no Python $(PYTHON_VERSION) found; name it: make wheelhouse PYTHON=/path/to/python))
	$(RESOLVER) -m tools.gpu.wheelhouse --python-version $(PYTHON_VERSION) --present $(PRESENT) \
		--output $(or $(WHEELHOUSE),runs/wheelhouse) $(PIP_FLAGS)

# With wheels, the Python whose torch is measured is the machine's: the first one that has torch.
MEASURED = $(if $(WHEELHOUSE),$(if $(filter command line,$(origin PYTHON)),$(PYTHON),$(shell \
	for p in python3 python $(PYTHON); do "$$p" -c "import sys, importlib.util as u; \
	sys.exit(not u.find_spec('torch'))" 2> /dev/null && echo "$$p" && break; done)),$(PY))

gpu: $(if $(WHEELHOUSE),,$(VENV)/dev) ## test and measure on a GPU, write docs/benchmarks (WHEELHOUSE=DIR LIMIT=540)
	$(if $(MEASURED),,$(error no Python with torch found; name it: make gpu PYTHON=/path/to/python))
	$(MEASURED) -m tools.gpu $(if $(WHEELHOUSE),--wheelhouse $(WHEELHOUSE)) \
		--limit $(LIMIT) --parts "$(PARTS)" --size $(SIZE) --keys "$(KEYS)" --output $(OUTPUT)

clean: ## remove .venv, builds and caches; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The two stamps: what running needs, and on top of it what developing needs.
$(VENV)/core: pyproject.toml
	$(if $(PYTHON),,$(error no Python 3.11 or 3.12 found; install one, or name it: make PYTHON=/path/to/python3.11))
	$(PYTHON) -m venv $(VENV)
	@echo "packages go into $(VENV): some minutes, once"; $(PIP_INSTALL) "$(TORCH)" --editable .
	touch $@

$(VENV)/dev: $(VENV)/core
	$(PIP_INSTALL) --editable ".[dev]"
	touch $@

$(VENV)/newer: $(VENV)/dev
	$(PIP_INSTALL) --target $@ --upgrade --no-deps --only-binary :all: --python-version 3.12 --ignore-requires-python \
		"$(shell sed -n 's/.*"\(megatron-core[^"]*\)".*/\1/p' pyproject.toml)"
	touch $@
