# Needs Python 3.11 or later (with venv) and make; everything else is installed into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO := $(VENV)/.demo
EXTRAS := cpu,export,traces,demo,docs,dev
SECONDS := 60

# Otherwise each of the hundreds of processes that tests start compiles Ingot.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-matrix test-long gpu fuzz site lint tools protos lock hashes sbom audit dist wheel-compiled clean

help: ## List the targets
	@echo "make demo [ARGS=--once]  train, export, quantize, store and serve a small model, and report"
	@echo "make test [ARGS=...]     lint, type-check and test; ARGS go to pytest"
	@echo "make test-matrix         the slower tests, further servers and routes, compiled models"
	@echo "make test-long           the tests that take minutes: compiling, chaos"
	@echo "make gpu [ARGS=...]      on a machine with an NVIDIA GPU: its tests and figures, into the docs"
	@echo "make fuzz [SECONDS=60]   the fuzz targets, so long each"
	@echo "make site                the documentation as a site, in build/site"
	@echo "make lint                ruff, mypy, the structure of imports, compiled modules and the wording"
	@echo "make protos              generate the gRPC messages from protos/"
	@echo "make lock                write constraints.txt: today's releases, with which all of this is to be tested"
	@echo "make hashes              write requirements/*.txt: what images install, from constraints.txt, with hashes"
	@echo "make dist                build the release's files into dist/, twice, and compare them"
	@echo "make wheel-compiled      build dist/'s wheel of this machine and Python, with the request path compiled"
	@echo "make sbom                write build/sbom/*.cdx.json: the contents of each image, in CycloneDX's format"
	@echo "make audit               check the pinned releases for known vulnerabilities; fails if it cannot"
	@echo "make clean               remove .venv and all caches"
	@echo "PYTHON=python3.12 chooses the interpreter that .venv is made with."

$(INSTALLED): SIZE := some 200 packages for development, 2.3 GB, as fast as the network
$(INSTALLED): WANTED := $(EXTRAS)
$(DEMO): SIZE := some 70 packages, 1.4 GB, as fast as the network, and the first demo then takes 2 to 3 minutes
$(DEMO): WANTED := cpu,export,demo
$(INSTALLED) $(DEMO): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Ingot needs Python 3.11 or later; $(PYTHON) is %d.%d. Name another: make PYTHON=python3.12" % v[:2])'
	@echo "Installing Ingot and PyTorch into $(VENV): $(SIZE). PyTorch for GPUs is larger"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python scripts/install.py $(WANTED)
	@touch $@

# An environment for development has all that the demo needs.
demo: $(if $(wildcard $(INSTALLED)),$(INSTALLED),$(DEMO))
	@$(BIN)/ingot demo $(ARGS)

# One more than the cores, as tests wait for processes that they start; four need some 6 GB.
WORKERS := $(shell cores=$$(nproc 2>/dev/null || sysctl -n hw.ncpu); echo $$(( cores < 3 ? cores + 1 : 4 )))
MATRIX := -m 'matrix and not long'
IN_PARALLEL := -n $(WORKERS) --max-worker-restart 1 --dist loadfile
# In CI, tests that failed (exit code 1) run once more, one after the other: those that fail by chance are named, and do
# not refuse a change.
define PYTEST
$(BIN)/pytest $(IN_PARALLEL) $(1) $(ARGS) || { [ $$? = 1 ] && [ -n "$$CI" ] && echo "The tests that failed run once more:" \
	&& $(BIN)/pytest --last-failed --last-failed-no-failures none $(1) $(ARGS); }
endef
# The tests wait for processes half of their time, so lint costs them little. Its messages come last.
test: $(INSTALLED) tools
	@$(MAKE) --no-print-directory lint > $(VENV)/lint.log 2>&1 & lint=$$!; trap 'kill $$lint' INT TERM; \
		( $(call PYTEST) ); tests=$$?; wait $$lint; linted=$$?; cat $(VENV)/lint.log; exit $$(( tests ? tests : linted ))

test-matrix: $(INSTALLED) tools
	@$(call PYTEST,$(MATRIX))

test-long: $(INSTALLED) tools
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[helm,ray]'
	@$(BIN)/pytest -m long -o faulthandler_timeout=7200 $(ARGS)

# Without .venv, whose PyTorch and ONNX Runtime are for the CPU. For a machine without the internet: scripts/gpu.py.
gpu:
	@$(PYTHON) scripts/gpu.py run build/gpu.json --write $(ARGS)

fuzz: $(INSTALLED)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	@for target in archive_reader decoders documents grpc_requests http1 http2 onnx_graphs onnx_wire; do $(BIN)/python -m fuzz.$$target -max_total_time=$(SECONDS) || exit 1; done

site: $(INSTALLED)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "build/site is ready: $(BIN)/python -m http.server --bind 127.0.0.1 -d build/site"

lint: $(INSTALLED)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/python scripts/structure.py
	@$(BIN)/python scripts/hot_modules.py
	@$(BIN)/python scripts/prose.py

# skopeo reads archives as any OCI tool would, docker-registry keeps them, Sigstore's client for Node.js verifies their
# signatures; curl, h2load, nghttp and gRPC's client for Node.js call the server, wrk loads it, Chromium shows its page, promtool checks metrics. Without them those tests are skipped (with INGOT_REQUIRE_TOOLS=1: fail).
NODE_CLIENTS := tests/server/interop/grpc_js tests/model_store/trust/sigstore_js
tools:
	@if ! { command -v skopeo && command -v docker-registry && command -v curl && command -v h2load && \
		command -v wrk && command -v chromium && command -v promtool && command -v npm; } >/dev/null && command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		echo "Installing the programs that the tests push archives to, read them with and call the server with"; \
		npm=$$(command -v npm >/dev/null || echo nodejs npm); \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
			skopeo docker-registry curl nghttp2-client wrk chromium prometheus $$npm; } >/dev/null 2>&1 \
			|| echo "warning: skopeo, docker-registry, curl, nghttp2-client, wrk, chromium, prometheus or npm could not be installed" >&2; \
	fi
	@for client in $(NODE_CLIENTS); do \
		if command -v npm >/dev/null && [ ! -d $$client/node_modules ]; then \
			npm install --prefix $$client --no-package-lock --ignore-scripts --no-audit --no-fund --silent \
				|| echo "warning: the packages of $$client could not be installed" >&2; \
		fi; \
	done

protos: $(INSTALLED)
	@$(BIN)/python scripts/generate_protos.py

# A release of a dependency can change what is tested: ONNX Runtime 1.32 computes some products in 8 bits that 1.31 did
# not. So it comes by a commit, with the tests, and not from one day to the next. PyTorch's build is left to the machine.
# The image for GPUs is built by it too, so it names the packages for GPUs, which are not installed here.
# It is made with the oldest Python that Ingot runs on: what that can use, newer ones can use too. KEEP=1 adds new
# packages and keeps the versions of the others.
lock:
	@$(PYTHON) -c 'import sys; sys.version_info[:2] == (3, 11) or sys.exit("name Python 3.11: make lock PYTHON=python3.11")'
	@rm -rf build/lock
	@$(PYTHON) -m venv build/lock
	@build/lock/bin/python -m pip install -q --disable-pip-version-check $(if $(KEEP),-c constraints.txt) '.[$(EXTRAS)]'
	@build/lock/bin/python -m pip freeze --exclude ingot-serve > build/lock/freeze.txt
	@for package in onnxruntime-gpu nvidia-ml-py; do \
		build/lock/bin/python -m pip index versions $$package 2>/dev/null \
			| sed -n '1s/^\(.*\) (\(.*\))$$/\1==\2/p' >> build/lock/freeze.txt; \
	done
	@{ echo "# Generated by 'make lock'; do not edit."; sed 's/+.*//' build/lock/freeze.txt; } > constraints.txt
	@rm -rf build/lock
	@$(MAKE) --no-print-directory hashes

# pip's hash mode needs each package that is installed, with the hashes of its files on every platform. Development
# environments use constraints.txt without hashes, as PyTorch's build is left to the machine.
HASHED := $(BIN)/uv pip compile --quiet --python-platform linux --generate-hashes --no-annotate \
	--custom-compile-command 'make hashes' -c constraints.txt
hashes: $(INSTALLED)
	@mkdir -p requirements
	@$(HASHED) --python-version 3.11 --extra cpu --extra auth -o requirements/cpu.txt pyproject.toml
	@$(HASHED) --python-version 3.12 --extra gpu --extra auth -o requirements/gpu.txt pyproject.toml
	@$(HASHED) --python-version 3.11 -o requirements/build.txt requirements/build.in
	@$(HASHED) --python-version 3.11 -o requirements/sbom.txt requirements/sbom.in

sbom: $(INSTALLED)
	@mkdir -p build/sbom
	@for image in cpu gpu; do \
		PYTHONWARNINGS=ignore $(BIN)/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible --sv 1.6 --of JSON \
			-o build/sbom/$$image.cdx.json requirements/$$image.txt || exit 1; \
		echo build/sbom/$$image.cdx.json; \
	done

# The same commit must give the same bytes, so that a release can be checked against its source.
dist: $(INSTALLED)
	@rm -rf dist build/again
	@export SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct); for folder in dist build/again; do \
		$(BIN)/uv build --quiet --sdist --wheel --python $(BIN)/python \
			--build-constraints requirements/build.txt --require-hashes --out-dir $$folder || exit 1; \
	done
	@cd dist && for file in *.whl *.tar.gz; do cmp $$file ../build/again/$$file || exit 1; done
	@rm -rf build/again
	@cd dist && sha256sum *.whl *.tar.gz | tee SHA256SUMS

# Needs a C compiler; some minutes. RELEASING.md: cibuildwheel builds those of all platforms.
wheel-compiled: $(INSTALLED)
	@INGOT_COMPILE=1 $(BIN)/python -m pip wheel --no-deps --disable-pip-version-check -w dist .

audit: $(INSTALLED)
	@$(BIN)/python scripts/audit.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find ingot tests examples scripts -name __pycache__ -prune -exec rm -rf {} +
