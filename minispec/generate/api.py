"""The Python interface: METHODS, stream and decode."""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from operator import index
from reprlib import repr as brief

import torch

from minispec import distributed
from minispec.cache import KVCache
from minispec.checkpoints.load import require_tokenizer
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.cli import UserError, user_error
from minispec.generate.drafters import with_drafter, with_policies
from minispec.generate.run import Run, StopConditions, without_autocast
from minispec.methods import find_method
from minispec.methods.declaration import Method, Option
from minispec.methods.fastmtp import RecurrentHead
from minispec.model import Transformer
from minispec.sampling import Randomness, Sampling, Seeded
from minispec.verify import accept_block

SCRATCH_ROWS = 512  # extra cache rows, for the tree or window of the last pass
CAPACITY_MULTIPLE = 512  # of a cache: on a GPU, each capacity needs its own graphs


def stream(
    model: Transformer, tokenizer: Tokenizer | None, prompt: str | Iterable[int],
    method: str | Callable = "autoregressive", *, max_new_tokens: int = 200,
    temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0,
    randomness: Randomness | None = None, stop: str | tuple[str, ...] = (),
    ignore_eos: bool = False, cache: KVCache | None = None, **options,
) -> Run:  # fmt: skip
    """Start a run; iterate over it to get text as it is generated.

    `prompt` is text or token ids. `method` is a name, `file.py:function`, or a function like those
    in METHODS. `options` are passed to it. If it needs a draft or heads and none are passed, they
    are loaded from next to the model; "auto" for k, lookup_k or tree becomes a policy for this
    machine. Chains of sampled drafts are verified as a block, unless `rule=accept` is passed.

    A `cache` must hold a proper prefix of the prompt. It ends up holding prompt and output except
    for the last token; the run ends when they fill its capacity (at most the context). For the next
    turn of a conversation, pass the same cache again, and the draft's or head's as draft_cache or
    head_cache. A surrounding autocast is ignored: the model's dtype is used. Raises UserError for
    invalid arguments.
    """
    method = find_method(method)
    check_objects(model, tokenizer, randomness)
    randomness = Seeded(seed) if randomness is None else randomness
    sampling = Sampling(temperature, top_k, top_p)
    ends = () if ignore_eos else model.config.eos_ids
    stops = (stop,) if isinstance(stop, str) else stop
    conditions = StopConditions(max_new_tokens, stops, ends)
    control_ids = require_tokenizer(tokenizer, model.source).control_ids if stops else {}
    stop_ids = [control_ids[text] for text in stops if text in control_ids]
    ids = encode_prompt(model, tokenizer, prompt)
    if cache is None:
        blocks = -(-(len(ids) + conditions.max_new_tokens + SCRATCH_ROWS) // CAPACITY_MULTIPLE)
        cache = model.new_cache(min(model.config.context, blocks * CAPACITY_MULTIPLE))
    check_cache(cache, model, len(ids), len(ids) + 1, model.config.context)
    with without_autocast(model.device):
        options = with_drafter(method, model, tokenizer, options)
        options = with_policies(method, model, validate_options(method, options))
        options = dict.fromkeys(method.of_kind("rule"), accept_block) | options
    check_sizes(method, model, len(ids), cache, options)
    steps = method.function(model, ids, sampling, randomness, cache=cache, **options)
    if not isinstance(steps, Iterator):
        raise UserError(f"{method.name} returns a {type(steps).__name__}; a method is a generator "
                        "that yields Steps")  # fmt: skip
    decoder = tokenizer.stream(ids) if tokenizer else None
    modules = (value for value in options.values() if isinstance(value, torch.nn.Module))
    extra = sum(map(distributed.count_whole, modules))
    kept = cache, *(options.get(name) for name in method.of_kind("cache"))
    caches = [value for value in kept if value is not None]
    return Run(
        method.name, ids, steps, caches, sampling, conditions, stop_ids, decoder, extra,
        lossless=method.lossless,
    )  # fmt: skip


def decode(
    model: Transformer, tokenizer: Tokenizer | None, prompt: str | Iterable[int],
    method: str | Callable = "autoregressive", **options,
) -> Run:  # fmt: skip
    """Run `stream` to its end. The run has .text, .tokens, .finish_reason and .stats."""
    run = stream(model, tokenizer, prompt, method, **options)
    for _ in run:
        pass
    return run


def check_objects(
    model: Transformer, tokenizer: Tokenizer | None, randomness: Randomness | None
) -> None:
    """Reject a model or tokenizer of another library, and an object that is not a Randomness."""
    if not hasattr(model, "prefill"):
        raise UserError(f"the model is a {type(model).__name__}: pass the one that load returns")
    if tokenizer is not None and not hasattr(tokenizer, "control_ids"):
        kind = type(tokenizer).__name__
        raise UserError(f"the tokenizer is a {kind}: pass the one that load returns, or None")
    if randomness is not None and not hasattr(randomness, "bernoulli"):
        raise UserError(f"randomness {randomness!r}: must have bernoulli and categorical")


def encode_prompt(
    model: Transformer, tokenizer: Tokenizer | None, prompt: str | Iterable[int]
) -> list[int]:
    """The prompt as token ids: at least one, all in range, and fewer than the context holds."""
    c = model.config
    if isinstance(prompt, str):
        require_tokenizer(tokenizer, model.source, "pass token ids (--prompt-ids)")
    try:
        if isinstance(prompt, (bytes, bytearray)) or getattr(prompt, "ndim", 1) != 1:
            raise TypeError  # its items could pass for token ids
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(map(index, prompt))
    except TypeError:
        raise UserError(
            "a prompt must be text or token ids, as a list or as a one-dimensional array or tensor"
        ) from None
    if not ids and c.bos_id is None:
        raise UserError("the prompt is empty, and this model has no BOS token to start from")
    ids = ids or [c.bos_id]
    for i in ids:
        if not 0 <= i < c.vocab_size:
            raise UserError(f"prompt id {i} is out of range: there are {c.vocab_size} tokens")
    if len(ids) >= c.context:
        raise UserError(f"the prompt has {len(ids)} tokens, but the context is only {c.context}")
    return ids


def check_cache(
    cache: KVCache, network: Transformer | RecurrentHead, prompt_length: int, min_capacity: int,
    max_capacity: int,
) -> None:  # fmt: skip
    """Reject a cache of another model, head or capacity, and one that holds the whole prompt."""
    if not isinstance(cache, KVCache):
        raise UserError(f"cache {cache!r}: must come from model.new_cache()")
    c, keys, is_head = network.config, cache.k[0], isinstance(network, RecurrentHead)
    like = next(network.parameters()) if is_head else network
    layout = len(cache.k), *keys.shape[2:], keys.dtype, keys.device.type
    layers = 1 if is_head else c.layers
    same = layout == (layers, c.kv_heads, c.head_dim, like.dtype, like.device.type)
    fits = same and cache.length < prompt_length and min_capacity <= cache.capacity <= max_capacity
    if not fits:
        raise UserError(
            f"the cache does not fit this model and a prompt of {prompt_length} tokens; truncate "
            "it, or create a new one with model.new_cache()"
        )


def validate_options(method: Method, options: dict) -> dict:
    """The options, with numbers as Python's own. Raises UserError for invalid ones."""
    with user_error(method.name):
        inspect.signature(method.function).bind(None, None, None, None, cache=None, **options)
    valid = {}
    for name, value in options.items():
        option, default = method.options.get(name, (Option(), None))
        with user_error(f"{method.name}: {name} {brief(value)}"):
            valid[name] = option.check(value, default)
    return valid


def check_sizes(
    method: Method, model: Transformer, prompt_length: int, cache: KVCache, options: dict
) -> None:
    """Reject sizes that do not fit the model, the cache or each other. The method itself, being a
    generator, would only check them at its first step."""
    sizes = {name: default for name, (_, default) in method.options.items()} | options
    for drafter in (sizes[name] for name in method.of_kind("weights")):
        if hasattr(drafter, "vocabulary"):
            drafter.vocabulary(model, sizes.get("vocabulary"))
    for check in method.checks:
        check(model, cache, sizes)
    for name, kept in ((name, sizes[name]) for name in method.of_kind("cache")):
        drafter = name.removesuffix("_cache")
        if kept is not None:
            if sizes.get(drafter) is None:
                raise UserError(f"{method.name}: {name} is for a {drafter}; pass {drafter}=, too")
            check_cache(kept, sizes[drafter], prompt_length, cache.capacity, sys.maxsize)


def unlisted_eos_warning(
    model: Transformer, tokenizer: Tokenizer | None, stop: Iterable[str] = ()
) -> str | None:
    """A warning if neither the model's config nor `stop` lists the tokenizer's end token."""
    end = tokenizer.id_of("eos_token") if tokenizer else None
    name = tokenizer.special_tokens["eos_token"] if end is not None else None
    if end is None or end in model.config.eos_ids or name in stop:
        return None
    return (
        f"the model's config does not list {name}, the tokenizer's end token, so generation does "
        f"not stop there; add {end} to eos_token_id in generation_config.json"
    )


def common_prefix_length(a: list[int], b: list[int]) -> int:
    """The number of leading tokens that both share."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
