"""Seeded mistakes. Each was made by somebody, and each must be caught by the check and in the case
that it names.

They are also the classic wrong answers: try one with `with mutant.apply(): ...`.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from unittest import mock

import torch
from torch import Tensor

from minispec import verify
from minispec.cache import KVCache
from minispec.certify.ours import cases, checks
from minispec.certify.ours.checks import CHECKS, Verdict
from minispec.generate.run import Ending, Run
from minispec.methods import fastmtp, lookahead, medusa, prompt_lookup, speculative
from minispec.model import Transformer
from minispec.sampling import OneHot, Sampling, Seeded, draw, probs
from minispec.toys import Toy
from minispec.tree import Tree


@dataclass(frozen=True)
class Mutant:
    """A mistake: attributes of modules and classes, what they are replaced by, and where that must
    show."""

    name: str
    check: str
    case: str  # or the beginning of several
    patches: tuple[tuple[object, str, object], ...]

    @contextlib.contextmanager
    def apply(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for owner, attribute, mistake in self.patches:
                stack.enter_context(mock.patch.object(owner, attribute, mistake))
            yield

    def caught(self) -> str | None:
        """Where its check fails, if it does; a crash is a failure too."""
        with self.apply():
            try:
                for verdict in CHECKS[self.check](only=self.case):
                    if not verdict.passed:
                        return f"caught by {self.check}: {verdict.case}"
            except Exception as error:
                return f"caught by {self.check}: {type(error).__name__}"
        return None


def check_mutants(only: str = "") -> Iterator[Verdict]:
    """Every seeded mistake must make its check fail; a survivor fails the run."""
    for mutant in MUTANTS:
        if only in mutant.name:
            caught = mutant.caught()
            detail = caught or f"SURVIVED {mutant.check}: {mutant.case}"
            yield Verdict("mutants", mutant.name, caught is not None, detail)


def in_accept(mistake) -> tuple:
    """`accept` replaced wherever it verifies drafts."""
    modules = speculative, prompt_lookup, medusa, lookahead, fastmtp, cases
    return tuple((module, "accept", mistake) for module in modules)


# ---- accept --------------------------------------------------------------------------------------


def resample_from_p(p: Tensor, q: Tensor | None, x: int) -> Tensor:
    """On a mismatch p stays what it was."""
    return p


class Lenient:
    """Every acceptance made easier by a factor 0.8."""

    def __init__(self, randomness):
        self.categorical, self.original = randomness.categorical, randomness

    def bernoulli(self, p: float) -> bool:
        return self.original.bernoulli(min(1.0, p / 0.8))


def lenient(target, tree, randomness):
    return verify.accept(target, tree, Lenient(randomness))


def argmax_bonus(target, tree, randomness):
    path, fresh = verify.accept(target, tree, randomness)
    return path, int(target[path[-1]].argmax()) if not tree.children(path[-1]) else fresh


def probs_after_the_draft(target, tree, randomness):
    """Judges a draft by the distribution after it instead of the one it was to match."""
    shifted = [target[tree.children(i)[0] if tree.children(i) else i] for i in range(len(tree))]
    return verify.accept(shifted, tree, randomness)


def best_of_independent_paths(target, tree, randomness):
    """Each path draws its own target tokens; the one that matches longest wins."""
    leaves = [i for i in range(len(tree)) if not tree.children(i)]
    best = ([0], None)
    for leaf in leaves:
        path = [leaf]
        while path[0]:
            path.insert(0, tree.parents[path[0]])
        for n, node in enumerate(path):
            y = randomness.categorical(target[node])
            if n + 1 == len(path) or tree.tokens[path[n + 1]] != y:
                break
        if best[1] is None or n + 1 > len(best[0]):
            best = (path[: n + 1], y)
    return best


def child_of_the_root_only(target, tree, randomness):
    """Siblings after the first are never tried, but still taken out of p."""
    p = target[0]
    for child in tree.children(0):
        rest = verify.residual(p, tree.drawn_from(child), tree.tokens[child])
        p = p if rest is None else rest
    return [0], randomness.categorical(p)


def padding_matches(target, tree, randomness):
    """Short paths are padded with token 0, and the padding is compared with an argmax as well."""
    path, fresh = verify.accept(target, tree, randomness)
    short = not tree.children(path[-1]) and len(path) <= max(tree.depths)
    return path, 0 if short and int(target[len(tree) - 1].argmax()) == 0 else fresh


def argmax_root(target, tree, randomness):
    """The next tree's root is the target's best token, under sampling too."""
    path, _ = verify.accept(target, tree, randomness)
    return path, int(target[path[-1]].argmax())


# ---- proposals -----------------------------------------------------------------------------------

propose, grow, propose_ranks = speculative.propose, cases.grow, medusa.propose


def greedy_draft_with_softmax(logits, sampling, randomness):
    """The argmax of a draft, said to have been drawn from its softmax."""
    token, q = draw(logits, sampling, randomness)
    return token, probs(logits, Sampling(1.0))[0] if q is None else q


def confident_prefix(*arguments):
    """Drops what was drawn with little confidence, after it was drawn."""
    guess, draft_probs = propose(*arguments)
    for i, (x, q) in enumerate(zip(guess, draft_probs)):
        if q is not None and q[x] < 0.4:
            return guess[:i], draft_probs[:i]
    return guess, draft_probs


class Reduced:
    """Draws from the two likeliest tokens of whatever it is given."""

    def __init__(self, randomness):
        self.original, self.bernoulli = randomness, randomness.bernoulli

    def categorical(self, probs: Tensor) -> int:
        kept = torch.zeros_like(probs)
        best = probs.topk(2).indices
        kept[best] = probs[best]
        return self.original.categorical(kept / kept.sum())


def reduced_vocabulary(draft, cache, tokens, k, sampling, randomness, vocabulary):
    """Drawn from a reduced vocabulary, scored with the distribution over the full one."""
    return propose(draft, cache, tokens, k, sampling, Reduced(randomness), vocabulary)


def ranks_with_softmax(heads, words, hidden, *arguments):
    """The heads' best tokens put to the p / q test of drawn ones."""
    tree = propose_ranks(heads, words, hidden, *arguments)
    if len(tree) == 1:
        return tree
    said = heads(hidden[0], words).softmax(-1)  # (K, V)
    return Tree(
        tree.tokens, tree.parents, [said[depth - 1] if depth else None for depth in tree.depths]
    )


def candidates_with_softmax(draft, tokens, shape, kind, sampling, randomness):
    """Top-k candidates put to the p / q test of drawn ones."""
    tree = grow(draft, tokens, shape, kind, sampling, randomness)
    if kind != "one-hot":
        return tree
    return Tree(tree.tokens, tree.parents, softmaxes(draft, tokens, tree))


def siblings_not_renormalised(draft, tokens, shape, kind, sampling, randomness):
    """Drawn without replacement, each scored with the distribution of the first draw."""
    tree = grow(draft, tokens, shape, kind, sampling, randomness)
    if kind != "without replacement":
        return tree
    return Tree(tree.tokens, tree.parents, softmaxes(draft, tokens, tree))


def softmaxes(draft, tokens: list[int], tree: Tree) -> list[Tensor | None]:
    """The draft's softmax after each node's parent."""
    paths = {0: []}
    found: list[Tensor | None] = [None]
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        paths[node] = paths[parent] + [tree.tokens[node]]
        hidden = draft(tokens + paths[parent])
        found.append(probs(draft.logits(hidden[0, -1:]), Sampling(1.0))[0])
    return found


combined_mask, one_pass = lookahead.combined_mask, lookahead.one_pass
chain = fastmtp.Drafter.chain


def guesses_see_the_window(tree, window):
    depth, mask = combined_mask(tree, window)
    mask = mask.clone()
    mask[1 : len(tree), len(tree) :] = True
    return depth, mask


def warm_up_verified(model, cache, tree, ahead, sampling, randomness):
    """While the window fills, what its first guess says is emitted."""
    path, fresh, said = one_pass(model, cache, tree, ahead, sampling, randomness)
    filling = ahead is not None and len(ahead.rows) < ahead.ngram - 1
    return path, said[1] if filling and len(said) > 1 else fresh, said




def probs_over_all(self, k, sampling, randomness, subset):
    """Drawn from the small vocabulary, scored with the softmax over the full one."""
    whole = []

    class Spy:
        full, scatter = subset.to_full_ids, subset.scatter

        @staticmethod
        def logits(hidden):
            whole.append(probs(self.model.logits(hidden), Sampling(1.0))[0])
            return subset.logits(hidden)

    guess, drawn = chain(self, k, sampling, randomness, Spy)
    return guess, [q if q is None else p for q, p in zip(drawn, whole)]


# ---- sampling, trees, caches, endings ------------------------------------------------------------


def never_zero(sampling: Sampling) -> Sampling:
    return Sampling(1.0) if sampling.temperature == 0 else sampling


def softmax_at_temperature_zero(logits: Tensor, sampling: Sampling):
    return probs(logits, never_zero(sampling))


def drawn_at_temperature_zero(logits: Tensor, sampling: Sampling, randomness):
    return draw(logits, never_zero(sampling), randomness)


def no_top_k(logits: Tensor, sampling: Sampling):
    """The result of masked_fill is thrown away."""
    return probs(logits, Sampling(sampling.temperature, 0, sampling.top_p))


def bonus_without_warpers(logits: Tensor, sampling: Sampling):
    target = probs(logits, sampling)
    if isinstance(target, OneHot):
        return target
    return torch.cat([target[:-1], probs(logits[-1:], Sampling(sampling.temperature))])


def pad_is_token_zero(self: Tree, path: list[int]) -> list[int]:
    return [self.tokens[i] for i in path if self.tokens[i] != 0]


def commit_in_place(self: KVCache, path: list[int]) -> None:
    """The accepted rows are counted, not moved."""
    self.lengths = [self.length + len(path)]


def commit_one_too_many(self: KVCache, path: list[int]) -> None:
    rows = list(range(max(path) + 1)) if path else []
    self.lengths = [min(self.length + len(path) + (len(rows) > 1), self.capacity)]


def truncate_one_short(self: KVCache, length: int) -> None:
    """A stale row of a rejected draft stays."""
    self.lengths = [min(self.length, length + 1)]


shared_caches: dict = {}


def one_cache_for_all_calls(self, capacity=None, batch=1):
    """State kept between calls."""
    key = (id(self), capacity)
    if key not in shared_caches:
        shared_caches[key] = original_new_cache[type(self)](self, capacity, batch)
    return shared_caches[key]


original_new_cache = {kind: kind.new_cache for kind in (Toy, Transformer)}
take = Run.take


def end_checked_after_the_block(self: Run, step):
    """EOS, stops and lengths are looked for at the end of an accepted block only."""
    before = self.ending
    if len(step.tokens) > 1:
        self.ending = Ending(10**9)
    chunk = take(self, step)
    self.ending = before
    if self.finish_reason is None and len(self.tokens) >= self.ending.max_new_tokens:
        self.finish("length")
    if self.finish_reason is None and self.tokens[-1] in self.ending.eos_ids:
        self.finish("eos")
    return chunk


def end_token_not_seen_inside(self: Run, step):
    """An EOS that is not the last of its block passes unnoticed."""
    before = self.ending
    if step.tokens[-1] not in before.eos_ids:
        self.ending = replace(before, eos_ids=())
    chunk = take(self, step)
    self.ending = before
    return chunk


class Stuck(Seeded):
    """One random number for all draws of a run."""

    def uniform(self) -> float:
        self.number = getattr(self, "number", None) or super().uniform()
        return self.number


def positions_off_by_one(self: Tree) -> Tensor:
    return torch.tensor([depth + (depth > 0) for depth in self.depths])


def everything_before_is_visible(self: Tree) -> Tensor:
    return torch.ones(len(self), len(self), dtype=torch.bool).tril()


MUTANTS = [
    Mutant("a rejection resamples from p", "exact", "speculative k=1",
           ((verify, "residual", resample_from_p),)),
    Mutant("acceptance lenient by 0.8", "exact", "speculative k=1", in_accept(lenient)),
    Mutant("the bonus is an argmax", "exact", "speculative k=1", in_accept(argmax_bonus)),
    Mutant("the bonus has no warpers", "exact", "speculative k=1, T=0.7",
           ((speculative, "probs", bonus_without_warpers),)),
    Mutant("a draft judged by the distribution after it", "greedy",
           "speculative, random draft, k=1", in_accept(probs_after_the_draft)),
    Mutant("independent draws per path", "exact", "tree, wide, one-hot",
           in_accept(best_of_independent_paths)),
    Mutant("siblings removed untried", "exact", "tree, wide", in_accept(child_of_the_root_only)),
    Mutant("a greedy draft with its softmax", "exact", "speculative k=2, greedy draft",
           ((speculative, "draw", greedy_draft_with_softmax),)),
    Mutant("top-k candidates with p / q", "exact", "tree, wide, one-hot",
           ((cases, "grow", candidates_with_softmax),)),
    Mutant("q over the full vocabulary", "exact", "fastmtp, k=2, compressed",
           ((fastmtp.Drafter, "chain", probs_over_all),)),
    Mutant("a head's best token with its softmax", "exact", "fastmtp, k=2, argmax drafts",
           ((fastmtp, "draw", greedy_draft_with_softmax),)),
    Mutant("guesses see the window", "exact", "lookahead W=3 N=3",
           ((lookahead, "combined_mask", guesses_see_the_window),)),
    Mutant("warm-up verified", "greedy", "lookahead, W=2 N=4",
           ((lookahead, "one_pass", warm_up_verified),)),
    Mutant("padding taken for a token", "limits", "medusa", ((medusa, "accept", padding_matches),)),
    Mutant("a root that is always argmax", "exact", "medusa, deep",
           ((medusa, "accept", argmax_root),)),
    Mutant("ranks of heads with p / q", "exact", "medusa, deep",
           ((medusa, "propose", ranks_with_softmax),)),
    Mutant("siblings without replacement not renormalised", "exact",
           "tree, wide, without replacement",
           ((cases, "grow", siblings_not_renormalised),)),
    Mutant("an unlikely draft dropped after its draw", "exact", "speculative k=1",
           ((speculative, "propose", confident_prefix),)),
    Mutant("a reduced vocabulary not renormalised", "exact", "speculative k=1",
           ((speculative, "propose", reduced_vocabulary),)),
    Mutant("top-k without effect", "exact", "speculative k=1, T=0.7",
           ((speculative, "probs", no_top_k),)),
    Mutant("token 0 taken for padding", "exact", "speculative k=1",
           ((Tree, "tokens_at", pad_is_token_zero),)),
    Mutant("positions off by one", "greedy", "tree, chain",
           ((Tree, "depth", property(positions_off_by_one)),)),
    Mutant("siblings see each other", "exact", "tree, wide, one-hot",
           ((Tree, "mask", property(everything_before_is_visible)),)),
    Mutant("accepted rows not compacted", "cache", "tree, wide",
           ((KVCache, "commit", commit_in_place),)),
    Mutant("one row committed too many", "cache", "prompt-lookup",
           ((KVCache, "commit", commit_one_too_many),)),
    Mutant("a stale draft row kept", "cache", "speculative",
           ((KVCache, "truncate", truncate_one_short),)),
    Mutant("ends looked for after the block", "limits", "speculative",
           ((Run, "take", end_checked_after_the_block),)),
    Mutant("EOS not seen inside a block", "limits", "speculative",
           ((Run, "take", end_token_not_seen_inside),)),
    Mutant("one random number for all draws", "statistical", "speculative",
           ((checks, "Seeded", Stuck),)),
    Mutant("greedy by a ratio of softmaxes", "greedy", "speculative, random draft, k=1",
           ((speculative, "probs", softmax_at_temperature_zero),
            (speculative, "draw", drawn_at_temperature_zero))),
    Mutant("state kept between calls", "greedy", "prompt-lookup",
           tuple((kind, "new_cache", one_cache_for_all_calls) for kind in original_new_cache)),
]  # fmt: skip
