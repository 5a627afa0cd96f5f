"""Write the verdicts: a table, JSON that another person can check, or JUnit XML."""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import TextIO
from xml.etree import ElementTree

from minispec.certify.common import Verdict
from minispec.certify.functions.toy_checkpoints import digest
from minispec.checkpoints.weights import write_bytes
from minispec.cli import printable
from minispec.machine import command_line, describe_machine, package_version

INFO_ROWS = "server", "baseline", "drafts"  # rows about the test itself, which prove nothing
SAMPLED = "exact", "sampled", "statistical", "distribution"  # the checks of samples
STATUS_LABELS = {True: "pass", False: "FAIL", None: "skip"}
NO_TIME = "not enough time"  # the reason of a skipped row
REQUIRED_TV = 0.2  # that each row with samples must be able to detect, by default
PASSED, LOSS, NOT_EXAMINED, NOT_SAMPLED = 0, 1, 2, 3  # exit codes
NOT_REPEATED = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
for flag in "--json", "--junit", "--save", "--only":
    NOT_REPEATED.add_argument(flag, nargs="?")


def print_table(
    verdicts: Iterable[Verdict], out: TextIO | None, save: Callable[[list[Verdict]], object] = len
) -> list[Verdict]:
    """Collect all verdicts. After each, print it if there is an `out`, and save all so far."""
    rows = []
    for v in verdicts:
        v = replace(v, case=printable(v.case), detail=printable(v.detail))  # a server's text
        rows.append(v)
        if out:
            status = STATUS_LABELS[v.passed]
            print(f"{status}  {v.check:<14}{v.case:<43} {v.detail}", file=out, flush=True)
        save(rows)
    return rows


def conclude(rows: list[Verdict], require_tv: float = 1.0) -> tuple[int, str]:
    """Return the exit code and the verdict on all rows. Skipped rows prove nothing: one must pass,
    and one with samples if there are any, each of which would have shown a bias of `require_tv`.
    That seeds work proves nothing about samples."""
    if failed := Counter(v.check for v in rows if v.passed is False):
        what = "DIFFERENCE" if set(failed) == {"bits"} else "LOSS"  # it may be rounding
        return LOSS, f"{what} in {', '.join(f'{check} ({n})' for check, n in failed.items())}"
    sampled = [v for v in rows if v.check in SAMPLED and v.case != "seeds"]
    reason = next((v.detail for v in sampled or rows if v.passed is None), "no row was judged")
    if not any(v.passed for v in rows if v.check not in INFO_ROWS):
        return NOT_EXAMINED, f"nothing was examined: {reason}"
    if not sampled:
        return PASSED, "no loss found; sampling was left out"
    if not any(v.passed for v in sampled):
        return NOT_SAMPLED, f"sampling was not examined: {reason}"
    verdict, late = "no loss found", sum(NO_TIME in v.detail for v in rows if v.passed is None)
    if late:
        verdict += f"; {late} row{'s' * (late > 1)} had {NO_TIME} (--thorough has more)"
    if {v.passed for v in sampled if v.check == "exact"} == {None}:
        verdict += "; every exact row was skipped"
    weakest = max((v for v in sampled if v.passed), key=lambda v: v.detectable_tv or 0.0)
    tv, row = weakest.detectable_tv or 0.0, f"{weakest.check}: {weakest.case}"
    if tv > require_tv:
        return NOT_SAMPLED, f"too few samples for a verdict: {row} may have missed a TV below " \
                            f"{tv:.2f} (allow more time with --thorough, or --require-tv {tv:.2f})"
    if tv:
        verdict += f"; the weakest row, {row}, may have missed a TV below {tv:.2f} at one token"
    return PASSED, verdict


def summary(rows: list[Verdict], seconds: float, require_tv: float = 1.0) -> str:
    counts = Counter(v.passed for v in rows)
    skipped = f", {counts[None]} skipped" if counts[None] else ""
    passed = f"{counts[True]} of {len(rows)} passed{skipped} in {seconds:.0f} s"
    return f"{passed}\n{conclude(rows, require_tv)[1]}"


def json_report(
    rows: list[Verdict], seconds: float, argv: list[str], subject: str | None, folder: Path,
    finished: bool = True, require_tv: float = 1.0,
) -> str:  # fmt: skip
    """Return one JSON object with all that is needed to repeat the examination of a `subject`, the
    name of a function or server. The checkpoints lie in `folder`."""
    configs = sorted(folder.rglob("config.json"))
    code, verdict = conclude(rows, require_tv)
    report = {
        "finished": finished, "passed": finished and code == PASSED,
        "exit_code": code, "verdict": verdict, "seconds": seconds,
        **describe_machine(), "subject": subject, **describe_subject(subject),
        "command": command_line("minispec.certify", argv),
        "checkpoints": {str(c.parent.relative_to(folder)): digest(c.parent) for c in configs},
        "verdicts": [asdict(v) | {"repeat": repeat(v, argv)} for v in rows],
    }  # fmt: skip
    return to_json(report)


def to_json(report: dict) -> str:
    """Return JSON without the passwords in URLs."""
    return re.sub(r'(?<=//)[^/@"\s]+@', "", json.dumps(report))


def describe_subject(subject: str | None) -> dict[str, str | None]:
    """Return the version of a function's module or package, and a hash of its file."""
    name = (subject or "").rpartition(":")[0]
    name = Path(name).stem if name.endswith(".py") else name
    module, package = sys.modules.get(name), name.partition(".")[0] or "-"
    versions = [getattr(x, "__version__", None) for x in (module, sys.modules.get(package))]
    file = getattr(module, "__file__", None)
    return {"subject_version": versions[0] or versions[1] or package_version(package),
            "subject_hash": file and sha256(Path(file).read_bytes()).hexdigest()}  # fmt: skip


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


def write_junit(rows: list[Verdict], seconds: float, argv: list[str], file: Path) -> None:
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
            failure.text = to_json(v.evidence | {"repeat": repeat(v, argv)})
        elif v.passed is None:
            ElementTree.SubElement(case, "skipped", message=v.detail)
    write_bytes(file, ElementTree.tostring(suite, "utf-8", xml_declaration=True))
