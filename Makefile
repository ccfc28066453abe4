# Every target works from a bare clone: what it needs is made first, once (see .ci/environment.py).
# Options: PYTHON=python3.12, TIERS="unit golden", TEST_ARGS="-x", DEMO_ARGS="--tokens 4096".

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
RUN := .venv/bin/python
TIMED := .ci/timed
TYPED := kvd engine_shim kernels/kvd_kernels bench tests
BENCHES ?= $(filter-out report vllm_decode,$(notdir $(basename $(shell grep -l '    return finish' bench/*.py))))
TIERS ?=
TEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
DEEP ?= 20
PYTHONS ?= python3.11 python3.12 python3.13

.PHONY: help env demo demo-vllm test test-all test-aarch64 lint format bench bench-vllm develop clean clean-env

help: ## show this list
	@echo "kvd: make TARGET"
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@sed -n 's/^# Options: /Options: /p' $(MAKEFILE_LIST)

env: ## make the environment of this checkout and link it as .venv
	@$(PYTHON) .ci/environment.py make > /dev/null

demo: env ## generate with a layer ring and without, and compare; DEMO_ARGS="--tokens 4096" is short
	@$(RUN) -m engine_shim.reference.demo $(DEMO_ARGS)

demo-vllm: env ## two real vLLM servers, the first one killed, share the pool; DEMO_ARGS="--tokens 2048" is short
	@vllm="$$($(PYTHON) .ci/environment.py vllm)"; \
	$(RUN) -m engine_shim.vllm.demo --python "$$vllm/bin/python" $(DEMO_ARGS)

lint: env ## style, types, import contracts, tidiness; all of them, whatever the first one says
	@failed=0; \
	$(TIMED) "ruff check" $(RUN) -m ruff check . || failed=1; \
	$(TIMED) "ruff format" $(RUN) -m ruff format --check . || failed=1; \
	$(TIMED) "mypy" $(RUN) -m mypy $(TYPED) || failed=1; \
	$(TIMED) "mypy of .ci" $(RUN) -m mypy .ci/environment.py .ci/aarch64.py || failed=1; \
	$(TIMED) "import contracts" env PYTHONPATH=.:kernels $(RUN) -c \
	  'from importlinter.cli import lint_imports_command as lint; lint()' || failed=1; \
	$(TIMED) "tidy" $(RUN) -m tests tidy || failed=1; \
	exit $$failed

format: env ## put every file into the project's form
	@$(RUN) -m ruff check --fix --select I .
	@$(RUN) -m ruff format .

test: env ## all tests, tier by tier; TIERS="unit golden" runs some
	@$(RUN) -m tests $(TIERS) -- $(TEST_ARGS)

test-all: ## every test at every Python that is installed, then DEEP times as deep
	@for python in $(PYTHONS); do \
	  if command -v $$python > /dev/null && $$python -c 'import venv' 2> /dev/null; then \
	    $(TIMED) "tests with $$python" $(MAKE) test PYTHON=$$python; \
	  else \
	    echo "$$python is not installed: not tested"; \
	  fi; \
	done
	@$(MAKE) env
	@KVD_TEST_DEPTH=$(DEEP) $(TIMED) "deep tests" \
	  $(RUN) -m tests stateful exhaustive sim -- --timeout=7200

test-aarch64: env ## the tests of the kernels on aarch64 (NEON), emulated by qemu
	@$(PYTHON) .ci/aarch64.py $(TEST_ARGS)

bench: env ## every bench, a table each; BENCHES="control" runs some, BENCH_ARGS="--gate" judges
	@failed=0; \
	for name in $(BENCHES); do $(RUN) -m bench.$$name $(BENCH_ARGS) || failed=1; done; \
	exit $$failed

bench-vllm: env ## decode in a real vLLM, hot buffers against resident KV: equal tokens, hidden loads
	@vllm="$$($(PYTHON) .ci/environment.py vllm)"; \
	$(RUN) -m bench.vllm_decode --python "$$vllm/bin/python" $(BENCH_ARGS)

develop: ## build/develop: an environment whose kvd is this checkout itself
	@$(PYTHON) .ci/environment.py develop

clean: ## remove what was built in this checkout
	rm -rf build dist demo-out .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -rf .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

clean-env: ## remove the environments of every checkout
	rm -rf "$$($(PYTHON) .ci/environment.py where)"
