"""What is particular to each method: proposals, lengths, shapes of trees, bad input."""

import random

import pytest
from conftest import random_model, random_tokens
from test_generate import TOKENIZER, byte_model

from minispec import Sampling, UserError, speculative
from minispec.generate import check_vocabularies, decode
from minispec.methods.prompt_lookup import lookup
from minispec.sampling import Seeded
from minispec.methods.speculative import speedup, tokens_per_pass
from minispec.tree import Tree


def test_lookup_prefers_long_matches_then_late_ones_and_gives_what_there_is():
    assert lookup([1, 2, 3, 9, 1, 2, 3], 10, 3) == [9, 1, 2, 3]
    assert lookup([5, 3, 7, 1, 3, 8, 2, 3], 2, 3) == [8, 2]  # n = 1, the later 3
    assert lookup([2, 3, 4, 7, 3, 8, 2, 3], 1, 3) == [4]  # n = 2 before n = 1
    assert lookup([4, 4, 4], 10, 3) == [4]
    assert lookup([1, 2, 3], 10, 3) == lookup([1], 10, 3) == lookup([1, 1], 0, 3) == []


@pytest.mark.parametrize("seed", range(20))
def test_lookup_equals_its_definition(seed):
    rng = random.Random(seed)
    tokens = [rng.randrange(3) for _ in range(rng.randint(1, 30))]
    expected = []
    for n in (3, 2, 1):
        ends = [i for i in range(n, len(tokens)) if tokens[i - n : i] == tokens[-n:]]
        if ends:
            expected = tokens[ends[-1] :][:4]
            break
    assert lookup(tokens, 4, 3) == expected


def test_a_merged_tree_shares_prefixes():
    tree = Tree.merged(9, [[3, 4], [3, 5], [], [6], [3, 4, 7]])
    assert tree.tokens == [9, 3, 4, 5, 6, 7] and tree.parents == [-1, 0, 1, 1, 0, 2]
    assert tree.depth.tolist() == [0, 1, 2, 2, 1, 3]
    assert tree.mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 0, 0, 0, 1, 0],
        [1, 1, 1, 0, 0, 1],
    ]


def test_rank_paths_pick_candidates_by_depth():
    tree = Tree.from_paths(9, [[0], [1], [0, 2], [1, 0]], [[10, 11], [20, 21, 22]])
    assert [tree.tokens_at(p) for p in ([0, 1, 3], [0, 2, 4])] == [[9, 10, 22], [9, 11, 20]]


def test_the_formula_of_leviathan_et_al():
    """Equation 1 by direct summation; its limit at α = 1; theorem 3.8."""
    for alpha in (0.0, 0.3, 0.8, 1.0):
        for gamma in (1, 4, 7):
            expected = sum(alpha**i for i in range(gamma + 1))
            assert abs(tokens_per_pass(alpha, gamma) - expected) < 1e-12
    assert abs(speedup(0.8, 5, 0.1) - tokens_per_pass(0.8, 5) / 1.5) < 1e-12


def test_auto_drafts_much_where_drafts_are_good_and_little_where_they_are_not():
    length = object.__new__(speculative.Length)
    length.c, length.accepted, length.tried = 0.1, 3.0, 4.0
    length.curve = [0.0] + [1 + 0.005 * (n - 1) for n in range(1, 65)]
    for _ in range(50):
        length.observe(accepted=length.best(), drafted=length.best())
    assert length.best() >= 12
    for _ in range(50):
        length.observe(accepted=0, drafted=length.best())
    assert length.best() == 1
    length.accepted, length.tried = 3.2, 4.0
    by_hand = (1 + 0.8 + 0.64) / (2 * 0.1 + 1 + 0.005 * 2)
    assert abs(length.speedup(2) - by_hand) < 1e-12


def test_the_costs_of_a_pair_are_measured_once_in_each_mode(monkeypatch):
    calls = []
    monkeypatch.setattr(speculative, "in_passes", lambda *given: calls.append(given) or 0.1)
    model, draft = random_model(0), random_model(1)
    for other in (draft, draft, model, model):
        speculative.Length(model, other)
    assert len(calls) == 2
    draft.prepare(quantize=True)
    for _ in range(2):
        speculative.Length(model, draft)
    assert len(calls) == 3
    speculative.Length(random_model(0), draft)
    assert len(calls) == 4


@pytest.mark.parametrize("k", [1, 3, "auto"])
def test_a_self_draft_yields_k_plus_one_tokens_a_pass(k):
    model = random_model()
    run = decode(model, None, [1, 2, 3], "speculative", draft=model, k=k, max_new_tokens=60)
    assert run.stats["accepted"] == run.stats["drafted"] > 0
    if k != "auto":
        assert [len(step.tokens) for step in run.rounds[:-1]] == [k + 1] * (len(run.rounds) - 1)
    assert run.stats["extra_parameters"] == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("rows", [(32, 40), (40, 32)])
def test_vocabularies_may_differ_by_padding(rows):
    """Target and draft of 30 real tokens in tables of different lengths."""
    target, draft = (random_model(seed, vocab_size=n) for seed, n in enumerate(rows))
    prompt = random_tokens(5, vocab=30)
    for temperature in (0.0, 1.0):
        plain = decode(target, None, prompt, max_new_tokens=20)
        run = decode(target, None, prompt, "speculative", draft=draft, max_new_tokens=20,
                     temperature=temperature, top_p=0.9)  # fmt: skip
        assert max(run.tokens) < rows[0]
        if temperature == 0:
            assert run.tokens == plain.tokens


def test_200_short_runs_at_temperature_1_with_top_p_are_in_law():
    from minispec.certify import FALSE_ALARM, Counter, bound, chi_square_p, exact_law, small_model

    model, draft = small_model(1, vocab=6), small_model(2, vocab=6)
    sampling = Sampling(1.0, top_p=0.9)
    law = exact_law(bound("autoregressive"), model, [1, 2], sampling, 2)
    counts = Counter(
        tuple(decode(model, None, [1, 2], "speculative", draft=draft, k=2, temperature=1.0,
                     top_p=0.9, seed=seed, max_new_tokens=2).tokens)
        for seed in range(200)
    )  # fmt: skip
    assert chi_square_p(counts, law) > FALSE_ALARM


def test_pairs_that_do_not_fit_are_refused():
    from test_tokenizer import byte_tokenizer

    other = byte_tokenizer()
    check_vocabularies(TOKENIZER, other, byte_model(), byte_model())
    other.backend.add_tokens(["extra"])
    with pytest.raises(UserError, match="differs from the target's in 1 tokens"):
        check_vocabularies(TOKENIZER, other, byte_model(), byte_model())
    with pytest.raises(UserError, match="nobody can say that the difference is padding"):
        check_vocabularies(None, None, random_model(), byte_model())


@pytest.mark.parametrize(
    "method, options",
    [("speculative", {"k": 0}), ("speculative", {"k": 500}), ("prompt-lookup", {"k": 0})],
)
def test_impossible_lengths_are_refused(method, options):
    model = random_model()
    if method == "speculative":
        options = options | {"draft": model}
    with pytest.raises(UserError, match="k "):
        decode(model, None, [1], method, **options)


def test_a_draft_never_proposes_its_surplus_rows():
    target, draft = random_model(0, vocab_size=8), random_model(1, vocab_size=32)
    for step, _ in zip(
        speculative.speculative(target, [1], Sampling(1.0), Seeded(0), draft=draft), range(20)
    ):
        assert max(step.tree.tokens if step.tree else [0]) < 8
