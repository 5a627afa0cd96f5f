"""What a course uploads to Gradescope as the autograder of one assignment: a zip.

    python -m lessons.assignments.gradescope a2_accept build/a2_accept.zip

Choose an image with Python 3.11 or newer (Ubuntu 24.04 has it). Students submit one .py file, or
one that is named after the assignment and others.
"""

import sys
import tomllib
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from minispec.cli import OutputFile, Parser, UserError, command

ROOT = Path(__file__).resolve().parent.parent.parent
# AUTOGRADER is another folder than /autograder in a test only
SETUP = """#!/usr/bin/env bash
set -e
cd "${AUTOGRADER:-/autograder}/source"
apt-get update
apt-get install -y python3 python3-venv
python3 -m venv .venv
.venv/bin/python -m pip install -c constraints.txt -r requirements.txt
"""
RUN = """#!/usr/bin/env bash
cd "${{AUTOGRADER:-/autograder}}/source" || exit
rm -f ../results/results.json
.venv/bin/python -m pytest -q --tb=no --no-summary -p no:cacheprovider lessons/assignments/{name} \\
    --impl=../submission{seed} --results=../results/results.json > /dev/null 2> ../results/problem
[ -s ../results/results.json ] || .venv/bin/python -c 'import json, sys
print(json.dumps({{"score": 0, "output": sys.stdin.read()}}))' \\
    < ../results/problem > ../results/results.json
rm ../results/problem
"""


def files(assignment: Path) -> list[Path]:
    """What the grader needs of the checkout."""
    shared = [*assignment.parent.glob("*.*"), ROOT / "constraints.txt"]
    kept = [*assignment.rglob("*"), *(ROOT / "minispec").rglob("*"), *shared]
    given = assignment.parent / "a8_engine" / "proposers.py"  # to every submission
    return sorted(path for path in {*kept, given}
                  if path.is_file() and "__pycache__" not in path.parts)  # fmt: skip


@command
def main(argv: list[str] | None = None) -> None:
    p = Parser(prog="python -m lessons.assignments.gradescope", description=__doc__)
    p.add_argument("assignment", help="such as a2_accept")
    p.add_argument("out", type=OutputFile, help="the .zip to write")
    p.add_argument("--seed", type=int, help="the same random cases for all students")
    args = p.parse_args(argv)
    folder = Path(__file__).resolve().parent / args.assignment
    if not (folder / "starter.py").is_file():
        raise UserError(f"{args.assignment}: no such assignment")
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    seed = "" if args.seed is None else f" --seed={args.seed}"
    scripts = {"setup.sh": SETUP, "run_autograder": RUN.format(name=args.assignment, seed=seed)}
    partial = Path(f"{args.out}.part")
    partial.parent.mkdir(parents=True, exist_ok=True)
    with ZipFile(partial, "w", ZIP_DEFLATED) as archive:
        for name, text in scripts.items():
            info = ZipInfo(name)
            info.external_attr = 0o755 << 16
            archive.writestr(info, text)
        archive.writestr("requirements.txt", "\n".join([*needed["dependencies"], "pytest>=8\n"]))
        for path in files(folder):
            archive.write(path, path.relative_to(ROOT))
    partial.replace(args.out)
    print(f"{args.out}: upload it as the autograder of {args.assignment}", file=sys.stderr)


if __name__ == "__main__":
    main()
