"""EAGLE-3's head: its formula, what it reads and what it drafts, compared with an implementation
of its own that recomputes everything; and the layouts of its checkpoints."""

import inspect
import json
import math
from dataclasses import replace
from unittest import mock

import mistakes
import pytest
import torch
from conftest import (
    ROOT,
    TOKENIZER,
    equal_up_to_rounding,
    last_error_line,
    random_model,
    random_tokens,
)
from safetensors.torch import load_file, save_file
from test_heads import rejects
from test_proposals import RandomK, RandomNodes, paths_of
from torch import Tensor

from minispec import load
from minispec.certify.common import GREEDY
from minispec.certify.methods.cases import bound
from minispec.certify.toys import letter_tokenizer, random_eagle3_head, randomise, small_model
from minispec.checkpoints import eagle3 as checkpoints
from minispec.checkpoints.eagle3 import is_eagle3, load_eagle3, save_eagle3
from minispec.checkpoints.load import save
from minispec.distill import Documents, MTPLoss
from minispec.generate import __main__ as generate
from minispec.generate import decode
from minispec.methods.eagle3 import Eagle3Head, Midlayer, default_layers
from minispec.methods.fastmtp import CHILDREN, HeadDrafter
from minispec.model import Backbone, Transformer
from minispec.sampling import Seeded

GOLDEN = ROOT / "tests" / "golden_eagle3"

# ---- the head by its formula ---------------------------------------------------------------------


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotated(x: Tensor) -> Tensor:
    """RoPE for x (n, heads, head_dim) at positions 0 … n - 1, pair by pair."""
    n, half = len(x), x.shape[-1] // 2
    result = x.clone()
    for j in range(half):
        angle = torch.arange(n, dtype=x.dtype)[:, None] * 10000.0 ** (-j / half)
        a, b = x[..., j], x[..., j + half]
        result[..., j] = a * angle.cos() - b * angle.sin()
        result[..., j + half] = b * angle.cos() + a * angle.sin()
    return result


def layer_outputs(head: Eagle3Head, hidden: Tensor, embedded: Tensor) -> Tensor:
    """The outputs (n, d) of the head's layer for all rows, from its tensors alone."""
    c, w = head.config, {n.removeprefix("midlayer."): t for n, t in head.state_dict().items()}
    g = norm(hidden, w["hidden_norm.weight"])
    x = torch.cat([norm(embedded, w["input_layernorm.weight"]), g], 1)  # (n, 2d)
    q, k, v = (
        (x @ w[f"self_attn.{name}_proj.weight"].T).view(len(x), -1, c.head_dim) for name in "qkv"
    )
    k, v = (t.repeat_interleave(c.heads // c.kv_heads, 1) for t in (rotated(k), v))
    scores = torch.einsum("ihd,jhd->hij", rotated(q), k) / math.sqrt(c.head_dim)
    hidden_rows = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    p = scores.masked_fill(hidden_rows, -math.inf).softmax(-1)
    attended = torch.einsum("hij,jhd->ihd", p, v).flatten(1) @ w["self_attn.o_proj.weight"].T
    x = (g if head.midlayer.norm_before_residual else hidden) + attended
    y = norm(x, w["post_attention_layernorm.weight"])
    gate, up = (y @ w[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (gate * gate.sigmoid() * up) @ w["mlp.down_proj.weight"].T


def features_of(model: Transformer, tokens: list[int]) -> Tensor:
    """The hidden states (n, 3d) that enter the layers 2, n / 2 and n - 3, remembered by
    hooks."""
    n, inputs = model.config.layers, []
    handles = [block.register_forward_pre_hook(lambda _, args: inputs.append(args[0][0]))
               for block in model.model.layers]  # fmt: skip
    model(tokens)
    for handle in handles:
        handle.remove()
    return torch.cat([inputs[i] for i in sorted({min(2, n - 1), n // 2, max(n - 3, 0)})], 1)


def slow_probs(head: Eagle3Head, model: Transformer, tokens: list[int], path: list[int]) -> Tensor:
    """The head's distribution over the target's tokens after `tokens` and the drafts `path`, with
    every row of the head recomputed for each draft."""
    hidden = features_of(model, tokens[:-1]) @ head.fc.weight.T
    read = tokens[1:]
    for token in [*path, None]:
        embedded = head.embed(torch.tensor(read), model)
        output = layer_outputs(head, hidden, embedded)[-1:]
        hidden, read = torch.cat([hidden, output]), [*read, token]
    p = (norm(output[0], head.norm.weight) @ head.lm_head.weight.T).softmax(-1)
    full = p.new_zeros(model.config.vocab_size)
    full[expected_ids(model)] = p
    return full


def expected_ids(model: Transformer, seed: int = 0) -> list[int]:
    """The tokens of `random_head`."""
    return [token for token in range(model.config.vocab_size) if token % 3 != seed]


def random_head(model: Transformer, seed: int, tmp_path=None) -> Eagle3Head:
    """A head in either residual form, with or without an embedding of its own; read from a file if
    there is a folder."""
    c, layers = model.config, default_layers(model.config.layers)
    settings = {"norm_before_residual": seed % 2 == 1, "embedding": seed % 3 == 1}
    head = Eagle3Head(c, c, expected_ids(model), layers, **settings)
    randomise(head.to(model.dtype), seed)
    if tmp_path is not None:
        save_eagle3(head, tmp_path, "base", None, torch.float64, speculators=seed == 2)
        head = load_eagle3(tmp_path, model)
    return head


def model_of(seed: int) -> Transformer:
    return small_model(seed, vocab=6, layers=(8, 7, 2)[seed % 3])


@torch.no_grad()
@pytest.mark.parametrize("seed", range(4))
def test_the_layer_is_the_formula_s(seed):
    model = model_of(seed)
    head, generator = random_head(model, seed), torch.Generator().manual_seed(seed)
    hidden, embedded = torch.randn(2, 7, 16, generator=generator, dtype=torch.float64)
    expected = layer_outputs(head, hidden, embedded)
    assert torch.allclose(head(hidden[None], embedded[None])[0], expected, atol=1e-10)


@torch.no_grad()
def test_the_target_s_features_follow_its_output():
    """Also those of a tree after a cached prefix; its output is the same as without them."""
    model, tokens = random_model(layers=8), random_tokens(9)
    d, layers = model.config.hidden_size, default_layers(8)
    assert layers == (2, 4, 5) and default_layers(32) == (2, 16, 29) and default_layers(1) == (0,)
    rows = model(tokens, feature_layers=layers)[0]
    assert torch.equal(rows[:, :d], model(tokens)[0])
    assert torch.equal(rows[:, d:], features_of(model, tokens))
    cache = model.new_cache(32)
    model.prefill(tokens[:6], cache)
    mask, depth = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]) > 0, torch.tensor([0, 1, 1])
    rows = model([tokens[6], tokens[7], 5], cache, depth, mask, layers)[0]
    assert torch.allclose(rows[:2, d:], features_of(model, tokens)[6:8], atol=1e-10)
    assert torch.allclose(rows[2, d:], features_of(model, [*tokens[:7], 5])[7], atol=1e-10)


# ---- drafts --------------------------------------------------------------------------------------


def chains(seed: int, tmp_path) -> None:
    """Drafts must equal those of the slow head, also after plain steps, and the head's cache must
    follow the text."""
    model, tokens = model_of(seed), [2, 1, 0]
    head, policy, cache = random_head(model, seed, tmp_path), RandomK(seed), model.new_cache()
    rounds = bound("eagle3", head=head, k=policy)(model, tokens, GREEDY, Seeded(), cache=cache)
    next(rounds)
    for step, _ in zip(rounds, range(16)):
        drafts = []
        for _ in range(policy.chosen[-1]):
            drafts.append(int(slow_probs(head, model, tokens, drafts).argmax()))
        assert step.tree.tokens[1:] == drafts
        tokens = tokens + step.tokens
        kept = inspect.getgeneratorlocals(rounds)["drafter"]
        assert kept.cache.length + kept.num_pending == cache.length


def trees(seed: int, tmp_path) -> None:
    """Each tree must have the nodes of EAGLE-2's expansion, made with the slow head."""
    model, tokens = model_of(seed), [2, 1, 0]
    head, policy = random_head(model, seed, tmp_path), RandomNodes(seed)
    rounds = bound("eagle3", head=head, tree=policy)(model, tokens, GREEDY, Seeded())
    next(rounds)
    for step, _ in zip(rounds, range(10)):
        frontier, found = [((), 1.0)], []
        for _ in range(policy.shape[1]):
            level = []
            for path, value in frontier:
                best = slow_probs(head, model, tokens, list(path)).topk(min(CHILDREN, 4))
                pairs = zip(best.indices.tolist(), best.values.tolist())
                level += [((*path, token), value * p) for token, p in pairs]
            found += level
            frontier = sorted(level, key=lambda node: -node[1])[: policy.shape[0]]
        kept = sorted(found, key=lambda node: -node[1])[: policy.n]
        assert paths_of(step.tree) == [path for path, value in found if (path, value) in kept]
        tokens = tokens + step.tokens


@torch.no_grad()
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("oracle", [chains, trees])
def test_drafts_are_those_of_the_slow_head(oracle, seed, tmp_path):
    oracle(seed, tmp_path)


NORMED_TWICE = {"run_block": mistakes.normed_block, "logits": mistakes.normed_logits}


@torch.no_grad()
@pytest.mark.parametrize(
    "oracle, owner, changes",
    [
        (chains, Eagle3Head, {"project_features": mistakes.features_reversed}),
        (chains, Eagle3Head, NORMED_TWICE),
        (trees, Eagle3Head, NORMED_TWICE),
        (chains, checkpoints, {"read_ids": mistakes.d2t_as_ids}),
        (chains, Backbone, {"forward": mistakes.outputs_of_the_layers}),
        (chains, Midlayer, {"forward": mistakes.embedding_second}),
        (chains, Midlayer, {"forward": mistakes.residual_always_before_its_norm}),
        (trees, HeadDrafter, {"run": mistakes.rows_as_positions}),
        (trees, HeadDrafter, {"run": mistakes.siblings_seen}),
    ],
)
def test_the_slow_head_catches_mistakes_that_no_output_shows(oracle, owner, changes, tmp_path):
    with mock.patch.multiple(owner, **changes), pytest.raises(AssertionError):
        for seed in range(3):
            oracle(seed, tmp_path / str(seed))


@torch.no_grad()
def test_the_same_head_drafts_for_hybrid():
    model = model_of(0)
    head, prompt = random_head(model, 0), [0, 3, 1, 4, 2]
    for options in {"k": 3}, {"tree": 6}:
        own = decode(model, None, prompt, "eagle3", head=head, max_new_tokens=2, **options)
        run = decode(model, None, prompt, "hybrid", head=head, max_new_tokens=2, **options)
        assert run.rounds[0].tree.tokens == own.rounds[0].tree.tokens


# ---- training ------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("seed", range(3))
def test_training_runs_the_head_as_drafting_does(seed):
    """Step k at row i predicts token i + k + 1 after drafts that are the true tokens."""
    model, tokens = model_of(seed), random_tokens(8, vocab=6)
    head, ids = random_head(model, seed), expected_ids(model)
    states = model(tokens, feature_layers=head.feature_layers)
    documents = Documents([tokens], [1], [states[0]])
    loss = MTPLoss(head, model, documents, 3, 0.8, True)
    assert loss.weights == pytest.approx([1 / 2.44, 0.8 / 2.44, 0.64 / 2.44])
    for k, logits in enumerate(loss.steps(states[:, :6], torch.tensor([tokens + [0] * 4]))):
        for i in range(6 - k):
            drafted = slow_probs(head, model, tokens[: i + 2], tokens[i + 2 : i + 2 + k])
            assert torch.allclose(logits[0, i].softmax(-1), drafted[ids])


def test_large_hidden_states_stay_finite():
    """SmolLM2's reach 22,000 at the first token; float16 ends at 65,504."""
    large, small = torch.full((3, 8), 1e5), torch.full((3, 8), 0.1)
    documents = Documents([[1, 2, 3]] * 2, [1, 1], [None, None], lambda rows: [large, small])
    states = documents.states(torch.tensor([0, 1]), 3)
    assert torch.allclose(states[0], large, rtol=2**-8)
    assert torch.equal(states[1], small.half().float())


@pytest.mark.parametrize("soft", [False, True])
def test_the_loss_covers_the_head_s_vocabulary(soft):
    """Cross-entropy with the label or, if soft, with the target's distribution over the head's
    tokens, wherever the label is one of them."""
    model, rows = model_of(1).float(), [random_tokens(n, n, 6) for n in (9, 7)]
    head, ids = random_head(model, 1).float(), expected_ids(model)
    states = [model(row, feature_layers=head.feature_layers)[0] for row in rows]
    documents, by_hand = Documents(rows, [2, 2], states), 0.0
    loss = MTPLoss(head, model, documents, 2, 0.8, True, soft=soft)
    for k, weight in enumerate(loss.weights):
        each = []
        for row, hidden in zip(rows, states):
            steps = loss.steps(hidden[None, : len(row) - 2], torch.tensor([row + [0] * 4]))
            for i in range(len(row) - k - 2):
                if (label := row[i + k + 2]) in ids:
                    p = model.logits(model(row)[0, i + k + 1])[ids].softmax(-1)
                    log_q = steps[k][0, i].log_softmax(-1)
                    each.append(-(p * log_q).sum() if soft else -log_q[ids.index(label)])
        by_hand += weight * torch.stack(each).mean()
    assert torch.allclose(loss(torch.arange(2)), by_hand, atol=1e-4)
    head.requires_grad_(True)
    loss(torch.arange(2)).backward()
    assert all(p.grad is not None for p in head.parameters())


# ---- checkpoints ---------------------------------------------------------------------------------

LAYOUTS = ["eagle", "eagle, shards", "eagle, .bin", "speculators", "file"]


def write_head(head: Eagle3Head, folder, layout: str = "eagle") -> None:
    save_eagle3(head, folder, "base", TOKENIZER, torch.float64, layout == "speculators")
    file = folder / "model.safetensors"
    tensors = {name: t.clone() for name, t in load_file(file).items()}
    if layout == "eagle, shards":
        names = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(tensors)}
        for part in set(names.values()):
            save_file({n: t for n, t in tensors.items() if names[n] == part}, folder / part)
        index = json.dumps({"weight_map": names})
        (folder / "model.safetensors.index.json").write_text(index)
    elif layout == "eagle, .bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    if layout in ("eagle, shards", "eagle, .bin"):
        file.unlink()


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(4))
def test_a_head_is_saved_and_loaded(layout, seed, tmp_path):
    model = model_of(seed)
    head = random_head(model, seed)
    head.acceptance = [0.7, 0.5]
    write_head(head, tmp_path, layout)
    again = load_eagle3(tmp_path / "model.safetensors" if layout == "file" else tmp_path, model)
    assert is_eagle3(tmp_path) and again.ids.tolist() == expected_ids(model)
    state = again.state_dict()
    assert state.keys() == head.state_dict().keys()
    assert all(torch.equal(t, state[n]) for n, t in head.state_dict().items())
    assert again.midlayer.norm_before_residual == head.midlayer.norm_before_residual
    assert (again.feature_layers, again.acceptance) == (head.feature_layers, [0.7, 0.5])


def test_the_names_are_those_of_published_heads(tmp_path):
    """As in yuhuili/EAGLE3-LLaMA3.1-Instruct-8B, and in RedHatAI's speculators."""
    model = model_of(0)
    write_head(random_head(model, 0), tmp_path / "eagle")
    write_head(random_head(model, 1), tmp_path / "speculators", "speculators")
    layer = [
        *(f"self_attn.{x}_proj" for x in "qkvo"),
        *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
        "input_layernorm", "hidden_norm", "post_attention_layernorm",
    ]  # fmt: skip
    both = {"d2t", "t2d", "fc.weight", "norm.weight", "lm_head.weight"}
    found = load_file(tmp_path / "eagle" / "model.safetensors")
    assert found.keys() == both | {f"midlayer.{name}.weight" for name in layer}
    assert found["d2t"].tolist() == [1, 1, 2, 2] and found["d2t"].dtype == torch.int64
    assert found["t2d"].tolist() == [False, True, True] * 2
    own = load_file(tmp_path / "speculators" / "model.safetensors").keys()
    assert own == both | {f"layers.0.{name}.weight" for name in layer} | {"embed_tokens.weight"}


@torch.no_grad()
def test_a_head_that_drafts_all_tokens_is_written_without_a_map(tmp_path):
    """vLLM stops at the tensor d2t of such a head."""
    model = model_of(0)
    head = randomise(Eagle3Head(model.config, model.config, [*range(6)], (2,)).double(), 0)
    save_eagle3(head, tmp_path, "base", None, torch.float64)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "fc.weight" in tensors and not {"d2t", "t2d"} & set(tensors)
    assert load_eagle3(tmp_path, model).host_ids.tolist() == [*range(6)]


@torch.no_grad()
def test_a_head_with_the_target_s_embedding_shares_it(tmp_path):
    model = model_of(0)
    head = randomise(Eagle3Head(model.config, model.config, [1, 2], (2,), embedding=True), 0)
    head.embed_tokens.weight = model.model.embed_tokens.weight
    save_eagle3(head, tmp_path, "base", None, torch.float64)
    assert not hasattr(load_eagle3(tmp_path, model), "embed_tokens")


@torch.no_grad()
def test_a_head_may_have_other_sizes_than_its_target(tmp_path):
    model, tokens = model_of(0), random_tokens(5, vocab=6)
    sizes = {"hidden_size": 24, "heads": 2, "kv_heads": 1, "head_dim": 6, "intermediate_size": 20}
    config = replace(model.config, **sizes)
    head = Eagle3Head(config, model.config, [0, 4, 5], (1, 6), embedding=True).double()
    save_eagle3(randomise(head, 0), tmp_path, "base", None, torch.float64)
    again = load_eagle3(tmp_path, model)
    assert again.config.hidden_size == 24 and again.feature_layers == (1, 6)
    plain = decode(model, None, tokens, max_new_tokens=12).tokens
    for options in {"k": 3}, {"tree": 5}:
        run = decode(model, None, tokens, "eagle3", head=again, max_new_tokens=12, **options)
        assert run.tokens == plain


@torch.no_grad()
@pytest.mark.parametrize("changes", [
    {"model_type": "qwen3", "qk_norm": True}, {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
])  # fmt: skip
def test_a_head_of_another_family_is_loaded(changes, tmp_path):
    model = small_model(0, 6, layers=7, **changes)
    head, (hidden, embedded) = random_eagle3_head(model, 0), torch.randn(2, 1, 5, 16).double()
    for speculators in False, True:
        save_eagle3(head, tmp_path, "base", None, torch.float64, speculators)
        again = load_eagle3(tmp_path, model)
        assert equal_up_to_rounding(again(hidden, embedded), head(hidden, embedded))
        assert torch.equal(again.rope.frequencies, head.rope.frequencies)


@pytest.mark.parametrize("speculators", [False, True])
def test_a_head_given_as_a_model_or_a_draft_is_named(speculators, tmp_path):
    save_eagle3(random_head(model_of(0), 0), tmp_path, "base", None, torch.float32, speculators)
    rejects("an EAGLE-3 head, not a model; use it with --heads and --method eagle3", load, tmp_path)


def test_rope_scaling_of_a_head_replaces_its_rope_parameters(tmp_path):
    model = small_model(0, 6, layers=7, rope_scaling={"rope_type": "linear", "factor": 2.0})
    head = random_eagle3_head(model, 0)
    save_eagle3(head, tmp_path, "base", None, torch.float64)
    edited(tmp_path, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}})
    assert torch.equal(load_eagle3(tmp_path, model).rope.frequencies, head.rope.frequencies)
    edited(tmp_path, {"rope_parameters": {"rope_theta": 7.0}})
    rejects("rope_theta must be the same", load_eagle3, tmp_path, model)


def test_layers_are_also_read_from_eagle_config(tmp_path):
    model, name = model_of(0), "eagle_aux_hidden_state_layer_ids"
    save_eagle3(random_head(model, 0), tmp_path, "base", None, torch.float64)
    for changes, layers in (({name: None}, (2, 4, 5)), ({"eagle_config": {name: [1, 3, 6]}},
                                                        (1, 3, 6))):  # fmt: skip
        edited(tmp_path, changes)
        assert load_eagle3(tmp_path, model).feature_layers == layers


def edited(folder, changes: dict) -> None:
    """Change keys of config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: v for key, v in config.items() if v is not None}))


@pytest.mark.parametrize("changes, match", [
    ({"draft_vocab_size": None}, "config.json is not that of an EAGLE-3 head"),
    ({"speculators_model_type": "dflash"}, "config.json is not that of an EAGLE-3 head"),
    ({"draft_vocab_size": 5}, "must name 5 different tokens .draft_vocab_size. of its 6"),
    ({"num_hidden_layers": 2}, "num_hidden_layers must be 1 .it is 2"),
    ({"norm_output": True}, "norm_output must be false, as this norm is not supported"),
    ({"fc_norm": True}, "fc_norm must be false"),
    ({"norm_before_fc": False, "eagle_config": {"norm_before_fc": True}}, "norm_before_fc must be"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state must be true, as"),
    ({"use_aux_hidden_state": False}, "use_aux_hidden_state must be true, as"),
    ({"eagle_config": {"norm_before_residual": 1}, "norm_before_residual": None}, "true or false"),
    ({"norm_before_residual": 1}, "norm_before_residual must be true or false"),
    ({"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}, r"\[2, 4, 8\] are not layers of the model"),
    ({"eagle_aux_hidden_state_layer_ids": [4, 2]}, "must be ascending layer numbers"),
    ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, r"fc.weight.*\[16, 48\].*\[16, 32\]"),
    ({"hidden_size": 32}, "is for another model: its hidden_size is 32, the model's is 16"),
    ({"intermediate_size": 9}, r"gate_proj.weight.*\[24, 16\].*\[9, 16\]"),
    ({"transformer_layer_config": 3}, "transformer_layer_config must be a JSON object"),
    ({"tokenizer_fingerprint": "0123"}, "another tokenizer"),
])  # fmt: skip
def test_a_config_that_does_not_fit_is_rejected(changes, match, tmp_path):
    model = model_of(0)
    save_eagle3(random_head(model, 0), tmp_path, "base", None, torch.float64)
    edited(tmp_path, changes)
    rejects(match, load_eagle3, tmp_path, model, letter_tokenizer(6))


@pytest.mark.parametrize("changes, match", [
    ({"lm_head.weight": None}, "Missing key.*lm_head.weight"),
    ({"norm.bias": torch.zeros(16)}, "Unexpected key.*norm.bias"),
    ({"fc.weight": torch.full((16, 48), math.nan)}, "fc.weight contains NaN"),
    *(({"d2t": torch.tensor(d2t)} | t2d, "must name 4 different tokens") for d2t, t2d in (
        ([0, 0, 0, 3], {"t2d": None}), ([0, -1, 0, 0], {"t2d": None}), ([0, 0, 0, 0], {}))),
    ({"t2d": torch.ones(9, dtype=torch.bool)}, "must name 4 different tokens .* of its 6"),
    ({"d2t": None, "t2d": None}, "must name 4 different tokens .* of its 6"),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_rejected(changes, match, tmp_path):
    model = model_of(0)
    save_eagle3(random_head(model, 0), tmp_path, "base", None, torch.float64)
    tensors = {n: t.clone() for n, t in load_file(tmp_path / "model.safetensors").items()}
    tensors = {n: t for n, t in (tensors | changes).items() if t is not None}
    save_file(tensors, tmp_path / "model.safetensors")
    rejects(match, load_eagle3, tmp_path, model)


def test_heads_are_recognised_on_the_command_line(tmp_path, capsys, monkeypatch):
    """In both methods that can draft with them, and a wrong one is a line."""
    model = random_model(vocab_size=TOKENIZER.size, layers=7, bos_id=256)
    save(model, TOKENIZER, tmp_path / "target")
    head = random_eagle3_head(model, 1)
    write_head(head, tmp_path / "eagle3", "speculators")
    monkeypatch.chdir(tmp_path)

    def run(*flags: str) -> dict:
        generate.main(["ab", "--model", "target", "--dtype", "float64", "--max-new-tokens", "8",
                       "--json", "--device", "cpu", *flags])  # fmt: skip
        return json.loads(capsys.readouterr().out)

    plain = run()
    for method in "eagle3", "hybrid":  # for eagle3, it lies next to the model
        found = run("--method", method, *(["--heads", "eagle3"] if method == "hybrid" else []))
        assert found["tokens"] == plain["tokens"] and found["stats"]["drafted"] > 0
    size = sum(p.numel() for p in head.parameters())
    assert found["stats"]["extra_parameters"] == size
    for flags, match in (
        ("hybrid --heads eagle3 --vocabulary none", "an EAGLE-3 head has its own vocabulary"),
        ("eagle3 --heads target", "is not that of an EAGLE-3 head"),
        ("eagle3 --vocabulary none", "--vocabulary is for --method"),
    ):
        assert match in last_error_line(capsys, lambda: run("--method", *flags.split()))
    config = json.loads((tmp_path / "eagle3" / "config.json").read_text())
    config["transformer_layer_config"]["hidden_size"] = 32
    edited(tmp_path / "eagle3", config)
    error = last_error_line(capsys, lambda: run("--method", "eagle3"))
    assert "its hidden_size is 32, the model's is 16" in error



@torch.no_grad()
@pytest.mark.parametrize("layout", ["eagle", "speculators"])
def test_logits_are_those_of_speculators(layout):
    """Of three steps, by the library that trains such heads. See make_golden_eagle3.py."""
    golden = load_file(GOLDEN / layout / "golden.safetensors")
    target, _ = load(GOLDEN / "target", "float32", "cpu")
    head, n = load_eagle3(GOLDEN / layout, target), len(golden["tokens"])
    assert head.ids.tolist() == [0, 2, 3, 7, 8, 11, 12, 17, 20, 23]
    assert head.feature_layers == {"eagle": (2, 3, 4), "speculators": (1, 3, 6)}[layout]
    tokens = torch.tensor([[0, *golden["tokens"].tolist(), 0, 0, 0]])
    states = torch.cat([torch.zeros(n, 16), golden["features"]], 1)
    steps = MTPLoss(head, target, None, 3, 0.8, True).steps(states[None], tokens)
    assert torch.allclose(torch.cat(steps), golden["logits"], atol=1e-4)
