# Two commands for a new user: `make demo` and `make test`. Both set everything up first.
PYTHON ?= python3
VENV := .venv/bin
# Most tests wait for processes now and then: one more at a time than there are cores keeps these busy.
# Of each of our modules hundreds of processes are started: they compile it once, whatever the shell says.
PYTEST := PYTHONDONTWRITEBYTECODE= $(VENV)/python -m pytest --durations 15 --durations-min 20
AT_ONCE := -n $(shell expr $$(nproc) + 1) --maxprocesses 8 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-fast lint format proto clean

help:  ## show these targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

venv:  ## make .venv with everything that is needed (quick if it is there)
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON): install Python 3.10 or newer, or name one: make PYTHON=…" >&2; exit 3; }
	@$(PYTHON) tools/set_up.py

demo: venv  ## train under faults: a killed worker, a frozen one, a lost node; writes build/demo/report.json
	@$(VENV)/python examples/hello_deepspeed/demo.py

test: venv  ## run all tests
	@$(PYTEST) $(AT_ONCE) -m "not alone"
	@$(PYTEST) -m alone

test-fast: venv  ## run the tests that take no longer than a few seconds each
	@$(PYTEST) $(AT_ONCE) -m "not slow"

lint: venv  ## ruff and mypy
	@$(VENV)/ruff check .
	@$(VENV)/ruff format --check .
	@$(VENV)/mypy

format: venv  ## let ruff format the code
	@$(VENV)/ruff format .

proto: venv  ## compile protos/ into aimaster/rpc/gen/ and remember new field numbers
	@$(VENV)/python protos/generate.py
	@$(VENV)/python tests/tidy/test_protos.py

clean:  ## remove what make made, the environment included
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
