"""Sampling many texts at once: batches with a cache of their own, and a graph for each step."""

import random

import pytest
import simulated
import torch
from conftest import random_model, random_tokens, random_tree
from simulated import DEVICE, Simulated, SimulatedDevice

from minispec import Sampling, UserError
from minispec.distill import batch
from minispec.distill.batch import sample_batch
from minispec.fast import captured
from minispec.generate import decode


@pytest.mark.parametrize("chunk", [512, 70, 9])
def test_a_right_padded_batch_equals_its_sequences_one_by_one(chunk):
    """Prompts of 1, 5 and 70 tokens are prefilled together, and then continued token by token."""
    model, masks = random_model(), []
    prompts = [random_tokens(n, n) for n in (1, 5, 70)]
    new_tokens = torch.tensor([random_tokens(3, 9 + n) for n in range(3)])
    padded = torch.zeros(3, 70, dtype=torch.long)
    for i, prompt in enumerate(prompts):
        padded[i, : len(prompt)] = torch.tensor(prompt)
    cache = model.new_cache(80, 3)
    place = cache.place
    cache.place = lambda *args: masks.append(place(*args)[2]) or place(*args)
    model.prefill(padded, cache, chunk)
    assert max(mask.numel() for mask in masks) <= min(chunk, 70) * 70  # for all prompts together
    del cache.place
    cache = cache.view(80, torch.tensor([[len(prompt)] for prompt in prompts]))
    for step in range(3):
        hidden = model(new_tokens[:, step : step + 1], cache)
        cache.commit([0])
        for i, prompt in enumerate(prompts):
            expected = model(prompt + new_tokens[i, : step + 1].tolist())[0, -1]
            torch.testing.assert_close(hidden[i, 0], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("seed", range(5))
def test_a_batched_pass_over_several_rows_equals_one_pass_per_sequence(seed):
    """For chains and trees of several rows, and sequences of different committed lengths."""
    rng = random.Random(seed)
    model, vocab = random_model(seed, tied=bool(seed % 2)), 32
    batched = model.new_cache(90, 3).view(90, torch.zeros(3, 1, dtype=torch.int64))
    caches = [model.new_cache(capacity=90) for _ in range(3)]
    for _ in range(6):
        tree = random_tree(rng, rng.randint(2, 12))
        causal = rng.random() < 0.5
        layout = (None, None) if causal else (tree.depth, tree.mask)
        tokens = torch.tensor([[rng.randrange(vocab) for _ in tree.tokens] for _ in caches])
        logits = model.logits(model(tokens, batched, *layout))  # (3, n, vocab)
        for row, cache, actual in zip(tokens, caches, logits):
            expected = model.logits(model(row, cache, *layout))[0]
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
        # the first rows of a tree may be siblings; only a chain's rows may all be committed
        counts = [rng.randint(0, len(tree)) if causal else rng.randint(0, 1) for _ in caches]
        batched.length = batched.length + torch.tensor(counts)[:, None]
        for cache, count in zip(caches, counts):
            cache.commit(list(range(count)))
    assert len(set(batched.length.flatten().tolist())) > 1


def generators(seed: int, n: int) -> list[torch.Generator]:
    """Generators with consecutive seeds, as `distill generate` makes them."""
    return [torch.Generator().manual_seed(seed + i) for i in range(n)]


@pytest.mark.parametrize("rows", [1, 4, 21, 30])
def test_a_greedy_batch_equals_decoding_each_prompt_alone(rows):
    model = random_model(eos_ids=tuple(range(9)))
    prompts = [[1], [2, 3, 4], [5, 6, 7, 8, 9, 10, 11], *([i] for i in range(12, 30))]
    together = [*sample_batch(model, prompts, 20, Sampling(), generators(0, 21), rows)]
    for prompt, tokens in zip(prompts, together):
        assert tokens == decode(model, None, prompt, max_new_tokens=20).tokens
    lengths = sorted(map(len, together))
    assert 2 * lengths[len(lengths) // 2] < lengths[-1]  # a few rows outlast the rest


def test_sampled_batches_follow_the_distribution_and_their_seed():
    model = random_model(vocab_size=4, dtype=torch.float32)
    p = model.logits(model([1, 2]))[0, -1].softmax(-1)
    prompts, draws = [[1, 2]] * 4000, []
    for seed in (1, 1, 2):
        own = generators(4000 * seed, 4000)
        draws.append(list(sample_batch(model, prompts, 1, Sampling(1.0), own)))
    assert draws[0] == draws[1] != draws[2]
    counts = torch.bincount(torch.tensor(draws[0])[:, 0], minlength=4) / 4000
    assert (counts - p).abs().max() < 4 * (0.25 / 4000) ** 0.5


def test_a_sampled_row_does_not_depend_on_the_others():
    model = random_model(eos_ids=(3, 4))
    prompts = [random_tokens(1 + i % 4, i) for i in range(9)]
    together = [*sample_batch(model, prompts, 12, Sampling(0.9), generators(5, 9), 4)]
    for i, prompt in enumerate(prompts):
        alone = sample_batch(model, [prompt], 12, Sampling(0.9), generators(5 + i, 1))
        assert list(alone) == [together[i]]


def test_texts_end_anywhere_in_a_burst_and_in_the_cache():
    """Rows are written after their texts have ended, up to the end of the memory."""
    model = random_model(2, eos_ids=(3, 4, 5))
    prompts = [[1] * 30] * 6 + [[2]] * 14
    together = list(sample_batch(model, prompts, 20, Sampling(1.0), generators(0, 20), 6))
    for i, prompt in enumerate(prompts):
        (alone,) = sample_batch(model, [prompt], 20, Sampling(1.0), generators(i, 1))
        assert alone == together[i]


def test_what_follows_an_end_token_does_not_harm_the_row_s_next_text():
    """The model yields NaN after its end tokens."""
    model = random_model(1, eos_ids=(3, 4), tied=False)
    model.model.embed_tokens.weight.data[[3, 4]] = torch.nan
    prompts = [[5 + i % 20, 9] for i in range(30)]
    expected = [decode(model, None, prompt, max_new_tokens=20).tokens for prompt in prompts]
    assert any(tokens[-1] in (3, 4) for tokens in expected)
    assert [*sample_batch(model, prompts, 20, Sampling(), generators(0, 30), 4)] == expected


def test_logits_with_nan_are_an_error():
    model = random_model()
    model.model.norm.weight.data[0] = torch.nan
    for sampling in Sampling(), Sampling(1.0, top_p=0.9):
        with pytest.raises(UserError, match="logits contain NaN"):
            list(sample_batch(model, [[1, 2]], 3, sampling, generators(0, 1)))


# ---- on a device ---------------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch):
    """The simulated device, with graphs."""
    monkeypatch.setattr(captured, "capture", simulated.capture)
    monkeypatch.setattr(captured, "warm_up", lambda run: run())
    monkeypatch.setattr(captured, "addresses", simulated.addresses)
    monkeypatch.setattr(batch, "is_on_gpu", lambda model: model.device.type == DEVICE.type)
    with SimulatedDevice():
        yield DEVICE


def texts_on(device: torch.device | str, sampling: Sampling) -> list[list[int]]:
    """Texts of a model whose passes read up to 300 cache rows."""
    model = random_model(5, layers=1, eos_ids=(3, 4)).to(device)
    prompts = [random_tokens(n, n) for n in (3, 6, 1, 238, 250, 2)]
    return list(sample_batch(model, prompts, 25, sampling, generators(2, 6), rows=3))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, 9, 0.9)])
def test_a_graph_for_each_step_yields_the_same_texts(device, sampling):
    assert texts_on(device, sampling) == texts_on("cpu", sampling)


def test_without_graphs_the_texts_are_the_same(device, monkeypatch, capsys):
    def fails(run):
        raise RuntimeError("no graphs")

    monkeypatch.setattr(captured, "capture", fails)
    assert texts_on(device, Sampling(0.9)) == texts_on("cpu", Sampling(0.9))
    assert capsys.readouterr().err.count("CUDA graphs do not work here") == 1


@torch.no_grad()
def test_a_step_takes_few_launches_and_a_burst_one_synchronisation(device):
    model = random_model(5, layers=2).to(device)
    group = batch.Batch(model, 100, Sampling(0.9, 9, 0.9), rows=3, capacity=200)
    group.start({row: batch.Text([1, 2, row], *generators(row, 1)) for row in range(3)})
    group.extend()  # captures the graph
    Simulated.launches = Simulated.synchronisations = 0
    group.extend()
    assert Simulated.launches <= 7 * batch.BURST and Simulated.synchronisations == 1
