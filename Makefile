# Each target sets itself up from nothing: `make test` in a fresh clone is enough.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
CODE := $(wildcard setup.py tflms_sft rewriters tests examples benchmarks)

export TF_CPP_MIN_LOG_LEVEL ?= 2
# The theme prints a notice about another project otherwise.
export NO_MKDOCS_2_WARNING := 1

.PHONY: demo demo-slide test test-for test-all test-versions fuzz lint docs clean

demo: $(STAMP)
	$(RUN) -m examples.demo

demo-slide: $(STAMP)
	$(RUN) -m examples.slide

test: lint
	$(RUN) -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# The tests of some packages, in two minutes: `make test-for PKG="rules tiling"`.
test-for: $(STAMP)
	$(RUN) tests/helpers/package_tests.py $(PKG)

# An empty -m takes the place of the "not slow" in pyproject.toml.
test-all: lint
	$(RUN) -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m ""

# The core tests on the oldest and the newest supported versions, in environments of their own. OLDEST_PYTHON and
# NEWEST_PYTHON name interpreters; ANY_PYTHON=1 falls back to other releases of CPython that are there.
test-versions:
	$(PYTHON) tests/helpers/version_pairs.py $(if $(OLDEST_PYTHON),--oldest-python $(OLDEST_PYTHON)) \
	$(if $(NEWEST_PYTHON),--newest-python $(NEWEST_PYTHON)) $(if $(ANY_PYTHON),--any-python)

# Random networks: `make fuzz N=1000`, and `SEED=...` for those of another run.
fuzz: $(STAMP)
	$(RUN) tests/helpers/fuzz.py $(or $(N),1000) $(SEED)

# The site is at build/site/index.html; a warning is an error.
docs: $(STAMP)
	$(RUN) -m mkdocs build --strict

lint: $(STAMP)
	$(RUN) -m ruff check $(CODE)
	$(RUN) -m ruff format --check --quiet $(CODE)
	$(RUN) -m mypy

# Asked first: pip's own answer to a wrong Python is that TensorFlow does not exist.
$(STAMP): setup.py pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; \
	sys.exit(None if sys.implementation.name == "cpython" and (3, 10) <= v <= (3, 13) else \
	"tflms-sft needs CPython 3.10 to 3.13, for which TensorFlow has wheels. Received: " \
	+ sys.implementation.name + " %d.%d. Name another with: make PYTHON=python3.11" % v)'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -e '.[test,examples,plot,docs]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find tflms_sft rewriters tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
