# Each target creates the virtual environment that it needs, once.
PYTHON ?= python3
VENV := .venv
EXTRAS := test
DEMO := runs/demo
# Some shells do not expand ~ in arguments of make.
override DEMO := $(patsubst ~/%,$(HOME)/%,$(DEMO))

# requirements.lock has the versions of the dependencies for Python 3.11 to 3.14 and all platforms. A package may have
# another version for another Python. uv installs them in a third of pip's processor time, and tools/uv.py passes pip's
# settings on to it, so that your own package index works.
VERSIONS := --constraint=requirements.lock
UV = $(VENV)/bin/python -m tools.uv
INSTALL = $(UV) pip install --quiet $(VERSIONS) --editable

# Python compiles each module once, not in each of the hundreds of processes that the tests start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help

help:  ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(VENV)/bin/uv:
	$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet uv || { echo "pip could not install uv, for the reason above. To install \
	without uv and the lock file, run $(VENV)/bin/python -m pip install --editable '.[test]' && touch $(VENV)/installed" >&2; exit 1; }

$(VENV)/installed: pyproject.toml requirements.lock | $(VENV)/bin/uv
	$(INSTALL) '.[$(EXTRAS)]'
	touch $@

demo: $(VENV)/installed  ## Train English -> French in four minutes, translate, and look at the attention
	$(VENV)/bin/python train.py --config=configs/demo.py --workdir='$(DEMO)'
	$(VENV)/bin/python decode.py --workdir='$(DEMO)' --split=test --checkpoint=best
	@# No sentence of the built-in corpus has a backslash, so the cells of the table are the unchanged sentences:
	@# docs/decoding.md.
	@cut -f1 '$(DEMO)/results/test.tsv' > '$(DEMO)/test.txt'
	@(grep -m1 -E '^[A-Z][a-z]+day, .* and ' '$(DEMO)/test.txt'; head -4 '$(DEMO)/test.txt') > '$(DEMO)/sample.txt'
	@$(VENV)/bin/python decode.py --workdir='$(DEMO)' --input='$(DEMO)/sample.txt' --pictures='$(DEMO)/pictures' > '$(DEMO)/sample.out'
	@paste '$(DEMO)/sample.txt' '$(DEMO)/sample.out'

test: $(VENV)/installed  ## Run the tests
	$(VENV)/bin/python -m pytest

test-all: $(VENV)/installed  ## Run also the slow tests, such as tests with several processes
	$(VENV)/bin/python -m pytest -m 'not browser'

test-slow: $(VENV)/installed  ## Run only the slow tests, except those of make test-interchange
	$(VENV)/bin/python -m pytest -m 'slow and not interchange'

test-newest:  ## Run the tests with the newest versions that pyproject.toml allows
	rm -f build/newest/installed
	$(MAKE) VENV=build/newest VERSIONS=--upgrade build/newest/installed
	build/newest/bin/python -m pytest

test-oldest:  ## Run the tests with the oldest versions that pyproject.toml allows
	$(MAKE) VENV=build/oldest VERSIONS='--upgrade --resolution=lowest-direct' build/oldest/installed
	build/oldest/bin/python -m pytest

interchange: $(VENV)/installed  ## Install PyTorch and the libraries that exchange models
	$(INSTALL) '.[test-interchange]'

test-interchange: interchange  ## Run the tests that need these libraries
	$(VENV)/bin/python -m pytest -m interchange

# libtpu needs a separate environment, because every program that finds libtpu looks for a TPU and logs a warning.
test-plan:  ## Compile the recipes for TPUs, without one, and check their memory and traffic
	$(MAKE) VENV=build/plan EXTRAS=test,plan build/plan/installed
	build/plan/bin/python -m pytest -m 'slow or not slow' tests/plan

test-browser: $(VENV)/installed  ## Test the attention explorer in Chromium; pictures of it go to build/browser
	$(INSTALL) '.[test,browser]'
	tests/browser/install_chromium.sh
	$(VENV)/bin/python -m pytest -m browser tests/browser

lint: $(VENV)/installed  ## Check style, types and imports
	$(INSTALL) '.[test,lint]'
	@# Runs all three checks, even if an earlier check fails.
	@status=0; for check in 'ruff check .' pyright 'lint-imports --no-logo'; do \
		echo "$$check"; $(VENV)/bin/$$check || status=1; done; exit $$status

docs: $(VENV)/installed  ## Build the documentation into build/docs, and check its links
	$(INSTALL) '.[test,docs]'
	@# Builds from scratch, because Sphinx does not repeat the warnings about pages that are already built.
	rm -rf build/docs build/doctrees docs/api
	$(VENV)/bin/python -m sphinx -c docs -d build/doctrees --quiet --fail-on-warning . build/docs
	cp build/docs/README.html build/docs/index.html
	$(VENV)/bin/python docs/links.py
	$(VENV)/bin/python docs/links.py build/docs

# The notebooks open RUN, RNN_RUN and SWEEP. If a variable is empty and the run of the recipe is missing, a notebook
# trains a short run.
notebooks: $(VENV)/installed  ## Execute notebooks/*.py into the .ipynb beside them
	RUN='$(RUN)' RNN_RUN='$(RNN_RUN)' SWEEP='$(SWEEP)' $(VENV)/bin/python -m notebooks.build

# Uses only the main index, because further indexes and folders often lack some of the files of a version.
lock: $(VENV)/bin/uv  ## Write requirements.lock with today's versions
	PIP_EXTRA_INDEX_URL= PIP_FIND_LINKS= $(UV) pip compile --quiet --upgrade --universal --python-version=3.11 --generate-hashes --no-annotate \
		--custom-compile-command='make lock' --extra=test --extra=lint --extra=docs --extra=interchange --extra=browser \
		--output-file=requirements.lock pyproject.toml

.PHONY: help demo docs interchange lint lock notebooks test test-all test-slow test-newest test-oldest test-browser test-interchange \
	test-plan
