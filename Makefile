# Short names for scripts/fm.py, which does the work. Pass options in ARGS: make lab ARGS="--port 9000"
PYTHON ?= python3
ARGS ?=

.PHONY: help setup lab lab-xla lab-frontends check test soak parity audit bench clean

help:
	@"$(PYTHON)" scripts/fm.py --help

setup lab lab-xla lab-frontends check test soak parity audit bench clean:
	@"$(PYTHON)" scripts/fm.py $@ $(ARGS)
