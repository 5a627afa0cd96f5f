"""Write TABLE.md, from results.jsonl, notes.toml and the headings of README.md's findings."""

import re
import tomllib
from collections import Counter
from pathlib import Path

from run import FUNCTIONS, Function, column_of, read

HERE = Path(__file__).parent
COLUMNS = (
    "engine", "function", "greedy", "same bits", "sampled", "batches", "end tokens", "date",
    "processor", "seconds", "not seen", "notes",
)  # fmt: skip
BITS = 18  # the finding about them
LOSS = re.compile(r"\bno\b|\bstops\b")
HEAD = """# What the certifier found in each engine

How to repeat a row, and what is behind the losses, is in [README.md](README.md). On the site, a
click on a column's head sorts the table.

A cell is the worst outcome of the certifier's
[rows](../../minispec/certify/README.md#what-is-examined): **no** means that answers were wrong,
**stops** that the engine raised an exception instead. In brackets: of how many rows this is true,
if not of all (after a yes, the others were skipped, for example as the engine has no such option),
and the largest total variation distance (TV) from plain decoding over the outcomes of the engine's
random draws; without a TV, they could not be enumerated, and only samples were tested. *Not seen*
is the bias at one token that the weakest of the rows with samples might have missed. *Batches* are
several requests in a call, *end tokens* also the number of tokens; [*same
bits*](README.md#same-bits) says how many greedy texts drafts change. All other columns are in
float32. `make engines-stale` lists the rows that are from an earlier certifier.
"""
SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def read_notes() -> dict[str, dict]:
    return tomllib.loads((HERE / "notes.toml").read_text(encoding="utf-8"))


def anchors() -> dict[int, str]:
    """Return the anchor of each finding's heading in README.md, by its number."""
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### ((\d+)\. .*)", readme, re.M)
    return {int(number): re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
            for heading, number in headings}  # fmt: skip


def verdicts(line: dict) -> dict[str, str]:
    """Return the cells that a line's rows make, by their columns."""
    counts = {name: Counter(passed=n) for name, n in line.get("passed", {}).items()}
    for outcome in "failed", "raised", "skipped":
        for row in line.get(outcome, ()):
            counts.setdefault(column_of(row), Counter())[outcome] += 1
    return {name: verdict(found, line.get("tv") if name == "sampled" else None)
            for name, found in counts.items()}  # fmt: skip


def verdict(found: Counter, tv: float | None) -> str:
    """Describe a cell: its worst outcome, and in how many rows."""
    n, word = found["failed"] + found["raised"], "no" if found["failed"] else "stops"
    if not n:
        n, word = found["passed"] or found["skipped"], "yes" if found["passed"] else "skipped"
    enumerated = word == "yes" or word == "no" and (tv or 0) > 1e-3  # else only samples were wrong
    details = [f"TV {tv:.1g}"] if enumerated and tv is not None else []
    details += [f"{n} of {found.total()}"] if n < found.total() else []
    return f"{word} ({'; '.join(details)})" if details else word


def bits(changed: dict[str, str]) -> str:
    """Describe how many texts drafts change, by precision."""
    counts = "; ".join(f"{n} in {precision}" for precision, n in changed.items())
    if not counts or "stops" in counts or "skipped" in counts:
        return counts
    same = all(n.startswith("0 ") for n in changed.values())
    return f"{'yes' if same else 'no'} ({counts})"


def cells(function: Function, line: dict, note: dict, links: dict[int, str]) -> list[str]:
    """Return a row of the table. Its losses link to the findings that explain them."""

    def mark(*findings: int) -> str:
        found = (f" [{str(n).translate(SUPERSCRIPT)}](README.md#{links[n]})" for n in findings)
        return "".join(found)

    marks = mark(*note.get("findings", ()))
    unseen, version = line.get("unseen"), line.get("version", "")
    found = line | verdicts(line) | {
        "engine": f"{function.package} {version}".strip(),
        "function": f"[`{function.name}`]({function.file}_engine.py)",
        "same bits": bits(line.get("bits", {})), "notes": note.get("note", ""),
        "not seen": "" if unseen is None else f"{unseen:.2f}",
    }  # fmt: skip
    row = {column: str(found.get(column, "")) for column in COLUMNS}
    lost = {column for column in COLUMNS[2:7] if LOSS.search(row[column])}
    for column in lost:
        rounded = column == "same bits" and "stops" not in row[column]
        reasons = mark(BITS) if rounded else marks
        row[column] = LOSS.sub(r"**\g<0>**", row[column], count=1) + reasons
    if lost <= {"same bits"}:
        row["notes"] = (row["notes"] + marks).strip()
    return list(row.values())


def page() -> str:
    """Return the text of TABLE.md."""
    known, notes, links = read(), read_notes(), anchors()
    rows = [COLUMNS, ["---"] * len(COLUMNS)]
    for function in FUNCTIONS:
        line, note = (found.get(function.label, {}) for found in (known, notes))
        original = notes.get(function.label.replace("_fixed", ""), {})
        note = {"findings": original.get("findings", ())} | note
        rows.append(cells(function, line, note, links))
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"{HEAD}\n{table}\n"


if __name__ == "__main__":
    (HERE / "TABLE.md").write_text(page(), encoding="utf-8")
