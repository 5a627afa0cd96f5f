"""Is this decoder lossless? Ours, proven; anyone's, tested.

    python -m minispec.certify                                  every check of every method here
    python -m minispec.certify --impl package.module:function   a black box (see `Implementation`)
    python -m minispec.certify --compare a.jsonl b.jsonl --model DIR     explain two runs

The exact check sums over *every* random outcome of the real decoding loops, so passing it is a
proof for the toy models at hand; the mutants show that each check can fail.
"""

import argparse
import copy
import importlib
import inspect
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import compress
from pathlib import Path
from typing import Protocol

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models as tokenizer_models
from torch import Tensor

from minispec import generate
from minispec.cache import KVCache
from minispec.checkpoint import load, save
from minispec.errors import Parser, UserError, command
from minispec.generate import METHODS, common_prefix, decode
from minispec.heads import PUBLISHED
from minispec.methods import lookahead
from minispec.methods.adaptive import BestTree, Length
from minispec.methods.fastmtp import Drafter, Head
from minispec.methods.medusa import Heads, Ranks, complete
from minispec.methods.vocabulary import Compressed, count
from minispec.model import Config, Transformer, plan
from minispec.sampling import Randomness, Sampling, Seeded, probs
from minispec.tokenizer import Tokenizer
from minispec.tree import Step, Tree
from minispec.verify import accept

EXACT = 1e-12  # total variation that counts as none, for sums of float64 products
FALSE_ALARM = 1e-6  # chance that one statistical check fails a correct decoder
RUNS, JOINT = 400, 3  # runs of one statistical check, which tests so many tokens jointly
TIE = 1e-3  # a top-2 logit gap below this may be decided by rounding, in float32
GREEDY = Sampling()


@dataclass(frozen=True)
class Verdict:
    """One row of the table."""

    check: str
    case: str
    passed: bool
    detail: str


Method = Callable[..., Iterator[Step]]


# ---- toys ----------------------------------------------------------------------------------------


class Toy:
    """A target whose distribution is a random function of its context, tokens *and* positions.

    It goes through the real cache: a row holds its (position, token), so a stale, missing, shifted
    or wrongly visible row changes the distribution at once, and a pass costs microseconds.
    """

    prefill = Transformer.prefill
    source = None

    def __init__(self, seed: int, vocab: int = 3, context: int = 32, eos: tuple[int, ...] = ()):
        self.config = Config(vocab, 1, 1, 1, 1, 2, vocab, context, bos_id=0, eos_ids=eos)
        self.device, self.dtype = torch.device("cpu"), torch.float64
        self.seed, self.memory = seed, {}

    def new_cache(self, capacity: int | None = None, batch: int = 1) -> KVCache:
        return KVCache(1, 1, 2, capacity or self.config.context, batch, torch.float64)

    def __call__(self, tokens, cache=None, depth=None, mask=None) -> Tensor:
        tokens = torch.as_tensor(tokens)
        n = len(tokens)
        cache = cache or self.new_cache(n)
        depth = torch.arange(n) if depth is None else depth
        mask = torch.ones(n, n, dtype=torch.bool).tril() if mask is None else mask
        slots, position, visible = cache.place(n, depth, mask)
        row = torch.stack([position[0], tokens], -1).view(1, n, 1, 2).to(self.dtype)
        rows, _ = cache.write(0, slots, row, row)  # (1, span, 1, 2)
        rows = [tuple(pair) for pair in rows[0, :, 0].long().tolist()]
        contexts = (sorted(compress(rows, seen)) for seen in visible[0, 0].tolist())
        return torch.stack([self.after(tuple(context)) for context in contexts])[None]

    def after(self, context: tuple) -> Tensor:
        """Logits (vocab,) after a context of (position, token) pairs."""
        if context not in self.memory:
            draw = random.Random(repr((self.seed, context)))
            logits = [2 * draw.gauss(0, 1) for _ in range(self.config.vocab_size)]
            self.memory[context] = torch.tensor(logits, dtype=torch.float64)
        return self.memory[context]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


class Negated:
    """An adversarial draft: it likes best what the target likes least."""

    def __init__(self, model: Transformer):
        self.model = model

    def __getattr__(self, name: str):
        return getattr(self.model, name)

    def __call__(self, *arguments):
        return self.model(*arguments)

    def logits(self, hidden: Tensor) -> Tensor:
        return -self.model.logits(hidden)


class Recorder(Seeded):
    """Remembers the distributions it drew from, and what came of each."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.probs, self.drawn = [], []

    def categorical(self, probs: Tensor) -> int:
        self.probs.append(probs.clone())
        self.drawn.append(super().categorical(probs))
        return self.drawn[-1]


def small_model(seed: int, vocab: int = 24, context: int = 128, **changes) -> Transformer:
    """A tiny random Transformer in float64, none of whose parameters is a one or a zero."""
    settings = dict(hidden_size=16, intermediate_size=24, layers=2, heads=4, kv_heads=2, head_dim=4)
    model = Transformer(Config(**(settings | changes), vocab_size=vocab, context=context)).double()
    return randomise(model, seed)


def randomise(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """All parameters random and frozen, norms about 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in module.named_parameters():
        noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        p.data.copy_(0.5 * noise + (1.0 if "norm" in name else 0.0))
        p.requires_grad_(False)
    return module.eval()


# ---- drafted trees of every kind -----------------------------------------------------------------

KINDS = ("one-hot", "with replacement", "without replacement")
SHAPES = {  # parents
    "root": [-1], "chain": [-1, 0, 1], "wide": [-1, 0, 0, 0], "deep": [-1, 0, 0, 1, 3],
    "bushy": [-1, 0, 0, 1, 1, 2],
}  # fmt: skip


def forest(
    model, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    cache: KVCache | None = None, draft, shape: list[int], kind: str,
) -> Iterator[Step]:  # fmt: skip
    """Decoding by drafted trees of any shape and proposal kind: a method for proofs, not speed."""
    cache = cache or model.new_cache()
    tokens = list(prompt)
    model.prefill(tokens[cache.length : -1], cache)
    yield Step()
    while True:
        tree = grow(draft, tokens, shape[: cache.room], kind, sampling, randomness)
        hidden = model(tree.tokens, cache, tree.depth, tree.mask)
        path, fresh = accept(probs(model.logits(hidden[0]), sampling), tree, randomness)
        cache.commit(path)
        new = tree.tokens_at(path[1:]) + [fresh]
        tokens += new
        yield Step(new, tree, path)


def grow(
    draft,
    tokens: list[int],
    shape: list[int],
    kind: str,
    sampling: Sampling,
    randomness: Randomness,
) -> Tree:
    """A tree of this shape, each child drawn from what the draft says after its parent's path."""
    nodes, parents, draft_probs, paths = [tokens[-1]], [-1], [None], {0: []}
    left: dict[int, Tensor] = {}  # what the next child of a node is drawn from
    names = {0: 0}  # node of the shape -> node of the tree
    warm = Sampling(sampling.temperature or 1.0, sampling.top_k, sampling.top_p)
    for node, parent in enumerate(shape[1:], start=1):
        if parent not in names:
            continue
        at = names[parent]
        if at not in left:
            left[at] = probs(draft.logits(draft(tokens + paths[at])[0, -1:]), warm)[0]
        q = left[at]
        if q.sum() == 0:  # drawn without replacement, and nothing is left
            continue
        x = int(q.argmax()) if kind == "one-hot" else randomness.categorical(q)
        if kind != "with replacement":
            rest = q.clone()
            rest[x] = 0.0
            left[at] = rest / rest.sum() if rest.sum() > 0 else rest
        names[node] = len(nodes)
        paths[len(nodes)] = paths[at] + [x]
        nodes.append(x)
        parents.append(at)
        draft_probs.append(None if kind == "one-hot" else q)
    return Tree(nodes, parents, draft_probs)


def bound(name: str, **options) -> Method:
    """A method with its own arguments given; looked up when called, so that mutants reach it."""
    return lambda *arguments, **more: METHODS[name](*arguments, **more, **afresh(options))


def afresh(options: dict) -> dict:
    """The options, with a policy as it was before it learnt anything: runs must not depend on
    those before them."""
    return {
        name: copy.deepcopy(value) if isinstance(value, Length) else value
        for name, value in options.items()
    }


def tree_method(draft, shape: str, kind: str) -> Method:
    return lambda *arguments, **more: forest(
        *arguments, **more, draft=draft, shape=SHAPES[shape], kind=kind
    )


# Policies under invented costs, which soon change their minds: K begins at 2, falls to 1 when a
# draft is refused and rises to 3 when both are accepted; a tree has few nodes or many.
LENGTH = Length([0.0, 1.0, 1.0, 1.28, 1.495, 1.8], draft=0.1, most=4)
BEST_TREE = BestTree([0.0, *(1 + n / 20 for n in range(17))], draft=0.2)


# ---- Medusa's heads and trees --------------------------------------------------------------------


class ToyHeads:
    """Heads over a Toy, whose hidden states are its logits: head k rolls them by k."""

    def __init__(self, heads: int):
        self.heads = heads

    def __len__(self) -> int:
        return self.heads

    def __call__(self, hidden: Tensor, model) -> Tensor:
        return torch.stack([hidden.roll(k, -1) for k in range(self.heads)])


def random_heads(model: Transformer, seed: int, heads: int = 4) -> Heads:
    """Heads of one residual block and a projection, all random."""
    config = model.config
    return randomise(Heads(heads, 1, config.hidden_size, config.vocab_size).to(model.dtype), seed)


RANK_TREES = {
    "single node": [],
    "chain": [(0, 0, 0)],
    "wide": [(0,), (1,), (2,)],
    "deep": [(0, 0, 0, 0), (1, 1), (0, 1)],
    "64 nodes": PUBLISHED["mc_sim_7b_63"],
}


# ---- FastMTP's head and languages ----------------------------------------------------------------


def random_head(model: Transformer, seed: int) -> Head:
    """A prediction head for `model`, all random."""
    return randomise(Head(model.config).to(model.dtype), seed)


def switching(model: Transformer) -> Compressed:
    """Two languages that share only a third of the vocabulary, so that a text switches often."""
    third = max(model.config.vocab_size // 3, 1)
    ids = range(model.config.vocab_size)
    return Compressed(
        {"low": count([[*ids[: 2 * third]] * 2], [], 99), "high": count([[*ids[third:]]], [], 99)},
        model,
    )


def mtp_options(model: Transformer, seed: int) -> Iterator[tuple[str, dict]]:
    """Every way to draft."""
    head, words = random_head(model, seed), switching(model)
    for k in (1, 2):
        yield f"k={k}, sampled drafts", {"head": head, "k": k}
    for k in range(1, 7):
        yield f"k={k}, argmax drafts", {"head": head, "k": k, "draft_sampling": GREEDY}
    yield "k=2, compressed", {"head": head, "k": 2, "vocabulary": words}
    yield "k=2, hot drafts, compressed", {
        "head": head, "k": 2, "vocabulary": words, "draft_sampling": Sampling(2.0)
    }  # fmt: skip
    yield "k=auto", {"head": head, "k": LENGTH}


# lookahead's window, n-gram and guesses: the least of each, and more
WNG = (1, 2, 0), (1, 2, 1), (3, 2, 2), (1, 3, 2), (3, 3, 3), (2, 4, 1), (5, 4, 5), (10, 5, 10)


def every_path(ranks: int, nodes: int) -> list[Ranks]:
    """The first `nodes` paths over so many ranks, breadth first."""
    paths: list[Ranks] = [()]
    for at in range(nodes):
        paths += [paths[at] + (rank,) for rank in range(ranks)]
    return paths[1 : nodes + 1]


# ---- exact ---------------------------------------------------------------------------------------


class Enumerate:
    """Randomness that follows a script of choices, then always the first; and its probability."""

    def __init__(self, script: list[int]):
        self.script, self.choices, self.weight = script, [], 1.0

    def choose(self, weights: list[float]) -> int:
        options = [i for i, w in enumerate(weights) if w > 0]
        if len(options) == 1:  # nothing is random here
            self.weight *= weights[options[0]]
            return options[0]
        at = len(self.choices)
        pick = self.script[at] if at < len(self.script) else 0
        self.choices.append((pick, len(options)))
        self.weight *= weights[options[pick]]
        return options[pick]

    def bernoulli(self, p: float) -> bool:
        return self.choose([1 - p, p]) == 1

    def categorical(self, probs: Tensor) -> int:
        return self.choose((probs.double() / probs.double().sum()).tolist())


def every_outcome(function: Callable[[Randomness], object]) -> Iterator[tuple[object, float]]:
    """(result, probability) of function(randomness) for every sequence of random choices."""
    script: list[int] | None = []
    while script is not None:
        randomness = Enumerate(script)
        yield function(randomness), randomness.weight
        done = list(randomness.choices)
        while done and done[-1][0] == done[-1][1] - 1:
            done.pop()
        script = [pick for pick, _ in done[:-1]] + [done[-1][0] + 1] if done else None


def first_tokens(
    method: Method, model, prompt: list[int], sampling: Sampling, randomness: Randomness, n: int
) -> tuple[int, ...]:
    """The first `n` tokens of a run."""
    tokens: list[int] = []
    for step in method(model, prompt, sampling, randomness):
        tokens += step.tokens
        if len(tokens) >= n:
            return tuple(tokens[:n])
    raise AssertionError("a method does not end")


def exact_distribution(
    method: Method, model, prompt: list[int], sampling: Sampling, n: int
) -> dict[tuple[int, ...], float]:
    """Probability of every sequence of the first `n` tokens."""
    total: dict[tuple[int, ...], float] = Counter()
    for tokens, weight in every_outcome(
        lambda randomness: first_tokens(method, model, prompt, sampling, randomness, n)
    ):
        total[tokens] += weight
    return total


def total_variation(a: dict, b: dict) -> float:
    return sum(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in a.keys() | b.keys()) / 2


SAMPLINGS = {
    "T=1": Sampling(1.0),
    "T=0.7 top-k 2": Sampling(0.7, top_k=2),
    "T=1.5 top-p 0.8": Sampling(1.5, top_p=0.8),
    "greedy": GREEDY,
}


@dataclass(frozen=True)
class Proof:
    """One method on one toy, under some samplings, for the first `n` tokens."""

    name: str
    method: Method
    samplings: tuple[str, ...] = tuple(SAMPLINGS)
    n: int = 3
    vocab: int = 3
    model: Transformer | None = None  # instead of the toy


def exact_cases(quick: bool) -> Iterator[Proof]:
    """Small enough to enumerate: deep trees and long chains over two tokens, others over three."""
    few, every, n = ("T=1",), tuple(SAMPLINGS), 2 if quick else 3
    other = Toy(77)

    def speculative(**options) -> Method:
        return bound("speculative", **({"draft": other, "k": 2} | options))

    yield Proof("speculative k=1", speculative(k=1), every[:3] if quick else every, n)
    yield Proof("speculative k=2", speculative(), few if quick else every, n)
    greedy_draft = speculative(draft_sampling=GREEDY)
    yield Proof("speculative k=2, greedy draft", greedy_draft, few if quick else every, n)
    yield Proof("speculative k=auto", speculative(k=LENGTH), few if quick else every, n)
    yield Proof("prompt-lookup", bound("prompt-lookup", k=2), few if quick else every, n)
    for shape in ("wide", "chain") if quick else ("root", "chain", "wide"):
        for kind in KINDS:
            samplings = few if quick else every
            yield Proof(f"tree, {shape}, {kind}", tree_method(other, shape, kind), samplings, n=2)
    heads = ToyHeads(4)
    for shape in ("deep",) if quick else ("single node", "chain", "wide", "deep"):
        method = bound("medusa", heads=heads, tree=RANK_TREES[shape])
        yield Proof(f"medusa, {shape}", method, few if quick else every, n=2)
    yield Proof("medusa, auto", bound("medusa", heads=heads, tree=BEST_TREE), few, n)
    roomy = Toy(5, context=64)  # for the widest window
    for w, n, g in ((1, 2, 1), (3, 3, 3)) if quick else WNG:
        for pool in (False, True):
            method = bound("lookahead", window=w, ngram=n, guesses=g, pool_from_prompt=pool)
            name = f"lookahead W={w} N={n} G={g}{', pool from prompt' if pool else ''}"
            samplings = every if (w, n) == (3, 3) and not quick else few
            yield Proof(name, method, samplings, n=3 if n < 4 else 2, model=roomy)
    model = small_model(4, vocab=3, layers=1)
    for name, options in mtp_options(model, 4):
        if not quick or "compressed" in name or name == "k=2, argmax drafts":
            yield Proof(f"fastmtp, {name}", bound("fastmtp", **options), few, n=2, model=model)
    if not quick:
        yield from larger_cases()


def larger_cases() -> Iterator[Proof]:
    """Those that a quick run leaves out."""
    few, every, other = ("T=1",), tuple(SAMPLINGS), Toy(77)
    yield Proof("jacobi, block 3", bound("jacobi", block=3), n=3)
    full = bound("medusa", heads=ToyHeads(4), tree=every_path(3, 63))
    yield Proof("medusa, 64 nodes", full, few, n=2)
    yield Proof("autoregressive", bound("autoregressive"))
    deep = bound("speculative", k=3, draft=Toy(77, vocab=2))
    yield Proof("speculative k=3, two tokens", deep, ("T=1", "greedy"), vocab=2)
    longer = bound("speculative", k=LENGTH, draft=Toy(77, vocab=2))
    yield Proof("speculative k=auto, two tokens", longer, few, n=5, vocab=2)
    yield Proof("speculative k=2, self", bound("speculative", k=2, draft=Toy(5)))
    hot = bound("speculative", k=2, draft=other, draft_sampling=Sampling(2.0))
    yield Proof("speculative k=2, hot draft", hot, n=2)
    for shape in ("deep", "bushy"):
        for kind in KINDS:
            method = tree_method(Toy(77, vocab=2), shape, kind)
            yield Proof(f"tree, {shape}, {kind}", method, few, n=2, vocab=2)
            yield Proof(f"tree, {shape}, {kind}", tree_method(other, shape, kind), every[1:3], n=2)


def check_exact(quick: bool = False) -> Iterator[Verdict]:
    """The distribution of the output, summed over every random outcome, equals plain decoding's."""
    prompt = [1, 0, 1, 1, 0]
    plain: dict[tuple, dict[tuple[int, ...], float]] = {}  # many cases share a model
    for proof in exact_cases(quick):
        for label in proof.samplings:
            model, each = proof.model or Toy(5, proof.vocab), (SAMPLINGS[label], proof.n)
            key = proof.model, proof.vocab, *each
            if key not in plain:
                plain[key] = exact_distribution(bound("autoregressive"), model, prompt, *each)
            ours = exact_distribution(proof.method, model, prompt, *each)
            distance = max(total_variation(ours, plain[key]), abs(sum(ours.values()) - 1))
            detail = f"TV {distance:.1e} over {len(ours)} sequences of {proof.n} tokens"
            yield Verdict("exact", f"{proof.name}, {label}", distance < EXACT, detail)


# ---- greedy, cache, statistical, limits ----------------------------------------------------------


def greedy_cases(model, seed: int) -> Iterator[tuple[str, Method]]:
    other = small_model(seed + 1000)
    yield "prompt-lookup", bound("prompt-lookup")
    drafts = (("random", other), ("self", model), ("always wrong", Negated(model)))
    for name, draft in drafts:
        for k in (1, 4) if seed else (1, 2, 3, 5, 8):
            yield f"speculative, {name} draft, k={k}", bound("speculative", draft=draft, k=k)
        yield f"speculative, {name} draft, k=auto", bound("speculative", draft=draft, k=LENGTH)
    for shape in SHAPES:
        yield f"tree, {shape}", tree_method(model, shape, "one-hot")
    for block in (1, 4, 9):
        yield f"jacobi, block {block}", bound("jacobi", block=block)
    for i, (w, n, g) in enumerate(WNG):
        method = bound("lookahead", window=w, ngram=n, guesses=g, pool_from_prompt=bool(seed % 2))
        if seed in (0, i % 3 + 1):
            yield f"lookahead, W={w} N={n} G={g}", method
    for i, (name, options) in enumerate(mtp_options(model, seed)):
        if seed in (0, i % 3 + 1):
            yield f"fastmtp, {name}", bound("fastmtp", **options)
    heads = random_heads(model, seed)
    for name, paths in RANK_TREES.items():
        yield f"medusa, {name}", bound("medusa", heads=heads, tree=paths)
    yield "medusa, auto", bound("medusa", heads=heads, tree=BEST_TREE)


def check_greedy(quick: bool = False) -> Iterator[Verdict]:
    """Token identity with plain decoding on random Transformers in float64, twice in a row."""
    counts, failures = Counter(), {}
    n = 12 if quick else 24
    for seed in range(1 if quick else 4):
        model = small_model(seed)
        prompt = random.Random(seed).choices(range(24), k=1 + 6 * seed)
        expected = first_tokens(bound("autoregressive"), model, prompt, GREEDY, Seeded(), n)
        for name, method in greedy_cases(model, seed):
            counts[name] += 1
            for _ in range(2):
                tokens = first_tokens(method, model, prompt, GREEDY, Seeded(), n)
                if tokens != expected:
                    failures.setdefault(name, f"seed {seed}: {first_difference(tokens, expected)}")
    for name, runs in counts.items():
        detail = failures.get(name, f"{runs} models, {n} tokens, twice")
        yield Verdict("greedy", name, name not in failures, detail)
    yield self_draft_accepts_everything()


def self_draft_accepts_everything() -> Verdict:
    """A draft that is the target must have every token accepted, sampled too."""
    model, refused = small_model(3), 0
    steps = METHODS["speculative"](model, [1, 2], Sampling(1.0), Seeded(0), draft=model, k=4)
    for step, _ in zip(steps, range(13)):
        refused += len(step.tree or ()) - len(step.path)
    return Verdict(
        "greedy", "a draft that is the target", refused == 0, f"{refused} tokens refused"
    )


def first_difference(a: Iterable[int], b: Iterable[int]) -> str:
    a, b = list(a), list(b)
    at = common_prefix(a, b)
    return f"differs at token {at}: {a[at : at + 3]} instead of {b[at : at + 3]}"


def check_cache(quick: bool = False) -> Iterator[Verdict]:
    """After every round each committed row equals a fresh prefill's, and all but one are there.
    Where proposals fork, rounds go on until rows had to be moved together, 40 at most."""
    model, worst, least = small_model(7), {}, 5 if quick else 9
    for name, method in greedy_cases(model, 0):
        cache, tokens, error = model.new_cache(), [3, 1, 4, 1, 5], 0.0
        forked = moved = False
        steps = method(model, tokens, Sampling(1.0), Seeded(1), cache=cache)
        for round_, step in enumerate(steps, 1):
            tokens = tokens + step.tokens
            forked |= step.tree is not None and len(step.tree) > max(step.tree.depths) + 1
            moved |= step.path != list(range(len(step.path)))
            if cache.length != len(tokens) - 1:
                error = math.inf
                break
            fresh = model.new_cache()
            model.prefill(tokens[:-1], fresh)
            kept = slice(cache.length)
            for ours, theirs in zip([*cache.k, *cache.v], [*fresh.k, *fresh.v]):
                error = max(error, float((ours[:, kept] - theirs[:, kept]).abs().max()))
            enough = moved or not forked or round_ == 40 or cache.room < least
            if round_ >= least and enough:
                break
        worst[name] = error
    for name, error in worst.items():
        yield Verdict("cache", name, error < 1e-9, f"largest difference of a row {error:.1e}")


def chi_square_p(counts: Counter, exact: dict[tuple[int, ...], float]) -> float:
    """Chance of so large a χ² if the counts were drawn from `exact`; rare cells are pooled."""
    n = sum(counts.values())
    if any(exact.get(k, 0.0) == 0 for k in counts):
        return 0.0  # something impossible was drawn
    cells, rare = [], [0.0, 0.0]
    for key, p in exact.items():
        if n * p >= 5:
            cells.append((counts[key], n * p))
        else:
            rare = [rare[0] + counts[key], rare[1] + n * p]
    cells += [tuple(rare)] if rare[1] > 0 else []
    chi2 = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    half = torch.tensor(chi2 / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, half)) if len(cells) > 1 else 1.0


def check_statistical(quick: bool = False) -> Iterator[Verdict]:
    """χ² of the first tokens of many seeded runs against their exact distribution."""
    model, draft, prompt = small_model(21, vocab=6), small_model(24, vocab=6), [1, 2, 3, 1, 2]
    cases = [
        ("speculative", bound("speculative", draft=draft, k=3)),
        ("prompt-lookup", bound("prompt-lookup", k=3)),
        ("tree, deep, without replacement", tree_method(draft, "deep", "without replacement")),
        (
            "fastmtp, k=6",
            bound("fastmtp", head=random_head(model, 2), k=6, vocabulary=switching(model)),
        ),
        ("lookahead", bound("lookahead", window=3, ngram=3, guesses=3)),
        ("medusa", bound("medusa", heads=random_heads(model, 1), tree=RANK_TREES["deep"])),
    ]
    sampling = Sampling(1.0, top_p=0.9)
    exact = exact_distribution(bound("autoregressive"), model, prompt, sampling, JOINT)
    for name, method in cases[: 1 if quick else None]:
        counts = Counter(
            first_tokens(method, model, prompt, sampling, Seeded(seed), JOINT)
            for seed in range(RUNS)
        )
        p = chi_square_p(counts, exact)
        detail = f"p = {p:.3f}, {RUNS} runs (below {FALSE_ALARM:.0e} fails)"
        yield Verdict("statistical", f"{name}, T=1 top-p 0.9", p > FALSE_ALARM, detail)


def letters(vocab: int) -> Tokenizer:
    """One letter a token."""
    words = {chr(97 + i): i for i in range(vocab)}
    return Tokenizer(Backend(tokenizer_models.WordLevel(words, unk_token="a")))


def limit_cases(context: int) -> Iterator[tuple[str, dict]]:
    """Ways to end, each at every offset."""
    for n in range(12):
        yield f"max-new-tokens {n}", {"max_new_tokens": n}
    for eos in ((0,), (1,), (2,), (0, 2), ()):
        yield f"eos {eos}", {"eos": eos, "max_new_tokens": 20}
    for stop in ("a", "b", "c d", "b a", "a c", "c c b"):
        yield f"stop {stop!r}", {"stop": (stop,), "max_new_tokens": 20}
    yield "context", {"max_new_tokens": 3 * context}


def check_limits(quick: bool = False) -> Iterator[Verdict]:
    """Tokens, text and reason to stop equal plain decoding's; the next turn finds a sound cache."""
    tokenizer, context = letters(3), 24

    def model_of(name: str, seed: int, eos: tuple[int, ...]) -> Toy | Transformer:
        if name == "fastmtp":
            return small_model(1, vocab=3, layers=1, context=context, eos_ids=eos)
        return Toy(seed, context=context, eos=eos)

    methods = {
        "speculative": {"draft": Toy(77), "k": 4},
        "speculative, self": {"draft": Toy(5), "k": 4},
        "speculative, auto": {"draft": Toy(77), "k": LENGTH},
        "prompt-lookup": {},
        "jacobi": {"block": 4},
        "lookahead": {"window": 3, "ngram": 3, "guesses": 4, "pool_from_prompt": True},
        "medusa": {"heads": ToyHeads(3), "tree": every_path(3, 16)},
        "medusa, auto": {"heads": ToyHeads(3), "tree": BEST_TREE},
        "fastmtp": {"head": random_head(small_model(1, vocab=3, layers=1), 1), "k": 4},
    }
    for name, options in methods.items():
        failures, count = [], 0
        for seed in (5,) if quick or name == "fastmtp" else (5, 6, 7):
            for label, ending in limit_cases(context):
                model = model_of(name, seed, ending.pop("eos", ()))
                for prompt in ([0], [1, 2, 0, 1, 2, 0]):
                    count += 1
                    method = name.split(",")[0]
                    problem = ends_differently(model, tokenizer, prompt, method, ending, options)
                    if problem:
                        failures.append(f"{label}: {problem}")
        detail = failures[0] if failures else f"{count} endings, each with a turn after it"
        yield Verdict("limits", name, not failures, detail)


def ends_differently(
    model: Toy, tokenizer: Tokenizer, prompt: list[int], method: str, ending: dict, options: dict
) -> str | None:
    """What differs from plain decoding in a run that ends so, or in the turn after it."""
    plain = decode(model, tokenizer, prompt, **ending)
    cache = model.new_cache()
    run = decode(model, tokenizer, prompt, method, cache=cache, **ending, **afresh(options))
    for field in ("tokens", "text", "finish_reason"):
        if getattr(run, field) != getattr(plain, field):
            return f"{field} {getattr(run, field)!r} instead of {getattr(plain, field)!r}"
    again = prompt + run.tokens + [1]
    if len(again) >= model.config.context or run.finish_reason == "context":
        return None
    few = {"max_new_tokens": 4}
    next_turn = decode(model, tokenizer, again, method, cache=cache, **few, **afresh(options))
    expected = decode(model, tokenizer, again, **few)
    return None if next_turn.tokens == expected.tokens else "the next turn's tokens differ"


def check_proposals(quick: bool = False) -> Iterator[Verdict]:
    """What no output can show, as verification mends it: proposals are what their method says."""
    seeds = range(1 if quick else 4)
    for name, problem in (
        ("lookahead, window", window_problem),
        ("lookahead, pool", pool_problem),
        ("medusa, heads", heads_problem),
        ("fastmtp, head", head_problem),
        ("fastmtp, drafts and cache", drafts_problem),
    ):
        wrong = next(filter(None, (problem(seed) for seed in seeds)), None)
        yield Verdict("proposals", name, wrong is None, wrong or f"{len(seeds)} seeds")


def window_problem(seed: int) -> str | None:
    """Each entry's logits beside a tree must equal a forward over prefix, row and column alone."""
    rng, model = random.Random(seed), small_model(seed)
    width, ngram = rng.randint(1, 6), rng.randint(2, 5)
    tokens = rng.choices(range(24), k=rng.randint(1, 12))
    ahead, cache = lookahead.Window(tokens, width, ngram), model.new_cache()
    model.prefill(tokens[:-1], cache)
    for _ in range(ngram):
        tree = Tree.merged(tokens[-1], [rng.choices(range(24), k=3) for _ in range(3)])
        depth, mask = lookahead.beside(tree, ahead)
        hidden = model(tree.tokens + ahead.tokens, cache, depth, mask)[0]
        entries = [(r, i) for r, row in enumerate(ahead.rows) for i in range(len(row))]
        for (r, i), row in zip(entries, hidden[len(tree) :]):
            column = i + (r == 0)  # column 0 of row 0 is the current token
            chain = ahead.rows[0][:column] + [each[i] for each in ahead.rows[1 : r + 1]]
            if (row - model(tokens + chain)[0, -1]).abs().max() > 1e-9:
                return f"seed {seed}: row {r}, column {column} of W={width} N={ngram}"
        said = model.logits(hidden[ahead.said_by(len(tree))]).argmax(-1).tolist()
        ahead.advance(tokens[-1], said)
    return None


def pool_problem(seed: int) -> str | None:
    """Against a plain list of all n-grams, newest first, read again and again."""
    rng, pool, grams = random.Random(seed), lookahead.Pool(3), []
    for _ in range(200):
        gram = tuple(rng.choices(range(3), k=4))
        pool.add(gram)
        grams = [gram] + [g for g in grams if g != gram]
        for token in range(3):
            expected = [list(g[1:]) for g in grams if g[0] == token][:3]
            if pool.after(token) != expected:
                return f"seed {seed}: {pool.after(token)} instead of {expected}"
    return None


def heads_problem(seed: int) -> str | None:
    """Each tree must come from the hidden state before the newest token, computed afresh."""
    model, tokens = small_model(seed), [3, 1, 4]
    heads, paths = random_heads(model, seed), complete(RANK_TREES["deep"], 4, 24)
    expected = Tree.chain(0, [])
    method = bound("medusa", heads=heads, tree=paths)
    for round_, step in enumerate(method(model, tokens, GREEDY, Seeded())):
        if round_ and step.tree != expected:
            return f"seed {seed}, round {round_}: another tree"
        tokens = tokens + step.tokens
        best = heads(model(tokens[:-1])[0, -1], model).topk(2).indices.tolist()
        expected = Tree.from_paths(tokens[-1], paths, best)
        if round_ == 6:
            return None


def head_problem(seed: int) -> str | None:
    """The head against its formula: the hidden state first, norms before, the block, the norm."""
    model = small_model(seed)
    head, tokens = random_head(model, seed), random.Random(seed).choices(range(24), k=7)
    hidden, embedded = model(tokens)[0, :-1], model.model.embed_tokens(torch.tensor(tokens[1:]))
    drafter = Drafter(head, model, 32, offset=0)
    outputs = drafter.run(hidden, tokens[1:])
    d = model.config.hidden_size
    left, right = head.input_proj.weight[:, :d], head.input_proj.weight[:, d:]
    x = head.hidden_layernorm(hidden) @ left.T + head.token_layernorm(embedded) @ right.T
    now = plan(head.rope, x, len(x), None, None, None)
    x = x + head.self_attn(head.input_layernorm(x)[None], now)[0]
    x = x + head.mlp(head.post_attention_layernorm(x))
    worst = (head.final_layernorm(x) - outputs).abs().max()
    return f"seed {seed}: outputs differ by {worst:.1e}" if worst > 1e-9 else None


def drafts_problem(seed: int) -> str | None:
    """After every round the head's cache is that of a fresh pass over the committed tokens, and as
    long as the target's; and drafts are those of fresh passes over all rows."""
    model, tokens = small_model(seed, vocab=3), [2, 1, 0]  # where drafts are often right
    head, cache = random_head(model, seed), model.new_cache()
    expected: list[int] = []
    rounds = bound("fastmtp", head=head, k=3)(model, tokens, GREEDY, Seeded(), cache=cache)
    for round_, step in enumerate(rounds):
        if round_ and step.tree.tokens[1:] != expected:
            return f"seed {seed}, round {round_}: drafts {step.tree.tokens[1:]}, not {expected}"
        tokens = tokens + step.tokens
        kept, fresh = inspect.getgeneratorlocals(rounds)["drafter"], Drafter(head, model, 128, 0)
        fresh.extend(model(tokens[:-1])[0], tokens[1:])
        if not kept.cache.length == cache.length == fresh.cache.length:
            return f"seed {seed}, round {round_}: {kept.cache.length} rows for {cache.length}"
        rows = slice(cache.length)
        if (kept.cache.k[0][:, rows] - fresh.cache.k[0][:, rows]).abs().max() > 1e-9:
            return f"seed {seed}, round {round_}: another row"
        expected = fresh_drafts(head, model, tokens, 3)
        if round_ == 12:
            return None


def fresh_drafts(head: Head, model: Transformer, tokens: list[int], k: int) -> list[int]:
    """Argmax drafts, every row of the head computed anew for each of them."""
    hidden, drafts = model(tokens[:-1])[0], []
    for _ in range(k):
        row = Drafter(head, model, 128, 0).run(hidden, tokens[1:] + drafts)[-1:]
        drafts.append(int(model.logits(row).argmax()))
        hidden = torch.cat([hidden, row])
    return drafts


CHECKS = {
    "exact": check_exact,
    "greedy": check_greedy,
    "cache": check_cache,
    "statistical": check_statistical,
    "limits": check_limits,
    "proposals": check_proposals,
}


def check_mutants() -> Iterator[Verdict]:
    """Every seeded mistake must make some check fail; a survivor fails the run."""
    from minispec.mutants import MUTANTS

    for mutant in MUTANTS:
        order = [mutant.caught_by, *(name for name in CHECKS if name != mutant.caught_by)]
        with mutant.apply():
            caught = next(filter(None, (first_failure(CHECKS[name]) for name in order)), None)
        yield Verdict("mutants", mutant.name, caught is not None, caught or "SURVIVED every check")


def first_failure(check: Callable[..., Iterator[Verdict]]) -> str | None:
    """Where a check fails first, if it does; a crash is a failure too."""
    try:
        for verdict in check(quick=True):
            if not verdict.passed:
                return f"caught by {verdict.check}: {verdict.case}"
    except Exception as error:
        return f"caught by {check.__name__.removeprefix('check_')}: {type(error).__name__}"
    return None


# ---- other implementations -----------------------------------------------------------------------


class Implementation(Protocol):
    """What --impl names: a function over token ids."""

    def __call__(
        self, checkpoint: str, prompt: list[int], *, max_new_tokens: int, temperature: float,
        top_k: int, top_p: float, seed: int,
    ) -> list[int]:  # fmt: skip
        """The new tokens, an EOS that ends them included, after `prompt` (ids of the checkpoint, a
        Hugging Face directory of a small llama in float32). temperature 0 is greedy; top_k 0 and
        top_p 1 are off; equal seeds may give equal, different seeds must give independent draws.
        Called thousands of times: keep the loaded model between calls."""


def load_implementation(name: str) -> Implementation:
    module, _, function = name.partition(":")
    sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as error:  # whatever importing a stranger's module raises
        raise UserError(
            f"--impl {name}: cannot be imported ({error}): give package.module:function"
        ) from None
    if not callable(found):
        raise UserError(f"--impl {name}: is not a function")
    return found


def call(impl: Implementation, folder: str, prompt: list[int], seed: int = 0, n: int = 24,
         sampling: Sampling = GREEDY) -> list[int]:  # fmt: skip
    """The implementation's tokens; anything but a list of ids is the user's mistake."""
    try:
        tokens = impl(
            folder, list(prompt), max_new_tokens=n, temperature=sampling.temperature,
            top_k=sampling.top_k, top_p=sampling.top_p, seed=seed,
        )  # fmt: skip
    except (Exception, SystemExit) as error:
        raise UserError(f"the implementation raised {type(error).__name__}: {error}") from error
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise UserError(f"the implementation must return a list of int, not {str(tokens)[:80]}")
    return tokens


SAMPLED = Sampling(1.0), Sampling(0.7, top_p=0.8), Sampling(1.5, top_k=3), Sampling(1.5, 4, 0.9)
SURE = Sampling(1.0, top_k=1)  # sampled, and yet of a known outcome: greedy decoding's


def check_implementation(impl: Implementation) -> Iterator[Verdict]:
    """Greedy identity, lengths, end tokens, repeated calls, and χ² of sampled runs."""
    with tempfile.TemporaryDirectory() as temporary:
        for seed in range(3):
            folder, model = write_checkpoint(Path(temporary) / str(seed), seed, vocab=24)
            yield impl_greedy(impl, folder, model, seed)
        yield impl_lengths(impl, folder, model)
        yield impl_end(impl, Path(temporary) / "eos")
        folder, model = write_checkpoint(Path(temporary) / "sampled", 21, vocab=6)
        for sampling in SAMPLED:
            yield impl_distribution(impl, folder, model, sampling)


def write_checkpoint(path: Path, seed: int, vocab: int, eos: tuple[int, ...] = ()):
    save(small_model(seed, vocab, eos_ids=eos), None, path, torch.float32)
    return str(path), load(path, "float64", "cpu")[0]


def impl_greedy(impl: Implementation, folder: str, model: Transformer, seed: int) -> Verdict:
    prompts = [random.Random(i).choices(range(24), k=1 + 5 * i) for i in range(6)]
    ties = 0
    for prompt in prompts:
        expected = first_tokens(bound("autoregressive"), model, prompt, GREEDY, Seeded(), 24)
        for sampling in GREEDY, GREEDY, SURE:
            tokens = call(impl, folder, prompt, sampling=sampling)
            at, gap = divergence(model, prompt, tokens, list(expected))
            ties += at is not None and gap < TIE
            if at is not None and gap >= TIE:
                where = first_difference(tokens, expected)
                return Verdict("greedy", f"model {seed}", False, f"{where}, top-2 gap {gap:.3f}")
    detail = f"6 prompts, 24 tokens, twice, and at top-k 1; {ties} ties"
    return Verdict("greedy", f"model {seed}", True, detail)


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


def impl_lengths(impl: Implementation, folder: str, model: Transformer) -> Verdict:
    wrong = [n for n in range(12) if len(call(impl, folder, [1, 2, 3], n=n)) != n]
    detail = f"max_new_tokens {wrong[:4]} not kept" if wrong else "max_new_tokens 0 to 11 kept"
    return Verdict("limits", "lengths", not wrong, detail)


def impl_end(impl: Implementation, path: Path) -> Verdict:
    """Every token of a greedy run in turn is made the end token."""
    model, prompt = small_model(2), [3, 1, 4]
    tokens = first_tokens(bound("autoregressive"), model, prompt, GREEDY, Seeded(), 12)
    for eos in dict.fromkeys(tokens):
        folder, _ = write_checkpoint(path / str(eos), 2, vocab=24, eos=(eos,))
        expected = list(tokens[: tokens.index(eos) + 1])
        for sampling in GREEDY, SURE:
            given = call(impl, folder, prompt, n=12, sampling=sampling)
            if given != expected:
                return Verdict("limits", "end token", False, f"{given} instead of {expected}")
    return Verdict("limits", "end token", True, f"at {len(set(tokens))} offsets")


def impl_distribution(
    impl: Implementation, folder: str, model: Transformer, sampling: Sampling
) -> Verdict:
    prompt = [1, 2, 3, 1, 2]
    exact = exact_distribution(bound("autoregressive"), model, prompt, sampling, JOINT)
    counts = Counter(
        tuple(call(impl, folder, prompt, seed, JOINT, sampling)) for seed in range(RUNS)
    )
    p = chi_square_p(counts, exact)
    name = f"T={sampling.temperature:g} top-k {sampling.top_k} top-p {sampling.top_p:g}"
    return Verdict("statistical", name, p > FALSE_ALARM, f"p = {p:.2g}, {RUNS} runs")


CUT = "length", "stop", "context", "interrupted"  # ends that lie in the options, not in the text


def compare(a: Path, b: Path, model: Transformer) -> Iterator[Verdict]:
    """Two files of `generate --json` lines: first divergence, its top-2 gap, tie or bug."""
    left, right = read_runs(a), read_runs(b)
    if len(left) != len(right):
        raise UserError(f"{a} has {len(left)} runs, {b} has {len(right)}: compare the same prompts")
    for i, (x, y) in enumerate(zip(left, right), start=1):
        if x["prompt_ids"] != y["prompt_ids"]:
            raise UserError(f"line {i}: the prompts of {a} and {b} differ")
        drawn = [temperature for run in (x, y) if (temperature := drawn_at(run))]
        if drawn:
            raise UserError(f"line {i}: drawn at temperature {drawn[0]}: compare greedy runs")
        at, gap = divergence(model, x["prompt_ids"], x["tokens"], y["tokens"])
        shorter = min(x, y, key=lambda run: len(run["tokens"]))
        if at is None:
            yield Verdict("compare", f"line {i}", True, f"{len(x['tokens'])} tokens, the same")
        elif 0 < at == len(shorter["tokens"]) and shorter.get("finish_reason") in CUT:
            ended = shorter["finish_reason"]
            detail = f"the same {at} tokens, where one ended ({ended}): were the options the same?"
            yield Verdict("compare", f"line {i}", True, detail)
        else:
            what = "a tie" if gap < TIE else "a bug (or not the model of these runs)"
            where = first_difference(x["tokens"], y["tokens"])
            detail = f"{where}; top-2 gap {gap:.4g}: {what}"
            yield Verdict("compare", f"line {i}", gap < TIE, detail)


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
        except (ValueError, KeyError, TypeError):
            ids = (None,)
        if not all(isinstance(x, list) and all(type(i) is int for i in x) for x in ids):
            raise UserError(
                f"{path} line {number}: must be an object with prompt_ids and tokens, lists of ids"
            )
        if not run["prompt_ids"]:
            raise UserError(f"{path} line {number}: prompt_ids must not be empty")
        runs.append(run)
    return runs


# ---- command line --------------------------------------------------------------------------------


def table(verdicts: Iterable[Verdict], quiet: bool) -> list[Verdict]:
    """Print each verdict as it comes; all of them."""
    rows = []
    for v in verdicts:
        rows.append(v)
        if not quiet:
            print(
                f"{'pass' if v.passed else 'FAIL'}  {v.check:<12}{v.case:<46}{v.detail}", flush=True
            )
    return rows


def check(args: argparse.Namespace) -> list[str]:
    """Refuse flags that would go unheard, as a verdict must be of what was asked; the checks to
    run."""
    given = [flag for flag in ("compare", "impl", "checks") if getattr(args, flag)]
    if len(given) > 1:
        raise UserError(f"--{given[0]} and --{given[1]} are two examinations: give one of them")
    if args.model and not args.compare:
        raise UserError("--model is for --compare: others bring models of their own")
    known = [*CHECKS, "mutants"]
    names = args.checks.split(",") if args.checks else known
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(f"unknown check {unknown[0]!r}: use some of {', '.join(known)}")
    return names


@command
def main(argv: list[str] | None = None) -> None:
    p = Parser(prog="python -m minispec.certify", description=__doc__.split("\n\n")[0])
    p.add_argument("--impl", help="package.module:function, a black box over token ids")
    p.add_argument(
        "--compare", nargs=2, type=Path, metavar="JSONL", help="two files of --json runs"
    )
    p.add_argument("--model", help="model of --compare (default: the shipped target)")
    p.add_argument("--checks", help=f"only these: {','.join([*CHECKS, 'mutants'])}")
    p.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    args = p.parse_args(argv)
    names = check(args)
    begin = time.perf_counter()
    if args.compare:
        model = args.model or generate.WEIGHTS / "target"
        verdicts = compare(*args.compare, load(model, "float64", "cpu")[0])
    elif args.impl:
        verdicts = check_implementation(load_implementation(args.impl))
    else:
        known = CHECKS | {"mutants": check_mutants}
        verdicts = (verdict for name in names for verdict in known[name]())
    with torch.no_grad():
        rows = table(verdicts, quiet=args.json)
    failed = sum(not v.passed for v in rows)
    seconds = time.perf_counter() - begin
    if args.json:
        print(json.dumps({"passed": failed == 0, "seconds": seconds,
                          "verdicts": [asdict(v) for v in rows]}, ensure_ascii=False))  # fmt: skip
    else:
        print(f"{len(rows) - failed} of {len(rows)} passed in {seconds:.0f} s")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    # as the module that the mutants patch, not as a second copy called __main__
    from minispec.certify import main

    main()
