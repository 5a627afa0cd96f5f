"""Medusa: heads, the trees they propose, typical acceptance and its bias, training."""

import itertools
import json
import random

import pytest
import torch
from conftest import random_model, random_tokens
from test_distill import run, target  # noqa: F401  a small checkpoint
from test_generate import TOKENIZER, byte_model
from test_pretrain import data  # noqa: F401  a small corpus

from minispec import Sampling, UserError, certify, distill, generate, load
from minispec.certify import (
    RANK_TREES,
    Toy,
    ToyHeads,
    bound,
    exact_distribution,
    random_heads,
    total_variation,
)
from minispec.checkpoint import save
from minispec.generate import decode
from minispec.heads import load_medusa, save_medusa
from minispec.methods import medusa
from minispec.methods.adaptive import grow_tree
from minispec.methods.medusa import RANKS, complete, typical_path, untrained
from minispec.model import Config, Transformer
from minispec.tree import Tree


def count_up(vocab: int, heads: int):
    """A model that says t + 1 after t, and heads that know it."""
    size = vocab
    model = Transformer(Config(size, 2, 1, 1, 1, size, vocab, 64, tied=False)).double()
    for name, p in model.named_parameters():
        p.data.fill_(1.0 if "norm" in name else 0.0)
        p.requires_grad_(False)
    one = torch.eye(vocab, dtype=torch.float64)
    model.model.embed_tokens.weight.data.copy_(one)
    model.lm_head.weight.data.copy_(one.roll(1, 0))
    made = untrained(heads, 1, model, shared=False)
    for k, head in enumerate(made):
        head[-1].weight.data.copy_(one.roll(k + 2, 0))
    return model, made.requires_grad_(False)


def test_head_k_says_the_token_at_t_plus_k_plus_2():
    model, heads = count_up(12, 3)
    run = decode(model, None, [3, 4], "medusa", heads=heads, tree=[(0, 0, 0)], max_new_tokens=40)
    assert run.tokens == [(5 + i) % 12 for i in range(40)]
    assert {len(step.tokens) for step in run.rounds} == {4}
    hidden = model([3, 4])[0, -1]
    assert heads(hidden, model).argmax(-1).tolist() == [6, 7, 8]
    run = decode(model, None, [3], "medusa", heads=heads, tree=[(0, 0, 0)], max_new_tokens=9)
    assert [len(step.tokens) for step in run.rounds] == [1, 4, 4]  # nothing to read before a pass


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("layers", [0, 1, 3])
def test_untrained_heads_say_what_the_model_says(shared, layers):
    model = random_model()
    hidden = model(random_tokens(5))
    logits = untrained(3, layers, model, shared)(hidden, model)
    assert logits.shape == (3, 1, 5, 32)
    assert (logits[1] - model.logits(hidden)).abs().max() < 1e-12


@pytest.mark.parametrize("seed", range(6))
def test_every_node_s_logits_equal_a_forward_over_its_path(seed):
    rng, model = random.Random(seed), random_model(seed)
    prompt = random_tokens(rng.randint(2, 20), seed)
    cache = model.new_cache()
    hidden = model.prefill(prompt[:-1], cache)[0, -1:]
    paths = [tuple(rng.randrange(5) for _ in range(rng.randint(1, 4))) for _ in range(12)]
    paths = complete(paths, 4, 32)
    heads = random_heads(model, seed)
    tree = medusa.propose(heads, model, hidden, prompt[-1], paths, cache.room)
    assert len(tree) == len(paths) + 1
    logits = model.logits(model(tree.tokens, cache, tree.depth, tree.mask))[0]
    for node in range(len(tree)):
        path, at = [], node
        while at:
            path.insert(0, tree.tokens[at])
            at = tree.parents[at]
        alone = model.logits(model(prompt + path))[0, -1]
        assert (logits[node] - alone).abs().max() < 1e-10


# ---- trees ---------------------------------------------------------------------------------------


def test_a_tree_gets_its_missing_beginnings_and_is_checked():
    assert complete([(0, 2), (1,), (0, 2)], 2, 9) == [(0,), (0, 2), (1,)]
    assert complete([], 2, 9) == complete([()], 2, 9) == []
    for paths, message in (
        ([(0, 0, 0)], "3 deep, but there are only 2 heads"),
        ([(9,)], "rank 9: must be an integer from 0 to 8"),
        ([(0, -1)], "rank -1"),
        ([(0.5,)], "rank 0.5"),
        ([([0],)], r"rank \[0\]: must be an integer"),
    ):
        with pytest.raises(UserError, match=message):
            complete(paths, 2, 9)


# ---- acceptance ----------------------------------------------------------------------------------


def test_typical_acceptance_is_lossy_and_says_so():
    sampling, arguments = Sampling(1.0), {"heads": ToyHeads(3), "tree": RANK_TREES["wide"]}
    plain = exact_distribution(bound("autoregressive"), Toy(5), [1, 0], sampling, 2)
    typical = exact_distribution(bound("medusa-typical", **arguments), Toy(5), [1, 0], sampling, 2)
    assert total_variation(plain, typical) > 0.05
    model = random_model()
    options = {"heads": random_heads(model, 0), "max_new_tokens": 30}
    run = decode(model, None, [1, 2], "medusa-typical", **options)
    assert run.tokens == decode(model, None, [1, 2], max_new_tokens=30).tokens  # greedy has no H
    assert not run.stats["lossless"] and "(lossy)" in generate.describe(run)
    exact = decode(model, None, [1, 2], "medusa", **options)
    assert exact.stats["lossless"] and "(lossy)" not in generate.describe(exact)


def test_typical_acceptance_takes_the_longest_then_the_likeliest_path():
    probs = torch.tensor([[0.5, 0.3, 0.2], [0.9, 0.06, 0.04], [0.4, 0.35, 0.25], [0.2, 0.2, 0.6]])
    tree = Tree([0, 0, 1, 2], [-1, 0, 0, 0])
    assert typical_path(probs, tree, 0.09, 0.3) == [0, 1]
    tree = Tree([0, 0, 1, 1], [-1, 0, 0, 1])  # 0.06 is too little, so [0, 1] ends there
    assert typical_path(probs, tree, 0.09, 0.3) == [0, 1]
    tree = Tree([0, 0, 1, 1], [-1, 0, 0, 2])
    assert typical_path(probs, tree, 0.09, 0.3) == [0, 2, 3]


def test_it_goes_on_from_a_kept_cache():
    model, cache = random_model(), random_model().new_cache()
    heads, prompt = random_heads(model, 1), random_tokens(9)
    for n in (9, 4, 12):
        plain = decode(model, None, prompt, max_new_tokens=n)
        run = decode(model, None, prompt, "medusa", heads=heads, cache=cache, max_new_tokens=n)
        assert run.tokens == plain.tokens
        prompt = prompt + run.tokens + [3]


# ---- training ------------------------------------------------------------------------------------


def test_accuracies_have_the_right_denominators():
    labels = distill.labels_of([10, 11, 12, 13, 14, 15], prompt=3, heads=3)
    # position 1 is the first whose head 0 guesses a generated token (13, at index 3)
    assert labels.tolist() == [
        [-100] * 3, [13, 14, 15], [14, 15, -100], [15, -100, -100], [-100] * 3, [-100] * 3
    ]  # fmt: skip
    assert distill.labels_of([7, 8], prompt=1, heads=2).tolist() == [[-100] * 2] * 2
    ranks = torch.tensor([[0, 0, 1, RANKS], [2, -1, -1, 0]])
    accuracy = distill.accuracy_of(ranks)
    assert accuracy[0, :2].tolist() == [0.5, 0.25] and accuracy[1, [0, 2]].tolist() == [0.5, 0.5]
    assert accuracy.shape == (2, RANKS)


@pytest.mark.parametrize("seed", range(8))
def test_paths_that_are_right_together_come_in_the_order_of_their_counts(seed):
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.randint(0, 4, (3, 200), generator=generator)
    ranks[ranks == 3] = RANKS  # not among the best
    ranks[2, -1] = ranks[1, -1] = -1  # the end of a text, which does not count
    columns = [tuple(column) for column in ranks.T[:-1].tolist()]
    paths = distill.together(ranks)
    every = [p for n in (1, 2, 3) for p in itertools.product(range(3), repeat=n)]
    counts = {p: sum(c[: len(p)] == p for c in columns) for p in every}
    assert set(paths) == {p for p in every if counts[p]}
    assert [counts[p] for p in paths] == sorted(map(counts.get, paths), reverse=True)
    for n in range(len(paths)):
        assert set(complete(paths[:n], 3, 3)) == set(paths[:n]), "the first n are a tree"


def test_a_tree_for_heads_that_are_right_at_the_same_places_is_deep():
    """Of two places one is easy for both heads, the other for none: the second head's best
    candidate below the first's is worth more than the product of accuracies says."""
    ranks = torch.tensor([[0, 1, 0, 1, 0, 2], [0, 3, 0, 3, 0, 3]])
    assert distill.together(ranks)[:2] == [(0,), (0, 0)]
    assert grow_tree(distill.accuracy_of(ranks), 2) == [(0,), (1,)]
    assert distill.together(ranks[:, :0]) == []


@pytest.mark.parametrize("seed", range(4))
def test_ranks_replayed_along_a_greedy_text_are_its_decoding(seed):
    model, paths = random_model(seed), [(0,), (1,), (2,), (3,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
    heads, prompt = random_heads(model, seed), random_tokens(6, seed)
    plain = decode(model, None, prompt, max_new_tokens=60)
    text = prompt + plain.tokens
    labels = distill.labels_of(text, len(prompt), len(heads))
    ranks = distill.ranks_of(heads, model, model(text)[0], labels)
    tokens, passes = distill.replayed(ranks[:, (ranks >= 0).any(0)], complete(paths, 4, 32))
    run = decode(model, None, prompt, "medusa", heads=heads, tree=paths, max_new_tokens=60)
    assert run.tokens == plain.tokens
    assert abs(tokens - 60) <= 4 and abs(passes - len(run.rounds)) <= 1


@pytest.mark.parametrize("shared", [True, False])
def test_heads_learn_resume_and_get_their_tree(target, data, tmp_path, capsys, shared):  # noqa: F811
    own = tmp_path / "own.jsonl"
    run("generate", "--model", target, "--data", data, "--tokens", 30, "--batch", 16,
        "--documents", 100, "--device", "cpu", "--out", own, "--top-k", 3)  # fmt: skip
    options = ["medusa", "--model", target, "--own", own, "--heads", 2, "--batch-tokens", 128,
               "--device", "cpu", "--save-every", 5] + ["--shared"] * shared  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(*options, "--out", whole, "--steps", 12)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(distill, "train", interrupted(distill.train, at=5))
        argv = [*options, "--out", parts, "--steps", 12]
        distill.medusa_heads(distill.parse(list(map(str, argv))))
    run(*options, "--out", parts, "--steps", 12)
    model, tokenizer = load(target, "float32", "cpu")
    first, second = (load_medusa(where, model, tokenizer) for where in (whole, parts))
    hidden = model([5, 6, 7])
    assert torch.equal(first(hidden, model), second(hidden, model))
    assert first.tree and first.accuracy.shape == (2, RANKS)
    card = (whole / "README.md").read_text()
    assert "| 1 |" in card and "12 steps" in card and str(tmp_path) not in card
    measure = ("--documents", 4, "--tokens", 20, "--measured", 2, "--nodes", 5, "--device", "cpu")
    run("tree", "--model", target, "--heads", whole, "--data", data, *measure)
    grown = load_medusa(whole, model, tokenizer).tree
    assert 1 <= len(grown) <= 5 and f"chosen: {len(grown)} nodes" in capsys.readouterr().out
    command = ["ab", "--model", target, "--method", "medusa", "--heads", whole, "--tree", 3]
    limits = ["--max-new-tokens", 5, "--device", "cpu", "--json"]
    generate.main(list(map(str, command + limits)))
    stats = json.loads(capsys.readouterr().out)["stats"]
    assert stats["extra_parameters"] == sum(p.numel() for p in first.parameters())
    assert stats["peak_memory_bytes"] > 2**20


def interrupted(train, at: int):
    """`train`, ended by Ctrl-C once the checkpoint of step `at` is written."""

    def stopped(trainer, args, objective):
        args.steps = at
        train(trainer, args, objective)
        raise KeyboardInterrupt

    return stopped


@pytest.mark.parametrize("shared", [True, False])
def test_the_loss_is_the_paper_s_and_its_gradient_spares_the_target(shared):
    """Σ over heads of 0.8^k · the mean of -log p(token t + k + 2 | hidden state t)."""
    model = random_model(dtype=torch.float32)
    rows = [random_tokens(9, seed) for seed in range(5)]
    states = [model(row)[0] for row in rows]
    positions = distill.Positions(states, [distill.labels_of(row, 2, 3) for row in rows])
    heads = certify.randomise(untrained(3, 1, model, shared), 0).requires_grad_(True)
    loss = distill.HeadsLoss(heads, model, positions, torch.float32)
    total = loss(torch.arange(len(positions.hidden)))
    by_formula = 0.0
    for k in range(3):
        logs = [
            -heads(hidden[t], model)[k].log_softmax(-1)[row[t + k + 2]]
            for row, hidden in zip(rows, states)
            for t in range(len(row) - k - 2)
        ]
        by_formula += 0.8**k * torch.stack(logs).mean()
    assert torch.allclose(total, by_formula, atol=1e-5)
    total.backward()
    assert all(p.grad is not None for p in heads.parameters())
    assert all(p.grad is None for p in model.parameters())


# ---- the command line ----------------------------------------------------------------------------


def test_the_command_line_takes_every_kind_of_tree(tmp_path, capsys):
    model, heads = byte_model(), random_heads(byte_model(), 0)
    save(model, TOKENIZER, tmp_path)
    heads.accuracy = torch.full((4, 10), 0.1)
    save_medusa(heads, tmp_path / "medusa", "x", None, torch.float32)  # found beside the model
    (tmp_path / "paths.json").write_text("[[0], [1], [0, 2]]")
    arguments = ["ab", "--model", str(tmp_path), "--max-new-tokens", "9", "--dtype", "float64"]
    generate.main(arguments)
    plain = capsys.readouterr().out
    for tree in (None, "auto", "5", "0", "vicuna_7b_stage2", str(tmp_path / "paths.json")):
        more = [] if tree is None else ["--tree", tree]
        generate.main([*arguments, "--method", "medusa", *more])
        assert capsys.readouterr().out == plain


def test_a_number_of_nodes_grows_no_more_than_ever_fit():
    heads = random_heads(random_model(), 0)
    heads.accuracy = torch.full((3, 10), 0.1)
    for value, nodes in (("7", 7), ("100000000", 40)):
        assert len(generate.read_tree_option(value, heads, 40)) == nodes


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tree", "nonsense"], "neither auto, nor a number of nodes"),
        (["--heads", "nowhere"], "no such directory: nowhere"),
        (["--method", "speculative", "--tree", "3"], "--tree is for --method medusa"),
    ],
)
def test_wrong_flags_are_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        generate.main(["x", "--method", "medusa", *arguments])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.gpu
def test_on_a_gpu_it_equals_plain_decoding():
    model, heads = random_model().cuda(), random_heads(random_model(), 0).cuda()
    plain = decode(model, None, [1, 2, 3], max_new_tokens=40)
    for tree in (None, "auto"):
        run = decode(model, None, [1, 2, 3], "medusa", heads=heads, tree=tree, max_new_tokens=40)
        assert run.tokens == plain.tokens
