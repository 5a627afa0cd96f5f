"""Write a leaderboard: one HTML file made from a folder of results, as score.py writes them."""

from html import escape
from pathlib import Path
from string import Template

from lessons.machines import MACHINES
from minispec.checkpoints.weights import write_text
from minispec.cli import OutputFile, Parser, UserError, command, read_json

COLUMNS = "score", *MACHINES


def read_results(folder: Path) -> list[dict]:
    """Read all results in a folder, best first. Raises UserError if one is not a result, or if they
    are for different texts."""
    results = {file: read_json(file) for file in sorted(folder.glob("*.json"))}
    if not results:
        raise UserError(f"{folder} has no .json files")
    for file, result in results.items():
        numbers = [result.get(x) for x in COLUMNS] if result.get("score", 0) is not None else []
        kinds = [type(x) for x in (result.get("name"), result.get("seed"), *numbers)]
        if kinds != [str, int, *[float] * len(numbers)] or not all(0 < x < 1e6 for x in numbers):
            raise UserError(f"{file} is not a result of score.py")
        if result["seed"] != next(iter(results.values()))["seed"]:
            raise UserError(f"{file} has another seed than {next(iter(results))}, so other texts")
    return sorted(results.values(), key=lambda result: (-(result["score"] or 0), result["name"]))


def page(results: list[dict]) -> str:
    """The leaderboard of sorted results. Equal scores share a rank. Those without a score come
    last, with the reason."""
    scores, rows = [result["score"] for result in results], []
    for result, score in zip(results, scores):
        cells = [f"no score: {escape(str(result.get('reason')))}"]
        if score is not None:
            cells = [f"{result[column]:.3f}" for column in COLUMNS]
        rank = "" if score is None else 1 + scores.index(score)
        rows.append("<td>".join([f"<tr><td>{rank}", escape(result["name"]), *cells]))
    template = Template(Path(__file__).with_name("leaderboard.html").read_text(encoding="utf-8"))
    heads = "".join(f"<th>{column}" for column in COLUMNS)
    return template.substitute(seed=results[0]["seed"], heads=heads, rows="\n".join(rows))


@command
def main(argv: list[str] | None = None) -> None:
    p = Parser(prog="python -m lessons.assignments.leaderboard", description=__doc__)
    p.add_argument("folder", type=Path, help="with the .json files for one seed")
    p.add_argument("out", type=OutputFile, help="the .html file to write")
    args = p.parse_args(argv)
    write_text(args.out, page(read_results(args.folder)))


if __name__ == "__main__":
    main()
