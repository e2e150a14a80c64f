# Each target does its own set-up (scripts/setup.sh installs what is missing and is quick when nothing is).

PYTHON := .venv/bin/python
PYTEST_ARGS ?=
GPU_SITE := $(CURDIR)/build/gpu-site
GPU_RUN := $(CURDIR)/build/gpu-run

.DEFAULT_GOAL := help
.PHONY: help demo test lint format types sanitize wheel wheel-check docs docs-check notebook gpu-test gpu-bench gpu-ready \
	venv clean

help:
	@echo "make demo        run the demonstration, on generated data and on a small language model"
	@echo "make test        the whole test suite        (PYTEST_ARGS='-k name' to narrow)"
	@echo "make lint        ruff, and the C code with warnings as errors"
	@echo "make format      let ruff rewrite the Python files"
	@echo "make types       mypy --strict"
	@echo "make sanitize    C code under ASan, UBSan and TSan; Python engine tests under ASan"
	@echo "make docs        the documentation site, in build/docs-site"
	@echo "make docs-check  run the notebooks in docs/"
	@echo "make notebook    run them in full, on this machine's disk, and keep what they show"
	@echo "make wheel       sdist and abi3 wheel in dist/"
	@echo "make wheel-check install both with every Python that is here, and run them"
	@echo "make gpu-test    the suite on a machine with a GPU     (GPU_WHEELS=DIR: from wheels, without network)"
	@echo "make gpu-bench   the benchmarks, likewise"
	@echo "make venv        only the set-up             make clean   remove what was built"

venv:
	@scripts/setup.sh dev model

demo:
	@scripts/setup.sh model
	.venv/bin/aio-kv demo
	.venv/bin/aio-kv demo --model

test:
	@scripts/setup.sh dev model
	$(PYTHON) -m pytest $(PYTEST_ARGS)

lint:
	@scripts/setup.sh dev
	$(PYTHON) -m ruff check .
	@if [ -n "$$(ls native/src/*.c 2>/dev/null)" ]; then for file in native/src/*.c native/tests/*.c; do \
		[ ! -e "$$file" ] || $(CC) -std=gnu11 -O2 -fsyntax-only -Wall -Wextra -Wno-unused-parameter -Werror \
			-Inative/include -Inative/src -Inative/tests "$$file" || exit 1; done; echo "C: no warnings"; fi

format:
	@scripts/setup.sh dev
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

types:
	@scripts/setup.sh dev
	$(PYTHON) -m mypy

sanitize:
	scripts/sanitize.sh address
	scripts/sanitize.sh thread

docs:
	@scripts/setup.sh dev model docs
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict
	@echo "docs: build/docs-site/index.html"

docs-check:
	@scripts/setup.sh dev model
	@if [ -n "$$(ls docs/*.ipynb 2>/dev/null)" ]; then \
		$(PYTHON) -m pytest -q -W default --nbmake --nbmake-timeout=300 docs/*.ipynb; \
	else echo "docs-check: no notebooks in docs/"; fi

notebook:
	@scripts/setup.sh dev model bench
	AIO_KV_NOTEBOOK=full timeout 1800 .venv/bin/jupyter execute --inplace --timeout=900 docs/oracle_comparison.ipynb

# The wheel is built from the sdist, so that what the sdist lacks is noticed. auditwheel finds patchelf on PATH.
wheel:
	@scripts/setup.sh dev
	rm -rf dist build/wheel
	$(PYTHON) -m build --no-isolation --outdir build/wheel
	@mkdir dist && mv build/wheel/*.tar.gz dist/
	@case "$$(ls build/wheel)" in \
		*-linux_*.whl) PATH="$(CURDIR)/.venv/bin:$$PATH" $(PYTHON) -m auditwheel repair --strip --wheel-dir dist build/wheel/*.whl;; \
		*) mv build/wheel/*.whl dist/;; esac
	@ls dist

wheel-check: wheel
	scripts/check_wheel.sh

# With GPU_WHEELS=DIR, on a machine without network: everything comes from DIR, which holds the wheel of this project and
# those of its dependencies that the machine's python3 lacks; nothing of that python3 is changed. Without it, the machine
# sets itself up as for `make test`. Run from an empty folder, since in the checkout its aio_kv, which has no extension
# there, would be imported instead.
ifdef GPU_WHEELS
GPU_ENV := PYTHONPATH="$(GPU_SITE)" PYTHONDONTWRITEBYTECODE=1
GPU_PYTHON := python3
gpu-ready:
	@if [ -z "$$(ls "$(GPU_WHEELS)"/aio_kv-*.whl 2>/dev/null)" ]; then \
		echo "GPU_WHEELS=$(GPU_WHEELS) holds no aio_kv-*.whl: build one with 'make wheel' and copy it there" >&2; exit 2; fi
	@rm -rf "$(GPU_SITE)" "$(GPU_RUN)" && mkdir -p "$(GPU_RUN)"
	python3 -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-index --no-deps --no-compile \
		--find-links "$(GPU_WHEELS)" --target "$(GPU_SITE)" "$(GPU_WHEELS)"/*.whl
else
GPU_PYTHON := $(CURDIR)/.venv/bin/python
gpu-ready:
	@scripts/setup.sh dev cuda13
	@mkdir -p "$(GPU_RUN)"
endif

gpu-test: gpu-ready
	cd "$(GPU_RUN)" && $(GPU_ENV) $(GPU_PYTHON) -m pytest --import-mode=importlib -p no:cacheprovider \
		$(PYTEST_ARGS) "$(CURDIR)/tests"

gpu-bench: gpu-ready
	cd "$(GPU_RUN)" && $(GPU_ENV) $(GPU_PYTHON) -m aio_kv bench disk --json
	cd "$(GPU_RUN)" && $(GPU_ENV) $(GPU_PYTHON) -m aio_kv bench gpu --json

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis aio_kv/engine/_akv*.so
	rm -f .venv/.stamps/native
	find aio_kv native tests docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
