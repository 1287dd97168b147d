# Each target does its own set-up, from nothing, in a virtual environment inside this folder.
#   make demo          the GRPO loop of examples/grpo.py on SmolLM2-135M (under ten minutes on 2 cores)
#   make test          every test that needs no torch
#   make lint          ruff and mypy
#   make bench         decoding beside transformers, and rollouts with drafting on and off (needs torch; writes
#                      benchmarks/results/ and plots)
#   make rivals        beside transformers and Tunix's sampler (needs torch and google-tunix)
#   make test-latest   the tests again with Python 3.12 and the newest jax that pyproject.toml admits
#   make test-tpu      compiles the kernels for five TPU chips, which needs none of them (CHIPS=v5e,v6e for fewer)
#   make test-torch    the tests that compare live with torch and transformers
#   make test-trl      the example that trains with TRL, and the adapter's tests; make test-tunix the same for Tunix
# PYTHON=/path/to/python picks an interpreter, ARGS="..." goes to the program that a target runs.

VENV ?= .venv
VENV_TORCH ?= .venv-torch
VENV_LATEST ?= .venv-latest
VENV_TUNIX ?= .venv-tunix
VENV_TPU ?= .venv-tpu
VENV_TRL ?= .venv-trl
CHIPS ?= v4,v5e,v5p,v6e,tpu7x
ARGS ?=
WORKERS ?= 2
TYPE_CHECKED = rollout_spec kernels integrations examples benchmarks

# pip takes this build of torch from where the machine keeps it, or else from PyPI.
TORCH = torch==2.13.0
TRANSFORMERS = transformers>=5,<6 accelerate>=1,<2

# Whatever environment the caller has activated, ours are used.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV

.PHONY: help demo test lint format bench rivals test-latest test-torch test-tpu test-trl test-tunix clean
help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' Makefile

demo: $(VENV)/.installed-demo
	$(VENV)/bin/python -m examples.grpo $(ARGS)

test: $(VENV)/.installed-dev
	$(VENV)/bin/python -m pytest -n $(WORKERS) -m "not torch and not trl and not tunix" $(ARGS)

lint: $(VENV)/.installed-dev
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .
	$(VENV)/bin/python -m mypy $(TYPE_CHECKED)

format: $(VENV)/.installed-dev
	$(VENV)/bin/python -m ruff check --fix .
	$(VENV)/bin/python -m ruff format .

bench: $(VENV_TORCH)/.installed-torch
	$(VENV_TORCH)/bin/python -m benchmarks.decode $(ARGS)
	$(VENV_TORCH)/bin/python -m benchmarks.rollouts --quick --plots docs/images

rivals: $(VENV_TORCH)/.installed-torch $(VENV_TUNIX)/.installed-tunix
	$(VENV_TORCH)/bin/python -m benchmarks.rollouts_rivals $(ARGS)

test-latest: $(VENV_LATEST)/.installed-latest
	$(VENV_LATEST)/bin/python -c "import sys, jax; print('Python', sys.version.split()[0], 'with jax', jax.__version__)"
	$(VENV_LATEST)/bin/python -m pytest -n $(WORKERS) -m "not torch and not trl and not tunix" $(ARGS)

test-torch: $(VENV_TORCH)/.installed-torch
	$(VENV_TORCH)/bin/python -m pytest -n $(WORKERS) -m torch $(ARGS)

test-tpu: $(VENV_TPU)/.installed-tpu
	$(VENV_TPU)/bin/python -m benchmarks.kernels --compile-only --chips $(CHIPS)
	$(VENV_TPU)/bin/python -m pytest -q tests/rollout_spec/test_fitting.py tests/rollout_spec/weights/test_resharding.py

test-trl: $(VENV_TRL)/.installed-trl
	$(VENV_TRL)/bin/python -m pytest -q -m trl tests/integrations/test_trl.py $(ARGS)

test-tunix: $(VENV_TUNIX)/.installed-tunix
	$(VENV_TUNIX)/bin/python -m pip install -q "pytest>=8,<10" "scipy>=1.13,<2"
	$(VENV_TUNIX)/bin/python -m pytest -q -m tunix tests/integrations/test_tunix.py $(ARGS)

# A stamp is newer than pyproject.toml once its environment holds what that file lists.
$(VENV)/.installed-demo: pyproject.toml
	@scripts/make_venv.sh $(VENV) demo
	@touch $@

$(VENV)/.installed-dev: pyproject.toml
	@scripts/make_venv.sh $(VENV) dev
	@touch $@

$(VENV_LATEST)/.installed-latest: pyproject.toml
	@scripts/make_venv.sh $(VENV_LATEST) dev 3.12 -- --upgrade --upgrade-strategy eager
	@touch $@

$(VENV_TORCH)/.installed-torch: pyproject.toml Makefile
	@scripts/make_venv.sh $(VENV_TORCH) dev 3.11 3.12 3.13 -- "$(TORCH)" $(foreach package,$(TRANSFORMERS),"$(package)")
	@touch $@

$(VENV_TUNIX)/.installed-tunix: Makefile
	@scripts/make_venv.sh $(VENV_TUNIX) demo 3.12 3.11 -- "google-tunix==0.1.7"
	@touch $@

$(VENV_TRL)/.installed-trl: pyproject.toml Makefile
	@scripts/make_venv.sh $(VENV_TRL) dev,trl 3.11 3.12 3.13 -- "$(TORCH)"
	@touch $@

$(VENV_TPU)/.installed-tpu: pyproject.toml
	@scripts/make_venv.sh $(VENV_TPU) dev,tpu
	@touch $@

clean:
	rm -rf $(VENV) $(VENV_TPU) $(VENV_TRL) $(VENV_TORCH) $(VENV_LATEST) $(VENV_TUNIX) build dist outputs .cache .pytest_cache .mypy_cache .ruff_cache
