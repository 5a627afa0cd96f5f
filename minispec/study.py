"""Experiments on the shipped models that a reader can repeat: each prints a table.

    python -m minispec.study lookahead --data DIR      steps against log FLOPs, with a plot
    python -m minispec.study fastmtp --data DIR        heads trained on what, at K = 1, 2, 3
    python -m minispec.study vocabulary --data DIR     a draft's vocabulary, by size and language

All decode greedily from held-out text; DIR is the corpus named in the card of weights/target.
"""

import argparse
import json
import statistics
from itertools import product
from pathlib import Path

import torch
from tqdm import tqdm

from minispec.bench import differing, per_pass, ratios
from minispec.checkpoint import load
from minispec.cost import head_cost
from minispec.errors import Parser, UserError, check_package, command, prepare_file
from minispec.generate import WEIGHTS, Run, decode
from minispec.heads import load_mtp, load_vocabulary
from minispec.methods.vocabulary import Compressed
from minispec.model import Transformer, count_parameters
from minispec.run import acceptance
from minispec.text import held_out_prompts
from minispec.tokenizer import Tokenizer

# ---- lookahead's scaling law ---------------------------------------------------------------------


def lookahead(args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer) -> list[dict]:
    """Tokens per pass over a grid of W = G and N, and the formula fitted to them."""
    prompts = held_out_prompts(args.data, [args.kind], tokenizer, args.prompts)[args.kind]
    rows = []
    for n, w in tqdm(list(product((3, 4, 5, 6), (1, 2, 4, 8, 16, 32))), unit="size"):
        options = {"window": w, "ngram": n, "guesses": w, "max_new_tokens": args.max_new_tokens}
        runs = [decode(model, tokenizer, prompt, "lookahead", **options) for prompt in prompts]
        flops = 2 * count_parameters(model) * ((n - 1) * 2 * w)
        rows.append({"N": n, "W": w, "flops": flops, "measured": per_pass(runs)})
    for n in sorted({row["N"] for row in rows}):
        part = [row for row in rows if row["N"] == n]
        alpha, f = fit([(row["W"], row["measured"]) for row in part], n - 1)
        for row in part:
            row |= {"alpha": alpha, "f": f, "formula": formula(row["W"], n - 1, alpha, f)}
    print("  N   W  FLOPs a step  tokens a pass   formula (alpha, f)")
    for r in rows:
        print(f"{r['N']:>3}{r['W']:>4}{r['flops']:>14.2e}{r['measured']:>15.2f}"
              f"{r['formula']:>10.2f} ({r['alpha']:.2f}, {r['f']:.1f})")  # fmt: skip
    if args.plot:
        plot(rows, args.plot)
    return rows


def formula(b: int, gamma: int, alpha: float, f: float) -> float:
    """S = (f - 1 + E) / f with E = (γ + 1) - Σ_{i=1..γ} (1 - α^i)^b: b guesses of γ tokens, and one
    pass in f finds any (Fu et al. 2024, section 4.3)."""
    e = gamma + 1 - sum((1 - alpha**i) ** b for i in range(1, gamma + 1))
    return (f - 1 + e) / f


def fit(points: list[tuple[int, float]], gamma: int) -> tuple[float, float]:
    """The α and f of least squared error, on a grid."""
    grid = product((i / 100 for i in range(1, 100)), (1 + i / 10 for i in range(60)))
    return min(
        grid, key=lambda at: sum((formula(b, gamma, *at) - measured) ** 2 for b, measured in points)
    )


def plot(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for color, n in enumerate(sorted({row["N"] for row in rows})):
        part = [row for row in rows if row["N"] == n]
        x = [row["flops"] for row in part]
        axes.plot(x, [1 / r["measured"] for r in part], "o", color=f"C{color}", label=f"N = {n}")
        axes.plot(x, [1 / r["formula"] for r in part], "-", color=f"C{color}", alpha=0.6)
    axes.set(xscale="log", xlabel="FLOPs per step (extra tokens only)", ylabel="steps per token",
             title="Lookahead: steps against log FLOPs (points), the formula (lines)")  # fmt: skip
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


# ---- what FastMTP's head is trained on -----------------------------------------------------------


def fastmtp(args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer) -> list[dict]:
    """The paper's table: vanilla, fixed data, own data, and own data with the small vocabulary."""
    heads = {
        "vanilla (one step, corpus)": WEIGHTS / "studies" / "mtp-vanilla",
        "corpus": WEIGHTS / "studies" / "mtp-corpus",
        "own output, parallel": WEIGHTS / "studies" / "mtp-parallel",
        "own output, aligned": WEIGHTS / "studies" / "mtp-aligned",
    }
    variants = [(name, load_mtp(path, model, tokenizer), None) for name, path in heads.items()]
    words = load_vocabulary(WEIGHTS / "mtp" / "vocabulary.json", model, tokenizer, args.size)
    variants.append(("own output, aligned, + vocabulary", variants[-1][1], words))
    cases = list(product(variants, (1, 2, 3)))
    runs: dict[tuple, list[tuple[Run, Run]]] = {}
    texts = held_out_prompts(args.data, None, tokenizer, args.prompts)
    for kind, prompts in texts.items():
        for prompt in tqdm(prompts, desc=kind):
            n = {"max_new_tokens": args.max_new_tokens}
            plain = decode(model, tokenizer, prompt, **n)
            for (name, head, vocabulary), k in cases:
                run = decode(model, tokenizer, prompt, "fastmtp", head=head, k=k,
                             vocabulary=vocabulary, **n)  # fmt: skip
                runs.setdefault((name, k, kind), []).append((plain, run))
    rows = [fastmtp_row(*key, each) for key, each in runs.items()]
    for name, k in dict.fromkeys((name, k) for name, k, _ in runs):
        every = [pair for (a, b, _), each in runs.items() if (a, b) == (name, k) for pair in each]
        rows.append(fastmtp_row(name, k, "all six", every))
    print("| head | K | text | τ | accepted, unconditional | conditional | × plain |")
    print("|---|---|---|---|---|---|---|")
    for r in rows:
        if r["kind"] in ("stories_en", "all six"):
            rates = " | ".join(
                "/".join(f"{100 * x:.0f}" for x in r[key]) + " %"
                for key in ("unconditional", "conditional")
            )
            print(f"| {r['head']} | {r['k']} | {r['kind']} | {r['tau']:.2f} | {rates} | "
                  f"{r['speedup']:.2f} |")  # fmt: skip
    print(f"{sum(r['differing'] for r in rows)} runs differ from plain decoding")
    return rows


def fastmtp_row(name: str, k: int, kind: str, pairs: list[tuple[Run, Run]]) -> dict:
    """A row of the table from runs of plain decoding and of this head."""
    plain, runs = map(list, zip(*pairs))
    rates = acceptance([step for run in runs for step in run.rounds])
    return {"head": name, "k": k, "kind": kind, "tau": per_pass(runs), **rates,
            "speedup": statistics.median(ratios(plain, runs)),
            "differing": differing(plain, runs)}  # fmt: skip


# ---- the vocabulary's size and language ----------------------------------------------------------


def vocabulary(args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer) -> list[dict]:
    """τ and draft cost against the size of the set, with the other language's as the control."""
    head = load_mtp(WEIGHTS / "studies" / "mtp-aligned", model, tokenizer)
    file = WEIGHTS / "mtp" / "vocabulary.json"
    rows = []
    print("| text | set | tokens | τ | draft step, of a pass | MB | MFLOP |\n" + "|---" * 7 + "|")
    texts = held_out_prompts(args.data, ["stories_en", "stories_zh"], tokenizer, args.prompts)
    for kind, own, other in (("stories_en", "en", "zh"), ("stories_zh", "zh", "en")):
        for name, size in [("full", 0), *product((own, other), (256, 512, 1024, 2048, 4096))]:
            words = None
            if size:
                every = load_vocabulary(file, model, tokenizer, size).languages
                words = Compressed({name: every[name]}, model)
            runs = [
                decode(model, tokenizer, prompt, "fastmtp", head=head, k=3, vocabulary=words,
                       max_new_tokens=args.max_new_tokens) for prompt in texts[kind]
            ]  # fmt: skip
            tokens = len(words.languages[name].ids) if size else model.config.vocab_size
            cost = head_cost(model, head, words)
            numbers = count_parameters(head) + tokens * model.config.hidden_size  # read by a step
            r = {"kind": kind, "set": name, "tokens": tokens, "tau": per_pass(runs), "cost": cost,
                 "megabytes": numbers * model.dtype.itemsize / 1e6,
                 "mflop": 2 * numbers / 1e6}  # fmt: skip
            rows.append(r)
            print(f"| {kind} | {name} | {tokens} | {r['tau']:.2f} | {cost:.3f} | "
                  f"{r['megabytes']:.2f} | {r['mflop']:.2f} |", flush=True)  # fmt: skip
    return rows


# ---- command line --------------------------------------------------------------------------------


@command
def main(argv: list[str] | None = None) -> None:
    studies = {"lookahead": lookahead, "fastmtp": fastmtp, "vocabulary": vocabulary}
    p = Parser(prog="python -m minispec.study", description=__doc__.split("\n\n")[0])
    p.add_argument("study", choices=list(studies))
    p.add_argument("--data", type=Path, required=True, help="the corpus that target was trained on")
    p.add_argument("--kind", default="stories_en", help="lookahead: the kind of text")
    p.add_argument("--prompts", type=int, default=6, help="of each kind")
    p.add_argument("--max-new-tokens", type=int, default=120)
    p.add_argument("--size", type=int, default=2048, help="fastmtp: tokens of a language")
    p.add_argument("--plot", type=Path, help="lookahead: a .png to draw")
    p.add_argument("--json", type=Path, help="where to write all rows")
    args = p.parse_args(argv)
    if min(args.prompts, args.max_new_tokens, args.size) < 1:
        raise UserError("--prompts, --max-new-tokens and --size must be at least 1")
    if args.plot:
        check_package("matplotlib", "--plot")
        if args.plot.suffix != ".png":
            raise UserError(f"--plot {args.plot}: must end in .png")
    for flag in ("plot", "json"):
        if getattr(args, flag):
            prepare_file(getattr(args, flag), f"--{flag}")
    model, tokenizer = load(WEIGHTS / "target")
    with torch.no_grad():
        rows = studies[args.study](args, model, tokenizer)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
