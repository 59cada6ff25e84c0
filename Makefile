# One command each: `make demo` trains a model inside opencode, `make test` proves the parts, `make check` reads the code.
PYTHON ?= python3
VENV := .venv
ENGINE := .venv-engine
INTERCEPT := .venv-intercept
HARBOR := .venv-harbor
RELEASE := .venv-release
BIN := $(VENV)/bin

# A CUDA machine gets the CUDA build of vLLM; every other machine gets the CPU build.
ENGINE_KIND ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)

# Arguments for the demo or the tests, e.g. ARGS="--keep-weights true".
ARGS ?=

.PHONY: demo test check bench qualify release clean setup setup-project setup-engine setup-intercept setup-harbor

demo: setup
	$(BIN)/harness-trainer demo $(ARGS)

# In two processes: most tests wait for something. Those that look at the same engine or folder keep to one of them.
test: setup
	$(BIN)/python -m pytest -n 2 $(ARGS)

check: setup-project
	$(BIN)/ruff format --check .
	$(BIN)/ruff check --no-cache .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/python -m benchmarks

# Every agent, one after the other: an hour and some gigabytes. NAMES="pi,codex" picks some.
NAMES ?= all
qualify: setup
	$(BIN)/harness-trainer qualify --harness $(NAMES)

# Archives, SBOM, licences, audit: into dist/.
release: setup-project $(RELEASE)/.done
	.ci/release

clean:
	-$(BIN)/harness-trainer clean
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

setup: setup-project setup-engine setup-intercept setup-harbor

setup-project: $(VENV)/.done
setup-engine: $(ENGINE)/.done
setup-intercept: $(INTERCEPT)/.done

# Optional: without a Python 3.12 the bridge to Harbor cannot be used, its tests skip, and nothing else is missing.
PYTHON312 ?= $(shell for python in python3.12 $(HOME)/.pyenv/versions/3.12.*/bin/python3.12; do \
	$$python -c "import ensurepip" 2>/dev/null && echo $$python && break; done)
setup-harbor: $(if $(PYTHON312),$(HARBOR)/.done)

# torch first and with its own dependencies (they differ between machines with and without a GPU); the rest is a lock, and what only
# those who work on it need another: it is in no image.
$(VENV)/.done: pyproject.toml requirements/project.txt requirements/tools.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q --no-deps -r requirements/project.txt -r requirements/tools.txt
	$(BIN)/pip install -q --no-deps -e .
	touch $@

$(ENGINE)/.done: pyproject.toml requirements/engine-$(ENGINE_KIND).txt
	test -x $(ENGINE)/bin/python || $(PYTHON) -m venv $(ENGINE)
ifeq ($(ENGINE_KIND),cpu)
	$(ENGINE)/bin/pip install -q torch==2.13.0
	$(ENGINE)/bin/pip install -q --no-deps -r requirements/engine-cpu.txt
else
	$(ENGINE)/bin/pip install -q -r requirements/engine-cuda.txt
endif
	$(ENGINE)/bin/pip install -q --no-deps -e .
	touch $@

# mitmproxy pins an old h11 and cryptography that the project's own libraries refuse, so it runs beside them.
$(INTERCEPT)/.done: requirements/intercept.txt
	test -x $(INTERCEPT)/bin/python || $(PYTHON) -m venv $(INTERCEPT)
	$(INTERCEPT)/bin/pip install -q --no-deps -r requirements/intercept.txt
	touch $@

$(HARBOR)/.done: requirements/harbor.txt
	test -x $(HARBOR)/bin/python || $(PYTHON312) -m venv $(HARBOR)
	$(HARBOR)/bin/pip install -q --no-deps -r requirements/harbor.txt
	touch $@

$(RELEASE)/.done: requirements/release.txt
	test -x $(RELEASE)/bin/python || $(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/pip install -q --no-deps -r requirements/release.txt
	touch $@
