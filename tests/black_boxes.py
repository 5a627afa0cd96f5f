"""Decoders with the signature of --impl: correct ones, and ones with a single seeded fault."""

import contextlib
import functools
import hashlib
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import torch

from lessons.assignments import mutants
from minispec import verify
from minispec.checkpoints.load import load
from minispec.generate import decode
from minispec.methods import speculative
from minispec.sampling import Sampling, Seeded, draw, probs

Options = dict[str, object]
loaded = functools.cache(lambda folder: load(folder, "float64", "cpu")[0])


def lookup(checkpoint: str, prompt: list[int], **options) -> list[int]:
    """Our prompt lookup: correct."""
    return decode(loaded(checkpoint), None, prompt, "prompt-lookup", k=2, **options).tokens


def greedy_only(checkpoint: str, prompt: list[int], **options) -> list[int]:
    if options["temperature"]:
        raise NotImplementedError("no sampling")
    return lookup(checkpoint, prompt, **options)


def drafting(k: int = 2, accept: Callable = verify.accept, **patches) -> Callable:
    """Our speculative decoding with the checkpoint's draft: correct, unless its rule or names of
    its module are replaced."""

    def implementation(checkpoint, prompt, **options):
        model, draft = loaded(checkpoint), loaded(f"{checkpoint}/draft")
        with contextlib.ExitStack() as stack:
            for name, mistake in patches.items():
                stack.enter_context(mock.patch.object(speculative, name, mistake))
            run = decode(
                model, None, prompt, "speculative", draft=draft, k=k, rule=accept, **options
            )
        return run.tokens, run.stats["drafted"], run.stats["accepted"]

    return implementation


def changed(impl: Callable = lookup, **changes) -> Callable:
    """An implementation with options replaced: by values, or by functions of the options."""

    def implementation(checkpoint, prompt, **options):
        made = {name: x(options) if callable(x) else x for name, x in changes.items()}
        return impl(checkpoint, prompt, **(options | made))

    return implementation


# ---- acceptance ----------------------------------------------------------------------------------


class Lenient:
    """Raises every acceptance probability."""

    def __init__(self, randomness, factor: float):
        self.categorical, self.original, self.factor = randomness.categorical, randomness, factor

    def bernoulli(self, p: float) -> bool:
        return self.original.bernoulli(min(1.0, self.factor * p))


def lenient(target, tree, randomness, factor: float = 1.5):
    return verify.accept(target, tree, Lenient(randomness, factor))


def typical(target, tree, randomness):
    """Accept every token that is probable enough."""
    path = [0]
    while children := tree.children(path[-1]):
        if target[path[-1]][tree.tokens[children[0]]] < 0.3:
            break
        path.append(children[0])
    return path, randomness.categorical(target[path[-1]])


def flat_bonus(target, tree, randomness):
    """Draw the bonus token from the square root of its distribution."""
    flat = [p if tree.children(node) else p**0.5 / (p**0.5).sum() for node, p in enumerate(target)]
    return verify.accept(flat, tree, randomness)


ACCEPTANCE = {
    "lenient": ("accept", lenient), "typical": ("accept", typical),
    "flat bonus": ("accept", flat_bonus), "best bonus": ("accept", mutants.argmax_bonus),
    "best root": ("accept", mutants.argmax_root),
    "confident": ("propose", mutants.confident_prefix),
    "reduced": ("propose", mutants.reduced_vocabulary),
}  # fmt: skip


# ---- ends, lengths and state ---------------------------------------------------------------------


def without_ends(checkpoint: str, prompt: list[int], method: str, **options):
    """The tokens of a method that knows no end tokens, and the end tokens."""
    model = loaded(checkpoint)
    endless = replace(model.config, eos_ids=())
    with mock.patch.object(model, "config", endless):
        run = decode(model, None, prompt, method, **options)
    return run.tokens, model.config.eos_ids


def ends_missed_in_drafts(checkpoint, prompt, *, max_new_tokens, **options):
    """Prompt lookup that looks for an end token only in the last token of each round."""
    model, k = loaded(checkpoint), 4
    tokens: list[int] = []
    while len(tokens) < max_new_tokens:
        context = [*prompt, *tokens]
        known, _ = without_ends(checkpoint, context, "prompt-lookup", max_new_tokens=k, **options)
        tokens += known
        if tokens[-1] in model.config.eos_ids:
            break
    return tokens[:max_new_tokens]


def stops_at_ends_of_the_prompt(checkpoint, prompt, **options):
    """The end token is looked for in the whole text."""
    if set(prompt) & set(loaded(checkpoint).config.eos_ids):
        return lookup(checkpoint, prompt, **options)[:1]
    return lookup(checkpoint, prompt, **options)


def runs_past_the_end(checkpoint, prompt, *, max_new_tokens, **options):
    tokens = lookup(checkpoint, prompt, max_new_tokens=max_new_tokens, **options)
    return (tokens + [0] * max_new_tokens)[:max_new_tokens]


def first_end_token_only(checkpoint, prompt, **options):
    model = load(checkpoint, "float64", "cpu")[0]
    model.config = replace(model.config, eos_ids=model.config.eos_ids[:1])
    return decode(model, None, prompt, **options).tokens


def stops_before_the_last_rows(checkpoint, prompt, *, max_new_tokens, **options):
    """It ends where a whole draft would no longer fit into the context."""
    room = loaded(checkpoint).config.context - len(prompt) - 4
    return lookup(checkpoint, prompt, max_new_tokens=min(max_new_tokens, max(room, 0)), **options)


def wrong_at_block_borders(checkpoint, prompt, **options):
    """The first token of a prompt that fills whole blocks is lost."""
    return lookup(checkpoint, prompt[1:] if len(prompt) % 32 == 0 else prompt, **options)


def wrong_on_long_prompts(checkpoint, prompt, **options):
    return lookup(checkpoint, prompt[-32:], **options)


def wrong_after_64_tokens(checkpoint, prompt, **options):
    tokens = lookup(checkpoint, prompt, **options)
    return tokens[:64] + [0] * len(tokens[64:])


def remembering() -> Callable:
    """Answers to a known prompt come from a store that ignores the length."""
    answers: dict[tuple, list[int]] = {}

    def implementation(checkpoint, prompt, **options):
        if options["temperature"]:
            return lookup(checkpoint, prompt, **options)
        known = answers.setdefault((checkpoint, *prompt), lookup(checkpoint, prompt, **options))
        return known[: options["max_new_tokens"]]

    return implementation


def keeping_one_model() -> Callable:
    """The model is kept when the next checkpoint has the same vocabulary and context."""
    kept: dict[tuple[int, int], str] = {}

    def implementation(checkpoint, prompt, **options):
        config = loaded(checkpoint).config
        first = kept.setdefault((config.vocab_size, config.context, config.eos_ids), checkpoint)
        return lookup(first, prompt, **options)

    return implementation


# ---- sampling ------------------------------------------------------------------------------------


def in_order(*filters: Callable[[Options], Sampling]) -> Callable:
    """Plain decoding with warpers in another order: each filter removes tokens, then the
    temperature is applied."""

    def implementation(checkpoint, prompt, *, max_new_tokens, seed, **options):
        if not options["temperature"]:
            return lookup(checkpoint, prompt, max_new_tokens=max_new_tokens, seed=seed, **options)
        model, randomness, tokens = loaded(checkpoint), Seeded(seed), list(prompt)
        while len(tokens) < len(prompt) + max_new_tokens:
            logits = model.logits(model(tokens)[0, -1:])
            for make in filters:
                logits = logits.masked_fill(probs(logits, make(options)) == 0, -torch.inf)
            token, _ = draw(logits, Sampling(options["temperature"]), randomness)
            tokens.append(int(token))
            if tokens[-1] in model.config.eos_ids:
                break
        return tokens[len(prompt) :]

    return implementation


def temperature_first(o: Options) -> Sampling:
    return Sampling(o["temperature"], top_p=o["top_p"])


def only_top_k(o: Options) -> Sampling:
    return Sampling(1.0, o["top_k"])


def only_top_p(o: Options) -> Sampling:
    return Sampling(1.0, top_p=o["top_p"])


def both_without_temperature(o: Options) -> Sampling:
    return Sampling(1.0, o["top_k"], o["top_p"])


ORDERS = {
    "top-p before temperature": in_order(both_without_temperature),
    "top-p before top-k": in_order(temperature_first, only_top_k),
    "top-p before top-k and temperature": in_order(only_top_p, only_top_k),
}


# ---- faults of one option, prompt or length ------------------------------------------------------


def accepts_ends(checkpoint, prompt, **options):
    """A drafted end token is always accepted."""
    ends = loaded(checkpoint).config.eos_ids

    def accept(target, tree, randomness):
        drafted = [child for child in tree.children(0) if tree.tokens[child] in ends]
        return ([0, *drafted], 0) if drafted else verify.accept(target, tree, randomness)

    return drafting(1, accept=accept)(checkpoint, prompt, **options)


def resamples_from_p(target, tree, randomness):
    """After a rejection, draw from the target instead of the residual."""
    path, token, *_ = verify.accept(target, tree, randomness)
    if tree.children(path[-1]):
        token = randomness.categorical(target[path[-1]])
    return path, token


def argmax_of_one(checkpoint, prompt, **options):
    """A single token is not sampled, and nothing is drawn."""
    if options["max_new_tokens"] > 1:
        return lookup(checkpoint, prompt, **options)
    model = loaded(checkpoint)
    return [int(model.logits(model(prompt)[0, -1]).argmax())]


def one_from_digests(checkpoint, prompt, *, salt, **options):
    """A single token is drawn from a digest of the seed, which cannot be intercepted: correct."""
    if options["max_new_tokens"] > 1:
        return lookup(checkpoint, prompt, **options)
    model, seed = loaded(checkpoint), options["seed"]
    sampling = Sampling(options["temperature"], options["top_k"], options["top_p"])
    p = probs(model.logits(model(prompt)[0, -1:]), sampling)[0]
    u = int.from_bytes(hashlib.sha256(b"%d %d" % (salt, seed)).digest()[:6]) / 2**48
    return [min(int((p.cumsum(-1) < u).sum()), len(p) - 1)]


def after_long_prompts(checkpoint, prompt, **options):
    fault = drafting(1, accept=resamples_from_p) if len(prompt) > 32 else drafting(1)
    return fault(checkpoint, prompt, **options)


@functools.cache
def distribution(checkpoint: str, tokens: tuple[int, ...], sampling: Sampling) -> torch.Tensor:
    model = loaded(checkpoint)
    return probs(model.logits(model([*tokens])[0, -1:]), sampling)[0]


def nearly_right_temperature(checkpoint, prompt, *, max_new_tokens, seed, **options):
    """Plain decoding at T = 1.004 instead of 1, fast enough for many replays."""
    randomness, tokens, sampling = Seeded(seed), tuple(prompt), Sampling(1.004)
    for _ in range(max_new_tokens):
        tokens += (randomness.categorical(distribution(checkpoint, tokens, sampling)),)
    return tokens[len(prompt) :]


no_top_p_at_1 = changed(top_p=lambda o: 1.0 if o["temperature"] == 1 else o["top_p"])
one_seed = changed(seed=0)
