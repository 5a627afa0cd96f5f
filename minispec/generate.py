"""Text from a model by any method: METHODS, stream, decode, and the command line.

python -m minispec.generate "Once upon a time" --method autoregressive --stats
"""

import argparse
import contextlib
import inspect
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from numbers import Integral, Real
from operator import index
from typing import TextIO

import torch

from minispec.cache import KVCache
from minispec.checkpoint import WEIGHTS, load, needed
from minispec.drafters import NEEDS, load_drafter, read_tree_option, with_drafter, with_policies
from minispec.errors import (
    AS_TEXT,
    Parser,
    UserError,
    check_writable,
    comma_separated,
    command,
    note,
    number,
    stdout_reserved,
)
from minispec.fast import quicken
from minispec.methods.autoregressive import autoregressive
from minispec.methods.fastmtp import fastmtp
from minispec.methods.lookahead import check_block, check_window, jacobi, lookahead
from minispec.methods.medusa import checked_tree, medusa, medusa_typical
from minispec.methods.prompt_lookup import prompt_lookup
from minispec.methods.speculative import speculative
from minispec.model import Transformer, count_parameters
from minispec.run import Ending, Run, without_autocast
from minispec.sampling import Randomness, Sampling, Seeded
from minispec.tokenizer import Tokenizer
from minispec.tree import Step
from minispec.view import paint, write_page

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
CHAT_ROOM = 8192  # cache rows of a chat: the context, but no more than this


# ---- from Python ---------------------------------------------------------------------------------


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
    "draft": "new_cache", "heads": "__call__", "head": "new_cache", "vocabulary": "pick",
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


# ---- the command line ----------------------------------------------------------------------------


def drafts(text: str) -> int | str:
    """What --k takes."""
    return text if text == "auto" else number(LEAST["k"])(text)


HEADED = "medusa", "medusa-typical", "fastmtp"
# flags of some methods only: which methods, what argparse makes of the value, help
FLAGS = {
    "draft": (("speculative",), str, "the draft model (default: the one beside the model)"),
    "draft_temperature": (("speculative", "fastmtp"), number(0, kind=float), "of the drafts"),
    "k": (("speculative", "prompt-lookup", "fastmtp"), drafts, "drafts a round, or auto"),
    "heads": (HEADED, str, "directory, file or hub id"),
    "tree": (("medusa", "medusa-typical"), str, "nodes, auto, a published name, a JSON file"),
    "vocabulary": (HEADED, str, "file of distill vocabulary, a .pt, or none"),
    "vocabulary_size": (HEADED, number(1), "tokens of a language at most"),
    "block": (("jacobi",), number(LEAST["block"]), "tokens guessed at once"),
    "window": (("lookahead",), number(LEAST["window"]), "W, columns of the window"),
    "ngram": (("lookahead", "prompt-lookup"), number(LEAST["ngram"]), "N; or the longest match"),
    "guesses": (("lookahead",), number(LEAST["guesses"]), "G, guesses verified in a pass"),
    "pool_from_prompt": (("lookahead",), None, "prompt and output join the pool"),
}
PLAIN = "k", "block", "window", "ngram", "guesses", "pool_from_prompt"  # under their own names


def as_flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def text(argument: str) -> str:
    """A text of the command line: in UTF-8, whatever encoding the system believes in."""
    try:
        return os.fsencode(argument).decode("utf-8")
    except UnicodeError:
        return argument


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = Parser(prog="python -m minispec.generate", description=__doc__)
    prompt = p.add_mutually_exclusive_group()
    prompt.add_argument("prompt", nargs="?", type=text, help="text to continue (default: stdin)")
    prompt.add_argument("--prompt-ids", type=token_ids, help="the prompt as token ids: 1,2,3")
    prompt.add_argument("--prompt-file", help="a UTF-8 file that holds the prompt")
    p.add_argument("--method", default="autoregressive", choices=METHODS, metavar="M",
                   help=", ".join(METHODS))
    p.add_argument("--model", default=str(WEIGHTS / "target"), help="directory, hub id or .gguf")
    some = p.add_argument_group("flags of some methods")
    for name, (methods, kind, help) in FLAGS.items():
        settings = {"type": kind} if kind else {"action": "store_const", "const": True}
        some.add_argument(as_flag(name), **settings, help=f"{', '.join(methods)}: {help}")
    p.add_argument("--chat", action="store_true",
                   help="a conversation: the prompt, if any, then a line of stdin per turn")
    p.add_argument("--system", type=text, help="with --chat: the system message")
    p.add_argument("--max-new-tokens", type=number(0), default=200)
    p.add_argument("--temperature", type=number(0, kind=float), default=0.0, help="0: greedy")
    p.add_argument("--top-k", type=number(0), default=0, help="0: off")
    p.add_argument("--top-p", type=number(0, 1, float), default=1.0, help="1: off")
    p.add_argument("--seed", type=number(-(2**63)), default=0)
    p.add_argument("--ignore-eos", action="store_true", help="go on after the model's end tokens")
    p.add_argument("--stop", type=text, action="append", default=[], metavar="S",
                   help="end before this text (repeatable)")
    p.add_argument("--device", default="auto", help="auto, cpu, cuda, mps")
    p.add_argument("--dtype", default="auto",
                   help="auto (bfloat16 on a GPU, else float32), float64, float32, bfloat16")
    p.add_argument("--quantize", choices=["int8"], help="int8 weights, of target and draft")
    p.add_argument("--compile", action="store_true", help="passes as compiled graphs, made once")
    p.add_argument("--stats", action="store_true", help="figures of the run on standard error")
    p.add_argument("--json", action="store_true", help="one JSON object instead of text")
    # two flags rather than one with a value: it must never take the prompt for its value
    p.add_argument("--color", action="store_const", const="brief",
                   help="accepted drafts green, the target's own tokens magenta")
    p.add_argument("--color=full", dest="color", action="store_const", const="full",
                   help="and the rejected drafts, struck out")
    p.add_argument("--html", metavar="FILE",
                   help="a page to step through the run, or a chat's last answer, pass by pass")
    return p.parse_args(argv)


def check_flags(args: argparse.Namespace) -> None:
    """Reject what is visibly wrong before any weights are read."""
    for name, (methods, _, _) in FLAGS.items():
        if getattr(args, name) is not None and args.method not in methods:
            raise UserError(
                f"{as_flag(name)} is for --method {' or '.join(methods)}, not for {args.method}"
            )
    Ending(args.max_new_tokens, tuple(args.stop))
    Sampling(args.temperature, args.top_k, args.top_p)
    ids_or_file = args.prompt_ids is not None or args.prompt_file is not None
    for wrong, message in (
        (args.chat and ids_or_file, "--chat takes its turns as text: give a prompt, or none"),
        (args.system is not None and not args.chat, "--system is for --chat"),
        (args.color and args.json, "--color is for text: give it without --json"),
    ):
        if wrong:
            raise UserError(message)
    if args.html is not None:
        check_writable(args.html, "--html")


def method_options(
    args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer | None
) -> dict:
    """What the command line gives to the method alone; loads its draft or heads."""
    options = {name: getattr(args, name) for name in PLAIN if getattr(args, name) is not None}
    if args.draft_temperature is not None:
        options["draft_sampling"] = Sampling(args.draft_temperature, args.top_k, args.top_p)
    if args.method in NEEDS:
        source = args.heads if args.draft is None else args.draft
        where = source, args.vocabulary, args.vocabulary_size
        options |= load_drafter(args.method, model, tokenizer, *where)
    if args.tree is not None:
        options["tree"] = read_tree_option(args.tree, options["heads"], model.config.context)
    return options


def token_ids(text: str) -> list[int]:
    """What --prompt-ids takes."""
    try:
        return list(map(int, comma_separated(text))) if text.strip() else []
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text[:40]} must be whole numbers between commas, as 1,2,3"
        ) from None


def read_prompt(args: argparse.Namespace) -> str | list[int]:
    """The prompt, from whichever source was given."""
    if args.prompt is not None or args.prompt_ids is not None:
        return args.prompt_ids if args.prompt is None else args.prompt
    if args.prompt_file is not None:
        try:
            with open(args.prompt_file, **AS_TEXT) as file:
                return file.read().removesuffix("\n")
        except OSError as error:
            raise UserError(f"--prompt-file {args.prompt_file} cannot be read: {error}") from None
    if sys.stdin is None or sys.stdin.isatty():
        raise UserError("no prompt: give a text, --prompt-ids, --prompt-file, or pipe one in")
    return sys.stdin.read().removesuffix("\n")


def show(
    run: Run, args: argparse.Namespace, tokenizer: Tokenizer | None, out: TextIO, prompt: str = ""
) -> None:
    """Print a run to `out` as it goes, after `prompt`; Ctrl-C ends it with what was produced."""
    before, shown = prompt, 0
    with contextlib.suppress(KeyboardInterrupt):
        for n, chunk in enumerate(run):
            new = "" if args.json else chunk.text
            if args.color and tokenizer:
                new = paint(chunk, tokenizer, n % 2 == 1, args.color == "full")
            print(before + new, end="", file=out, flush=True)
            before, shown = "", shown + len(chunk.text)
    if run.finish_reason is None:
        run.finish("interrupted")
        before += "" if args.json else run.text[shown:]  # it might have begun a stop string
    facts = json.dumps(run.as_json(args.model), ensure_ascii=False) if args.json else ""
    print(before + facts, file=out, flush=True)
    if args.stats:
        print(describe(run), file=sys.stderr)


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


def note_unlisted_end(
    model: Transformer, tokenizer: Tokenizer | None, args: argparse.Namespace
) -> None:
    """Print what `unlisted_end` says, unless the flags show that the user knows."""
    unlisted = unlisted_end(model, tokenizer)
    if unlisted and not args.ignore_eos and (end := tokenizer.named["eos_token"]) not in args.stop:
        note(f"{unlisted}, or add --stop {shlex.quote(end)}")


def describe(run: Run) -> str:
    """The statistics in one line of words."""
    s = run.stats
    lossy = "" if s["lossless"] else " (lossy)"
    line = (
        f"{run.method}{lossy}: {s['new_tokens']} tokens ({run.finish_reason}) "
        f"in {s['target_passes']} passes, {s['tokens_per_pass']:.2f} a pass, "
        f"{s['tokens_per_second']:.1f} tokens/s; prompt {len(run.prompt)} tokens, "
        f"{s['cached_tokens']} of them cached, {s['prefill_seconds']:.3f} s"
    )
    if s["drafted"]:
        rates = ", ".join(f"{rate:.2f}" for rate in s["acceptance"]["unconditional"])
        line += f"; {s['accepted']} of {s['drafted']} drafts accepted (by position {rates})"
    return line


@command
def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    check_flags(args)
    with stdout_reserved() if args.json else contextlib.nullcontext(sys.stdout) as out:
        generate(args, out)


def generate(args: argparse.Namespace, out: TextIO) -> None:
    """Do what the flags ask for; the text, or the JSON object, goes to `out`."""
    prompt = None if args.chat else read_prompt(args)
    model, tokenizer = load(args.model, args.dtype, args.device)
    if not args.json or args.chat:
        needed(tokenizer, model.source, "give --json, which shows token ids")
    names = "method", "max_new_tokens", "temperature", "top_k", "top_p", "ignore_eos"
    options = {name: getattr(args, name) for name in names} | {"stop": tuple(args.stop)}
    options["randomness"] = Seeded(args.seed)  # one for all turns of a chat
    options |= method_options(args, model, tokenizer)
    for each in (model, options.get("draft")):
        if each is not None:
            quicken(each, int8=args.quantize == "int8", compiled=args.compile)
    if args.chat:
        run = chat(model, tokenizer, args, options, out)
    else:
        run = stream(model, tokenizer, prompt, **options)
        note_unlisted_end(model, tokenizer, args)
        before = prompt if isinstance(prompt, str) and not args.json else ""
        show(run, args, tokenizer, out, before)
    if args.html is not None and run is not None:
        write_page(args.html, model, tokenizer, run, args.model)


# ---- chat ----------------------------------------------------------------------------------------


def chat(
    model: Transformer, tokenizer: Tokenizer, args: argparse.Namespace, options: dict, out: TextIO
) -> Run | None:
    """The prompt, if any, then turns from standard input; returns the last answer. The caches of
    the model and of a draft model stay: a turn feeds only what is new in it. If the context would
    not hold an answer, the oldest turns are forgotten."""
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    cache = model.new_cache(min(model.config.context, CHAT_ROOM))
    caches = [cache]
    if "draft" in options:
        options["draft_cache"] = options["draft"].new_cache(cache.capacity)
        caches.append(options["draft_cache"])
    room = cache.capacity - max(1, min(args.max_new_tokens, cache.capacity // 2))
    note_unlisted_end(model, tokenizer, args)
    run, messages, held = None, [], []  # the turns, and the tokens whose rows the cache holds
    for turn in user_turns(args.prompt):
        messages.append({"role": "user", "content": turn})
        while len(prompt := tokenizer.chat(system + messages)) > room and len(messages) > 1:
            messages = messages[2:]
            note("the context is full: the oldest turn is forgotten")
        if len(prompt) >= cache.capacity:
            raise UserError(
                f"the turn has {len(prompt)} tokens, the context only {cache.capacity}: shorten it"
            )
        kept = min(common_prefix(held, prompt), len(prompt) - 1)
        for each in caches:
            each.truncate(min(kept, each.length))
        run = stream(model, tokenizer, prompt, cache=cache, **options)
        show(run, args, tokenizer, out)
        messages.append({"role": "assistant", "content": run.text.strip()})
        held = (prompt + run.tokens)[: cache.length]
    return run


def user_turns(first: str | None) -> Iterator[str]:
    """`first`, if any, and lines of standard input; a prompt sign where a person types."""
    if first:
        yield first
    while sys.stdin is not None:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many leading tokens the two share."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


if __name__ == "__main__":
    main()
