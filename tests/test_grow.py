"""A training may begin with what another checkpoint knows: a larger model has its function."""

import random
from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from conftest import random_model, random_tokens
from safetensors.torch import save_file
from test_distill import run as distill
from test_distill import target  # noqa: F401  a checkpoint
from test_pretrain import data, run  # noqa: F401  a small corpus

from minispec import UserError, load
from minispec import distill as distill_module
from minispec.checkpoint import save
from minispec.grow import begin, grow
from minispec.heads import load_medusa, load_mtp, mtp_tensors, save_mtp
from minispec.methods.fastmtp import Drafter, FullVocabulary, Head
from minispec.methods.medusa import untrained
from minispec.model import Transformer
from minispec.pretrain import initialise
from minispec.sampling import Sampling, Seeded

EXACT = {"norm_eps": 1e-30}  # the mean square is smaller by the new zeros, norm_eps is not


def small_and_large(seed: int) -> tuple[Transformer, Transformer]:
    """A random model, its norms and biases anything; and a larger one, grown from it."""
    rng = random.Random(seed)
    kv_heads, flags = rng.choice((1, 2, 3)), ("qkv_bias", "o_bias", "mlp_bias", "qk_norm")
    small = random_model(
        seed, kv_heads=kv_heads, heads=kv_heads * rng.choice((1, 2)), tied=seed % 2 == 0,
        **{flag: rng.random() < 0.3 for flag in flags}, **EXACT,
    )  # fmt: skip
    for name, parameter in small.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.uniform_(0.5, 2)
    c = small.config
    large = Transformer(
        replace(
            c,
            hidden_size=c.hidden_size + rng.randrange(9),
            heads=c.heads + kv_heads * rng.randrange(3),
            intermediate_size=c.intermediate_size + rng.randrange(9),
            layers=c.layers + rng.randrange(4),
        )  # fmt: skip
    )
    initialise(large, seed)
    large.double()
    grow(dict(large.named_parameters()), dict(small.named_parameters()), "here", kv_heads)
    return small, large


@pytest.mark.parametrize("seed", range(12))
def test_a_larger_model_begins_with_the_function_of_the_smaller(seed):
    small, large = small_and_large(seed)
    tokens = random_tokens(20, seed)
    expected, got = (m.logits(m(tokens)) for m in (small, large))
    assert torch.allclose(got, expected, atol=1e-10, rtol=0)


def test_all_that_is_new_learns():
    _, large = small_and_large(1)
    before = {name: p.detach().clone() for name, p in large.named_parameters()}
    optimizer = torch.optim.Adam(large.parameters(), lr=1e-3)
    for step in range(3):
        tokens = torch.randperm(32, generator=torch.Generator().manual_seed(step)).repeat(2)[:33]
        logits = large.logits(large(tokens[:-1]))[0]
        torch.nn.functional.cross_entropy(logits, tokens[1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in large.named_parameters():
        assert not (parameter == before[name]).any(), name


@pytest.mark.parametrize("seed", range(4))
def test_grown_heads_draft_what_the_smaller_ones_did(seed):
    small, large = small_and_large(seed)
    torch.manual_seed(seed)
    head = Head(small.config).double()
    for parameter in head.parameters():
        parameter.data.uniform_(-0.3, 0.3)
    grown = Head(large.config)
    initialise(grown, seed)
    grown.double()
    kv_heads = small.config.kv_heads
    grow(dict(grown.named_parameters()), dict(head.named_parameters()), "here", kv_heads)
    tokens = random_tokens(12, seed)
    drafts = []
    for model, its_head in ((small, head), (large, grown)):
        drafter = Drafter(its_head, model, 32, offset=0)
        with torch.no_grad():
            drafter.extend(model(tokens)[0, :-1], tokens[1:])
            drafts.append(drafter.chain(4, Sampling(1.0), Seeded(seed), FullVocabulary(model)))
    assert drafts[0][0] == drafts[1][0]
    for p, other in zip(drafts[0][1], drafts[1][1]):
        assert torch.allclose(p, other, atol=1e-9, rtol=0)

    heads, more = untrained(2, 2, small, shared=True), untrained(2, 2, large, shared=True)
    for parameter in heads.parameters():
        parameter.data.uniform_(-0.5, 0.5)
    grow(dict(more.named_parameters()), dict(heads.named_parameters()), "here")
    with torch.no_grad():
        expected, got = (h(m(tokens)[0], m) for h, m in ((heads, small), (more, large)))
    assert torch.allclose(got, expected, atol=1e-9, rtol=0)


SIZES = {"kv_heads": 1, "heads": 2, "layers": 2, "hidden_size": 16, "head_dim": 8}


@pytest.mark.parametrize(
    "theirs, ours, message",
    [
        ({}, {"layers": 1}, "has 2 layers, more than the 1 here"),
        ({}, {"hidden_size": 8}, "does not fit into"),
        ({}, {"qk_norm": True}, "has no model.layers.0.self_attn.q_norm.weight"),
        ({"qk_norm": True}, {}, "has model.layers.0.self_attn.k_norm.weight, for which"),
        ({"qkv_bias": True}, {}, "has model.layers.0.self_attn.k_proj.bias, for which"),
        ({}, {"head_dim": 4}, "its head_dim is 8, the model's is 4: they must"),
        ({}, {"kv_heads": 2}, "its num_key_value_heads is 1, the model's is 2"),
        ({}, {"kv_heads": 2, "heads": 4, "head_dim": 4}, "its num_key_value_heads is 1"),
        ({}, {"rope_theta": 5e5}, "its rope_theta is 10000.0, the model's is 500000.0"),
        ({"norm_eps": 0.1}, {}, "its rms_norm_eps is 0.1"),
        ({}, {"vocab_size": 40}, "does not fit into"),
        ({"tied": False}, {"tied": True}, "its tie_word_embeddings is False"),
    ],
)
def test_what_does_not_fit_is_refused(theirs, ours, message, tmp_path):
    family = {"model_type": "qwen3"} if {"qk_norm"} & (theirs.keys() | ours) else {}
    small = random_model(**(SIZES | family | theirs))
    save(small, None, tmp_path, torch.float32)
    other = random_model(1, **(SIZES | family | ours))
    with pytest.raises(UserError, match="--init .*" + message):
        begin(other, str(tmp_path), None)


def test_quantised_weights_and_leftovers_of_heads_are_refused():
    model = random_model()
    tensors = dict(model.named_parameters())
    key = "model.layers.0.self_attn.k_proj.weight"
    for odd, message in (
        (torch.zeros(3, dtype=torch.int8), "quantised"),
        (3, "is not a tensor"),
        (torch.tensor(1.0), "does not fit into"),
    ):
        with pytest.raises(UserError, match=message):
            grow(tensors, tensors | {key: odd}, "here")
    for heads, layers, shared in ((3, 1, True), (2, 2, True), (2, 1, False)):
        more, fewer = untrained(heads, layers, model, shared), untrained(2, 1, model, True)
        with pytest.raises(UserError, match="for which there is no place here"):
            grow(dict(fewer.named_parameters()), dict(more.named_parameters()), "here")


def test_a_head_begins_with_that_of_a_whole_model(tmp_path):
    model = random_model(layers=3)
    head = Head(model.config)
    whole = {n: p.detach().clone() for n, p in model.named_parameters()}
    whole |= mtp_tensors(head, torch.float64)
    file = tmp_path / "whole.safetensors"
    save_file({name: t.contiguous() for name, t in whole.items()}, file)
    args = Namespace(init=str(file), seed=1, device="cpu")
    begun = distill_module.new_head(model, args, None)
    for name, weight in head.named_parameters():
        assert torch.equal(weight, begun.get_parameter(name)), name
    save_mtp(head, tmp_path / "head", "model", None, torch.float32, [1.0])
    other = Transformer(replace(model.config, rope_theta=5e5))
    args.init = str(tmp_path / "head")
    distill_module.new_head(model, args, None)
    for load_or_begin in (
        lambda: distill_module.new_head(other, args, None),
        lambda: load_mtp(args.init, other),
    ):
        with pytest.raises(UserError, match="its rope_theta is 10000.0, the model's is 500000.0"):
            load_or_begin()


def test_a_target_begins_with_another(data, tmp_path, capsys):  # noqa: F811
    first = run(data, tmp_path / "first", 2)
    begun = ["--init", str(tmp_path / "first")]
    other = "--lr", "1e-9", "--seed", "1", "--vocab", "333"
    again = run(data, tmp_path / "again", 1, *begun, *other)
    for name, weight in first.items():  # but for the rounding to float16
        assert torch.allclose(again[name], weight, atol=1e-3), name
    tokenizer = (tmp_path / "first" / "tokenizer.json").read_text()
    assert (tmp_path / "again" / "tokenizer.json").read_text() == tokenizer
    wide = "--width", "24", "--heads", "3", "--layers", "3"
    run(data, tmp_path / "wide", 1, *begun, *other, *wide)
    small, large = (load(tmp_path / name, "float32", "cpu")[0] for name in ("first", "wide"))
    tokens = random_tokens(20)
    with torch.no_grad():
        expected, got = (m.logits(m(tokens)) for m in (small, large))
    assert torch.allclose(got, expected, atol=0.01)  # a deviation is 0.08; norm_eps is not grown
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        run(data, tmp_path / "deep", 1, *begun, "--layers", "1")
    error = capsys.readouterr().err
    assert caught.value.code == 2 and "--init" in error.splitlines()[-1]


def test_a_training_keeps_the_tokenizer_that_it_was_begun_with(data, tmp_path, capsys):  # noqa: F811
    run(data, tmp_path / "first", 1)
    begun = "--init", str(tmp_path / "first")
    run(data, tmp_path / "second", 1, *begun, "--vocab", "333")
    theirs = (tmp_path / "first" / "tokenizer.json").read_text()
    (tmp_path / "first" / "config.json").unlink()
    run(data, tmp_path / "second", 2, *begun, "--vocab", "333")  # goes on without the first
    assert (tmp_path / "second" / "tokenizer.json").read_text() == theirs
    run(data, tmp_path / "third", 1, "--vocab", "333")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        run(data, tmp_path / "third", 2, "--tokenizer", str(tmp_path / "first" / "tokenizer.json"))
    assert "was begun with another tokenizer" in capsys.readouterr().err


def test_drafts_and_heads_begin_with_others(target, data, tmp_path, monkeypatch, capsys):  # noqa: F811
    own = tmp_path / "own.jsonl"
    distill("generate", "--model", target, "--data", data, "--tokens", 20, "--batch", 8,
            "--device", "cpu", "--out", own, "--documents", 60)  # fmt: skip
    same = ("--model", target, "--own", own, "--device", "cpu", "--lr", 1e-9, "--steps")
    sizes = "--layers", 1, "--width", 8, "--heads", 2, "--ffn", 8, "--context", 16
    kinds = {
        "draft": (*sizes, "--batch-tokens", 64),
        "mtp": ("--batch-tokens", 256),
        "medusa": ("--heads", 2, "--batch-tokens", 64, "--shared"),
    }
    model, _ = load(target, "float32", "cpu")
    read = {
        "draft": lambda folder: load(folder, "float32", "cpu")[0].state_dict(),
        "mtp": lambda folder: load_mtp(folder, model).state_dict(),
        "medusa": lambda folder: load_medusa(folder, model).state_dict(),
    }
    for kind, options in kinds.items():
        once, twice = tmp_path / kind, tmp_path / f"{kind} again"
        distill(kind, *same, 1, *options, "--lr", 0.1, "--out", once)
        distill(kind, *same, 1, *options, "--init", once, "--out", twice)
        theirs = read[kind](twice)
        for name, weight in read[kind](once).items():
            assert torch.allclose(theirs[name], weight, atol=1e-4), (kind, name)
        distill(kind, *same, 2, *options, "--init", tmp_path / "no", "--out", twice)  # goes on
        capsys.readouterr()
        with monkeypatch.context() as later, pytest.raises(SystemExit) as caught:
            later.setattr(distill_module, "read_training", None)
            distill(kind, *same, 1, *options, "--init", tmp_path / "no", "--out", tmp_path / "new")
        assert caught.value.code == 2 and "no such directory" in capsys.readouterr().err
