# make run   a whole run on this machine: real engines, real training, a real log
# make test  every check but the long ones; make test-full adds those; make soak tries 10,000 simulated worlds
#             and kills a trainer 50 times
# Needs Python 3.11 and make. The first target that needs it makes .venv from requirements/cpu.txt; later ones work offline.

PYTHON ?= python3
CONFIG ?= configs/quickstart.toml
SEED ?= 0
SEEDS ?= 10000
KILLS ?= 50
VENV := .venv
BIN := $(VENV)/bin
LOCKED := $(VENV)/.locked
READY := $(VENV)/.ready
# Tests with real parts go to one worker, in order, the others to both (tests/conftest.py).
PYTEST := $(BIN)/python -m pytest -q -n 2 --durations 15

.PHONY: help run test test-full soak bench lint fmt lock clean
.DELETE_ON_ERROR:

help:
	@sed -n '1,4s/^# //p' Makefile

run: $(READY)
	$(BIN)/dora run $(CONFIG)

test: lint
	$(PYTEST) -m "not full and not gpu"

test-full: lint
	$(PYTEST) -m "not gpu"

# As many simulated worlds as one likes, SEEDS from SEED on; then KILLS deaths of a real trainer, at moments that follow
# from SEED. A failure names its seed and tells its story.
soak: $(READY)
	DORA_SEED=$(SEED) DORA_SEEDS=$(SEEDS) $(BIN)/python -m pytest -q tests/simulation/test_seeds.py
	DORA_SEED=$(SEED) DORA_KILLS=$(KILLS) $(BIN)/python -m pytest -q -s tests/integration/test_trainer_soak.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Long; on a machine that does nothing else.
bench: $(READY)
	$(BIN)/dora bench tap
	$(BIN)/dora bench checkpoint
	$(BIN)/dora bench train
	$(BIN)/dora bench weights
	$(BIN)/dora bench parity
	$(BIN)/dora bench learn

fmt: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# uv is fetched by pip; it makes the environment exactly the lock, and the project is put on top. Each once per change.
$(LOCKED): requirements/cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make: $(PYTHON) is older than 3.11; say which to use: make PYTHON=python3.11 ..." >&2; exit 2; }
	@test -x $(BIN)/uv || { $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install --quiet uv; }
	$(BIN)/uv pip sync --python $(BIN)/python requirements/cpu.txt
	@touch $@

$(READY): $(LOCKED) pyproject.toml
	$(BIN)/uv pip install --offline --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@

# Lock again after a change to requirements/*.in (the cpu and the gpu environment are never mixed).
lock: $(READY)
	$(BIN)/uv pip compile requirements/cpu.in --override requirements/cpu.overrides --python-version 3.11 \
		--no-header --no-annotate --quiet --output-file requirements/cpu.txt
	$(BIN)/uv pip compile requirements/gpu.in --override requirements/gpu.overrides --python-version 3.11 \
		--python-platform x86_64-unknown-linux-gnu --no-header --no-annotate --quiet \
		--output-file requirements/gpu.txt

clean:
	rm -rf $(VENV) .models .run dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
