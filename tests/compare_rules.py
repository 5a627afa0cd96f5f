"""Compare block with token verification: tokens per pass of a FastMTP head's sampled chains with
each rule, and how many drafts both are expected to accept in the same rounds. Run by hand:

    python tests/compare_rules.py smollm2 weights/smollm2/prompts.jsonl --k 3 --temperature 0.7
"""

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from torch import Tensor

from minispec import load
from minispec.generate import decode
from minispec.tree import Tree
from minispec.verify import RULES


class NothingAccepted:
    """Randomness with which a rule computes all of its chances."""

    def bernoulli(self, p: float) -> bool:
        return False

    def categorical(self, probs: Tensor) -> int:
        return 0


def expected_drafts(target: Sequence[Tensor], tree: Tree) -> tuple[float, float]:
    """The expected numbers of accepted drafts, by tokens and by block, given these drafts."""
    n = len(tree) - 1
    ratios = [min(1.0, float(target[i][x]) / float(tree.drawn_from(i + 1)[x]))
              for i, x in enumerate(tree.tokens[1:])]  # fmt: skip
    _, _, chances = RULES["block"](target, tree, NothingAccepted())
    shorter = accumulate((1 - chances[i] for i in range(n, 0, -1)), lambda a, b: a * b)
    by_tokens = sum(math.prod(ratios[: i + 1]) for i in range(n))
    return by_tokens, sum(1 - miss for miss in shorter)


def mean(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values) / len(values) ** 0.5:.3f}"


def parser(description: str) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=description.split("\n\n")[0])
    p.add_argument("model")
    p.add_argument("questions", type=Path)
    p.add_argument("--temperature", type=float, default=0.7)
    p.add_argument("--tokens", type=int, default=64)
    return p


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--k", type=int, default=3)
    args = p.parse_args()
    model, tokenizer = load(args.model)
    per_pass, gains = {name: [] for name in RULES}, []
    for seed, line in enumerate(args.questions.read_text(encoding="utf-8").splitlines()):
        question = json.loads(line)["turns"][0]
        prompt, rounds = tokenizer.chat([{"role": "user", "content": question}]), []
        for name, rule in RULES.items():

            def judged(target, tree, randomness, rule=rule):
                if len(tree) > 1:
                    rounds.append(expected_drafts(target, tree))
                return rule(target, tree, randomness)

            run = decode(model, tokenizer, prompt, "fastmtp", k=args.k, seed=seed, rule=judged,
                         temperature=args.temperature, max_new_tokens=args.tokens)  # fmt: skip
            per_pass[name].append(run.stats["tokens_per_pass"])
        gains.append(statistics.mean(block - tokens for tokens, block in rounds))
    for name, values in per_pass.items():
        print(f"--verify {name}: {mean(values)} tokens per pass ({len(values)} prompts)")
    print(f"more drafts accepted by block in the same rounds: {mean(gains)} per pass")


if __name__ == "__main__":
    main()
