"""`make gpu` and `make gpu-heads` without a GPU, compressed text, and time-limited training."""

import argparse
import json
import lzma
import runpy
import shlex
import shutil
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TOKENIZER, byte_model, file_limit, last_error_line

from minispec import UserError, distributed
from minispec.checkpoints.load import save
from minispec.distill.__main__ import main as distill_main
from minispec.distill.generated import read_generated
from minispec.fast.cost import ROW_COUNTS
from minispec.training.loop import CHECKPOINT, check_processes

sys.path.append(str(ROOT / "tests" / "gpu"))
import heads
import speed
import steps

STEPS = """
import argparse, os, pathlib, signal, sys, time
sys.path.insert(0, {folder!r})
from steps import Step, main, table
log = pathlib.Path({log!r})

def good(args):
    log.open("a").write("good ")
    yield {{"number": 1.5}}

def bad(args):
    yield {{"number": 2}}
    if not pathlib.Path({fixed!r}).exists():
        raise ValueError("this went wrong\\nfor a reason")

def dies(args):
    yield {{"number": 3}}
    os.kill(os.getpid(), signal.SIGKILL)

def absent(args):
    yield {{"skipped": "not available"}}

def hangs(args):
    yield {{"number": time.sleep(600)}}

def steps_of(args):
    steps = {{"good": good, "bad": bad, "dies": dies, "absent": absent, "hangs": hangs}}
    return {{name: Step(0.05 if name == "hangs" else 60, run) for name, run in steps.items()}}

if __name__ == "__main__":
    main(argparse.ArgumentParser(), steps_of, lambda results: [table(results, "number")])
"""


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "trial.py"
    paths = {"log": str(tmp_path / "log"), "fixed": str(tmp_path / "fixed")}
    file.write_text(STEPS.format(folder=str(ROOT / "tests" / "gpu"), **paths))
    return file


@pytest.mark.slow
def test_failed_steps_do_not_affect_others_and_finished_steps_are_not_repeated(
    script, tmp_path, monkeypatch, capfd
):
    flags = ["--small", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [str(script), *flags])

    def run() -> tuple[dict, str]:
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(str(script), run_name="__main__")
        assert caught.value.code == 1
        (report,), (page,) = ((tmp_path / "out").glob(f"*.{kind}") for kind in ("json", "md"))
        assert page.read_text() in capfd.readouterr().out
        return json.loads(report.read_text())["steps"], page.read_text()

    steps, page = run()
    ended = {name: rows[-1]["ended"] for name, rows in steps.items()}
    assert ended == {
        "good": "finished", "bad": "failed: ValueError: this went wrong",
        "dies": "failed with exit code -9", "absent": "skipped: not available",
        "hangs": "stopped after 0 s",
    }  # fmt: skip
    assert [steps[name][0]["number"] for name in ("good", "bad", "dies")] == [1.5, 2, 3]
    assert "| good | 1.5 |" in page and "| bad | 2 |" in page and "skipped: not available" in page
    (tmp_path / "fixed").touch()
    steps, _ = run()
    assert steps["bad"][-1]["ended"] == "finished" and steps["dies"][-1]["ended"].startswith("fail")
    assert (tmp_path / "log").read_text() == "good "
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--fresh"])
    run()
    assert (tmp_path / "log").read_text() == "good good "


def test_all_time_limits_together_stay_below_ten_minutes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args = SimpleNamespace(small=False, compile=False, minutes=9.5, generated=None)
    for script in speed, heads:
        assert sum(step.seconds for step in script.steps_of(args).values()) <= 570


def test_the_commands_report_that_there_is_no_gpu(script, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [str(script)])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(script), run_name="__main__")
    assert "--small runs everything on a CPU" in capsys.readouterr().err


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
def test_another_python_needs_no_virtual_environment():
    def commands(*more: str) -> str:
        command = ["make", "--no-print-directory", "-n", "gpu-heads", *more]
        return subprocess.check_output(command, cwd=ROOT, text=True)

    line = commands("GPU_PYTHON=python3", "ARGS=--small", "QUESTIONS=my q's.jsonl", "DATA=a b")
    arguments = shlex.split(line.split("python3 ")[1].replace("\\\n", ""))
    expected = ["--questions", "my q's.jsonl", "--data", "a", "b", "--small"]
    assert arguments == ["tests/gpu/heads.py", *expected] and ".venv" not in line
    assert ".venv/bin/python tests/gpu/heads.py" in commands()


@pytest.mark.slow
def test_speed_compares_passes_and_methods_with_plain_decoding():
    args = argparse.Namespace(small=True)
    loader = partial(speed.random_shape, "llama-2-7b")
    results = {"7B": list(speed.figures(loader, "graphs", args))}
    plain, *rows = results["7B"]
    assert plain["tokens/s"] * plain["ms per token"] == pytest.approx(1e3)
    assert plain["weights, GB"] == pytest.approx(1e-9 * 4 * 78_080)  # without the embedding
    assert sorted(row["rows"] for row in rows if "rows" in row) == list(ROW_COUNTS)
    profile, first = (next(row for row in rows if key in row) for key in ("busy", "kernel"))
    assert profile["kernels per round"] > first["calls per round"] > 0 and 0 < first["share"] < 1
    methods = {row["method"]: row for row in rows if "method" in row}
    assert methods["medusa tree=64"]["rows per pass"] == 64
    assert methods["lookahead (15,5,15)"]["rows per pass"] > 50
    assert methods["speculative k=4"]["tokens per pass"] > 2
    assert all(row["differing"] == 0 for row in methods.values())
    page = "\n".join(speed.tables(results))
    assert "| 7B | speculative k=16 | 4.8 |" in page and "| n = 64 |" in page


def test_a_model_that_is_not_available_is_skipped(monkeypatch):
    def missing(source):
        raise UserError("run `make smollm2`")

    monkeypatch.setattr(speed, "load", missing)
    args = argparse.Namespace(small=False)
    rows = list(speed.figures(partial(speed.pretrained, "smollm2"), "eager", args))
    assert rows == [{"skipped": "run `make smollm2`"}]


def test_a_row_that_was_cut_off_costs_no_other_row(tmp_path):
    file = tmp_path / "step.rows"
    steps.append(file, {"number": 1})
    with file_limit(file.stat().st_size + 5), pytest.raises(OSError, match="too large"):
        steps.append(file, {"number": 2})
    steps.append(file, {"number": 3})
    assert [row["number"] for row in steps.rows_of(file)] == [1, 3]


# ---- compressed text -----------------------------------------------------------------------------


def write_generated(file, documents: int) -> None:
    rows = [{"tokenizer": TOKENIZER.fingerprint, "options": {}}]
    rows += [{"kind": "chat", "prompt": [i % 90, 1], "tokens": [*range(i % 60, 90)]}
             for i in range(documents)]  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_text_is_compressed_to_a_limited_number_of_bytes(tmp_path, monkeypatch):
    file, packed = tmp_path / "own.jsonl", tmp_path / "own.jsonl.xz"
    write_generated(file, 300)
    heads.pack(file)
    header, rows = read_generated(packed)
    assert (header, rows) == read_generated(file)
    limit = packed.stat().st_size * 2 // 3
    monkeypatch.setattr(heads, "MAX_PACKED_BYTES", limit)
    before = packed.read_bytes()
    with file_limit(100), pytest.raises(UserError, match="xz cannot be written: .* too large"):
        heads.pack(file)
    assert packed.read_bytes() == before
    heads.pack(file)
    kept = read_generated(packed, TOKENIZER)
    assert packed.stat().st_size <= limit and 75 < len(kept[1]) < 300
    assert kept == (header, rows[: len(kept[1])])


@pytest.mark.parametrize("ending", ["gz", "xz"])
def test_compressed_text_can_be_read_but_not_appended_to(ending, tmp_path, capsys):
    file, packed = tmp_path / "own.jsonl", tmp_path / f"own.jsonl.{ending}"
    write_generated(file, 60)
    module = {"gz": __import__("gzip"), "xz": lzma}[ending]
    packed.write_bytes(module.compress(file.read_bytes()))
    assert read_generated(packed, TOKENIZER) == read_generated(file, TOKENIZER)
    save(byte_model(), TOKENIZER, tmp_path / "target")
    for path in file, packed:
        flags = "vocabulary", "--text", f"en={path}", "--out", tmp_path / f"{path.suffix}.json"
        distill_main([*map(str, flags), "--model", str(tmp_path / "target")])
    assert (tmp_path / ".jsonl.json").read_text() == (tmp_path / f".{ending}.json").read_text()
    flags = "generate", "--chat", "--out", packed, "--model", tmp_path / "target"
    assert "cannot be appended to" in last_error_line(
        capsys, lambda: distill_main(list(map(str, flags)))
    )
    for damage in packed.read_bytes()[:-20], b"\x00" * 50, packed.read_bytes()[:50] + b"\x00" * 99:
        packed.write_bytes(damage)
        with pytest.raises(UserError, match="not a file from minispec.distill generate"):
            read_generated(packed)


# ---- time-limited training -----------------------------------------------------------------------


def test_training_with_a_time_limit_finishes_completely(tmp_path, monkeypatch, capsys):
    save(byte_model(), TOKENIZER, tmp_path / "target")
    write_generated(tmp_path / "own.jsonl", 20)
    out = tmp_path / "mtp"
    flags = ["mtp", "--model", tmp_path / "target", "--generated", tmp_path / "own.jsonl",
             "--out", out, "--context", 32, "--rows", 2, "--steps", 10**9,
             "--minutes", 0.002]  # fmt: skip
    distill_main(list(map(str, flags)))
    steps, _ = heads.counts(out)
    assert steps >= 10
    assert f"{steps:,} steps" in (out / "README.md").read_text()
    distill_main(list(map(str, flags)))  # the second time, nothing is left to do
    assert heads.counts(out)[0] == steps
    monkeypatch.setattr(distributed, "world", distributed.Group(0, 2))
    with pytest.raises(UserError, match="--minutes works in one process only"):
        check_processes(argparse.Namespace(minutes=1.0, rows=2))


def test_training_that_takes_too_long_is_finished_from_its_checkpoint(tmp_path, monkeypatch):
    def run(command, check, timeout=None):
        commands.append(command)
        if "--minutes" in command:
            (tmp_path / "mtp").mkdir()
            torch.save({"counts": [70, 9.0]}, tmp_path / "mtp" / CHECKPOINT)
            raise subprocess.TimeoutExpired(command, timeout)
        (tmp_path / "mtp" / "README.md").write_text("# A head")

    commands = []
    monkeypatch.setattr(subprocess, "run", run)
    args = argparse.Namespace(work=tmp_path, out=tmp_path / "out", generated=None, data=None,
                              init=None, small=False, seconds=200)  # fmt: skip
    rows = list(heads.learn("mtp", args))
    assert commands[1][-2:] == ["--steps", "70"] and "--minutes" not in commands[1]
    assert rows == [{"head": "mtp", "steps": 70, "minutes of training": 0.15},
                    {"readme": "## A head"}]  # fmt: skip
    assert (tmp_path / "out" / "heads.tar").exists()


# ---- both commands -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
def test_both_commands_run_completely_on_a_cpu(tmp_path):
    def run(target: str) -> str:
        flags = f"ARGS=--small --work {tmp_path / 'work'} --out {tmp_path / target}"
        command = ["make", target, f"GPU_PYTHON={sys.executable}", flags]
        subprocess.run(command, cwd=ROOT, check=True)
        (page,) = (tmp_path / target).glob("*.md")
        return page.read_text()

    page = run("gpu")
    assert page.count("| finished |") == 4 and "| toy, eager | fastmtp k=3 |" in page
    page = run("gpu-heads")
    assert page.count("| finished |") == 5 and "**own text, mean**" in page
    assert {file.name for file in (tmp_path / "gpu-heads").glob("*.xz")} == {
        "prose.jsonl.xz", "code.jsonl.xz", "sums.jsonl.xz"
    }  # fmt: skip
    assert run("gpu-heads") == page  # no step is repeated
