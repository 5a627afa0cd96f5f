"""Lesson 01: the mask of a tree of drafts, the commit of its accepted path, and a loop that uses
both."""

import functools
import math
import random
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice

import torch
from form import Oracle, Question, Task, Wrong
from torch import Tensor

from minispec import load, tree
from minispec.cache import KVCache
from minispec.certify.toys import small_model
from minispec.generate.run import StopConditions
from minispec.model import Transformer
from minispec.sampling import Seeded
from minispec.tree import Tree
from solutions import engine
from solutions.common import call, differ
from solutions.lesson_00 import checkpoints

# ---- solutions -----------------------------------------------------------------------------------


def mask(parents, length):
    n = len(parents)
    seen = torch.zeros(n, length + n, dtype=torch.bool)
    seen[:, :length] = True
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] = seen[parent]
        seen[node, length + node] = True
    return seen


def commit(kv, length, path):
    end = length + len(path)
    rows = [length + node for node in path]
    kv[:, :, length:end] = kv[:, :, rows]  # indexing with a list copies, so nothing is lost
    return end


def rounds(model, text, **settings):
    cache = model.new_cache()
    while cache.length < cache.capacity:
        new = text[cache.length :]
        seen = mask([-1, *range(len(new) - 1)], cache.length)
        hidden = model(new, cache, mask=seen)[0]
        cache.length = commit(cache.kv[:, :, 0], cache.length, list(range(len(new))))
        text.append(int(model.logits(hidden[-1]).argmax()))
        yield text[-1:]


def decoder(rounds, **parts):
    load_once = functools.cache(load)

    def decode(checkpoint, prompt, max_new_tokens, seed=0, **settings):
        model, _ = load_once(checkpoint)
        settings["randomness"] = Seeded(seed)
        source, new = rounds(model, list(prompt), **parts, **settings), []
        for token in islice((token for tokens in source for token in tokens), max_new_tokens):
            new.append(token)
            if token in model.config.eos_ids:
                break
        return new

    return decode


# ---- the package's functions, with the lesson's arguments ----------------------------------------


def package_mask(parents, length):
    drafts = Tree([0] * len(parents), list(parents))
    rows = KVCache(layers=1, heads=1, head_dim=1, capacity=length + len(drafts))
    rows.length = length
    return rows.place(len(drafts), drafts.depth, drafts.mask)[2][0, 0]


def package_commit(kv, length, path):
    rows = KVCache(layers=1, heads=1, head_dim=1, capacity=0)
    rows.set_storage(kv[:, :, None], length)
    rows.commit(list(path))
    return rows.length


def package_rounds(model, text, **settings):
    return engine.package_rounds(model, text, None, Seeded(), temperature=0.0)


def package_decoder(rounds, **parts):
    known = {}

    def decode(checkpoint, prompt, max_new_tokens, seed=0, **settings):
        if checkpoint not in known:
            known[checkpoint] = load(checkpoint)[0]
        model, stop = known[checkpoint], StopConditions(max_new_tokens)
        found = []
        for tokens in rounds(model, list(prompt), **parts, randomness=Seeded(seed), **settings):
            for token in tokens:
                if len(found) < stop.max_new_tokens:
                    found.append(token)
                if len(found) == stop.max_new_tokens or token in model.config.eos_ids:
                    return found
        return found

    return decode


# ---- cases ---------------------------------------------------------------------------------------

V = 12


@dataclass(frozen=True)
class Drafts:
    """A tree of drafts after a committed text, and the path that is accepted."""

    seed: int  # of the model
    text: tuple[int, ...]
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    path: tuple[int, ...]

    @property
    def length(self) -> int:
        return len(self.text)


@cache
def model_of(seed: int) -> Transformer:
    return small_model(seed, vocab=V, context=64)


def path_to(parents: tuple[int, ...], node: int) -> tuple[int, ...]:
    """The nodes from the root to `node`."""
    return (*path_to(parents, parents[node]), node) if node else (0,)


def random_drafts(seed: int) -> Drafts:
    rng = random.Random(seed)
    n, length = rng.randint(1, 9), (3, 0, 1, 5, 8)[seed % 5]
    parents = (-1, *(rng.randrange(i) for i in range(1, n)))
    text, tokens = rng.choices(range(V), k=length), rng.choices(range(V), k=n)
    path = path_to(parents, rng.randrange(n // 2, n))
    return Drafts(seed % 3, tuple(text), tuple(tokens), parents, path)


CASES = [
    Drafts(0, (4, 7), (1, 2, 3), (-1, 0, 0), (0, 2)),
    Drafts(1, (4, 7, 9), (1, 2, 3, 4, 5), (-1, 0, 0, 1, 2), (0, 2, 4)),
    Drafts(2, (), (1, 2, 3, 4), (-1, 0, 1, 1), (0, 1, 3)),
    Drafts(0, (5,), (1,), (-1,), (0,)),
    *map(random_drafts, range(36)),
]


def numbers(rows) -> str:
    return "[" + ", ".join(map(str, rows)) + "]"


def show_tree(case: Drafts) -> str:
    return f"parents = {numbers(case.parents)}, length = {case.length}"


# ---- mask ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """The logits (n, V) of a tree's nodes, and the mask that they were computed with (None: each
    node had a pass of its own)."""

    logits: Tensor
    seen: Tensor | None = None


def run_mask(function, case: Drafts) -> Scores:
    """One pass over the text and the tree, without a cache, with the mask in its last rows."""
    n, length = len(case.parents), case.length
    seen = call(function, length, parents=list(case.parents))
    if not isinstance(seen, Tensor):
        raise Wrong(f"it must return a tensor, not {type(seen).__name__}")
    if seen.shape == (n, n) and length:
        raise Wrong("its shape is (n, n); the columns of the committed rows are missing")
    if seen.shape != (n, length + n):
        raise Wrong(f"its shape is {tuple(seen.shape)}; here it must be {(n, length + n)}")
    if seen.dtype != torch.bool:
        raise Wrong(f"its dtype is {seen.dtype}; it must be torch.bool")
    whole = torch.ones(length + n, length + n, dtype=torch.bool).tril()
    whole[length:] = seen
    depths = [length + len(path_to(case.parents, node)) - 1 for node in range(n)]
    position = torch.tensor([*range(length), *depths])
    model = model_of(case.seed)
    hidden = model([*case.text, *case.tokens], depth=position, mask=whole)
    return Scores(model.logits(hidden)[0, length:], seen.clone())


@cache
def fresh_scores(case: Drafts) -> Scores:
    """A pass of its own for each node, over the text and the path to the node."""
    model, logits = model_of(case.seed), []
    for node in range(len(case.tokens)):
        path = [case.tokens[i] for i in path_to(case.parents, node)]
        logits.append(model.logits(model([*case.text, *path]))[0, -1])
    return Scores(torch.stack(logits))


def score_distance(a: Scores, b: Scores) -> float:
    if a.seen is not None and b.seen is not None and torch.equal(a.seen, b.seen):
        return 0.0  # also if a row that sees nothing has NaN
    largest = float((a.logits - b.logits).abs().max())
    return math.inf if math.isnan(largest) else largest


def show_mask(case: Drafts, got: Scores, expected: Scores) -> str:
    """Describe the first node whose logits are wrong."""
    errors = (got.logits - expected.logits).abs().amax(-1).nan_to_num(math.inf).tolist()
    node = next(i for i, error in enumerate(errors) if error > 1e-9)
    columns = numbers(got.seen[node].nonzero()[:, 0].tolist())
    return f"{show_tree(case)}: node {node} sees columns {columns}. Its path is " \
           f"{numbers(path_to(case.parents, node))}; its logits are {errors[node]:.2g} away from " \
           "those of a fresh pass over the text and this path"  # fmt: skip


def diagnose_mask(results: list[tuple[Drafts, Scores, Scores]]) -> str | None:
    """Say whether rows are missing or too many, if it is the same in all cases."""
    right = [torch.tensor(right_mask(case)) for case, _, _ in results]
    missing = any((a & ~got.seen).any() for a, (_, got, _) in zip(right, results))
    too_many = any((got.seen & ~a).any() for a, (_, got, _) in zip(right, results))
    if missing and not too_many:
        return "a node does not see all of its text: the committed rows, its ancestors and itself"
    if too_many and not missing:
        wrong = [got.seen for a, (_, got, _) in zip(right, results) if (got.seen != a).any()]
        of_root = all(seen[0].sum() > seen.shape[1] - len(seen) + 1 for seen in wrong)
        return NO_PARENT if of_root else "a node sees rows that are not in its text"
    return None


NO_PARENT = "the root has no parent: its entry, -1, is not a node, but to Python it is the last one"


def right_mask(case: Drafts) -> list[list[bool]]:
    """From the definition: a node sees the committed rows and the nodes of its path."""
    nodes, prefix = range(len(case.parents)), [True] * case.length
    return [prefix + [j in path_to(case.parents, node) for j in nodes] for node in nodes]


def with_nodes(change):
    """Mistakes in the columns of the nodes: change(parents) returns other ones, (n, n)."""

    def wrong(parents, length):
        prefix = torch.ones(len(parents), length, dtype=torch.bool)
        return torch.cat([prefix, change(parents)], 1)

    return wrong


def all_earlier(parents):
    return torch.ones(len(parents), len(parents), dtype=torch.bool).tril()


def itself(parents):
    return torch.eye(len(parents), dtype=torch.bool)


def ancestors(parents):
    return mask(parents, 0)


def with_siblings(parents):
    of_parent = torch.tensor(parents)
    return ancestors(parents) | (of_parent == of_parent[:, None]).tril()


def only_the_parent(parents):
    seen = itself(parents)
    for node, parent in enumerate(parents[1:], start=1):
        seen[node, parent] = True
    return seen


def parent_and_minus_one(parents, length):
    """The root's parent, -1, is column length - 1, or the last one if there are no committed
    rows."""
    seen = with_nodes(only_the_parent)(parents, length)
    seen[0, length - 1] = True
    return seen


def all_shallower(parents):
    depth = ancestors(parents).sum(-1)
    return (depth < depth[:, None]) | itself(parents)


def without_prefix(parents, length):
    seen = mask(parents, length)
    seen[:, :length] = False
    return seen


def prefix_too_short(parents, length):
    seen = torch.cat([torch.zeros(len(parents), length, dtype=torch.bool), ancestors(parents)], 1)
    seen[:, : length - 1] = True
    return seen


def nodes_first(parents, length):
    return mask(parents, length).roll(-length, 1)


def diagonal_at_0(parents, length):
    return torch.ones(len(parents), length + len(parents), dtype=torch.bool).tril()


def not_shifted(parents, length):
    n, seen = len(parents), torch.zeros(len(parents), length + len(parents), dtype=torch.bool)
    seen[:, :n] = ancestors(parents)
    seen[:, :length] = True
    return seen


def follows_minus_one(where):
    """Every node also sees what parents[0] = -1 points to: where(parents, length), a column."""

    def wrong(parents, length):
        seen = mask(parents, length)
        seen[:, where(parents, length)] = True
        return seen

    return wrong


def last_node_for_the_root(parents, length):
    seen = mask(parents, length)
    seen[0, -1] = True
    return seen


def without_the_root(parents):
    seen = ancestors(parents)
    seen[1:, 0] = False
    return seen


def without_any_root(parents):
    return ancestors(parents) & (torch.arange(len(parents)) > 0)


MASK_MISTAKES = {
    "a node sees every node before it, as in a chain; only its ancestors are in its text": (
        with_nodes(all_earlier)
    ),
    "the columns of the committed rows are False; every node must see all of them": without_prefix,
    "the last committed row is missing; they are columns 0 … length - 1, the slice :length": (
        prefix_too_short
    ),
    "siblings see each other, but they are alternatives for the same place": (
        with_nodes(with_siblings)
    ),
    "a node sees its parent, but not its parent's ancestors": (
        with_nodes(only_the_parent), parent_and_minus_one,
    ),
    "a node sees itself and the committed rows, but no ancestor": with_nodes(itself),
    "a node does not see itself": with_nodes(lambda parents: ancestors(parents) & ~itself(parents)),
    "the columns of the nodes are transposed: row i is what node i sees": with_nodes(
        lambda parents: ancestors(parents).T
    ),
    "a node sees its descendants, too, which come later in the text": with_nodes(
        lambda parents: ancestors(parents) | ancestors(parents).T
    ),
    "a node sees every node of a smaller depth; only one of each depth is its ancestor": (
        with_nodes(all_shallower)
    ),
    NO_PARENT: (
        follows_minus_one(lambda parents, length: -1),
        follows_minus_one(lambda parents, length: length - 1),
        last_node_for_the_root,
    ),
    "the nodes do not see the root, node 0, but it is an ancestor of all": (
        with_nodes(without_the_root),
        with_nodes(without_any_root),
    ),
    "every node sees every node; if the rows are lists, they may all be the same list": with_nodes(
        lambda parents: all_earlier(parents) | True
    ),
    "it is True where a node must not look; True means that it sees the row": (
        lambda parents, length: ~mask(parents, length)
    ),
    "the nodes' columns come first, but the committed rows are the first rows of the cache": (
        nodes_first
    ),
    "node j is in column j; it must be in column length + j": not_shifted,
    "it is the triangle of a text without a prefix: node i sees columns 0 … i": diagonal_at_0,
}

# ---- commit --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """The cache after a commit: its committed rows (2, layers, rows, heads, head_dim)."""

    rows: Tensor

    @property
    def length(self) -> int:
        return self.rows.shape[2]


@cache
def scored(case: Drafts) -> Tensor:
    """The storage of a cache after a pass over the tree: the text's rows, the nodes' rows and, as
    after earlier rounds, rows that belong to nothing."""
    model, drafts = model_of(case.seed), Tree(list(case.tokens), list(case.parents))
    rows = model.new_cache(case.length + len(drafts) + 2)
    rows.kv.normal_(generator=torch.Generator().manual_seed(case.seed))
    model.prefill(list(case.text), rows)
    model(drafts.tokens, rows, drafts.depth, drafts.mask)
    return rows.kv


def run_commit(function, case: Drafts) -> Kept:
    kv = scored(case).clone()[:, :, 0]
    length = call(partial(function, kv, case.length), path=list(case.path))
    if type(length) is not int:
        raise Wrong(f"it must return the new length, an int, not {type(length).__name__}")
    if not 0 <= length <= kv.shape[2]:
        raise Wrong(f"it returns {length}, but the cache has rows 0 to {kv.shape[2] - 1}")
    return Kept(kv[:, :, :length].clone())


@cache
def fresh_rows(case: Drafts) -> Kept:
    """The rows that a pass over the text and the accepted tokens writes to an empty cache."""
    tokens = [*case.text, *(case.tokens[node] for node in case.path)]
    model = model_of(case.seed)
    rows = model.new_cache(len(tokens))
    model(tokens, rows)
    return Kept(rows.kv[:, :, 0])


def kept_distance(a: Kept, b: Kept) -> float:
    if a.length != b.length:
        return math.inf
    return float((a.rows - b.rows).abs().max()) if a.length else 0.0


def show_commit(case: Drafts, got: Kept, expected: Kept) -> str:
    """Describe the first row that is wrong, or the length."""
    text = f"{show_tree(case)}, path = {numbers(case.path)}: "
    row = first_wrong_row(got, expected)
    if row is None:
        return text + f"it returns {got.length}; the text now has {expected.length} tokens"
    keys, values = (name_of_row(case, source) for source in sources(case, got, row))
    held = keys if keys == values else f"the keys of {keys} and the values of {values}"
    return text + f"row {row} holds {held}; " \
                  f"{name_of_row(case, right_row(case, row))} belongs there"  # fmt: skip


def first_wrong_row(got: Kept, expected: Kept) -> int | None:
    for row in range(min(got.length, expected.length)):
        if not (got.rows[:, :, row] - expected.rows[:, :, row]).abs().max() <= 1e-9:
            return row
    return None


def right_row(case: Drafts, row: int) -> int:
    """The row of the scored cache that belongs in `row` after the commit."""
    return row if row < case.length else case.length + case.path[row - case.length]


def name_of_row(case: Drafts, row: int | None) -> str:
    if row is None:
        return "a mixture of rows"
    if row < case.length:
        return f"committed row {row}"
    node = row - case.length
    return f"node {node}" if node < len(case.tokens) else "a row that no token wrote"


def sources(case: Drafts, got: Kept, row: int) -> list[int | None]:
    """The rows of the scored cache that the keys and the values of a row come from."""
    found = []
    for old, new in zip(scored(case)[:, :, 0], got.rows[:, :, row]):  # keys, then values
        same = [i for i in range(old.shape[1]) if torch.equal(old[:, i], new)]
        found.append(same[0] if same else None)
    return found


def holds(case: Drafts, got: Kept, row: int, source: int | None) -> bool:
    """Whether a row is row `source` of the scored cache."""
    return source is not None and torch.equal(
        got.rows[:, :, row], scored(case)[:, :, 0, source]
    )  # fmt: skip


def diagnose_commit(results: list[tuple[Drafts, Kept, Kept]]) -> str | None:
    """Name a mistake by what the first wrong row of each case holds."""
    wrong = [(case, got, first_wrong_row(got, expected)) for case, got, expected in results]
    wrong = [(case, got, row) for case, got, row in wrong if row is not None]
    if not wrong:
        return "the rows are right, but the new length is not: length + len(path)"
    if any(row < case.length for case, _, row in wrong):
        return None
    if all(holds(case, got, row, case.path[row - case.length]) for case, got, row in wrong):
        return NOT_SHIFTED
    if all(holds(case, got, row, next_row(case, row)) for case, got, row in wrong):
        return "a row holds what belongs in the next one; is the root, node 0, missing?"
    return None


def next_row(case: Drafts, row: int) -> int | None:
    """The row of the scored cache that belongs in `row + 1` after the commit, if there is one."""
    last = case.length + len(case.path) - 1
    return right_row(case, row + 1) if row < last else None


NOT_SHIFTED = "the path counts nodes, not rows of the cache: node i is in row length + i"


def moves(target, source, count=lambda length, path: length + len(path)):
    """A commit that puts row source(length, node) in row target(length, i) for node i of the path,
    the first one first, and returns `count`."""

    def commit(kv, length, path):
        rows = torch.tensor([source(length, node) for node in path])
        to = torch.tensor([target(length, i) for i in range(len(path))])
        kv[:, :, to] = kv[:, :, rows]
        return count(length, path)

    return commit


def in_place(length, i):
    return length + i


def part(index):
    """A commit that moves only a part of the storage."""

    def wrong(kv, length, path):
        return commit(kv[index], length, path)

    return wrong


def last_first(kv, length, path):
    for i, node in reversed(list(enumerate(path))):
        kv[:, :, length + i] = kv[:, :, length + node]
    return length + len(path)


def swapped(kv, length, path):
    rows = [length + node for node in path]
    kv[:, :, rows] = kv[:, :, length : length + len(path)].clone()
    return length + len(path)


def drops_the_root(kv, length, path):
    return commit(kv, length, path[1:])


COMMIT_MISTAKES = {
    "the rows of the path have not moved. kv itself must change: assign to kv[:, :, …]": (
        lambda kv, length, path: length + len(path)
    ),
    "it keeps every row up to the last one of the path, also the rejected ones between": (
        lambda kv, length, path: length + path[-1] + 1
    ),
    NOT_SHIFTED: moves(in_place, lambda length, node: node),
    "only the keys have moved; the values are kv[1]": part(slice(0, 1)),
    "only the values have moved; the keys are kv[0]": part(slice(1, 2)),
    "only the rows of layer 0 have moved": part((slice(None), slice(0, 1))),
    "a row is overwritten before it is read; start with the first node of the path": last_first,
    "it copies the wrong way round: row length + path[i] moves to row length + i": (swapped),
    "the root is missing: its token is in the text, and no earlier pass has written its row": (
        drops_the_root
    ),
    "the path is written over the committed rows; it starts at row `length`": moves(
        lambda length, i: i, in_place, lambda length, path: len(path)
    ),
    "the path starts one row too late; its first row is row `length`": moves(
        lambda length, i: length + 1 + i, in_place
    ),
    "it returns how many rows were kept; the new length includes the committed rows": moves(
        in_place, in_place, lambda length, path: len(path)
    ),
    "the rows are right, but the new length is one too large: a forgotten row would be seen": (
        moves(in_place, in_place, lambda length, path: length + len(path) + 1)
    ),
    "the rows are right, but the new length is one too small: it counts no root": moves(
        in_place, in_place, lambda length, path: length + len(path) - 1
    ),
    "the rows are right, but the new length is that of the last node's old row; the path is now "
    "without gaps": moves(in_place, in_place, lambda length, path: length + path[-1] + 1),
}

# ---- rounds --------------------------------------------------------------------------------------

LOOPS = [
    engine.Loop(0, (4, 7), 5), engine.Loop(1, (5,), 6), engine.Loop(2, (8, 1, 3, 3, 2), 9),
    engine.Loop(3, (2, 6), 7, context=8),
]  # fmt: skip
LOOP_MISTAKES = {
    "it takes the first row's choice; what follows the newest token is in the last row": (
        engine.altered(rounds, ("hidden[-1]", "hidden[0]"))
    ),
    "it commits one row, but the first pass reads the whole prompt: commit a row for each new "
    "token": engine.altered(
        rounds, ("list(range(len(new)))", "[0]"), ("text[cache.length :]", "text[read:]"),
        ("cache = model.new_cache()", "cache, read = model.new_cache(), 0"),
        ("text.append(", "read += len(new)\n        text.append("),
    ),
    "it yields the whole text; yield the new token only, in a list": engine.altered(
        rounds, ("yield text[-1:]", "yield list(text)")
    ),
    "it yields a token before it is appended, so it is one round late": engine.altered(
        rounds, ("yield text[-1:]", "yield text[-2:-1]")
    ),
}  # fmt: skip

# ---- decoder -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Script:
    """What a loop yields, and the arguments of `decode`; the checkpoint is one of lesson 00's."""

    ends: bool  # the checkpoint has end tokens: 3, 5 and 8
    prompt: tuple[int, ...]
    yields: tuple[tuple[int, ...], ...]
    n: int
    seed: int = 0


def random_script(seed: int) -> Script:
    rng = random.Random(seed)
    yields = tuple(tuple(rng.choices(range(12), k=rng.randint(1, 4))) for _ in range(9))
    return Script(seed % 2 == 1, tuple(rng.choices(range(12), k=3)), yields, 3 + seed, seed)


SCRIPTS = [
    Script(False, (3, 9), ((1,), (2,), (4,)), 2), Script(False, (3, 9), ((1, 2), (4, 6, 7)), 4),
    Script(True, (3, 9), ((1, 2), (4, 5, 7), (1,)), 9), Script(False, (4,), ((1,), (2,)), 0),
    *map(random_script, range(6)),
]  # fmt: skip


def run_decoder(function, case: Script) -> list[int]:
    asked, folder = [], checkpoints()[case.ends]
    settings = {"temperature": 0.5, "top_k": 3, "top_p": 0.9}

    def loop(model, text, **given):
        asked.append((model, list(text), given))
        for new in case.yields:
            text += new
            yield list(new)

    decode = function(loop, drafter=run_decoder)
    if not callable(decode):
        raise Wrong("it must return the function `decode`")
    for _ in range(2):
        tokens = call(
            lambda prompt: decode(
                folder, prompt, max_new_tokens=case.n, **settings, seed=case.seed
            ),
            prompt=list(case.prompt),
        )
    if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
        raise Wrong("`decode` must return a list of tokens, each of type int")
    for model, text, given in asked:
        randomness = given.pop("randomness", None)
        if text != list(case.prompt):
            raise Wrong("`rounds` must get a copy of the prompt: list(prompt)")
        if not isinstance(randomness, Seeded) or randomness.generator.initial_seed() != case.seed:
            raise Wrong("`rounds` must get randomness=Seeded(seed)")
        if given != settings | {"drafter": run_decoder}:
            raise Wrong("`rounds` must get the parts and all settings of `decode`, by their names")
        if model is not asked[0][0]:
            raise Wrong("it loads the model for each text; keep it, for example with "
                        "functools.cache(load)")  # fmt: skip
    return tokens


def right_tokens(case: Script) -> list[int]:
    tokens, stop = sum(map(list, case.yields), [])[: case.n], (3, 5, 8) if case.ends else ()
    ends = [i + 1 for i, token in enumerate(tokens) if token in stop]
    return tokens[: min(ends, default=case.n)]


def show_script(case: Script) -> str:
    ends = "end tokens 3, 5 and 8" if case.ends else "no end tokens"
    rows = ", ".join(map(numbers, case.yields))
    return f"rounds of {rows}; max_new_tokens = {case.n}, {ends}"


DECODER_MISTAKES = {
    "it returns the prompt, too; return only the new tokens": engine.altered(
        decoder, ("return new\n", "return [*prompt, *new]\n")
    ),
    "it goes on after an end token; stop if a token is in model.config.eos_ids": engine.altered(
        decoder, ("model.config.eos_ids", "()")
    ),
    "the end token is missing: it is the last of the new tokens": engine.altered(
        decoder, ("                break", "                return new[:-1]")
    ),
    "it ends after max_new_tokens rounds, but a round may yield several tokens": engine.altered(
        decoder, ("islice((token for tokens in source for token in tokens), max_new_tokens)",
                  "[token for tokens in islice(source, max_new_tokens) for token in tokens]"),
    ),
    "it ends with a round; the end may lie among the tokens of one": engine.altered(
        decoder, ("for token in islice((token for tokens in source for token in tokens), "
                  "max_new_tokens):\n            new.append(token)\n"
                  "            if token in model.config.eos_ids:",
                  "for tokens in source:\n            new += tokens if max_new_tokens else []\n"
                  "            if len(new) >= max_new_tokens or {*new} & {*model.config.eos_ids}:"),
    ),
}  # fmt: skip

# ---- tasks ---------------------------------------------------------------------------------------

RANGES = {
    "speedup_at_16": (0.1, 16), "speedup_at_512": (0.1, 512), "slower_at_512": (0.1, 32),
    "kilobytes_per_token": (0.01, 10_000),
}  # fmt: skip
TASKS = [
    Task(
        name="mask",
        package=package_mask,
        solution=mask,
        judge=Oracle(
            CASES, run_mask, fresh_scores, score_distance, show_mask,
            f"in {len(CASES)} trees every node's logits are those of a fresh pass",
            tolerance=1e-9, arguments=show_tree, diagnose=diagnose_mask,
        ),
        hints=(
            "Start with False everywhere. Every row is True in columns 0 … length - 1.",
            "A node sees what its parent sees, and itself. Parents come before their children, so "
            "the parent's row is finished.",
        ),
        mistakes=MASK_MISTAKES,
        shows=(tree.layout, KVCache.place),
    ),
    Task(
        name="commit",
        package=package_commit,
        solution=commit,
        judge=Oracle(
            CASES, run_commit, fresh_rows, kept_distance, show_commit,
            f"after {len(CASES)} rounds the cache equals that of a fresh pass",
            tolerance=1e-9,
            arguments=lambda case: f"{show_tree(case)}, path = {numbers(case.path)}",
            diagnose=diagnose_commit,
        ),
        hints=(
            "Node path[i] is in row length + path[i] and belongs in row length + i.",
            "kv[:, :, row] is a row of all layers, keys and values. If you move one row at a time, "
            "which one must be first, so that none is overwritten before it is read?",
        ),
        mistakes=COMMIT_MISTAKES,
        shows=(KVCache.commit,),
    ),
    Task(
        name="rounds",
        package=package_rounds,
        solution=rounds,
        judge=engine.loops(LOOPS, f"{len(LOOPS)} texts of a toy, and no row is read twice"),
        hints=(
            "text[cache.length:] is what the cache lacks: first the prompt, then a single token.",
            "A loop: a pass over the new tokens, with their mask; `commit` all of its rows; append "
            "the last row's choice to the text; yield it.",
        ),
        mistakes=LOOP_MISTAKES,
        shows=(engine.package_rounds,),
    ),
    Task(
        name="decoder",
        package=package_decoder,
        solution=decoder,
        judge=Oracle(
            SCRIPTS, run_decoder, right_tokens, differ,
            lambda case, got, right: f"{show_script(case)}: it returns {got}; {right} is right",
            f"{len(SCRIPTS)} texts", arguments=show_script,
        ),
        hints=(
            "Two functions, one in the other: `decoder` defines `decode` and returns it.",
            "for tokens in rounds(model, list(prompt), **parts, randomness=…, **settings): for "
            "token in tokens: …, and leave both loops where the text ends.",
        ),
        mistakes=DECODER_MISTAKES,
        shows=(package_decoder,),
    ),
]  # fmt: skip

# ---- the quiz ------------------------------------------------------------------------------------

QUIZ = [
    Question(
        "A text of 100 tokens is in the cache, and then token 40 is replaced. Is it enough to "
        "compute row 40 of the cache again?",
        False,
        "in all layers but the first, the later rows have been computed from row 40, so they must "
        "be computed again as well.",
    ),
    Question(
        "Two drafts are siblings in a tree. What do they share in the pass?",
        "a",
        "both would be the next token of the same text, which gives them one position, but every "
        "node writes a row of its own.",
        (
            "the position, but not the row of the cache",
            "the row of the cache, but not the position",
            "both",
        ),
    ),
    Question(
        "A chain of three drafts is scored, and the first two are accepted. How many rows of the "
        "cache must `commit` move?",
        0,
        "the root and its accepted drafts already follow the committed rows in order, so only the "
        "length changes.",
    ),
    Question(
        "`commit` moves the row of an accepted draft. Must its key be rotated again, for the new "
        "position?",
        False,
        "the key was rotated for position length + depth, which is the number of the row that it "
        "moves to.",
    ),
    Question(
        "With a cache, SmolLM2's next token took about as long after 512 tokens as after 16. Why?",
        "b",
        "each pass reads 538 MB of weights, and even 512 rows of the cache are only 24 MB.",
        (
            "the new row attends to the latest rows of the cache only",
            "reading the weights takes most of a pass, and the text does not change that",
            "a cached row has been through attention already, so it is not read again",
        ),
    ),
]
