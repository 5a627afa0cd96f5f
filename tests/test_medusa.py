"""Medusa: heads, trees, checkpoints, training; typical acceptance and its bias."""

import copy
import itertools
import json
import random

import pytest
import torch
from conftest import SHARED, needs_shared, random_model, random_tokens
from safetensors.torch import save_file
from test_distill import run, target  # noqa: F401  a small checkpoint
from test_generate import TOKENIZER, VOCAB, byte_model
from test_pretrain import data  # noqa: F401  a small corpus
from test_tokenizer import byte_tokenizer

from minispec import Sampling, UserError, certify, distill, generate, load, medusa
from minispec.certify import RANK_TREES, Toy, ToyHeads, bound, exact_law, random_heads
from minispec.checkpoint import save
from minispec.generate import decode
from minispec.linear import Half, Packed
from minispec.methods.medusa import PUBLISHED, complete, expected, grow_tree, load_medusa, published
from minispec.model import Config, Transformer
from minispec.mutants import MUTANTS


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
    made = medusa.untrained(heads, 1, model, shared=False)
    for k in range(heads):
        made.projection.data[k] = one.roll(k + 2, 0)
    return model, made


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
    logits = medusa.untrained(3, layers, model, shared)(hidden, model)
    assert logits.shape == (3, 1, 5, 32)
    assert (logits[1] - model.logits(hidden)).abs().max() < 1e-12


@pytest.mark.parametrize("kind, dtype", [
    (Half, torch.float32), (Packed, torch.float32), (Packed, torch.bfloat16),
    (type(None), torch.float64),
])  # fmt: skip
@pytest.mark.parametrize("count", [1, 2, 5])
def test_prepared_heads_compute_what_plain_ones_do(count, kind, dtype, monkeypatch):
    """Of one hidden state, by each way of keeping weights; of several; and after `.to`."""
    monkeypatch.setattr("minispec.linear.SMALL", 2**9)
    model = random_model(0, dtype)
    heads = certify.randomise(medusa.Heads(count, 3, model.config.hidden_size, None), 0).to(dtype)
    if kind is Half:
        heads.weight.data.copy_(heads.weight.half())
    exact, wide = copy.deepcopy(heads).double(), copy.deepcopy(model).double()
    hidden = torch.randn(7, model.config.hidden_size, dtype=dtype)
    near = 0.03 if dtype == torch.bfloat16 else 1e-5
    heads.prepare()
    if heads.packed[0] is not None or kind is type(None):  # None where torch lacks the kernel
        assert all(isinstance(each, kind) for each in heads.packed)
    with torch.no_grad():
        expected = exact(hidden.double(), wide)
        with monkeypatch.context() as patch:
            if heads.packed[0] is not None:
                patch.delattr(torch, "baddbmm")  # prepared heads do without it
            one_by_one = torch.stack([heads(row, model) for row in hidden], 1)
        for logits in (one_by_one, heads(hidden, model)):
            assert (logits.double() - expected).abs().max() < near * expected.abs().max()
    assert heads.blocks(hidden[:0]).shape[1] == 0
    heads.bias.requires_grad_(True)
    heads.weight.requires_grad_(False)
    assert heads.blocks(hidden[:1]).requires_grad
    heads.requires_grad_(True)(hidden[0], model).sum().backward()  # through the plain weights
    exact.requires_grad_(True)(hidden[0].double(), wide).sum().backward()
    off = (heads.weight.grad.double() - exact.weight.grad).abs().max()
    assert off < near * exact.weight.grad.abs().max()
    assert heads.double().packed == [None] * 3
    assert (heads(hidden.double(), wide) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("seed", range(6))
def test_every_node_s_logits_equal_a_forward_over_its_path(seed):
    rng, model = random.Random(seed), random_model(seed)
    prompt = random_tokens(rng.randint(2, 20), seed)
    cache = model.new_cache()
    hidden = model.prefill(prompt[:-1], cache)[0, -1:]
    paths = [tuple(rng.randrange(5) for _ in range(rng.randint(1, 4))) for _ in range(12)]
    paths = complete(paths, 4, 32)
    tree = medusa.propose(random_heads(model, seed), model, hidden, prompt[-1], paths)
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


@needs_shared
def test_the_published_trees_are_those_of_the_reference():
    trees = json.loads((SHARED / "reference" / "medusa_trees.json").read_text())
    assert trees.keys() == PUBLISHED.keys()
    for name, paths in trees.items():
        assert sorted(published(name)) == sorted(map(tuple, paths))


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
    model = random_model()
    with pytest.raises(UserError, match="4 deep, but there are only 2 heads"):
        decode(model, None, [1, 2], "medusa", heads=random_heads(model, 0, heads=2),
               tree=published("mc_sim_7b_63"))  # fmt: skip
    with pytest.raises(UserError, match="rank 40"):
        decode(model, None, [1, 2], "medusa", heads=random_heads(model, 0), tree=[(40,)])


@pytest.mark.parametrize("seed", range(8))
def test_the_grown_tree_is_the_best_of_all(seed):
    """Against every tree of three nodes over three heads and three ranks."""
    generator = torch.Generator().manual_seed(seed)
    accuracy = (torch.rand(3, 3, generator=generator) / 3).sort(descending=True).values
    every = [p for n in (1, 2, 3) for p in itertools.product(range(3), repeat=n)]
    best = max(
        expected(accuracy, list(paths))
        for paths in itertools.combinations(every, 3)
        if all(p[:-1] in paths or len(p) == 1 for p in paths)
    )
    grown = grow_tree(accuracy, 3)
    assert len(grown) == 3 and abs(expected(accuracy, grown) - best) < 1e-12
    assert len(grow_tree(accuracy, 1000)) == 3 + 9 + 27
    larger = grow_tree(accuracy, 9)
    assert larger[:3] == grown and all(p[:-1] in larger[:i] for i, p in enumerate(larger) if p[1:])


@pytest.mark.parametrize("seed", range(8))
def test_auto_s_tree_promises_most_for_its_cost(seed, monkeypatch):
    """Against every number of the likeliest paths, on machines of many kinds."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.rand(40, generator=generator) / (1 + 4 * seed)
    curve = [0.0, *(1 + steps.cumsum(0) - steps[0]).tolist()]
    monkeypatch.setattr(medusa, "cost_curve", lambda model: curve)
    monkeypatch.setattr(medusa, "heads_cost", lambda heads, model: 0.25)
    model = random_model(seed)
    worth = medusa.Worth(random_heads(model, seed), model)
    for _ in range(20):
        logits = 3 * torch.randn(4, 12, generator=generator)
        chances = logits.softmax(-1).sort(descending=True).values
        likely = [path for path, gain in medusa.best_first(chances) if gain >= medusa.RARE]
        promises = [
            expected(chances, likely[:n]) / (curve[n + 1] + 0.25)
            for n in range(min(len(likely), 39) + 1)
        ]
        paths = worth.paths(chances, room=99)
        assert paths == complete(paths, 4, 12)
        own = expected(chances, paths) / (curve[len(paths) + 1] + 0.25)
        assert abs(own - max(promises)) < 1e-12
    sure, lost = torch.eye(4, 12)[[0, 0, 0, 0]], torch.full((4, 12), 1e-3)
    assert worth.paths(lost, room=99) == []
    worth.curve = [0.0] + [1.0] * 64
    assert worth.paths(sure, room=99) == [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]
    assert worth.paths(sure, room=2) == [(0,), (0, 0)]
    worth.curve = [0.0, 1.0, 1.0]
    assert worth.paths(sure, room=99) == [(0,)]


@pytest.mark.parametrize("method", ["medusa", "medusa-typical"])
@pytest.mark.parametrize("seed", range(4))
def test_auto_is_plain_decoding_to_the_end_of_the_context(method, seed, monkeypatch):
    monkeypatch.setattr(medusa, "cost_curve", lambda model: [0.0] + [1.0] * 40)
    model = random_model(seed, context=40)
    # of heads with these seeds some guess right now and then
    heads, prompt = random_heads(model, seed + 5), random_tokens(1 + 5 * seed, seed)
    plain = decode(model, None, prompt, max_new_tokens=1000)
    run = decode(model, None, prompt, method, heads=heads, tree="auto", max_new_tokens=1000)
    assert run.tokens == plain.tokens and run.finish_reason == "context"
    sizes = [len(step.tree) for step in run.rounds]
    assert max(sizes) > 8 and len(run.rounds[-1].tree) < 8  # cut to the room that was left
    assert any(len(step.path) > 1 for step in run.rounds)


def test_the_command_line_takes_auto(tmp_path, capsys):
    model = byte_model()
    save(model, TOKENIZER, tmp_path)
    medusa.save_medusa(random_heads(model, 0), tmp_path / "heads", "x", None, torch.float32)
    arguments = ["ab", "--model", str(tmp_path), "--max-new-tokens", "9", "--dtype", "float64"]
    texts = []
    for more in ([], ["--method", "medusa", "--heads", str(tmp_path / "heads"), "--tree", "auto"]):
        generate.main([*arguments, *more])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_auto_reads_the_newest_hidden_state(monkeypatch):
    monkeypatch.setattr(medusa, "cost_curve", lambda model: [0.0] + [1.0] * 40)
    model, heads = count_up(12, 3)  # heads that know
    run = decode(model, None, [3, 4], "medusa", heads=heads, tree="auto", max_new_tokens=30)
    assert {len(step.tokens) for step in run.rounds} == {4}


def test_a_head_that_is_never_right_ends_its_branches():
    assert grow_tree(torch.tensor([[0.5, 0.0, 0.0], [0.5, 0.0, 0.0]]), 9) == [(0,), (0, 0)]


def test_accuracies_have_the_right_denominators():
    labels = distill.labels_of([10, 11, 12, 13, 14, 15], prompt=3, heads=3)
    # position 1 is the first whose head 0 guesses a generated token (13, at index 3)
    assert labels.tolist() == [
        [-100] * 3, [13, 14, 15], [14, 15, -100], [15, -100, -100], [-100] * 3, [-100] * 3
    ]  # fmt: skip
    assert distill.labels_of([7, 8], prompt=1, heads=2).tolist() == [[-100] * 2] * 2
    ranks = torch.tensor([[0, 0, 1, medusa.BEST], [2, -1, -1, 0]])
    accuracy = medusa.accuracy_of(ranks)
    assert accuracy[0, :2].tolist() == [0.5, 0.25] and accuracy[1, [0, 2]].tolist() == [0.5, 0.5]
    assert accuracy.shape == (2, medusa.BEST)


@pytest.mark.parametrize("seed", range(8))
def test_paths_that_are_right_together_come_in_the_order_of_their_counts(seed):
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.randint(0, 4, (3, 200), generator=generator)
    ranks[ranks == 3] = medusa.BEST  # not among the best
    ranks[2, -1] = ranks[1, -1] = -1  # the end of a text, which does not count
    columns = [tuple(column) for column in ranks.T[:-1].tolist()]
    paths = medusa.together(ranks)
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
    assert medusa.together(ranks)[:2] == [(0,), (0, 0)]
    assert grow_tree(medusa.accuracy_of(ranks), 2) == [(0,), (1,)]
    assert medusa.together(ranks[:, :0]) == []


@pytest.mark.parametrize("seed", range(4))
def test_ranks_replayed_along_a_greedy_text_are_its_decoding(seed):
    model, paths = random_model(seed), [(0,), (1,), (2,), (3,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
    heads, prompt = random_heads(model, seed), random_tokens(6, seed)
    plain = decode(model, None, prompt, max_new_tokens=60)
    text = prompt + plain.tokens
    labels = distill.labels_of(text, len(prompt), len(heads))
    ranks = distill.ranks_of(heads, model, model(text)[0], labels)
    tokens, passes = medusa.replayed(ranks[:, (ranks >= 0).any(0)], complete(paths, 4, 32))
    run = decode(model, None, prompt, "medusa", heads=heads, tree=paths, max_new_tokens=60)
    assert run.tokens == plain.tokens
    assert abs(tokens - 60) <= 4 and abs(passes - len(run.rounds)) <= 1


def test_the_expectation_is_that_of_independent_heads():
    """Against a simulation in which heads are right at random."""
    accuracy = torch.tensor([[0.5, 0.2, 0.1], [0.3, 0.2, 0.1], [0.2, 0.1, 0.1]])
    paths = complete([(0, 0, 0), (0, 1), (1, 0), (2,), (1, 2)], 3, 3)
    generator, n = torch.Generator().manual_seed(0), 40000
    draws = torch.rand(3, n, generator=generator)
    ranks = (draws[..., None] > accuracy.cumsum(1)[:, None]).sum(-1)  # 3: none of them
    tokens, passes = medusa.replayed(ranks, paths)
    assert abs(tokens / passes - expected(accuracy, paths)) < 0.02


# ---- acceptance ----------------------------------------------------------------------------------


def test_typical_acceptance_is_lossy_and_says_so():
    sampling, arguments = Sampling(1.0), {"heads": ToyHeads(3), "tree": RANK_TREES["wide"]}
    plain = exact_law(bound("autoregressive"), Toy(5), [1, 0], sampling, 2)
    typical = exact_law(bound("medusa-typical", **arguments), Toy(5), [1, 0], sampling, 2)
    assert certify.total_variation(plain, typical) > 0.05
    model = random_model()
    options = {"heads": random_heads(model, 0), "max_new_tokens": 30}
    run = decode(model, None, [1, 2], "medusa-typical", **options)
    assert run.tokens == decode(model, None, [1, 2], max_new_tokens=30).tokens  # greedy has no H
    assert not run.stats["lossless"] and "(lossy)" in generate.describe(run)
    exact = decode(model, None, [1, 2], "medusa", **options)
    assert exact.stats["lossless"] and "(lossy)" not in generate.describe(exact)


def test_typical_acceptance_takes_the_longest_then_the_likeliest_path():
    laws = torch.tensor([[0.5, 0.3, 0.2], [0.9, 0.06, 0.04], [0.4, 0.35, 0.25], [0.2, 0.2, 0.6]])
    tree = medusa.Tree([0, 0, 1, 2], [-1, 0, 0, 0])
    assert medusa.typical_path(laws, tree, 0.09, 0.3) == [0, 1]
    tree = medusa.Tree([0, 0, 1, 1], [-1, 0, 0, 1])  # 0.06 is too little, so [0, 1] ends there
    assert medusa.typical_path(laws, tree, 0.09, 0.3) == [0, 1]
    tree = medusa.Tree([0, 0, 1, 1], [-1, 0, 0, 2])
    assert medusa.typical_path(laws, tree, 0.09, 0.3) == [0, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["padding taken for a token", "a root that is always argmax", "ranks of heads with p / q",
     "accepted rows not compacted", "positions off by one"],
)  # fmt: skip
def test_medusa_s_own_checks_catch_medusa_s_mistakes(name, monkeypatch):
    proofs = [p for p in certify.exact_cases(quick=True) if p.name.startswith("medusa")]
    cases = certify.greedy_cases
    only = lambda *a: (case for case in cases(*a) if case[0].startswith("medusa"))  # noqa: E731
    monkeypatch.setattr(certify, "exact_cases", lambda quick: proofs)
    monkeypatch.setattr(certify, "greedy_cases", only)
    mutant = next(m for m in MUTANTS if m.name == name)
    order = [certify.CHECKS[mutant.caught_by], certify.check_exact, certify.check_greedy]
    with mutant.apply():
        assert any(certify.first_failure(check) for check in order)
    if mutant.caught_by != "limits":
        assert not certify.first_failure(order[0])


def test_it_goes_on_from_a_kept_cache():
    model, cache = random_model(), random_model().new_cache()
    heads, prompt = random_heads(model, 1), random_tokens(9)
    for n in (9, 4, 12):
        plain = decode(model, None, prompt, max_new_tokens=n)
        run = decode(model, None, prompt, "medusa", heads=heads, cache=cache, max_new_tokens=n)
        assert run.tokens == plain.tokens
        prompt = prompt + run.tokens + [3]


# ---- checkpoints ---------------------------------------------------------------------------------


def v1_tensors(model, heads: int, layers: int) -> dict[str, torch.Tensor]:
    """Random tensors under the names of FasterDecoding's files."""
    d, generator = model.config.hidden_size, torch.Generator().manual_seed(heads)
    shapes = {}
    for i in range(heads):
        for j in range(layers):
            shapes |= {f"{i}.{j}.linear.weight": (d, d), f"{i}.{j}.linear.bias": (d,)}
        shapes[f"{i}.{layers}.weight"] = (model.config.vocab_size, d)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def by_hand(tensors, hidden, i: int, layers: int, projection) -> torch.Tensor:
    for j in range(layers):
        w, b = tensors[f"{i}.{j}.linear.weight"], tensors[f"{i}.{j}.linear.bias"]
        z = hidden @ w.T.double() + b.double()
        hidden = hidden + z * torch.sigmoid(z)
    return hidden @ projection.T.double()


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("layout", ["v1.pt", "v1.safetensors", "v2", "1.0", "file"])
def test_every_layout_loads_whatever_its_config_counts(tmp_path, layout, layers):
    model, heads = random_model(), 5
    tensors = v1_tensors(model, heads, layers)
    if layout == "v2":
        tensors = {name: t for name, t in tensors.items() if "linear" in name}
    claims = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "x"}
    (tmp_path / "config.json").write_text(json.dumps(claims))
    source = tmp_path
    if layout in ("v1.pt", "file"):
        torch.save(tensors, tmp_path / "medusa_lm_head.pt")
        source = tmp_path / "medusa_lm_head.pt" if layout == "file" else tmp_path
    elif layout == "1.0":
        save(model, None, tmp_path)
        whole = {name: p.data for name, p in model.named_parameters()}
        whole |= {f"medusa_head.{name}": t for name, t in tensors.items()}
        save_file(whole, tmp_path / "model.safetensors")
        again, _ = load(tmp_path, "float64", "cpu")  # the model itself loads without its heads
        assert torch.allclose(again([1, 2]), model([1, 2]))
    else:
        save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    loaded = load_medusa(source, model)
    assert len(loaded) == heads and (loaded.projection is None) == (layout == "v2")
    hidden = model(random_tokens(4))[0, -1]
    for i, logits in enumerate(loaded(hidden, model)):
        projection = tensors.get(f"{i}.{layers}.weight", model.lm_head.weight)
        assert (logits - by_hand(tensors, hidden, i, layers, projection)).abs().max() < 1e-10


@pytest.mark.parametrize("shared", [True, False])
def test_what_is_written_is_read_back_and_has_the_layout_s_names(tmp_path, shared):
    model = byte_model()
    heads = medusa.untrained(3, 2, model, shared)
    for p in heads.parameters():
        p.data.normal_()
    heads.tree, heads.accuracy = [(0,), (0, 1)], torch.rand(3, 10)
    medusa.save_medusa(heads, tmp_path, "base", TOKENIZER, torch.float64)
    again = load_medusa(tmp_path, model, TOKENIZER)
    hidden = model([1, 2, 3])
    assert torch.equal(again(hidden, model), heads(hidden, model))
    assert again.tree == heads.tree and torch.allclose(again.accuracy, heads.accuracy.double())
    names = dict(medusa.read_tensors(tmp_path / "medusa_lm_head.safetensors"))
    assert ("0.2.weight" in names) == (not shared) and "2.1.linear.bias" in names
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, 2)


def test_heads_of_something_else_are_refused_with_the_reason(tmp_path):
    model = byte_model()

    def refused(message: str, tensors: dict | None = None, tokenizer=None, config: dict = {}):
        if tensors is not None:
            save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=message):
            load_medusa(tmp_path, model, tokenizer)

    refused("has no weights|no Medusa heads")
    good = v1_tensors(model, 3, 1)
    wide = random_model(hidden_size=32, vocab_size=VOCAB)
    refused("hidden size 32, but the target's is 16", v1_tensors(wide, 3, 1))
    refused("heads of 40 tokens, but the target", v1_tensors(random_model(vocab_size=40), 3, 1))
    for name in ("1.0.linear.bias", "2.1.weight"):
        refused(f"lacks tensors: {name}", {k: t for k, t in good.items() if k != name})
    refused("0.q.weight is no tensor of Medusa heads", good | {"0.q.weight": torch.zeros(2)})
    refused("has misshapen", good | {"1.0.linear.weight": torch.zeros(16, 8)})
    refused("medusa_choices", good, config={"medusa_choices": [[0, 0, 0, 0]]})
    refused("medusa_choices", good, config={"medusa_choices": 7})
    refused("another tokenizer", good, TOKENIZER, {"tokenizer_fingerprint": "0123"})
    other = byte_tokenizer()
    other.backend.add_tokens(["extra"])
    other.save(tmp_path)
    refused("another tokenizer", good, TOKENIZER)
    with pytest.raises(UserError, match="no such directory"):
        load_medusa(tmp_path / "nowhere", model)
    (tmp_path / "medusa_lm_head.safetensors").write_bytes(b"rubbish")
    with pytest.raises(UserError, match="cannot be read"):
        load_medusa(tmp_path, model)


@pytest.mark.parametrize(
    "tensors", [{"0.0.linear.weight": 3}, {3: torch.zeros(2)}, {"0.0.weight": torch.tensor(1.0)},
                {"7.0.weight": torch.zeros(4, 4)}]
)  # fmt: skip
def test_odd_pt_files_are_one_line(tmp_path, tensors):
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(UserError, match="no tensor of Medusa heads|not numbered"):
        load_medusa(tmp_path, random_model())


def test_code_in_a_pt_file_is_never_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return exec, ("raise SystemExit('ran')",)

    torch.save({"0.0.linear.weight": Evil()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(UserError, match="code is never unpickled"):
        load_medusa(tmp_path, random_model())


# ---- training, and the command line --------------------------------------------------------------


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
    assert first.tree and first.accuracy.shape == (2, medusa.BEST)
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


def rows_and_positions(model) -> tuple[list[list[int]], list[torch.Tensor], distill.Positions]:
    rows = [random_tokens(9, seed) for seed in range(5)]
    labels = [distill.labels_of(row, 2, 3) for row in rows]
    states = [model(row)[0] for row in rows]
    return rows, states, distill.Positions(states, labels)


def test_the_loss_is_the_paper_s_and_its_gradient_spares_the_target(monkeypatch):
    monkeypatch.setattr(distill, "OTHERS", 100)  # more than there are tokens: all are scored
    model = random_model(dtype=torch.float32)
    rows, states, positions = rows_and_positions(model)
    heads = random_heads(model, 0, heads=3).float().requires_grad_(True)
    loss = distill.HeadsLoss(heads, model, positions, torch.float32)
    index = torch.arange(len(positions.hidden))
    total = loss(index)
    by_formula = 0.0
    for k in range(3):
        logs = [
            -heads(states[i][t], model)[k].log_softmax(-1)[rows[i][t + k + 2]]
            for i in range(5) for t in range(9) if t + k + 2 < 9
        ]  # fmt: skip
        by_formula += 0.8**k * torch.stack(logs).mean()
    assert torch.allclose(total, by_formula, atol=1e-5)
    total.backward()
    assert all(p.grad is not None for p in heads.parameters())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("shared", [True, False])
def test_the_loss_scores_all_tokens_on_average(shared):
    """Each batch some of those that never are labels, as if they were all: the sum of exponentials
    is the whole vocabulary's, over batches that begin with one position after the other."""
    model = random_model(dtype=torch.float32, vocab_size=200)
    _, _, positions = rows_and_positions(model)
    heads = certify.randomise(medusa.untrained(3, 1, model, shared), 0)
    loss = distill.HeadsLoss(heads, model, positions, torch.float32)
    whole, labels = heads(positions.hidden, model), positions.labels  # (K, n, V), (n, K)
    total, seen = 0.0, set()
    for first in range(distill.OTHERS):
        index = torch.arange(len(labels)).roll(-first)
        ids = loss.scored(index)
        assert loss.counts.sum() == 200 and len(ids) < 70
        part = heads.scores(positions.hidden, model, ids)
        assert torch.allclose(part, whole[..., ids], atol=1e-6)
        sums = (part.exp() * loss.counts).sum(-1)  # (K, n)
        by_hand = 0.0
        for k in range(3):
            real = labels[:, k] >= 0
            right = whole[k, real, labels[real, k]]
            by_hand += 0.8**k * (sums[k, real].log() - right).mean()
        assert torch.allclose(loss(index), by_hand, atol=1e-5)
        total += sums / distill.OTHERS
        seen |= set(ids.tolist())
    assert torch.allclose(total, whole.exp().sum(-1), rtol=1e-5) and len(seen) == 200
    assert set(positions.labels[positions.labels >= 0].tolist()) <= set(ids.tolist())


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
    model = random_model(dtype=torch.float64).cuda()
    heads = random_heads(model.cpu(), 0)
    model, heads = model.cuda(), heads.cuda()
    plain = decode(model, None, [1, 2, 3], max_new_tokens=40)
    run = decode(model, None, [1, 2, 3], "medusa", heads=heads, max_new_tokens=40)
    assert run.tokens == plain.tokens
