# Each target sets up what it needs; nothing has to be installed by hand but Python 3.10 or later.
PYTHON ?= $(shell infra/python.sh)
VENV ?= .venv
BIN := $(VENV)/bin
SPOTGUARD := $(BIN)/spotguard

# Tests start hundreds of Pythons: where nothing compiled may be kept, each compiles all anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help browser integrations demo test check-all check lint types unit test-pythons fuzz first-half second-half emulators e2e e2e-commands e2e-jobs aside lab lab-tests lab-story lab-down ec2-lab ec2-lab-down ec2-tests ec2-faults k8s-lab k8s-lab-down k8s-tests cloud-tests docs clean

help:
	@echo "make demo    train a small GPT on two local nodes through three interruptions"
	@echo "make test    lint, types and the quick tests: minutes, and neither root, npm nor Slurm"
	@echo "make check-all  all other tests, in two halves beside each other: emulators, whole jobs, browser, the lab;"
	@echo "             then integrations, where there is time"
	@echo "make check   both: what CI runs"
	@echo "make unit    the quick tests only"
	@echo "make test-pythons  quick tests and the demo on every other Python that this machine has"
	@echo "make release  build what would be released, and try it on each Python of this machine; uploads nothing"
	@echo "make fuzz    100 000 mutated documents for each reader of what others may write (SEED=1)"
	@echo "make soak    training scripts of all shapes, interrupted at random: hundreds of runs (DRAWS=500 SEED=the day's)"
	@echo "make emulators  object stores on emulators, with faults in between (needs npm)"
	@echo "make e2e     the whole-job tests only"
	@echo "make browser  the pages in a real browser (root may install Debian's chromium)"
	@echo "make integrations  HF's Trainer, other frameworks, trackers; installs them"
	@echo "make lab     a Slurm cluster of three virtual spot nodes (root, Debian 12); lab-down ends it"
	@echo "make cloud-tests  a few cents' worth of real nodes, in SPOTGUARD_CLOUD: docs/reference/cloud-tests.md"
	@echo "make lab-tests  whole runs through SkyPilot on such a cluster (brings up its own)"
	@echo "make ec2-lab  an EC2 of virtual nodes under a real SkyPilot (root, Debian 12); ec2-lab-down ends it"
	@echo "make ec2-tests  whole runs there (brings up its own); ec2-faults: each AWS call fails in each way, an hour or so"
	@echo "make k8s-lab  a Kubernetes of virtual nodes, built from Debian's source: a quarter of an hour, once; k8s-lab-down ends it"
	@echo "make k8s-tests  a whole run through SkyPilot on its pods (brings up its own)"
	@echo "make docs    the site of the pages and of the public names, in site/; needs no network"
	@echo "make lab-story  the long ones there, by hand: a controller dies at each act, the example shrinks and grows by its own rule"

INSTALL = $(BIN)/python infra/install.py --constraint constraints.txt

$(BIN)/python:
	@echo "setting up $(VENV) (first time only, some 30 s)"
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing spotguard and torch"
	$(INSTALL) --editable .
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing spotguard, torch, and what development needs"
	$(INSTALL) --editable '.[dev]'
	touch $(VENV)/.installed $@

# The frameworks come with what development needs in one request, so that pip finds versions for both;
# so do the trackers, and the two packages by which MLflow keeps runs in a local file.
$(VENV)/.installed-integrations: $(VENV)/.installed-dev
	@echo "installing transformers, accelerate, lightning and trackers (some minutes, once)"
	$(INSTALL) --editable \
	  '.[dev,integrations,wandb,mlflow,tensorboard]' sqlalchemy alembic
	touch $@

demo: $(VENV)/.installed
	$(SPOTGUARD) up examples/train_gpt.py --nodes 2 --speed-up 30 --yes \
	  --interrupt node=1@step=50:notice \
	  --interrupt node=0@step=110:term \
	  --interrupt node=1@step=170:kill

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

# npm may need minutes, more than a test has; without npm the tests that need azurite are skipped.
.PHONY: azurite
azurite: $(VENV)/.installed-dev
	-$(BIN)/python -c 'from tests.storage.harness.servers import azurite_program; print(azurite_program())'

# A test that fails gets a second chance alone, which tells what is broken from what its neighbours' load
# broke. Both are printed: a test that needs its second chance is to be mended.
PYTEST = $(BIN)/python -m pytest -q -o cache_dir=.pytest_cache/$@
TESTED = $(PYTEST) $(1) || $(PYTEST) $(1) -n 0 --last-failed --last-failed-no-failures=none

# Quick tests prove nothing of disks, and a journal's every line waits until it is safe on one: where the machine
# lends 4 GB of memory as a folder in which programs may run, what they write stays there until its test is over.
MEMORY := $(shell df -k --output=avail /dev/shm 2>/dev/null | awk 'NR == 2 && $$1 > 4000000' | grep -q . \
  && ! grep -q ' /dev/shm .*noexec' /proc/mounts && echo /dev/shm)
unit test-pythons: export PYTEST_DEBUG_TEMPROOT = $(MEMORY)

# What `make test` runs, and what waits for `make check-all`; only cloud-tests spend money.
QUICK := "not e2e and not slow and not cloud"
LATER := "(e2e or slow) and not cloud and not long"

# Of a new environment nothing is compiled yet: three workers would each compile what all of them import.
$(VENV)/.imported: $(VENV)/.installed-dev
	@echo "compiling what tests import (once, a minute at most)"
	@$(BIN)/python -m pytest -p no:cacheprovider --collect-only -q -m $(QUICK) > /dev/null || true
	touch $@

# Some wait for processes, clocks and sockets: with two workers two cores would rest a quarter of the time.
unit: $(VENV)/.imported
	$(call TESTED,-n 3 --dist worksteal -o tmp_path_retention_policy=failed -m $(QUICK))

test-pythons: $(VENV)/.installed-dev
	$(BIN)/python -m tests.programs.pythons

# What would be uploaded, tried as a user gets it. The upload itself is nobody's but a person's.
.PHONY: release
release: $(VENV)/.installed-dev
	$(BIN)/python -m tests.programs.pythons.release

SEED ?= 1
fuzz: $(VENV)/.installed-dev
	$(BIN)/python -m tests.programs.fuzz --seed $(SEED)

DRAWS ?= 500
.PHONY: soak
soak: $(VENV)/.installed-dev
	$(BIN)/python -m tests.property --draws $(DRAWS)
	$(PYTEST) -m long tests/property

# Servers of object storage, each worker's own, and real faults between them and us: much of it waits.
emulators: $(VENV)/.installed-dev azurite
	$(call TESTED,-n 4 --dist worksteal -m $(LATER) tests/storage tests/checkpoint)

# Commands whose tests take minutes, but nobody's time counts: they may run beside others.
ASIDE := tests/benchmarks
ELSEWHERE := tests/storage tests/checkpoint tests/e2e tests/integrations tests/pages $(ASIDE)

e2e: e2e-commands e2e-jobs

e2e-commands: $(VENV)/.installed-dev
	$(call TESTED,-n 2 --dist worksteal -m $(LATER)" and not lab and not ec2 and not kubernetes" tests/e2e)

e2e-jobs: $(VENV)/.installed-dev
	$(call TESTED,-n 2 --dist worksteal -m $(LATER) $(ELSEWHERE:%=--ignore=%))

# Quick ones, too: `make test` skips them where the frameworks are not installed.
integrations: $(VENV)/.installed-integrations
	$(call TESTED,-n 2 -m "not cloud" tests/integrations)

aside: $(VENV)/.installed-dev
	$(call TESTED,-m $(LATER) $(ASIDE))

# Chromium is Debian's, whose own playwright drives it; no browser is downloaded. Where it cannot be had, tests
# are skipped by name. axe-core says what is hard to read or to reach.
BROWSERS := .browser-tests
$(BROWSERS)/.installed: | $(VENV)/.installed-dev
	-command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; }
	-$(INSTALL) 'playwright>=1.49'
	mkdir -p $(BROWSERS)
	-npm install --silent --no-audit --no-fund --prefix $(BROWSERS) axe-core@4.11.0
	touch $@

browser: $(BROWSERS)/.installed
	$(call TESTED,-rs -n 2 -m $(LATER) tests/pages)

LAB := SPOTLAB_PYTHON=$(abspath $(BIN))/python infra/lab/slurm_lab.sh

lab: $(VENV)/.installed-dev
	$(LAB) up 3
	@echo 'now: eval "$$(infra/lab/slurm_lab.sh env)"; see docs/launching.md'

lab-tests: $(VENV)/.installed-dev
	$(call TESTED,-rs -m "lab and not long" tests/e2e/lab)

lab-story: $(VENV)/.installed-dev
	$(PYTEST) -rs -m "lab and long" tests/e2e/lab

lab-down:
	$(LAB) down purge

EC2_LAB := EC2LAB_VENV=$(abspath $(VENV)) infra/ec2-lab/ec2_lab.sh

ec2-lab: $(VENV)/.installed-dev
	$(EC2_LAB) up
	@echo 'now: eval "$$(infra/ec2-lab/ec2_lab.sh env)"; see docs/aws.md'

ec2-lab-down:
	$(EC2_LAB) down

ec2-tests: $(VENV)/.installed-dev
	$(call TESTED,-rs -n 2 -m "ec2 and not long" tests/e2e/ec2)

ec2-faults: $(VENV)/.installed-dev
	$(PYTEST) -rs -n 2 --dist worksteal -m "ec2 and long" tests/e2e/ec2

K8S_LAB := K8SLAB_VENV=$(abspath $(VENV)) infra/k8s-lab/k8s_lab.sh

k8s-lab: $(VENV)/.installed-dev
	$(K8S_LAB) up
	@echo 'now: eval "$$(infra/k8s-lab/k8s_lab.sh env)"; see infra/k8s-lab/README.md'

k8s-lab-down:
	$(K8S_LAB) down

k8s-tests: $(VENV)/.installed-dev
	$(PYTEST) -rs -m kubernetes tests/e2e/kubernetes

cloud-tests: $(VENV)/.installed-dev
	$(PYTEST) -rs -m cloud tests/e2e/cloud

# What mkdocs' theme has to tell of other products is not asked for.
docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo "built: site/index.html"

# Lint and types say little and end early: the tests' own last lines stay the last.
test: $(VENV)/.installed-dev
	@$(MAKE) --no-print-directory -j 3 lint types unit

# What `make test` leaves out. Runs on the lab wait most of their time, so other tests go on beside them.
# ec2-tests want the whole machine.
check-all: $(VENV)/.installed-dev
	$(MAKE) -j 2 --output-sync=target first-half second-half
	@$(call IN_TIME,70,integrations)
	@$(call IN_TIME,45,ec2-tests)

# CI has an hour and a half. On a slow machine what comes last would not end in time, so it is not begun there: who
# has the time starts it by hand. $BEGAN, epoch seconds, is when CI's time began; without it there is time for all.
IN_TIME = minutes=$$(( ($$(date +%s) - $${BEGAN:-$$(date +%s)}) / 60 )); \
  if [ $$minutes -le $(1) ]; then $(MAKE) $(2); \
  else echo "skipped: make $(2) begins within $(1) minutes, and $$minutes have passed"; fi

first-half:
	$(MAKE) -j 1 lab-tests e2e-jobs

# Beside the lab, whose clock does not stop, is what can wait; what waits for its runs comes after it.
second-half:
	nice -n 10 $(MAKE) -j 1 emulators aside browser
	$(MAKE) -j 1 e2e-commands

check:
	@$(MAKE) --no-print-directory test
	@$(MAKE) --no-print-directory check-all

clean:
	rm -rf $(VENV) $(BROWSERS) .pythons build dist site .mypy_cache .ruff_cache .pytest_cache
