"""Generation from Python: METHODS, stream and decode."""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from numbers import Integral, Real
from operator import index

import torch

from minispec.cache import KVCache
from minispec.checkpoints.load import needed
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.errors import (
    UserError,
)
from minispec.generate.drafters import (
    with_drafter,
    with_policies,
)
from minispec.generate.run import Ending, Run, without_autocast
from minispec.methods.autoregressive import autoregressive
from minispec.methods.fastmtp import fastmtp
from minispec.methods.lookahead import check_block, check_window, jacobi, lookahead
from minispec.methods.medusa import checked_tree, medusa, medusa_typical
from minispec.methods.prompt_lookup import prompt_lookup
from minispec.methods.speculative import speculative
from minispec.model import Transformer, count_parameters
from minispec.sampling import Randomness, Sampling, Seeded
from minispec.tree import Step

METHODS: dict[str, Callable[..., Iterator[Step]]] = {
    "autoregressive": autoregressive,
    "speculative": speculative,
    "prompt-lookup": prompt_lookup,
    "medusa": medusa,
    "medusa-typical": medusa_typical,
    "jacobi": jacobi,
    "lookahead": lookahead,
    "fastmtp": fastmtp,
}

ADAPTIVE = "speculative", "fastmtp"  # their k may be chosen round by round
TREE_ROOM = 512  # cache rows beyond the tokens asked for: room for the last window or tree
CACHE_STEP = 512  # a cache's capacity is a multiple of this: graphs on a GPU are made for each


def stream(
    model: Transformer, tokenizer: Tokenizer | None, prompt: str | Iterable[int],
    method: str = "autoregressive", *, max_new_tokens: int = 200, temperature: float = 0.0,
    top_k: int = 0, top_p: float = 1.0, seed: int = 0, randomness: Randomness | None = None,
    stop: str | tuple[str, ...] = (), ignore_eos: bool = False, cache: KVCache | None = None,
    **options,
) -> Run:  # fmt: skip
    """Begin a run: iterate over it for text as it comes.

    `prompt` is text or token ids. `options` are the method's own; a draft or heads that are not
    given are looked for beside the model, k or tree "auto" becomes a policy made for this machine.
    A `cache` given holds the rows of a proper prefix of the prompt and is left holding those of
    prompt and output; its capacity, at most the context, bounds both. A surrounding autocast has no
    effect: the model's dtype decides. Raises UserError for what cannot be run.
    """
    if method not in METHODS:
        raise UserError(f"unknown method {method!r}: use one of {', '.join(METHODS)}")
    check_objects(model, tokenizer, randomness)
    randomness = Seeded(seed) if randomness is None else randomness
    sampling = Sampling(temperature, top_k, top_p)
    ends = () if ignore_eos else model.config.eos_ids
    ending = Ending(max_new_tokens, (stop,) if isinstance(stop, str) else stop, ends)
    controls = needed(tokenizer, model.source).controls if ending.stop else {}
    stop_ids = [controls[text] for text in ending.stop if text in controls]
    ids = as_prompt(model, tokenizer, prompt)
    if cache is None:
        rows = len(ids) + max_new_tokens + TREE_ROOM
        cache = model.new_cache(min(model.config.context, -(-rows // CACHE_STEP) * CACHE_STEP))
    check_cache(cache, model, len(ids), len(ids) + 1, model.config.context)
    with without_autocast(model.device):
        options = with_drafter(method, model, tokenizer, options)
        options = with_policies(method, model, checked(method, options))
    check_sizes(method, model, len(ids), cache, options)
    steps = METHODS[method](model, ids, sampling, randomness, cache=cache, **options)
    decoder = tokenizer.stream(ids) if tokenizer else None
    extra = sum(count_parameters(v) for v in options.values() if isinstance(v, torch.nn.Module))
    return Run(method, ids, steps, cache, sampling, ending, stop_ids, decoder, extra)


def decode(
    model: Transformer, tokenizer: Tokenizer | None, prompt: str | Iterable[int],
    method: str = "autoregressive", **options,
) -> Run:  # fmt: skip
    """`stream`, run to its end: .text, .tokens, .finish_reason, .stats."""
    run = stream(model, tokenizer, prompt, method, **options)
    for _ in run:
        pass
    return run


def as_prompt(
    model: Transformer, tokenizer: Tokenizer | None, prompt: str | Iterable[int]
) -> list[int]:
    """Token ids of a prompt: in range, at least one, with room for an answer."""
    c = model.config
    if isinstance(prompt, str):
        needed(tokenizer, model.source, "give token ids (--prompt-ids)")
    try:
        if isinstance(prompt, (bytes, bytearray)) or getattr(prompt, "ndim", 1) != 1:
            raise TypeError  # it could pass for integers
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(map(index, prompt))
    except TypeError:
        raise UserError(
            "a prompt must be text, or token ids: a list, or an array or tensor in one dimension"
        ) from None
    if not ids and c.bos_id is None:
        raise UserError("the prompt is empty, and this model has no BOS token to begin with")
    ids = ids or [c.bos_id]
    for wrong in (i for i in ids if not 0 <= i < c.vocab_size):
        raise UserError(f"prompt id {wrong} is out of range: there are {c.vocab_size} tokens")
    if len(ids) >= c.context:
        raise UserError(f"the prompt has {len(ids)} tokens, the context only {c.context}")
    return ids


def check_objects(
    model: Transformer, tokenizer: Tokenizer | None, randomness: Randomness | None
) -> None:
    """Refuse objects of other libraries, and randomness that cannot draw."""
    if not hasattr(model, "prefill"):
        raise UserError(f"the model is a {type(model).__name__}: pass the one that load returns")
    if tokenizer is not None and not hasattr(tokenizer, "controls"):
        kind = type(tokenizer).__name__
        raise UserError(f"the tokenizer is a {kind}: pass the one that load returns, or None")
    verbs = "bernoulli", "categorical"
    if randomness is not None and not all(hasattr(randomness, verb) for verb in verbs):
        raise UserError(f"randomness {randomness!r}: must have {' and '.join(verbs)}")


def check_cache(cache: KVCache, model: Transformer, prompt: int, least: int, most: int) -> None:
    """Refuse a cache that holds other rows than one sequence's of this model, one that holds all of
    the prompt, and one whose capacity is not from `least` to `most`."""
    if not isinstance(cache, KVCache):
        raise UserError(f"cache {cache!r}: must be made by model.new_cache()")
    c, keys = model.config, cache.k[0]
    its = len(cache.lengths), len(cache.k), *keys.shape[2:], keys.dtype, keys.device.type
    same = its == (1, c.layers, c.kv_heads, c.head_dim, model.dtype, model.device.type)
    if not (same and cache.length < prompt and least <= cache.capacity <= most):
        raise UserError(
            f"the cache does not go with this model and a prompt of {prompt} tokens: truncate it, "
            "or make another by model.new_cache()"
        )


LEAST = {"k": 1, "block": 1, "window": 1, "ngram": 1, "guesses": 0}
MARKS = {  # what an object must have to be such an option
    "draft": "new_cache", "heads": "__call__", "head": "new_cache", "vocabulary": "select",
    "draft_sampling": "top_p",
}  # fmt: skip


def checked(method: str, options: dict) -> dict:
    """The method's options, numbers as Python's ints; raises UserError for what it cannot take."""
    signature = inspect.signature(METHODS[method])
    try:
        signature.bind(None, None, None, None, cache=None, **options)
    except TypeError as error:
        raise UserError(f"{method}: {error}") from None
    taken = {}
    for name, value in options.items():
        default = signature.parameters[name].default
        if name == "tree" and hasattr(value, "tolist"):  # an array of paths
            value = value.tolist()
        counted = isinstance(default, int)
        adaptive = method in ADAPTIVE and (value == "auto" or hasattr(value, "choose"))
        if counted and not adaptive and not isinstance(value, Integral):
            raise UserError(f"{method}: {name} {value!r}: must be a whole number")
        if isinstance(default, float) and not isinstance(value, Real):
            raise UserError(f"{method}: {name} {value!r}: must be a number")
        if not counted and value is not None and not hasattr(value, MARKS.get(name, "__class__")):
            raise UserError(f"{method}: {name} {value!r}: is no {name.replace('_', ' ')}")
        taken[name] = int(value) if isinstance(value, Integral) else value
    return taken


def check_sizes(
    method: str, model: Transformer, prompt: int, cache: KVCache, options: dict
) -> None:
    """Refuse sizes that do not suit the model, the cache or each other before the run begins: the
    method itself, a generator, would only do so when its first step is asked for."""
    defaults = inspect.signature(METHODS[method]).parameters
    sizes = {name: options.get(name, defaults[name].default) for name in defaults}
    for name, least in LEAST.items():
        if isinstance(sizes.get(name), int) and sizes[name] < least:
            raise UserError(f"{method}: {name} {sizes[name]}: must be at least {least}")
    if method == "jacobi":
        check_block(sizes["block"], model)
    elif method == "lookahead":
        check_window(sizes["window"], sizes["ngram"], cache.capacity)
    elif method in ("medusa", "medusa-typical"):
        checked_tree(model, sizes["heads"], sizes["tree"], sizes["vocabulary"])
    elif sizes.get("draft_cache") is not None:
        check_cache(sizes["draft_cache"], sizes["draft"], prompt, cache.capacity, sys.maxsize)


def unlisted_end(model: Transformer, tokenizer: Tokenizer | None) -> str | None:
    """What to tell the user if the tokenizer has an end token that the model's files do not list as
    one, so that nothing ends at it; None if all is well."""
    end = tokenizer.id_of("eos_token") if tokenizer else None
    if end is None or end in model.config.eos_ids:
        return None
    return (
        f"the model's config does not list {tokenizer.named['eos_token']}, the tokenizer's end "
        f"token, so no text ends there: add {end} to eos_token_id in generation_config.json"
    )


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many leading tokens the two share."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
