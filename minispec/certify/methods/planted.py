"""Mistakes that are planted around a method, to show that its cases would catch them.

They need no knowledge of its code: the rule of acceptance, the cache and the target's pass, which
every method uses, are made wrong. A mistake that changes nothing for a method, such as a mask for
one that drafts chains, is not planted.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

from minispec import verify
from minispec.cache import KVCache
from minispec.certify.common import Verdict
from minispec.certify.methods import cases
from minispec.certify.toys import Toy
from minispec.methods.declaration import Method
from minispec.model import Transformer
from minispec.sampling import Randomness
from minispec.tree import Step, Tree


class Lenient:
    """Raises every chance of acceptance by half."""

    def __init__(self, randomness: Randomness):
        self.categorical, self.original = randomness.categorical, randomness

    def bernoulli(self, p: float) -> bool:
        return self.original.bernoulli(min(1.0, 1.5 * p))


def accepts_too_often(target, tree: Tree, randomness: Randomness) -> tuple:
    return verify.accept(target, tree, Lenient(randomness))


def takes_the_best_token(target, tree: Tree, randomness: Randomness) -> tuple:
    path, _, chances = verify.accept(target, tree, randomness)
    return path, int(target[path[-1]].argmax()), chances


def resamples_from_p(target, tree: Tree, randomness: Randomness) -> tuple:
    path, fresh, chances = verify.accept(target, tree, randomness)
    if tree.children(path[-1]):
        fresh = randomness.categorical(target[path[-1]])
    return path, fresh, chances


def commits_the_first_rows(self: KVCache, path: list[int]) -> None:
    self.length += len(path)


def scores_a_chain(forward: Callable) -> Callable:
    def wrong(self, tokens, cache=None, depth=None, mask=None, *more, **options):
        return forward(self, tokens, cache, None, None, *more, **options)

    return wrong


@dataclass(frozen=True)
class Plant:
    """A mistake: what is replaced, and whether a round of a method would differ."""

    name: str
    patches: tuple[tuple[object, str, object], ...]
    matters: Callable[[Step], bool]

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for owner, name, wrong in self.patches:
                stack.enter_context(mock.patch.object(owner, name, wrong))
            yield


def branches(step: Step) -> bool:
    return len(step.tree) > max(step.tree.depths) + 1


PLANTS = (
    Plant("accepts too often", ((cases, "accept", accepts_too_often),),
          lambda step: any(0 < p < 1 for p in step.chances.values())),
    Plant("after a rejection draws from p", ((cases, "accept", resamples_from_p),),
          lambda step: bool(step.tree.children(step.path[-1]))),
    Plant("the best token is the next", ((cases, "accept", takes_the_best_token),),
          lambda step: True),
    Plant("commits the first rows instead of the path",
          ((KVCache, "commit", commits_the_first_rows),),
          lambda step: step.path != list(range(len(step.path)))),
    Plant("scores a tree as a chain", (
        (Toy, "__call__", scores_a_chain(Toy.__call__)),
        (Transformer, "forward", scores_a_chain(Transformer.forward))), branches),
)  # fmt: skip


def check_planted(only: str, methods: list[Method], checks: list[Callable]) -> Iterator[Verdict]:
    """Plant each mistake in turn and run the `checks` of each method until one fails."""
    for each in methods:
        for plant in PLANTS:
            if only not in (name := f"{each.name}, {plant.name}"):
                continue
            if plant.patches[0][1] == "accept" and "rule" not in each.options:
                yield Verdict("planted", name, None, "not planted: the method takes no rule=")
                continue
            if not any(map(plant.matters, rounds_of(each))):
                yield Verdict("planted", name, None, "makes no difference for this method")
                continue
            with plant.planted():
                found = next((why for check in checks for why in failures(check, each)), None)
            detail = found or "not one of the method's cases catches it; add cases that do"
            yield Verdict("planted", name, found is not None, detail)


def failures(check: Callable, method: Method) -> Iterator[str]:
    """The rows of a check that fail; a crash is a failure, too."""
    try:
        for verdict in check(methods=[method]):
            if verdict.passed is False:
                yield f"caught by {verdict.check}: {verdict.case}"
    except Exception as error:
        yield f"caught by a {type(error).__name__}"


def rounds_of(method: Method) -> Iterator[Step]:
    """Some rounds of each of the method's cases."""
    for case in cases.exact_cases([method]):
        if case.name != "autoregressive":
            run = case.method(case.model, [*case.prompt], cases.SAMPLINGS["T=1"], cases.Seeded(1))
            yield from (step for step, _ in zip(run, range(9)) if step.tree is not None)
