# One word per job; none needs another step before it. `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
# Where it is set, every one of the many processes compiles all that it loads.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help demo test quick soak check format bench image setup

READY := .venv/.ready
BIN := .venv/bin
NO_ENGINE := not docker and not runsc and not inspector and not conformance and not vite and not claude and not codex and not chromium

help: ## list the jobs
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 16

demo: $(READY) ## show a chat's computer at work, in Docker or bubblewrap
	@$(BIN)/mcp-sandbox demo

test: $(READY) ## install and start what the tests need (as root on Debian or Ubuntu), run them all
	@tests/provision.sh
	@$(BIN)/python -m tests.run $(ARGS)

quick: $(READY) ## the tests that start no engine and no mcp-sandbox, every backend's on bubblewrap
	@$(BIN)/python -m tests.run --together -q \
	  -m "$(NO_ENGINE) and not slow and not alone" -k "not unsafe-local" \
	  $(addprefix --ignore tests/,e2e daemon relay clients shipped test_cli.py app/test_demo.py \
	  test_readme.py web/test_tokens.py server/test_stdio.py) $(ARGS)

soak: $(READY) ## what takes long: every fault fifty times, five minutes of random kills, all repetitions
	@tests/provision.sh
	@$(BIN)/python -m tests.e2e.faults
	@$(BIN)/python -m tests.e2e.endurance --backend bubblewrap
	@$(BIN)/python -m tests.e2e.endurance --backend docker
	@$(BIN)/python -m tests.run --whole

check: $(READY) ## formatting, lint, types, import contracts, spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell $$(git ls-files)
	@$(BIN)/python -m tests.test_size

format: $(READY) ## put the code in shape
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY) ## measure; prints the figures that the README quotes
	@tests/provision.sh
	@$(BIN)/python -m benchmarks

image: $(READY) ## build the sandbox image
	@$(BIN)/mcp-sandbox images build base

setup: $(READY) ## make the virtual environment only

# Python's own venv is enough to begin with: uv is put into it where the machine has none.
$(READY): pyproject.toml uv.lock
	@set -e; uv=uv; \
	if ! uv --version >/dev/null 2>&1; then \
	  uv=.venv/bin/uv; \
	  if [ ! -x $$uv ]; then \
	    echo "== making .venv and installing uv into it"; \
	    python3 -m venv .venv; \
	    .venv/bin/pip install --quiet uv </dev/null; \
	  fi; \
	fi; \
	echo "== installing the project's packages into .venv"; \
	$$uv sync --quiet --compile-bytecode --locked --inexact --all-groups --extra bubblewrap --extra s3 --extra redis --extra control --extra e2b --extra kubernetes </dev/null; \
	touch $@
