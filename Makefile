# `make demo` shows what it does; `make test` checks that it does it, `make quick` the core of it within two minutes.
# Each makes its own .venv where there is none.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test quick lint bench mutants clean

demo: .venv/ready
	@$(BIN)/trueup demo

# Each process takes half of the tests, in order, so that fixtures of a module are rarely made twice.
test: .venv/ready lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

quick: .venv/ready lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not beyond_quick" \
		tests/test_contract.py tests/core tests/memory

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/ready
	$(BIN)/python benchmarks/imports.py
	$(BIN)/python benchmarks/loading.py
	$(BIN)/python benchmarks/waiting.py
	$(BIN)/python benchmarks/bank.py
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/pixels.py
	$(BIN)/python benchmarks/passes.py
	$(BIN)/python benchmarks/guard.py
	$(BIN)/python benchmarks/alarm.py
	$(BIN)/python benchmarks/undo.py
	$(BIN)/python benchmarks/unwrap.py
	$(BIN)/python benchmarks/collapse.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/throughput.py
	$(BIN)/python benchmarks/peak.py
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/parts.py
	$(BIN)/python benchmarks/stream.py
	$(BIN)/python benchmarks/sketch.py
	$(BIN)/python benchmarks/ways.py
	$(BIN)/python benchmarks/table.py
	$(BIN)/python benchmarks/draw.py

mutants: .venv/ready
	$(BIN)/python tests/mutants.py

.venv/ready: pyproject.toml constraints.txt
	@echo "Making .venv and installing torch and friends: about two minutes and 6 GB, once."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf .venv
