"""What the checks of the reader's engine share: loops on toys and drafters on small checkpoints,
with the probability of everything that can happen in their rounds."""

import atexit
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from form import Oracle, Wrong
from torch import Tensor

from minispec import load, sampling, verify
from minispec.certify.functions.toy_checkpoints import write_checkpoint
from minispec.certify.methods.cases import TREE_SHAPES, grow
from minispec.certify.toys import (
    Toy,
    every_outcome,
    random_eagle3_head,
    random_mtp_head,
    total_variation,
)
from minispec.checkpoints.eagle3 import save_eagle3
from minispec.checkpoints.heads import save_mtp
from minispec.generate.drafters import with_drafter
from minispec.model import Transformer
from minispec.sampling import Randomness, Sampling
from minispec.tree import Tree
from solutions.common import Strict

MOST_OUTCOMES = 3000
SHAPES = TREE_SHAPES | {"one": [-1, 0]}


def altered(function: Callable, *changes: tuple[str, str]) -> Callable:
    """A function with a mistake: its source with each (old, new) replaced."""
    source, scope = textwrap.dedent(inspect.getsource(function)), dict(function.__globals__)
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    exec(compile(source, "<a mistake>", "exec"), scope)
    return scope[function.__name__]


# ---- loops ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loop:
    """The first `rounds` of a loop after a prompt. The toy draws from `vocab` tokens. Trees have
    one of the SHAPES ("": no drafter), and nobody draws the drafts of a tree of kind "one-hot"."""

    seed: int
    prompt: tuple[int, ...]
    rounds: int
    vocab: int = 9
    sampling: Sampling = Sampling()
    shape: str = ""
    kind: str = "without replacement"
    context: int = 32

    @property
    def parts(self) -> dict:
        return {"drafter": toy_drafter(self)} if self.shape else {}


@cache
def toy(seed: int, vocab: int, context: int) -> Toy:
    return Toy(seed, vocab, context)


class Reading(Toy):
    """A toy that counts the rows of its passes."""

    def __init__(self, case: Loop):
        self.__dict__.update(vars(toy(case.seed, case.vocab, case.context)), rows=0)

    def __call__(self, tokens, cache=None, depth=None, mask=None, feature_layers=()) -> Tensor:
        if cache is None:
            raise Wrong("it reads the text without a cache: model(tokens, cache)")
        self.rows += len(tokens)
        return super().__call__(tokens, cache, depth, mask)


def toy_drafter(case: Loop) -> Callable:
    """A drafter as the lessons describe it. It also looks at what the loop hands to it."""
    other = toy(case.seed + 70, case.vocab, case.context)
    target = toy(case.seed, case.vocab, case.context)

    def drafter(model, text, probs, randomness):
        rows = probs(torch.zeros(2, case.vocab, dtype=torch.float64))
        if len(rows) != 2 or any(abs(float(row.sum()) - 1) > 1e-9 for row in rows):
            raise Wrong("`probs` must turn logits (n, V) into a list of n distributions")

        def propose(text, hidden, path):
            known = list(text)[len(text) - 1 - len(path) : -1]
            if [*path] and (len(path) >= len(text) or not fits(hidden, path, known, text)):
                raise Wrong("`propose` must get the text with all new tokens, the hidden states of "
                            "the last pass, and the path that was kept of them")  # fmt: skip
            if case.kind == "one-hot" or case.sampling.temperature:
                shape = SHAPES[case.shape]
                return grow(other, list(text), shape, case.kind, case.sampling, randomness)
            (q,) = sampling.probs(other.logits(other(list(text))[0, -1:]), Sampling())
            return Tree.chain(text[-1], [int(q.argmax())], [q.double()])

        def fits(hidden, path, known, text) -> bool:
            right = target(list(text)[:-1])[0, len(text) - 1 - len(path) :]
            return hidden[path].shape == right.shape and torch.equal(hidden[path], right)

        return propose

    return drafter


def first_rounds(
    function: Callable, case: Loop, model: Toy, randomness: Randomness, may_go_on: bool = True
) -> tuple:
    """The new tokens of each of the first rounds. If the cache is full then, the loop must end,
    unless it `may_go_on`."""
    settings, found = {"randomness": randomness, **vars(case.sampling)}, []
    loop = function(model, list(case.prompt), **case.parts, **settings)
    if not isinstance(loop, Iterator):
        raise Wrong("it must yield the tokens of each round, not return them")
    for new in islice(loop, case.rounds):
        if not isinstance(new, list) or any(type(token) is not int for token in new):
            raise Wrong("each round must yield a list of tokens, each of type int")
        found.append(tuple(new))
    if len(found) < case.rounds:
        raise Wrong("it ends while the cache has room; `decoder` ends the text, so go on")
    full = len(case.prompt) + sum(map(len, found)) > case.context
    if full and not may_go_on and not has_ended(loop):
        raise Wrong("it goes on though the cache is full; end if cache.length is cache.capacity")
    return tuple(found)


def has_ended(loop: Iterator) -> bool:
    try:
        return next(loop, None) is None
    except Exception:  # of a pass for which there is no room
        return False


Rounds = Counter[tuple[tuple[int, ...], ...]]  # the rounds' tokens -> probability


def run_rounds(function: Callable, case: Loop) -> Rounds:
    """The probability of all that can happen. Reading more rows than necessary is a mistake."""
    outcomes: Rounds = Counter()

    def once(randomness):
        model = Reading(case)
        strict = Strict(randomness, "does its loop yield in every round?")
        found = first_rounds(function, case, model, strict, may_go_on=False)
        nodes = len(SHAPES[case.shape]) if case.shape else 1
        if model.rows > len(case.prompt) + case.rounds * nodes:
            raise Wrong("it reads tokens again that the cache has; a pass reads what is new")
        return found

    for i, (found, probability) in enumerate(every_outcome(once)):
        outcomes[found] += probability
        if i > MOST_OUTCOMES:
            raise Wrong("it draws far more often than a loop needs to")
    return outcomes


def slow_rounds(model, text, drafter=None, *, randomness, **settings):
    """A loop without a cache: a pass of its own for each node, and the package's `accept`."""

    def probs(logits):
        return list(sampling.probs(logits, Sampling(**settings)))

    propose = drafter and drafter(model, text, probs, randomness)
    hidden, path = model(text)[0], list(range(len(text) - 1))
    while True:
        tree = propose(text, hidden, path) if propose else Tree.chain(text[-1], [])
        tree = tree.first(model.config.context - len(text) + 1)
        paths = [[column for column, seen in enumerate(row) if seen] for row in tree.mask.tolist()]
        texts = [text[:-1] + tree.tokens_at(nodes) for nodes in paths]
        hidden = torch.stack([model(each)[0, -1] for each in texts])
        path, fresh, _ = verify.accept(probs(model.logits(hidden)), tree, randomness)
        new = [*tree.tokens_at(path[1:]), fresh]
        text += new
        yield new


@cache
def exact_rounds(case: Loop) -> Rounds:
    outcomes: Rounds = Counter()
    model = toy(case.seed, case.vocab, case.context)
    for found, probability in every_outcome(lambda r: first_rounds(slow_rounds, case, model, r)):
        outcomes[found] += probability
    return outcomes


def show_loop(case: Loop) -> str:
    drafts = f", drafts of shape {SHAPES[case.shape]}" if case.shape else ""
    return f"prompt {list(case.prompt)}, {case.sampling}{drafts}"


def show_rounds(case: Loop, got: Rounds, expected: Rounds) -> str:
    worst = max({*got, *expected}, key=lambda found: abs(got[found] - expected[found]))
    return f"{show_loop(case)}: the rounds {[list(new) for new in worst]} have probability " \
           f"{got[worst]:.3f} instead of {expected[worst]:.3f}"  # fmt: skip


def loops(cases: list[Loop], examined: str) -> Oracle:
    """The judge of a function `rounds`."""
    return Oracle(
        cases, run_rounds, exact_rounds, total_variation, show_rounds, examined, tolerance=1e-9,
        arguments=show_loop,
    )  # fmt: skip


def package_rounds(model, text, drafter, randomness, temperature, top_k=0, top_p=1.0):
    """A loop of the package's functions; the drafter may be None."""

    def probs(logits):
        return list(sampling.probs(logits, Sampling(temperature, top_k, top_p)))

    cache, propose = model.new_cache(), drafter and drafter(model, text, probs, randomness)
    hidden, path = model(text, cache)[0], list(range(len(text) - 1))
    cache.commit(path)
    while cache.free_rows > 0:
        tree = propose(text, hidden, path) if propose else Tree.chain(text[-1], [])
        tree = tree.first(cache.free_rows)
        hidden = model(tree.tokens, cache, tree.depth, tree.mask)[0]
        path, fresh, _ = verify.accept(probs(model.logits(hidden)), tree, randomness)
        cache.commit(path)
        text += [*tree.tokens_at(path[1:]), fresh]
        yield text[len(text) - len(path) :]


# ---- drafters ------------------------------------------------------------------------------------

V = 3
ALL = [*range(V)]
REJECTED = [0, 1]  # drafts at the end of each pass


@dataclass(frozen=True)
class Drafting:
    """Rounds of a drafter: after how many tokens of the text each begins. The model has a draft
    model or a head next to it."""

    head: bool
    text: tuple[int, ...]
    ends: tuple[int, ...]
    sampling: Sampling = Sampling()


@cache
def checkpoint(head: bool) -> Transformer:
    """A small model with a draft model or also with heads."""
    folder = TemporaryDirectory()
    atexit.register(folder.cleanup)
    path = Path(folder.name) / "model"
    model = write_checkpoint(path, 4, V)[1]
    if head:
        saved = random_mtp_head(model, 5), path / "mtp", "", None, torch.float32, [1.0]
        save_mtp(*saved)
        save_eagle3(random_eagle3_head(model, 6), path / "eagle3", "", None, torch.float32)
    return load(path, "float64", "cpu")[0]


def drafts_of(function: Callable, case: Drafting, randomness: Randomness) -> tuple:
    """The tokens, parents and distributions of each round's tree, as numbers that can be compared.
    A pass is over all tokens that are new, and over REJECTED."""
    model, text = checkpoint(case.head), list(case.text)

    def probs(logits):
        return list(sampling.probs(logits, case.sampling))

    propose = function(model, text[: case.ends[0]], probs, randomness)
    found, start, rows = [], 0, model.new_cache()
    for end in case.ends:
        hidden = model(text[start:end] + REJECTED, rows)[0]
        path = list(range(end - 1 - start))
        rows.commit(path)
        tree = propose(text[:end], hidden, path)
        if not isinstance(tree, Tree):
            raise Wrong(f"`propose` must return a Tree, not {type(tree).__name__}")
        found.append(comparable(tree))
        start = end - 1
    return tuple(found)


def run_drafts(function: Callable, case: Drafting) -> Counter:
    outcomes: Counter = Counter()
    strict = lambda r: Strict(r, "how many drafts are there to be?")  # noqa: E731
    for found, probability in every_outcome(lambda r: drafts_of(function, case, strict(r))):
        outcomes[found] += probability
    return outcomes


def fresh_logits(case: Drafting, text: list[int]) -> Tensor:
    """The logits (1, V) of the head or draft model after a text, from passes of their own."""
    model = checkpoint(case.head)
    found = with_drafter("hybrid", model, None, {})
    if not case.head:
        return found["draft"].logits(found["draft"](text)[0, -1:])
    embedded = model.model.embed_tokens(torch.tensor(text[1:]))
    return model.logits(found["head"](model(text[:-1]), embedded[None])[0, -1:])


def fresh_chain(case: Drafting, text: list[int], k: int, words: list[int] = ALL) -> list[int]:
    """The head's or draft model's best chain of some words after a text, from passes of their
    own."""
    model, drafts = checkpoint(case.head), []
    found = with_drafter("hybrid", model, None, {})
    hidden = model(text[:-1])
    for _ in range(k):
        if case.head:
            embedded = model.model.embed_tokens(torch.tensor(text[1:] + drafts))
            output = found["head"](hidden, embedded[None])[:, -1:]
            hidden, logits = torch.cat([hidden, output], 1), model.logits(output[0])
        else:
            logits = fresh_logits(case, text + drafts)
        drafts.append(words[int(logits[0, words].argmax())])
    return drafts


def show_drafting(case: Drafting) -> str:
    drafts = "the head" if case.head else "the draft model"
    return f"{drafts} drafts after {', '.join(map(str, case.ends))} tokens, {case.sampling}"


def show_drafts(case: Drafting, got: Counter, expected: Counter) -> str:
    worst = max({*got, *expected}, key=lambda found: abs(got[found] - expected[found]))
    trees = [f"tokens {list(tokens)} with parents {list(parents)}" for tokens, parents, _ in worst]
    return f"{show_drafting(case)}: {'; '.join(trees)}, have probability {got[worst]:.3f} " \
           f"instead of {expected[worst]:.3f}, or another q"  # fmt: skip


def drafters(cases: list[Drafting], exact: Callable, examined: str) -> Oracle:
    """The judge of a drafter; exact(case) returns the right outcomes."""
    return Oracle(
        cases, run_drafts, exact, total_variation, show_drafts, examined, tolerance=1e-5,
        arguments=show_drafting,
    )  # fmt: skip


def exact_drafts(propose: Callable) -> Callable:
    """Make `exact` for `drafters` of propose(case, text, randomness), which returns the right
    tree after a text."""

    @cache
    def exact(case: Drafting) -> Counter:
        outcomes: Counter = Counter()
        texts = [list(case.text[:end]) for end in case.ends]
        for found, probability in every_outcome(
            lambda r: tuple(comparable(propose(case, text, r)) for text in texts)
        ):
            outcomes[found] += probability
        return outcomes

    return exact


def comparable(tree: Tree) -> tuple:
    """A tree's tokens, parents and distributions."""
    qs = [tree.drawn_from(node) for node in range(len(tree))]
    q = [None if q is None else tuple(round(float(x), 6) + 0.0 for x in q) for q in qs]
    return tuple(map(int, tree.tokens)), tuple(tree.parents), tuple(q)
