"""The transformer against transformers, and against itself: cached or not, chain or tree, batch or
one.
"""

import copy
import json
import random
from types import NoneType

import pytest
import torch
from conftest import GOLDEN, SHARED, needs_shared, random_model, random_tokens
from safetensors.torch import load_file

from minispec import load
from minispec.methods.autoregressive import autoregressive
from minispec.cost import bytes_per_pass
from minispec.generate import decode
from minispec.int8 import Int8
from minispec.linear import KERNELS, Half, Packed, joined_in
from minispec.sampling import Sampling, Seeded
from minispec.tree import Tree

VARIANTS = sorted(folder.name for folder in GOLDEN.iterdir())


def greedy(model, prompt: list[int], n: int) -> list[int]:
    tokens: list[int] = []
    for step in autoregressive(model, prompt, Sampling(), Seeded()):
        tokens += step.tokens
        if len(tokens) >= n:
            return tokens[:n]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_equal_transformers(variant):
    golden = load_file(GOLDEN / variant / "golden.safetensors")
    for dtype, key, tolerance in (
        (torch.float32, "logits32", 1e-5),
        (torch.float64, "logits64", 1e-10),
    ):
        model, _ = load(GOLDEN / variant, dtype=dtype, device="cpu")
        logits = model.logits(model(golden["tokens"]))[0]
        # of the largest logit: other processors sum in other orders
        assert (logits - golden[key]).abs().max() <= tolerance * golden[key].abs().max()
    assert greedy(model, golden["tokens"][:20].tolist(), 64) == golden["greedy"].tolist()


@needs_shared
@pytest.mark.parametrize("name", ["tinystories-656k", "stories260k"])
def test_real_checkpoints_reproduce_their_reference(name):
    folder = SHARED / "checkpoints" / name
    model, tokenizer = load(folder, dtype="float64", device="cpu")
    tensors = load_file(folder / "reference.safetensors")
    for i, case in enumerate(json.loads((folder / "reference.json").read_text())["cases"]):
        assert tokenizer.encode(case["prompt"]) == case["prompt_ids"]
        logits = model.logits(model(tensors[f"{i}.tokens"]))[0]
        # the reference's norms and angles were computed in float32
        assert (logits - tensors[f"{i}.logits"]).abs().max() < 5e-5
        assert greedy(model, case["prompt_ids"], case["new_tokens"]) == case["greedy"]


@pytest.mark.parametrize("seed", range(10))
def test_any_split_into_passes_gives_the_same_hiddens(seed):
    rng = random.Random(seed)
    model = random_model(seed, qk_norm=bool(seed % 2), qkv_bias=bool(seed % 3))
    tokens = random_tokens(rng.randint(2, 150), seed)
    whole = model(tokens)
    cache, parts = model.new_cache(capacity=len(tokens)), []
    while cache.length < len(tokens):
        part = tokens[cache.length : cache.length + rng.choice([1, 2, 3, 8, 64, 65])]
        parts.append(model(part, cache))
        cache.commit(list(range(len(part))))
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-10)


def random_tree(rng: random.Random, n: int, vocab: int = 32) -> Tree:
    parents = [-1] + [rng.randrange(i) for i in range(1, n)]
    return Tree([rng.randrange(vocab) for _ in range(n)], parents)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("cached", [True, False])
def test_each_row_of_a_tree_equals_the_chain_through_its_ancestors(seed, cached):
    rng = random.Random(seed)
    model = random_model(seed)
    prefix = random_tokens(rng.choice([1, 5, 63, 64, 100]), seed) if cached else []
    tree = random_tree(rng, rng.choice([1, 2, 7, 20, 64]))
    cache = None
    if cached:
        cache = model.new_cache()
        model.prefill(prefix, cache, block=17)
    hidden = model(tree.tokens, cache, tree.depth, tree.mask)[0]
    for node in range(len(tree)):
        path = [node]
        while tree.parents[path[0]] >= 0:
            path.insert(0, tree.parents[path[0]])
        alone = model(prefix + tree.tokens_at(path))[0, -1]
        torch.testing.assert_close(hidden[node], alone, rtol=0, atol=1e-10)


def test_a_right_padded_batch_equals_its_rows_one_by_one():
    """Prompts of 1, 5 and 70 tokens prefilled together, then extended each at its own length."""
    model = random_model()
    rows = [random_tokens(n, n) for n in (1, 5, 70)]
    more = torch.tensor([random_tokens(3, 9 + n) for n in range(3)])
    padded = torch.zeros(3, 70, dtype=torch.long)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row)
    cache = model.new_cache(capacity=80, batch=3)
    model(padded, cache)
    cache.extend([len(row) for row in rows])
    for column in range(3):
        hidden = model(more[:, column : column + 1], cache)
        cache.extend([1, 1, 1])
        for i, row in enumerate(rows):
            alone = model(row + more[i, : column + 1].tolist())[0, -1]
            torch.testing.assert_close(hidden[i, 0], alone, rtol=0, atol=1e-10)


def test_moving_to_half_precision_leaves_the_rotary_frequencies_alone():
    model = random_model(dtype=torch.float32)
    before = model.rope.frequencies.clone()
    model.to(torch.bfloat16)
    assert model.rope.frequencies.dtype == torch.float32 and torch.equal(
        model.rope.frequencies, before
    )


@pytest.mark.gpu
def test_cuda_equals_cpu():
    model = random_model(dtype=torch.float32)
    tokens = random_tokens(40)
    expected = model.logits(model(tokens))
    on_gpu = model.to("cuda")
    cache = on_gpu.new_cache()
    on_gpu.prefill(tokens[:-5], cache)
    tree = Tree.chain(tokens[-5], tokens[-4:])
    hidden = on_gpu(tree.tokens, cache, tree.depth, tree.mask)
    torch.testing.assert_close(on_gpu.logits(hidden).cpu(), expected[:, -5:], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True}, {"qk_norm": True}, {"tied": False}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernels", [KERNELS, ()])
def test_joined_and_packed_weights_compute_what_the_parts_do(changes, dtype, kernels, monkeypatch):
    """The slow oracle of `prepare`: the same model unprepared, for one row and for many."""
    monkeypatch.setattr("minispec.linear.SMALL", 2**12)
    monkeypatch.setattr("minispec.linear.KERNELS", kernels)  # without: all are packed
    plain, fast = (
        random_model(vocab_size=1200, intermediate_size=520, dtype=dtype, **changes)
        for _ in range(2)
    )
    for model in (plain, fast):
        for p in model.parameters():  # as checkpoints are stored
            p.data = p.bfloat16().to(dtype)
    fast.prepare()
    halves = torch.backends.quantized.engine in kernels
    kind = (Half if halves else Packed) if dtype == torch.float32 else NoneType
    assert isinstance(fast.head.packed, kind)
    assert fast.model.layers[0].self_attn.out.packed is None
    for n in (1, 2, 7, 40):
        tokens = random_tokens(n)
        caches = [model.new_cache() for model in (plain, fast)]
        expected, logits = (m.logits(m(tokens, c)) for m, c in zip((plain, fast), caches))
        bound = (1e-5 if dtype == torch.float32 else 1e-12) * expected.abs().max()
        assert (logits - expected).abs().max() <= bound
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in fast.named_parameters()] == names
    assert fast.double().head is None and fast.model.layers[0].self_attn.qkv is None


LARGE = dict(hidden_size=96, intermediate_size=1500, dtype=torch.float32, tied=False)


@pytest.mark.parametrize("quantize", [False, True])
def test_what_changes_the_weights_undoes_their_packing(quantize, monkeypatch):
    """Weights of this size are given up; whoever trains or converts the model needs them back."""
    monkeypatch.setattr("minispec.linear.SMALL", 2**16)
    tokens, close = random_tokens(7), 1e-5
    changes = (lambda m: m.train(), lambda m: m.double().float(), lambda m: m.undo(),
               lambda m: m.state_dict())  # fmt: skip
    for change in changes:
        model = random_model(0, **LARGE).prepare(quantize)
        assert any(p.device.type == "meta" for p in model.parameters())
        with pytest.raises(RuntimeError, match="undo"):  # not silent nonsense
            model.model.layers[0].mlp.down_proj(torch.zeros(1, 1500))
        before = model.logits(model(tokens)).detach()
        change(model)
        assert model.head is None and all(p.device.type == "cpu" for p in model.parameters())
        after = model.logits(model(tokens)).detach()
        assert (after - before).abs().max() <= close * before.abs().max()
    model = random_model(0, **LARGE).prepare(quantize)
    before = model.logits(model(tokens))
    model.prepare()  # a second time: floats now
    assert not model.quantized
    assert (model.logits(model(tokens)) - before).abs().max() <= close * before.abs().max()
    model = copy.deepcopy(random_model(0, **LARGE).prepare(quantize))  # of plain weights as well
    assert model.head is None
    assert (model.logits(model(tokens)) - before).abs().max() <= close * before.abs().max()
    other = random_model(1, **LARGE)
    model = random_model(0, **LARGE).prepare(quantize)
    model.load_state_dict(other.state_dict())
    assert torch.equal(model.logits(model(tokens)), other.logits(other(tokens)))


@pytest.mark.parametrize("tied", [False, True])
def test_a_pass_reads_the_weights_as_they_are_kept(tied, monkeypatch):
    """Halves two bytes each, int8 one and its scales."""
    monkeypatch.setattr("minispec.linear.SMALL", 2**16)
    model = random_model(0, **(LARGE | {"tied": tied}))
    for p in model.parameters():
        p.data = p.bfloat16().float()
    layers = 4 * sum(p.numel() for p in model.model.layers.parameters())
    head = 4 * model.lm_head.weight.numel()
    assert bytes_per_pass(model) == layers + head
    model.prepare()
    if torch.backends.quantized.engine in KERNELS:
        halves = {name for name, j in joined_in(model).items() if isinstance(j.packed, Half)}
        assert {name.split(".")[-2] for name in halves} == {"mlp"}  # the rest is small
        mlp = sum(p.numel() for block in model.model.layers for p in block.mlp.parameters())
        assert bytes_per_pass(model) == layers + head - 2 * mlp
    model.prepare(quantize=True)
    assert 0.25 < bytes_per_pass(model) / (layers + head) < 0.36


def test_the_rows_of_a_large_tied_embedding_are_read_from_its_packed_memory(monkeypatch):
    """They are the very same numbers, kept once, and so is what `undo` gives back."""
    monkeypatch.setattr("minispec.linear.SMALL", 2**16)
    plain, fast = (random_model(0, **(LARGE | {"tied": True}), vocab_size=1400) for _ in range(2))
    tokens, all_tokens = random_tokens(9), torch.arange(1400).view(2, 700)
    fast.prepare()
    assert fast.lm_head.weight is fast.model.embed_tokens.weight
    assert fast.lm_head.weight.is_meta
    assert torch.equal(fast.embed(all_tokens), plain.embed(all_tokens))
    expected = plain.logits(plain(tokens))
    difference = fast.logits(fast(tokens)) - expected
    assert difference.abs().max() <= 1e-5 * expected.abs().max()
    fast.undo()
    assert fast.lm_head.weight is fast.model.embed_tokens.weight
    assert torch.equal(fast.logits(fast(tokens)), expected)


@pytest.mark.parametrize("width", [40, 128])
def test_weights_that_lie_otherwise_stay_plain(width, monkeypatch):
    """As they may on a processor that nobody has tried."""
    monkeypatch.setattr("minispec.linear.SMALL", 2**16)
    plain, fast = (random_model(0, **(LARGE | {"tied": True}), vocab_size=1400) for _ in range(2))
    monkeypatch.setattr("minispec.linear.WIDTHS", (width,))
    fast.prepare()
    assert fast.head.packed is None
    assert torch.equal(fast.embed(torch.arange(1400)), plain.embed(torch.arange(1400)))
    for n in (1, 9):
        tokens = random_tokens(n)
        expected = plain.logits(plain(tokens))
        assert (fast.logits(fast(tokens)) - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("tied", [False, True])
def test_int8_is_the_model_of_the_nearest_multiples_of_a_scale(tied):
    """In float64 exactly: every product, and the embedding where it is lm_head as well."""
    model, oracle = (random_model(4, tied=tied, vocab_size=70) for _ in range(2))
    for name, weight in oracle.named_parameters():
        if weight.dim() == 2 and (tied or "embed_tokens" not in name):
            nearest = Int8(weight.data).dense()
            scale = weight.data.abs().amax(1, keepdim=True).float() / 127
            assert (nearest - weight).abs().le(scale.double() * 0.5001).all()
            weight.data = nearest
    model.prepare(quantize=True)
    tokens = random_tokens(9)
    difference = model.logits(model(tokens)) - oracle.logits(oracle(tokens))
    assert difference.abs().max() < 1e-12
    plain = random_model(4, tied=tied, vocab_size=70)
    assert (plain.logits(plain(tokens)) - oracle.logits(oracle(tokens))).abs().max() > 1e-6


@pytest.mark.parametrize("method", ["speculative", "prompt-lookup", "lookahead"])
def test_methods_are_lossless_with_respect_to_the_int8_model(method):
    for seed in range(4):
        model = random_model(seed).prepare(quantize=True)
        options = {"draft": random_model(seed + 9).prepare(quantize=True)}
        options = options if method == "speculative" else {}
        prompt = random_tokens(9, seed)
        plain = decode(model, None, prompt, max_new_tokens=40)
        assert (
            decode(model, None, prompt, method, max_new_tokens=40, **options).tokens == plain.tokens
        )
