"""The declaration of a method: its name, options, needs and promises, and what it is tried with.

    @method("prompt-lookup", cases=[{"k": 2}, {"k": "auto"}], bench=[{}, {"k": "auto"}])
    def prompt_lookup(model, prompt, sampling, randomness, *, cache=None, k: K = 10): ...

The registry, the flags and their help, the checks of values, what is loaded from next to the model,
bench's rows, the certifier's cases and the tests follow from this, for the methods of this package
and for those in a file of somebody's own. A function without a declaration works too: its keyword
arguments are its options.
"""

import inspect
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from typing import Annotated, get_type_hints

from minispec.cache import KVCache
from minispec.cli import UserError, number, to_number
from minispec.methods.adaptive import Policy
from minispec.methods.vocabulary import Vocabulary
from minispec.model import Transformer
from minispec.sampling import Sampling
from minispec.tree import RankPath, Step
from minispec.verify import Rule

# ---- options -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """A keyword argument of a method.

    `kind` is number (also true or false), paths (of a tree), weights (of a drafter, which lie in
    `folder` next to a model), vocabulary, sampling, rule or cache. A number must be at least
    `least` (a default may be less) and, on the command line, at most `most`. With `auto` it may
    also be "auto" or a policy, which chooses the number of drafts, of copies or of nodes, or the
    paths. An object must have the `attribute`. `flag` is the name on the command line, if it
    differs; without `help` there is no flag.
    """

    help: str = ""
    kind: str = "number"
    least: float | None = None
    most: float = 2**63 - 1
    auto: str | None = None
    attribute: str = "__class__"
    folder: str | None = None
    flag: str | None = None

    def check(self, value: object, default: object) -> object:
        """The value, with numbers as Python's own. Raises UserError if it is not of the type of the
        default, or too small."""
        is_policy = hasattr(value, "choose") and not hasattr(value, "tolist")  # NumPy's have both
        if self.auto and (is_policy or isinstance(value, str) and value == "auto"):
            return value
        if isinstance(default, int | float) or self.kind == "paths" and isinstance(value, Integral):
            value = to_number(value, float if isinstance(default, float) else int)
            if self.least is not None and value < self.least and value != default:
                raise UserError(f"must be at least {self.least}")
            return bool(value) if isinstance(default, bool) else value
        if value is not None and not hasattr(value, self.attribute):
            raise UserError(f"has the wrong type, {type(value).__name__}")
        return value.tolist() if self.kind == "paths" and hasattr(value, "tolist") else value

    def parse(self, text: str, default: object) -> object:
        """The value that a text on the command line stands for, if it is a number. Raises
        ArgumentTypeError."""
        if self.auto and text == "auto":
            return text
        if isinstance(default, bool) and text in ("true", "false"):
            return text == "true"
        if not isinstance(default, int | float):
            return text
        least = -(2**63) if self.least is None else self.least
        try:
            return number(least, self.most, float if isinstance(default, float) else int)(text)
        except ArgumentTypeError as error:
            either = "must be auto or" if self.auto else "must be"
            raise ArgumentTypeError(str(error).replace("must be", either)) from None


K = Annotated[int | Policy, Option("drafts per round, or auto", least=1, auto="drafts")]
Nodes = Annotated[
    int | Policy, Option("number of nodes of a tree, or auto", "number", 1, 999, "nodes")
]
Paths = Annotated[
    list[RankPath] | Policy | int | None,
    Option("number of nodes, auto, a published name or a JSON file", "paths", 0, auto="paths"),
]
Draft = Annotated[
    Transformer,
    Option("draft model (default: the one next to the model)", "weights", attribute="new_cache",
           folder="draft"),
]  # fmt: skip
Words = Annotated[
    Vocabulary | None,
    Option("file of `distill vocabulary`, .pt file or none", "vocabulary", attribute="select"),
]
DraftSampling = Annotated[
    Sampling | None,
    Option("temperature of the drafts", "sampling", attribute="top_p", flag="draft_temperature"),
]
Cache = Annotated[KVCache | None, Option(kind="cache")]
Verify = Annotated[
    Rule, Option("tokens or block (default)", "rule", attribute="__call__", flag="verify")
]


def head_weights(folder: str) -> Option:
    """The option of the heads that lie in this folder next to a model."""
    help = "directory, file or hub id (default: next to the model)"
    attribute = "__call__" if folder == "medusa" else "start"
    return Option(help, "weights", attribute=attribute, folder=folder, flag="heads")


# ---- methods -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """A method and its declaration.

    `cases` are the options to prove and test it with; its drafter is added, and "auto" stands for
    policies. `bench` are the rows that `minispec.bench` measures by default. `waits` is how often a
    greedy and a sampled round wait for the device (None: once per draft token and for the target),
    by the option that says what is drafted ("": any other; name=auto: if a policy chooses it).
    `checks` are functions of the model, the cache and all options, which raise UserError for sizes
    that do not fit.
    """

    name: str
    function: Callable[..., Iterator[Step]]
    lossless: bool = True
    cases: list[dict] = field(default_factory=lambda: [{}])
    bench: list[dict] = field(default_factory=lambda: [{}])
    waits: dict[str, tuple[int, int | None]] = field(default_factory=lambda: {"": (1, 1)})
    checks: tuple[Callable[[Transformer, KVCache, dict], None], ...] = ()

    @cached_property
    def options(self) -> dict[str, tuple[Option, object]]:
        """Each keyword argument but `cache`, with its default (`inspect.Parameter.empty`: none)."""
        hints = get_type_hints(self.function, include_extras=True)
        found = {}
        for name, parameter in inspect.signature(self.function).parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY and name != "cache":
                declared = getattr(hints.get(name), "__metadata__", ())
                option = next((x for x in declared if isinstance(x, Option)), Option())
                found[name] = option, parameter.default
        return found

    def of_kind(self, *kinds: str) -> dict[str, Option]:
        """The options of these kinds."""
        return {name: option for name, (option, _) in self.options.items() if option.kind in kinds}


DECLARED: dict[Callable, Method] = {}  # the declaration of each function


def method(name: str, **facts) -> Callable:
    """Declare the function below as a method. The `facts` are the fields of Method."""

    def declare(function: Callable[..., Iterator[Step]]) -> Callable[..., Iterator[Step]]:
        DECLARED[function] = Method(name, function, **facts)
        return function

    return declare
