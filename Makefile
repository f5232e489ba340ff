# Two commands: `make report` and `make test`. Each works on a fresh clone, alone and in any order.
.DEFAULT_GOAL := help
.PHONY: help report test test-all lint format docs docs-release notebooks results clean
SHELL := /bin/bash
PY := .venv/bin/python
# A machine without a GPU needs no CUDA client; on one with a GPU say JAX_PLATFORMS= make test.
export JAX_PLATFORMS ?= cpu
OUT ?= report
REPORT_ARGS ?=

INPUTS := pyproject.toml constraints.txt scripts/make_venv.sh
RUN := .venv/.installed-run
DEV := .venv/.installed-dev

help:
	@echo "make report        what XLA makes of a Llama-size block on an H200, as a page: $(OUT)/report.html"
	@echo "make test          the tests but for slow ones, of some a part drawn by chance: minutes (no GPU needed)"
	@echo "make test-all      all tests"
	@echo "make smoke-jax0.12 some tests with jax 0.12, or 0.11: versions from constraints-jax0.12.txt"
	@echo "make lint          ruff and pyright"
	@echo "make docs          the documentation: build/site/index.html"
	@echo "make docs-release  the same, kept as a version in the branch gh-pages, of this clone alone"
	@echo "make notebooks     run the notebooks and keep their output"
	@echo "make results       the result tables and the chart, from notebooks/results"
	@echo "make clean         remove .venv and what the above wrote"

$(RUN): $(INPUTS)
	@scripts/make_venv.sh deviceless
	@touch $@

$(DEV): $(INPUTS)
	@scripts/make_venv.sh deviceless,notebooks,dev
	@touch $(RUN) $@

report: $(RUN)
	$(PY) -m xlafuse.cli report --block llama3-8b --shape 2x4096 --target h200 -o $(OUT) $(REPORT_ARGS)

test: $(DEV)
	$(PY) -m pytest -n 2 --dist loadfile --ignore tests/kernels -m "not slow"
	$(PY) -m pytest -n 2 --dist worksteal tests/kernels -m "not slow"

test-all: $(DEV)
	$(PY) -m pytest -n 2 --all --dist loadfile --ignore tests/kernels
	$(PY) -m pytest -n 2 --all --dist worksteal tests/kernels

# Another version of jax lies in a folder in front of the environment's own.
build/jax%/.installed: constraints-jax%.txt
	rm -rf $(@D)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --target $(@D) --requirement $<
	@touch $@

smoke-jax%: $(DEV) build/jax%/.installed
	PYTHONPATH=$(CURDIR)/build/jax$* $(PY) tests/kernels/smoke.py
	PYTHONPATH=$(CURDIR)/build/jax$* $(PY) -m pytest tests/kernels/test_interpreter.py \
	  tests/kernels/test_gemm.py::test_epilogue_order tests/kernels/test_rms_norm.py::test_only_the_sum_is_used \
	  tests/capture/test_capture.py::test_every_artefact_is_there_and_is_what_it_says \
	  tests/capture/test_capture.py::test_resources_of_kernels
	PYTHONPATH=$(CURDIR)/build/jax$* $(PY) -m xlafuse.cli report --block tiny --shape 1x128 --target h200 --try 0 \
	  --strategies unfused,pallas_cudnn,fused -o build/jax$*-report

lint: $(DEV)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright

format: $(DEV)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --site-dir build/site

# Keeps this version's documentation beside earlier ones, in the branch gh-pages; it pushes nothing.
docs-release: $(DEV)
	NO_MKDOCS_2_WARNING=1 PATH=$(CURDIR)/.venv/bin:$$PATH mike deploy --update-aliases \
	  $$($(PY) -c 'from importlib.metadata import version; print(version("xlafuse"))') latest
	PATH=$(CURDIR)/.venv/bin:$$PATH mike set-default latest

notebooks: $(DEV)
	$(PY) scripts/run_notebooks.py

results: $(DEV)
	$(PY) scripts/write_results.py
	$(PY) scripts/public_models --write-page
	$(PY) scripts/plot_block.py
	$(PY) scripts/write_studies.py

clean:
	rm -rf .venv $(OUT) .pytest_cache .ruff_cache .hypothesis
