"""`make score` from the first text to the certifier's last row, as a student runs it."""

import json
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT
from test_own_engine import own_engine, run, save_all  # noqa: F401
from test_score import PLAIN, SPECULATIVE


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["plain", "the reader's", "minispec's"])
def test_a_whole_run_ends_with_a_score(whose, tmp_path, request):
    lessons = tmp_path / "lessons"  # a reader's file lies next to own_engine.py
    shutil.copytree(ROOT / "lessons", lessons, ignore=shutil.ignore_patterns("assignments", "site"))
    code = {"plain": PLAIN, "minispec's": SPECULATIVE}.get(whose)
    if code is None:
        request.getfixturevalue("run")
        save_all()
        code, _ = own_engine.text_after("10")
    (lessons / "my_minispec.py").write_text(code)
    command = [sys.executable, "-m", "lessons.assignments.score", lessons / "my_minispec.py"]
    done = subprocess.run([*command, "--json", tmp_path / "score.json"], cwd=ROOT, text=True,
                          capture_output=True)  # fmt: skip
    result = json.loads((tmp_path / "score.json").read_text())
    assert done.returncode == 0, done.stdout
    assert result["tokens"] == 8 * 48 and result["certifier"].startswith("no loss found")
    assert result["score"] > (1 if whose == "the reader's" else 0.9)
