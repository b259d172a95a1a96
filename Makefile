# Every target sets up .venv by itself; nothing is installed outside it.
#   make train NGPU=4 ARGS="seq_len=8192 model=gpt2_medium"
# the shell splits ARGS into words, so quote as you would there:
#   make train ARGS="data=text 'data.paths=[my_folder]'"
# make itself reads $ in ARGS, and so does your shell: write \$\$ for it
#   make train ARGS="--multirun seed=1,2 'name=seed\$\${seed}'"
# NGPU is the number of processes: one per GPU, or on a CPU one per micro-batch of a step, as in
#   make train NGPU=2 ARGS="tokens_per_step=1024"

PYTHON ?= python3
NGPU ?= 1
ARGS ?=
TESTS ?= tests
export PYTHONUNBUFFERED = 1

VENV := .venv
PY := $(VENV)/bin/python
RUNTIME := $(VENV)/.runtime
DEVELOPMENT := $(VENV)/.development
# the kernels must also compile with the Triton of docs/results
TRITON_3_6 := $(VENV)/triton-3.6.0

# --no-compile: most of what is installed is never imported; Python compiles the rest at its first import, and
# must be allowed to keep the result
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check --no-compile

.DEFAULT_GOAL := help
.PHONY: help train test lint format compile record soak bench clean

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(RUNTIME): requirements.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, {sys.executable} is {v.major}.{v.minor}: make PYTHON=python3.12 ...")'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -r requirements.txt
	@touch $@

$(DEVELOPMENT): requirements-dev.txt $(RUNTIME)
	$(INSTALL) -r requirements-dev.txt
	@test -d $(TRITON_3_6) || $(INSTALL) --no-deps --target $(TRITON_3_6) triton==3.6.0 \
		|| echo "without triton 3.6.0 the tests that compile for it are skipped"
	@touch $@

SEES_GPU := $(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'

# glibc would return each large tensor to the kernel and map it again: a third of a CPU step's time
KEEP_MEMORY := MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184

# without a GPU the run is a small one, unless ARGS names an experiment
train: $(RUNTIME)  ## prepare the text, train, draw the loss curve, print a sample
	@case "$(NGPU)" in ""|0*|*[!0-9]*) \
		echo "error: NGPU must be a number of processes, 1 or more, got '$(NGPU)': write NGPU=2" >&2; exit 2;; \
	esac; \
	set -- $(ARGS); \
	if $(SEES_GPU); then \
		echo "GPU found: GPT-2 124M with flash attention, unless ARGS says otherwise"; \
	else \
		chosen=; for word; do case "$$word" in experiment=*|+experiment=*) chosen=1;; esac; done; \
		test -n "$$chosen" || { \
			echo "no GPU found: a small GPT on the CPU (experiment=laptop)"; \
			set -- "$$@" experiment=laptop; \
		}; \
		export $(KEEP_MEMORY); \
	fi; \
	if [ "$(NGPU)" -gt 1 ]; then \
		$(VENV)/bin/torchrun --standalone --nproc-per-node=$(NGPU) -m train "$$@"; \
	else \
		$(PY) -m train "$$@"; \
	fi

# four workers on two cores: tests wait for processes that they start. Files run in the order of their names, but
# the slowest run first, or one worker would be left alone with them at the end (tests/conftest.py). A process of
# tests either has a GPU or interprets the kernels, so a machine with a GPU needs two of them
PYTEST := TRITON_3_6=$(CURDIR)/$(TRITON_3_6) $(PY) -m pytest $(TESTS) -n 4 --dist loadfile --no-loadscope-reorder
# pytest's exit code where TESTS has none for a GPU
NO_TESTS := 5
test: $(DEVELOPMENT)  ## run every test that this machine can run
	CUDA_VISIBLE_DEVICES= $(PYTEST)
	if $(SEES_GPU); then $(PYTEST) -m gpu || test $$? -eq $(NO_TESTS); fi

lint: $(DEVELOPMENT)  ## check style and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(DEVELOPMENT)  ## rewrite the files in the house format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# the tests compile a part of this; ARGS="arch=sm_90,gfx942 mask=window" compiles less
compile: $(DEVELOPMENT)  ## compile every kernel under every mask for every GPU, without one: hours
	for triton in "" $(CURDIR)/$(TRITON_3_6); do PYTHONPATH=$$triton $(PY) -m tests.ahead_of_time \
		mask=full,causal,window,intervals dropout=0,1 block_size=0,64,128 $(ARGS) || exit 1; done

# keeps no row of an older commit's kernels, and does not compile again what has not changed
record: $(DEVELOPMENT)  ## note what compilers make of changed kernels, so that tests need not compile them again
	rm -f $(VENV)/.compiled
	NOTE_COMPILED=$(CURDIR)/$(VENV)/.compiled $(MAKE) test TESTS="tests/test_ahead_of_time.py \
		tests/test_ahead_of_time_masks.py tests/test_hopper.py tests/test_cross_entropy.py \
		tests/test_cut_lists.py tests/test_epilogues.py"
	$(PY) -m tests.compile_record $(VENV)/.compiled

soak: $(DEVELOPMENT)  ## kill training runs a hundred times and compare them bit for bit
	$(PY) tests/soak.py $(ARGS)

bench: $(RUNTIME)  ## time attention and training on this GPU
	$(PY) -m scripts.benchmark_attention out=attention.json $(ARGS)
	$(PY) -m scripts.benchmark_training out=training.json $(ARGS)

clean:  ## remove .venv (data and runs stay)
	rm -rf $(VENV)
