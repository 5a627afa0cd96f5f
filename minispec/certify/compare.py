"""Compare two files of `generate --json` lines, and explain each divergence: a tie or a bug."""

import copy
import json
import math
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from minispec.certify.common import Verdict, first_difference
from minispec.cli import UserError, user_error
from minispec.generate.api import common_prefix_length
from minispec.model import Transformer
from minispec.remote.identity import are_known

TIE = 1e-3  # with a smaller top-2 logit gap, float32 rounding may decide which token wins
# types whose rounding is measured instead, as in the stats of a run
COARSE = {"bfloat16": torch.bfloat16, "float16": torch.float16}
BUG = "a bug (or --model is not the model of these runs)"
OPTION_REASONS = "length", "stop", "context", "interrupted"  # set by options, not by the model


def compare(a: Path, b: Path, model: Transformer) -> Iterator[Verdict]:
    """Report each line's first divergence, its top-2 gap, and tie or bug; `model` in float64. For
    runs in bfloat16 or float16, what counts as a tie is measured."""
    left, right = read_runs(a), read_runs(b)
    reference_for = cache(partial(Reference, model))
    if len(left) != len(right):
        counts = f"{a} has {len(left)} runs, {b} has {len(right)}"
        raise UserError(f"{counts}; both must use the same prompts")
    for i, (x, y) in enumerate(zip(left, right), start=1):
        if x["prompt_ids"] != y["prompt_ids"]:
            raise UserError(f"line {i}: the prompts of {a} and {b} differ")
        if temperature := sampled_at(x) or sampled_at(y):
            raise UserError(f"line {i}: sampled at temperature {temperature}; compare greedy runs")
        dtypes = [run["stats"].get("dtype") for run in (x, y)]
        coarse = tuple(COARSE[name] for name in COARSE for dtype in dtypes if dtype == name)
        yield Verdict("compare", f"line {i}", *explain(x, y, reference_for(coarse)))


class Reference:
    """A model in float64, and how far rounding may move its logits. If both runs are coarse, they
    share the model with rounded weights; otherwise rounding the weights is part of the error."""

    def __init__(self, model: Transformer, coarse: Sequence[torch.dtype] = ()):
        self.model, self.rounded = model, None
        if coarse:
            self.rounded = copy.deepcopy(model).to(coarse[0])
        if len(coarse) == 2:
            self.model = copy.deepcopy(self.rounded).to(torch.float64)

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Tensor:
        """The logits after `tokens`, (V,)."""
        return self.model.logits(self.model(tokens)[0, -1])

    @torch.no_grad()
    def tie(self, tokens: list[int]) -> float:
        """The largest gap after `tokens` that rounding may reverse. In a coarse type, twice the
        largest error of any logit, since one token may lose as much as another gains."""
        if self.rounded is None:
            return TIE
        rounded = self.rounded.logits(self.rounded(tokens)[0, -1])
        return 2 * float((rounded.double() - self.logits(tokens)).abs().max())


def explain(x: dict, y: dict, reference: Reference) -> tuple[bool, str]:
    """Return whether two runs on one prompt may come from the same model, and why."""
    at, gap = divergence(reference, x["prompt_ids"], x["tokens"], y["tokens"])
    shorter = min(x, y, key=lambda run: len(run["tokens"]))
    if at is None:
        return True, f"all {len(x['tokens'])} tokens are identical"
    if at == len(shorter["tokens"]) and shorter.get("finish_reason") in OPTION_REASONS:
        reason = shorter["finish_reason"]
        return True, f"identical for {at} tokens, then one run ended ({reason}): same options?"
    where = f"{first_difference(x['tokens'], y['tokens'])}; top-2 gap {gap:.4g}"
    if math.isinf(gap):
        return False, f"{where}: {BUG}"
    tie = reference.tie(x["prompt_ids"] + x["tokens"][:at])
    return gap < tie, f"{where}, rounding may reverse {tie:.2g}: {'a tie' if gap < tie else BUG}"


def divergence(
    reference: Reference, prompt: list[int], a: list[int], b: list[int]
) -> tuple[int | None, float]:
    """Return the index of the first difference, and how far the worse of the two tokens there is
    below the model's best logit: the top-2 gap, if each run chose one of the top two."""
    at = common_prefix_length(a, b)
    if at == min(len(a), len(b)):
        return (None, 0.0) if len(a) == len(b) else (at, math.inf)
    if not are_known(reference.model, [a[at], b[at], *prompt, *a[:at]]):
        return at, math.inf
    logits = reference.logits(prompt + a[:at])
    return at, float(logits.max() - logits[[a[at], b[at]]].min())


def sampled_at(run: dict) -> float | None:
    """Return the temperature of a sampled run, or a false value if it is greedy or unknown."""
    stats = run["stats"]
    return None if stats.get("top_k") == 1 else stats.get("temperature")


def read_runs(path: Path) -> list[dict]:
    """Read a JSONL file in which every line has prompt_ids and tokens."""
    with user_error(f"{path} cannot be read"):
        lines = path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    runs = []
    for number, line in enumerate(lines, start=1):
        with user_error(f"{path} line {number} is not a run of generate --json"):
            run = json.loads(line)
            if not run["prompt_ids"] or {*map(type, run["prompt_ids"] + run["tokens"])} != {int}:
                raise ValueError("prompt_ids and tokens must be lists of ids")
        runs.append({"stats": {}} | run)
    return runs
