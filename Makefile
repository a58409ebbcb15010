# Two commands on a fresh machine: `make quickstart` and `make test`. Each creates .venv and installs into it when needed.
# Another interpreter: `make test PYTHON=python3.12`. Another index (say, torch without CUDA): pip's own PIP_EXTRA_INDEX_URL.

PYTHON ?= python3
BIN := .venv/bin
TORCH := $(shell grep -o '^torch==[^ ]*' requirements/torch.txt)

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-slow test-kernels test-models test-wheel test-oldest test-newest faults matrix proofs check bench bench-step gpu-first docs lock

help:
	@echo "make quickstart   train the built-in model in INT8: no download, no GPU"
	@echo "make test         the CPU suite (GPU tests run where there is a GPU)"
	@echo "make test-slow    the cases that do not fit its time, mostly those that another one stands for"
	@echo "make test-kernels every configuration of the Triton kernels, compiled for GPUs that are not there"
	@echo "make test-models  every type of model through plan, packing, training, ranks, export, generation (docs/models.md)"
	@echo "make test-wheel   the commands from the built wheel with the newest of what it needs: is their output clean?"
	@echo "make test-oldest  the CPU suite with the oldest torch and Triton, on Python 3.12 (5 GB of packages)"
	@echo "make test-newest  the same with the newest of everything, from the built wheel (5 GB)"
	@echo "make faults       kills, failing disks, damaged files, interrupted runs (half an hour)"
	@echo "make matrix       every kind x compilation x checkpointing, and every kind x 1 to 8 ranks (docs/*matrix.md)"
	@echo "make proofs       matrix, test-slow, test-models, all kinds on 1 to 4 ranks, and faults planted one by one that tests must notice"
	@echo "make check        ruff and mypy"
	@echo "make bench        the benchmarks that need nothing but this machine"
	@echo "make bench-step   the training step against transformers, torchao and torchtune: a table of ratios"
	@echo "make gpu-first    the first half hour on a GPU (docs/gpu.md); on a CPU its small form"
	@echo "make docs         build the documentation as a site, build/site, with the API; a broken link is an error"
	@echo "make lock         renew requirements/ci.txt from pyproject.toml, and requirements/docs.txt from docs.in, for all Pythons"

# requirements/ decides what is installed: exact versions, and each file is compared with its SHA-256. The source is used in place.
.venv/.installed: .venv/.torch pyproject.toml requirements/ci.txt
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps -r requirements/ci.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	$(BIN)/python -m pip install --quiet $(TORCH)  # the libraries of a CUDA build, in the versions that it pins
	$(BIN)/python -m pip check
	@touch $@

# The build that pip would take: for a CPU where an index or a folder of such builds is configured, else PyPI's for CUDA. Downloaded
# first, since pip prefers files whose digests it knows. A build of this version that torch.txt does not list: install it into .venv, then
# `touch .venv/.torch`.
.venv/.torch: requirements/torch.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || { \
	  echo "error: lptune needs Python 3.11 to 3.14, $(PYTHON) is $$($(PYTHON) --version 2>&1); install one, and name it: make PYTHON=python3.13" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: $(PYTHON) cannot make a virtual environment; install venv (Debian, Ubuntu: apt install $(notdir $(PYTHON))-venv)" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip download --quiet --no-deps --dest .venv/torch $(TORCH)
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps --no-index --find-links .venv/torch -r requirements/torch.txt
	@rm -r .venv/torch && touch $@

# One thread: for matrices this small a second one gains little, and loses much where another process wants the core.
quickstart: export OMP_NUM_THREADS := 1
quickstart: .venv/.installed
	test -e checkpoints/quickstart || $(BIN)/lptune new-checkpoint llama3_2/quickstart checkpoints/quickstart
	$(BIN)/lptune run full_finetune --config quickstart

# Three workers of one thread each: tests wait for processes and signals for a fifth of their time, so two
# workers keep two cores at 79 %, and three at 94 %. A file's tests go to one worker, or others would make what
# the file's fixtures make for all of its tests. tests/conftest.py puts the longest files first.
# What torch compiles is kept in TORCHINDUCTOR_CACHE_DIR (by default /tmp/torchinductor_$$USER) under the hash of
# its source, for all workers and ranks and for the next time.
SUITE := "not slow and not kernels"
BY_FILE := --dist loadfile --no-loadscope-reorder --durations=15
test: export OMP_NUM_THREADS := 1
test: .venv/.installed
	$(BIN)/python -m pytest -m $(SUITE) -n 3 $(BY_FILE)

# Cases beside those of the suite that stand for them: other kinds, meshes, features.
test-slow: export OMP_NUM_THREADS := 1
test-slow: .venv/.installed
	$(BIN)/python -m pytest -m slow -n 3 $(BY_FILE)

# The suite has one configuration of a kernel on an architecture; these are the others, one by one.
test-kernels: export OMP_NUM_THREADS := 1
test-kernels: .venv/.installed
	$(BIN)/python -m pytest -m kernels -n 2 tests/kernels

# The suite has packing and a step of each type; this is the rest, and the table in the page.
test-models: export OMP_NUM_THREADS := 1
test-models: .venv/.installed
	$(BIN)/python -m tests.proofs.models_matrix --write docs/models.md

# What a user gets who installs the wheel today: nothing pinned but torch, no extras. It is the
# wheel that runs; pytest and the tests are of .venv.
test-wheel: export OMP_NUM_THREADS := 1
test-wheel: .venv/.installed
	rm -rf .venv-wheel && $(PYTHON) -m venv .venv-wheel
	$(BIN)/python -m hatchling build -t wheel -d .venv-wheel/wheel
	.venv-wheel/bin/python -m pip install --quiet "$(TORCH)" .venv-wheel/wheel/*.whl
	.venv-wheel/bin/python -m pip list
	LPTUNE_TEST_INSTALLED=.venv-wheel/bin/python $(BIN)/python -m pytest -p no:cacheprovider tests/cli/test_streams.py

# As GPU machines are found: Python 3.12, the oldest torch and Triton, no torchao. In a venv of its own.
PYTHON_OLDEST ?= python3.12
.venv-oldest/.installed: pyproject.toml requirements/oldest.txt
	$(PYTHON_OLDEST) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet -c requirements/oldest.txt -e . \
	  pytest pytest-xdist hypothesis transformers accelerate hatchling pyarrow
	@touch $@

# The kernels' ahead-of-time compilations in full: what this Triton makes of each configuration.
test-oldest: export OMP_NUM_THREADS := 1
test-oldest: .venv-oldest/.installed
	.venv-oldest/bin/python -m pytest -m $(SUITE) -n 3 $(BY_FILE) -p no:cacheprovider
	.venv-oldest/bin/python -m pytest -m kernels -n 2 -p no:cacheprovider tests/kernels

# What a user gets who installs today: nothing pinned, the wheel and not the source. Made anew each time. With the extras
# and peers that CI does not install: tests of these run here alone.
PYTHON_NEWEST ?= python3.12
test-newest: export OMP_NUM_THREADS := 1
test-newest:
	rm -rf .venv-newest && $(PYTHON_NEWEST) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet hatchling
	.venv-newest/bin/python -m hatchling build -t wheel -d .venv-newest/wheel
	.venv-newest/bin/python -m pip install --quiet "$$(ls .venv-newest/wheel/*.whl)[test,data,eval,tensorboard]" \
	  trl lightning s3fs "moto[server]"
	.venv-newest/bin/python -m pip list
	LPTUNE_TEST_INSTALLED=.venv-newest/bin/python .venv-newest/bin/python -m pytest -p no:cacheprovider tests/cli/test_streams.py
	.venv-newest/bin/python -m pytest -m $(SUITE) -n 3 $(BY_FILE) -p no:cacheprovider
	.venv-newest/bin/python -m pytest -m kernels -n 2 -p no:cacheprovider tests/kernels

# Minutes each; the suite runs short forms of them.
faults: export OMP_NUM_THREADS := 1
faults: .venv/.installed
	$(BIN)/python -m tests.faults.kills --trials 1000 --ranks 1
	$(BIN)/python -m tests.faults.kills --trials 100 --ranks 2
	$(BIN)/python -m tests.faults.io_errors --ranks 1 2
	$(BIN)/python -m tests.faults.run_folder_errors
	$(BIN)/python -m tests.faults.resume
	for recipe in continued_pretrain distill full_dpo full_kto; do \
	  $(BIN)/python -m tests.faults.resume exact --recipe $$recipe || exit 1; done
	$(BIN)/python -m tests.faults.preemption --num-signals 50
	$(BIN)/python -m tests.faults.malformed --num-mutations 20000 --seed 1
	$(BIN)/python -m tests.faults.host_faults
	$(BIN)/python -m pytest tests/faults/test_hosts.py
	$(BIN)/python -m tests.proofs.fuzz_configs --num-configs 3000

# All cells; the suite runs some of them.
matrix: export OMP_NUM_THREADS := 1
matrix: .venv/.installed
	$(BIN)/python -m tests.proofs.matrix --write docs/matrix.md
	$(BIN)/python -m tests.proofs.rank_matrix --write docs/rank_matrix.md

proofs: export OMP_NUM_THREADS := 1
proofs: test-slow matrix test-models
	$(BIN)/python -m tests.proofs.equivalence
	$(BIN)/python -m tests.proofs.planted

check: .venv/.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# gpu_suite.py wants a GPU, crossover.py a quiet hour.
bench: .venv/.installed
	@set -e; for name in linear kernels numerics checkpoint; do \
	  echo "== benchmarks/$$name.py"; PYTHONPATH=. $(BIN)/python benchmarks/$$name.py; done

# torchtune goes into .venv-torchtune, since it needs an older torchao. ARGS="--rounds 20 --profile none" and the like.
bench-step: .venv/.installed
	$(BIN)/python benchmarks/step.py $(ARGS)

gpu-first:
	bash benchmarks/gpu_first.sh

# Sphinx is not what lptune needs, so it has a venv of its own. That sees the packages of .venv, since the API is read off the
# imported modules. A warning is an error: docs/site/conf.py.
.venv-docs/.installed: .venv/.installed requirements/docs.txt
	rm -rf .venv-docs && $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --require-hashes --no-deps -r requirements/docs.txt
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
	  "$$(.venv-docs/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/venv.pth"
	@touch $@

docs: .venv-docs/.installed
	$(BIN)/python -m pytest -q tests/docs/test_pages.py tests/test_docs.py
	.venv-docs/bin/python docs/site/build.py build/site
	@echo "build/site/index.html"

# uv resolves for all Pythons at once: a package that only some of them need gets a marker. RENEW=--upgrade takes the newest versions.
# Left out: torch, since torch.txt lists its builds, and what only its CUDA builds need, in the versions that their wheels pin.
UV_COMPILE := .venv-lock/bin/uv pip compile --quiet --universal --python-version 3.11 --fork-strategy fewest --generate-hashes \
  --no-annotate --custom-compile-command "make lock"
OF_CUDA := cuda-bindings cuda-toolkit nvidia-cudnn-cu13 nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvshmem-cu13
lock:
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet uv==0.13.9
	printf '%s\n' $(OF_CUDA) | $(UV_COMPILE) $(RENEW) --extra test --extra dev --constraints requirements/torch.txt --excludes - \
	  --no-emit-package torch -o requirements/ci.txt pyproject.toml > .venv-lock/out
	! grep ^nvidia- requirements/ci.txt
	$(UV_COMPILE) $(RENEW) -o requirements/docs.txt requirements/docs.in > .venv-lock/out
