"""Training is exact: resumed or not, in one process or two; the corpus is read as documented."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT

from minispec import UserError, load, pretrain
from minispec.generate import decode

SIZES = ["--layers", "2", "--width", "16", "--heads", "2", "--ffn", "24", "--vocab", "300",
         "--context", "32", "--batch-tokens", "128", "--device", "cpu", "--lr", "0.01"]  # fmt: skip


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Small files of every form; the standard library's place taken by one module."""
    folder = tmp_path / "data"
    (folder / "library" / "tests").mkdir(parents=True)
    rng = np.random.default_rng(0)
    words = "the cat sat on a mat and saw one red bird fly over it".split()
    stories = [" ".join(rng.choice(words, 30)) for _ in range(120)]
    (folder / "stories_en.txt").write_text("\n<|endoftext|>\n".join(stories))
    dialogue = "User: hi there\nAssistant: hello\nUser: a\nb\nAssistant: bye\n<|endoftext|>\n"
    (folder / "dialogue_en.txt").write_text(dialogue * 60)
    row = {"question": "What is 2+2?", "answer": "2+2 = <<2+2=4>>4\n#### 4"}
    (folder / "gsm8k_train.jsonl").write_text((json.dumps(row) + "\n") * 60)
    (folder / "library" / "a.py").write_text("import os\n\n\ndef f():\n    return 1\n" * 200)
    (folder / "library" / "tests" / "b.py").write_text("assert True\n")
    monkeypatch.setitem(pretrain.KINDS, "code", ([str(folder / "library")], 0.2))
    return folder


def run(data, out, steps: int, *more: str) -> dict[str, torch.Tensor]:
    pretrain.main(["--data", str(data), "--out", str(out), "--steps", str(steps), *SIZES, *more])
    return torch.load(out / "training.pt", weights_only=True)["model"]


def test_the_corpus_is_read_as_documented(data):
    train, held_out = pretrain.read_corpus(data)
    assert set(train) == {"stories_en", "dialogue_en", "maths", "code"}
    assert train["dialogue_en"][0] == (
        "<|user|>hi there<|end|><|assistant|>hello<|end|><|user|>a\nb<|end|><|assistant|>bye<|end|>"
    )
    assert train["maths"][0] == "Question: What is 2+2?\nAnswer: 2+2 = 4\n#### 4"
    assert len(train["stories_en"]) == 117 and len(held_out["stories_en"]) == 3
    assert not set(train["stories_en"]) & set(held_out["stories_en"])
    assert not any("assert True" in d for d in train["code"] + held_out["code"])
    assert all(len(d) < 5000 for d in train["code"])


def test_a_stream_shows_every_document_once_an_epoch_in_fresh_order():
    documents = [[i] * (i + 1) for i in range(6)]
    stream = pretrain.Stream(documents, seed=1)
    epochs = [stream.take(stream.size) for _ in range(3)]
    assert all(sorted(e) == sorted(sum(documents, [])) for e in epochs)
    assert not np.array_equal(epochs[0], epochs[1])
    resumed = pretrain.Stream(documents, seed=1)
    resumed.position = stream.size + 4
    assert np.array_equal(resumed.take(30), np.concatenate(epochs[1:])[4:34])


def test_warm_up_text_is_seen_early_only():
    documents = {"stories_en": [[1]], "maths": [[2]], "stories_distilled": [[3]]}
    batches = pretrain.Batches(documents, seed=0)
    assert batches.shares(0.1)[2] == 0.5 and batches.shares(0.31)[2] == 0.0
    assert abs(batches.shares(0.1).sum() - 1) < 1e-12 and abs(batches.shares(0.9).sum() - 1) < 1e-12


def test_resumed_training_equals_uninterrupted_training(data, tmp_path):
    whole = run(data, tmp_path / "whole", 12)
    # what a kill after step 5 leaves: its checkpoint
    trained = pretrain.Trainer.save
    stop = RuntimeError("killed")

    def killed(self, path):
        trained(self, path)
        if self.step == 5:
            raise stop

    pretrain.Trainer.save = killed
    try:
        with pytest.raises(RuntimeError, match="killed"):
            run(data, tmp_path / "killed", 12, "--save-every", "5")
    finally:
        pretrain.Trainer.save = trained
    resumed = run(data, tmp_path / "killed", 12, "--save-every", "5")
    for name in whole:
        assert torch.equal(whole[name], resumed[name]), name


def test_training_learns_and_what_it_writes_loads(data, tmp_path):
    out = tmp_path / "out"
    run(data, out, 60)
    card = (out / "README.md").read_text()
    assert "60 steps, 7,680 tokens" in card and "held-out bits per byte" in card
    untrained = run(data, tmp_path / "untrained", 1)
    model, tokenizer = load(out, "float32", "cpu")
    assert model.config.eos_ids == (0, 3) and model.config.bos_id == 0
    held_out = pretrain.read_corpus(data)[1]["stories_en"]
    rows = pretrain.clip_held_out(tokenizer.backend, held_out, 32)
    after = pretrain.bits_per_byte(model, *rows)
    trained = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(untrained)
    assert after < 0.7 * pretrain.bits_per_byte(model, *rows)
    model.load_state_dict(trained)
    run_ = decode(model, tokenizer, tokenizer.chat([{"role": "user", "content": "hi"}]),
                  max_new_tokens=5)  # fmt: skip
    assert len(run_.tokens) >= 1


def test_bits_per_byte_is_the_plain_sum_over_documents(data, tmp_path):
    run(data, tmp_path / "out", 2)
    model, tokenizer = load(tmp_path / "out", "float64", "cpu")
    texts = ["the cat sat", "a bird", "on the mat and over it, é"]
    rows, sizes = pretrain.clip_held_out(tokenizer.backend, texts, 32)
    bits = 0.0
    for row in rows:
        log_p = model.logits(model(row[:-1]))[0].log_softmax(-1)
        bits -= sum(log_p[i, token].item() for i, token in enumerate(row[1:])) / np.log(2)
    assert sizes == [len(t.encode()) for t in texts] and rows[0][-1] == rows[0][0] == 0
    assert abs(pretrain.bits_per_byte(model, rows, sizes) - bits / sum(sizes)) < 1e-5


def in_two_processes(data, out, *more: str) -> list[tuple[int, str]]:
    """Exit code and error output of each."""
    script = out.parent / "both.py"
    script.write_text(
        "import sys\nfrom minispec import pretrain\n"
        f"pretrain.KINDS['code'] = ([{str(data / 'library')!r}], 0.2)\n"
        "pretrain.main(sys.argv[1:])\n"
    )
    arguments = ["--data", str(data), "--out", str(out), "--steps", "6", *SIZES, *more]
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    both = {  # as torchrun starts them, but for its own start
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments], stderr=subprocess.PIPE, text=True,
            env=os.environ | both | {"RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in "01"
    ]  # fmt: skip
    errors = [process.communicate()[1] for process in ranks]
    return [(process.returncode, error) for process, error in zip(ranks, errors)]


def test_two_processes_train_the_same_model_as_one(data, tmp_path):
    alone = run(data, tmp_path / "alone", 6)
    for code, errors in in_two_processes(data, tmp_path / "both"):
        assert code == 0, errors
    both = torch.load(tmp_path / "both" / "training.pt", weights_only=True)["model"]
    for name in alone:
        torch.testing.assert_close(both[name], alone[name], rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    "arguments, match",
    [
        (["--layers", "0"], "--layers 0: must be at least 1"),
        (["--heads", "3"], "must be an even multiple"),
        (["--batch-tokens", "8"], "must hold a row"),
        (["--tokenizer", "nowhere.json"], "no such tokenizer"),
        (["--device", "abacus"], "device abacus is not available"),
        (["--context", "1"], "--context 1: must be at least 2"),
        (["--seed", "-1"], "--seed -1: must be at least 0"),
        (["--seed", "9" * 30], "must fit in 64 bits"),
        (["--vocab", "259"], "--vocab 259: must be at least 260"),
        (["--lr", "nan"], "--lr nan: must be a positive number"),
    ],
)
def test_wrong_input_is_refused(data, tmp_path, arguments, match, capsys):
    with pytest.raises(SystemExit) as caught:
        run(data, tmp_path / "out", 2, *arguments)
    assert caught.value.code == 2 and match in capsys.readouterr().err


def test_wrong_input_is_refused_in_every_process(data, tmp_path):
    for code, errors in in_two_processes(data, tmp_path / "out", "--tokenizer", "nowhere.json"):
        assert code == 2 and "no such tokenizer" in errors and "Traceback" not in errors, errors


def test_the_tokenizer_in_a_folder_is_that_of_the_model_beside_it(
    data, tmp_path, capsys, monkeypatch
):
    run(data, tmp_path / "out", 1)
    (tmp_path / "out" / "training.pt").unlink()
    before = (tmp_path / "out" / "tokenizer.json").read_text()
    run(data, tmp_path / "other", 1, "--vocab", "333")
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    for *arguments, said in (
        ("--init", str(tmp_path / "other"), "--layers", "1", "has 2 layers, more than"),
        ("--tokenizer", str(bad), f"{bad} is not a tokenizer"),
    ):
        with pytest.raises(SystemExit):
            run(data, tmp_path / "out", 1, *arguments)
        assert said in capsys.readouterr().err
        assert (tmp_path / "out" / "tokenizer.json").read_text() == before
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(pretrain, "finish", interrupted)
        run(data, tmp_path / "out", 1, "--init", str(tmp_path / "other"))
    assert (tmp_path / "out" / "tokenizer.json").read_text() == before
    run(data, tmp_path / "out", 2)  # goes on with the other's, and only now writes a model
    theirs = (tmp_path / "other" / "tokenizer.json").read_text()
    assert (tmp_path / "out" / "tokenizer.json").read_text() == theirs
    (tmp_path / "out" / "training.pt").unlink()
    run(data, tmp_path / "out", 1)  # begun anew
    assert (tmp_path / "out" / "tokenizer.json").read_text() == before


def interrupted(*arguments):
    raise KeyboardInterrupt


def test_a_checkpoint_of_another_training_is_refused(data, tmp_path, capsys):
    run(data, tmp_path / "out", 2)
    (data / "stories_zh.txt").write_text("a b c\n<|endoftext|>\n" * 9)
    with pytest.raises(SystemExit):
        run(data, tmp_path / "out", 3)
    (data / "stories_zh.txt").unlink()
    with pytest.raises(SystemExit):
        run(data, tmp_path / "out", 3, "--layers", "3")
    with pytest.raises(SystemExit):
        run(data, tmp_path / "out", 3, "--heads", "4")  # of equal shapes
    assert capsys.readouterr().err.count("of another training") == 3
    for damaged in b"PK", [], {"model": [1]}, {"model": {"a": 1}}, {"model": {}}:
        file = tmp_path / "out" / "training.pt"
        file.write_bytes(damaged) if isinstance(damaged, bytes) else torch.save(damaged, file)
        with pytest.raises(SystemExit):
            run(data, tmp_path / "out", 3)
        assert "training.pt is damaged" in capsys.readouterr().err
    with pytest.raises(UserError, match="holds none of the files"):
        pretrain.read_corpus(tmp_path)
    with pytest.raises(UserError, match="no such directory"):
        pretrain.read_corpus(tmp_path / "nowhere")


def test_compiling_without_a_compiler_is_refused_first(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(SystemExit):
        run(data, tmp_path / "out", 2, "--compile")
    assert "needs a C++ compiler" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("context", ["2", "9"])
def test_rows_may_be_short(data, tmp_path, context):
    """Shorter than what a card's samples begin with."""
    (data / "stories_zh.txt").write_text("wholly held out")
    run(data, tmp_path, 2, "--context", context)
    assert "## Greedy samples" in (tmp_path / "README.md").read_text()


def test_a_loss_that_is_no_number_ends_the_training_unsaved(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pretrain, "one_step", lambda *_: float("nan"))
    with pytest.raises(SystemExit):
        run(data, tmp_path, 2)
    assert "lower --lr" in capsys.readouterr().err and not (tmp_path / "training.pt").exists()


def test_a_folder_that_cannot_be_written_is_refused_first(data, tmp_path, capsys):
    (tmp_path / "training.tmp").mkdir()
    with pytest.raises(SystemExit):
        run(data, tmp_path, 2)
    assert "cannot be written" in capsys.readouterr().err
    assert not (tmp_path / "tokenizer.json").exists()


def test_a_folder_that_cannot_be_made_is_one_line(data, tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as caught:
        run(data, tmp_path / "file" / "out", 2)
    error = capsys.readouterr().err
    assert caught.value.code == 2 and "--out" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("stories_en.txt", b"\xff\xfe\xff", "stories_en.txt cannot be read"),
        ("gsm8k_train.jsonl", b"\n{}\n", "line 2: must be an object with question and answer"),
        ("gsm8k_train.jsonl", b"[1]\n", "line 1: must be an object"),
        ("gsm8k_train.jsonl", b'{"question": "x"\n', "line 1: must be an object"),
        ("gsm8k_train.jsonl", b'{"question": "x", "answer": 3}\n', "line 1: must be an object"),
    ],
)
def test_a_corpus_that_is_none_is_refused(data, name, content, message):
    (data / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        pretrain.read_corpus(data)


def test_a_corpus_without_stories_is_enough(data, tmp_path):
    (data / "stories_en.txt").unlink()
    run(data, tmp_path / "out", 2)
    assert "held-out bits per byte" in (tmp_path / "out" / "README.md").read_text()
