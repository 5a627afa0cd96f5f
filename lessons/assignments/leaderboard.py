"""Write a leaderboard: one HTML file made from a folder of results, as score.py writes them."""

from html import escape
from pathlib import Path
from string import Template

from lessons.assignments.accepted import DRAFTS
from lessons.machines import MACHINES
from minispec.checkpoints.weights import write_text
from minispec.cli import OutputFile, Parser, UserError, command, read_json

DECODERS, HEADS = ("score", *MACHINES), tuple(DRAFTS)  # columns; the first decides
ABOUT = {
    DECODERS: "Tokens per unit of cost for the texts of seed {}. The unit is a pass of the target "
    "over one row; what more rows cost is fixed for each machine. The score is the geometric mean "
    "of both.",
    HEADS: "Tokens per pass of SmolLM2 in its answers to the prompts of seed {}, with a head's "
    "chains of five drafts (the accepted length), and with its trees.",
}


def columns_of(result: dict) -> tuple[str, ...]:
    """The columns of the board that a result belongs to."""
    return HEADS if HEADS[0] in result else DECODERS


def read_results(folder: Path) -> list[dict]:
    """Read all results in a folder, best first. Raises UserError if one is not a result, or if they
    are for different texts or boards."""
    results = {file: read_json(file) for file in sorted(folder.glob("*.json"))}
    if not results:
        raise UserError(f"{folder} has no .json files")
    first = next(iter(results))
    best, *_ = columns = columns_of(results[first])
    for file, result in results.items():
        numbers = [result.get(x) for x in columns] if result.get(best, 0) is not None else []
        kinds = [type(x) for x in (result.get("name"), result.get("seed"), *numbers)]
        if columns_of(result) != columns:
            raise UserError(f"{file} has no {best}, unlike {first}: a board each for decoders and "
                            "for heads")  # fmt: skip
        if kinds != [str, int, *[float] * len(numbers)] or not all(0 < x < 1e6 for x in numbers):
            raise UserError(f"{file} is not a result of score.py")
        if result["seed"] != results[first]["seed"]:
            raise UserError(f"{file} has another seed than {first}, so other texts")
    return sorted(results.values(), key=lambda result: (-(result[best] or 0), result["name"]))


def page(results: list[dict]) -> str:
    """The leaderboard of sorted results. Equal scores share a rank. Those without a score come
    last, with the reason."""
    best, *_ = columns = columns_of(results[0])
    scores, rows = [result[best] for result in results], []
    for result, score in zip(results, scores):
        cells = [f"no score: {escape(str(result.get('reason')))}"]
        if score is not None:
            cells = [f"{result[column]:.3f}" for column in columns]
        rank = "" if score is None else 1 + scores.index(score)
        rows.append("<td>".join([f"<tr><td>{rank}", escape(result["name"]), *cells]))
    template = Template(Path(__file__).with_name("leaderboard.html").read_text(encoding="utf-8"))
    heads = "".join(f"<th>{column}" for column in columns)
    about = ABOUT[columns].format(results[0]["seed"])
    return template.substitute(about=about, heads=heads, rows="\n".join(rows))


@command
def main(argv: list[str] | None = None) -> None:
    p = Parser(prog="python -m lessons.assignments.leaderboard", description=__doc__)
    p.add_argument("folder", type=Path, help="with the .json files for one seed")
    p.add_argument("out", type=OutputFile, help="the .html file to write")
    args = p.parse_args(argv)
    write_text(args.out, page(read_results(args.folder)))


if __name__ == "__main__":
    main()
