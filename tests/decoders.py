"""A table of decoders with the signature of --impl: right ones in many styles, and biased ones.

Each is one change of `Engine`, speculative decoding with the checkpoint's draft in NumPy."""

import functools
import hashlib
import math
import random
import secrets
import threading

import numpy as np
import torch

from minispec.checkpoints.load import load
from minispec.generate import decode
from minispec.generate.api import common_prefix_length
from minispec.sampling import Sampling, probs

loaded = functools.cache(lambda folder: load(folder, "float64", "cpu")[0])


class Rows:
    """A model with a cache that is kept between calls."""

    def __init__(self, folder: str):
        self.model, self.tokens = loaded(folder), []
        self.cache = self.model.new_cache()

    @torch.no_grad()
    def logits(self, tokens: list[int], first: int) -> torch.Tensor:
        """The logits after tokens[: i + 1] for i from `first` on, (n, V)."""
        known = min(common_prefix_length(tokens, self.tokens), first)
        self.cache.truncate(known)
        hidden = self.model(tokens[known:], self.cache)[0]
        self.cache.commit([*range(len(tokens) - known)])
        self.tokens = list(tokens)
        return self.model.logits(hidden[first - known :])


class Engine:
    """Right. Subclasses change one method."""

    k = 2
    drafts_in = "draft"

    def __init__(self):
        self.rows = functools.cache(Rows)

    def __call__(self, checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
        self.checkpoint, self.prompt, self.out = checkpoint, list(prompt), []
        self.n, self.eos = max_new_tokens, loaded(checkpoint).config.eos_ids
        self.context = loaded(checkpoint).config.context
        self.greedy, self.seed, self.draws = temperature == 0, seed, 0
        self.sampling = Sampling(temperature, top_k, top_p)
        self.begin()
        while len(self.out) < self.n and not self.ended():
            self.round()
        return self.finish()

    def begin(self):
        self.rng = np.random.default_rng(self.seed)

    def ended(self) -> bool:
        return bool(self.out) and self.out[-1] in self.eos

    def finish(self) -> list[int]:
        return self.out

    def target(self, tokens, first):
        return self.warp(self.rows(self.checkpoint).logits(tokens, first))

    def draft(self, tokens):
        rows = self.rows(f"{self.checkpoint}/draft")
        return self.warp(rows.logits(tokens, len(tokens) - 1))[0]

    def warp(self, logits) -> list[np.ndarray]:
        if self.sampling.temperature == 0:
            return list(np.eye(logits.shape[-1])[logits.argmax(-1).numpy()])
        return list(probs(logits, self.sampling).double().numpy())

    def uniform(self) -> float:
        return self.rng.random()

    def draw(self, p, role="target") -> int:
        total = p.cumsum()
        return int(np.searchsorted(total, self.uniform() * total[-1], side="right"))

    def accepts(self, p, q, x) -> bool:
        return self.uniform() * q[x] < p[x]

    def residual(self, p, q, x):
        rest = np.maximum(p - q, 0)
        return rest / rest.sum() if rest.sum() > 1e-15 else p

    def propose(self, k):
        tokens, qs = [*self.prompt, *self.out], []
        for _ in range(k):
            qs.append(self.draft(tokens))
            tokens.append(self.draw(qs[-1], "draft"))
        return tokens[len(self.prompt) + len(self.out) :], qs

    def round(self):
        k = max(0, min(self.k, self.n - len(self.out) - 1))
        drafts, qs = self.propose(k)
        before = [*self.prompt, *self.out]
        ps = self.target([*before, *drafts], len(before) - 1)
        for x, p, q in zip(drafts, ps, qs):
            if not self.accepts(p, q, x):
                self.emit(self.draw(self.residual(p, q, x)))
                return
            self.emit(x)
            if self.ended():
                return
        self.emit(self.bonus(ps[-1]))

    def bonus(self, p) -> int:
        return self.draw(p)

    def emit(self, token):
        self.out.append(token)


# ---- right ---------------------------------------------------------------------------------------


class HiddenCoin(Engine):
    """Its coins come from `secrets`; README's engine with one draft a round."""

    k = 1

    def uniform(self):
        return secrets.randbits(53) / 2**53


class HiddenCoinOnly(Engine):
    k = 1

    def accepts(self, p, q, x):
        return secrets.randbits(53) / 2**53 * q[x] < p[x]


class Gumbel(Engine):
    def draw(self, p, role="target"):
        with np.errstate(divide="ignore"):
            return int((np.log(p) + self.rng.gumbel(size=len(p))).argmax())


class Race(Engine):
    """Exponential races, in torch."""

    def begin(self):
        self.generator = torch.Generator().manual_seed(self.seed)
        super().begin()

    def draw(self, p, role="target"):
        noise = torch.empty(len(p), dtype=torch.float64).exponential_(generator=self.generator)
        return int((torch.from_numpy(p) / noise).argmax())


class Multinomial(Race):
    def draw(self, p, role="target"):
        return int(torch.multinomial(torch.from_numpy(p), 1, generator=self.generator))


class PythonRandom(Engine):
    def begin(self):
        self.random = random.Random(self.seed)

    def uniform(self):
        return self.random.random()


class GlobalRandom(Engine):
    def begin(self):
        random.seed(self.seed)

    def uniform(self):
        return random.random()


class Digests(Engine):
    """Numbers from a digest of the seed."""

    def uniform(self):
        self.draws += 1
        data = hashlib.sha256(b"%d %d" % (self.seed, self.draws)).digest()
        return int.from_bytes(data[:6]) / 2**48


class Threads(Engine):
    """A helper thread draws the numbers."""

    def uniform(self):
        found = []
        thread = threading.Thread(target=lambda: found.append(self.rng.random()))
        thread.start()
        thread.join()
        return found[0]


class Integers(Engine):
    def uniform(self):
        return int(self.rng.integers(2**53)) / 2**53


class Choice(Engine):
    def draw(self, p, role="target"):
        return int(self.rng.choice(len(p), p=p / p.sum()))


class Sorted(Engine):
    """Inverse CDF over the tokens from likeliest to least."""

    def draw(self, p, role="target"):
        order = np.argsort(-p, kind="stable")
        return int(order[min(np.searchsorted(p[order].cumsum(), self.uniform()), len(p) - 1)])


class Kept(Engine):
    """Numbers are drawn in blocks that last for several calls."""

    block: list[float] = []

    def begin(self):
        pass

    def uniform(self):
        if not self.block:
            self.block = np.random.default_rng(self.seed).random(100).tolist()
        return self.block.pop()


class Plain(Engine):
    k = 0


class Long(Engine):
    k = 6


class DraftsGreedily(Engine):
    """One-hot drafts."""

    def draft(self, tokens):
        q = super().draft(tokens)
        return np.eye(len(q))[q.argmax()]


class HotDraft(Engine):
    """The draft is not warped."""

    def draft(self, tokens):
        rows = self.rows(f"{self.checkpoint}/draft")
        return rows.logits(tokens, len(tokens) - 1).softmax(-1)[0].numpy()


class Uniform(Engine):
    """Guesses, and rejects by hand: every outcome in one draw."""

    def draft(self, tokens):
        q = super().draft(tokens)
        return np.full(len(q), 1 / len(q))


class FloatPrecision(Engine):
    """float32 on the way."""

    def warp(self, logits):
        return [p.astype(np.float32).astype(np.float64) for p in super().warp(logits.float())]


class AdaptiveK(Engine):
    """Drafts fewer tokens after a rejection, also across calls."""

    adaptive = 3

    def round(self):
        before, self.k = len(self.out), self.adaptive
        super().round()
        self.adaptive = min(5, len(self.out) - before + 1)


class Batched(Engine):
    """Answers batches one request after the other."""

    def many(self, checkpoint, requests):
        return [self(checkpoint, **request) for request in requests]


class Interleaved(Batched):
    """Answers in another order than asked, and returns in the right one."""

    def many(self, checkpoint, requests):
        order = sorted(range(len(requests)), key=lambda i: len(requests[i]["prompt"]))
        answers = {i: self(checkpoint, **requests[i]) for i in order}
        return [answers[i] for i in range(len(requests))]


class Counts(Engine):
    def finish(self):
        return np.array(self.out, dtype=np.int64)


def ours(method: str, **settings):
    def implementation(checkpoint, prompt, **options):
        made = dict(settings)
        if method == "speculative":
            made["draft"] = loaded(f"{checkpoint}/draft")
        return decode(loaded(checkpoint), None, prompt, method, **made, **options).tokens

    return implementation


RIGHT = {c.__name__: c for c in (
    Engine, HiddenCoin, HiddenCoinOnly, Gumbel, Race, Multinomial, PythonRandom, GlobalRandom,
    Digests, Threads, Integers, Choice, Sorted, Kept, Plain, Long, DraftsGreedily, HotDraft,
    Uniform, FloatPrecision, AdaptiveK, Batched, Interleaved, Counts,
)} | {
    "ours, speculative": lambda: ours("speculative", k=3),
    "ours, prompt lookup": lambda: ours("prompt-lookup", k=3),
}  # fmt: skip


# ---- biased --------------------------------------------------------------------------------------


class CapAt48(Engine):
    def begin(self):
        super().begin()
        self.n = min(self.n, 48)


class OneTooMany(Engine):
    """When sampling."""

    def begin(self):
        super().begin()
        self.n += not self.greedy


class UnmaskedPadding(Batched):
    """Prompts of a batch are padded on the left with token 0, which is not masked."""

    def many(self, checkpoint, requests):
        longest = max(len(request["prompt"]) for request in requests)
        context = loaded(checkpoint).config.context
        padded = []
        for request in requests:
            room = context - request["max_new_tokens"] - len(request["prompt"])
            pad = min(longest - len(request["prompt"]), room)
            padded.append(request | {"prompt": [0] * pad + request["prompt"]})
        return super().many(checkpoint, padded)


class AnyDraftInMixedBatch(Batched):
    mixed = False

    def many(self, checkpoint, requests):
        self.mixed = len({request["temperature"] > 0 for request in requests}) > 1
        return super().many(checkpoint, requests)

    def accepts(self, p, q, x):
        return (self.greedy and self.mixed) or super().accepts(p, q, x)


class WrongSecondTurn(Engine):
    """A prefix cache that is wrong when a prompt continues the last answer."""

    last: list[int] = []

    def begin(self):
        super().begin()
        n = len(self.last)
        if n and self.prompt[:n] == self.last and len(self.prompt) > n:
            self.prompt = [*self.prompt[: n - 1], *self.prompt[n:]]

    def finish(self):
        self.last = [*self.prompt, *self.out]
        return self.out


class DefaultTopK(Engine):
    def begin(self):
        super().begin()
        s = self.sampling
        self.sampling = Sampling(s.temperature, s.top_k or 20, s.top_p)


class WrongResidualLate(Engine):
    """From the 25th token."""

    late = 24

    def residual(self, p, q, x):
        return p if len(self.out) >= self.late else super().residual(p, q, x)


class ArgmaxInLastRows(Engine):
    def draw(self, p, role="target"):
        if role == "target" and len(self.prompt) + len(self.out) >= self.context - 6:
            return int(p.argmax())
        return super().draw(p, role)


class SampledWithTopP(Engine):
    """T = 0 with top-p is sampled at temperature 1."""

    def begin(self):
        super().begin()
        s = self.sampling
        if s.temperature == 0 and s.top_p < 1:
            self.sampling = Sampling(1.0, s.top_k, s.top_p)


class ColdIsGreedy(Engine):
    def begin(self):
        super().begin()
        if self.sampling.temperature < 0.15:
            self.sampling = Sampling()


class TenFaults(CapAt48, OneTooMany, WrongSecondTurn, DefaultTopK, WrongResidualLate,
                ArgmaxInLastRows, SampledWithTopP, ColdIsGreedy, UnmaskedPadding,
                AnyDraftInMixedBatch):  # fmt: skip
    pass


class TenFaultsAlone(CapAt48, OneTooMany, WrongSecondTurn, DefaultTopK, WrongResidualLate,
                     ArgmaxInLastRows, SampledWithTopP, ColdIsGreedy):  # fmt: skip
    """Those that need no batches."""


class ResidualBeforeTopP(Engine):
    """The residual is taken of whole distributions, then top-p and top-k are applied."""

    def warp(self, logits):
        self.unfiltered = list(probs(logits, Sampling(self.sampling.temperature)).numpy()) \
            if not self.greedy else super().warp(logits)
        if logits.shape[0] == 1:
            self.q_unfiltered = {**getattr(self, "q_unfiltered", {}), id: None}
        return super().warp(logits)

    def residual(self, p, q, x):
        if self.greedy:
            return super().residual(p, q, x)
        full_p = next(f for f, row in zip(self.ps_unfiltered, self.ps) if row is p)
        full_q = self.raw_q[len(self.raw_q) - 1 if q is None else self.q_index(q)]
        rest = np.maximum(full_p - full_q, 0) * (p > 0)
        return rest / rest.sum() if rest.sum() > 1e-15 else p

    def q_index(self, q):
        return next(i for i, row in enumerate(self.qs) if row is q)

    def draft(self, tokens):
        q = super().draft(tokens)
        self.qs.append(q)
        self.raw_q.append(self.unfiltered[0])
        return q

    def round(self):
        self.qs, self.raw_q = [], []
        super().round()

    def target(self, tokens, first):
        self.ps = super().target(tokens, first)
        self.ps_unfiltered = self.unfiltered
        return self.ps


class GumbelReused(Gumbel):
    """The draft's noise is used again for the target."""

    def begin(self):
        super().begin()
        self.noise = {}

    def draw(self, p, role="target"):
        place = len(self.out) + (self.drafted if role == "draft" else 0)
        if role == "draft":
            self.drafted += 1
        noise = self.noise.setdefault(place, self.rng.gumbel(size=len(p)))
        with np.errstate(divide="ignore"):
            return int((np.log(p) + noise).argmax())

    def round(self):
        self.drafted = 0
        super().round()


class Wraps(Engine):
    """Its noise repeats after 64 numbers."""

    period = 64

    def begin(self):
        super().begin()
        self.table = self.rng.random(self.period)

    def uniform(self):
        self.draws += 1
        return self.table[self.draws % self.period]


class ConstantSeed(Engine):
    def begin(self):
        self.rng = np.random.default_rng(0)


class FewSeeds(Engine):
    def begin(self):
        self.rng = np.random.default_rng(self.seed % 4)


class Lenient(Engine):
    def accepts(self, p, q, x):
        return self.uniform() * q[x] < 1.2 * p[x]


class ResamplesFromTarget(Engine):
    def residual(self, p, q, x):
        return p


class ExcludesOnly(Engine):
    """After a rejection, the rejected token is removed and the target renormalised."""

    def residual(self, p, q, x):
        rest = p.copy()
        rest[x] = 0
        return rest / rest.sum() if rest.sum() > 1e-15 else p


class SquaredBonus(Engine):
    def bonus(self, p):
        return self.draw(p**2 / (p**2).sum())


class GreedyBonus(Engine):
    def bonus(self, p):
        return int(p.argmax())


class Typical(Engine):
    def accepts(self, p, q, x):
        return p[x] > 0.3 * math.exp(-float(-(p[p > 0] * np.log(p[p > 0])).sum()))


class OneCoin(Engine):
    """The same number decides about all drafts of a round."""

    coin = 0.0

    def round(self):
        self.coin = self.rng.random()
        super().round()

    def accepts(self, p, q, x):
        return self.coin * q[x] < p[x]


class CoinAlsoDraws(Engine):
    """The number that rejected a draft draws the token."""

    def accepts(self, p, q, x):
        self.coin = self.uniform()
        return self.coin * q[x] < p[x]

    def residual(self, p, q, x):
        rest = super().residual(p, q, x)
        at = int(np.searchsorted(rest.cumsum(), self.coin * rest.sum(), side="right"))
        return np.eye(len(rest))[min(at, len(rest) - 1)]


class MinP(Engine):
    def warp(self, logits):
        rows = super().warp(logits)
        kept = [row * (row >= 0.05 * row.max()) for row in rows]
        return [row / row.sum() for row in kept]


class NoTopPWithTopK(Engine):
    def begin(self):
        super().begin()
        s = self.sampling
        if s.top_k:
            self.sampling = Sampling(s.temperature, s.top_k)


class TemperatureTwice(Engine):
    """In the target's rows of drafts after the first."""

    def target(self, tokens, first):
        ps = super().target(tokens, first)
        return ps[:1] + [p**1.2 / (p**1.2).sum() for p in ps[1:]]


class HotIsClamped(Engine):
    def begin(self):
        super().begin()
        s = self.sampling
        self.sampling = Sampling(min(s.temperature, 1.5), s.top_k, s.top_p)


class NoEndInDrafts(Engine):
    """An end token is only looked for at the end of a round."""

    def round(self):
        ends, self.eos = self.eos, ()
        super().round()
        self.eos = ends


class LastEndTokenOnly(Engine):
    def begin(self):
        super().begin()
        self.eos = self.eos[:1]


class LongPromptWindow(Engine):
    """Prompts above 100 tokens lose their first token."""

    def begin(self):
        super().begin()
        self.prompt = self.prompt[1:] if len(self.prompt) > 100 else self.prompt


class BlockBorder(Engine):
    def begin(self):
        super().begin()
        self.prompt = self.prompt[1:] if len(self.prompt) % 32 == 0 else self.prompt


class RepetitionPenalty(Engine):
    """A default of 1.02 from the checkpoint."""

    def target(self, tokens, first):
        ps = super().target(tokens, first)
        if self.greedy:
            return ps
        factor = np.ones(len(ps[0]))
        factor[list(set(self.out))] = 0.95
        return [p * factor / (p * factor).sum() for p in ps]


class LastRowOfFirstTurn(Engine):
    """After 64 tokens, the draft is always accepted."""

    def accepts(self, p, q, x):
        return (len(self.out) > 64 and p[x] > 0) or super().accepts(p, q, x)


class LossyFirstToken(Engine):
    def draw(self, p, role="target"):
        p = p**1.3 / (p**1.3).sum() if not self.out and role == "target" else p
        return super().draw(p, role)


class DraftForShortPrompts(Engine):
    """A prompt of one token is answered by the draft."""

    def target(self, tokens, first):
        if len(self.prompt) == 1:
            tokens, rows = tokens, self.rows(f"{self.checkpoint}/draft")
            return self.warp(rows.logits(tokens, first))
        return super().target(tokens, first)


class KeepsAnswers(Engine):
    """The same prompt has the same answer, whatever the length and the seed."""

    known: dict = {}

    def finish(self):
        key = self.checkpoint, *self.prompt, self.greedy
        return self.known.setdefault(key, self.out)[: self.n]


class OneModel(Engine):
    """The model is kept when the next checkpoint has the same shape."""

    def __init__(self):
        super().__init__()
        self.kept = {}

    def begin(self):
        super().begin()
        config = loaded(self.checkpoint).config
        shape = config.vocab_size, config.context, config.eos_ids
        self.checkpoint = self.kept.setdefault(shape, self.checkpoint)


class SwapsBatch(Batched):
    """Answers of batches above 8 are returned in the wrong order."""

    def many(self, checkpoint, requests):
        answers = super().many(checkpoint, requests)
        if len(requests) > 8:
            answers[0], answers[1] = answers[1], answers[0]
        return answers


class OneSettingPerBatch(Batched):
    """The whole batch is sampled at the first request's temperature."""

    def many(self, checkpoint, requests):
        first = requests[0]["temperature"]
        return super().many(checkpoint, [request | {"temperature": first} for request in requests])


BIASED = {c.__name__: c for c in (
    TenFaults, TenFaultsAlone, CapAt48, OneTooMany, UnmaskedPadding, AnyDraftInMixedBatch,
    WrongSecondTurn, DefaultTopK, WrongResidualLate, ArgmaxInLastRows, SampledWithTopP,
    ColdIsGreedy, ResidualBeforeTopP, GumbelReused, Wraps, ConstantSeed, FewSeeds, Lenient,
    ResamplesFromTarget, ExcludesOnly, SquaredBonus, GreedyBonus, Typical, OneCoin, CoinAlsoDraws,
    MinP, NoTopPWithTopK, TemperatureTwice, HotIsClamped, NoEndInDrafts, LastEndTokenOnly,
    LongPromptWindow, BlockBorder, RepetitionPenalty, LastRowOfFirstTurn, LossyFirstToken,
    DraftForShortPrompts, KeepsAnswers, OneModel, SwapsBatch, OneSettingPerBatch,
)}  # fmt: skip
