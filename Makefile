# make demo: unlearn Cristiano Ronaldo from the bundled model by two methods, score them beside the original, relearn
# make test: lint, type-check and run the tests; make slow: the slowest, which train for
# minutes, run in several processes, judge the bundled models or repeat a whole (CI runs both)
# Both create .venv on the first run. Off-line after that.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
export HF_HUB_OFFLINE := 1
# The bundled model is too small for a second thread to help, and threads that wait for a busy core cost much.
export OMP_NUM_THREADS ?= 1

.PHONY: venv install demo test slow lint compat tofu-mini

venv install: $(DEV)

# A stamp is newer than what it was made from: a second run installs nothing. A new pip finds the versions in a third
# of the time of the one that comes with Python 3.11, and what is never imported need not be compiled.
$(STAMP): pyproject.toml constraints.txt lm_eval_elude/hook.py lm_eval_elude/hook.pth lm_eval_elude/hook.start
	@test -x $(BIN)/python || $(PYTHON) -m venv --upgrade-deps $(VENV)
	@$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e .
	@touch $@

# What the demo does without.
$(DEV): $(STAMP)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	touch $@

TRAIN := $(BIN)/optout-train --target ronaldo --overwrite
RUNS := runs/demo
# Two trainings at once, one a core. What the first prints goes to a file, for two progress bars share no terminal; it is
# shown where it failed.
demo: $(STAMP)
	@mkdir -p $(RUNS) && rm -rf $(RUNS)/stress && date +%s > $(RUNS)/began
	@echo "opt-out and name-swap forget Cristiano Ronaldo: three to seven minutes on two cores"
	@$(TRAIN) --output_dir $(RUNS)/opt-out > $(RUNS)/opt-out.txt 2>&1 & trap "kill $$! 2> /dev/null" EXIT INT; \
	$(TRAIN) --method name-swap --output_dir $(RUNS)/name-swap > $(RUNS)/name-swap.txt && wait $$!; \
	status=$$?; test $$status = 0 || cat $(RUNS)/opt-out.txt; exit $$status
	@$(BIN)/elude stress $(RUNS)/name-swap --suite smoke --out $(RUNS)/stress > $(RUNS)/stress.txt
	@$(BIN)/elude report $(RUNS)/name-swap/scores/* opt-out=$(RUNS)/opt-out/scores/opt-out --original original \
		--reference retrained --stress name-swap=$(RUNS)/stress --out $(RUNS)/report.html
	@s=$$(($$(date +%s) - $$(cat $(RUNS)/began))); echo "$$((s / 60)) min $$((s % 60)) s without installation"

# TOFU's circle on made-up authors: starting, retained and unlearned models, scored beside the retained one.
tofu-mini: $(DEV)
	$(BIN)/python benchmarks/tofu_mini.py

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python --summary=none

test: lint
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

slow: $(DEV)
	$(BIN)/pytest -n 2 --dist loadfile -m slow

# Installs each supported lm-eval (network) and scores the bundled model with it.
compat: $(DEV)
	$(BIN)/python benchmarks/compat.py
