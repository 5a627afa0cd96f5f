"""Two files of `generate --json` lines: where they part, and whether rounding could do that."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch

from minispec.certify.ours.checks import Verdict, first_difference
from minispec.errors import UserError
from minispec.generate.api import common_prefix
from minispec.model import Transformer

TIE = 1e-3  # a top-2 logit gap below this may be decided by rounding, in float32
CUT = "length", "stop", "context", "interrupted"  # ends that lie in the options, not in the text


def compare(a: Path, b: Path, model: Transformer) -> Iterator[Verdict]:
    """Line by line: the first divergence, its top-2 gap, tie or bug; `model` in float64."""
    left, right = read_runs(a), read_runs(b)
    if len(left) != len(right):
        raise UserError(f"{a} has {len(left)} runs, {b} has {len(right)}: compare the same prompts")
    for i, (x, y) in enumerate(zip(left, right), start=1):
        if x["prompt_ids"] != y["prompt_ids"]:
            raise UserError(f"line {i}: the prompts of {a} and {b} differ")
        drawn = [temperature for run in (x, y) if (temperature := drawn_at(run))]
        if drawn:
            raise UserError(f"line {i}: sampled at temperature {drawn[0]}: compare greedy runs")
        passed, detail = judge(x, y, model)
        yield Verdict("compare", f"line {i}", passed, detail)


def judge(x: dict, y: dict, model: Transformer) -> tuple[bool, str]:
    """Whether two runs after the same prompt may come from one model, and why."""
    at, gap = divergence(model, x["prompt_ids"], x["tokens"], y["tokens"])
    shorter = min(x, y, key=lambda run: len(run["tokens"]))
    if at is None:
        return True, f"{len(x['tokens'])} tokens, the same"
    if at == len(shorter["tokens"]) and shorter.get("finish_reason") in CUT:
        ended = shorter["finish_reason"]
        return True, f"the same {at} tokens, where one ended ({ended}): were the options the same?"
    what = "a tie" if gap < TIE else "a bug (or not the model of these runs)"
    where = first_difference(x["tokens"], y["tokens"])
    return gap < TIE, f"{where}; top-2 gap {gap:.4g}: {what}"


def divergence(
    model: Transformer, prompt: list[int], a: list[int], b: list[int]
) -> tuple[int | None, float]:
    """Index of the first difference, and how far the worse of the two tokens there is below the
    model's best: the top-2 gap, if each run took one of the top two.
    """
    at = common_prefix(a, b)
    if at == min(len(a), len(b)):
        return (None, 0.0) if len(a) == len(b) else (at, math.inf)
    seen = a[at], b[at], *prompt, *a[:at]
    if max(seen) >= model.config.vocab_size or min(seen) < 0:
        return at, math.inf
    with torch.no_grad():
        logits = model.logits(model(prompt + a[:at])[0, -1])
    return at, float(logits.max() - logits[[a[at], b[at]]].min())


def drawn_at(run: dict) -> float | None:
    """The temperature of a run that was drawn, as far as its statistics say."""
    stats = run.get("stats")
    stats = stats if isinstance(stats, dict) else {}
    return None if stats.get("top_k") == 1 else stats.get("temperature")


def read_runs(path: Path) -> list[dict]:
    """The lines of a JSONL file, each with prompt_ids and tokens."""
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    runs = []
    for number, line in enumerate(lines, start=1):
        try:
            run = json.loads(line)
            ids = run["prompt_ids"], run["tokens"]
        except (ValueError, KeyError, TypeError, RecursionError):
            ids = (None,)
        if not all(isinstance(x, list) and all(type(i) is int for i in x) for x in ids):
            raise UserError(
                f"{path} line {number}: must be an object with prompt_ids and tokens, lists of ids"
            )
        if not run["prompt_ids"]:
            raise UserError(f"{path} line {number}: prompt_ids must not be empty")
        runs.append(run)
    return runs
