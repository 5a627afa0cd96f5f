"""Score a decoder: the tokens that it generates per unit of cost, on two machines. The unit is a
pass of the target over one row. What n rows cost is fixed (lessons/machines.py): no clock is read.

The decoder is a function as for `minispec certify --impl`. It continues a few texts greedily with
the toy under weights/, whose draft and heads lie in the checkpoint's folders `draft`, `medusa` and
`mtp`. It gets a score if its tokens are those of plain decoding, and the certifier finds no loss.
"""

import math
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lessons.assignments.isolation import called_by_submission, contents, run_apart
from lessons.machines import MACHINES
from minispec import paths
from minispec.certify.common import Failed, NotSupported
from minispec.certify.examination import Examination, Request, difference, wrong_end
from minispec.certify.functions.checks import Limits, check_implementation
from minispec.certify.functions.decoder import FunctionDecoder
from minispec.certify.report import PASSED, conclude, print_table
from minispec.checkpoints.load import load
from minispec.checkpoints.weights import write_json
from minispec.cli import (
    OutputFile,
    Parser,
    Source,
    UserError,
    command,
    import_function,
    number,
    read_json,
)
from minispec.model import Transformer

TEXTS = read_json(Path(__file__).with_name("texts.json"))
LENGTH = 48  # new tokens per text
SECONDS, CERTIFIER_SECONDS, GIGABYTES = 180, 3600, 4  # of a child process, at most
# of the certifier: counted instead of timed, so that its verdict is the same on a slow machine
LIMITS = Limits(seconds=1e9, runs=200, outcomes=100, length=4)


def texts(seed: int) -> list[str]:
    """The texts to be continued. Other seeds choose other words."""
    rng, words = random.Random(seed), TEXTS["words"]
    return [text.format(**{slot: rng.choice(words[slot]) for slot in words})
            for text in TEXTS["texts"]]  # fmt: skip


# ---- cost ----------------------------------------------------------------------------------------

aten = torch.ops.aten
LEFT = {  # operators that multiply matrices -> which argument is the left one
    aten.mm: 0, aten.bmm: 0, aten.mv: 0, aten._int_mm: 0, aten._weight_int8pack_mm: 0,
    aten.addmm: 1, aten.baddbmm: 1, aten.addmv: 1, aten.addmm_: 1, aten.baddbmm_: 1, aten.addmv_: 1,
}  # fmt: skip


class Meter(TorchDispatchMode):
    """Counts every matrix product of torch, whichever model it belongs to: work[n] is the number of
    weights that n rows were multiplied with. The shorter side is taken for the rows, so a product
    and its transpose count alike. scaled_dot_product_attention is not counted."""

    def __init__(self):
        super().__init__()
        self.work: Counter[int] = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs, left = kwargs or {}, LEFT.get(op.overloadpacket)
        if left is None:
            with self:  # in inference mode, some operators consist of others
                result = op.decompose(*args, **kwargs)
            return op(*args, **kwargs) if result is NotImplemented else result
        result = op(*args, **kwargs)
        *batch, n, m = 1, *result.shape
        self.work[min(n, m)] += math.prod(batch) * args[left].shape[-1] * max(n, m)
        return result


def cost(work: dict[int, int], unit: int, machine: str) -> float:
    """What the products cost, in passes over one row, each of which is `unit` weights."""
    return math.fsum(MACHINES[machine](n) * work[n] / unit for n in sorted(work))


# ---- the decoder, in child processes -------------------------------------------------------------


def answer(impl: str, checkpoint: Path, prompt: list[int]) -> tuple[list[int], dict[int, int]]:
    """Decode a prompt. Returns the new tokens and the work, that of importing `impl` included."""
    ticks = count()
    time.perf_counter = lambda: float(next(ticks))  # "auto" finds that everything takes as long
    paths.CACHE = checkpoint / "cache"  # which holds no timings of this machine
    sys.addaudithook(partial(refuse_writing, str(checkpoint)))
    with Meter() as meter:
        decoder = FunctionDecoder(import_function(impl), str(checkpoint))
        (tokens,) = decoder.batch([Request(prompt, LENGTH)])
    return tokens, dict(meter.work)


def refuse_writing(allowed: str, event: str, arguments: tuple) -> None:
    """An audit hook: a submission cannot keep what it knows about a prompt in a file."""
    if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        if not str(arguments[0]).startswith(allowed) and called_by_submission(sys._getframe(1)):
            raise PermissionError(f"a decoder that is scored may not write to {arguments[0]}")


@torch.no_grad()
def certificate(impl: str) -> tuple[int, str]:
    """The certifier's exit code and verdict. Prints its table."""
    verdicts = check_implementation(import_function(impl), limits=LIMITS)
    return conclude(print_table(verdicts, sys.stdout))


def in_child(work: Callable[[], object], seconds: float) -> object:
    """The result of `work` in a process of its own. Raises what it raises, and Failed if the
    process fails."""
    result, problem, _ = run_apart(work, contents(), seconds, GIGABYTES)
    if problem:
        raise Failed(problem)
    return result


# ---- the score -----------------------------------------------------------------------------------


def score(impl: str, seed: int) -> dict:
    """The score and what it was computed from. Raises Failed or NotSupported if there is none."""
    model, tokenizer = load(paths.TOY, "float64", "cpu")
    with Meter() as meter:  # and torch imports now what it would import in every child
        model.logits(model([0]))
    unit, total, work = meter.work[1], 0, Counter()
    for i, text in enumerate(texts(seed), 1):
        prompt = tokenizer.encode(text)
        with tempfile.TemporaryDirectory() as folder:
            call = partial(answer, impl, link_toy(Path(folder)), prompt)
            tokens, done = in_child(call, SECONDS)
        check_answer(model, prompt, tokens, sum(n * done[n] for n in done) / unit)
        costs = ", ".join(f"{cost(done, unit, name):.2f} on {name}" for name in MACHINES)
        print(f"text {i}: {len(tokens)} tokens, cost {costs}", flush=True)
        total, work = total + len(tokens), work + Counter(done)
    code, verdict = in_child(partial(certificate, impl), CERTIFIER_SECONDS)
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
    p.add_argument("impl", type=Source, help="the .py file; its function is `decode`")
    p.add_argument("--seed", type=number(0), default=0, help="choose other texts (default: 0)")
    p.add_argument("--json", type=OutputFile, metavar="FILE", help="also write the result here")
    args = p.parse_args(argv)
    if not (args.impl.endswith(".py") and Path(args.impl).is_file()):
        raise UserError(f"{args.impl}: no such .py file")
    torch.set_num_threads(1)  # a fork has none of its parent's threads
    result = {"name": Path(args.impl).stem, "seed": args.seed, "score": None}
    try:
        result |= score(f"{args.impl}:decode", args.seed)
        speeds = ", ".join(f"{result[name]:.3f} on {name}" for name in MACHINES)
        print(f"{result['name']}: {result['score']:.3f} tokens per unit of cost ({speeds})")
    except (Failed, NotSupported) as error:
        result["reason"] = str(error)
        print(f"{result['name']}: no score; {error}")
    if args.json:
        write_json(args.json, result, indent=1)
    sys.exit(1 if result["score"] is None else 0)


if __name__ == "__main__":
    main()
