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
from minispec.remote.identity import answer_logits, are_known

TIE = 1e-3  # with a smaller top-2 logit gap, float32 rounding may decide which token wins
# types whose rounding is measured instead, as in the stats of a run
COARSE = {"bfloat16": torch.bfloat16, "float16": torch.float16}
ROWS = 1, 4, 64  # of the last pass, when the rounding is measured: alone, as drafts, with the rest
LIKELY, DEVIATIONS = 32, 4.0  # tokens whose errors are measured; a tie is within so many deviations
ASSUMED = "float32 (assumed: no stats.dtype)"
BUG = "a bug (or --model is not the model of these runs)"
OPTION_REASONS = "length", "stop", "context", "interrupted"  # set by options, not by the model


def compare(a: Path, b: Path, model: Transformer) -> Iterator[Verdict]:
    """Report each line's first divergence, and tie or bug; `model` in float64. From there on, every
    token of each run must be the best of the model with weights in the run's own precision, as far
    as its rounding can tell, which is measured for bfloat16 and float16."""
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
        runs = [x | {"file": a}, y | {"file": b}]
        yield Verdict("compare", f"line {i}", *explain(*runs, reference_for))


class Reference:
    """A model in float64, and how far rounding may move its logits. If two coarse types are given,
    its weights are rounded to the first; otherwise rounding the weights is part of the error."""

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
    def tie(self, tokens: list[int], chosen: int | None = None) -> float:
        """The largest gap after `tokens` that rounding may reverse, for a `chosen` token if given.
        It is measured in coarse types: how far the likeliest tokens and the chosen one move towards
        the best one, or away from it, if the last tokens are decoded alone or together."""
        if self.rounded is None:
            return TIE
        exact, errors = self.logits(tokens), []
        best, *likely = exact.topk(min(LIKELY, len(exact))).indices.tolist()
        for rows in ROWS:
            cache = self.rounded.new_cache(len(tokens))
            self.rounded.prefill(tokens[:-rows], cache)
            hidden = self.rounded(tokens[cache.length :], cache)
            error = self.rounded.logits(hidden[0, -1]).double() - exact
            errors.append(error - error[best])
        moves = torch.stack(errors)  # (ways, V)
        own = moves[:, best if chosen is None else chosen].abs().max()
        return max(DEVIATIONS * float(moves[:, likely].square().mean().sqrt()), 2 * float(own))


def explain(x: dict, y: dict, reference_for) -> tuple[bool, str]:
    """Return whether two runs on one prompt may come from the same model, and why."""
    a, b = x["tokens"], y["tokens"]
    at, shorter = common_prefix_length(a, b), min(x, y, key=lambda run: len(run["tokens"]))
    if a == b:
        return True, f"all {len(a)} tokens are identical"
    if at == len(shorter["tokens"]):
        if (reason := shorter.get("finish_reason")) in OPTION_REASONS:
            return True, f"identical for {at} tokens, then one run ended ({reason}): same options?"
        return False, f"{first_difference(a, b)}; top-2 gap inf: {BUG}"
    judged = []
    for run in x, y:
        precision = run["stats"].get("dtype") or ASSUMED
        coarse = [COARSE[precision]] * 2 if precision in COARSE else []
        judged.append((*worst_token(reference_for(tuple(coarse)), run, at), precision, run))
    worst, gap, tie, precision, run = max(judged, key=lambda each: each[1] / each[2])
    where = first_difference(a, b)
    if gap == 0:  # runs in two precisions
        precisions = " and ".join(precision for *_, precision, _ in judged)
        return True, f"{where}; each is the best with weights in {precisions}: a tie"
    where += f"; {run['tokens'][worst]} at {worst} of {run['file']}: top-2 gap {gap:.4g}"
    reverse = f"rounding in {precision} may reverse {tie:.2g}"
    return gap < tie, f"{where}, {reverse}: {'a tie' if gap < tie else BUG}"


@torch.no_grad()
def worst_token(reference: Reference, run: dict, start: int) -> tuple[int, float, float]:
    """Return the first token from `start` on that rounding cannot explain, else the one that it
    explains worst: its index, how far it is below the best one, and how far it may be."""
    prompt, tokens, worst = run["prompt_ids"], run["tokens"], (start, 0.0, TIE)
    if not are_known(reference.model, [*prompt, *tokens]):
        return start, math.inf, TIE
    logits = answer_logits(reference.model, prompt, tokens)  # (n, V)
    below = logits.max(-1).values - logits[torch.arange(len(tokens)), tokens]
    for at in range(start, len(tokens)):
        if below[at] > 0:
            one = at, float(below[at]), reference.tie(prompt + tokens[:at], tokens[at])
            worst = max(worst, one, key=lambda each: each[1] / each[2])
        if worst[1] >= worst[2]:
            break
    return worst


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
