# Needs Python 3.11 or newer. Everything happens in .venv; `make clean` removes it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check bench docs ptx package clean clean-cache

demo: $(VENV)/installed
	$(BIN)/ik sweep-bench -c 1024 -ub 256 -n 32
	$(BIN)/ik perplexity --chunks 8

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest

check: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/gen_docs.py --check

bench: $(VENV)/installed
	$(BIN)/python benchmarks/matmul.py
	$(BIN)/python benchmarks/attention.py

docs: $(VENV)/installed
	$(BIN)/python tools/gen_docs.py

ptx: $(VENV)/installed-dev
	$(BIN)/python tools/build_ptx.py

package: $(VENV)/installed-dev
	$(BIN)/python tools/build_package.py dist
	$(BIN)/python -m pytest -m slow -n 0 tests/test_packaging.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -e .
	touch $@

$(VENV)/installed-dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -e ".[dev]"
	touch $@ $(VENV)/installed

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

clean-cache: $(VENV)/installed
	$(BIN)/python -c "import shutil; from ikcli.native.kernel_cache import cache_root; shutil.rmtree(cache_root(), ignore_errors=True)"
