"""Every method side by side in one process, against plain decoding and against its formula.

    python -m minispec.bench [--data DIR]

Each prompt is decoded by every method in turn, so that a noisy machine is noisy for all of them;
a method's speedup is the median over prompts of plain decoding's seconds per token over its own.
Output is compared with plain decoding's token by token on the way.
"""

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from minispec.checkpoint import load
from minispec.cost import pass_seconds
from minispec.errors import UserError, command
from minispec.fastmtp import load_head
from minispec.generate import WEIGHTS, Run, check_vocabularies, decode
from minispec.medusa import load_heads
from minispec.model import Transformer
from minispec.pretrain import KINDS, distinct_4grams, held_out_prompts
from minispec.speculative import speedup, tokens_per_pass
from minispec.tokenizer import Tokenizer
from minispec.vocabulary import load_vocabulary

# beginnings of our own, for where no held-out text is at hand
PROMPTS = [
    "Once upon a time, there was a small bird who could not fly.",
    "Tom and his sister found an old box under the big tree.",
    "One morning, a rabbit woke up and saw snow for the first time.",
    "Anna had a red kite. She took it to the park with her dad.",
    "There was a boat that was afraid of the water.",
    "Mia wanted to bake a cake for her grandmother, but she had no eggs.",
    "A little dog sat at the window and waited for the rain to stop.",
    "In a quiet village lived a boy who loved to paint stones.",
]


@dataclass(frozen=True)
class Row:
    """What one method did over all prompts."""

    kind: str
    method: str
    speedup: float
    least: float
    most: float
    tokens_per_pass: float
    alpha: float | None  # chance that a draft that was tried is accepted
    predicted_tokens_per_pass: float | None
    predicted_speedup: float | None
    distinct_4grams: float
    differing: int  # prompts whose tokens are not plain decoding's


def alpha(runs: list[Run]) -> float | None:
    """Accepted drafts over tried ones: a round tries those it accepts and the one it rejects."""
    steps = [step for run in runs for step in run.rounds]
    if any(len(step.tree) > max(step.tree.depths) + 1 for step in steps):
        return None  # in a tree a round tries many
    tried = sum(min(len(step.path), len(step.tree) - 1) for step in steps)
    return sum(len(step.path) - 1 for step in steps) / tried if tried else None


def measure(
    model: Transformer, tokenizer: Tokenizer, methods: dict[str, dict], prompts: list, n: int,
    temperature: float,
) -> dict[str, list[Run]]:  # fmt: skip
    """One run per prompt of every method, interleaved; the first prompt also warms up."""
    runs: dict[str, list[Run]] = {name: [] for name in methods}
    for i, prompt in enumerate(tqdm([prompts[0], *prompts], unit="prompt")):
        for name, options in methods.items():
            run = decode(
                model, tokenizer, prompt, name.split()[0], max_new_tokens=n,
                temperature=temperature, **options,
            )  # fmt: skip
            if i and run.tokens:
                runs[name].append(run)
    return runs


def summarise(
    kind: str, name: str, runs: list[Run], plain: list[Run], k: int | None, c: float, flat: float
) -> Row:
    """`k` drafts of a model at the cost `c` each, for the formula, which takes a target pass over
    k + 1 tokens to cost no more than one over 1: here it costs `flat` as much."""
    speeds, a = ratios(plain, runs), alpha(runs)
    k = None if a is None else k
    return Row(
        kind, name, statistics.median(speeds), min(speeds), max(speeds), per_pass(runs), a,
        tokens_per_pass(a, k) if k else None, speedup(a, k, c) / flat if k else None,
        statistics.mean(distinct_4grams(r.tokens) for r in runs),
        differing(plain, runs),
    )  # fmt: skip


def ratios(plain: list[Run], runs: list[Run]) -> list[float]:
    """Of each prompt, plain decoding's seconds per token over the method's own."""
    return [
        (p.decode_seconds / len(p.tokens)) / (r.decode_seconds / len(r.tokens))
        for p, r in zip(plain, runs)
    ]


def per_pass(runs: list[Run]) -> float:
    """Tokens per target pass, over all runs."""
    return sum(len(r.tokens) for r in runs) / sum(len(r.rounds) for r in runs)


def differing(plain: list[Run], runs: list[Run]) -> int:
    """How many runs have other tokens than plain decoding."""
    return sum(p.tokens != r.tokens for p, r in zip(plain, runs))


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def methods_of(
    args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer
) -> dict[str, dict]:
    """Row of the table -> the method's options; the first word is the method's name."""
    draft, its_tokenizer = load(args.draft, args.dtype, args.device)
    check_vocabularies(tokenizer, its_tokenizer, model, draft)
    methods = {
        "autoregressive": {},
        f"speculative k={args.k}": {"draft": draft, "k": args.k},
        "speculative k=auto": {"draft": draft, "k": "auto"},
        "prompt-lookup": {},
        "jacobi": {},
        "lookahead (5,4,5)": {"window": 5, "ngram": 4, "guesses": 5},
        "lookahead (10,5,10)": {"window": 10, "ngram": 5, "guesses": 10},
        "lookahead (15,5,15)": {"window": 15, "ngram": 5, "guesses": 15},
        "lookahead-auto": {},
    }
    if args.heads:
        methods["medusa"] = {"heads": load_heads(args.heads, model, tokenizer)}
    if args.mtp:
        head, file = load_head(args.mtp, model, tokenizer), Path(args.mtp) / "vocabulary.json"
        words = load_vocabulary(file, model, tokenizer) if file.exists() else None
        chains = {f"k={k}": {"k": k} for k in (2, 3, 4, "auto")}
        for name, options in (chains | {"tree 8": {"k": 4, "tree": 8}}).items():
            methods[f"fastmtp {name}"] = {"head": head, "vocabulary": words, **options}
    if args.methods:
        chosen = ["autoregressive", *args.methods.split(",")]
        unknown = set(chosen) - {name.split()[0] for name in methods}
        if unknown:
            raise UserError(f"--methods {min(unknown)}: not one of the benchmark's")
        methods = {name: each for name, each in methods.items() if name.split()[0] in chosen}
    return methods


@command
def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="python -m minispec.bench", description=__doc__.split("\n")[0])
    p.add_argument("--model", default=str(WEIGHTS / "target"))
    p.add_argument("--draft", default=str(WEIGHTS / "draft"))
    p.add_argument("--heads", default=str(WEIGHTS / "medusa"), help="Medusa heads; '' for none")
    p.add_argument("--mtp", default=str(WEIGHTS / "mtp"), help="FastMTP's head; '' for none")
    p.add_argument("--methods", help="only these, between commas")
    p.add_argument(
        "--data", type=Path, help="a corpus (see pretrain): its held-out text as prompts"
    )
    p.add_argument("--kind", default="stories_en", help="with --data: the kind of text, or all")
    p.add_argument("--prompts", type=int, default=20, help="with --data: how many")
    p.add_argument("--max-new-tokens", type=int, default=150)
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--k", type=int, default=4)
    p.add_argument("--dtype", default="auto")
    p.add_argument("--device", default="auto")
    p.add_argument("--json", action="store_true")
    args = p.parse_args(argv)
    if min(args.prompts, args.max_new_tokens, args.k) < 1:
        raise UserError("--prompts, --max-new-tokens and --k must be at least 1")
    model, tokenizer = load(args.model, args.dtype, args.device)
    if tokenizer is None:
        raise UserError(f"{args.model} has no tokenizer.json")
    methods = methods_of(args, model, tokenizer)
    draft = methods.get(f"speculative k={args.k}", {}).get("draft", model)
    c = pass_seconds(draft, 1) / pass_seconds(model, args.k + 1)
    flat = pass_seconds(model, args.k + 1) / pass_seconds(model, 1)
    kinds, rows = list(KINDS) if args.kind == "all" else [args.kind], []
    texts = dict.fromkeys(kinds, PROMPTS)
    if args.data:
        texts = held_out_prompts(args.data, kinds, tokenizer, args.prompts)
    for kind, prompts in texts.items():
        runs = measure(model, tokenizer, methods, prompts, args.max_new_tokens, args.temperature)
        for name, each in runs.items():
            k = args.k if name == f"speculative k={args.k}" else None
            rows.append(summarise(kind, name, each, runs["autoregressive"], k, c, flat))
        if not args.json:
            show(rows[-len(runs) :], kind, len(prompts))
    if args.json:
        print(json.dumps({"c": c, "flatness": flat, "rows": [asdict(row) for row in rows]}))
    else:
        print(
            f"a draft pass costs {c:.2f} of a target pass over {args.k + 1} tokens, "
            f"which costs {flat:.2f} of one over 1"
        )


def show(rows: list[Row], kind: str, prompts: int) -> None:
    """One kind's table."""
    line = "{:<21}{:>18}{:>13}{:>7}{:>31}{:>18}{:>8}"
    print(f"{kind}, {prompts} prompts")
    print(line.format("method", "speedup", "tokens/pass", "alpha", "formula: tokens/pass, speedup",
                      "distinct 4-grams", "differ"))  # fmt: skip
    for r in rows:
        spread = f"{r.speedup:.2f} ({r.least:.2f}-{r.most:.2f})"
        formula = f"{number(r.predicted_tokens_per_pass)}, {number(r.predicted_speedup)}"
        print(line.format(r.method, spread, number(r.tokens_per_pass), number(r.alpha), formula,
                          number(r.distinct_4grams), r.differing))  # fmt: skip
    print(flush=True)


if __name__ == "__main__":
    main()
