# Every target makes the virtual environment that it needs, once.
PYTHON ?= python3
VENV := .venv
DEMO := runs/demo

.DEFAULT_GOAL := help

help:  ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# The pip that comes with Python 3.11 takes twice as long over the last step as the newest one.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet --editable '.[test]'
	touch $@

demo: $(VENV)/installed  ## Train English -> French in four minutes, translate, and look at the attention
	$(VENV)/bin/python train.py --config=configs/demo.py --workdir=$(DEMO)
	$(VENV)/bin/python decode.py --workdir=$(DEMO) --split=test --checkpoint=best
	@# No sentence of the built-in corpus has a backslash, so the table holds each as it is: docs/decoding.md.
	@cut -f1 $(DEMO)/results/test.tsv > $(DEMO)/test.txt
	@(grep -m1 -E '^[A-Z][a-z]+day, .* and ' $(DEMO)/test.txt; head -4 $(DEMO)/test.txt) > $(DEMO)/sample.txt
	@$(VENV)/bin/python decode.py --workdir=$(DEMO) --input=$(DEMO)/sample.txt --pictures=$(DEMO)/pictures > $(DEMO)/sample.out
	@paste $(DEMO)/sample.txt $(DEMO)/sample.out

test: $(VENV)/installed  ## Run the tests
	$(VENV)/bin/python -m pytest

test-all: $(VENV)/installed  ## Run all tests but those of other libraries, of TPUs and of a browser
	$(VENV)/bin/python -m pytest -m 'not browser'

test-slow: $(VENV)/installed  ## Run the tests that take minutes, the commands of the documentation among them
	$(VENV)/bin/python -m pytest -m slow

test-interchange: $(VENV)/installed  ## Test against other libraries: PyTorch, transformers, CTranslate2; W&B, MLflow
	$(VENV)/bin/python -m pip install --quiet --editable '.[test-interchange]'
	$(VENV)/bin/python -m pytest tests/interchange tests/training/test_trackers.py

# In an environment of its own: where libtpu is, every program looks for a TPU when it starts, and complains.
test-plan:  ## Compile the recipes for TPUs, without one, and hold them to their budgets of memory and traffic
	$(MAKE) VENV=build/plan build/plan/installed
	build/plan/bin/python -m pip install --quiet --editable '.[test,plan]'
	build/plan/bin/python -m pytest -m 'slow or not slow' tests/plan

test-browser: $(VENV)/installed  ## Try the attention explorer in Chromium; pictures of it go to build/browser
	$(VENV)/bin/python -m pip install --quiet --editable '.[test,browser]'
	tests/browser/install_chromium.sh
	$(VENV)/bin/python -m pytest -m browser tests/browser

lint: $(VENV)/installed  ## Check style, types and imports
	$(VENV)/bin/python -m pip install --quiet --editable '.[test,lint]'
	@# All three, also where the first finds something.
	@status=0; for check in 'ruff check .' pyright 'lint-imports --no-logo'; do \
		echo "$$check"; $(VENV)/bin/$$check || status=1; done; exit $$status

docs: $(VENV)/installed  ## Build the documentation into build/docs, and check its links
	$(VENV)/bin/python -m pip install --quiet --editable '.[test,docs]'
	@# From nothing, for what was built before is not warned about again.
	rm -rf build/docs build/doctrees docs/api
	$(VENV)/bin/python -m sphinx -c docs -d build/doctrees --quiet --fail-on-warning . build/docs
	cp build/docs/README.html build/docs/index.html
	$(VENV)/bin/python docs/links.py
	$(VENV)/bin/python docs/links.py build/docs

# RUN, RNN_RUN and SWEEP are what the notebooks open; without one, a short training is made.
notebooks: $(VENV)/installed  ## Execute notebooks/*.py into the .ipynb beside them
	RUN=$(RUN) RNN_RUN=$(RNN_RUN) SWEEP=$(SWEEP) $(VENV)/bin/python -m notebooks.build

.PHONY: help demo docs lint notebooks test test-all test-slow test-browser test-interchange test-plan
