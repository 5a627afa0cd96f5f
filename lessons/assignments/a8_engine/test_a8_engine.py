"""The certifier is the examiner: its checks of every method, with your engine in their place. In
every round the target must score what was proposed: plain decoding passes these checks, too."""

import contextlib
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from lessons.assignments.a8_engine.proposers import PROPOSERS, Forest, Lookup, Proposer
from lessons.assignments.grading import counted_passes, expected
from minispec.certify.common import Verdict
from minispec.certify.functions.checks import Limits, check_implementation
from minispec.certify.functions.toy_checkpoints import write_checkpoint
from minispec.certify.methods import cases, checks
from minispec.certify.methods.cases import bound, every_path, greedy_cases
from minispec.certify.methods.checks import check_cache, check_exact, ending_difference
from minispec.certify.toys import (
    Toy,
    ToyHeads,
    first_tokens,
    letter_tokenizer,
    random_medusa_heads,
    random_mtp_head,
    small_model,
)
from minispec.generate import METHODS
from minispec.methods import find_method
from minispec.methods.declaration import Method
from minispec.model import Transformer
from minispec.sampling import Sampling, Seeded

STAYS = Transformer, Proposer
GREEDY = Sampling()
GRADED = {
    "exact": "engine", "greedy": "engine", "cache": "engine", "rounds": "engine",
    "limits": "engine", "engine": "engine", "black box": "black_box",
}  # fmt: skip


def watched(kind: type[Proposer]) -> type[Proposer]:
    """A kind of proposer that notes the tree of a round and the rows that a pass over it has."""

    class Watched(kind):
        name, proposed, rows, passes = kind.__name__, None, 0, []

        def beside(self, tree, free_rows):
            riding, depth, mask = super().beside(tree, free_rows)
            self.proposed, self.rows = tree, len(tree) + len(riding)
            self.passes.clear()  # those before were a draft's, if the target is its own draft
            return riding, depth, mask

    return Watched


def as_method(
    engine: Callable, kind: type[Proposer], original: Callable, accepted: list[int] | None = None
) -> Callable:
    """The engine with one kind of proposer, called as the package's method is. Fails if a round
    is not one pass over what was proposed; appends to `accepted` how many drafts it accepts."""

    @functools.wraps(original)
    def method(model, prompt, sampling, randomness, *, cache=None, rule=None, **options):
        proposer = watched(kind)(model, **options)
        steps = engine(model, proposer, prompt, sampling, randomness, cache=cache)
        for round_ in itertools.count():
            with counted_passes(model) as proposer.passes:
                step = next(steps)
            if step.tree is not None:
                given, right = [step.tree.tokens, proposer.passes], [proposer.rows]
                tree = proposer.proposed and proposer.proposed.tokens
                assert given == [tree, right], (
                    f"{proposer.name}, round {round_}: {given[0]} in passes of {given[1]} rows "
                    f"instead of {tree} in {right}: propose, then score all of it in one pass"
                )
                if accepted is not None:
                    accepted.append(len(step.path) - 1)
            yield step

    return method


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@contextlib.contextmanager
def other_targets(first_seed: int) -> Iterator[None]:
    """The certifier has other targets and drafts."""

    def shifted(seed: int, *arguments, **options) -> Transformer:
        return small_model(seed + first_seed, *arguments, **options)

    @functools.cache
    def target(toy: bool, vocab: int) -> Toy | Transformer:
        return Toy(5 + first_seed, vocab, context=64) if toy else shifted(4, vocab, layers=1)

    with contextlib.ExitStack() as stack:
        for module, name, other in (
            (cases, "target", target), (cases, "small_model", shifted),
            (checks, "small_model", shifted),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(module, name, other))
        yield


@contextlib.contextmanager
def in_place(engine: Callable, first_seed: int) -> Iterator[list[int]]:
    """The certifier and `decode` run the engine, wherever they would run a method of the package.
    Plain decoding, which all are compared with, stays the package's. `first_seed` changes the
    certifier's targets and drafts. Yields how many drafts each round accepts."""
    accepted: list[int] = []
    methods = {
        name: as_method(engine, PROPOSERS[name], METHODS[name], accepted) for name in PROPOSERS
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(METHODS, methods))
        forest = as_method(engine, Forest, cases.forest, accepted)
        stack.enter_context(mock.patch.object(cases, "forest", forest))
        stack.enter_context(other_targets(first_seed))
        yield accepted


def problem(verdicts: Iterator[Verdict]) -> str | None:
    """The first that failed, in the certifier's words, if one did."""
    return next((f"{v.check}, {v.case}: {v.detail}" for v in verdicts if not v.passed), None)


EXACT = (
    "speculative k=1, T=0.7", "speculative k=2, T=1.5", "prompt-lookup k=2, T=1",
    "tree wide, without replacement, T=1", "medusa tree 0000", "fastmtp k=1, T=1",
    "fastmtp tree=4, vocabulary=two",
    "lookahead window=3, ngram=3, guesses=3, pool_from_prompt=True, T=1",
)  # fmt: skip
NOTHING = "not one draft was accepted in any round: this is plain decoding"
CACHE = (
    "speculative k=2", "tree deep", "medusa tree 0000", "jacobi", "lookahead window=3", "fastmtp",
)  # fmt: skip


def method_of(case: str) -> list[Method]:
    """The method that a case names with its first word."""
    name = case.split()[0]
    return [find_method(cases.forest if name == "tree" else name)]


def exact_arguments() -> list[tuple[str, tuple]]:
    """Name, and method, model, prompt, sampling and number of tokens, of each of these cases."""
    return [
        (f"{case.name}, {label}",
         (case.method, case.model, case.prompt, cases.SAMPLINGS[label], case.n))
        for name in EXACT for case in cases.exact_cases(method_of(name)) for label in case.samplings
        if name in f"{case.name}, {label}"
    ]  # fmt: skip


@pytest.mark.points(10, task="exact")
def test_the_certifier_s_exact_check(impl, seeds):
    """Over all random outcomes, the output of every proposer is distributed as plain decoding's."""
    (seed,) = seeds(1)
    with in_place(impl.engine, seed):
        wrong = problem(v for case in EXACT for v in check_exact(case, method_of(case)))
        assert wrong is None, f"the certifier says: {wrong}: the output is not the target's"
        engines = [arguments for _, arguments in exact_arguments()]
    with other_targets(seed):
        packages = exact_arguments()
    for (name, arguments), (method, *_) in zip(packages, engines, strict=True):
        given, right = (expected(each, *arguments[1:]).passes for each in (method, arguments[0]))
        assert abs(given - right) < 1e-9, (
            f"{name}: {given:.3f} passes for the first tokens on average instead of {right:.3f}: "
            "the output is the target's, but drafts that are right are not accepted"
        )


@pytest.mark.points(5, task="greedy")
def test_greedy_tokens_are_plain_decoding_s(impl, seeds):
    (seed,) = seeds(1)
    model, prompt = small_model(seed), [7]
    plain = first_tokens(bound("autoregressive"), model, prompt, GREEDY, Seeded(), 10)
    with in_place(impl.engine, seed) as accepted:
        for name, method in greedy_cases(model, 1):
            tokens = first_tokens(method, model, prompt, GREEDY, Seeded(), 10)
            assert tokens == plain, f"{name}: {tokens} instead of {plain}"
    assert any(accepted), NOTHING


@pytest.mark.points(5, task="cache")
def test_the_certifier_s_cache_check(impl, seeds):
    """After every round the committed rows equal a fresh prefill's, of all tokens but the last."""
    with in_place(impl.engine, *seeds(1)) as accepted:
        wrong = problem(v for case in CACHE for v in check_cache(case, method_of(case)))
    assert wrong is None, (
        f"the certifier says: {wrong} (inf: not as many rows as tokens but the last)"
    )
    assert any(accepted), NOTHING


@pytest.mark.points(5, task="rounds")
def test_every_round_is_that_of_the_package_s_method(impl, seeds):
    """The same random numbers give the same trees, paths and tokens, from a kept cache as well."""
    (seed,) = seeds(1)
    model = small_model(seed + 3, vocab=6)
    options = {
        "speculative": {"draft": small_model(seed + 4, vocab=6), "k": 3},
        "prompt-lookup": {"k": 4},
        "medusa": {"heads": random_medusa_heads(model, seed + 1, 3), "tree": every_path(3, 9)},
        "jacobi": {"block": 4},
        "lookahead": {"window": 3, "ngram": 3, "guesses": 3, "pool_from_prompt": True},
        "fastmtp": {"head": random_mtp_head(model, seed + 2), "k": 3},
    }
    prompt = [1, 2, 3, 1, 2, 3, 1]
    for name, kept in itertools.product(PROPOSERS, (0, 4)):
        runs = []
        original = METHODS[name]
        for method in (original, as_method(impl.engine, PROPOSERS[name], original)):
            cache = model.new_cache()
            model.prefill(prompt[:kept], cache)
            randomness = Seeded(seed + 5)
            steps = method(model, prompt, Sampling(1.0), randomness, cache=cache, **options[name])
            runs.append([(s.tokens, s.tree, s.path) for s, _ in zip(steps, range(12))])
        for round_, (right, given) in enumerate(zip(*runs)):
            same = right[0] == given[0] and right[2] == given[2] and same_tree(right[1], given[1])
            assert same, (
                f"{name}, {kept} rows kept, round {round_}: {given} instead of {right}: begin "
                "after the prefill; learn after the commit, from the hidden states of this pass"
            )


def same_tree(a, b) -> bool:
    return a is b is None or (
        a is not None and b is not None and (a.tokens, a.parents) == (b.tokens, b.parents)
    )


@pytest.mark.points(5, task="limits")
def test_runs_end_where_plain_decoding_s_do(impl, seeds):
    """At the context's last row, at an end token inside a round; then a turn on the kept cache."""
    (seed,), context, tokenizer, drafts = seeds(1), 24, letter_tokenizer(3), []
    for method, options in (
        ("speculative", {"draft": Toy(seed + 5), "k": 4}),
        ("prompt-lookup", {}),
        ("jacobi", {"block": 4}),
        ("lookahead", {"window": 3, "ngram": 3, "guesses": 4, "pool_from_prompt": True}),
        ("medusa", {"heads": ToyHeads(3), "tree": every_path(3, 20)}),
    ):
        for eos, ending in (((), {"max_new_tokens": 99}), ((1,), {}), ((), {"max_new_tokens": 7})):
            model = Toy(seed + 5, context=context, eos=eos)
            for prompt in ([0], [1, 2, 0, 1, 2, 0]):
                with in_place(impl.engine, seed) as accepted:
                    wrong = ending_difference(
                        model, tokenizer, prompt, method, dict(ending), options
                    )
                drafts += accepted
                assert wrong is None, (
                    f"{method}, context {context}, end {eos or ending}: {wrong}: give the "
                    "proposer the cache's room, and feed only what a kept cache lacks"
                )
    assert any(drafts), NOTHING


@pytest.mark.points(2, task="engine")
def test_it_is_a_generator_that_begins_with_its_prefill(impl, seeds):
    model, prompt = small_model(*seeds(1)), [1, 2, 3, 1, 2, 3, 1]
    plain = first_tokens(bound("autoregressive"), model, prompt, GREEDY, Seeded(), 9)
    for proposer, tree in (Proposer(), [1]), (Lookup(model, 4), [1, 2, 3, 1]):
        steps = impl.engine(model, proposer, prompt, GREEDY, Seeded())
        first, yields = next(steps), impl.imported("inspect").isgenerator(steps)
        assert yields, "engine is a generator: it yields its steps as they come"
        assert (first.tokens, first.tree, first.path) == ([], None, []), "an empty Step() is first"
        rounds = [step for step, _ in zip(steps, range(9))]
        given = tuple(t for step in rounds for t in step.tokens)[:9]
        assert given == plain, f"plain decoding says {plain}, not {given}"
        assert rounds[0].tree.tokens == tree, (
            f"the first tree after {prompt} is {tree}, not {rounds[0].tree.tokens}"
        )


@pytest.mark.points(6, task="black box")
def test_the_certifier_s_black_box_checks(impl):
    """What `python -m minispec.certify --impl my_solution:black_box` does, with fewer runs."""
    settings = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0}
    folder, _ = write_checkpoint(Path(tempfile.mkdtemp()), 0, vocab=24, loops=True)
    passes = []

    def count(module, inputs) -> None:
        passes.extend([1] * hasattr(module, "prefill"))  # the whole model, not a layer

    counting = impl.imported("torch.nn.modules.module").register_module_forward_pre_hook(count)
    tokens = impl.black_box(folder, [1, 2], max_new_tokens=60, **settings)
    counting.remove()
    assert len(passes) <= 30, (
        f"{len(tokens)} tokens of a text that repeats itself take {len(passes)} passes, not at "
        "most 30: let a proposer draft"
    )
    folder, _ = write_checkpoint(Path(tempfile.mkdtemp()), 0, vocab=24)
    impl.black_box(folder, [1, 2], max_new_tokens=1, **settings)
    limits = Limits(seconds=1e9, runs=100, requests=100)
    for name in "greedy: all", "limits: all", "limits: end tokens", "statistical: T=0.7":
        for verdict in check_implementation(impl.black_box, name, limits=limits):
            assert verdict.passed, f"the certifier says: {verdict.case}: {verdict.detail}"
