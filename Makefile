# `make demo` and `make test` do all their own set-up in .venv; after the install nothing touches a network.
PYTHON ?= python3
# Test files run side by side: most of them wait for processes of their own, so one more than two cores keeps both busy.
WORKERS ?= 3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := $(VENV)/.peers
OFFLINE := HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1

.PHONY: demo test lint bench bench-route format clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[trainer,dev]'
	touch $@

demo: $(STAMP)
	@$(OFFLINE) $(BIN)/python -m dflash_ops.demo

# Beside our own, without what they require: see the file.
$(PEERS): $(STAMP) tests/peers.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement tests/peers.txt
	touch $@

test: $(PEERS)
	@tests/sandbox/install.sh
	$(OFFLINE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What this machine can run; the peer needs a network and is called by name: python -m trainer bench peers.
bench: $(STAMP)
	@$(OFFLINE) $(BIN)/python -m benchmarks.table

# The laptop's side, as root on Debian.
bench-route: $(STAMP)
	@tests/sandbox/install.sh
	$(OFFLINE) $(BIN)/python -m benchmarks.route

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
