"""`minispec.distill`: generating text, the losses of drafts and heads, and resuming runs."""

import itertools
import json
import os
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import compare_heads
import psutil
import pytest
import torch
from conftest import (
    ALTERNATING,
    TOKENIZER,
    byte_model,
    byte_tokenizer,
    file_limit,
    last_error_line,
    random_documents,
    random_model,
    random_tokens,
)
from safetensors.torch import load_file
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from minispec import UserError, distill, load
from minispec.certify.toys import random_mtp_head, randomise
from minispec.checkpoints.eagle3 import load_eagle3
from minispec.checkpoints.heads import (
    load_medusa,
    load_mtp,
    load_vocabulary,
    save_measured,
    save_medusa,
    save_vocabulary,
)
from minispec.checkpoints.load import save
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.distill import draft, medusa
from minispec.distill.__main__ import COMMANDS
from minispec.distill.__main__ import main as distill_main
from minispec.distill.documents import Documents, shuffled_batches
from minispec.distill.generated import held_out_indices, prompt_digest, read_generated, read_split
from minispec.generate import __main__ as generate
from minispec.generate.drafters import load_drafter
from minispec.methods.medusa import RANKS, new_heads, with_prefixes
from minispec.methods.vocabulary import Language, Subset
from minispec.training.loop import CHECKPOINT, lock


@pytest.fixture
def target(tmp_path):
    save(byte_model().float(), TOKENIZER, tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def data(tmp_path):
    """Stories, dialogues and questions."""
    rng, folder = random.Random(0), tmp_path / "data"
    folder.mkdir()
    (folder / "tales.txt").write_text(random_documents(120))
    talk = "User: hi\nAssistant: hello\nUser: a\nb\nAssistant: bye\n<|endoftext|>\n"
    (folder / "talk.txt").write_text(talk * 60)
    rows = [{"prompt": "".join(rng.choices("abc", k=5))} for _ in range(60)]
    (folder / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(*arguments) -> None:
    distill_main([str(a) for a in arguments])


def rejected(capsys, *arguments) -> str:
    return last_error_line(capsys, lambda: run(*arguments))


def generate_args(target, data, out, *more) -> list:
    return ["generate", "--model", target, "--data", data, "--tokens", 20, "--batch", 8,
            "--out", out, "--device", "cpu", *more]  # fmt: skip


def generated(target, data, out, documents: int, *more) -> list[dict]:
    """Run `generate` and return the documents it wrote."""
    run(*generate_args(target, data, out, "--documents", documents, *more))
    return read_generated(out)[1]


# ---- generated text ------------------------------------------------------------------------------


def test_near_duplicates_are_found():
    duplicates, text = distill.Duplicates(), list(range(40))
    assert not duplicates.add(text)
    assert duplicates.add(text) and duplicates.add(text[:30] + [99] * 3)
    assert not duplicates.add(text[:12] + list(range(100, 130)))
    assert not duplicates.add([1, 2]) and not duplicates.add([1, 2])  # too short to have 8-grams


def test_generation_resumes_exactly(target, data, tmp_path, capsys):
    """After a whole pool of prompts, of four batches of 8."""
    parts, single, all_kept = tmp_path / "parts.jsonl", tmp_path / "all.jsonl", "--keep-duplicates"
    generated(target, data, single, 60, all_kept)
    generated(target, data, parts, 32, all_kept)
    with parts.open("a") as file:
        file.write('{"kind": "tales", "pro')  # killed while writing
    parts.write_text("\ufeff" + parts.read_text())  # edited since
    generated(target, data, parts, 60, all_kept)
    assert single.read_text() == parts.read_text().removeprefix("\ufeff")


def test_without_a_batch_its_cache_takes_half_of_the_free_memory(
    target, data, tmp_path, monkeypatch
):
    """An unfinished file goes on with the batch that it was started with."""
    model, _ = load(target, "float32", "cpu")
    row = 2 * model.new_cache(min(model.config.context, 1024)).kv.nbytes
    args = generate_args(target, data, out := tmp_path / "out.jsonl")
    at = args.index("--batch")
    del args[at : at + 2]
    for documents, rows, batch in (5, 7, 4), (6, 999, 4), (5, 0.5, 1), (5, 999, 256):
        if documents == 5:
            out.unlink(missing_ok=True)
        memory = SimpleNamespace(available=int(rows * row))
        monkeypatch.setattr(psutil, "virtual_memory", lambda memory=memory: memory)
        run(*args, "--documents", documents)
        assert read_generated(out)[0]["options"]["batch"] == batch


def test_generation_resumes_only_what_it_started(target, data, tmp_path, capsys):
    parts = tmp_path / "parts.jsonl"
    generated(target, data, parts, 20)
    rows = generated(target, data, parts, 60)
    assert len(rows) == 60 and all(0 < len(row["tokens"]) <= 20 for row in rows)
    assert {row["kind"] for row in rows} == {"tales", "talk", "asked"}
    other = tmp_path / "other"
    shutil.copytree(target, other)
    model, tokenizer = load(target, "float32", "cpu")
    model.model.norm.weight *= 2
    save(model, tokenizer, other)
    for changed, flag in (
        (("--top-k", 3), "--top-k"),
        (("--keep-duplicates",), "--keep-duplicates"),
        (("--data", data / "tales.txt"), "--data"),
        (("--model", other), "--model"),
    ):
        error = f"was started with another {flag}: use the same one"
        assert error in rejected(capsys, *generate_args(target, data, parts, *changed))
    parts.write_text('{"kind": "x", "prompt": [1], "tokens": [2]}\n')
    assert "was started with another" in rejected(capsys, *generate_args(target, data, parts))
    parts.write_text("another file, without a final newline")
    assert "is not from minispec.distill" in rejected(capsys, *generate_args(target, data, parts))
    assert parts.read_text() == "another file, without a final newline"
    with parts.open("a") as file:
        lock(file, parts)
        error = rejected(capsys, *generate_args(target, data, parts))
    assert "another process is writing to it" in error


@pytest.mark.parametrize("limit", [50, 1000])
def test_a_full_disk_is_reported_with_the_name_of_the_file(target, data, tmp_path, capsys, limit):
    with file_limit(limit):
        error = rejected(capsys, *generate_args(target, data, tmp_path / "full.jsonl"))
    assert re.search(r"/full\.jsonl cannot be written: .*File too large$", error)


@pytest.mark.parametrize("flags, counts", [([], [3, 5, 16, 17]), (["--chat", "a"], [3, 5, 16])])
def test_no_more_documents_than_are_missing_are_sampled(tmp_path, monkeypatch, flags, counts):
    """Some user turns are not finished."""
    save(byte_model(eos=tuple(range(90, 150))).float(), TOKENIZER, tmp_path / "model")
    talk = [{"prompt": text, "completion": text * 9} for text in ("ab", "cd", "ef", "gh", "ij")]
    data = [] if "--chat" in flags else ["--data", write_rows(tmp_path / "talk.jsonl", talk * 20)]
    sampled, sample = [], distill.generate.sample_batch
    monkeypatch.setattr(distill.generate, "sample_batch", lambda model, prompts, *more:
                        sampled.append(len(prompts)) or sample(model, prompts, *more))  # fmt: skip

    def run_until(documents: int, out: Path) -> int:
        sampled.clear()
        run("generate", "--model", tmp_path / "model", "--out", out, "--batch", 8, "--tokens", 12,
            "--top-k", 0, "--documents", documents, "--device", "cpu", *data, *flags)  # fmt: skip
        assert len(read_generated(out)[1]) == documents
        return max(sampled, default=0)

    for before, documents in zip([0, *counts], counts):
        assert run_until(documents, tmp_path / "parts") <= documents - before


def test_near_duplicates_are_kept_on_request(target, data, tmp_path, capsys):
    """A greedy target always continues the same prompt in the same way."""
    greedy = "--temperature", 0, "--top-k", 0, "--top-p", 1
    data, out = data / "talk.txt", tmp_path / "few.jsonl"
    every = generated(target, data, tmp_path / "all.jsonl", 64, "--keep-duplicates", *greedy)
    assert len(every) == 64
    error = rejected(capsys, *generate_args(target, data, out, "--documents", 64, *greedy))
    assert "generated only 2 distinct documents" in error and len(read_generated(out)[1]) == 2


def test_prompts_are_first_tokens_or_conversations_up_to_an_answer(target, data, tmp_path):
    prompts: dict[str, set[str]] = {}
    for row in generated(target, data, tmp_path / "own.jsonl", 150):
        text = TOKENIZER.backend.decode(row["prompt"], skip_special_tokens=False)
        prompts.setdefault(row["kind"], set()).add(text.removeprefix("<|endoftext|>"))
    first = "<|user|>hi<|end|><|assistant|>"
    assert prompts["talk"] == {first, first + "hello<|end|><|user|>a\nb<|end|><|assistant|>"}
    questions = {json.loads(line)["prompt"] for line in (data / "asked.jsonl").open()}
    assert {text[8:-20] for text in prompts["asked"]} <= questions
    corpus = random_documents(120)
    assert all(3 <= len(text) < 24 and text in corpus for text in prompts["tales"])


def test_ask_makes_a_request_about_a_text(target, data, tmp_path):
    ask = "--ask", "Go on: {:.9}!"
    rows = generated(target, data / "tales.txt", tmp_path / "own.jsonl", 20, *ask)
    corpus = random_documents(120)
    for row in rows:
        text = TOKENIZER.backend.decode(row["prompt"], skip_special_tokens=False)
        match = re.fullmatch(r"<.endoftext.><.user.>Go on: (.{9})!<.end.><.assistant.>", text)
        assert match[1] in corpus


def test_chat_lets_the_target_write_the_user_turns(target, tmp_path, capsys):
    out, beginnings = tmp_path / "own.jsonl", ["Why", "How long"]
    generate_args = ["generate", "--model", target, "--out", out, "--tokens", 20, "--device", "cpu"]
    assert "generated only 0 distinct documents" in rejected(capsys, *generate_args, "--chat")
    save(byte_model(eos=(258, 7, 8, 9)).float(), TOKENIZER, target)
    run(*generate_args, "--documents", 30, "--chat", *beginnings)
    questions = set()
    for row in read_generated(out)[1]:
        text = TOKENIZER.backend.decode(row["prompt"], skip_special_tokens=False)
        question = re.fullmatch("<.endoftext.><.user.>(.*)<.end.><.assistant.>", text, re.S)[1]
        assert row["kind"] == "chat" and question.startswith(tuple(beginnings))
        questions.add(question)
    assert len(questions) > 20
    run(*generate_args, "--documents", 40, "--chat", *beginnings)  # resumes
    assert "was started with another --chat" in rejected(capsys, *generate_args, "--chat")
    assert "--data --chat is required" in rejected(capsys, *generate_args)
    assert "not allowed with" in rejected(capsys, *generate_args, "--chat", "--data", out)
    for wrong in "{this}", "{.that}", "{0[a]}", "{[3]}", "{":
        error = rejected(capsys, *generate_args, "--data", target, "--ask", wrong)
        assert "write {} in place of the text" in error
    error = rejected(capsys, *generate_args, "--chat", "--ask", "{}")
    assert "--ask needs the documents of --data" in error
    save(byte_model(), byte_tokenizer(chat_template=None), tmp_path / "bare")
    generate_args += "--model", tmp_path / "bare", "--out", tmp_path / "other.jsonl", "--chat"
    error = rejected(capsys, *generate_args)
    assert "has no chat template, so it cannot play the user" in error


def test_rejected_conversations_are_left_out_when_resumed_too(tmp_path, capsys):
    """The template rejects 2 of the 8 conversations."""
    save(byte_model().float(), byte_tokenizer(ALTERNATING), tmp_path / "strict")
    names = "talk.jsonl", "single.jsonl", "parts.jsonl"
    file, single, parts = (tmp_path / name for name in names)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    bad = [{"role": "assistant", "content": "c"}, *talk]
    write_rows(file, [{"messages": bad if i % 4 == 1 else talk} for i in range(8)])
    reason = "the model's chat template rejects this conversation: roles must alternate"
    more = "--keep-duplicates", "--tokens", 4, "--batch", 1
    generated(tmp_path / "strict", file, single, 40, *more)
    error = capsys.readouterr().err.splitlines()[-1]
    first = f"minispec: documents skipped: 2; the first is {file} line [26]: "
    assert re.fullmatch(first + reason, error)
    for n in 4, 40:
        rows = generated(tmp_path / "strict", file, parts, n, *more)
    assert single.read_text() == parts.read_text()
    assert {TOKENIZER.decode(row["prompt"]) for row in rows} == {"a"}
    single.unlink()
    write_rows(file, [{"messages": bad}] * 5)
    error = rejected(capsys, *generate_args(tmp_path / "strict", file, single, "--batch", 1))
    assert re.search(f"documents skipped: .; the first is {file} line .: {reason}", error)


def test_an_end_token_missing_from_the_config_is_reported(target, data, tmp_path, capsys):
    """The fixture's model lists no end token."""
    warning = "the model's config does not list <|endoftext|>, the tokenizer's end token"
    generated(target, data, tmp_path / "own.jsonl", 5)
    assert capsys.readouterr().err.count(warning) == 1
    chat = generate_args(target, data, tmp_path / "chat.jsonl", "--chat")
    chat.remove("--data"), chat.remove(data)
    error = rejected(capsys, *chat)
    assert "generated only 0 distinct documents: no user turn was finished" in error
    assert warning in error and "add 256 to eos_token_id" in error and "--temperature" not in error
    save(byte_model(eos=(256,)).float(), TOKENIZER, target)
    generated(target, data, tmp_path / "listed.jsonl", 5)
    assert warning not in capsys.readouterr().err


def test_generation_works_with_any_tokenizer(data, tmp_path):
    """This one has no begin token, no end tokens and no chat template."""
    backend = Backend(models.WordLevel({"the": 0, "cat": 1, "sat": 2, "?": 3}, "?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    save(random_model(vocab_size=6).float(), Tokenizer(backend), tmp_path / "plain")
    rows = generated(tmp_path / "plain", data, tmp_path / "own.jsonl", 60)
    assert len(rows) >= 60 and all(max(row["prompt"]) < 4 for row in rows)
    assert all(len(row["tokens"]) == 20 for row in rows)
    run("mtp", "--model", tmp_path / "plain", "--generated", tmp_path / "own.jsonl", "--steps", 2,
        "--out", tmp_path / "mtp", "--rows", 1, "--device", "cpu")  # fmt: skip
    load_mtp(tmp_path / "mtp", *load(tmp_path / "plain", "float32", "cpu"))


@pytest.mark.parametrize(
    "rows, message",
    [
        (["{"], "is not a file from minispec.distill generate"),
        (['{"a": 1}'], "is not a file"),
        (['{"options": [], "tokenizer": "x"}'], "it needs lines of"),
        (['{"options": {}, "tokenizer": [1]}'], "another tokenizer"),
        (['{"options": {}, "tokenizer": "x"}'], "another tokenizer"),
        (['{"kind": "a", "prompt": [1], "tokens": [-1]}'], "it needs lines of"),
        (['{"kind": "a", "prompt": [1], "tokens": [true]}'], "it needs lines of"),
        (['{"kind": "a", "prompt": [1], "tokens": ["b"]}'], "it needs lines of"),
        (['{"kind": "a", "prompt": [1], "tokens": [2.0]}'], "it needs lines of"),
        (['{"kind": "a", "prompt": [9223372036854775808], "tokens": [1]}'], "it needs lines of"),
        (['{"kind": ["a"], "prompt": [1], "tokens": [1]}'], "it needs lines of"),
        (['{"kind": "a", "prompt": "abc", "tokens": [1]}'], "it needs lines of"),
        (['{"kind": "a", "prompt": [1], "tokens": []}'], "it needs lines of"),
        (['{"kind": "a", "prompt": [1], "tokens": [1000]}'] * 2, "generated by another model"),
        (['{"kind": "a", "prompt": [1], "tokens": [2]}'], "found 1 documents; at least 2"),
        ([], "found 0 documents; at least 2"),
        (["[" * 100_000], "is not a file"),
    ],
)
def test_invalid_files_of_generated_text_are_rejected(tmp_path, rows, message):
    (tmp_path / "own.jsonl").write_text("".join(row + "\n" for row in rows))
    with pytest.raises(UserError, match=message):
        read_split([tmp_path / "own.jsonl"], byte_model(), TOKENIZER)


@pytest.mark.parametrize("name", ["", "generate", "draft", "medusa", "mtp", "tree", "vocabulary"])
def test_help_needs_no_docstrings(monkeypatch, name, capsys):
    """`python -OO` strips docstrings."""
    for documented in (distill, *(run for run, _ in COMMANDS.values())):
        monkeypatch.setattr(documented, "__doc__", None)
    with pytest.raises(SystemExit) as caught:
        run(*([name] if name else []), "-h")
    assert caught.value.code == 0 and "usage: python -m minispec.distill" in capsys.readouterr().out


def write_rows(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def random_rows(n: int) -> list[dict]:
    rng = random.Random(0)
    texts = [[rng.randrange(99) for _ in range(45)] for _ in range(n)]
    return [{"kind": "maths", "prompt": text[:5], "tokens": text[5:]} for text in texts]


def without_file(rows: list[dict]) -> list[dict]:
    return [{name: row[name] for name in ("kind", "prompt", "tokens")} for row in rows]


def test_held_out_documents_do_not_depend_on_their_place(tmp_path):
    """The digest of the prompt decides, in files that are sorted, joined, split or extended."""
    model, rows = byte_model(), random_rows(600)
    whole = write_rows(tmp_path / "whole.jsonl", rows)
    train, held_out = read_split([whole], model, None)
    assert 4 <= len(held_out) <= 24 and len(train) + len(held_out) == 600  # 12 are expected
    assert train[0] == without_file(train)[0] | {"file": whole}
    expected = sorted(row["prompt"] for row in held_out)
    by_prompt = sorted(rows, key=lambda row: row["prompt"])
    parts = [write_rows(tmp_path / f"{i}.jsonl", by_prompt[i::3]) for i in range(3)]
    held_out = read_split(parts, model, None)[1]
    assert sorted(row["prompt"] for row in held_out) == expected
    half = read_split([write_rows(tmp_path / "half.jsonl", rows[300:])], model, None)[1]
    assert half and all(row["prompt"] in expected for row in half)


def test_at_least_one_document_is_held_out_and_one_is_not(tmp_path):
    model, file = byte_model(), tmp_path / "few.jsonl"
    for rows in random_rows(2), random_rows(5), [random_rows(1)[0]] * 3:
        train, held_out = read_split([write_rows(file, rows)], model, None)
        assert len(held_out) == 1 and len(train) == len(rows) - 1
        assert len(read_split([write_rows(file, rows[::-1])], model, None)[1]) == 1
    one_prompt = next([n] for n in range(2**20) if prompt_digest([n]) % 50 == 0)
    assert held_out_indices([one_prompt] * 4) == {0}  # all of them would be held out


def test_held_out_documents_do_not_duplicate_training_documents(tmp_path):
    model, rows = byte_model(), random_rows(300)
    first, *others = sorted(held_out_indices([row["prompt"] for row in rows]))
    rows[first]["tokens"] = rows[first - 1]["tokens"][:30] + rows[first]["tokens"][30:]
    assert first - 1 not in others
    train, held_out = read_split([write_rows(tmp_path / "a.jsonl", rows)], model, None)
    assert without_file(held_out) == [rows[i] for i in others]
    assert without_file(train) == [r for i, r in enumerate(rows) if i not in (first, *others)]
    text = {"kind": "x", "prompt": [1], "tokens": [2, 3]}
    file = write_rows(tmp_path / "b.jsonl", [text] * 3)
    copy = text | {"file": file}
    assert read_split([file], model, None) == ([copy] * 2, [copy])  # kept, as all are


def test_an_epoch_covers_every_document_once():
    batch = shuffled_batches(10, 2, 0)
    epochs = [torch.cat([batch(step) for step in range(i, i + 5)]) for i in (0, 5)]
    assert all(sorted(each.tolist()) == list(range(10)) for each in epochs)
    assert not torch.equal(*epochs) and len(shuffled_batches(3, 8, 0)(9)) == 3


def test_hidden_states_are_computed_once_when_needed():
    model, computed = byte_model().float(), []
    generated = [{"prompt": [1], "tokens": random_tokens(n, n)} for n in (5, 9, 30, 3)]
    documents = distill.Documents.from_rows(generated, model, 12, torch.float32)
    compute = documents.compute
    documents.compute = lambda rows: computed.extend(rows) or compute(rows)
    for index in [2, 0], [0, 3], [3, 2]:
        found = documents.states(torch.tensor(index), 9)
        for i, states in zip(index, found):
            text = (generated[i]["prompt"] + generated[i]["tokens"])[:12]
            alone = model(text)[0, :9]
            torch.testing.assert_close(states[: len(alone)], alone, atol=4e-3, rtol=1e-3)
            assert not states[len(alone) :].any()
    assert computed == [documents.rows[i] for i in (2, 0, 3)]


def test_hidden_states_that_do_not_fit_in_memory_are_computed_again():
    model, computed = byte_model().float(), []
    generated = [{"prompt": [1], "tokens": random_tokens(n, n)} for n in (5, 9, 3)]
    documents = distill.Documents.from_rows(generated, model, 12, torch.float32)
    compute = documents.compute
    documents.compute = lambda rows: computed.extend(rows) or compute(rows)
    before = documents.states(torch.tensor([1]), 9)
    documents.hidden = [None] * 3
    documents.free_bytes = 2 * 10 * model.config.hidden_size  # for the second document
    computed.clear()
    for _ in range(2):
        assert torch.equal(documents.states(torch.tensor([1, 0, 2]), 9)[:1], before)
    assert computed == [documents.rows[i] for i in (1, 0, 2, 0, 2)]


def test_hidden_states_do_not_depend_on_batching():
    model = random_model(dtype=torch.float32)
    rows = [random_tokens(n, n) for n in (5, 9, 3, 30, 2, 7)]
    for rows_per_pass in 1, 2, 4, 99:
        together = distill.hidden_states(model, rows, rows_per_pass)
        for row, states in zip(rows, together, strict=True):
            torch.testing.assert_close(states, model(row)[0])


# ---- losses --------------------------------------------------------------------------------------


def documents_of(model, sizes=(9, 6, 12), prompts=None, seed: int = 0):
    rows = [random_tokens(n, seed + n) for n in sizes]
    states = [model(row)[0] for row in rows]
    return rows, distill.Documents(rows, prompts or [3] * len(rows), states)


def only_trains(loss, trained, target) -> bool:
    trained.requires_grad_(True)
    loss(torch.tensor([0, 2])).backward()
    return all(p.grad is not None for p in trained.parameters()) and all(
        p.grad is None for p in target.parameters()
    )


def test_the_draft_loss_is_the_cross_entropy_of_the_distributions():
    """Only generated tokens count, in documents of different lengths; one is only a prompt."""
    target, small = (random_model(seed, dtype=torch.float32) for seed in (1, 2))
    prompts = [3, 1, 7, 2]
    rows, documents = documents_of(target, (9, 4, 7, 5), prompts)
    loss = draft.SoftLabels(small, target, documents)
    each = []
    for row, prompt in zip(rows[1:], prompts[1:]):
        p = target.logits(target(row[:-1]))[0, prompt - 1 :].softmax(-1)
        log_q = small.logits(small(row[:-1]))[0, prompt - 1 :].log_softmax(-1)
        each.append(-(p * log_q).sum(-1))
    torch.testing.assert_close(loss(torch.tensor([1, 2, 3])), torch.cat(each).mean())
    assert loss(torch.tensor([2])) == 0 and only_trains(loss, small, target)


@pytest.mark.parametrize("shared", [True, False])
def test_the_medusa_loss_follows_the_paper(shared):
    """Σ over heads of 0.8^k times the mean of -log p(token t + k + 2 | hidden state t)."""
    model = random_model(dtype=torch.float32)
    rows, documents = documents_of(model, (9, 6, 12), [2, 2, 2])
    heads = randomise(new_heads(3, 1, model, shared), 0)
    loss, by_formula = distill.HeadsLoss(heads, model, documents), 0.0
    for k in range(3):
        logs = [
            -heads(hidden[t], model)[k].log_softmax(-1)[row[t + k + 2]]
            for row, hidden in zip(rows, documents.hidden)
            for t in range(len(row) - k - 2)
        ]
        by_formula += 0.8**k * torch.stack(logs).mean()
    assert torch.allclose(loss(torch.arange(3)), by_formula, atol=1e-5)
    assert only_trains(loss, heads, model)


def test_the_mtp_loss_covers_generated_tokens_of_one_document_only():
    """With soft labels, the target's distributions at the labels. Assignment 6 tests hard labels,
    steps and weights."""
    model = random_model(dtype=torch.float32)
    head, (rows, documents) = random_mtp_head(model, 0), documents_of(model)
    loss, by_hand = distill.MTPLoss(head, model, documents, 3, 0.6, True, soft=True), 0.0
    for k, weight in enumerate(loss.weights):
        each = []
        for row, hidden in zip(rows, documents.hidden):
            steps = loss.steps(hidden[None, : len(row) - 2], torch.tensor([row + [0] * 4]))
            for i in range(max(0, 3 - k - 2), len(row) - k - 2):
                log_q = steps[k][0, i].log_softmax(-1)
                p = model.logits(hidden[i + k + 1]).softmax(-1)
                each.append(-(p * log_q).sum())
        by_hand += weight * torch.stack(each).mean()
    assert torch.allclose(loss(torch.arange(3)), by_hand, atol=1e-5)
    assert only_trains(loss, head, model)


def test_heads_can_be_trained_on_a_vocabulary_only():
    """Labels outside the vocabulary are ignored."""
    model = random_model(dtype=torch.float32)
    words = Subset(model.lm_head.weight, list(range(3, 32, 2)))
    rows, documents = documents_of(model)
    head, heads = random_mtp_head(model, 0), randomise(new_heads(3, 1, model, True), 0)

    def by_hand(weights: list[float], logits) -> torch.Tensor:
        total = 0.0
        for k, weight in enumerate(weights):
            at = [(d, i) for d, row in enumerate(rows) for i in range(len(row) - k - 2)
                  if i + k + 2 >= 3 and row[i + k + 2] in words.ids]  # fmt: skip
            each = [-logits(k, d, i)[words.ids].log_softmax(-1)[
                words.ids.tolist().index(rows[d][i + k + 2])] for d, i in at]  # fmt: skip
            total += weight * torch.stack(each).mean()
        return total

    plain = distill.MTPLoss(head, model, documents, 3, 0.6, True)
    loss = distill.MTPLoss(head, model, documents, 3, 0.6, True, vocabulary=words)
    steps = [
        plain.steps(hidden[None, : len(row) - 2], torch.tensor([row + [0] * 4]))
        for row, hidden in zip(rows, documents.hidden)
    ]
    expected = by_hand(loss.weights, lambda k, d, i: steps[d][k][0, i])
    assert torch.allclose(loss(torch.arange(3)), expected, atol=1e-5)
    loss = distill.HeadsLoss(heads, model, documents, words)
    expected = by_hand([1, 0.8, 0.64], lambda k, d, i: heads(documents.hidden[d][i], model)[k])
    assert torch.allclose(loss(torch.arange(3)), expected, atol=1e-5)


# ---- trees ---------------------------------------------------------------------------------------


def test_accuracies_have_the_right_denominators():
    accuracy = medusa.accuracy_of(torch.tensor([[0, 0, 1, RANKS], [2, -1, -1, 0]]))
    assert accuracy[0, :2].tolist() == [0.5, 0.25] and accuracy[1, [0, 2]].tolist() == [0.5, 0.5]
    assert accuracy.shape == (2, RANKS)


@pytest.mark.parametrize("seed", range(4))
def test_paths_are_sorted_by_how_often_all_their_tokens_are_right(seed):
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.randint(0, 4, (3, 200), generator=generator)
    ranks[ranks == 3] = RANKS  # not among the best
    ranks[2, -1] = ranks[1, -1] = -1  # the end of a text, without labels
    columns = [tuple(column) for column in ranks.T[:-1].tolist()]
    shares = medusa.path_frequencies(ranks)
    every = [p for n in (1, 2, 3) for p in itertools.product(range(3), repeat=n)]
    right = {p: sum(c[: len(p)] == p for c in columns) / len(columns) for p in every}
    assert shares == {p: share for p, share in right.items() if share}
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    for n in range(len(shares)):
        first = list(shares)[:n]
        assert set(with_prefixes(first, 3, 3)) == set(first), "the first n are a tree"
    assert medusa.path_frequencies(ranks[:, :0]) == {}


# ---- complete runs -------------------------------------------------------------------------------

TINY = "--layers", 1, "--width", 8, "--heads", 2, "--ffn", 8
TRAININGS = {  # flags, changed flags, the file written, the method and its flag
    "draft": (TINY, ("--layers", 2), "model", "speculative", "--draft"),
    "medusa": (("--heads", 2), ("--layers", 2), "medusa_lm_head", "medusa", "--heads"),
    "medusa --shared": (("--heads", 2), ("--heads", 3), "medusa_lm_head", "medusa", "--heads"),
    "mtp": ((), ("--beta", 0.5), "model", "fastmtp", "--heads"),
    "mtp --soft --k 1": ((), ("--mode", "parallel"), "model", "fastmtp", "--heads"),
    "eagle3 --k 3": ((), ("--beta", 0.5), "model", "eagle3", "--heads"),
    "eagle3 --soft --k 1": ((), ("--beta", 0.5), "model", "eagle3", "--heads"),
}


@pytest.mark.parametrize("command", TRAININGS)
def test_trained_weights_load_and_can_be_continued(target, data, tmp_path, capsys, command):
    own, (kind, *flags), trained = tmp_path / "own.jsonl", command.split(), tmp_path / "trained"
    sizes, other, file, method, flag = TRAININGS[command]
    generated(target, data, own, 60)
    category = read_split([own], load(target)[0], None)[1][0]["kind"]  # held out
    options = [kind, "--model", target, "--generated", own, "--device", "cpu", *flags, *sizes]
    options += ["--rows", 8, "--context", 40, "--steps"]
    run(*options, 8, "--out", trained)
    card = (trained / "README.md").read_text()
    assert "8 steps, at most 2,560 tokens, " in card
    assert f"| {category} |" in card or "| 1 |" in card
    assert str(tmp_path) not in card and len(card.splitlines()) <= 60
    run(*options, 1, "--out", tmp_path / "next", "--init", trained, "--lr", 1e-9, "--seed", 1)
    tensors = [load_file(tmp_path / name / f"{file}.safetensors") for name in ("trained", "next")]
    for name, tensor in tensors[0].items():
        assert torch.allclose(tensors[1][name].float(), tensor.float(), atol=1e-3), name
    missing = rejected(capsys, *options, 1, "--out", tmp_path / "new", "--init", tmp_path / "no")
    assert "no such directory" in missing
    assert "(different options)" in rejected(capsys, *options, 9, "--out", trained, *other)
    generate.main(["ab", "--model", str(target), "--method", method, flag, str(trained), "--device",
                   "cpu", "--json", "--max-new-tokens", "9"])  # fmt: skip
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 9
    if kind in ("mtp", "eagle3"):
        rates = json.loads((trained / "config.json").read_text())["mtp_acceptance"]
        assert len(rates) == (int(flags[-1]) if "--k" in flags else 3) and f"{rates[0]:.3f}" in card
        read = load_mtp if kind == "mtp" else load_eagle3
        head = read(tmp_path / "next", load(target, "float32", "cpu")[0])
        head.acceptance = None
        save_measured(head, tmp_path / "next")
        run("acceptance", "--model", target, "--heads", tmp_path / "next", "--generated", own,
            "--device", "cpu", "--k", len(rates))  # fmt: skip
        again = json.loads((tmp_path / "next" / "config.json").read_text())["mtp_acceptance"]
        assert again == pytest.approx(rates, abs=0.05)
    if kind == "medusa":
        run("tree", "--model", target, "--heads", trained, "--generated", own, "--device", "cpu")
        heads = load_medusa(trained, *load(target, "float32", "cpu"))
        assert f"a tree of {len(heads.tree)} nodes" in capsys.readouterr().out
        assert heads.accuracy.shape == (2, RANKS) and (heads.tree or not heads.accuracy[0].any())


@pytest.mark.parametrize("command, method", [("mtp", "fastmtp"), ("medusa --shared", "medusa")])
def test_heads_draft_from_the_vocabulary_they_were_trained_on(
    target, data, tmp_path, capsys, command, method
):
    own, words, trained = (tmp_path / name for name in ("own.jsonl", "words.json", "trained"))
    generated(target, data, own, 20)
    run("vocabulary", "--model", target, "--size", 12, "--text", f"own={own}", "--out", words)
    run(*command.split(), "--model", target, "--generated", own, "--device", "cpu",
        "--vocabulary", words, "--rows", 2, "--context", 40, "--steps", 1,
        "--out", trained)  # fmt: skip
    flags = ["ab", "--model", str(target), "--method", method, "--heads", str(trained), "--json",
             "--dtype", "float64", "--max-new-tokens", "9"]  # fmt: skip
    for more in [], ["--vocabulary-size", "5"], ["--vocabulary", "none"]:
        generate.main([*flags, *more])
    capsys.readouterr()
    model, tokenizer = load(target, "float64", "cpu")
    vocabulary = load_drafter(command.split()[0], model, tokenizer, str(trained))["vocabulary"]
    assert vocabulary.languages == load_vocabulary(words, model, tokenizer).languages
    (trained / "training.pt").unlink()
    run(*command.split(), "--model", target, "--generated", own, "--device", "cpu", "--rows", 2,
        "--context", 40, "--steps", 1, "--out", trained)  # fmt: skip
    assert not (trained / "vocabulary.json").exists()  # now trained on all tokens


def test_an_eagle3_head_starts_from_the_target_s_lm_head_and_drafts_its_vocabulary(
    target, data, tmp_path, capsys
):
    own, words, out = (tmp_path / name for name in ("own.jsonl", "words.json", "trained"))
    generated(target, data, own, 20)
    run("vocabulary", "--model", target, "--size", 12, "--text", f"own={own}", "--out", words)
    run("eagle3", "--model", target, "--generated", own, "--device", "cpu", "--rows", 2,
        "--context", 40, "--steps", 1, "--lr", 1e-9, "--vocabulary", words,
        "--out", out)  # fmt: skip
    model, tokenizer = load(target, "float32", "cpu")
    head, ids = load_eagle3(out, model, tokenizer), load_vocabulary(words, model).select([]).ids
    assert head.ids.tolist() == sorted(ids.tolist()) and not (out / "vocabulary.json").exists()
    torch.testing.assert_close(head.lm_head.weight, model.lm_head.weight[head.ids].half().float())
    assert not head.midlayer.norm_before_residual and head.config.model_type == "llama"
    error = rejected(capsys, "eagle3", "--model", target, "--generated", own, "--init", out,
                     "--vocabulary", words, "--out", tmp_path / "next")  # fmt: skip
    assert "--init: an EAGLE-3 head has its own vocabulary; omit the other one" in error


def test_heads_trained_on_shared_states_are_those_of_their_own_commands(
    target, data, tmp_path, monkeypatch
):
    monkeypatch.setattr(Documents, "from_rows", Documents.from_rows)  # restored after the test
    own = tmp_path / "own.jsonl"
    generated(target, data, own, 20)
    flags = ["--model", target, "--generated", own, "--device", "cpu", "--rows", 2, "--context", 40,
             "--steps", 2]  # fmt: skip
    for head, its_flags in compare_heads.FLAGS.items():
        run(head, *flags, *its_flags, "--out", tmp_path / "alone" / head)
    compare_heads.train_all(str(tmp_path / "together"), list(map(str, flags)))
    for file in (tmp_path / "alone").glob("*/*.safetensors"):
        together = load_file(tmp_path / "together" / file.relative_to(tmp_path / "alone"))
        for name, tensor in load_file(file).items():
            torch.testing.assert_close(tensor, together[name], rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "command",
    ["draft", "medusa", "medusa --shared --vocabulary words.json", "mtp --vocabulary words.json",
     "eagle3 --vocabulary words.json"],
)
def test_documents_without_a_label_are_skipped_and_counted(target, tmp_path, capsys, command):
    """Prompts that fill the context, texts of two tokens, tokens outside the vocabulary."""
    own, out, is_draft = tmp_path / "own.jsonl", tmp_path / "out", "draft" in command
    words = tmp_path / "words.json"
    save_vocabulary({"x": Language((65,), (1,))}, TOKENIZER, words)
    parts = command.replace("words.json", str(words)).split()
    options = [*parts, "--model", target, "--generated", own, "--device", "cpu", "--context", 8,
               "--rows", 2, "--steps", 1, "--out", out, *(TINY if is_draft else ())]  # fmt: skip
    full = {"kind": "x", "prompt": list(range(97, 109)), "tokens": [65, 65]}
    short, other = ({"kind": "x", "prompt": [97], "tokens": t} for t in ([65], [97] * 4))
    good = {"kind": "x", "prompt": [97], "tokens": [65, 65, 65, 65]}
    # of so few documents, the one with the smallest digest is held out: `good`, or one of `first`
    assert prompt_digest(good["prompt"]) < prompt_digest(full["prompt"])
    prompts = ([token] * 12 for token in range(256))
    first = next(p for p in prompts if prompt_digest(p) < prompt_digest(good["prompt"]))

    def write(*rows: dict) -> None:
        own.write_text("".join(json.dumps(row) + "\n" for row in rows))

    useless = [full] * 3 + [short] * 2 + [other] * ("words" in command)
    write(good, *useless)
    error = rejected(capsys, *options)
    assert "nothing to train on: the prompt fills the context of 8 tokens" in error
    assert not (out / CHECKPOINT).exists()
    write(full | {"prompt": first}, *[good] * 3)
    assert "nothing to measure on: the prompt fills" in rejected(capsys, *options)
    write(good, *[{**good, "tokens": [65, 65, 65, i]} for i in range(3)], *useless)
    run(*options)
    error = capsys.readouterr().err
    n = len(useless)
    assert f"skipped {n} of {n + 3} documents, which have nothing to train on" in error


def test_no_tree_is_chosen_from_documents_without_labels(target, tmp_path, capsys):
    model = byte_model().float()
    save_medusa(new_heads(2, 1, model, True), tmp_path / "heads", "", TOKENIZER, model.dtype)
    before = (tmp_path / "heads" / "config.json").read_bytes()
    own = tmp_path / "own.jsonl"
    own.write_text('{"kind": "x", "prompt": [1], "tokens": [2]}\n' * 3)
    command = "tree", "--model", target, "--heads", tmp_path / "heads", "--generated", own
    error = rejected(capsys, *command)
    assert "nothing to measure on: " in error and "the text is too short" in error
    assert (tmp_path / "heads" / "config.json").read_bytes() == before


def test_two_runs_cannot_share_an_out_directory(target, tmp_path, capsys):
    own, out = tmp_path / "own.jsonl", tmp_path / "out"
    own.write_text('{"kind": "x", "prompt": [1], "tokens": [2, 3, 4]}\n' * 3)
    options = ["mtp", "--model", target, "--generated", own, "--steps", 1, "--device", "cpu",
               "--context", 8, "--out", out]  # fmt: skip
    out.mkdir()
    folder = os.open(out, os.O_RDONLY)
    try:
        lock(folder, "here")
        error = rejected(capsys, *options)
        assert f"--out {out}: another process is writing to it" in error and not list(out.iterdir())
    finally:
        os.close(folder)
    run(*options)
    run(*options)  # continues


def test_ranks_are_among_the_tokens_of_the_draft_head():
    model, ids = random_model(dtype=torch.float32), list(range(3, 32, 2))
    heads = randomise(new_heads(3, 1, model, True), 0)
    row = {"prompt": random_tokens(4), "tokens": random_tokens(30, 1)}
    text = row["prompt"] + row["tokens"]
    ranks = medusa.ranks_of(heads, Subset(model.lm_head.weight, ids), model, [row], 64)
    logits = heads(model(text)[0], model)[..., ids]  # (K, n, len(ids))
    for k, t in itertools.product(range(3), range(len(text))):
        label = text[t + k + 2] if 3 <= t + 2 and t + k + 2 < len(text) else None
        if t + 2 < 4 or label is None:
            assert ranks[k, t] == -1
        elif label not in ids:
            assert ranks[k, t] == RANKS
        else:
            above = int((logits[k, t] > logits[k, t, ids.index(label)]).sum())
            assert ranks[k, t] == min(above, RANKS)


def test_agreement_compares_argmaxes_and_distributions_after_the_prompt():
    target, small = (random_model(seed, dtype=torch.float32) for seed in (1, 2))
    row = {"kind": "x", "prompt": random_tokens(3), "tokens": random_tokens(9, 1)}
    assert draft.agreement(target, target, [row] * 2)["x"] == pytest.approx([1, 1])
    text, same, overlap = row["prompt"] + row["tokens"], [], []
    for n in range(3, 12):
        p, q = (model.logits(model(text[:n]))[0, -1].softmax(-1) for model in (target, small))
        same.append(float(p.argmax() == q.argmax()))
        overlap.append(float(torch.minimum(p, q).sum()))
    expected = [sum(same) / 9, sum(overlap) / 9]
    assert draft.agreement(small, target, [row])["x"] == pytest.approx(expected)


# ---- vocabularies and wrong input ----------------------------------------------------------------


def test_vocabulary_counts_the_tokens_of_a_corpus(target, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("abab\n<|endoftext|>\nabc")
    (tmp_path / "z.jsonl").write_text('{"prompt": "从前"}')
    out, text = tmp_path / "v.json", [f"en={tmp_path / 'a.txt'}", f"zh={tmp_path / 'z.jsonl'}"]
    options = ["vocabulary", "--model", target, "--size", 12, "--out", out]
    run(*options, "--text", text[0], "--text", text[1])
    model, tokenizer = load(target, "float32", "cpu")
    words = load_vocabulary(out, model, tokenizer).languages
    assert set(tokenizer.control_ids.values()) <= set(words["en"].ids) & set(words["zh"].ids)
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    assert a in words["en"].ids and a not in words["zh"].ids
    generated(target, tmp_path / "a.txt", tmp_path / "own.jsonl", 1)
    tokens = [token for row in read_generated(tmp_path / "own.jsonl")[1] for token in row["tokens"]]
    (tmp_path / "own.jsonl").write_text("\ufeff" + (tmp_path / "own.jsonl").read_text())
    run(*options, "--text", f"own={tmp_path / 'own.jsonl'},{tmp_path / 'a.txt'}")
    words = load_vocabulary(out, model, tokenizer).languages["own"]
    for word in "abab", "abc":
        tokens += tokenizer.encode(word)
    assert words.counts == tuple(tokens.count(token) for token in words.ids)
    assert words.counts[-1] == min(words.counts[-5:]) > 0
    for wrong in "en=", f"{text[0]},", f"{text[0]},,{text[0][3:]}", f"en=,{text[0][3:]}":
        assert "argument --text" in rejected(capsys, *options, "--text", wrong)
    for wrong in ["en"], ["en=nowhere.txt"], ["=" + text[0][3:]], [text[0], "--text", text[0]]:
        assert rejected(capsys, *options, "--text", *wrong)


@pytest.mark.parametrize("flags", [[], ["--chat"]])
def test_answers_as_long_as_the_context_are_refused(target, data, tmp_path, capsys, flags):
    source = [] if "--chat" in flags else ["--data", data]
    for tokens in 256, 100_000:
        error = rejected(capsys, "generate", "--model", target, "--out", tmp_path / "own.jsonl",
                         "--device", "cpu", "--tokens", tokens, *source, *flags)  # fmt: skip
        assert f"--tokens {tokens} leaves no room for a prompt in the context of 256" in error
    assert not (tmp_path / "own.jsonl").exists()


@pytest.mark.parametrize("command", ["generate", "draft", "mtp", "medusa", "tree", "vocabulary"])
def test_wrong_input_is_rejected_before_any_work(target, command, tmp_path, capsys):
    """A target without a tokenizer, and an output that cannot be written."""
    (tmp_path / "file").touch()
    given = {"generate": ("--data", "x"), "vocabulary": ("--text", f"en={__file__}")}
    given = command, *given.get(command, ("--generated", "x")), "--model", target
    place = "--heads" if command == "tree" else "--out"
    assert place in rejected(capsys, *given, place, tmp_path / "file" / "out")
    (target / "tokenizer.json").unlink()
    error = rejected(capsys, *given, place, tmp_path)
    assert "has no tokenizer.json" in error or command in ("generate", "vocabulary")
