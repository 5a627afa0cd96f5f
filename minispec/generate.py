"""Text from a model by any method: METHODS, stream, decode, and the command line.

python -m minispec.generate "Once upon a time" --method autoregressive --stats
"""

import argparse
import contextlib
import inspect
import json
import operator
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from numbers import Integral
from pathlib import Path
from typing import Literal
from weakref import WeakKeyDictionary

import torch

from minispec.cache import KVCache
from minispec.checkpoint import WEIGHTS, load
from minispec.cost import cost_curve, draft_cost, head_cost, heads_cost
from minispec.errors import Parser, UserError, check_seed, check_writable, command
from minispec.fast import quicken
from minispec.heads import PUBLISHED, load_medusa, load_mtp, load_vocabulary
from minispec.methods.adaptive import BestTree, Length, grow_tree
from minispec.methods.autoregressive import autoregressive
from minispec.methods.fastmtp import fastmtp
from minispec.methods.lookahead import jacobi, lookahead
from minispec.methods.medusa import Heads, Ranks, medusa, medusa_typical
from minispec.methods.prompt_lookup import prompt_lookup
from minispec.methods.speculative import speculative
from minispec.model import Transformer, count_parameters
from minispec.sampling import Randomness, Sampling, Seeded
from minispec.tokenizer import TextStream, Tokenizer
from minispec.tree import Step
from minispec.view import Painter, write_page

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
LOSSY = ("medusa-typical",)  # every other method draws as plain decoding does

TREE_ROOM = 512  # cache rows beyond the tokens asked for: room for the last window or tree
CACHE_STEP = 512  # a cache's capacity is a multiple of this: graphs on a GPU are made for each
CHAT_ROOM = 8192  # cache rows of a chat: the context, but no more than this


@dataclass(frozen=True)
class Chunk:
    """What one round adds to the output."""

    text: str
    tokens: list[int]
    step: Step


@dataclass(frozen=True)
class Ending:
    """What ends a run: a number of tokens, end tokens, stop strings."""

    max_new_tokens: int = 200
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        if not isinstance(self.max_new_tokens, Integral):
            raise UserError(f"max-new-tokens {self.max_new_tokens}: must be a whole number")
        if self.max_new_tokens < 0:
            raise UserError(f"max-new-tokens {self.max_new_tokens}: must not be negative")
        if "" in self.stop:
            raise UserError("a stop string must not be empty")


class Run:
    """One generation. Iterate over it for Chunks; what was produced so far is always in it.

    EOS, stop strings, lengths, the context limit and the statistics live here and nowhere else,
    and cut inside an accepted block exactly where plain decoding would have stopped.
    """

    def __init__(
        self, method: str, prompt: list[int], steps: Iterator[Step], cache: KVCache,
        ending: Ending, eos_ids: tuple[int, ...], decoder: TextStream | None, extra_parameters: int,
        sampling: Sampling,
    ):  # fmt: skip
        self.method, self.prompt, self.steps, self.cache = method, prompt, steps, cache
        self.ending, self.decoder, self.sampling = ending, decoder, sampling
        self.eos_ids = () if ending.ignore_eos else eos_ids
        self.cached_tokens, self.extra_parameters = cache.length, extra_parameters
        self.tokens: list[int] = []
        self.text = ""
        self.held = ""  # decoded, but maybe the beginning of a stop string
        self.finish_reason: str | None = None
        self.rounds: list[Step] = []
        self.prefill_seconds = self.decode_seconds = 0.0
        self.chunks = self.run()

    def __iter__(self) -> Iterator[Chunk]:
        return self.chunks

    @torch.inference_mode()  # cheaper operators than under no_grad
    def run(self) -> Iterator[Chunk]:
        """Round after round, each cut where the run ends."""
        begin = time.perf_counter()
        next(self.steps)  # the prefill
        self.prefill_seconds = time.perf_counter() - begin
        if self.ending.max_new_tokens == 0:
            self.finish("length")
        while self.finish_reason is None:
            begin = time.perf_counter()
            step = next(self.steps)
            self.decode_seconds += time.perf_counter() - begin
            self.rounds.append(step)
            yield self.take(step)

    def take(self, step: Step) -> Chunk:
        """Append the step's tokens up to the first that ends the run."""
        before = len(self.tokens), len(self.text)
        for token in step.tokens:
            self.tokens.append(token)
            reason = self.end_after(token)
            if reason:
                self.finish(reason)
                break
        return Chunk(self.text[before[1] :], self.tokens[before[0] :], step)

    def end_after(self, token: int) -> str | None:
        """Show the token's text as far as it is safe; the reason to stop here, if there is one."""
        if token in self.eos_ids:
            return "eos"
        self.held += self.decoder.push(token) if self.decoder else ""
        found = min((at for at in map(self.held.find, self.ending.stop) if at >= 0), default=None)
        if found is not None:
            self.text, self.held = self.text + self.held[:found], ""
            return "stop"
        safe = len(self.held) - longest_overlap(self.held, self.ending.stop)
        self.text, self.held = self.text + self.held[:safe], self.held[safe:]
        if len(self.tokens) == self.ending.max_new_tokens:
            return "length"
        if len(self.prompt) + len(self.tokens) == self.cache.capacity:
            return "context"
        return None

    def finish(self, reason: str) -> None:
        """End here: show the text held back, and leave in the cache rows of emitted tokens only,
        so that it serves the next turn."""
        self.finish_reason = reason
        if reason != "stop":
            self.text += self.held + (self.decoder.flush() if self.decoder else "")
        kept = len(self.prompt) + len(self.tokens) - 1
        self.cache.truncate(min(self.cache.length, kept))

    @property
    def stats(self) -> dict:
        """The figures that --json and --stats report: seconds, tokens and passes."""
        passes, new = len(self.rounds), len(self.tokens)
        drafted = sum(len(step.tree) - 1 for step in self.rounds)
        return {
            "target_passes": passes,
            "new_tokens": new,
            "tokens_per_pass": new / passes if passes else 0.0,
            "drafted": drafted,
            "accepted": sum(len(step.path) - 1 for step in self.rounds),
            "acceptance": acceptance(self.rounds),
            "cached_tokens": self.cached_tokens,
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "tokens_per_second": new / self.decode_seconds if self.decode_seconds else 0.0,
            "extra_parameters": self.extra_parameters,
            "peak_memory_bytes": peak_memory(self.cache.device),
            "lossless": self.method not in LOSSY,
            **asdict(self.sampling),
        }

    def as_json(self, model_name: str) -> dict:
        return {
            "method": self.method,
            "model": model_name,
            "prompt_tokens": len(self.prompt),
            "prompt_ids": self.prompt,
            "tokens": self.tokens,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "stats": self.stats,
        }


def peak_memory(device: torch.device) -> int | None:
    """The most bytes held so far: of a GPU's memory, else by this process; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def longest_overlap(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that begins one of `stops`."""
    return max(
        (
            n
            for stop in stops
            for n in range(1, min(len(stop), len(text) + 1))
            if text.endswith(stop[:n])
        ),
        default=0,
    )


def acceptance(rounds: list[Step]) -> dict[str, list[float]]:
    """Share of drafts accepted at depth 1, 2, …: of the rounds that drafted so deep, and
    (conditional) of those of them that had accepted the depth before."""
    deepest = [max(step.tree.depths) for step in rounds]
    unconditional, conditional = [], []
    for depth in range(1, max(deepest, default=0) + 1):
        lengths = [len(step.path) - 1 for step, d in zip(rounds, deepest) if d >= depth]
        accepted, reached = (sum(n >= k for n in lengths) for k in (depth, depth - 1))
        unconditional.append(accepted / len(lengths))
        conditional.append(accepted / reached if reached else 0.0)
    return {"unconditional": unconditional, "conditional": conditional}


def as_prompt(
    model: Transformer, tokenizer: Tokenizer | None, prompt: str | Iterable[int]
) -> list[int]:
    """Token ids of a prompt: in range, at least one, with room for an answer."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UserError(
                "this model has no tokenizer.json: give the prompt as token ids (--prompt-ids)"
            )
        ids = tokenizer.encode(prompt)
    else:
        try:
            ids = [operator.index(token) for token in prompt]
        except TypeError:
            raise UserError(
                "a prompt must be text, or one sequence of token ids: a list, a tuple, or integers "
                "of numpy or torch in one dimension"
            ) from None
    if not ids and model.config.bos_id is not None:
        ids = [model.config.bos_id]
    if not ids:
        raise UserError(
            "the prompt is empty, and this model has no BOS token to begin with: give it some text"
        )
    wrong = [i for i in ids if not 0 <= i < model.config.vocab_size]
    if wrong:
        raise UserError(
            f"prompt id {wrong[0]} is out of range: the vocabulary has "
            f"{model.config.vocab_size} ids"
        )
    if len(ids) >= model.config.context:
        raise UserError(
            f"the prompt has {len(ids)} tokens, the context only {model.config.context}: shorten it"
        )
    return ids


def stream(
    model: Transformer,
    tokenizer: Tokenizer | None,
    prompt: str | Iterable[int],
    method: str = "autoregressive",
    *,
    max_new_tokens: int = 200,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    randomness: Randomness | None = None,
    stop: str | tuple[str, ...] = (),
    ignore_eos: bool = False,
    cache: KVCache | None = None,
    **options,
) -> Run:
    """Begin a run: iterate over it for text as it comes.

    `prompt` is text or token ids. `options` are the method's own; a draft or heads that are not
    given are looked for beside the model, k or tree "auto" becomes a policy made for this machine.
    A `cache` given holds the rows of a proper prefix of the prompt and is left holding those of
    prompt and output; its capacity, at most the context, bounds both. Raises UserError for what
    cannot be run.
    """
    decode_step = method_named(method)
    ending, sampling = (
        Ending(max_new_tokens, (stop,) if isinstance(stop, str) else tuple(stop), ignore_eos),
        Sampling(temperature, top_k, top_p),
    )
    if stop and tokenizer is None:
        raise UserError("stop strings need a tokenizer.json, which this model lacks")
    ids = as_prompt(model, tokenizer, prompt)
    context = model.config.context
    if cache is None:
        rows = len(ids) + max_new_tokens + TREE_ROOM
        cache = model.new_cache(min(context, -(-rows // CACHE_STEP) * CACHE_STEP))
    if not goes_with(cache, model):
        raise UserError("the cache is another model's or a batch's: make it by model.new_cache()")
    if cache.length >= len(ids) or not len(ids) < cache.capacity <= context:
        raise UserError(
            f"a cache of {cache.length} rows and room for {cache.capacity} does not go with a "
            f"prompt of {len(ids)} tokens and a context of {context}: truncate it, or make another"
        )
    options = with_beside(method, model, tokenizer, options)
    try:
        inspect.signature(decode_step).bind(model, ids, sampling, None, cache=cache, **options)
    except TypeError as error:
        raise UserError(f"{method}: {error}") from None
    options = checked(method, with_policies(method, model, options))
    steps = decode_step(model, ids, sampling, randomness or Seeded(seed), cache=cache, **options)
    decoder = tokenizer.stream(ids) if tokenizer else None
    extra = sum(count_parameters(v) for v in options.values() if isinstance(v, torch.nn.Module))
    return Run(method, ids, steps, cache, ending, model.config.eos_ids, decoder, extra, sampling)


def goes_with(cache: KVCache, model: Transformer) -> bool:
    """Whether it holds one sequence's rows such as the model makes."""
    c, keys = model.config, cache.k[0]
    its = len(cache.lengths), len(cache.k), *keys.shape[2:], keys.dtype, keys.device.type
    return its == (1, c.layers, c.kv_heads, c.head_dim, model.dtype, model.device.type)


# what a method needs beside its model: the argument, and the folder it is shipped in
NEEDS = {
    "speculative": ("draft", "draft"),
    "medusa": ("heads", "medusa"),
    "medusa-typical": ("heads", "medusa"),
    "fastmtp": ("head", "mtp"),
}
beside: WeakKeyDictionary = WeakKeyDictionary()  # model -> what was loaded from beside it


def with_beside(
    method: str, model: Transformer, tokenizer: Tokenizer | None, options: dict
) -> dict:
    """The options, with the draft or heads that lie beside the model where they lack one."""
    argument, folder = NEEDS.get(method, (None, None))
    if argument is None or options.get(argument) is not None:
        return options
    known = beside.setdefault(model, {})
    key = folder, model.device, model.dtype, tokenizer is None
    if key not in known:
        known[key] = load_beside(method, model, tokenizer)
    return known[key] | {name: value for name, value in options.items() if name != argument}


def with_policies(method: str, model: Transformer, options: dict) -> dict:
    """The options, with policies for this machine in the place of "auto"."""
    policies = {}
    if options.get("k") == "auto" and method == "speculative":
        cost = draft_cost(model, options["draft"])
        policies["k"] = Length(cost_curve(model), cost)
    if options.get("k") == "auto" and method == "fastmtp":
        cost = head_cost(model, options["head"], options.get("vocabulary"))
        policies["k"] = Length(cost_curve(model), cost, most=8)
    if options.get("tree") == "auto":
        policies["tree"] = BestTree(cost_curve(model), heads_cost(model, options["heads"]))
    return options | policies


# what an option that is an object must have to be one
MARKS = {"draft": "new_cache", "heads": "__call__", "head": "new_cache", "draft_sampling": "top_p"}


def checked(method: str, options: dict) -> dict:
    """The options, numbers as Python's ints; raises UserError for one of a wrong type."""
    defaults, result = inspect.signature(METHODS[method]).parameters, dict(options)
    for name, value in options.items():
        whole = isinstance(defaults[name].default, int)
        policy = name == "k" and method in ("speculative", "fastmtp") and hasattr(value, "choose")
        if name in MARKS:
            wrong = value is not defaults[name].default and not hasattr(value, MARKS[name])
        else:
            wrong = isinstance(value, str) or whole and not (isinstance(value, Integral) or policy)
        if wrong:
            must = "must be a whole number" if whole else f"is no {name.replace('_', ' ')}"
            raise UserError(f"{method}: {name} {value!r}: {must}")
        if isinstance(value, Integral):  # numpy's, too
            result[name] = int(value)
    return result


def found_beside(method: str, model: Transformer) -> Path:
    """The folder of the draft or heads beside the model's (as under weights/), or in its own."""
    argument, folder = NEEDS[method]
    source = getattr(model, "source", None)
    places = [] if source is None else [source / folder, source.parent / folder]
    if source and method == "fastmtp" and model.config.model_type == "mimo":
        places.insert(0, source)  # its checkpoints hold their own head
    place = next((place for place in places if (place / "config.json").exists()), None)
    if place is None:
        where = f", and there is no folder {folder} beside {source}" if source else ""
        flag = "heads" if argument == "head" else argument
        raise UserError(f"{method} needs {argument}=, on the command line --{flag} DIR{where}")
    return place


def load_beside(method: str, model: Transformer, tokenizer: Tokenizer | None) -> dict:
    """What is in `found_beside`, as the method's options."""
    place = found_beside(method, model)
    if method == "speculative":
        return {"draft": load_draft(str(place), model, tokenizer)}
    if method == "fastmtp":
        return load_head_and_words(str(place), model, tokenizer)
    return {"heads": load_medusa(place, model, tokenizer)}


def load_draft(name: str, model: Transformer, tokenizer: Tokenizer | None) -> Transformer:
    """A draft for `model`, of its tokens."""
    draft, its_tokenizer = load(name, model.dtype, str(model.device))
    check_vocabularies(tokenizer, its_tokenizer, model, draft)
    return draft


def load_head_and_words(
    name: str, model: Transformer, tokenizer: Tokenizer | None, file: str | None = None,
    size: int | None = None,
) -> dict:  # fmt: skip
    """FastMTP's head, and its vocabulary: that of a file ("none": the full one), by default the one
    beside the head, if there is one."""
    folder = Path(name).parent if Path(name).is_file() else Path(name)
    if file is None and (folder / "vocabulary.json").exists():
        file = str(folder / "vocabulary.json")
    if file in (None, "none"):
        if size is not None:
            raise UserError("--vocabulary-size needs a --vocabulary")
        words = None
    else:
        words = load_vocabulary(file, model, tokenizer, size)
    return {"head": load_mtp(name, model, tokenizer), "vocabulary": words}


def method_named(name: str) -> Callable[..., Iterator[Step]]:
    """The method called so on the command line."""
    if name not in METHODS:
        raise UserError(f"unknown method {name!r}: use one of {', '.join(METHODS)}")
    return METHODS[name]


def decode(
    model: Transformer,
    tokenizer: Tokenizer | None,
    prompt: str | Iterable[int],
    method: str = "autoregressive",
    **options,
) -> Run:
    """`stream`, run to its end: .text, .tokens, .finish_reason, .stats."""
    run = stream(model, tokenizer, prompt, method, **options)
    for _ in run:
        pass
    return run


# ---- command line --------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = Parser(prog="python -m minispec.generate", description=__doc__.split("\n\n")[0])
    p.add_argument(
        "prompt", nargs="?", help="text to continue (absent: --prompt-ids, --prompt-file or stdin)"
    )
    p.add_argument("--method", default="autoregressive", help=", ".join(METHODS))
    p.add_argument(
        "--model", default=str(WEIGHTS / "target"), help="checkpoint directory or hub id"
    )
    method_flags(p)
    p.add_argument("--prompt-ids", help="the prompt as token ids: 1,2,3")
    p.add_argument("--prompt-file", help="a UTF-8 file that holds the prompt")
    p.add_argument(
        "--chat", action="store_true", help="a conversation: one line of standard input per turn"
    )
    p.add_argument("--max-new-tokens", type=int, default=200)
    p.add_argument("--temperature", type=float, default=0.0, help="0 (default): greedy")
    p.add_argument("--top-k", type=int, default=0, help="0 (default): off")
    p.add_argument("--top-p", type=float, default=1.0, help="1 (default): off")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--ignore-eos", action="store_true", help="go on after the model's end tokens")
    p.add_argument(
        "--stop", action="append", default=[], metavar="S", help="end before this text (repeatable)"
    )
    p.add_argument("--device", default="auto", help="auto, cpu, cuda, mps")
    p.add_argument(
        "--dtype",
        default="auto",
        help="auto (bfloat16 on a GPU, else float32), float64, float32, bfloat16",
    )
    p.add_argument("--quantize", choices=["int8"], help="int8 weights, of target and draft")
    p.add_argument(
        "--compile", action="store_true", help="passes as compiled graphs: minutes, but only once"
    )
    output_flags(p)
    return p.parse_args(argv)


def method_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags that belong to some methods only; FLAGS says to which."""
    p.add_argument("--draft", help="speculative: the draft (default: the one beside the model)")
    p.add_argument("--draft-temperature", type=float,
                   help="speculative, fastmtp: default as --temperature")  # fmt: skip
    p.add_argument("--k", help="drafts a round: a number, or auto (speculative, fastmtp)")
    p.add_argument("--heads", help="medusa, fastmtp: directory, file or hub id (default: as draft)")
    p.add_argument("--tree", help="medusa: nodes, auto, a published name, or a JSON file of paths")
    p.add_argument("--vocabulary", help="fastmtp: file of distill vocabulary, a .pt, or none")
    p.add_argument("--vocabulary-size", type=int, help="fastmtp: tokens of a language at most")
    p.add_argument("--block", type=int, help="jacobi: tokens guessed at once")
    p.add_argument("--window", type=int, help="lookahead: W, columns of the window")
    p.add_argument("--ngram", type=int, help="lookahead: N; prompt-lookup: the longest match")
    p.add_argument("--guesses", type=int, help="lookahead: G, guesses verified in a pass")
    p.add_argument("--pool-from-prompt", action="store_true", default=None,
                   help="lookahead: prompt and output join the pool")  # fmt: skip


def output_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags that say what is shown of a run."""
    p.add_argument("--stats", action="store_true", help="figures of the run on standard error")
    p.add_argument("--json", action="store_true", help="one JSON object instead of text")
    # two flags rather than one with a value: it must never take the prompt for its value
    p.add_argument(
        "--color", action="store_const", const="brief",
        help="accepted drafts green, the target's own tokens magenta, every other pass underlined",
    )  # fmt: skip
    p.add_argument("--color=full", dest="color", action="store_const", const="full",
                   help="and the rejected drafts, struck out")  # fmt: skip
    p.add_argument("--html", metavar="FILE", help="a page to step through the run, pass by pass")


# the flags that belong to some methods only
FLAGS = {
    "draft": ("speculative",),
    "draft_temperature": ("speculative", "fastmtp"),
    "k": ("speculative", "prompt-lookup", "fastmtp"),
    "heads": ("medusa", "medusa-typical", "fastmtp"),
    "tree": ("medusa", "medusa-typical"),
    "vocabulary": ("fastmtp",),
    "vocabulary_size": ("fastmtp",),
    "block": ("jacobi",),
    "window": ("lookahead",),
    "ngram": ("lookahead", "prompt-lookup"),
    "guesses": ("lookahead",),
    "pool_from_prompt": ("lookahead",),
}
PLAIN = "k", "block", "window", "ngram", "guesses", "pool_from_prompt"  # under their own names


def check_flags(args: argparse.Namespace) -> None:
    """Reject what is visibly wrong before any weights are read."""
    method_named(args.method)
    Ending(args.max_new_tokens, tuple(args.stop))
    Sampling(args.temperature, args.top_k, args.top_p)
    for flag, methods in FLAGS.items():
        if getattr(args, flag) is not None and args.method not in methods:
            raise UserError(
                f"--{flag.replace('_', '-')} is for --method {' or '.join(methods)}, "
                f"not for {args.method}"
            )
    if args.chat and (args.prompt_ids is not None or args.prompt_file is not None):
        raise UserError(
            "--chat takes its turns from standard input, not from --prompt-ids or -file"
        )
    if args.color and args.json:
        raise UserError("--color is for text: give it without --json")
    if args.color and args.prompt == "full":
        raise UserError("--color full: write --color=full (a prompt `full` goes in --prompt-file)")
    if args.html is not None:
        if args.chat:
            raise UserError("--html shows one run: give it without --chat")
        check_writable(args.html, "--html")
    check_seed(args.seed, -(2**63))
    auto = args.method in ("speculative", "fastmtp")
    if args.k is not None and not (args.k == "auto" and auto):
        try:
            args.k = int(args.k)
        except ValueError:
            raise UserError(f"--k {args.k}: must be a number{', or auto' * auto}") from None
        if args.k < 1:
            raise UserError(f"--k {args.k}: must be at least 1")


def method_options(
    args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer | None
) -> dict:
    """What the command line gives to the method alone; loads its draft or heads."""
    options = {name: getattr(args, name) for name in PLAIN if getattr(args, name) is not None}
    if args.draft_temperature is not None:
        options["draft_sampling"] = Sampling(args.draft_temperature, args.top_k, args.top_p)
    if args.draft is not None:
        options["draft"] = load_draft(args.draft, model, tokenizer)
    if args.heads is not None and args.method != "fastmtp":
        options["heads"] = load_medusa(args.heads, model, tokenizer)
    if args.method == "fastmtp":
        name = args.heads or str(found_beside(args.method, model))
        words = args.vocabulary, args.vocabulary_size
        options |= load_head_and_words(name, model, tokenizer, *words)
    options = with_beside(args.method, model, tokenizer, options)
    if args.tree is not None:
        options["tree"] = read_tree_option(args.tree, options["heads"], model.config.context)
    return options


def read_tree_option(value: str, heads: Heads, most: int) -> list[Ranks] | Literal["auto"]:
    """What --tree means: a list of paths, or "auto". A number grows a tree of so many nodes, `most`
    at most: more never fit."""
    if value == "auto":
        return value
    if value.isdecimal():
        if heads.accuracy is None:
            raise UserError(
                f"--tree {value}: these heads came without accuracies to grow a tree by: measure "
                "them with minispec.distill tree, or take --tree auto, which needs none"
            )
        return grow_tree(heads.accuracy, min(int(value), most))
    if value in PUBLISHED:
        return PUBLISHED[value]
    try:
        paths = json.loads(Path(value).read_text(encoding="utf-8"))
        return [tuple(path) for path in paths]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"--tree {value}: neither auto, nor a number of nodes, nor one of "
            f"{', '.join(PUBLISHED)}, nor a JSON file of paths like [[0], [0, 0], [1]] ({error})"
        ) from None


def check_vocabularies(
    tokenizer: Tokenizer | None, other: Tokenizer | None, model: Transformer, draft: Transformer
) -> None:
    """Refuse a draft with a different vocabulary; padding rows do not count."""
    if tokenizer and other:
        ours, theirs = tokenizer.backend.get_vocab(), other.backend.get_vocab()
        differ = [
            token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)
        ]
        if differ:
            token = min(differ)
            raise UserError(
                f"the draft's vocabulary differs from the target's in {len(differ)} tokens (as "
                f"{token!r}: {theirs.get(token)} instead of {ours.get(token)}): use a draft with "
                "the target's tokenizer"
            )
    elif model.config.vocab_size != draft.config.vocab_size:
        raise UserError(
            f"the draft has {draft.config.vocab_size} tokens, the target {model.config.vocab_size}"
            ", and without both tokenizers there is no way to tell whether that is padding"
        )


def read_prompt(args: argparse.Namespace) -> str | list[int]:
    """The prompt from whichever source was given, exactly one of them."""
    given = [
        name for name in ("prompt", "prompt_ids", "prompt_file") if getattr(args, name) is not None
    ]
    if len(given) > 1:
        names = {"prompt": "a text", "prompt_ids": "--prompt-ids", "prompt_file": "--prompt-file"}
        raise UserError(f"give one prompt, not {' and '.join(names[g] for g in given)}")
    if args.prompt is not None:
        return args.prompt
    if args.prompt_ids is not None:
        try:
            return [int(part) for part in args.prompt_ids.split(",") if part.strip()]
        except ValueError:
            raise UserError(
                f"--prompt-ids {args.prompt_ids!r}: must be integers between commas: 1,2,3"
            ) from None
    if args.prompt_file is not None:
        return read_text(args.prompt_file, "the prompt file").removesuffix("\n")
    if sys.stdin is None or sys.stdin.isatty():
        raise UserError("no prompt: give a text, --prompt-ids, --prompt-file, or pipe one in")
    return sys.stdin.read().removesuffix("\n")


def read_text(file: str, what: str) -> str:
    """A file of the user's, in UTF-8; some editors put a mark before it."""
    try:
        return Path(file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{what} {file} cannot be read: {error}") from None


def show(run: Run, args: argparse.Namespace, tokenizer: Tokenizer | None, prompt: str = "") -> None:
    """Print a run as it goes, behind `prompt`, once the method has taken its options; Ctrl-C ends
    it with what was produced."""
    color = args.color and tokenizer
    painter = Painter(tokenizer, run.prompt, args.color == "full") if color else None
    before, shown = prompt, 0
    with contextlib.suppress(KeyboardInterrupt):
        for chunk in run:
            text, before, shown = before, "", shown + len(chunk.text)
            if painter:
                text += painter.paint(chunk.step, chunk.tokens, chunk.text)
            elif not args.json:
                text += chunk.text
            print(text, end="", flush=True)
    if run.finish_reason is None:
        run.finish("interrupted")
        if not args.json:  # what was held back, as it might have begun a stop string
            before += run.text[shown:]
    facts = json.dumps(run.as_json(args.model), ensure_ascii=False) if args.json else ""
    print(before + facts, flush=True)
    if args.stats:
        print(describe(run), file=sys.stderr)


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
    if s["extra_parameters"]:
        line += f"; {s['extra_parameters']:,} extra parameters"
    if s["peak_memory_bytes"]:
        line += f"; peak memory {s['peak_memory_bytes'] / 2**20:.0f} MiB"
    return line


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many leading tokens the two share."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def chat(
    model: Transformer, tokenizer: Tokenizer | None, args: argparse.Namespace, options: dict
) -> None:
    """Turns from standard input. The cache stays: a turn feeds only what is new in it."""
    if tokenizer is None:
        raise UserError("--chat needs a tokenizer.json, which this model lacks")
    cache = model.new_cache(min(model.config.context, CHAT_ROOM))
    messages, held = [], []  # the conversation, and the tokens whose rows the cache holds
    for turn in user_turns() if args.prompt is None else [args.prompt]:
        messages.append({"role": "user", "content": turn})
        prompt = tokenizer.chat(messages)
        cache.truncate(min(common_prefix(held, prompt), cache.length, len(prompt) - 1))
        if len(prompt) >= cache.capacity:
            raise UserError(
                f"the conversation has {len(prompt)} tokens, the context only {cache.capacity}: "
                "begin a new one"
            )
        run = stream(model, tokenizer, prompt, cache=cache, **options)
        show(run, args, tokenizer)
        messages.append({"role": "assistant", "content": run.text.strip()})
        held = (prompt + run.tokens)[: cache.length]


def user_turns() -> Iterator[str]:
    """Lines of standard input until its end; a prompt sign where a person types."""
    while sys.stdin is not None:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


@command
def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    check_flags(args)
    options = {
        "method": args.method,
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "randomness": Seeded(args.seed),  # one for all turns of a chat
        "stop": tuple(args.stop),
        "ignore_eos": args.ignore_eos,
    }
    prompt = None if args.chat else read_prompt(args)
    model, tokenizer = load(args.model, args.dtype, args.device)
    if tokenizer is None and not (args.json or args.chat):
        raise UserError("this model has no tokenizer.json: give --json, which shows token ids")
    options |= method_options(args, model, tokenizer)
    for each in (model, options.get("draft")):
        if each is not None:
            quicken(each, int8=args.quantize == "int8", compiled=args.compile)
    if args.chat:
        chat(model, tokenizer, args, options)
    else:
        run = stream(model, tokenizer, prompt, **options)
        show(run, args, tokenizer, prompt if isinstance(prompt, str) and not args.json else "")
        if args.html is not None:
            facts = run.as_json(args.model)
            write_page(args.html, model, tokenizer, run.rounds, facts, run.sampling)


if __name__ == "__main__":
    main()
