# Everything a contributor types. `make` alone lists it. The same commands run in CI (.ci/run).
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

export CCACHE_SLOPPINESS := pch_defines,time_macros
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc 2>/dev/null || echo 2)

BIN := .venv/bin
PYTHON := $(BIN)/python
BUILD_DIR := build/release
CXX_FILES = $(shell find include src python/src tests/cpp tests/support benchmarks examples \
	-name '*.hpp' -o -name '*.cpp' 2>/dev/null)
PY_DIRS := python tests/python tests/support tools examples benchmarks

.PHONY: help setup build demo test test-all sanitize lint format bench docs clean

help:  ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

setup:  ## Tools and a .venv with the locked packages; does nothing if they are there
	@tools/setup.sh

# One persistent build folder holds the module and the C++ tests; Python files are live.
build: setup  ## Build all; leaves a .venv with `import hopshard` and the command `hopshard`
	@test -e $(BUILD_DIR)/build.ninja || echo 'build: compiling for the first time, 3 to 5 minutes on 2 cores' >&2
	@HOPSHARD_BUILD_TESTS=ON HOPSHARD_WERROR=ON $(PYTHON) -m pip install --quiet --disable-pip-version-check \
		--no-build-isolation --no-deps --no-input \
		--config-settings=build-dir=$(BUILD_DIR) \
		--config-settings=editable.mode=redirect \
		--editable .
	@ln -sf $(BUILD_DIR)/compile_commands.json compile_commands.json

demo: build  ## Train a small GPT-2 on 4 CPU ranks, sharded; writes a report (4 minutes)
	@$(BIN)/hopshard run -n 4 --emulate 2x2 examples/gpt2/train.py --name demo

test: build  ## All tests, with a pairwise choice of parity cases
	@echo '--- layers'
	@$(PYTHON) tools/check_layers.py --self-test
	@$(PYTHON) tools/check_layers.py
	@echo '--- every public header alone'
	@cmake --build $(BUILD_DIR) --target all_verify_interface_header_sets -- --quiet
	@echo '--- C++ tests'
	@ctest --test-dir $(BUILD_DIR) --output-on-failure --no-tests=error
	@echo '--- Python tests'
	@$(PYTHON) -m pytest -q

test-all:  ## All tests, with every parity case
	@HOPSHARD_PARITY=full $(MAKE) test

sanitize: setup  ## The C++ tests under the address, undefined-behaviour and thread sanitizers
	@mkdir -p build
	@for preset in asan ubsan tsan; do \
		echo "--- $$preset"; \
		cmake --preset $$preset >build/$$preset.log || { cat build/$$preset.log; exit 1; }; \
		cmake --build --preset $$preset -- --quiet; \
		$(NO_ASLR) ctest --preset $$preset; \
	done
# g++ 12's thread sanitizer cannot place its shadow memory where the kernel uses more than 28 bits of
# address randomization; without randomization it always can.
NO_ASLR = $(shell setarch -R true 2>/dev/null && echo setarch -R)

lint: setup  ## Formats, types, layers; LINT_TIDY=1 adds clang-tidy over all sources (slow)
	@$(PYTHON) tools/check_layers.py
	@clang-format --dry-run -Werror $(CXX_FILES)
	@$(BIN)/ruff check --quiet $(wildcard $(PY_DIRS))
	@$(BIN)/ruff format --check --quiet $(wildcard $(PY_DIRS))
	@$(BIN)/mypy
	@if [ -n "$${LINT_TIDY:-}" ]; then tools/run_clang_tidy.sh; fi

format:  ## Rewrite all sources in the house's format
	@clang-format -i $(CXX_FILES)
	@$(BIN)/ruff check --quiet --fix-only $(wildcard $(PY_DIRS))
	@$(BIN)/ruff format --quiet $(wildcard $(PY_DIRS))

bench: build  ## The benchmark of training on this host (15 minutes); others: see benchmarks/README.md
	@$(PYTHON) benchmarks/step_time.py --preset local

docs: build  ## Rewrite the generated tables and check every link in the documentation
	@$(PYTHON) tools/update_docs.py

clean:  ## Remove what was built; keeps .venv
	@rm -rf build dist compile_commands.json .mypy_cache .pytest_cache .ruff_cache
