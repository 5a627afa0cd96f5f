"""Training is reproducible, when resumed and in two processes, and writes a model that loads."""

import argparse
import os
import re
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    WORDS,
    equal_up_to_rounding,
    file_limit,
    last_error_line,
    random_documents,
    random_model,
    random_tokens,
)
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from minispec import load
from minispec.checkpoints.load import save
from minispec.generate import decode
from minispec.training import loop as training
from minispec.training import pretrain
from minispec.training.new_model import initialise, new_model

SIZES = ["--layers", "2", "--width", "16", "--heads", "2", "--ffn", "24", "--vocab", "300",
         "--context", "32", "--rows", "4", "--device", "cpu", "--lr", "0.01"]  # fmt: skip


@pytest.fixture
def data(tmp_path):
    (tmp_path / "tales.txt").write_text(random_documents(99))
    (tmp_path / "talk.jsonl").write_text('{"prompt": "hi", "completion": "hello"}\n' * 60)
    return [str(tmp_path / "tales.txt"), str(tmp_path / "talk.jsonl")]


def run(data, out, steps: int, *more: str) -> dict[str, torch.Tensor]:
    pretrain.main(["--data", *data, "--out", str(out), "--steps", str(steps), *SIZES, *more])
    return weights(out)


def weights(out) -> dict[str, torch.Tensor]:
    return torch.load(out / "training.pt", weights_only=True)["model"]


def rejected(capsys, *arguments) -> str:
    return last_error_line(capsys, lambda: run(*arguments))


def test_an_epoch_covers_every_document_once_in_a_new_order():
    documents = [np.full(i + 1, i) for i in range(6)]
    batch = pretrain.packed_batches(documents, 2, 5, seed=1)  # 2 batches of 10: all but the last
    first, second = (torch.cat([batch(step) for step in steps]) for steps in ((0, 1), (2, 3)))
    for rows in first, second:
        assert rows.shape == (4, 6) and torch.equal(rows[:-1, -1], rows[1:, 0])
        text = rows[:, :-1].flatten().tolist() + rows[-1, -1:].tolist()
        assert sorted(text) == sorted(sum(map(list, documents), []))
    assert not torch.equal(first, second) and torch.equal(batch(1), first[2:])
    short = pretrain.packed_batches(documents[:2], 2, 5, 0)  # fewer tokens than a batch
    assert short(7).shape == (2, 6)


@pytest.mark.parametrize("shape", [(7, 7), (5, 40), (33, 8), (1, 9)])
def test_muon_keeps_singular_vectors_and_equalises_singular_values(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 100
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    ours = u.T @ training.orthogonal(x) @ v.T
    assert (ours - torch.diag(ours.diag())).abs().max() < 1e-3
    large = ours.diag()[s > s[0] / 50]  # five steps do not bring tiny ones all the way
    assert large.min() > 0.5 and large.max() < 1.3


def test_training_learns_and_its_model_loads(data, tmp_path):
    out, lone = tmp_path / "out", tmp_path / "lone.jsonl"
    lone.write_text('{"text": "the cat"}\n')
    run([*data, str(lone)], out, 60)
    card = (out / "README.md").read_text()
    assert "60 steps, 7,680 tokens, " in card and "| tales |" in card and "| talk |" in card
    assert "| lone |" not in card  # it has no held-out documents
    assert "pretrain --data tales.txt talk.jsonl lone.jsonl" in card
    assert len(card.splitlines()) <= 60
    model, tokenizer = load(out, "float64", "cpu")
    assert model.config.eos_ids == (0, 3) and model.config.bos_id == 0
    chat = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert decode(model, tokenizer, chat, max_new_tokens=5).tokens
    texts, bits = [" ".join(WORDS[::-1]), "a bird", "on the mat, é"], 0.0
    for text in texts:
        row = tokenizer.encode(text) + [0]
        log_p = model.logits(model(row[:-1]))[0].log_softmax(-1)
        bits -= sum(log_p[i, token].item() for i, token in enumerate(row[1:])) / np.log(2)
    after = pretrain.bits_per_byte(model, tokenizer, texts)
    assert abs(after - bits / sum(len(text.encode()) for text in texts)) < 1e-5
    initialise(model, 0)
    assert after < 0.8 * pretrain.bits_per_byte(model, tokenizer, texts)


def test_a_run_stopped_by_ctrl_c_resumes_exactly(data, tmp_path, monkeypatch):
    out, save_often = tmp_path / "parts", ("--save-every", "3")
    optimizer_step = training.optimizer_step
    whole, steps = run(data, tmp_path / "whole", 9, *save_often), []

    def interrupted(*arguments):
        steps.append(optimizer_step(*arguments))
        if len(steps) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(training, "optimizer_step", interrupted)
    with pytest.raises(SystemExit) as caught:
        run(data, out, 9, *save_often)
    assert caught.value.code == 130 and not (out / "model.safetensors").exists()
    resumed = run(data, out, 9, *save_often)
    assert len(steps) == 5 + 6
    for name in whole:
        assert torch.equal(whole[name], resumed[name]), name


def test_two_runs_cannot_share_an_out_directory(data, tmp_path, capsys, monkeypatch):
    out, optimizer_step = tmp_path / "out", training.optimizer_step

    def both(*arguments):
        monkeypatch.setattr(training, "optimizer_step", optimizer_step)
        with pytest.raises(SystemExit):
            run(data, out, 2)
        errors.append(capsys.readouterr().err)
        optimizer_step(*arguments)

    errors: list[str] = []
    monkeypatch.setattr(training, "optimizer_step", both)
    run(data, out, 1)
    assert f"--out {out}: another process is writing to it; wait" in errors[0]
    run(data, out, 2)  # continues


def test_help_needs_no_docstring(monkeypatch, capsys):
    """`python -OO` strips docstrings."""
    monkeypatch.setattr(pretrain, "__doc__", None)
    with pytest.raises(SystemExit) as caught:
        pretrain.main(["-h"])
    assert (
        caught.value.code == 0 and "usage: python -m minispec pretrain" in capsys.readouterr().out
    )


@pytest.mark.slow
def test_two_processes_train_the_same_model_as_one(data, tmp_path):
    single = run(data, tmp_path / "alone", 3)
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    both = os.environ | {  # the environment that torchrun would set
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
    }  # fmt: skip
    command = [sys.executable, "-m", "minispec", "pretrain", "--data", *data, *SIZES,
               "--out", str(tmp_path / "both"), "--steps", "3"]  # fmt: skip
    ranks = [
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True,
                         env=both | {"RANK": rank, "LOCAL_RANK": rank})
        for rank in "01"
    ]  # fmt: skip
    errors = [process.communicate()[1] for process in ranks]
    assert all(process.returncode == 0 for process in ranks), errors
    for name, weight in weights(tmp_path / "both").items():
        torch.testing.assert_close(weight, single[name], rtol=0, atol=2e-4)


def test_a_full_disk_is_reported_in_one_line_and_loses_nothing(data, tmp_path, capsys):
    out = tmp_path / "out"
    run(data, out, 2)
    before = (out / "training.pt").read_bytes()
    for limit in 0, 700, 5000, len(before) - 9:  # in the header, a tensor, the directory at the end
        with file_limit(limit):
            error = rejected(capsys, data, out, 4)
        assert re.search("/training.pt cannot be written: [^\n]*File too large$", error)
        assert (out / "training.pt").read_bytes() == before and not list(out.glob("*.part"))
    run(data, out, 4)


def test_init_continues_a_model_and_keeps_its_tokenizer(data, tmp_path, capsys):
    first, out = run(data, tmp_path / "first", 2), tmp_path / "again"
    begun = "--init", str(tmp_path / "first"), "--layers", "9"
    again = run(data, out, 1, *begun, "--lr", "1e-9", "--context", "16")
    for name, weight in first.items():  # up to rounding to float16
        assert torch.allclose(again[name], weight, atol=1e-3), name
    tokenizer = (tmp_path / "first" / "tokenizer.json").read_text()
    assert (out / "tokenizer.json").read_text() == tokenizer
    assert load(out, device="cpu")[0].config.context == 16
    run(data, out, 2, *begun, "--context", "16")
    run(data, tmp_path / "other", 1, "--data", *data[1:])
    other = "--tokenizer", str(tmp_path / "other" / "tokenizer.json")
    error = rejected(capsys, data, tmp_path / "new", 1, *begun, *other)
    assert "made with another tokenizer" in error


SCALED = {
    "linear": {"factor": 2.0},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0},  # its original length defaults to the context
    "yarn with its original length": {"factor": 4.0, "original_max_position_embeddings": 64},
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALED)
@torch.no_grad()
def test_a_shorter_context_keeps_the_rotation_after_saving(tmp_path, kind):
    scaling = {"rope_type": kind.split()[0]} | SCALED[kind]
    save(random_model(3, rope_scaling=scaling, head_dim=32), None, tmp_path / "old")
    args = argparse.Namespace(init=tmp_path / "old", device="cpu", context=48)
    model = new_model(args, None, vocab_size=32)
    save(model, None, tmp_path / "new")
    tokens = random_tokens(40)
    assert equal_up_to_rounding(load(tmp_path / "new", device="cpu")[0](tokens), model(tokens))


def test_any_tokenizer_can_be_used(data, tmp_path):
    other = Backend(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "the"))
    other.pre_tokenizer = pre_tokenizers.Whitespace()
    other.enable_truncation(3)
    other.save(str(tmp_path / "other.json"))
    (tmp_path / "one.txt").write_text("the cat, the only document")
    run([str(tmp_path / "one.txt")], tmp_path / "out", 1, "--tokenizer",
        str(tmp_path / "other.json"), "--context", "8")  # fmt: skip
    model, tokenizer = load(tmp_path / "out", "float32", "cpu")
    assert model.config.vocab_size == len(WORDS) + 4 == tokenizer.size
    assert len(tokenizer.encode("<|user|>the cat sat on<|end|>")) == 7


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--layers", "0"], "--layers: 0 must be a whole number, from 1"),
        (["--heads", "3"], "must be an even multiple"),
        (["--tokenizer", "nowhere.json"], "nowhere.json"),
        (["--init", "nowhere"], "no such directory: nowhere"),
        (["--device", "abacus"], "device abacus is not available"),
        (["--context", "7"], "--context: 7 must be a whole number, at least 8"),
        (["--seed", "-1"], "--seed: -1 must be"),
        (["--vocab", "1000000000"], "--vocab: 1000000000 must be a whole number, from 260"),
        (["--lr", "nan"], "--lr: nan must be a number"),
        (["--lr", "1000"], "lower --lr"),
        (["--data", "nowhere"], "no such file or directory: nowhere"),
        (["--out", "FILE/out"], "--out"),
    ],
)
def test_wrong_input_is_rejected(data, tmp_path, arguments, message, capsys):
    arguments = [word.replace("FILE", data[0]) for word in arguments]
    assert message in rejected(capsys, data, tmp_path / "out", 9, *arguments)
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_the_checkpoint_of_another_run_is_rejected(data, tmp_path, capsys):
    out, file = tmp_path / "out", tmp_path / "out" / "training.pt"
    run(data, out, 2)
    assert "(different model)" in rejected(capsys, data, out, 3, "--heads", "4")
    assert "(different data)" in rejected(capsys, data[:1], out, 3)
    assert "(different rows)" in rejected(capsys, data, out, 3, "--rows", "8")
    for damaged in b"PK", [], {"model": {}}, {"model": [1]}:
        file.write_bytes(damaged) if isinstance(damaged, bytes) else torch.save(damaged, file)
        assert "training.pt is damaged" in rejected(capsys, data, out, 3)
