"""The advisor: which K, tree or window to use on this machine for this kind of text, and the
speedup to expect. One setting of each method is the probe; what it promises of the best setting is
then held against that one's own runs."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from minispec.cost import cost_curve, curve_at
from minispec.errors import UserError
from minispec.generate import Run, acceptance, decode, stream
from minispec.medusa import expected, grow_tree
from minispec.model import Transformer
from minispec.timing import per_pass, seconds_per_token, split
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
    """Runs of one setting; the seconds of a round's parts, and of a round of plain decoding in
    turn with it (medians over the prompts)."""

    runs: list[Run]
    parts: dict[str, float]
    plain: float

    def speedup(self, tokens: float, **times: float) -> float:
        """Over plain decoding, of rounds that bring `tokens`, and whose parts take so many `times`
        as long as the probe's."""
        seconds = sum(times.get(part, 1.0) * taken for part, taken in self.parts.items())
        return tokens * self.plain / seconds


def advise(
    model: Transformer, tokenizer: Tokenizer, methods: dict[str, dict], texts: dict[str, list],
    n: int,
) -> None:  # fmt: skip
    """Print the choice of every method for every kind of text, and what it then brought."""
    own: dict[str, dict] = {}
    for name, options in methods.items():
        own.setdefault(name.split()[0], options)
    for kind, prompts in texts.items():
        print(f"{kind}, {len(prompts)} prompts")
        found = []
        for method in own:
            choices = list(CHOOSERS.get(method, no_choices)(
                model, tokenizer, own[method], prompts, n
            ))  # fmt: skip
            if choices:
                best = max(choices, key=lambda c: c.speedup)
                measured = check(model, tokenizer, best, prompts, n)
                found.append((measured, best))
                print(
                    f"  {best.method:<14} {best.words:<22} predicted {best.speedup:.2f}, "
                    f"measured {measured:.2f} ({measured / best.speedup - 1:+.0%})",
                    flush=True,
                )
        measured, best = max(found, key=lambda each: each[0], default=(1.0, None))
        if measured > 1:
            print(f"  use {best.method} with {best.words}")
        else:
            print("  use plain decoding")


def probe(
    model: Transformer, tokenizer: Tokenizer, method: str, options: dict, prompts: list, n: int
) -> Probe:
    """Run `prompts` (the first of them twice: once to warm up), and time the parts."""
    runs, parts, plain = [], [], []
    for prompt in [prompts[0], *prompts]:
        begin = partial(stream, model, tokenizer, prompt, max_new_tokens=n)
        _, base = split("autoregressive", begin)
        run, seconds = split(method, partial(begin, method=method, **options))
        if base and seconds:
            runs.append(run)
            parts.append(seconds)
            plain.append(sum(base.values()))
    if len(runs) < 2:
        raise UserError("--advise needs prompts with longer answers")
    medians = {name: statistics.median(p[name] for p in parts[1:]) for name in parts[0]}
    return Probe(runs[1:], medians, statistics.median(plain[1:]))


def check(model: Transformer, tokenizer: Tokenizer, choice: Choice, prompts: list, n: int) -> float:
    """The speedup of a setting over plain decoding, run in turn, over all tokens."""
    settings = ("autoregressive", {}), (choice.method, choice.options)
    runs = [
        [decode(model, tokenizer, prompt, method, max_new_tokens=n, **options)
         for method, options in settings]
        for prompt in [prompts[0], *prompts]
    ]  # fmt: skip
    plain, own = zip(*runs[1:])
    return seconds_per_token(*plain) / seconds_per_token(*own)


# ---- a method's settings, and what each promises -------------------------------------------------


def chains(method: str):
    """Of K: the drafts accepted at each depth of a long chain say what every shorter one brings."""

    def choices(model, tokenizer, options, prompts, n) -> Iterator[Choice]:
        deep, curve = DEEP[method], cost_curve(model)
        options = {k: v for k, v in options.items() if k != "tree"}
        seen = probe(model, tokenizer, method, options | {"k": deep}, prompts, n)
        rates = acceptance([step for run in seen.runs for step in run.rounds])["unconditional"]
        for k in range(1, len(rates) + 1):
            speedup = seen.speedup(
                1 + sum(rates[:k]),
                draft=k / deep,
                target=curve_at(curve, k + 1) / curve_at(curve, deep + 1),
            )
            yield Choice(method, f"k = {k}", options | {"k": k}, speedup)

    return choices


def trees(model, tokenizer, options, prompts, n) -> Iterator[Choice]:
    """Of Medusa's tree: one anew each round, which is tried; or grown from the heads' accuracies,
    if they came with them."""
    heads, curve = options["heads"], cost_curve(model)
    anew = options | {"tree": "auto"}
    seen = probe(model, tokenizer, "medusa", anew, prompts, n)
    yield Choice("medusa", "tree = auto", anew, seen.speedup(per_pass(seen.runs)))
    if heads.accuracy is None or heads.tree is None:
        return
    seen = probe(model, tokenizer, "medusa", options, prompts, n)
    rows = 1 + len(heads.tree)
    # what these texts bring, over what the accuracies promised for this tree
    right = per_pass(seen.runs) / expected(heads.accuracy, heads.tree)
    for size in SIZES:
        tree = grow_tree(heads.accuracy, size)
        grown = (size + 1) / rows
        cost = curve_at(curve, size + 1) / curve_at(curve, rows)
        tokens = right * expected(heads.accuracy, tree)
        speedup = seen.speedup(tokens, target=cost, accept=grown, host=grown)
        yield Choice("medusa", f"a tree of {size} nodes", options | {"tree": tree}, speedup)


def windows(model, tokenizer, options, prompts, n) -> Iterator[Choice]:
    """Of (W, N, G): each is tried, as what it brings follows from no other's."""
    for w, ngram, g in WINDOWS:
        sizes = {"window": w, "ngram": ngram, "guesses": g}
        seen = probe(model, tokenizer, "lookahead", sizes, prompts, n)
        speedup = seen.speedup(per_pass(seen.runs))
        yield Choice("lookahead", f"(W, N, G) = ({w}, {ngram}, {g})", sizes, speedup)


def as_it_goes(model, tokenizer, options, prompts, n) -> Iterator[Choice]:
    """The one way of a method that chooses for itself: it is tried."""
    seen = probe(model, tokenizer, "lookahead-auto", options, prompts, n)
    speedup = seen.speedup(per_pass(seen.runs))
    yield Choice("lookahead-auto", "what pays as it goes", options, speedup)


def no_choices(*arguments) -> Iterator[Choice]:
    """Of a method that has nothing to choose."""
    return iter(())


CHOOSERS = {
    "speculative": chains("speculative"),
    "fastmtp": chains("fastmtp"),
    "medusa": trees,
    "lookahead": windows,
    "lookahead-auto": as_it_goes,
}
