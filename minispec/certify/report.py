"""Write the verdicts: a table, JSON that another person can check, or JUnit XML."""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TextIO
from xml.etree import ElementTree

from minispec.certify.common import Verdict
from minispec.certify.functions.checkpoints import digest
from minispec.cli import printable, writing
from minispec.machine import command_line, describe_machine, package_version

INFO_ROWS = "server", "baseline", "drafts"  # rows about the test itself, which prove nothing
STATUS_LABELS = {True: "pass", False: "FAIL", None: "skip"}
PASSED, LOSS, NOT_EXAMINED = 0, 1, 2  # exit codes
NOT_REPEATED = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
NOT_REPEATED.add_argument("--json", action="store_true")
for flag in "--junit", "--save", "--only":
    NOT_REPEATED.add_argument(flag)


def print_table(verdicts: Iterable[Verdict], out: TextIO | None) -> list[Verdict]:
    """Collect all verdicts, printing each as it comes if there is an `out`. Text from a server may
    contain terminal control characters, so it is escaped."""
    rows = []
    for v in verdicts:
        v = replace(v, case=printable(v.case), detail=printable(v.detail))
        rows.append(v)
        if out:
            status = STATUS_LABELS[v.passed]
            print(f"{status}  {v.check:<14}{v.case:<43} {v.detail}", file=out, flush=True)
    return rows


def exit_code(rows: list[Verdict]) -> int:
    """Return the exit code. Skipped checks prove nothing: one must pass."""
    if any(v.passed is False for v in rows):
        return LOSS
    return PASSED if any(v.passed for v in rows if v.check not in INFO_ROWS) else NOT_EXAMINED


def summary(rows: list[Verdict], seconds: float) -> str:
    counts = Counter(v.passed for v in rows)
    skipped = f", {counts[None]} skipped" if counts[None] else ""
    return f"{counts[True]} of {len(rows)} passed{skipped} in {seconds:.0f} s"


def json_report(
    rows: list[Verdict], seconds: float, argv: list[str], subject: str | None, folder: Path
) -> str:
    """Return one JSON object with all that is needed to repeat the examination of a `subject`, the
    name of a function or server. The checkpoints lie in `folder`."""
    configs = sorted(folder.rglob("config.json"))
    report = {
        "passed": exit_code(rows) == PASSED,
        "seconds": seconds,
        **describe_machine(),
        "subject": subject,
        "subject_version": subject_version(subject),
        "command": command_line("minispec.certify", argv),
        "checkpoints": {str(c.parent.relative_to(folder)): digest(c.parent) for c in configs},
        "verdicts": [asdict(v) | {"repeat": repeat(v, argv)} for v in rows],
    }
    return re.sub(r'(?<=//)[^/@"\s]+@', "", json.dumps(report))  # without passwords in URLs


def subject_version(subject: str | None) -> str | None:
    """Return the version of the module or package in which a function lies, if it has one."""
    module = (subject or "").rpartition(":")[0]
    loaded = sys.modules.get(Path(module).stem if module.endswith(".py") else module)
    return getattr(loaded, "__version__", None) or package_version(module.partition(".")[0] or "-")


def repeat(verdict: Verdict, argv: list[str]) -> str:
    """Return the command that judges this row alone, or only its check if rows cannot be chosen."""
    _, kept = NOT_REPEATED.parse_known_args(argv)
    flags = {argument.partition("=")[0] for argument in kept}
    if flags.isdisjoint(("--impl", "--server")):
        kept += [] if "--compare" in flags else ["--checks", verdict.check]
    elif verdict.check == "baseline":
        kept += ["--only", verdict.case.replace(", ", ": ", 1)]
    elif verdict.check not in INFO_ROWS:
        kept += ["--only", f"{verdict.check}: {verdict.case}"]
    return command_line("minispec.certify", kept)


def write_junit(rows: list[Verdict], seconds: float, file: Path) -> None:
    """Write the verdicts as JUnit XML, which systems for continuous integration show."""
    suite = ElementTree.Element(
        "testsuite", name="minispec.certify", tests=str(len(rows)), time=f"{seconds:.1f}",
        failures=str(sum(v.passed is False for v in rows)),
        skipped=str(sum(v.passed is None for v in rows)),
    )  # fmt: skip
    for v in rows:
        case = ElementTree.SubElement(suite, "testcase", classname=v.check, name=v.case)
        if v.passed is False:
            failure = ElementTree.SubElement(case, "failure", message=v.detail)
            failure.text = json.dumps(v.evidence)
        elif v.passed is None:
            ElementTree.SubElement(case, "skipped", message=v.detail)
    with writing(file):
        ElementTree.ElementTree(suite).write(file, encoding="utf-8", xml_declaration=True)
