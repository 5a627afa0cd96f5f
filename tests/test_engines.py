"""The table of other engines: TABLE.md is up to date, and results say which certifier made them."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT

ENGINES = ROOT / "tests" / "engines"


@pytest.fixture
def engines(monkeypatch) -> SimpleNamespace:
    """The scripts of tests/engines."""
    monkeypatch.syspath_prepend(ENGINES)
    import run
    import table

    return SimpleNamespace(run=run, table=table)


def test_the_table_is_up_to_date_and_its_losses_have_reasons(engines):
    page = (ENGINES / "TABLE.md").read_text(encoding="utf-8")
    assert page == engines.table.page(), "run python tests/engines/table.py"
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == len(engines.run.FUNCTIONS)
    for function, row in zip(engines.run.FUNCTIONS, rows):
        assert f"[`{function.name}`]({function.file}_engine.py)" == row[1]
        note = row[-1].removesuffix(" |")
        assert all("(README.md#" in cell or note for cell in row if cell.startswith("**")), row


def test_results_and_notes_are_of_functions_that_are_run(engines):
    labels = [function.label for function in engines.run.FUNCTIONS]
    assert len(set(labels)) == len(labels)
    assert set(engines.run.read()) | set(engines.table.read_notes()) <= set(labels)


def verdict(check: str, case: str, passed: bool | None, detail: str = "", tv: float | None = None):
    return {"check": check, "case": case, "passed": passed, "detail": detail, "detectable_tv": tv}


def test_a_mended_copy_differs_where_it_should_and_the_function_stays(monkeypatch):
    monkeypatch.syspath_prepend(ENGINES)
    from mend import mend

    mended = mend(verdict, ('"detail": detail', '"detail": detail.upper()'))
    arguments = "greedy", "all", True, "wrong"
    assert mended(*arguments) == verdict(*arguments) | {"detail": "WRONG"}
    assert verdict(*arguments)["detail"] == "wrong"
    with pytest.raises(AssertionError, match="verdict does not contain: nothing"):
        mend(verdict, ("nothing", ""))

    def text(value):
        return json.dumps(value)

    assert text("a") == '"a"' and mend(text, json=SimpleNamespace(dumps=repr))("a") == "'a'"


def test_a_fixed_function_mends_others_in_place_when_it_is_first_called(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ENGINES)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "wrong.py").write_text("class Counter:\n    def next(self, n): return n + 2\n")
    import wrong
    from mend import fixed

    count = wrong.Counter().next
    right = fixed(lambda n: wrong.Counter().next(n), ("wrong.Counter.next", ("+ 2", "+ 1")))
    assert wrong.Counter().next(1) == 3
    assert [right(1), right(2)] == [2, 3] and count(1) == 3


def test_a_run_replaces_its_line_which_makes_the_cells(engines, monkeypatch, tmp_path):
    run = engines.run
    monkeypatch.setattr(run, "RESULTS", tmp_path / "results.jsonl")
    monkeypatch.setattr(run, "DETAILS", tmp_path)
    report = {
        "finished": True, "date": "2026-11-29T21:45:30+00:00", "seconds": 181.6, "threads": 1,
        "processor": "AMD EPYC", "instructions": "AVX2", "verdicts": [
            verdict("exact", "vocab 2", True, "TV 1.2e-07 over sequences of 3 tokens"),
            verdict("exact", "vocab 3", None, "not supported: top-p"),
            verdict("greedy", "all", True), verdict("greedy", "batches", False, "wrong"),
            verdict("limits", "all", False, "all tokens: raised TypeError: no"),
            verdict("sampled", "all", True, "", 0.0721), verdict("drafts", "both", True),
        ],
    }  # fmt: skip
    second, first = [function for function in run.FUNCTIONS if not function.drafts][:2]
    for function, seconds in (first, 1.0), (second, 2.0), (first, 181.6):
        line = {"function": function.label, "certifier": run.certifier()}
        run.write(line | run.summary(report | {"seconds": seconds}))
    lines = list(map(json.loads, run.RESULTS.read_text(encoding="utf-8").splitlines()))
    assert [line["function"] for line in lines] == [second.label, first.label]
    assert lines[1]["seconds"] == 182 and lines[1]["unseen"] == 0.072 and lines[1]["tv"] == 1.2e-7
    assert lines[1]["failed"] == ["greedy: batches"] and lines[1]["raised"] == ["limits: all"]
    cells = engines.table.verdicts(lines[1])
    assert {name: cells[name] for name in ("greedy", "sampled", "batches", "end tokens")} == {
        "greedy": "yes", "sampled": "yes (TV 1e-07; 2 of 3)", "batches": "no", "end tokens": "stops"
    }  # fmt: skip
    wrong = lines[1] | {"failed": ["statistical: T=1"]}
    assert engines.table.verdicts(wrong)["sampled"] == "no (1 of 4)"
    assert engines.table.verdicts(wrong | {"tv": 0.12})["sampled"] == "no (TV 0.1; 1 of 4)"
    assert {function for function, _ in run.stale()} == set(run.FUNCTIONS) - {first, second}
    kept = run.RESULTS.read_bytes()
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run.write(lines[0])
    assert run.RESULTS.read_bytes() == kept


@pytest.mark.parametrize("name", ["", "no such engine"])
def test_an_unknown_engine_is_one_line_that_names_those_there_are(
    engines, monkeypatch, capsys, name
):
    monkeypatch.setattr("sys.argv", ["run.py", name])
    with pytest.raises(SystemExit, match="2"):
        engines.run.main()
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"no function's label contains {name!r}; engines: minispec transformers" in last


def test_bits_are_compared_with_the_engines_own_plain_decoding(engines):
    run = engines.run
    by_label = {function.label: function for function in run.FUNCTIONS}
    own, other, heads, lossy, none = (by_label[label] for label in (
        "mini_infer speculative (.venv)", "transformers_kinds early_exit (.venv)",
        "vllm_heads mtp (vllm)", "transformers_heads gemma4 (.venv)",
        "flashspec model (.venv)"))  # fmt: skip
    assert own.plain == "tests/engines/mini_infer_engine.py:plain"
    assert heads.plain == "tests/engines/vllm_engine.py:plain"
    assert lossy.plain == "tests/engines/transformers_heads_engine.py:gemma4_plain"
    assert other.plain == none.plain == "tests/engines/transformers_engine.py:plain"
    found = [
        verdict("bits", "short", False, "8 of 8 texts differ; the first, after"),
        verdict("bits", "long", True, "equal texts: 8 prompts, 512 tokens, no"),
        verdict("drafts", "both", True, "121 of 10246 drafts accepted"),
    ]
    assert run.changed_texts(found) == "8 of 16"
    raised = verdict("bits", "long", False, "raised TypeError: no")
    assert run.changed_texts([*found, raised]) == "stops"
    assert run.changed_texts([verdict("bits", "", None, "not supported: greedy")]) == "skipped"
    line = {"failed": ["greedy: batches", "sampled: all"]}
    assert run.bits_to_compare(own, line) == ["float32"]
    assert run.bits_to_compare(heads, line) == ["float32", "bfloat16"]
    assert run.bits_to_compare(heads, line | {"bits": {"float32": "8 of 16"}}) == ["bfloat16"]
    assert not run.bits_to_compare(heads, line | {"failed": ["greedy: prompts"]})
    for label in "mini_infer plain (.venv)", "vllm_fixed mtp (vllm)":
        assert not run.bits_to_compare(by_label[label], line)
    bits = engines.table.bits
    assert bits({"float32": "0 of 24", "bfloat16": "2 of 24"}) == (
        "no (0 of 24 in float32; 2 of 24 in bfloat16)"
    )
    assert bits({"float32": "skipped"}) == "skipped in float32"
    assert bits({"float32": "0 of 24"}) == "yes (0 of 24 in float32)" and bits({}) == ""


def test_a_result_is_stale_if_the_code_that_judges_changes_not_its_docstrings(
    engines, monkeypatch, tmp_path
):
    today = engines.run.certifier()
    shutil.copytree(ROOT / "minispec", tmp_path / "minispec")
    monkeypatch.setattr(engines.run, "ROOT", tmp_path)
    path = tmp_path / "minispec" / "certify" / "statistics.py"
    source = path.read_text(encoding="utf-8")
    path.write_text("# a comment\n" + source.replace('"""', '"""More words. ', 1), encoding="utf-8")
    assert engines.run.certifier() == today
    path.write_text(f"{source}\nMORE = 1\n", encoding="utf-8")
    assert engines.run.certifier() != today
