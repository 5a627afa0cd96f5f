# make demo: build the environment and answer a question.  make test: build it and run the tests.
PYTHON ?= python3
BIN := .venv/bin
QUESTION ?= $(REVERSE)
REVERSE := Write a Python function that reverses a string.
REAL := weights/smollm2/target/config.json

# make gpu GPU_PYTHON=python3 uses that Python and its torch instead of .venv
GPU_PYTHON ?= $(BIN)/python
GPU_READY := $(if $(filter $(BIN)/python,$(GPU_PYTHON)),.venv/tested)
GPU_RUN = PYTHONPATH=.:$$PYTHONPATH $(GPU_PYTHON)

# the variable's value as one word of the shell, whatever characters it has
quoted = '$(subst ','\'',$($1))'

.PHONY: demo test test-all lessons lessons-refresh badges gallery site lint certify reference engine engines \
	engines-stale smollm2 speed gpu gpu-heads grade gradescope score leaderboard golden clean

# A real model answers a question by plain decoding, then by FastMTP; offline, the toy tells a story.
demo: .venv/installed
	@if [ -e $(REAL) ] || $(BIN)/python -m minispec fetch; then ask=$(call quoted,QUESTION); options="--model smollm2 --chat"; \
	else ask="Once upon a time"; options=; echo "Could not download the real model; falling back to the bundled toy."; fi; \
	for method in autoregressive "fastmtp --k auto"; do printf '\n> %s   (%s)\n' "$$ask" "$$method"; \
		$(BIN)/python -m minispec.generate "$$ask" $$options --method $$method --color --stats \
			--max-new-tokens 120 < /dev/null || exit; done

test: .venv/tested
	$(BIN)/python -m pytest -q

test-all: .venv/tested
	$(BIN)/python -m pytest -q -m "not lessons and not site"

# run every notebook in a fresh kernel; any exception is a failure
lessons: .venv/lessons
	$(BIN)/python -m pytest -q -n 0 -m lessons --durations=0 --durations-min=0.05 tests/test_lessons.py

# regenerate the notebooks' committed outputs
lessons-refresh: .venv/lessons
	$(BIN)/jupyter nbconvert --to notebook --execute --inplace \
		--ExecutePreprocessor.record_timing=False lessons/*.ipynb
	$(BIN)/jupyter nbconvert --coalesce-streams --inplace lessons/*.ipynb

# rewrite the lessons' Colab badges and first cells from the address in pyproject.toml
badges: .venv/installed
	$(BIN)/python lessons/badges.py

# write the runs that the lessons link to
PAGE = $(BIN)/python -m minispec.generate --device cpu --max-new-tokens 80 --html lessons/gallery/
STORY := Once upon a time, there was a little girl named Lily.
MERGE := Write a Python function to merge two sorted lists into one sorted list.
BICYCLE := How does a bicycle stay upright while it is moving?
SPELLING := Correct the spelling: The lighthouse keeper had not spokn to anyone for three weeks when \
	the boat apeared. It had no sails and no oars, and yet it moved stedily towards the rocks. A \
	lantern swung at its bow, and somebody was singing.

gallery: .venv/installed $(REAL)
	$(PAGE)speculative.html --method speculative --verify tokens --model weights/target --temperature 0.8 --seed 1 "$(STORY)"
	$(PAGE)medusa.html --method medusa --model smollm2 --chat "$(BICYCLE)" < /dev/null
	$(PAGE)lookahead.html --method lookahead --model smollm2 --chat "$(MERGE)" < /dev/null
	$(PAGE)fastmtp.html --method fastmtp --model smollm2 --chat "$(REVERSE)" < /dev/null
	$(PAGE)hybrid.html --method hybrid --model smollm2 --chat "$(SPELLING)" < /dev/null

# Python for the browser, with which the site judges exercises; without npm it has none
PYODIDE := build/pyodide/package/package.json

$(PYODIDE): Makefile
	rm -rf build/pyodide && mkdir -p build/pyodide
	-cd build/pyodide && npm pack --silent pyodide@314.0.7 && tar -xzf *.tgz && touch package/*.json

# the README, lessons, gallery and API as a website in build/site, checked in a browser
site: .venv/site $(PYODIDE)
	rm -rf build/site
	$(BIN)/python -m sphinx -q -W -E -d build/doctrees -c lessons/site . build/site
	$(BIN)/python -m pytest -q -n 0 -rs -m site tests/test_site.py

lint: .venv/tested
	$(BIN)/ruff check .

certify: .venv/installed
	$(BIN)/python -m minispec.certify

# download SmolLM2-135M-Instruct, a real model; use it with --model smollm2
smollm2: $(REAL)

$(REAL): | .venv/installed
	$(BIN)/python -m minispec fetch

# Print the tables of speeds with SmolLM2 as Markdown, eager and compiled; an hour on an idle machine.
# With QUESTIONS=…/spec_bench.jsonl, those of Spec-Bench follow.
SPEED_METHODS := fastmtp k=3,fastmtp k=auto,medusa tree=auto,prompt-lookup k=auto,hybrid k=auto,hybrid tree=auto
SPEED_REPEATS ?= 1
SPEED = $(BIN)/python -m minispec.bench --model smollm2 --markdown --methods "$(SPEED_METHODS)" \
	--max-new-tokens 64 --repeats $(SPEED_REPEATS)
SPEC_BENCH = --questions $(call quoted,QUESTIONS) --prompts 8

speed: .venv/installed $(REAL)
	@$(SPEED) --questions weights/smollm2/prompts.jsonl --prompts 10
	@$(SPEED) --questions weights/smollm2/prompts.jsonl --prompts 10 --compile
ifdef QUESTIONS
	@$(SPEED) $(SPEC_BENCH)
	@$(SPEED) $(SPEC_BENCH) --compile
endif

# compare with transformers: its logits and speed, and what the certifier finds in it
reference: .venv/referenced
	$(BIN)/python -m pytest -q tests/test_reference.py
	$(BIN)/python tests/engines/speed.py weights/target --prompts 4
	-$(BIN)/python -m minispec.certify --impl tests/engines/transformers_engine.py:assisted

# For a machine with a GPU, each under ten minutes: the first measures speed, the second generates
# text with SmolLM2 and trains heads on it. Both resume where they stopped. ARGS=--small: on a CPU.
gpu: $(GPU_READY)
	$(GPU_RUN) tests/gpu/speed.py $(ARGS)

gpu-heads: $(GPU_READY)
	$(GPU_RUN) tests/gpu/heads.py $(if $(QUESTIONS),--questions $(call quoted,QUESTIONS)) \
		$(if $(DATA),--data $(DATA)) $(ARGS)

# build environments for other engines and certify them all; run by hand, hours
include tests/engines/engines.mk

# grade one assignment or, without A, all: make grade IMPL=my_solution.py A=a2_accept; SEED=1
# draws the random cases of this seed, else any are drawn
grade: .venv/tested
	@test -d lessons/assignments/$(call quoted,A) || { echo "make grade: A is none of these:" \
		$(notdir $(wildcard lessons/assignments/a?_*)); exit 2; }
	$(BIN)/python -m pytest -q --tb=no --no-summary lessons/assignments/$(A) \
		$(if $(IMPL),--impl=$(call quoted,IMPL)) $(if $(SEED),--seed=$(SEED))

# what a course uploads to Gradescope: make gradescope A=a2_accept writes build/a2_accept.zip; with
# SEED=123 all students get the same random cases
gradescope: .venv/tested
	$(BIN)/python -m lessons.assignments.gradescope $(call quoted,A) build/$(call quoted,A).zip \
		$(if $(SEED),--seed=$(SEED))

# score a decoder, tokens per unit of a fixed cost: make score IMPL=my_decoder.py JSON=scores/me.json;
# SEED=1 chooses other texts. make leaderboard SCORES=scores writes build/leaderboard.html
score: .venv/tested
	$(BIN)/python -m lessons.assignments.score $(if $(IMPL),$(call quoted,IMPL)) \
		$(if $(SEED),--seed=$(SEED)) $(if $(JSON),--json=$(call quoted,JSON))

leaderboard: .venv/tested
	$(BIN)/python -m lessons.assignments.leaderboard $(call quoted,SCORES) build/leaderboard.html

# regenerate the committed golden values with transformers
golden: .venv/referenced
	$(BIN)/python tests/make_golden.py

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/tested: .venv/installed
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $@

.venv/lessons: .venv/tested
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[lessons]"
	touch $@

.venv/site: .venv/tested
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[site]"
	touch $@

.venv/referenced: .venv/tested
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[reference]"
	touch $@

clean:
	rm -rf .venv build *.egg-info
