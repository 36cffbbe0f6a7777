# Everything here sets up its own .venv first. `make help` lists the targets.

PYTHON ?= python3
TORCH ?= torch==2.13.0
PYTEST_ARGS ?= -n 2
BENCH_ARGS ?=
TASK ?=
TORTURE_ARGS ?=

PY := .venv/bin/python
PIP := $(PY) -m pip install -qq --disable-pip-version-check --no-input --root-user-action=ignore

.DEFAULT_GOAL := help
.PHONY: help demo test torture check bench bench-all format system clean FORCE

help: ## what there is to make
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 16
	@echo "variables: TORCH=$(TORCH) PYTHON=$(PYTHON) PYTEST_ARGS='$(PYTEST_ARGS)' BENCH_ARGS='$(BENCH_ARGS)' TASK=$(TASK) TORTURE_ARGS='$(TORTURE_ARGS)'"

demo: .venv/.ready ## train, resume bit for bit, damage a copy, kill, stop, fork a run; figures in demo.json
	$(PY) examples/demo.py --json demo.json --plot demo.png

test: .venv/.ready ## run the tests
	$(PY) -m pytest $(PYTEST_ARGS)

torture: .venv/.ready ## kill trainings at random moments, 200 on each of disk, FUSE mount and S3
	$(PY) -m tests.torture $(TORTURE_ARGS)

check: .venv/.ready ## format, lint, types, layers, sizes, docs
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	.venv/bin/lint-imports --no-logo
	@! find shardstore -name '*.py' -exec awk 'FNR == 401 {print FILENAME ": more than 400 lines"}' {} + | grep .
	$(PY) docs/check.py

bench: .venv/.bench ## measure beside the peers and the bare system calls, a quarter of an hour; TASK=save for one task
	$(PY) -m benchmarks $(if $(TASK),--tasks $(TASK)) $(BENCH_ARGS)

bench-all: .venv/.bench ## the same with all states and peers, on an S3 server and a FUSE mount, and how cost grows
	$(PY) -m benchmarks --all --rounds 5 $(BENCH_ARGS)

format: .venv/.ready ## format the code and mend what ruff can mend
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .

# The tests that mount file systems need these two; they skip without.
system: ## install fuse3 and e2fsprogs where root and apt-get are at hand
	@PATH="$$PATH:/usr/sbin:/sbin"; missing=; \
	command -v fusermount3 >/dev/null || missing="$$missing fuse3"; \
	command -v mkfs.ext4 >/dev/null || missing="$$missing e2fsprogs"; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing$$missing"; export DEBIAN_FRONTEND=noninteractive DEBCONF_NOWARNINGS=yes; \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends $$missing >/dev/null && exit 0; \
	fi; \
	echo "not installed:$$missing (needs root and apt-get); the tests that need it skip"

clean: ## remove caches, builds and results, but not .venv
	rm -rf build dist .coverage .coverage.* .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	rm -f demo.json demo.png bench.json
	find . -name .venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

# The stamp holds the torch it was made for, so that another TORCH installs again.
ifneq ($(TORCH),$(shell cat .venv/.ready 2>/dev/null))
.venv/.ready: FORCE
endif

# A .venv that is there already is completed. torch goes first, so that nothing else picks a release of it.
.venv/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed: make PYTHON=python3.11 ..." >&2; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv \
		|| { echo "no virtual environment: on Debian and Ubuntu, apt install python3-venv" >&2; exit 1; }
	@echo "setting up .venv with $(TORCH) (the first time takes minutes)"
	@$(PIP) '$(TORCH)'
	@$(PIP) -e '.[dev]'
	@echo '$(TORCH)' > $@

# Without its peers the benchmark leaves their rows out.
.venv/.bench: .venv/.ready
	@$(PIP) -e '.[bench]' && touch $@ || echo "no peers: their rows will be left out"
