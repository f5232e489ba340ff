# Two commands: `make report` and `make test`. Each works on a fresh clone, alone and in any order.
.DEFAULT_GOAL := help
.PHONY: help report test lint format docs bench-parser notebooks results clean
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
	@echo "make test          the tests (no GPU needed)"
	@echo "make lint          ruff and pyright"
	@echo "make docs          the documentation: build/site/index.html"
	@echo "make bench-parser  the HLO parser's speed, 1 to 32 layers"
	@echo "make notebooks     run the notebooks and keep their output"
	@echo "make results       the result tables and the chart, from notebooks/results and the dispatch rules"
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
	$(PY) -m pytest -n 2 --dist loadfile --ignore tests/kernels
	$(PY) -m pytest -n 2 --dist worksteal tests/kernels

lint: $(DEV)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright

format: $(DEV)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --site-dir build/site

bench-parser: $(DEV)
	$(PY) benchmarks/parser.py

notebooks: $(DEV)
	$(PY) scripts/run_notebooks.py

results: $(DEV)
	$(PY) scripts/write_results.py
	$(PY) scripts/plot_block.py

clean:
	rm -rf .venv $(OUT) .pytest_cache .ruff_cache .hypothesis
