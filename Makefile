# make train: a BigBird learns on real text. make test: every test. Each makes .venv where it is missing.

BIN := .venv/bin
PYTHON ?= $(shell for python in python3.11 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: train test lint wheel docs faults mutants conformance performance

train: .venv/installed
	$(BIN)/attnzoo train recipes/bigbird.yaml

test: .venv/installed
	ATTNZOO_PEERS=1 $(BIN)/pytest -m "not study"

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

faults: .venv/installed
	$(BIN)/pytest tests/test_resume.py -m study

docs: .venv/installed
	$(BIN)/python docs/write.py

conformance: .venv/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[conformance]'
	$(BIN)/python docs/conformance/write.py

performance: .venv/installed
	$(BIN)/python docs/performance/write.py

mutants: .venv/installed
	$(BIN)/python -m tests.mutants.matrix

wheel: .venv/installed
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	set -e; fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	$(BIN)/python -m venv "$$fresh"; \
	"$$fresh/bin/pip" install --quiet -c constraints.txt dist/*.whl; \
	cd "$$fresh"; bin/attnzoo check gqa; bin/attnzoo recipes; bin/attnzoo new mine

.venv/installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "attnzoo needs Python 3.11 or newer; name one: make $(MAKECMDGOALS) PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,peers]'
	touch $@
