"""Deliberate bugs. Each has been made in practice; the certifier's check and case that it names
must catch it.

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
from minispec.certify.methods import cases, checks
from minispec.certify.methods.checks import CHECKS
from minispec.certify.toys import Toy
from minispec.generate.run import Run, StopConditions
from minispec.methods import fastmtp, lookahead, medusa, prompt_lookup, speculative
from minispec.methods.vocabulary import SubsetIds
from minispec.model import Transformer
from minispec.sampling import OneHot, Sampling, Seeded, draw, probs
from minispec.tree import Tree


@dataclass(frozen=True)
class Mutant:
    """A bug, as replacements of module and class attributes, and the check that must catch it."""

    name: str
    check: str
    case: str  # a part of the names of the cases to run
    patches: tuple[tuple[object, str, object], ...]  # owner, attribute, replacement

    @contextlib.contextmanager
    def apply(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for owner, attribute, mistake in self.patches:
                stack.enter_context(mock.patch.object(owner, attribute, mistake))
            yield

    def caught(self) -> str | None:
        """Describe where its check fails, or return None; a crash is a failure too."""
        with self.apply():
            try:
                for verdict in CHECKS[self.check](only=self.case):
                    if not verdict.passed:
                        return f"caught by {self.check}: {verdict.case}"
            except Exception as error:
                return f"caught by {self.check}: {type(error).__name__}"
        return None


def in_accept(mistake) -> tuple:
    """Replace `accept`: the cases pass it to every method as its rule."""
    return ((cases, "accept", mistake),)


# ---- accept --------------------------------------------------------------------------------------


def resample_from_p(p: Tensor, q: Tensor | None, x: int) -> Tensor:
    """Leave p unchanged after a rejection."""
    return p


class Lenient:
    """Raise every acceptance probability by a factor of 1 / 0.8."""

    def __init__(self, randomness):
        self.categorical, self.original = randomness.categorical, randomness

    def bernoulli(self, p: float) -> bool:
        return self.original.bernoulli(min(1.0, p / 0.8))


def lenient(target, tree, randomness):
    return verify.accept(target, tree, Lenient(randomness))


def argmax_bonus(target, tree, randomness):
    path, fresh, *_ = verify.accept(target, tree, randomness)
    return path, int(target[path[-1]].argmax()) if not tree.children(path[-1]) else fresh


def probs_after_the_draft(target, tree, randomness):
    """Verify a draft against the distribution after it instead of the one at its own position."""
    shifted = [target[tree.children(i)[0] if tree.children(i) else i] for i in range(len(tree))]
    return verify.accept(shifted, tree, randomness)


def best_of_independent_paths(target, tree, randomness):
    """Draw target tokens separately for each path; the path with the longest match wins."""
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
    """Accept no child, but subtract each from p as if it had been rejected."""
    p = target[0]
    for child in tree.children(0):
        rest = verify.residual(p, tree.drawn_from(child), tree.tokens[child])
        p = p if rest is None else rest
    return [0], randomness.categorical(p)


def padding_matches(target, tree, randomness):
    """Pad short paths with token 0, and compare the padding with the argmax as well."""
    path, fresh, *_ = verify.accept(target, tree, randomness)
    short = not tree.children(path[-1]) and len(path) <= max(tree.depths)
    return path, 0 if short and int(target[len(tree) - 1].argmax()) == 0 else fresh


def argmax_root(target, tree, randomness):
    """Take the target's best token as the next root, even when sampling."""
    path, _, *_ = verify.accept(target, tree, randomness)
    return path, int(target[path[-1]].argmax())


# ---- proposals -----------------------------------------------------------------------------------

propose, grow, propose_ranks = speculative.propose, cases.grow, medusa.propose


def greedy_draft_with_softmax(logits, sampling, randomness):
    """Draft the argmax, but report it as drawn from the softmax."""
    token, q = draw(logits, sampling, randomness)
    return token, probs(logits, Sampling(1.0))[0] if q is None else q


def confident_prefix(*arguments):
    """Drop low-confidence drafts after they have been drawn."""
    guess, draft_probs = propose(*arguments)
    for i, (x, q) in enumerate(zip(guess, draft_probs)):
        if q is not None and q[x] < 0.4:
            return guess[:i], draft_probs[:i]
    return guess, draft_probs


class Reduced:
    """Draw only from the two most probable tokens of any distribution."""

    def __init__(self, randomness):
        self.original, self.bernoulli = randomness, randomness.bernoulli

    def categorical(self, probs: Tensor) -> int:
        kept = torch.zeros_like(probs)
        best = probs.topk(2).indices
        kept[best] = probs[best]
        return self.original.categorical(kept / kept.sum())


def reduced_vocabulary(draft, cache, tokens, k, sampling, randomness, vocabulary):
    """Draw from a reduced vocabulary, but score with the distribution over the full one."""
    return propose(draft, cache, tokens, k, sampling, Reduced(randomness), vocabulary)


def ranks_with_softmax(heads, draft_head, hidden, *arguments):
    """Apply the p / q test for sampled drafts to the heads' top tokens."""
    tree = propose_ranks(heads, draft_head, hidden, *arguments)
    if len(tree) == 1:
        return tree
    predicted = heads(hidden[0], draft_head).softmax(-1)  # (K, V)
    draft_probs = [predicted[depth - 1] if depth else None for depth in tree.depths]
    return Tree(tree.tokens, tree.parents, draft_probs)


def candidates_with_softmax(draft, tokens, shape, kind, sampling, randomness):
    """Apply the p / q test for sampled drafts to top-k candidates."""
    tree = grow(draft, tokens, shape, kind, sampling, randomness)
    if kind != "one-hot":
        return tree
    return Tree(tree.tokens, tree.parents, softmaxes(draft, tokens, tree))


def siblings_not_renormalised(draft, tokens, shape, kind, sampling, randomness):
    """Draw siblings without replacement, but score each with the distribution of the first draw."""
    tree = grow(draft, tokens, shape, kind, sampling, randomness)
    if kind != "without replacement":
        return tree
    return Tree(tree.tokens, tree.parents, softmaxes(draft, tokens, tree))


def softmaxes(draft, tokens: list[int], tree: Tree) -> list[Tensor | None]:
    """Return the draft's softmax at each node's parent."""
    paths = {0: []}
    found: list[Tensor | None] = [None]
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        paths[node] = paths[parent] + [tree.tokens[node]]
        hidden = draft(tokens + paths[parent])
        found.append(probs(draft.logits(hidden[0, -1:]), Sampling(1.0))[0])
    return found


combined_mask, score_and_accept = lookahead.combined_mask, lookahead.score_and_accept
chain = fastmtp.HeadDrafter.chain


def guesses_see_the_window(tree, window):
    depth, mask = combined_mask(tree, window)
    mask = mask.clone()
    mask[1 : len(tree), len(tree) :] = True
    return depth, mask


def warm_up_verified(model, cache, tree, ahead, *arguments):
    """Emit the prediction at the window's first guess while the window is still filling."""
    (path, fresh, *_), predicted = score_and_accept(model, cache, tree, ahead, *arguments)
    filling = ahead is not None and len(ahead.rows) < ahead.ngram - 1
    return (path, predicted[1] if filling and len(predicted) > 1 else fresh), predicted


def probs_over_all(self, k, sampling, randomness, draft_head):
    """Draw from the small vocabulary, but score with the softmax over the full one."""
    full_probs = []

    class Spy:
        to_full_ids, scatter = draft_head.to_full_ids, draft_head.scatter

        @staticmethod
        def logits(hidden):
            full_probs.append(probs(self.model.logits(hidden), Sampling(1.0))[0])
            return draft_head.logits(hidden)

    guess, drawn = chain(self, k, sampling, randomness, Spy)
    return guess, [q if q is None else p for q, p in zip(drawn, full_probs)]


def offsets_as_ids(self, probs: Tensor) -> Tensor:
    """Scatter to d2t, which holds each token minus its own index, as if it held the tokens. Almost
    zero instead of zero: p / q must not raise an exception, as it does not on a GPU."""
    offsets = self.host_ids - torch.arange(len(self.host_ids))
    return probs.new_full((self.size,), 1e-30).scatter_add(0, offsets, probs)


draft = fastmtp.HeadDrafter.draft


def text_preferred_after_drawing(self, tokens, k, draft_head):
    """Draw the head's drafts, then copy from the text instead if its first token differs."""
    rows, draft_probs = draft(self, tokens, k, draft_head)
    copied = prompt_lookup.lookup(tokens, k, 1)
    if not copied or copied[0] == rows[1]:
        return rows, draft_probs
    return torch.tensor([tokens[-1], *copied]), []


def plain_step_after_drawing(self, *arguments):
    """Keep the drafts only if the head drew what it holds to be likely."""
    guess, draft_probs = chain(self, *arguments)
    unlikely = draft_probs and draft_probs[0] is not None and draft_probs[0][guess[0]] < 0.4
    return ([], []) if unlikely else (guess, draft_probs)


# ---- sampling, trees, caches, endings ------------------------------------------------------------


def never_zero(sampling: Sampling) -> Sampling:
    return Sampling(1.0) if sampling.temperature == 0 else sampling


def softmax_at_temperature_zero(logits: Tensor, sampling: Sampling):
    return probs(logits, never_zero(sampling))


def drawn_at_temperature_zero(logits: Tensor, sampling: Sampling, randomness):
    return draw(logits, never_zero(sampling), randomness)


def no_top_k(logits: Tensor, sampling: Sampling):
    """Discard the result of masked_fill."""
    return probs(logits, Sampling(sampling.temperature, 0, sampling.top_p))


def bonus_without_warpers(logits: Tensor, sampling: Sampling):
    target = probs(logits, sampling)
    if isinstance(target, OneHot):
        return target
    return torch.cat([target[:-1], probs(logits[-1:], Sampling(sampling.temperature))])


def pad_is_token_zero(self: Tree, path: list[int]) -> list[int]:
    return [self.tokens[i] for i in path if self.tokens[i] != 0]


def commit_in_place(self: KVCache, path: list[int]) -> None:
    """Count the accepted rows without moving them."""
    self.length = self.length + len(path)


def commit_one_too_many(self: KVCache, path: list[int]) -> None:
    rows = list(range(max(path) + 1)) if path else []
    self.length = min(self.length + len(path) + (len(rows) > 1), self.capacity)


def truncate_one_short(self: KVCache, length: int) -> None:
    """Keep one stale row of a rejected draft."""
    self.length = min(self.length, length + 1)


shared_caches: dict = {}


def one_cache_for_all_calls(self, capacity=None):
    """Keep state between calls."""
    key = (id(self), capacity)
    if key not in shared_caches:
        shared_caches[key] = original_new_cache[type(self)](self, capacity)
    return shared_caches[key]


original_new_cache = {kind: kind.new_cache for kind in (Toy, Transformer)}
emit = Run.emit


def end_checked_after_the_block(self: Run, step):
    """Check EOS, stop strings and lengths only at the end of an accepted block."""
    before = self.stop_conditions
    if len(step.tokens) > 1:
        self.stop_conditions = StopConditions(10**9)
    chunk = emit(self, step)
    self.stop_conditions = before
    if self.finish_reason is None and len(self.tokens) >= self.stop_conditions.max_new_tokens:
        self.finish("length")
    if self.finish_reason is None and self.tokens[-1] in self.stop_conditions.eos_ids:
        self.finish("eos")
    return chunk


def end_token_not_seen_inside(self: Run, step):
    """Miss an EOS that is not the last token of its block."""
    before = self.stop_conditions
    if step.tokens[-1] not in before.eos_ids:
        self.stop_conditions = replace(before, eos_ids=())
    chunk = emit(self, step)
    self.stop_conditions = before
    return chunk


class Stuck(Seeded):
    """Use one random number for all draws of a run."""

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
    Mutant("acceptance probability divided by 0.8", "exact", "speculative k=1", in_accept(lenient)),
    Mutant("bonus token is the argmax", "exact", "speculative k=1", in_accept(argmax_bonus)),
    Mutant("bonus token without warpers", "exact", "speculative k=1, T=0.7",
           ((speculative, "probs", bonus_without_warpers),)),
    Mutant("draft verified against the next position", "greedy",
           "speculative k=1", in_accept(probs_after_the_draft)),
    Mutant("independent draws per path", "exact", "tree wide, one-hot",
           in_accept(best_of_independent_paths)),
    Mutant("siblings rejected untried", "exact", "tree wide", in_accept(child_of_the_root_only)),
    Mutant("argmax draft scored with its softmax", "exact", "speculative k=2, draft T=0",
           ((speculative, "draw", greedy_draft_with_softmax),)),
    Mutant("p / q test for top-k candidates", "exact", "tree wide, one-hot",
           ((cases, "grow", candidates_with_softmax),)),
    Mutant("q over the full vocabulary", "exact", "fastmtp k=2, vocabulary=two",
           ((fastmtp.HeadDrafter, "chain", probs_over_all),)),
    Mutant("head's argmax scored with its softmax", "exact", "fastmtp k=2, draft T=0",
           ((fastmtp, "draw", greedy_draft_with_softmax),)),
    Mutant("d2t taken for token ids", "exact", "eagle3 k=2, T=1",
           ((SubsetIds, "scatter", offsets_as_ids),)),
    Mutant("copied from the text after drawing other drafts", "exact", "hybrid k=1",
           ((fastmtp.HeadDrafter, "draft", text_preferred_after_drawing),)),
    Mutant("a plain step chosen after the drafts were drawn", "exact", "fastmtp k=1, T=1",
           ((fastmtp.HeadDrafter, "chain", plain_step_after_drawing),)),
    Mutant("guesses see the window", "exact", "lookahead window=3, ngram=3",
           ((lookahead, "combined_mask", guesses_see_the_window),)),
    Mutant("prediction emitted during warm-up", "greedy", "lookahead window=2, ngram=4",
           ((lookahead, "score_and_accept", warm_up_verified),)),
    Mutant("padding treated as a token", "exact", "tree deep, one-hot", in_accept(padding_matches)),
    Mutant("root is always the argmax", "exact", "medusa tree 0000",
           in_accept(argmax_root)),
    Mutant("p / q test for the heads' top tokens", "exact", "medusa tree 0000",
           ((medusa, "propose", ranks_with_softmax),)),
    Mutant("siblings without replacement not renormalised", "exact",
           "tree wide, without replacement",
           ((cases, "grow", siblings_not_renormalised),)),
    Mutant("low-confidence draft dropped after sampling", "exact", "speculative k=1",
           ((speculative, "propose", confident_prefix),)),
    Mutant("reduced vocabulary not renormalised", "exact", "speculative k=1",
           ((speculative, "propose", reduced_vocabulary),)),
    Mutant("top-k has no effect", "exact", "speculative k=1, T=0.7",
           ((speculative, "probs", no_top_k),)),
    Mutant("token 0 treated as padding", "exact", "speculative k=1",
           ((Tree, "tokens_at", pad_is_token_zero),)),
    Mutant("positions off by one", "greedy", "tree chain",
           ((Tree, "depth", property(positions_off_by_one)),)),
    Mutant("siblings see each other", "exact", "tree wide, one-hot",
           ((Tree, "mask", property(everything_before_is_visible)),)),
    Mutant("accepted rows not compacted", "cache", "tree wide",
           ((KVCache, "commit", commit_in_place),)),
    Mutant("one row committed too many", "cache", "prompt-lookup",
           ((KVCache, "commit", commit_one_too_many),)),
    Mutant("a stale draft row kept", "cache", "speculative",
           ((KVCache, "truncate", truncate_one_short),)),
    Mutant("endings checked only after the block", "limits", "speculative",
           ((Run, "emit", end_checked_after_the_block),)),
    Mutant("EOS not seen inside a block", "limits", "speculative",
           ((Run, "emit", end_token_not_seen_inside),)),
    Mutant("one random number for all draws", "statistical", "speculative",
           ((checks, "Seeded", Stuck),)),
    Mutant("greedy decoding by a ratio of softmaxes", "greedy", "speculative k=1",
           ((speculative, "probs", softmax_at_temperature_zero),
            (speculative, "draw", drawn_at_temperature_zero))),
    Mutant("state kept between calls", "greedy", "prompt-lookup",
           tuple((kind, "new_cache", one_cache_for_all_calls) for kind in original_new_cache)),
]  # fmt: skip
