"""Mistakes planted in every method, where they make a difference: some test catches each."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import pytest
import test_devices
import test_lossless
import test_rounds
import test_together
import torch
from half_right import half_right_cases, repeating_model

from minispec.cache import KVCache
from minispec.certify.methods import cases
from minispec.generate import METHODS
from minispec.methods import find_method, lookahead
from minispec.methods.declaration import Method
from minispec.sampling import Sampling, Seeded
from minispec.tree import Step, Tree
from minispec.verify import accept

shelf, partly_accepted = test_together.shelf, test_together.partly_accepted  # fixtures


# ---- mistakes around a method --------------------------------------------------------------------


def around(function: Callable, begin: Callable, each_round: Callable) -> Callable:
    """The method, with a mistake before a run, begin(model, prompt, options), and one after each of
    its rounds, each_round(model, cache)."""

    @functools.wraps(function)
    def wrong(model, prompt, sampling, randomness, *, cache=None, **options):
        cache = cache or model.new_cache()
        options = options | (begin(model, cache, options) or {})
        for step in function(model, prompt, sampling, randomness, cache=cache, **options):
            yield step
            each_round(model, cache)

    return wrong


def nothing(*_) -> None:
    pass


def rows_of_the_next_nodes(model, cache: KVCache) -> None:
    """After the prefill: a path's rows are those of the nodes after it."""
    if "commit" not in vars(cache):
        cache.commit = lambda path: commit_from(cache, [i + 1 for i in path])


def first_rows(model, cache: KVCache) -> None:
    """The first rows are committed, whatever the path."""
    if "commit" not in vars(cache):
        cache.commit = lambda path: KVCache.commit(cache, list(range(len(path))))


def commit_from(cache: KVCache, rows: list[int]) -> None:
    KVCache.commit(cache, rows if rows[-1] < cache.free_rows else list(range(len(rows))))


def wait(model, cache: KVCache) -> None:
    if hasattr(model, "parameters"):
        next(model.parameters()).flatten()[0].item()


def kept_rows() -> Callable:
    """The rows of the previous run stay in the target's cache."""
    last: list[KVCache] = []

    def begin(model, cache: KVCache, options: dict) -> None:
        if last and cache.length == 0 and last[0].kv.shape == cache.kv.shape:
            cache.kv.copy_(last[0].kv)
            cache.length = last[0].length
        last[:] = [cache]

    return begin


def kept_draft_cache() -> Callable:
    """The draft model's cache is that of the previous run."""
    last: list[KVCache] = []

    def begin(model, cache: KVCache, options: dict) -> dict:
        draft = options.get("draft")
        if draft is None or options.get("draft_cache"):
            return {}
        last[:] = last or [draft.new_cache(cache.capacity)]
        return {"draft_cache": last[0]}

    return begin


def with_rule(wrong: Callable) -> Callable:
    """Another rule: wrong(rule) of the one that the method was given."""
    return lambda model, cache, options: {"rule": wrong(options.get("rule", accept))}


def best_token_next(rule: Callable) -> Callable:
    def wrong(target, tree, randomness):
        path, *_ = rule(target, tree, randomness)
        return path, int(target[path[-1]].argmax()), {}

    return wrong


def draft_next(rule: Callable) -> Callable:
    """A rejected draft is the next token."""

    def wrong(target, tree, randomness):
        path, fresh, *_ = rule(target, tree, randomness)
        children = tree.children(path[-1])
        return path, tree.tokens[children[0]] if children else fresh, {}

    return wrong


def remembered(make: Callable) -> Callable:
    """Always the first object that was made."""
    return functools.cache(lambda *arguments: make(*arguments))


# ---- mistakes in what methods share --------------------------------------------------------------

from_paths, after, children, free_rows = (
    Tree.from_paths.__func__, lookahead.Pool.after, Tree.children, KVCache.free_rows
)  # fmt: skip
WORST_FIRST = [
    (Tree, "from_paths", classmethod(lambda cls, root, paths, candidates: from_paths(
        cls, root, paths, [row[::-1] for row in candidates]))),
    (lookahead.Pool, "after", lambda self, token: after(self, token)[::-1]),
]  # fmt: skip
AS_A_CHAIN = [
    (Tree, "depth", property(lambda tree: torch.arange(len(tree)))),
    (Tree, "mask", property(lambda tree: torch.ones(len(tree), len(tree)).bool().tril())),
]
REVERSED = [(Tree, "children", lambda self, node: children(self, node)[::-1])]
ROW_TOO_MANY = [(KVCache, "free_rows", property(lambda self: free_rows.fget(self) + 1))]
KEPT_TEXTS = "NgramIndex", "Pool"  # what methods remember of a text


@dataclass(frozen=True)
class Mistake:
    """What is replaced, what is put around the method, and whether it makes a difference, by the
    method's declaration and some of its rounds."""

    name: str
    matters: Callable[[Method, list[Step]], bool]
    patches: list[tuple[object, str, object]] | Callable = ()
    begin: Callable = lambda: nothing  # a function, as it may keep a state
    each_round: Callable = nothing

    @contextlib.contextmanager
    def planted(self, method: str) -> Iterator[None]:
        wrong = around(METHODS[method], self.begin(), self.each_round)
        patches = self.patches(method) if callable(self.patches) else self.patches
        with contextlib.ExitStack() as stack:
            for owner, name, mistake in patches:
                stack.enter_context(mock.patch.object(owner, name, mistake))
            stack.enter_context(mock.patch.dict(METHODS, {method: wrong}))
            yield


def texts_of(method: str) -> list[tuple[object, str, object]]:
    module = sys.modules[METHODS[method].__module__]
    return [(module, name, remembered(getattr(module, name)))
            for name in KEPT_TEXTS if hasattr(module, name)]  # fmt: skip


def remembers(method: Method, _) -> bool:
    """Whether its runs make one of KEPT_TEXTS."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(mock.patch.object(module, name))
                for module, name, _ in texts_of(method.name)]  # fmt: skip
        with contextlib.suppress(Exception):
            rounds_of.__wrapped__(method.name)
        return any(each.called for each in made)


def branch(method: Method, steps: list[Step]) -> bool:
    return any(len(step.tree) > max(step.tree.depths) + 1 for step in steps)


def move(method: Method, steps: list[Step]) -> bool:
    return any(step.path != list(range(len(step.path))) for step in steps)


def drafts(method: Method, steps: list[Step]) -> bool:
    return any(len(step.tree) > 1 for step in steps)


def ruled(method: Method, steps: list[Step]) -> bool:
    return "rule" in method.options


def ranked(method: Method, steps: list[Step]) -> bool:
    """Whether its candidates are those of WORST_FIRST."""
    module = sys.modules[method.function.__module__]
    return branch(method, steps) and (module is lookahead and "window" in method.options
                                      or "medusa" in folders(method))  # fmt: skip


def folders(method: Method) -> set[str]:
    return {option.folder for option in method.of_kind("weights").values()}


MISTAKES = [
    Mistake("tree scored as a chain", branch, AS_A_CHAIN),
    Mistake("first rows committed", move, each_round=first_rows),
    Mistake("rows of the next nodes committed", lambda *_: True,
            each_round=rows_of_the_next_nodes),
    Mistake("best token next", ruled, begin=lambda: with_rule(best_token_next)),
    Mistake("rejected draft next", lambda *x: ruled(*x) and drafts(*x),
            begin=lambda: with_rule(draft_next)),
    Mistake("rows kept between runs", lambda *_: True, begin=kept_rows),
    Mistake("draft's rows kept between runs",
            lambda method, _: "draft_cache" in method.of_kind("cache"), begin=kept_draft_cache),
    Mistake("text kept between runs", remembers, texts_of),
    Mistake("one row too many at the end", drafts, ROW_TOO_MANY),
    Mistake("one wait too many", lambda *_: True, each_round=wait),
    Mistake("siblings tried in reverse", lambda *x: branch(*x) and ruled(*x), REVERSED),
    Mistake("worst candidates first", ranked, WORST_FIRST),
]


def ignored(option: str) -> Mistake:
    """The mistake that an option is ignored."""

    def begin(model, cache, options: dict) -> dict:
        options.pop(option, None)
        return {}

    return Mistake(f"{option} ignored", lambda *_: True, begin=lambda: begin)


@functools.cache
def rounds_of(method: str) -> list[Step]:
    """Some rounds of each of the method's cases."""
    with half_right_cases(), torch.no_grad():
        model, steps = repeating_model(4), []
        for options in dict(cases.cases_of(find_method(method), model, 1)).values():
            run = cases.bound(method, **options)
            for seed in range(3):
                rounds = run(model, test_rounds.PROMPT, Sampling(1.0), Seeded(seed))
                steps += [step for step, _ in zip(rounds, range(16)) if step.tree is not None]
    return steps


def planted_in(method: str) -> list[Mistake]:
    """The mistakes that make a difference for a method."""
    declared = find_method(method)
    found = [mistake for mistake in MISTAKES if mistake.matters(declared, rounds_of(method))]
    named = {name for case in declared.cases for name in case}
    return found + [ignored(name) for name in sorted(named - declared.of_kind("weights").keys())]


# ---- what catches them ---------------------------------------------------------------------------


def exact(method: str, request) -> None:
    for each, name in test_lossless.EACH:
        if each == method:
            test_lossless.test_exact(each, name)


def greedy(method: str, request) -> None:
    test_lossless.test_greedy(method)


def cache(method: str, request) -> None:
    test_lossless.test_cache(method)


def limits(method: str, request) -> None:
    test_lossless.test_limits(method, next(iter(test_lossless.ending_cases(method))))


def golden(method: str, request) -> None:
    test_rounds.test_a_round_brings_as_many_tokens_as_before(method)


def waits(method: str, request) -> None:
    for case, of_method in test_devices.CASES.items():
        if of_method == method:
            with pytest.MonkeyPatch.context() as patch:
                test_devices.test_how_often_a_round_synchronises(case, patch)


def together(method: str, request) -> None:
    folder, check = (request.getfixturevalue(name) for name in ("shelf", "partly_accepted"))
    test_together.test_arguments(folder, method, None, check)
    test_together.test_commands(folder, method, check)


CHECKS = [golden, greedy, cache, limits, waits, exact, together]


def caught_by(mistake: Mistake, method: str, request) -> Iterator[str]:
    """The checks that fail."""
    for check in CHECKS:
        try:
            with mistake.planted(method), half_right_cases(), torch.no_grad():
                check(method, request)
        except (Exception, SystemExit):
            yield check.__name__


PLANTED = [(mistake, method) for method in METHODS for mistake in planted_in(method)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "method"), [pytest.param(*x, id=f"{x[1]}: {x[0].name}") for x in PLANTED]
)
def test_a_mistake_is_caught(mistake, method, request):
    assert next(caught_by(mistake, method, request), None)
