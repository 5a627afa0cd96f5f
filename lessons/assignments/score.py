"""Score a decoder: the tokens that it generates per unit of cost, on two machines. The unit is a
pass of the target over one row. What n rows cost is fixed (lessons/machines.py): no clock is read.

The decoder is a function as for `minispec certify --impl`. It continues a few texts greedily with
the toy under weights/, whose draft and heads lie in the checkpoint's folders `draft`, `medusa` and
`mtp`. It gets a score if its tokens are those of plain decoding, and the certifier finds no loss.

A folder with an EAGLE-3 head for SmolLM2 gets its accepted length instead (see accepted.py).
"""

import contextlib
import math
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from lessons.assignments.accepted import DRAFTS, accepted_lengths
from lessons.assignments.isolation import Submission, scratch, whole_copy
from lessons.assignments.link import Ended
from lessons.assignments.meter import Meter
from lessons.machines import MACHINES
from minispec import paths
from minispec.certify.common import Failed, NotSupported
from minispec.certify.examination import Examination, difference, wrong_end
from minispec.certify.functions.checks import Limits
from minispec.certify.report import PASSED
from minispec.checkpoints.load import load
from minispec.checkpoints.weights import write_json
from minispec.cli import (
    OutputFile,
    Parser,
    Source,
    UserError,
    command,
    number,
    printable,
    read_json,
)
from minispec.model import Transformer

TEXTS = read_json(Path(__file__).with_name("texts.json"))
LENGTH = 48  # new tokens per text
SECONDS, CERTIFIER_SECONDS, GIGABYTES = 180, 3600, 4  # of a child process, at most
# of the certifier: counted instead of timed, so that its verdict is the same on a slow machine
LIMITS = Limits(seconds=1e9, runs=200, outcomes=100, length=4)
ROWS: dict = {}  # all of them


def texts(seed: int) -> list[str]:
    """The texts to be continued. Other seeds choose other words."""
    rng, words = random.Random(seed), TEXTS["words"]
    return [text.format(**{slot: rng.choice(words[slot]) for slot in words})
            for text in TEXTS["texts"]]  # fmt: skip


# ---- cost ----------------------------------------------------------------------------------------


def cost(work: dict[int, int], unit: int, machine: str) -> float:
    """What the products cost, in passes over one row, each of which is `unit` weights."""
    return math.fsum(MACHINES[machine](n) * work[n] / unit for n in sorted(work))


# ---- the decoder's process -----------------------------------------------------------------------


@contextlib.contextmanager
def decoding(impl: str, seconds: float) -> Iterator[tuple[object, Path]]:
    """A process for the decoder: its half of the score (meter.py), and the folder that it may write
    to. Raises what is raised there, and Failed if the process ends before it has answered."""
    inbox = Path(tempfile.mkdtemp(dir=scratch()))
    link = Submission([whole_copy()], inbox, seconds, GIGABYTES, writes=True,
                      reads=[Path(impl).parent, paths.SHIPPED])  # fmt: skip
    try:
        yield link.load("lessons.assignments.meter"), inbox
    except Ended as error:
        raise Failed(str(error)) from None
    except Exception as error:
        known = {kind.__name__: kind for kind in (Failed, NotSupported, UserError)}
        raise known.get(type(error).__name__, Failed)(str(error)) from None
    finally:
        link.close()
        shutil.rmtree(inbox, ignore_errors=True)


def certificate(impl: str) -> tuple[int, str]:
    """The certifier's exit code and verdict. Prints its table."""
    with decoding(impl, CERTIFIER_SECONDS) as (meter, _):
        for line in meter.certificate(impl, asdict(LIMITS), ROWS):
            if isinstance(line, str):
                print(printable(line.rstrip()), flush=True)
    return line


# ---- the score -----------------------------------------------------------------------------------


def score(impl: str, seed: int) -> dict:
    """The score and what it was computed from. Raises Failed or NotSupported if there is none."""
    model, tokenizer = load(paths.TOY, "float64", "cpu")
    with Meter() as meter:  # and torch imports now what it would import in every child
        model.logits(model([0]))
    unit, total, work = meter.work[1], 0, Counter()
    for i, text in enumerate(texts(seed), 1):
        prompt = tokenizer.encode(text)
        with decoding(impl, SECONDS) as (decoder, folder):
            tokens, done = decoder.answer(impl, str(link_toy(folder)), prompt, LENGTH)
        check_answer(model, prompt, tokens, sum(n * done[n] for n in done) / unit)
        costs = ", ".join(f"{cost(done, unit, name):.2f} on {name}" for name in MACHINES)
        print(f"text {i}: {len(tokens)} tokens, cost {costs}", flush=True)
        total, work = total + len(tokens), work + Counter(done)
    code, verdict = certificate(impl)
    if code != PASSED:
        raise Failed(f"the certifier does not admit it: {verdict}")
    speeds = {name: total / cost(work, unit, name) for name in MACHINES}
    mean = math.prod(speeds.values()) ** (1 / len(speeds))
    return {name: round(x, 3) for name, x in {"score": mean, **speeds}.items()} | {
        "tokens": total, "weights": unit, "work": work, "certifier": verdict}  # fmt: skip


def link_toy(folder: Path) -> Path:
    """Make a checkpoint of the toy like the certifier's, with draft and heads in its folders."""
    for path in *paths.TOY.iterdir(), *(paths.SHIPPED / x for x in ("draft", "medusa", "mtp")):
        (folder / path.name).symlink_to(path)
    return folder


def check_answer(model: Transformer, prompt: list[int], tokens: list[int], rows: float) -> None:
    """Raise Failed unless the tokens are those of plain decoding, up to ties, and the `rows` that
    were computed, in rows of the target, suffice to know that."""
    problem = wrong_end(tokens, LENGTH, model.config.eos_ids)
    if problem := problem or difference(Examination(None, model), prompt, tokens, None)[0]:
        raise Failed(f"it does not decode like plain decoding: {problem}")
    if rows < len(tokens):
        raise Failed(f"{len(tokens)} tokens, but the target has scored {int(rows)} rows at most")


@command
@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    p = Parser(prog="python -m lessons.assignments.score", description=__doc__)
    p.add_argument("impl", type=Source, help="the .py file; its function is `decode`. Or the "
                   "folder of an EAGLE-3 head for SmolLM2")  # fmt: skip
    p.add_argument("--seed", type=number(0), default=0, help="choose other texts (default: 0)")
    p.add_argument("--json", type=OutputFile, metavar="FILE", help="also write the result here")
    args = p.parse_args(argv)
    path, is_head = Path(args.impl).absolute(), Path(args.impl).is_dir()
    if not is_head and not (path.suffix == ".py" and path.is_file()):
        raise UserError(f"{args.impl}: no such .py file or folder")
    first, *others = DRAFTS if is_head else ("score", *MACHINES)
    result = {"name": path.stem, "seed": args.seed, first: None}
    try:
        if is_head:
            result |= accepted_lengths(str(path), args.seed, LENGTH)
        else:
            result |= score(f"{path.resolve()}:decode", args.seed)
        unit, on = ("pass", "with a") if is_head else ("unit of cost", "on")
        more = ", ".join(f"{result[name]:.3f} {on} {name}" for name in others)
        print(f"{result['name']}: {result[first]:.3f} tokens per {unit} ({more})")
    except (Failed, NotSupported) as error:
        result["reason"] = str(error)
        print(f"{result['name']}: no score; {error}")
    if args.json:
        write_json(args.json, result, indent=1)
    sys.exit(1 if result[first] is None else 0)


if __name__ == "__main__":
    main()
