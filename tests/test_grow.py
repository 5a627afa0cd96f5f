"""A training may begin with what another checkpoint knows: a larger model has its function."""

import random
from dataclasses import replace

import pytest
import torch
from conftest import random_model, random_tokens
from test_distill import run as distill
from test_distill import target  # noqa: F401  a checkpoint
from test_pretrain import data, run  # noqa: F401  a small corpus

from minispec import UserError, load
from minispec.fastmtp import Drafter, Head, load_head
from minispec.grow import grow
from minispec.medusa import load_heads, untrained
from minispec.model import Transformer
from minispec.pretrain import initialise
from minispec.sampling import Sampling, Seeded
from minispec.vocabulary import Compressed

EXACT = {"norm_eps": 1e-30}  # the mean square is smaller by the new zeros, norm_eps is not


def small_and_large(seed: int) -> tuple[Transformer, Transformer]:
    """A random model of one head of keys, its norms anything; and a larger one, grown from it."""
    rng = random.Random(seed)
    small = random_model(seed, kv_heads=1, heads=rng.choice((1, 2)), tied=seed % 2 == 0, **EXACT)
    for name, parameter in small.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.uniform_(0.5, 2)
    c = small.config
    large = Transformer(
        replace(
            c,
            hidden_size=c.hidden_size + rng.randrange(9),
            heads=c.heads + rng.randrange(3),
            intermediate_size=c.intermediate_size + rng.randrange(9),
            layers=c.layers + rng.randrange(4),
        )  # fmt: skip
    )
    initialise(large, seed)
    large.double()
    grow(dict(large.named_parameters()), dict(small.named_parameters()), "here")
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
    grow(dict(grown.named_parameters()), dict(head.named_parameters()), "here")
    tokens = random_tokens(12, seed)
    drafts = []
    for model, its_head in ((small, head), (large, grown)):
        drafter = Drafter(its_head, model, 32, offset=0)
        with torch.no_grad():
            drafter.extend(model(tokens)[0, :-1], tokens[1:])
            words = Compressed({}, model).pick([])
            drafts.append(drafter.chain(4, Sampling(1.0), Seeded(seed), words))
    assert drafts[0][0] == drafts[1][0]
    for law, other in zip(drafts[0][1], drafts[1][1]):
        assert torch.allclose(law, other, atol=1e-9, rtol=0)

    heads, more = untrained(2, 2, small, shared=True), untrained(2, 2, large, shared=True)
    for parameter in heads.parameters():
        parameter.data.uniform_(-0.5, 0.5)
    grow(dict(more.tensors()), dict(heads.tensors()), "here")
    with torch.no_grad():
        expected, got = (h(m(tokens)[0], m) for h, m in ((heads, small), (more, large)))
    assert torch.allclose(got, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    "changes",
    [{"layers": 1}, {"hidden_size": 8}, {"head_dim": 4}, {"kv_heads": 2}, {"qk_norm": True}],
)
def test_what_does_not_fit_is_refused(changes):
    sizes = {"kv_heads": 1, "layers": 2, "hidden_size": 16, "head_dim": 8}
    small, other = random_model(**sizes), random_model(1, **(sizes | changes))
    with pytest.raises(UserError, match="--init here: has no .* that fits"):
        grow(dict(other.named_parameters()), dict(small.named_parameters()), "here")


def test_a_target_begins_with_another(data, tmp_path, capsys):  # noqa: F811
    first = run(data, tmp_path / "first", 2)
    begun = ["--init", str(tmp_path / "first")]
    again = run(data, tmp_path / "again", 1, *begun, "--lr", "1e-9")
    for name, weight in first.items():  # but for the rounding to float16
        assert torch.allclose(again[name], weight, atol=1e-3), name
    tokenizer = (tmp_path / "first" / "tokenizer.json").read_text()
    assert (tmp_path / "again" / "tokenizer.json").read_text() == tokenizer
    run(data, tmp_path / "wide", 1, *begun, "--width", "24", "--heads", "3", "--layers", "3")
    with pytest.raises(SystemExit) as caught:
        run(data, tmp_path / "deep", 1, *begun, "--layers", "1")
    error = capsys.readouterr().err
    assert caught.value.code == 2 and "--init" in error.splitlines()[-1]


def test_drafts_and_heads_begin_with_others(target, data, tmp_path, capsys):  # noqa: F811
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
        "mtp": lambda folder: load_head(folder, model).state_dict(),
        "medusa": lambda folder: dict(load_heads(folder, model).tensors()),
    }
    for kind, options in kinds.items():
        once, twice = tmp_path / kind, tmp_path / f"{kind} again"
        distill(kind, *same, 1, *options, "--lr", 0.1, "--out", once)
        distill(kind, *same, 1, *options, "--init", once, "--out", twice)
        theirs = read[kind](twice)
        for name, weight in read[kind](once).items():
            assert torch.allclose(theirs[name], weight, atol=1e-4), (kind, name)
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            distill(kind, *same, 1, *options, "--init", tmp_path / "no", "--out", tmp_path / "new")
        assert caught.value.code == 2 and "no" in capsys.readouterr().err
