"""Mistakes in a proposal never change the output. So proposals are compared with slow oracles that
recompute them, and checked on texts with known guesses. Their parts (the window, the pool, the
head, its chain, vocabularies) are tested by the assignments; see test_assignments.py."""

import inspect
import math
import random
from collections.abc import Sequence
from unittest import mock

import mistakes
import pytest
import torch
from conftest import SHARED, counting_model, needs_shared, random_model
from tokenizers import Tokenizer as Backend

from minispec.certify.common import GREEDY
from minispec.certify.methods.cases import RANK_TREES, bound
from minispec.certify.toys import (
    random_medusa_heads,
    random_mtp_head,
    randomise,
    small_model,
    two_languages,
)
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.generate import decode
from minispec.methods import medusa
from minispec.methods.adaptive import AdaptiveK, AdaptiveNodes, FixedNodes
from minispec.methods.fastmtp import CHILDREN, HeadDrafter, MTPHead, fastmtp
from minispec.methods.medusa import with_prefixes
from minispec.methods.prompt_lookup import NgramIndex
from minispec.methods.speculative import propose
from minispec.methods.vocabulary import Compressed, FullVocabulary, count
from minispec.model import Transformer
from minispec.sampling import Seeded
from minispec.tree import Tree

# ---- Medusa and FastMTP --------------------------------------------------------------------------


def medusa_tree(seed: int) -> None:
    """Each tree must come from the hidden state before the newest token, recomputed here."""
    model, tokens = small_model(seed), [3, 1, 4]
    heads, paths = random_medusa_heads(model, seed), with_prefixes(RANK_TREES["deep"], 4, 24)
    steps = bound("medusa", heads=heads, tree=paths)(model, tokens, GREEDY, Seeded())
    next(steps)
    for step, _ in zip(steps, range(6)):
        best = heads(model(tokens[:-1])[0, -1], model).topk(2).indices.tolist()
        assert step.tree == Tree.from_paths(tokens[-1], paths, best)
        tokens = tokens + step.tokens


class RandomK:
    """A policy that chooses from 0 to 3 drafts at random."""

    def __init__(self, seed: int):
        self.random, self.chosen = random.Random(seed), []

    def choose(self) -> int:
        self.chosen.append(self.random.randrange(4))
        return self.chosen[-1]

    def observe(self, drafted: int, accepted: int) -> None:
        assert drafted == self.chosen[-1]


def mtp_drafts(seed: int) -> None:
    """Drafts must equal those of fresh passes over all rows, also after plain steps. After every
    round the head's cache must equal that of a fresh pass over the committed tokens, as far as it
    has got; the remaining rows of the target's cache must be pending."""
    model, tokens = small_model(seed, vocab=3), [2, 1, 0]  # so small that drafts are often right
    head, cache, policy = random_mtp_head(model, seed), model.new_cache(), RandomK(seed)
    rounds = bound("fastmtp", head=head, k=policy)(model, tokens, GREEDY, Seeded(), cache=cache)
    next(rounds)
    for step, _ in zip(rounds, range(24)):
        assert step.tree.tokens[1:] == fresh_drafts(head, model, tokens, policy.chosen[-1])
        tokens = tokens + step.tokens
        kept = inspect.getgeneratorlocals(rounds)["drafter"]
        fresh = HeadDrafter(head, model, head.new_cache(128), 0)
        fresh.extend(model(tokens[:-1])[0], tokens[1:])
        rows, pending = kept.cache.length, sum(len(hidden) for hidden, _ in kept.pending)
        assert rows + pending == cache.length == fresh.cache.length
        assert torch.allclose(kept.cache.kv[..., :rows, :, :], fresh.cache.kv[..., :rows, :, :])


def fresh_drafts(head: MTPHead, model: Transformer, tokens: list[int], k: int) -> list[int]:
    """Argmax drafts, recomputing every row of the head for each of them."""
    hidden, drafts = model(tokens[:-1])[0], []
    for _ in range(k):
        row = HeadDrafter(head, model, head.new_cache(128), 0).run(hidden, tokens[1:] + drafts)[-1:]
        drafts.append(int(model.logits(row).argmax()))
        hidden = torch.cat([hidden, row])
    return drafts


class RandomNodes:
    """A policy that chooses the tree's shape and size at random."""

    calibration = 1.0

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def drafting(self, values) -> bool:
        self.shape = self.random.randint(1, 3), self.random.randint(0, 3)
        return self.shape[1] > 0

    def width(self, level, values) -> int:
        return self.shape[0] if level < self.shape[1] else 0

    def choose(self, values, free_rows) -> int:
        self.n = self.random.randint(0, min(12, free_rows))
        return self.n

    def observe(self, drafted, accepted) -> None:
        assert drafted <= self.n


def mtp_tree(seed: int) -> None:
    """Each tree must have the nodes of an expansion that recomputes every row of the head for each
    path, and the head's cache must follow the text."""
    model, tokens = small_model(seed, vocab=5), [2, 1, 0]
    head, cache, policy = random_mtp_head(model, seed), model.new_cache(), RandomNodes(seed)
    rounds = bound("fastmtp", head=head, tree=policy)(model, tokens, GREEDY, Seeded(), cache=cache)
    next(rounds)
    for step, _ in zip(rounds, range(16)):
        assert paths_of(step.tree) == fresh_paths(head, model, tokens, policy)
        tokens = tokens + step.tokens
        drafter = inspect.getgeneratorlocals(rounds)["drafter"]
        fresh, rows = HeadDrafter(head, model, head.new_cache(128), 0), drafter.cache.length
        fresh.extend(model(tokens[:-1])[0], tokens[1:])
        assert torch.allclose(drafter.cache.kv[..., :rows, :, :], fresh.cache.kv[..., :rows, :, :])


@torch.no_grad()
@pytest.mark.parametrize("nodes", [1, 4, 8, 33, 60])
def test_a_fixed_tree_reads_as_many_rows_as_it_promises(nodes):
    model, rows = random_model(), []
    head, width, depth = random_mtp_head(model, 0), *FixedNodes(nodes).static_shape()
    head.register_forward_hook(lambda head, inputs, output: rows.append(inputs[0].shape[1]))
    rounds = bound("fastmtp", head=head, tree=nodes)(model, [2, 1], GREEDY, Seeded())
    next(rounds), next(rounds)
    assert rows == [1] + [width] * (depth - 1)  # the newest token, then the levels


def paths_of(tree: Tree) -> list[tuple[int, ...]]:
    """The path of tokens to each node below the root, in the tree's order."""
    paths = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:]):
        paths.append((*paths[parent], token))
    return paths[1:]


def fresh_paths(
    head: MTPHead, model: Transformer, tokens: list[int], policy: RandomNodes
) -> list[tuple[int, ...]]:
    """The paths of the best candidates, level by level: EAGLE-2's expansion, without a cache."""
    frontier, found = [((), 1.0)], []
    for _ in range(policy.shape[1]):
        level = []
        for path, value in frontier:
            hidden = model(tokens[:-1])[0]
            for i in range(len(path) + 1):
                drafter = HeadDrafter(head, model, head.new_cache(128), 0)
                output = drafter.run(hidden, [*tokens[1:], *path[:i]])[-1:]
                hidden = torch.cat([hidden, output])
            best = model.logits(output)[0].softmax(-1).topk(min(CHILDREN, model.config.vocab_size))
            pairs = zip(best.indices.tolist(), best.values.tolist())
            level += [((*path, token), value * p) for token, p in pairs]
        found += level
        frontier = sorted(level, key=lambda candidate: -candidate[1])[: policy.shape[0]]
    kept = sorted(found, key=lambda candidate: -candidate[1])[: policy.n]
    return [candidate[0] for candidate in found if candidate in kept]


class Broken(FullVocabulary):
    """Some of the head's logits are not finite."""

    def __init__(self, model: Transformer, seed: int):
        self.lm_head, self.generator = model.logits, torch.Generator().manual_seed(seed)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        broken = torch.rand(len(hidden), 1, generator=self.generator) < 0.5
        return self.lm_head(hidden).masked_fill(broken, math.nan)


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {"k": 3}, {"tree": 6}, {"tree": 40},
        {"tree": AdaptiveNodes([0.0, *([1.0] * 40)], {1: 0.01, 4: 0.01})},
    ],
)  # fmt: skip
def test_a_broken_head_costs_only_speed(options):
    for seed in range(3):
        model, tokens = random_model(seed), [2, 1, 0]
        options |= {"head": random_mtp_head(model, seed), "vocabulary": Broken(model, seed)}
        run = decode(model, None, tokens, "fastmtp", max_new_tokens=20, **options)
        assert run.tokens == decode(model, None, tokens, max_new_tokens=20).tokens


def hybrid_drafts(seed: int) -> None:
    """Drafts must follow the last 5, 4 or 3 tokens where these occurred before. If they did not, or
    if the policy for the text chooses 0, they must equal a head's in a fresh pass."""
    model, tokens = small_model(seed, vocab=3), [2, 1, 0]
    head, policy, copying = random_mtp_head(model, seed), RandomK(seed), RandomK(seed + 1)
    policy.observe = copying.observe = lambda drafted, accepted: None
    method = bound("hybrid", head=head, k=policy, lookup_k=copying)
    rounds, kinds = method(model, tokens, GREEDY, Seeded()), set()
    next(rounds)
    for step, _ in zip(rounds, range(40)):
        expected = []
        for n in 3, 4, 5:
            ends = [i for i in range(n, len(tokens)) if tokens[i - n : i] == tokens[-n:]]
            expected = tokens[ends[-1] :][: copying.chosen[-1]] if ends else expected
        kinds.add("text" if expected else "head")
        expected = expected or fresh_drafts(head, model, tokens, policy.chosen[-1])
        assert step.tree.tokens[1:] == expected
        tokens = tokens + step.tokens
    assert kinds == {"text", "head"}


@torch.no_grad()
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("oracle", [medusa_tree, mtp_drafts, mtp_tree, hybrid_drafts])
def test_proposals_match_a_slow_oracle(oracle, seed):
    oracle(seed)


@torch.no_grad()
@pytest.mark.parametrize(
    "oracle, owner, changes",
    [
        (medusa_tree, medusa, {"propose": mistakes.hidden_of_the_previous_round}),
        (mtp_drafts, HeadDrafter, {"extend": mistakes.hidden_before_the_norm}),
        (mtp_drafts, HeadDrafter,
         {"extend": mistakes.stale_rows, "chain": mistakes.chain_remembered}),
        (mtp_drafts, HeadDrafter, {"chain": mistakes.position_off_by_one}),
        (mtp_tree, HeadDrafter, {"run": mistakes.siblings_seen}),
        (mtp_tree, HeadDrafter, {"run": mistakes.rows_as_positions}),
        (mtp_tree, HeadDrafter, {"expand": mistakes.rows_of_the_tree_kept}),
        (mtp_tree, HeadDrafter, {"extend": mistakes.hidden_before_the_norm}),
        (hybrid_drafts, HeadDrafter, {"enqueue": mistakes.only_after_own_drafts}),
    ],
)
def test_the_oracle_catches_mistakes_that_no_output_shows(oracle, owner, changes):
    with mock.patch.multiple(owner, **changes), pytest.raises(AssertionError):
        for seed in range(3):
            oracle(seed)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(3))
def test_hybrid_with_a_draft_model_drafts_what_speculative_would(seed, monkeypatch):
    """Whatever text was copied in between. The draft reads each committed token once."""
    model, draft = small_model(seed, vocab=3), small_model(seed + 9, vocab=3)
    tokens, fed, forward, copies = [2, 1, 0], [], draft.forward, 0
    monkeypatch.setattr(draft, "forward", lambda x, *more: fed.append(len(x)) or forward(x, *more))
    rounds = bound("hybrid", draft=draft, k=2, lookup_k=3)(model, tokens, GREEDY, Seeded())
    next(rounds)
    for step, _ in zip(rounds, range(24)):
        drafts, passes = step.tree.tokens[1:], len(fed)
        if copied := tokens[NgramIndex(5, 3).match_end(tokens) :][:3]:
            copies, expected = copies + 1, copied
        else:
            expected = propose(draft, draft.new_cache(), tokens, 2, GREEDY, Seeded(), 3)[0]
        assert drafts == expected
        del fed[passes:]
        tokens = tokens + step.tokens
    assert copies and sum(fed) <= len(tokens) + 2 * 24


def test_a_plain_step_of_hybrid_does_not_run_the_draft_model():
    model, draft, calls = small_model(0, vocab=3), small_model(9, vocab=3), []
    draft.register_forward_hook(lambda *_: calls.append(True))
    never = AdaptiveK([float(n) for n in range(9)], draft_cost=1.0)
    options = {"draft": draft, "k": never, "lookup_k": never, "max_new_tokens": 20}
    assert len(decode(model, None, [2, 1, 0], "hybrid", **options).rounds) == 20 and not calls


def test_each_policy_of_hybrid_learns_from_its_own_drafter():
    """Text that repeats after 6 tokens, and a head that is always wrong."""
    model, _ = counting_model(6, 1)
    head = randomise(MTPHead(model.config).double(), 0)
    head.final_layernorm.weight.data.fill_(0.0)
    curve = [0.0, *(1 + 0.05 * n for n in range(20))]
    k, copied = AdaptiveK(curve, 0.2, 4), AdaptiveK(curve, 0.0, 8)
    options = {"head": head, "k": k, "lookup_k": copied, "max_new_tokens": 60}
    run = decode(model, None, [1], "hybrid", **options)
    assert run.tokens == [(2 + i) % 6 for i in range(60)]
    assert min(copied.rates.rate) > 0.7 and k.rates.rate[0] < 0.7
    assert {len(step.tokens) for step in run.rounds[-5:-1]} == {6 + 1}


class LikelyCopies(FixedNodes):
    """Keeps copies that are more likely right than wrong; the head never drafts."""

    def drafting(self, values: Sequence[float] = ()) -> bool:
        return False

    def choose(self, values: list[float], free_rows: int) -> int:
        return sum(value > 0.5 for value in values[:free_rows])


def test_copies_that_were_once_rejected_are_tried_again():
    """In the prompt, 9 follows 2 3 4; the model counts to 11, again and again."""
    model, _ = counting_model(12, 1)
    options = {"head": random_mtp_head(model, 0), "tree": LikelyCopies(8), "max_new_tokens": 45}
    run = decode(model, None, [2, 3, 4, 9, 2, 3, 4], "hybrid", **options)
    assert run.tokens == [(5 + i) % 12 for i in range(45)]
    assert len(run.rounds[0].tree) > len(run.rounds[0].path) == 1  # rejected
    assert max(len(step.path) for step in run.rounds[-3:]) > 1


def test_a_head_with_nothing_to_read_costs_nothing():
    """A kept cache holds all of the prompt but its newest token, without any hidden states."""
    model, prompt = random_model(context=64), [1, 2, 0, 2]
    policy = AdaptiveNodes([0.0, *(1 + n / 10 for n in range(16))], {1: 0.5})
    cache = model.new_cache()
    model.prefill(prompt[:-1], cache)
    options = {"cache": cache, "head": random_mtp_head(model, 0), "tree": policy}
    rounds = fastmtp(model, prompt, GREEDY, Seeded(), **options)
    next(rounds)
    next(rounds)
    assert policy.costs[0] == 1.0
    next(rounds)
    assert policy.costs[0] > 1.0


def test_tensors_that_a_run_leaves_behind_can_be_used_in_training():
    """Runs use inference mode, whose tensors do not support gradients; those they keep must."""
    model = random_model()
    vocabulary = two_languages(model)
    head = random_mtp_head(model, 0)
    run = decode(model, None, [1, 2], "fastmtp", head=head, vocabulary=vocabulary, max_new_tokens=9)
    norms = model.model.norm, model.model.layers[0].input_layernorm
    for norm in norms:
        norm.weight.requires_grad_(True)
    mask = run.rounds[-1].tree.mask
    hidden = model([3] * len(mask), mask=mask)
    vocabulary.select([1, 2]).logits(hidden).square().sum().backward()
    assert all(norm.weight.grad.abs().sum() > 0 for norm in norms)


@needs_shared
def test_frequencies_over_a_real_large_vocabulary():
    """Qwen2 has 151,643 tokens. A language's subset is small, and a text's language is detected."""
    file = SHARED / "tokenizers" / "qwen2" / "tokenizer.built.json"
    tokenizer = Tokenizer(Backend.from_file(str(file)))
    texts = {
        name: (SHARED / "data" / "train" / f"stories_{name}.txt").read_text()[:120_000]
        for name in ("en", "zh")
    }
    special = list(tokenizer.control_ids.values())
    languages = {
        name: count([tokenizer.encode(text[2000:])], special, 8000)
        for name, text in texts.items()
    }
    model = random_model(vocab_size=tokenizer.size, hidden_size=8, heads=2, kv_heads=1)
    vocabulary = Compressed(languages, model)
    for name, text in texts.items():
        assert vocabulary.detect_languages(tokenizer.encode(text[:200])) == (name,)
        held_out, frequent = tokenizer.encode(text[:2000]), set(languages[name].ids)
        inside = sum(token in frequent for token in held_out) / len(held_out)
        assert inside > 0.9 and len(frequent) < tokenizer.size / 15
        assert set(special) <= frequent


# ---- lookahead -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ngram", [2, 3, 5])
def test_a_full_match_yields_n_tokens(ngram):
    """The model counts in a cycle. Once the pool has seen it, every pass yields N tokens."""
    model, _ = counting_model(6, 1)
    run = decode(model, None, [0], "lookahead", window=4, ngram=ngram, guesses=8,
                 max_new_tokens=60)  # fmt: skip
    assert run.tokens == [(1 + i) % 6 for i in range(60)]
    assert {len(step.tokens) for step in run.rounds[12:-1]} == {ngram}


@pytest.mark.parametrize("pool_from_prompt", [False, True])
def test_n_grams_of_the_prompt_are_guesses_in_the_first_pass(pool_from_prompt):
    model, _ = counting_model(6, 1)
    run = decode(model, None, [0, 1, 2, 3, 4, 5, 0], "lookahead", window=2, ngram=3, guesses=2,
                 pool_from_prompt=pool_from_prompt, max_new_tokens=20)  # fmt: skip
    assert len(run.rounds[0].tokens) == (3 if pool_from_prompt else 1)
