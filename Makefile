# make demo: build the environment and tell a story.  make test: build it and pass the tests.
PYTHON ?= python3
BIN := .venv/bin
PROMPT ?= Once upon a time

.PHONY: demo test test-all lessons lessons-refresh lint certify reference grade golden clean

demo: .venv/installed
	$(BIN)/python -m minispec.generate "$(PROMPT)" --stats

test: .venv/tested
	$(BIN)/python -m pytest -q

test-all: .venv/tested
	$(BIN)/python -m pytest -q -m "not lessons"

# every notebook, run from a clean state; what fails is an error
lessons: .venv/lessons
	$(BIN)/python -m pytest -q -n 0 -m lessons --durations=0 --durations-min=0.05 tests/test_lessons.py

# their committed outputs, made anew
lessons-refresh: .venv/lessons
	$(BIN)/jupyter nbconvert --to notebook --execute --inplace \
		--ExecutePreprocessor.record_timing=False lessons/*.ipynb
	$(BIN)/jupyter nbconvert --coalesce-streams --inplace lessons/*.ipynb

lint: .venv/tested
	$(BIN)/ruff check .

certify: .venv/installed
	$(BIN)/python -m minispec.certify

# against transformers: same logits, its speed, and the certifier's verdict on it
reference: .venv/referenced
	$(BIN)/python -m pytest -q tests/test_reference.py
	$(BIN)/python -m minispec.bench --against transformers --prompts 4
	-PYTHONPATH=tests $(BIN)/python -m minispec.certify --impl transformers_assisted:assisted

# points of an assignment, or of all: make grade IMPL=my_solution.py A=a2_accept
grade: .venv/tested
	$(BIN)/python -m pytest -q --tb=no --no-summary lessons/assignments/$(A) $(if $(IMPL),--impl=$(IMPL))

# the committed golden values, made anew by transformers
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

.venv/referenced: .venv/tested
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[reference]"
	touch $@

clean:
	rm -rf .venv build *.egg-info
