"""Training is exact: stopped and resumed or not, in one process or two; what it writes loads."""

import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from conftest import ROOT
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from minispec import UserError, load, pretrain
from minispec.generate import decode
from minispec.training import orthogonal

SIZES = ["--layers", "2", "--width", "16", "--heads", "2", "--ffn", "24", "--vocab", "300",
         "--context", "32", "--batch-tokens", "128", "--device", "cpu", "--lr", "0.01"]  # fmt: skip
WORDS = "the cat sat on a mat and saw one red bird fly over it".split()


@pytest.fixture
def data(tmp_path):
    rng, file = random.Random(0), tmp_path / "tales.txt"
    file.write_text("\n<|endoftext|>\n".join(" ".join(rng.choices(WORDS, k=30)) for _ in range(99)))
    (tmp_path / "talk.jsonl").write_text('{"prompt": "hi", "completion": "hello"}\n' * 60)
    return [str(file), str(tmp_path / "talk.jsonl")]


def run(data, out, steps: int, *more: str) -> dict[str, torch.Tensor]:
    pretrain.main(["--data", *data, "--out", str(out), "--steps", str(steps), *SIZES, *more])
    return weights(out)


def weights(out) -> dict[str, torch.Tensor]:
    return torch.load(out / "training.pt", weights_only=True)["model"]


def refused(capsys, *arguments) -> str:
    """The one line that a run ends with."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        run(*arguments)
    error = capsys.readouterr().err.splitlines()[-1]
    assert caught.value.code == 2 and error.startswith("minispec: ")
    return error


# ---- batches, optimiser, measure -----------------------------------------------------------------


def test_a_stream_shows_every_document_once_an_epoch_and_begins_anywhere():
    documents = [np.full(i + 1, i) for i in range(6)]
    stream, size = pretrain.Stream(documents, seed=1), 21
    epochs = [stream.take(epoch * size, 1, size)[0, :size] for epoch in range(3)]
    assert all(sorted(e.tolist()) == sorted(sum(map(list, documents), [])) for e in epochs)
    assert not torch.equal(epochs[0], epochs[1])
    rows = pretrain.Stream(documents, seed=1).take(4, 5, 7)
    whole = torch.cat(epochs)[4:]
    assert rows.shape == (5, 8) and torch.equal(rows[:, :-1].flatten(), whole[:35])
    assert torch.equal(rows[:-1, -1], rows[1:, 0]) and rows[-1, -1] == whole[35]


@pytest.mark.parametrize("shape", [(7, 7), (5, 40), (33, 8), (1, 9)])
def test_muon_s_update_keeps_directions_and_loses_sizes(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 100
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    ours = u.T @ orthogonal(x) @ v.T
    assert (ours - torch.diag(ours.diag())).abs().max() < 1e-3
    large = ours.diag()[s > s[0] / 50]  # of tiny ones five steps make something in between
    assert large.min() > 0.5 and large.max() < 1.3


def test_bits_per_byte_is_the_plain_sum_over_documents(data, tmp_path):
    run(data, tmp_path / "out", 2)
    model, tokenizer = load(tmp_path / "out", "float64", "cpu")
    texts, bits = ["the cat sat", "a bird", "on the mat and over it, é"], 0.0
    for text in texts:
        row = tokenizer.encode(text) + [0]
        log_p = model.logits(model(row[:-1]))[0].log_softmax(-1)
        bits -= sum(log_p[i, token].item() for i, token in enumerate(row[1:])) / np.log(2)
    expected = bits / sum(len(text.encode()) for text in texts)
    assert abs(pretrain.bits_per_byte(model, tokenizer, texts) - expected) < 1e-5


# ---- whole runs ----------------------------------------------------------------------------------


def test_training_learns_and_what_it_writes_loads(data, tmp_path):
    out = tmp_path / "out"
    run(data, out, 60)
    card = (out / "README.md").read_text()
    assert "60 steps, 7,680 tokens" in card and "| tales |" in card and "| talk |" in card
    assert "pretrain --data tales.txt talk.jsonl" in card and len(card.splitlines()) <= 60
    model, tokenizer = load(out, "float32", "cpu")
    assert model.config.eos_ids == (0, 3) and model.config.bos_id == 0
    held_out = pretrain.read_corpus([tmp_path / "tales.txt"])[1]["tales"]
    after = pretrain.bits_per_byte(model, tokenizer, held_out)
    pretrain.initialise(model, 0)
    assert after < 0.7 * pretrain.bits_per_byte(model, tokenizer, held_out)
    chat = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert decode(load(out, "float32", "cpu")[0], tokenizer, chat, max_new_tokens=5).tokens


def test_a_run_that_ctrl_c_ended_goes_on_as_if_it_had_not(data, tmp_path):
    steps, often = 60, ("--save-every", "1")
    whole = run(data, tmp_path / "whole", steps, "--save-every", "7")

    def interrupt():
        while not (tmp_path / "parts" / "training.pt").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(SystemExit) as caught:
        run(data, tmp_path / "parts", steps, *often)
    assert caught.value.code == 130 and not (tmp_path / "parts" / "model.safetensors").exists()
    resumed = run(data, tmp_path / "parts", steps, *often)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    for name in whole:
        assert torch.equal(whole[name], resumed[name]), name


def test_two_processes_train_the_same_model_as_one(data, tmp_path):
    alone = run(data, tmp_path / "alone", 3)
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    both = os.environ | {  # as torchrun starts them, but for its own start
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
    }  # fmt: skip
    command = [sys.executable, "-m", "minispec.pretrain", "--data", *data, *SIZES,
               "--out", str(tmp_path / "both"), "--steps", "3"]  # fmt: skip
    ranks = [
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True,
                         env=both | {"RANK": rank, "LOCAL_RANK": rank})
        for rank in "01"
    ]  # fmt: skip
    errors = [process.communicate()[1] for process in ranks]
    assert all(process.returncode == 0 for process in ranks), errors
    for name, weight in weights(tmp_path / "both").items():
        torch.testing.assert_close(weight, alone[name], rtol=0, atol=2e-4)


def test_a_full_disk_is_one_line_and_loses_nothing(data, tmp_path, capsys):
    out = tmp_path / "out"
    run(data, out, 2)
    before, limit = (out / "training.pt").read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limit[1]))
    try:
        said = refused(capsys, data, out, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "training.pt cannot be written" in said and "make room" in said
    assert (out / "training.pt").read_bytes() == before and not list(out.glob("*.part"))
    run(data, out, 4)


# ---- what a run begins with ----------------------------------------------------------------------


def test_a_model_begins_with_another_and_keeps_its_tokenizer(data, tmp_path, capsys):
    first, out = run(data, tmp_path / "first", 2), tmp_path / "again"
    begun = "--init", str(tmp_path / "first"), "--vocab", "333"
    again = run(data, out, 1, *begun, "--lr", "1e-9", "--seed", "1")
    for name, weight in first.items():  # but for the rounding to float16
        assert torch.allclose(again[name], weight, atol=1e-3), name
    tokenizer = (tmp_path / "first" / "tokenizer.json").read_text()
    assert (out / "tokenizer.json").read_text() == tokenizer
    for change, said in (
        (["--layers", "1"], "its layers is 2, here it is 1: give the same sizes"),
        (["--heads", "4"], "its heads is 2, here it is 4"),  # of equal shapes
    ):
        assert said in refused(capsys, data, tmp_path / "new", 1, *begun, *change)
    run(data, tmp_path / "other", 1, "--vocab", "300", "--data", *data[1:])
    other = "--tokenizer", str(tmp_path / "other" / "tokenizer.json")
    said = refused(capsys, data, tmp_path / "new", 1, *begun, *other)
    assert "made with another tokenizer" in said
    (tmp_path / "first" / "config.json").unlink()
    run(data, out, 2, *begun, "--seed", "1")  # goes on without it
    assert (out / "tokenizer.json").read_text() == tokenizer


def test_any_tokenizer_will_do(data, tmp_path):
    other = Backend(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "the"))
    other.pre_tokenizer = pre_tokenizers.Whitespace()
    other.enable_truncation(3)
    other.save(str(tmp_path / "other.json"))
    run(data, tmp_path / "out", 1, "--tokenizer", str(tmp_path / "other.json"))
    model, tokenizer = load(tmp_path / "out", "float32", "cpu")
    assert model.config.vocab_size == len(WORDS) + 4 == tokenizer.size
    assert len(tokenizer.encode("<|user|>the cat sat on<|end|>")) == 7


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--layers", "0"], "--layers: 0 must be a whole number, from 1 to 1000"),
        (["--heads", "3"], "must be an even multiple"),
        (["--batch-tokens", "8"], "must hold a row"),
        (["--tokenizer", "nowhere.json"], "nowhere.json is not a tokenizer"),
        (["--device", "abacus"], "device abacus is not available"),
        (["--context", "1"], "--context: 1 must be a whole number, at least 2"),
        (["--seed", "-1"], "--seed: -1 must be"),
        (["--seed", "9" * 30], "--seed: 9"),
        (["--vocab", "259"], "--vocab: 259 must be a whole number, from 260"),
        (["--vocab", "1000000000"], "--vocab: 1000000000 must be"),
        (["--lr", "nan"], "--lr: nan must be a number"),
        (["--data", "nowhere"], "no such file or directory: nowhere"),
        (["--lr", "1000"], "lower --lr"),
    ],
)
def test_wrong_input_is_refused(data, tmp_path, arguments, said, capsys):
    assert said in refused(capsys, data, tmp_path / "out", 9, *arguments)


def test_a_checkpoint_of_another_training_is_refused(data, tmp_path, capsys):
    out, file = tmp_path / "out", tmp_path / "out" / "training.pt"
    run(data, out, 2)
    assert "with another model" in refused(capsys, data, out, 3, "--layers", "3")
    assert "with another model" in refused(capsys, data, out, 3, "--heads", "4")
    assert "with another data" in refused(capsys, data[:1], out, 3)
    run(data, tmp_path / "second", 1, "--vocab", "333")
    other = "--tokenizer", str(tmp_path / "second" / "tokenizer.json")
    assert "with another tokenizer" in refused(capsys, data, out, 3, *other)
    for damaged in b"PK", [], {"model": {}}, {"model": [1]}:
        file.write_bytes(damaged) if isinstance(damaged, bytes) else torch.save(damaged, file)
        assert "training.pt is damaged" in refused(capsys, data, out, 3)


def test_an_output_that_cannot_be_is_refused_first(data, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert "--out" in refused(capsys, data, tmp_path / "file" / "out", 2)
    (tmp_path / "training.pt").mkdir()
    assert "cannot be written" in refused(capsys, data, tmp_path, 2)
    assert not (tmp_path / "tokenizer.json").exists()


@pytest.mark.parametrize("context", ["2", "9"])
def test_rows_may_be_short(data, tmp_path, context):
    """Shorter than what a card's sample begins with; and no document need be held out."""
    (tmp_path / "one.txt").write_text("wholly learnt from")
    run([str(tmp_path / "one.txt")], tmp_path / "out", 2, "--context", context)
    assert "A greedy sample" in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(UserError, match="holds no text"):
        (tmp_path / "one.txt").write_text("\n")
        pretrain.read_corpus([tmp_path / "one.txt"])
