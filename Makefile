# Needs Python 3.11 or later (with venv) and make; everything else is installed into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SECONDS := 60

.DEFAULT_GOAL := help
.PHONY: help demo test test-long fuzz lint tools protos clean

help: ## List the targets
	@echo "make demo [ARGS=--once]  train, export, quantize, store and serve a small model, and report"
	@echo "make test [ARGS=...]     lint, type-check and test; ARGS go to pytest"
	@echo "make test-long           the tests that take minutes: compiling, chaos"
	@echo "make fuzz [SECONDS=60]   the fuzz targets, so long each"
	@echo "make lint                ruff and mypy alone"
	@echo "make protos              generate the gRPC messages from protos/"
	@echo "make clean               remove .venv and all caches"
	@echo "PYTHON=python3.12 chooses the interpreter that .venv is made with."

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Ingot needs Python 3.11 or later; $(PYTHON) is %d.%d. Name another: make PYTHON=python3.12" % v[:2])'
	@echo "Installing Ingot and PyTorch into $(VENV) (minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[cpu,export,demo,dev]'
	@touch $@

demo: $(INSTALLED)
	@$(BIN)/ingot demo $(ARGS)

test: lint tools
	@$(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile $(ARGS)

test-long: $(INSTALLED) tools
	@$(BIN)/pytest -m long $(ARGS)

fuzz: $(INSTALLED)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[fuzz]'
	@for target in archive_reader documents http2 onnx_wire; do $(BIN)/python -m fuzz.$$target -max_total_time=$(SECONDS) || exit 1; done

lint: $(INSTALLED)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

# skopeo reads archives as any OCI tool would, docker-registry keeps them; curl, h2load, nghttp and gRPC's client for
# Node.js call the server, wrk loads it. Without them those tests are skipped (with INGOT_REQUIRE_TOOLS=1: fail).
GRPC_JS := tests/server/interop/grpc_js
tools:
	@if ! { command -v skopeo && command -v docker-registry && command -v curl && command -v h2load && \
		command -v wrk && command -v npm; } >/dev/null && command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		echo "Installing the programs that the tests push archives to, read them with and call the server with"; \
		npm=$$(command -v npm >/dev/null || echo nodejs npm); \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
			skopeo docker-registry curl nghttp2-client wrk $$npm; } >/dev/null 2>&1 \
			|| echo "warning: skopeo, docker-registry, curl, nghttp2-client, wrk or npm could not be installed" >&2; \
	fi
	@if command -v npm >/dev/null && [ ! -d $(GRPC_JS)/node_modules ]; then \
		npm install --prefix $(GRPC_JS) --no-package-lock --ignore-scripts --no-audit --no-fund --silent \
			|| echo "warning: @grpc/grpc-js could not be installed" >&2; \
	fi

protos: $(INSTALLED)
	@$(BIN)/python scripts/generate_protos.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find ingot tests examples scripts -name __pycache__ -prune -exec rm -rf {} +
