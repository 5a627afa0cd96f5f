"""The advisor: which K, tree or window to use on this machine for this kind of text, and the
speedup to expect. Half of the prompts are the probe, the other half checks the promise."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from minispec.cost import cost_curve
from minispec.generate import Run, acceptance, decode, stream
from minispec.medusa import expected, grow_tree
from minispec.model import Transformer
from minispec.timing import split
from minispec.tokenizer import Tokenizer

DEEP = {"speculative": 8, "fastmtp": 6}  # drafts a round of the probe
SIZES = 4, 8, 12, 16, 24, 32, 48, 63  # nodes of Medusa's tree
WINDOWS = (5, 4, 5), (10, 5, 10), (15, 5, 15)


@dataclass(frozen=True)
class Choice:
    """A setting, and the speedup over plain decoding it promises."""

    method: str
    words: str
    options: dict
    speedup: float


@dataclass(frozen=True)
class Probe:
    """Runs of one setting, and the seconds of a round's parts (medians over the prompts)."""

    runs: list[Run]
    parts: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_pass(self) -> float:
        return sum(len(r.tokens) for r in self.runs) / sum(len(r.rounds) for r in self.runs)

    def with_rows(self, cost: float, draft: float = 1.0) -> float:
        """Seconds of a round whose pass costs `cost` times this one's, its drafting `draft`."""
        return self.seconds + (cost - 1) * self.parts["target"] + (draft - 1) * self.parts["draft"]


def advise(
    model: Transformer, tokenizer: Tokenizer, methods: dict[str, dict], texts: dict[str, list],
    n: int,
) -> None:  # fmt: skip
    """Print the choice of every method for every kind of text, and what it then brought."""
    own: dict[str, dict] = {}
    for name, options in methods.items():
        own.setdefault(name.split()[0], options)
    for kind, prompts in texts.items():
        half = max(len(prompts) // 2, 1)
        plain = probe(model, tokenizer, "autoregressive", {}, prompts[:half], n)
        print(f"{kind}: {half} prompts to choose by, {len(prompts) - half} to check")
        found = []
        for method in own:
            choices = list(CHOOSERS.get(method, no_choices)(
                model, tokenizer, own[method], prompts[:half], n, plain
            ))  # fmt: skip
            if choices:
                best = max(choices, key=lambda c: c.speedup)
                measured = check(model, tokenizer, best, prompts[half:] or prompts, n)
                found.append(best)
                print(
                    f"  {best.method:<12} {best.words:<22} predicted {best.speedup:.2f}, "
                    f"measured {measured:.2f} ({measured / best.speedup - 1:+.0%})",
                    flush=True,
                )
        best = max(found, key=lambda c: c.speedup, default=None)
        if best and best.speedup > 1:
            print(f"  use {best.method} with {best.words}")
        else:
            print("  use plain decoding")


def probe(
    model: Transformer, tokenizer: Tokenizer, method: str, options: dict, prompts: list, n: int
) -> Probe:
    """Run `prompts` (the first of them twice: once to warm up), and time the parts."""
    runs, parts = [], []
    for prompt in [prompts[0], *prompts]:
        run = stream(model, tokenizer, prompt, method, max_new_tokens=n, **options)
        parts.append(split(method, run))
        runs.append(run)
    known = [p for p in parts[1:] if p]
    return Probe(
        runs[1:], {name: statistics.median(p[name] for p in known) for name in known[0]}
    )  # fmt: skip


def check(model: Transformer, tokenizer: Tokenizer, choice: Choice, prompts: list, n: int) -> float:
    """The median speedup of a setting over plain decoding, run in turn."""
    speedups = []
    for prompt in [prompts[0], *prompts]:
        plain, run = (
            decode(model, tokenizer, prompt, method, max_new_tokens=n, **options)
            for method, options in (("autoregressive", {}), (choice.method, choice.options))
        )
        if run.tokens and plain.tokens:
            a, b = (r.decode_seconds / len(r.tokens) for r in (plain, run))
            speedups.append(a / b)
    return statistics.median(speedups[1:] or speedups)


# ---- a method's settings, and what each promises -------------------------------------------------


def chains(method: str):
    """Of K: the drafts accepted at each depth of a long chain say what every shorter one brings."""

    def choices(model, tokenizer, options, prompts, n, plain: Probe) -> Iterator[Choice]:
        deep, curve = DEEP[method], cost_curve(model)
        options = {k: v for k, v in options.items() if k != "tree"}
        seen = probe(model, tokenizer, method, options | {"k": deep}, prompts, n)
        rates = acceptance([step for run in seen.runs for step in run.rounds])["unconditional"]
        for k in range(1, len(rates) + 1):
            seconds = seen.with_rows(curve[k + 1] / curve[deep + 1], k / deep)
            tokens = 1 + sum(rates[:k])
            speedup = tokens * plain.seconds / seconds
            yield Choice(method, f"k = {k}", options | {"k": k}, speedup)

    return choices


def trees(model, tokenizer, options, prompts, n, plain: Probe) -> Iterator[Choice]:
    """Of Medusa's tree: grown from the heads' accuracies, which came with them."""
    heads, curve = options["heads"], cost_curve(model)
    if heads.accuracy is None or heads.tree is None:
        return
    seen = probe(model, tokenizer, "medusa", options, prompts, n)
    rows = 1 + len(heads.tree)
    # what these texts bring, over what the accuracies promised for this tree
    right = seen.tokens_per_pass / expected(heads.accuracy, heads.tree)
    for size in SIZES:
        tree = grow_tree(heads.accuracy, size)
        seconds = seen.with_rows(curve[min(size + 1, len(curve) - 1)] / curve[rows])
        tokens = right * expected(heads.accuracy, tree)
        speedup = tokens * plain.seconds / seconds
        yield Choice("medusa", f"a tree of {size} nodes", options | {"tree": tree}, speedup)


def windows(model, tokenizer, options, prompts, n, plain: Probe) -> Iterator[Choice]:
    """Of (W, N, G): each tried, as what a pool brings follows from no other size's."""
    for w, ngram, g in WINDOWS:
        sizes = {"window": w, "ngram": ngram, "guesses": g}
        seen = probe(model, tokenizer, "lookahead", sizes, prompts, n)
        speedup = seen.tokens_per_pass * plain.seconds / seen.seconds
        yield Choice("lookahead", f"(W, N, G) = ({w}, {ngram}, {g})", sizes, speedup)


def no_choices(*arguments) -> Iterator[Choice]:
    """Of a method that has nothing to choose."""
    return iter(())


CHOOSERS = {
    "speculative": chains("speculative"),
    "fastmtp": chains("fastmtp"),
    "medusa": trees,
    "lookahead": windows,
}
