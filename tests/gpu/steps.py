"""Run steps in separate processes with time limits, so that a step that fails or hangs cannot
destroy another step's results.

A step is a generator of rows. Each row is written to a file immediately, and the report (JSON and
Markdown) is rewritten after every step. A command that is run again skips finished steps.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOTAL_MINUTES = 9.5  # for all steps
Results = dict[str, list[dict]]  # step -> its rows; the last one records how it ended


@dataclass(frozen=True)
class Step:
    seconds: float  # time limit
    run: Callable[[argparse.Namespace], Iterable[dict]]  # `args.seconds` is the limit in effect


def main(
    parser: argparse.ArgumentParser, steps_of: Callable[[argparse.Namespace], dict[str, Step]],
    tables: Callable[[Results], list[str]],
) -> None:  # fmt: skip
    """Run all steps of a script, or one of them in a process started by this function."""
    parser.add_argument("--small", action="store_true", help="run the same code on small models")
    parser.add_argument("--out", type=Path, help="folder for the report")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "gpu",
                        help="folder for the state from which a later run resumes")  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="delete that state and start over")
    parser.add_argument("--minutes", type=float, default=TOTAL_MINUTES, help="limit for all steps")
    parser.add_argument("--commit", help="commit to report if there is no .git")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    args, script = parser.parse_args(), Path(sys.argv[0])
    title = script.stem + "-small" * args.small
    args.work = args.work.absolute() / title
    args.out = args.out or (args.work / "out" if args.small else ROOT / "tests/gpu/results")
    steps = steps_of(args)
    if args.step:
        return run_here(steps[args.step], file_of(args, args.step), args)
    facts = {"date": time.strftime("%Y-%m-%d"), **machine(args.commit),
             "command": " ".join([script.name, *sys.argv[1:]])}  # fmt: skip
    if not (args.small or facts["cuda"]):
        parser.error("there is no GPU; --small runs everything on a CPU")
    if args.fresh:
        shutil.rmtree(args.work, ignore_errors=True)
    deadline = time.monotonic() + 60 * args.minutes
    for step in steps:
        run_apart(step, steps[step].seconds, deadline, facts, args)
        results = {name: rows_of(file_of(args, name)) for name in steps}
        text = write_report(f"make gpu: {title}", facts, results, tables, args.out)
    print(f"\n{text}", flush=True)
    if any("failed" in str(rows[-1].get("ended")) for rows in results.values() if rows):
        sys.exit(1)


def run_apart(step: str, seconds: float, deadline: float, facts: dict, args) -> None:
    """Run a step in its own process, unless it has already finished; record how it ended."""
    file, start = file_of(args, step), time.monotonic()
    last, limit = last_of(file), min(seconds * (4 if args.small else 1), deadline - start)
    if limit <= 0 or last.get("ended") == "finished" and last["card"] == facts["card"]:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    print(f"{step} …", flush=True)
    command = [sys.executable, *sys.argv, "--step", step, "--seconds", f"{limit:.0f}"]
    ended, last = run_process(command, limit), last_of(file)
    for outcome in {"skipped", "failed"} & last.keys():
        ended = f"{outcome}: {last[outcome]}"
    seconds = round(time.monotonic() - start, 1)
    origin = {key: facts[key] for key in ("date", "card", "commit")}
    append(file, {"ended": ended, "seconds": seconds} | origin)
    print(f"{step}: {ended}, {seconds} s", flush=True)


def run_process(command: list[str], limit: float) -> str:
    """Run a command; return how it ended. Kill it and its children after `limit` seconds."""
    environment = os.environ | ({"OMP_NUM_THREADS": "1"} if "--small" in command else {})
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, process_group=0)
    try:
        code = child.wait(limit)
        return "finished" if code == 0 else f"failed with exit code {code}"
    except subprocess.TimeoutExpired:
        return f"stopped after {limit:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def run_here(step: Step, file: Path, args: argparse.Namespace) -> None:
    """Record the rows of a step, or its error."""
    try:
        for row in step.run(args):
            append(file, row)
    except Exception as error:
        traceback.print_exc()
        append(file, {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]})
        sys.exit(1)


# ---- recorded rows -------------------------------------------------------------------------------


def file_of(args: argparse.Namespace, step: str) -> Path:
    return args.work / f"{step.replace(', ', '-')}.rows"


def append(file: Path, row: dict) -> None:
    with file.open("a", encoding="utf-8") as out:
        out.write(f"\n{json.dumps(row)}\n")  # on its own line, even if the last one was cut off


def rows_of(file: Path) -> list[dict]:
    """Read the rows of a file; ignore a line that was cut off when the step was killed, or when the
    disk was full."""
    rows = []
    for line in file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def last_of(file: Path) -> dict:
    return (rows_of(file) or [{}])[-1]


# ---- the report ----------------------------------------------------------------------------------


def write_report(
    title: str, facts: dict, results: Results, tables: Callable[[Results], list[str]], folder: Path
) -> str:
    """Write the report as JSON and as Markdown; return the Markdown."""
    from minispec.checkpoints.weights import write_text

    path = folder / "-".join([title.split()[-1], facts["date"], *facts["card"].lower().split()])
    items = "".join(f"- {name}: {fact}\n" for name, fact in facts.items())
    endings = {step: rows or [{"ended": "not started"}] for step, rows in results.items()}
    text = "\n".join([f"# {title}\n", items, *tables(results), table(endings, "ended")])
    write_text(path.with_name(f"{path.name}.json"), json.dumps(facts | {"steps": results}) + "\n")
    write_text(path.with_name(f"{path.name}.md"), text)
    return text


def table(results: Results, key: str) -> str:
    """Build a Markdown table of all rows that have the column `key`."""
    rows = [{"step": step} | row for step in results for row in results[step] if key in row]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, ["---"] * len(columns), *([row.get(c) for c in columns] for row in rows)]
    return "".join(f"| {' | '.join(map(cell, line))} |\n" for line in lines if rows)


def cell(value: object) -> str:
    """Format a value; floats get about three digits."""
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def machine(commit_name: str | None) -> dict:
    """Name the GPU, or else the CPU, the versions of torch and CUDA, and the commit."""
    import torch  # imported here so that no step has to wait for it

    from minispec.machine import commit, processor

    cuda = torch.version.cuda if torch.cuda.is_available() else None
    name = torch.cuda.get_device_name() if cuda else processor()
    return {"card": name, "torch": torch.__version__, "cuda": cuda,
            "commit": commit_name or commit() or "unknown"}  # fmt: skip
