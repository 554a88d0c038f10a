# Two commands do all set-up: `make roundtrip` and `make test`. Both need Python 3.10 or newer, git and make.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One thread: the tensors are tiny, and spinning threads on two cores cost minutes.
export OMP_NUM_THREADS ?= 1
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes

# Every target with a plain name is an action, not a file.
.PHONY: $(shell grep -oE '^[a-z-]+:' $(firstword $(MAKEFILE_LIST)) | tr -d :)

help: ## what there is
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

roundtrip: $(VENV)/node.stamp ## the main job: every series on its real base, up, attested, and down again byte for byte
	$(BIN)/python tools/apply.py roundtrip --each-level -v

test: $(VENV)/test.stamp ## unit, corpus, fault and engine tests; all published wheels of the bases (370 MB, cached)
	PATCHBUNDLE_ALL_WHEELS=1 $(BIN)/python -m pytest -m "not router and not rig and not device and not extras"

router: $(VENV)/test.stamp ## build the router, stock and patched, from the pinned source archive (7 minutes, 3.5 GB, cached)
	$(BIN)/python -m lab.router.build

router-release: $(VENV)/test.stamp ## the same, optimised
	$(BIN)/python -m lab.router.build --profile release

test-faults: $(VENV)/test.stamp ## every series on its real base: killed, failed, and its power lost, at every call
	PYTHONPATH=tools $(BIN)/python -m lab.faults

coverage: $(VENV)/test.stamp ## which lines and branches of the tools the tests take, children included; fails below 95 %
	$(BIN)/python -m pytest --cov --cov-report=term -m "not router and not rig and not device and not bases" tests/test_*.py tests/extras

fuzz: $(VENV)/test.stamp ## five minutes of random bytes at each reader of bytes, led by coverage
	$(PIP) -r requirements/fuzz.txt
	for target in patch journal lock record; do PYTHONPATH=tools $(BIN)/python -m lab.fuzz $$target; done

mutants: $(VENV)/test.stamp ## an hour of breaking parser, planner and transaction in one place at a time
	for name in parse plan transaction; do PYTHONPATH=tools $(BIN)/python -m lab.mutants $$name --minutes 20; done

test-router: router ## both built routers against scripted servers on 127.0.0.1
	$(BIN)/python -m pytest -m router

test-extras: $(VENV)/extras.stamp ## signatures, published schemas, images, a fleet: needs programs of make system-deps
	$(BIN)/python -m pytest -m extras

soak: router rig-env ## ten minutes of random faults on both legs of the router, then thirty of the whole rig under load
	$(BIN)/python -m lab.router.soak
	$(BIN)/python -m lab.rig.soak

rig-env: $(VENV)/test.stamp ## the two engine environments (19 GB, cached)
	$(BIN)/python tools/rig.py env

rig: rig-env ## the whole deployment on this CPU, stock beside patched: the short list
	$(BIN)/python tools/rig.py compare --list short

rig-full: router rig-env ## every scenario, and every one again with all gates unset against stock
	$(BIN)/python tools/rig.py compare --list full
	$(BIN)/python tools/rig.py compare --list full --gates-off
	$(BIN)/python -m lab.rig.gpu.two --cpu --out build/two-cpu.json

rig-rolling: router rig-env ## a rolling upgrade and its roll back under load, through all eight mixtures
	$(BIN)/python -m lab.rig.rolling

test-engine: rig-env ## tests inside the whole wheels
	$(BIN)/python -m pytest -m rig

gpu-pack: $(VENV)/test.stamp ## archives for one GPU machine without a network, into build/gpu
	$(BIN)/python -m lab.rig.gpu.pack build/gpu
	$(BIN)/python -m lab.rig.gpu.parts build/gpu --pack

gpu-engine: ## on that machine: the real engine, stock beside patched, from build/gpu; GPUS=2: dsa-dcp beside TP2
ifeq ($(GPUS),2)
	began=$$(date +%s.%N); \
	$(PYTHON) benchmarks/boundary.py --out evidence/boundary/h200-x2-boundary.json || failed=1; \
	$(PYTHON) -m lab.rig.gpu.two build/gpu --limit 360 --since $$began --out evidence/engine/h200-x2.json || failed=1; \
	exit $${failed:-0}
else
	$(PYTHON) -m lab.rig.gpu.engine build/gpu --out evidence/engine/h200.json || failed=1; \
	$(PYTHON) -m lab.rig.gpu.parts build/gpu --only stand-ins || failed=1; exit $${failed:-0}
endif

gpu-parts: ## on that machine: everything outside an engine, from build/gpu, into evidence/
	$(PYTHON) -m lab.rig.gpu.parts build/gpu

pyz: $(VENV)/node.stamp ## one file for a node, dist/patchbundle-VERSION.pyz: the same bytes wherever it is built
	PYTHONPATH=tools $(BIN)/python -m lab.release pyz

sdist: $(VENV)/node.stamp ## the archive of the sources, dist/patchbundle-VERSION.tar.gz: the same bytes too
	PYTHONPATH=tools $(BIN)/python -m lab.release sdist

release: $(VENV)/node.stamp ## everything that is published, into dist/VERSION; then files the release, its news and its lock
	PYTHONPATH=tools $(BIN)/python -m lab.release release

bench: $(VENV)/test.stamp ## the tool against git apply, quilt and sha256sum
	$(BIN)/python benchmarks/tool.py
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/node.py

lint: $(VENV)/test.stamp ## formatting, types, the bundle's own checker
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tools/check_sources.py --evidence

format: $(VENV)/test.stamp ## let ruff rewrite what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

claims: $(VENV)/test.stamp ## write docs/claims.md, docs/upstream.md and docs/stand-ins.md from evidence/, the patches' headers and the rig
	PYTHONPATH=tools $(BIN)/python -m lab.evidence

report: $(VENV)/test.stamp ## one HTML file that opens without a network: patches, pins, claims, kernel chart, models
	PYTHONPATH=tools $(BIN)/python -m lab.evidence.report build/report.html

report-check: report ## open it in a real headless Chromium without a network: no error, no request; build/report.png
	$(BIN)/python -m lab.evidence.browser build/report.html --picture build/report.png

pin: $(VENV)/node.stamp ## recompute patches/pins.lock after an edit of a patch or source
	$(BIN)/python tools/apply.py pin -v || test $$? -eq 3

system-deps: ## Debian packages that the router's build and the rig need
	apt-get install --yes --no-install-recommends $$(grep -vE '^(#|$$)' requirements/debian.txt)

browser-deps: ## the Debian package of the browser that report-check needs
	apt-get install --yes --no-install-recommends $$(grep -vE '^(#|$$)' requirements/debian-browser.txt)

clean: ## what was made in the clone
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

clean-cache: $(VENV)/node.stamp ## cached archives that no current file names
	$(BIN)/python tools/apply.py clean-cache || test $$? -eq 3

# The node's few packages first: the main job must not wait for torch.
$(VENV)/node.stamp: requirements/node.txt
	# Not only the interpreter: a run that was killed half way leaves one without pip.
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) -r requirements/node.txt
	touch $@

$(VENV)/test.stamp: $(VENV)/node.stamp requirements/test.txt
	$(PIP) -r requirements/test.txt
	touch $@

$(VENV)/extras.stamp: $(VENV)/test.stamp requirements/extras.txt
	$(PIP) -r requirements/extras.txt
	touch $@
