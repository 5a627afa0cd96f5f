"""Medusa: trees from Python and from the command line, typical acceptance and its bias. Heads
and their proposals are tested by assignment 4 and test_proposals.py."""

import pytest
import torch
from conftest import TOKENIZER, byte_model, counting_model, random_model

from minispec import Sampling, UserError
from minispec.certify.methods.cases import RANK_TREES, bound
from minispec.certify.toys import (
    Toy,
    ToyHeads,
    exact_distribution,
    random_medusa_heads,
    total_variation,
)
from minispec.checkpoints.heads import save_medusa
from minispec.checkpoints.load import save
from minispec.generate import __main__ as generate
from minispec.generate import decode
from minispec.generate.terminal import describe
from minispec.methods.adaptive import AdaptiveTree
from minispec.methods.medusa import with_prefixes
from minispec.methods.vocabulary import Subset


@pytest.mark.parametrize("tree", [[(0, 0, 0)], AdaptiveTree([0.0] + [1.0] * 64, 0.0)])
def test_perfect_heads_are_accepted_to_their_full_depth(tree):
    """Except in the first round of a one-token prompt, where the heads have nothing to read yet."""
    model, heads = counting_model(12, 3)
    run = decode(model, None, [3], "medusa", heads=heads, tree=tree, max_new_tokens=41)
    assert run.tokens == [(4 + i) % 12 for i in range(41)]
    assert [len(step.tokens) for step in run.rounds] == [1] + [4] * 10


@pytest.mark.parametrize("tree", [RANK_TREES["64 nodes"], AdaptiveTree([0.0] + [1.0] * 64, 0.0)])
def test_heads_draft_only_tokens_of_the_vocabulary(tree):
    model = random_model()
    subset = Subset(model.lm_head.weight, [3, 7, 11])
    heads = random_medusa_heads(model, 0, shared=True)
    options = {"tree": tree, "max_new_tokens": 30}
    run = decode(model, None, [1, 2], "medusa", heads=heads, vocabulary=subset, **options)
    drafted = {token for step in run.rounds for token in step.tree.tokens[1:]}
    assert drafted and drafted <= {3, 7, 11}
    assert run.tokens == decode(model, None, [1, 2], max_new_tokens=30).tokens
    with pytest.raises(UserError, match="share the target's lm_head; these have their own"):
        heads = random_medusa_heads(model, 0)
        decode(model, None, [1, 2], "medusa", heads=heads, vocabulary=subset)


def test_missing_prefixes_are_added_and_trees_are_checked():
    assert with_prefixes([(0, 2), (1,), (0, 2)], 2, 9) == [(0,), (0, 2), (1,)]
    assert with_prefixes([], 2, 9) == with_prefixes([()], 2, 9) == []
    for paths, message in (
        ([(0, 0, 0)], "3 deep, but there are only 2 heads"),
        ([(9,)], "rank 9: must be an integer from 0 to 8"),
        ([(0, -1)], "rank -1"),
        ([(0.5,)], "rank 0.5"),
        ([([0],)], r"rank \[0\]: must be an integer"),
    ):
        with pytest.raises(UserError, match=message):
            with_prefixes(paths, 2, 9)


def test_typical_acceptance_is_lossy_and_labelled_so():
    sampling, arguments = Sampling(1.0), {"heads": ToyHeads(3), "tree": RANK_TREES["wide"]}
    plain = exact_distribution(bound("autoregressive"), Toy(5), [1, 0], sampling, 2)
    typical = exact_distribution(bound("medusa-typical", **arguments), Toy(5), [1, 0], sampling, 2)
    assert total_variation(plain, typical) > 0.05
    model = random_model()
    options = {"heads": random_medusa_heads(model, 0), "max_new_tokens": 30}
    run = decode(model, None, [1, 2], "medusa-typical", **options)
    assert run.tokens == decode(model, None, [1, 2], max_new_tokens=30).tokens  # no entropy
    assert not run.stats["lossless"] and "(lossy)" in describe(run)
    exact = decode(model, None, [1, 2], "medusa", **options)
    assert exact.stats["lossless"] and "(lossy)" not in describe(exact)


def test_the_command_line_accepts_every_kind_of_tree(tmp_path, capsys):
    model, heads = byte_model(), random_medusa_heads(byte_model(), 0)
    save(model, TOKENIZER, tmp_path)
    heads.accuracy = torch.full((4, 10), 0.1)
    save_medusa(heads, tmp_path / "medusa", "x", None, torch.float32)  # found next to the model
    (tmp_path / "paths.json").write_text("[[0], [1], [0, 2]]")
    arguments = ["ab", "--model", str(tmp_path), "--max-new-tokens", "9", "--dtype", "float64"]
    generate.main(arguments)
    plain = capsys.readouterr().out
    for tree in (None, "auto", "5", "0", "vicuna_7b_stage2", str(tmp_path / "paths.json")):
        more = [] if tree is None else ["--tree", tree]
        generate.main([*arguments, "--method", "medusa", *more])
        assert capsys.readouterr().out == plain
    for value, nodes in ((7, 7), (100000000, 256)):  # no more than can fit
        options = generate.drafters.with_policies("medusa", model, {"heads": heads, "tree": value})
        assert len(options["tree"]) == nodes
        decode(model, TOKENIZER, "ab", "medusa", heads=heads, tree=value, max_new_tokens=5)
    heads.accuracy = None
    with pytest.raises(UserError, match="no measured accuracies"):
        decode(model, TOKENIZER, "ab", "medusa", heads=heads, tree=5)


