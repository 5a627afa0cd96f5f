"""Medusa: heads, the trees they propose, typical acceptance and its bias."""

import random

import pytest
import torch
from conftest import TOKENIZER, byte_model, count_up, random_model, random_tokens

from minispec import Sampling, UserError, generate
from minispec.certify.cases import RANK_TREES, bound
from minispec.checkpoint import save
from minispec.generate import decode
from minispec.heads import save_medusa
from minispec.methods import medusa
from minispec.methods.medusa import complete, typical_path, untrained
from minispec.toys import Toy, ToyHeads, exact_distribution, random_heads, total_variation
from minispec.tree import Tree


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
