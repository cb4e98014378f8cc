# Everything a developer or an operator types. `make help` lists it.
# Each target works on a fresh clone and costs almost nothing the second time.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help serve run setup dev servers model check test engines fmt lock schema bench clean

PY := .venv/bin/python
CONFIG ?= config/demo.yaml
BENCH ?= tests/load/bench.py

help:      ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1@/p' Makefile | column -t -s @ 2>/dev/null || sed -n 's/^\([a-z]*\):.*## /  make \1  /p' Makefile

serve:     ## the gateway with the demo model on http://127.0.0.1:8080 (PORT=n for another port)
	@scripts/setup.sh run
	@exec $(PY) scripts/demo.py $(if $(PORT),--port $(PORT))

run:       ## the gateway with CONFIG=file
	@scripts/setup.sh run
	@exec $(PY) -m gateway serve --config '$(CONFIG)' $(if $(PORT),--port $(PORT))

setup: dev ## .venv with everything a developer needs

dev:
	@scripts/setup.sh dev

servers: dev
	@scripts/install_test_servers.sh

model: dev
	@$(PY) scripts/demo.py --fetch-only

check: dev ## ruff, mypy --strict, import order
	@echo "[check] ruff"; $(PY) -m ruff check --quiet .
	@echo "[check] mypy --strict"; $(PY) -m mypy --strict --no-error-summary gateway backends
	@echo "[check] architecture"; $(PY) -m pytest -q --no-header tests/test_architecture.py

test: dev servers model ## check, then every test that needs no engine beside the embedded one (ARGS=... for pytest)
	@$(MAKE) --no-print-directory check
	@echo "[test] all tests"; $(PY) -m pytest -q tests --ignore tests/engines $(ARGS)

engines: dev model ## real llama-server, vLLM and MLX LM: installs them once (about 15 minutes), then tests/engines
	@scripts/engines.sh $(ARGS)

fmt:       ## fixes what ruff can fix: import order, outdated syntax
	@scripts/setup.sh dev
	@$(PY) -m ruff check --fix-only --quiet .

lock: dev  ## requirements.lock and requirements-dev.lock from pyproject.toml
	@scripts/lock.sh

schema: dev ## config/schema.json and docs/configuration.md from the configuration models
	@$(PY) -m gateway.config --schema > config/schema.json.tmp && mv config/schema.json.tmp config/schema.json
	@$(PY) -m gateway.config --docs > docs/configuration.md.tmp && mv docs/configuration.md.tmp docs/configuration.md

bench: dev ## added latency and CPU per request (BENCH=script, ARGS=... for it)
	@[ -f '$(BENCH)' ] || { echo "sekisho: $(BENCH) is not there: name the benchmark with BENCH=path" >&2; exit 2; }
	@$(PY) '$(BENCH)' $(ARGS)

clean:     ## removes what was built and cached; keeps .venv, models and the demo key
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis htmlcov .coverage .coverage.* ./*.egg-info
	@find gateway backends tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
