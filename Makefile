# Three commands do everything on a fresh machine: `make train`, `make test` and `make bench`.
# Each installs the tested set of requirements.txt into .venv first.

CONFIG ?= recipes/image_classification/resnet_digits.json
STRATEGY ?= ddp
ARGS ?=
TEST_WORKERS ?= 4
BENCH ?= loop_tax two_process start data_path memory checkpoints noise_scale coupled_loss
PYTHON ?= python3
BIN := .venv/bin
ACCELERATE_CONFIG = recipes/accelerate_configs/$(STRATEGY).yaml
STRATEGIES = $(basename $(notdir $(wildcard recipes/accelerate_configs/*.yaml)))
export OMP_NUM_THREADS ?= 1

.PHONY: help install train test check oldest lint schemas lock site bench gpu clean

help:
	@echo "make train   train CONFIG ($(CONFIG))"
	@echo "             under STRATEGY ($(STRATEGY); one of: $(STRATEGIES))"
	@echo "             on NUM_PROCESSES processes (as many GPUs as the batch allows, or 2 on the CPU), with ARGS as overrides"
	@echo "make check   run linters and the tests that start no job, in under 3 minutes"
	@echo "make oldest  run the tests that start no job with the oldest versions that pyproject.toml allows; once per release"
	@echo "make test    run linters and the whole test suite, in about 20 minutes on 2 cores"
	@echo "make schemas write the recipes' JSON Schemas, docs/configuration.md and the tables of recipes, after a change to a config"
	@echo "make site    build the documentation as a site, into build/site"
	@echo "make lock    write requirements.lock, all packages of the tested set with hashes, after a change to requirements.txt"
	@echo "make gpu     measure on GPUs, all in under 25 minutes, or only PARTS (correctness,memory,throughput,"
	@echo "             scaling,training); DEVICE=cpu rehearses; WHEELS=FOLDER takes missing packages from there; ARGS has options,"
	@echo "             such as --minutes 9 --only 'GPT-2 ddp': see bench/README.md"
	@echo "make bench   measure with the programs BENCH ($(BENCH)) of bench/, and make docs/performance.md"

install: .venv/installed

.venv/installed: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15) and "Python 3.11 to 3.14 is needed; set PYTHON=")'
	@echo "installing the packages of requirements.txt into .venv: at least 2 GB, and minutes in which pip prints nothing"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --requirement requirements.txt
	$(BIN)/pip install --quiet --no-deps --editable .
	@touch $@

train: install
	@test -f $(ACCELERATE_CONFIG) || { echo "error: unknown STRATEGY $(STRATEGY); one of: $(STRATEGIES)" >&2; exit 2; }
	@set -e; \
	processes=$${NUM_PROCESSES:-}; \
	if [ -z "$$processes" ]; then \
		gpus=$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count() or 2)'); \
		for processes in $$(seq $$gpus -1 1); do \
			if $(BIN)/largebatch plan $(CONFIG) --world-size $$processes $(ARGS) >/dev/null 2>&1; then break; fi; \
		done; \
	fi; \
	$(BIN)/largebatch plan $(CONFIG) --world-size $$processes $(ARGS) >/dev/null; \
	echo "starting: the first line of the run follows in 10 to 60 seconds"; \
	export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-1800}; \
	set -x; \
	$(BIN)/accelerate launch --config_file $(ACCELERATE_CONFIG) --num_processes $$processes \
		$(dir $(CONFIG))train.py --config $(CONFIG) $(ARGS)

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tests/packed_assignments.py $$(find src recipes tests bench docs -name '*.py')
	$(BIN)/mypy
	$(BIN)/largebatch lint
	@if command -v shellcheck >/dev/null; then set -x; shellcheck launch/*.sh slurm/*.sh slurm/sites/*.sh slurm/*.sbatch $(wildcard .ci/run); \
	else echo "shellcheck is not installed: shell scripts were not checked" >&2; fi

schemas: install
	$(BIN)/largebatch schema recipes/*/ src/largebatch/tools/new/templates/task
	$(BIN)/python docs/configuration_page.py
	$(BIN)/python docs/recipe_tables.py

lock:
	$(PYTHON) -m venv --clear build/uv
	build/uv/bin/pip install --quiet uv
	build/uv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
		--no-annotate --output-file requirements.lock requirements.txt

site: install
	$(BIN)/pip install --quiet --constraint requirements.txt --editable '.[docs]'
	$(BIN)/mkdocs build --quiet --strict

check: lint
	$(BIN)/pytest --numprocesses 2 -m "not slow"

# pip always takes the newest versions; uv can take the oldest. UV_TORCH_BACKEND=cpu takes torch without CUDA.
oldest:
	$(PYTHON) -m venv --clear build/oldest
	build/oldest/bin/pip install --quiet uv
	build/oldest/bin/uv pip install --quiet --python build/oldest/bin/python --resolution lowest-direct \
		--editable '.[dev,lora,report]'
	build/oldest/bin/pytest --numprocesses 2 -m "not slow"

# Twice as many workers as cores: jobs, and those of the tests' Slurm cluster above all, wait more than they work.
test: lint
	$(BIN)/pytest --numprocesses $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

bench: install
	$(BIN)/pip install --quiet --requirement bench/requirements.txt --constraint requirements.txt
	@set -ex; for program in $(BENCH); do $(BIN)/python bench/$$program.py; done
	$(BIN)/python bench/performance.py

# With WHEELS, this machine's own Python and torch, and no network.
GPU_PYTHON = $(if $(WHEELS),$(PYTHON),$(BIN)/python)
gpu: $(if $(WHEELS),build/wheels,install)
	PYTHONPATH=src:bench$(if $(WHEELS),:build/wheels) $(GPU_PYTHON) -m gpu --device $(or $(DEVICE),cuda) \
		$(if $(PARTS),--parts "$(PARTS)") $(ARGS)
	$(if $(filter cpu,$(DEVICE)),,PYTHONPATH=src:bench $(GPU_PYTHON) bench/performance.py)

build/wheels: $(wildcard $(WHEELS)/*.whl)
	$(PYTHON) -m pip install --quiet --no-index --no-deps --upgrade --target $@ --find-links $(WHEELS) $^
	@touch $@

clean:
	rm -rf .venv build *.egg-info src/*.egg-info
