# `make test` and `make demo` work on a fresh machine with Python 3.11+ and make.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
DEMO_DIR ?= runs/demo

.PHONY: test test-hf test-aot test-processes demo lint clean

$(VENV)/.installed: setup.py
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; name another with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade 'pip>=23'
	$(PY) -m pip install --quiet --editable '.[test]'
	touch $@

# Tests that share compiled programs stay with one worker: tests/conftest.py says which.
test: $(VENV)/.installed lint
	$(PY) -m pytest --numprocesses=auto --maxprocesses=8 --dist=loadgroup --no-loadscope-reorder

# Also checks the exported adapter against Hugging Face PEFT (installs torch).
test-hf: $(VENV)/.installed
	$(PY) -m pip install --quiet --editable '.[hf]'
	$(PY) -m pytest -m hf

# Compiles one full-size capture chunk for 32 TPUs that need not be there (installs libtpu; minutes of two cores).
test-aot: $(VENV)/.installed
	$(PY) -m pip install --quiet --editable '.[tpu]'
	$(PY) -m pytest -m aot

# The main job in four processes, one of them killed, resumed (minutes of compilation).
test-processes: $(VENV)/.installed
	$(PY) -m pytest -m processes

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .

demo: $(VENV)/.installed
	$(PY) experiments/demo.py --workdir=$(DEMO_DIR)

clean:
	rm -rf $(VENV) runs build *.egg-info
