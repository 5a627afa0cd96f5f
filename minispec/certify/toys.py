"""Small targets, drafts and heads, and the enumeration of all random outcomes.

Lessons, assignments, tests and the certifier share these. With a vocabulary of three tokens, every
random choice that a decoder could make can be enumerated with its probability. So the distribution
of the decoder's first tokens can be computed exactly and compared to the last digit:

    exact_distribution(method, Toy(0), prompt=[1, 0], sampling=Sampling(1.0), n=2)
    # {(0, 0): 0.131, (0, 1): 0.150, (0, 2): 0.063, (1, 0): 0.008, (1, 1): 0.481, ...}
"""

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import compress

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers import models as tokenizer_models
from torch import Tensor, nn

from minispec.cache import KVCache
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.methods.eagle3 import Eagle3Head, default_layers
from minispec.methods.fastmtp import MTPHead
from minispec.methods.medusa import MedusaHeads
from minispec.methods.vocabulary import Compressed, FullVocabulary, count
from minispec.model import Config, Transformer
from minispec.sampling import Randomness, Sampling, Seeded
from minispec.tree import Step

Method = Callable[..., Iterator[Step]]  # any function of generate.METHODS

# ---- targets and drafts --------------------------------------------------------------------------


class Toy:
    """A target whose distribution is a random function of the context's tokens *and* positions.

    It uses the real cache. Each row holds its (position, token), so a stale, missing, shifted or
    wrongly masked row changes the distribution at once. Its hidden states are its logits."""

    prefill, prefill_chunks = Transformer.prefill, Transformer.prefill_chunks
    score = Transformer.score
    source = graphs = None

    def __init__(self, seed: int, vocab: int = 3, context: int = 32, eos: tuple[int, ...] = ()):
        self.memo: dict = {}
        self.config = Config(
            hidden_size=vocab, intermediate_size=1, layers=1, heads=1, kv_heads=1, head_dim=2,
            vocab_size=vocab, context=context, bos_id=0, eos_ids=eos,
        )  # fmt: skip
        self.device, self.dtype = torch.device("cpu"), torch.float64
        self.seed, self.logits_after = seed, {}

    def new_cache(self, capacity: int | None = None) -> KVCache:
        return KVCache(1, 1, 2, capacity or self.config.context, torch.float64)

    def __call__(self, tokens, cache=None, depth=None, mask=None, feature_layers=()) -> Tensor:
        """Like Transformer.forward: returns (1, n, vocab) for n tokens."""
        tokens = torch.as_tensor(tokens)
        n = len(tokens)
        cache = cache or self.new_cache(n)
        depth = torch.arange(n) if depth is None else depth
        mask = torch.ones(n, n, dtype=torch.bool).tril() if mask is None else mask
        slots, position, attn_mask = cache.place(n, depth, mask)
        row = torch.stack([position[0], tokens], -1).view(1, n, 1, 2).to(self.dtype)
        rows, _ = cache.write(0, slots, row, row)  # (1, span, 1, 2)
        rows = [tuple(pair) for pair in rows[0, :, 0].long().tolist()]
        contexts = (sorted(compress(rows, attended)) for attended in attn_mask[0, 0].tolist())
        return torch.stack([self.after(tuple(context)) for context in contexts])[None]

    def after(self, context: tuple) -> Tensor:
        """Logits (vocab,) after a context of (position, token) pairs."""
        if context not in self.logits_after:
            rng = random.Random(repr((self.seed, context)))
            logits = [2 * rng.gauss(0, 1) for _ in range(self.config.vocab_size)]
            self.logits_after[context] = torch.tensor(logits, dtype=torch.float64)
        return self.logits_after[context]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


def negated(model: Transformer) -> Transformer:
    """An adversarial draft, which prefers the target's least likely tokens."""
    draft = copy.deepcopy(model)
    draft.lm_head.weight = nn.Parameter(-model.lm_head.weight, requires_grad=False)
    return draft


def small_model(
    seed: int, vocab: int = 24, context: int = 128, dtype: torch.dtype = torch.float64, **changes
) -> Transformer:
    """A tiny random Transformer without any parameter that is exactly 0 or 1. `changes` are fields
    of its Config."""
    settings = dict(hidden_size=16, intermediate_size=24, layers=2, heads=4, kv_heads=2, head_dim=4)
    model = Transformer(Config(**(settings | changes), vocab_size=vocab, context=context)).to(dtype)
    return randomise(model, seed)


def randomise(module: nn.Module, seed: int) -> nn.Module:
    """Randomise and freeze all parameters. The weights of norms are centred on 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in module.named_parameters():
        noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        p.data.copy_(0.5 * noise + (1.0 if "norm" in name else 0.0))
        p.requires_grad_(False)
    return module.eval()


def letter_tokenizer(vocab: int) -> Tokenizer:
    """A tokenizer with one letter per token, so that encoding a decoded text returns its ids."""
    backend = Backend(tokenizer_models.BPE({chr(97 + i): i for i in range(vocab)}, merges=[]))
    backend.decoder = decoders.Fuse()  # without spaces
    return Tokenizer(backend)


# ---- heads ---------------------------------------------------------------------------------------


class ToyHeads:
    """Medusa heads for a Toy. The logits of head k are the target's, rolled by k tokens."""

    def __init__(self, heads: int):
        self.heads = heads

    def __len__(self) -> int:
        return self.heads

    def vocabulary(self, model: "Toy", chosen: None) -> FullVocabulary:
        return FullVocabulary(model)

    def __call__(self, hidden: Tensor, model) -> Tensor:
        return torch.stack([hidden.roll(k, -1) for k in range(self.heads)])


def random_medusa_heads(
    model: Transformer, seed: int, heads: int = 4, shared: bool = False
) -> MedusaHeads:
    """Random Medusa heads of one residual block and a projection or, if `shared`, lm_head."""
    c = model.config
    module = MedusaHeads(heads, 1, c.hidden_size, None if shared else c.vocab_size)
    return randomise(module.to(model.dtype), seed)


def random_mtp_head(model: Transformer, seed: int) -> MTPHead:
    return randomise(MTPHead(model.config).to(model.dtype), seed)


def random_eagle3_head(model: Transformer, seed: int) -> Eagle3Head:
    """A random EAGLE-3 head for `model`, which drafts two thirds of its tokens."""
    ids = [token for token in range(model.config.vocab_size) if token % 3 != seed % 3]
    head = Eagle3Head(model.config, model.config, ids, default_layers(model.config.layers))
    return randomise(head.to(model.dtype), seed)


def two_languages(model: Transformer) -> Compressed:
    """Two languages that share a third of the vocabulary, so that a text often switches."""
    size = model.config.vocab_size
    third = max(size // 3, 1)
    low, high = [[*range(2 * third)] * 2], [[*range(third, size)]]
    return Compressed({"low": count(low, [], 99), "high": count(high, [], 99)}, model)


# ---- all outcomes --------------------------------------------------------------------------------


class ScriptedRandomness:
    """Randomness that follows a script of choices and then always takes the first option.
    `probability` is the probability of all choices so far."""

    def __init__(self, script: list[int]):
        self.script, self.choices, self.probability = script, [], 1.0

    def choose(self, probs: list[float]) -> int:
        options = [i for i, p in enumerate(probs) if p > 0]
        if len(options) == 1:  # there is no choice
            self.probability *= probs[options[0]]
            return options[0]
        step = len(self.choices)
        choice = self.script[step] if step < len(self.script) else 0
        self.choices.append((choice, len(options)))
        self.probability *= probs[options[choice]]
        return options[choice]

    def bernoulli(self, p: float) -> bool:
        return self.choose([1 - p, p]) == 1

    def categorical(self, probs: Tensor) -> int:
        return self.choose((probs.double() / probs.double().sum()).tolist())


def every_outcome(function: Callable[[Randomness], object]) -> Iterator[tuple[object, float]]:
    """Yield (result, probability) of function(randomness) for every sequence of random choices."""
    script: list[int] | None = []
    while script is not None:
        randomness = ScriptedRandomness(script)
        yield function(randomness), randomness.probability
        # the next script: advance the last choice that has an option left, drop all after it
        choices = list(randomness.choices)
        while choices and choices[-1][0] == choices[-1][1] - 1:
            choices.pop()
        script = [choice for choice, _ in choices[:-1]] + [choices[-1][0] + 1] if choices else None


def first_tokens(
    method: Method, model, prompt: list[int], sampling: Sampling, randomness: Randomness, n: int
) -> tuple[int, ...]:
    """The first `n` tokens that a method generates."""
    tokens: list[int] = []
    for step in method(model, prompt, sampling, randomness):
        tokens += step.tokens
        if len(tokens) >= n:
            return tuple(tokens[:n])
    raise AssertionError("a method must never end")


def exact_distribution(
    method: Method, model, prompt: list[int], sampling: Sampling, n: int
) -> dict[tuple[int, ...], float]:
    """The probability of each sequence of the first `n` tokens, summed over all outcomes."""
    total: dict[tuple[int, ...], float] = Counter()
    for tokens, probability in every_outcome(
        lambda randomness: first_tokens(method, model, prompt, sampling, randomness, n)
    ):
        total[tokens] += probability
    return total


def total_variation(a: dict, b: dict) -> float:
    """Half the sum of |a - b| over all outcomes: 0 for equal distributions, 1 for disjoint ones."""
    return sum(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in a.keys() | b.keys()) / 2


class Recorder(Seeded):
    """Records the distributions that it drew from and the tokens that it drew."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.probs, self.drawn = [], []

    def categorical(self, probs: Tensor) -> int:
        self.probs.append(probs.clone())
        self.drawn.append(super().categorical(probs))
        return self.drawn[-1]
