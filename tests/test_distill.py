"""Text and training: what a target is sampled, what drafts and heads learn from it, and when a run
goes on."""

import itertools
import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import (
    ALTERNATING,
    TOKENIZER,
    byte_model,
    byte_tokenizer,
    last_line_of_refusal,
    random_model,
    random_tokens,
    tales,
)
from safetensors.torch import load_file
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from minispec import Sampling, UserError, load
from minispec.checkpoints.heads import (
    load_medusa,
    load_mtp,
    load_vocabulary,
    save_medusa,
    save_vocabulary,
)
from minispec.checkpoints.load import save
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.generate import __main__ as generate
from minispec.generate import decode
from minispec.generate.drafters import load_drafter
from minispec.methods.medusa import RANKS, complete, untrained
from minispec.methods.vocabulary import Language, Subset
from minispec.toys import random_head, randomise
from minispec.training import distill
from minispec.training.distill import draft, tree
from minispec.training.distill.documents import kept_states, shuffled, weights_digest
from minispec.training.loop import CHECKPOINT, lock
from minispec.training.own_text import read_own, read_training

MODULES = "generate", "draft", "medusa", "mtp", "tree", "vocabulary", "export"


@pytest.fixture
def target(tmp_path):
    save(byte_model().float(), TOKENIZER, tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def data(tmp_path):
    """Tales, dialogues and questions."""
    rng, folder = random.Random(0), tmp_path / "data"
    folder.mkdir()
    (folder / "tales.txt").write_text(tales(120))
    talk = "User: hi\nAssistant: hello\nUser: a\nb\nAssistant: bye\n<|endoftext|>\n"
    (folder / "talk.txt").write_text(talk * 60)
    rows = [{"prompt": "".join(rng.choices("abc", k=5))} for _ in range(60)]
    (folder / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(*arguments) -> None:
    distill.main([str(a) for a in arguments])


def refused(capsys, *arguments) -> str:
    return last_line_of_refusal(capsys, lambda: run(*arguments))


def asking(target, data, out, *more) -> list:
    return ["generate", "--model", target, "--data", data, "--tokens", 20, "--batch", 8,
            "--out", out, "--device", "cpu", *more]  # fmt: skip


def made(target, data, out, documents: int, *more) -> list[dict]:
    """What `generate` writes."""
    run(*asking(target, data, out, "--documents", documents, *more))
    return read_own(out)[1]


# ---- the target's own text -----------------------------------------------------------------------


def test_a_batch_says_what_each_prompt_says_alone():
    model = random_model(eos_ids=tuple(range(9)))
    prompts = [[1], [2, 3, 4], [5, 6, 7, 8, 9, 10, 11], *([i] for i in range(12, 30))]
    together = distill.sample_batch(model, prompts, 20, Sampling(), torch.Generator())
    for prompt, tokens in zip(prompts, together):
        assert tokens == decode(model, None, prompt, max_new_tokens=20).tokens
    lengths = sorted(map(len, together))
    assert 2 * lengths[len(lengths) // 2] < lengths[-1]  # some went on when most had ended


def test_sampled_batches_follow_the_distribution_and_their_seed():
    model = random_model(vocab_size=4, dtype=torch.float32)
    p = model.logits(model([1, 2]))[0, -1].softmax(-1)
    prompts, draws = [[1, 2]] * 4000, []
    for seed in (1, 1, 2):
        generator = torch.Generator().manual_seed(seed)
        draws.append(distill.sample_batch(model, prompts, 1, Sampling(1.0), generator))
    assert draws[0] == draws[1] != draws[2]
    counts = torch.bincount(torch.tensor(draws[0])[:, 0], minlength=4) / 4000
    assert (counts - p).abs().max() < 4 * (0.25 / 4000) ** 0.5


def test_near_duplicates_are_found():
    duplicates, text = distill.Duplicates(), list(range(40))
    assert not duplicates.add(text)
    assert duplicates.add(text) and duplicates.add(text[:30] + [99] * 3)
    assert not duplicates.add(text[:12] + list(range(100, 130)))
    assert not duplicates.add([1, 2]) and not duplicates.add([1, 2])  # too short to tell


def test_generation_goes_on_as_if_it_had_not_stopped(target, data, tmp_path, capsys):
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    rows = made(target, data, whole, 60)
    made(target, data, parts, 20)
    with parts.open("a") as file:
        file.write('{"kind": "tales", "pro')  # killed while writing
    made(target, data, parts, 60)
    assert whole.read_text() == parts.read_text()
    assert len(rows) >= 60 and all(0 < len(row["tokens"]) <= 20 for row in rows)
    assert {row["kind"] for row in rows} == {"tales", "talk", "asked"}
    other = tmp_path / "other"
    shutil.copytree(target, other)
    model, tokenizer = load(target, "float32", "cpu")
    model.model.norm.weight *= 2
    save(model, tokenizer, other)
    for changed, said in (
        (("--top-k", 3), "--top-k"),
        (("--keep-duplicates",), "--keep-duplicates"),
        (("--data", data / "tales.txt"), "--data"),
        (("--model", other), "--model"),
    ):
        said = f"was not begun with this {said}: give what it was begun with"
        assert said in refused(capsys, *asking(target, data, parts, *changed))
    parts.write_text('{"kind": "x", "prompt": [1], "tokens": [2]}\n')
    assert "was not begun with this" in refused(capsys, *asking(target, data, parts))
    parts.write_text("my own words, without an end of line")
    assert "was not begun" in refused(capsys, *asking(target, data, parts))
    assert parts.read_text() == "my own words, without an end of line"
    with whole.open("a") as file:
        lock(file, whole)
        said = refused(capsys, *asking(target, data, whole))
    assert "another process is writing it" in said


def test_near_duplicates_are_kept_where_that_is_asked_for(target, data, tmp_path, capsys):
    """A greedy target says the same to the same prompt."""
    greedy = "--temperature", 0, "--top-k", 0, "--top-p", 1
    data, out = data / "talk.txt", tmp_path / "few.jsonl"
    every = made(target, data, tmp_path / "all.jsonl", 64, "--keep-duplicates", *greedy)
    assert len(every) == 64
    said = refused(capsys, *asking(target, data, out, "--documents", 64, *greedy))
    assert "only 2 different documents came" in said and len(read_own(out)[1]) == 2


def test_a_prompt_is_a_beginning_or_a_conversation_up_to_an_answer(target, data, tmp_path):
    prompts: dict[str, set[str]] = {}
    for row in made(target, data, tmp_path / "own.jsonl", 150):
        text = TOKENIZER.backend.decode(row["prompt"], skip_special_tokens=False)
        prompts.setdefault(row["kind"], set()).add(text.removeprefix("<|endoftext|>"))
    first = "<|user|>hi<|end|><|assistant|>"
    assert prompts["talk"] == {first, first + "hello<|end|><|user|>a\nb<|end|><|assistant|>"}
    questions = {json.loads(line)["prompt"] for line in (data / "asked.jsonl").open()}
    assert {text[8:-20] for text in prompts["asked"]} <= questions
    whole = tales(120)
    assert all(3 <= len(text) < 24 and text in whole for text in prompts["tales"])


def test_a_text_is_asked_about(target, data, tmp_path):
    rows = made(target, data / "tales.txt", tmp_path / "own.jsonl", 20, "--ask", "Go on: {:.9}!")
    whole = tales(120)
    for row in rows:
        text = TOKENIZER.backend.decode(row["prompt"], skip_special_tokens=False)
        said = re.fullmatch(r"<.endoftext.><.user.>Go on: (.{9})!<.end.><.assistant.>", text)
        assert said[1] in whole


def test_a_document_may_say_itself_what_comes_next(target, data, tmp_path, capsys):
    (data / "sums.jsonl").write_text('{"question": "2+2?", "answer": "2+2 = <<2+2=4>>4"}\n' * 9)
    save(byte_model(eos=(TOKENIZER.controls["<|end|>"],)), TOKENIZER, target)
    said: dict[str, set] = {}
    for row in made(target, data, tmp_path / "own.jsonl", 100, "--given", "--keep-duplicates"):
        both = (row[part] for part in ("prompt", "tokens"))
        text = "|".join(TOKENIZER.backend.decode(p, skip_special_tokens=False) for p in both)
        said.setdefault(row["kind"], set()).add(text.removeprefix("<|endoftext|>"))
    ask, answer = "<|user|>", "<|end|><|assistant|>|"
    assert "asked" not in said  # which has no answers
    assert said["sums"] == {f"{ask}2+2?{answer}2+2 = 4<|end|>"}
    rest = f"{ask}hi<|end|><|assistant|>hello<|end|>{ask}a\nb{answer}bye<|end|>"
    assert said["talk"] == {f"{ask}hi{answer}hello<|end|>", rest}
    whole = tales(120)
    assert all(text.replace("|", "", 1) in whole for text in said["tales"])
    rows = made(target, data / "tales.txt", tmp_path / "asked.jsonl", 9, "--given", "--ask", "Go!")
    for row in rows:
        text = TOKENIZER.decode(row["tokens"])
        assert TOKENIZER.chat([{"role": "user", "content": "Go!"}]) == row["prompt"]
        assert len(text) >= 19 and text in whole
    wrong = ["generate", "--model", target, "--out", tmp_path / "x", "--given", "--chat"]
    assert "--given is about documents: give --data" in refused(capsys, *wrong)


def test_the_target_plays_the_user_too(target, tmp_path, capsys):
    out, begun = tmp_path / "own.jsonl", ["Why", "How long"]
    asking = ["generate", "--model", target, "--out", out, "--tokens", 20, "--device", "cpu"]
    assert "only 0 different documents came" in refused(capsys, *asking, "--chat")
    save(byte_model(eos=(258, 7, 8, 9)).float(), TOKENIZER, target)
    run(*asking, "--documents", 30, "--chat", *begun)
    questions = set()
    for row in read_own(out)[1]:
        text = TOKENIZER.backend.decode(row["prompt"], skip_special_tokens=False)
        said = re.fullmatch("<.endoftext.><.user.>(.*)<.end.><.assistant.>", text, re.S)[1]
        assert row["kind"] == "chat" and said.startswith(tuple(begun))
        questions.add(said)
    assert len(questions) > 20
    run(*asking, "--documents", 40, "--chat", *begun)  # goes on
    assert "was not begun with this --chat" in refused(capsys, *asking, "--chat")
    assert "--data --chat is required" in refused(capsys, *asking)
    assert "not allowed with" in refused(capsys, *asking, "--chat", "--data", out)
    for wrong in "{this}", "{.that}", "{0[a]}", "{[3]}", "{":
        said = refused(capsys, *asking, "--data", out, "--ask", wrong)
        assert "the text goes where {} is" in said
    assert "--ask is about documents" in refused(capsys, *asking, "--chat", "--ask", "{}")
    save(byte_model(), byte_tokenizer(chat_template=None), tmp_path / "bare")
    asking += "--model", tmp_path / "bare", "--out", tmp_path / "other.jsonl", "--chat"
    said = refused(capsys, *asking)
    assert "has no chat template, so it cannot play the user" in said


def test_refused_conversations_are_left_out_whether_it_stopped_or_not(tmp_path, capsys):
    """Of 8 conversations in a ShareGPT file the template refuses 2."""
    save(byte_model().float(), byte_tokenizer(ALTERNATING), tmp_path / "strict")
    file, whole, parts = (tmp_path / name for name in ("talk.json", "whole.jsonl", "parts.jsonl"))
    talk = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    bad = [{"from": "gpt", "value": "c"}, *talk]
    file.write_text(json.dumps([{"conversations": bad if i % 4 == 1 else talk} for i in range(8)]))
    reason = "the model's chat template refuses this conversation: roles must alternate"
    for more in [], ["--given"]:
        more += "--keep-duplicates", "--tokens", 4, "--batch", 4
        made(tmp_path / "strict", file, whole, 12, *more)
        said = capsys.readouterr().err.splitlines()[-1]
        first = f"minispec: documents left out: 2; the first is {file} object [26]: "
        assert re.fullmatch(first + reason, said)
        for n in 4, 12:
            rows = made(tmp_path / "strict", file, parts, n, *more)
        assert whole.read_text() == parts.read_text()
        assert {TOKENIZER.decode(row["prompt"]) for row in rows} == {"a"}
        parts.unlink(), whole.unlink()
    file.write_text(json.dumps([{"conversations": bad}] * 5))
    for more in [], ["--given"]:
        said = refused(capsys, *asking(tmp_path / "strict", file, whole, *more, "--batch", 1))
        assert re.search(f"documents left out: .; the first is {file} object .: {reason}", said)


def test_an_end_token_that_only_the_tokenizer_names_is_reported(target, data, tmp_path, capsys):
    """The fixture's model lists none."""
    said = "the model's config does not list <|endoftext|>, the tokenizer's end token"
    made(target, data, tmp_path / "own.jsonl", 5)
    assert capsys.readouterr().err.count(said) == 1
    chat = asking(target, data, tmp_path / "chat.jsonl", "--chat")
    chat.remove("--data"), chat.remove(data)
    error = refused(capsys, *chat)
    assert "only 0 different documents came: no user turn ended" in error
    assert said in error and "add 256 to eos_token_id" in error and "--temperature" not in error
    save(byte_model(eos=(256,)).float(), TOKENIZER, target)
    made(target, data, tmp_path / "listed.jsonl", 5)
    assert said not in capsys.readouterr().err


def test_a_model_with_any_tokenizer_is_asked(data, tmp_path):
    """No begin token, no end tokens, no chat template."""
    backend = Backend(models.WordLevel({"the": 0, "cat": 1, "sat": 2, "?": 3}, "?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    save(random_model(vocab_size=6).float(), Tokenizer(backend), tmp_path / "plain")
    rows = made(tmp_path / "plain", data, tmp_path / "own.jsonl", 60)
    assert len(rows) >= 60 and all(max(row["prompt"]) < 4 for row in rows)
    assert all(len(row["tokens"]) == 20 for row in rows)
    run("mtp", "--model", tmp_path / "plain", "--own", tmp_path / "own.jsonl", "--steps", 2,
        "--out", tmp_path / "mtp", "--rows", 1, "--device", "cpu")  # fmt: skip
    load_mtp(tmp_path / "mtp", *load(tmp_path / "plain", "float32", "cpu"))


@pytest.mark.parametrize(
    "rows, said",
    [
        (["{"], "is not a file of minispec.distill generate"),
        (['{"a": 1}'], "is not a file"),
        (['{"options": [], "tokenizer": "x"}'], "options that are no object"),
        (['{"options": {}, "tokenizer": [1]}'], "a tokenizer that is no hash"),
        (['{"options": {}, "tokenizer": "x"}'], "another tokenizer"),
        (['{"kind": "a", "prompt": [1], "tokens": [-1]}'], "a token that is no id"),
        (['{"kind": "a", "prompt": [1], "tokens": [true]}'], "a token that is no id"),
        (['{"kind": "a", "prompt": [1], "tokens": ["b"]}'], "a token that is no id"),
        (['{"kind": "a", "prompt": [1], "tokens": [2.0]}'], "a token that is no id"),
        (['{"kind": "a", "prompt": [9223372036854775808], "tokens": [1]}'], "a token that is no"),
        (['{"kind": ["a"], "prompt": [1], "tokens": [1]}'], "a kind that is not text"),
        (['{"kind": "a", "prompt": "abc", "tokens": [1]}'], "is not a file"),
        (['{"kind": "a", "prompt": [1], "tokens": []}'], "an empty row"),
        (['{"kind": "a", "prompt": [1], "tokens": [1000]}'] * 2, "another model wrote it"),
        (['{"kind": "a", "prompt": [1], "tokens": [2]}'], "none to learn from"),
        ([], "none to learn from"),
        (["[" * 100_000], "is not a file"),
    ],
)
def test_own_text_that_is_none_is_refused(tmp_path, rows, said):
    """By `python -O` as well, which drops assertions."""
    (tmp_path / "own.jsonl").write_text("".join(row + "\n" for row in rows))
    source = Path(distill.documents.__file__)
    optimised = {"__name__": distill.documents.__name__}
    exec(compile(source.read_text(encoding="utf-8"), source, "exec", optimize=1), optimised)
    for read in read_training, optimised["read_training"]:
        with pytest.raises(UserError, match=said):
            read([tmp_path / "own.jsonl"], byte_model(), TOKENIZER)


@pytest.mark.parametrize("name", ["", "generate", "draft", "medusa", "mtp", "tree", "vocabulary"])
def test_help_needs_no_docstrings(monkeypatch, name, capsys):
    """`python -OO` drops them."""
    for module in (distill, *(getattr(distill, name) for name in MODULES)):
        monkeypatch.setattr(module, "__doc__", None)
    with pytest.raises(SystemExit) as caught:
        run(*([name] if name else []), "-h")
    assert caught.value.code == 0 and "usage: python -m minispec.distill" in capsys.readouterr().out


def test_what_is_measured_was_neither_learnt_nor_is_near_to_what_was(tmp_path):
    rng = random.Random(0)
    rows = [
        {"kind": "maths", "prompt": [1], "tokens": [rng.randrange(99) for _ in range(40)]}
        for _ in range(130)
    ]
    rows[50]["tokens"] = rows[7]["tokens"][:30] + rows[50]["tokens"][30:]
    files, model = (tmp_path / "a.jsonl", tmp_path / "b.jsonl"), byte_model()
    for file, part in zip(files, (rows[:60], rows[60:])):
        file.write_text("".join(json.dumps(row) + "\n" for row in part))
    learn, measured = read_training(files, model, None)
    for i, row in enumerate(rows):
        row["place"] = (files[i >= 60], i - 60 * (i >= 60))
    assert measured == [rows[0], rows[60], rows[110]]
    assert learn == [row for i, row in enumerate(rows) if i not in (0, 50, 60, 110)]
    text = {"kind": "x", "prompt": [1], "tokens": [2, 3]}
    files[0].write_text((json.dumps(text) + "\n") * 3)
    alike = [text | {"place": (files[0], i)} for i in range(3)]
    assert read_training(files[:1], model, None) == (alike[1:], alike[:1])  # not nothing


def test_batches_show_every_document_once_an_epoch():
    batch = shuffled(10, 2, 0)
    epochs = [torch.cat([batch(step) for step in range(i, i + 5)]) for i in (0, 5)]
    assert all(sorted(each.tolist()) == list(range(10)) for each in epochs)
    assert not torch.equal(*epochs) and len(shuffled(3, 8, 0)(9)) == 3


def test_hidden_states_are_kept_and_those_of_new_documents_added(tmp_path):
    file, model = tmp_path / "own.jsonl", byte_model().float()
    rows = [{"kind": "x", "prompt": [1], "tokens": random_tokens(n, n)} for n in (5, 9, 30, 3)]

    def write(n: int) -> None:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows[:n]))

    def check(n: int) -> None:
        kept = kept_states(file, model, 12, torch.float32, weights_digest(model))
        assert len(kept) == n
        for row, states in zip(rows, kept):
            alone = model((row["prompt"] + row["tokens"])[:12])[0]
            torch.testing.assert_close(states.float(), alone, atol=4e-3, rtol=1e-3)

    write(4)
    check(4)
    (states,) = tmp_path.glob("*.hidden")
    kept = states.read_bytes()
    states.unlink()
    write(2)
    check(2)
    two = states.read_bytes()
    assert kept.startswith(two)
    for more in 0, 5, 8, 99:  # bytes of the third: killed while writing
        states.write_bytes(kept[: len(two) + more])
        number = states.stat().st_ino
        write(4)
        check(4)
        assert states.read_bytes() == kept and states.stat().st_ino == number
    states.write_bytes(kept[:8] + bytes(8) + kept[16:])  # what is kept is not computed again
    old = kept_states(file, model, 12, torch.float32, weights_digest(model))
    assert (old[0][0, :4] == 0).all()
    before = [states.clone() for states in old]
    for i in 3, 0, 1:  # another document in the place of one, longer or as long
        rows[i]["tokens"] = random_tokens(len(rows[i]["tokens"]) + (i == 3), 99)
        write(4)
        check(4)
    for each, was in zip(old, before, strict=True):  # a training that began before goes on reading
        assert torch.equal(each, was)
    model.model.norm.weight *= 2
    check(4)  # another target's are others
    assert len(list(tmp_path.glob("*.hidden"))) == 2


def test_documents_that_share_a_pass_have_the_states_that_they_have_alone():
    model = random_model(dtype=torch.float32)
    rows = [random_tokens(n, n) for n in (5, 9, 3, 30, 2, 7)]
    for most in 0, 20, 40, 1000:
        together = distill.hidden_states(model, iter(rows), torch.float32, most)
        for row, states in zip(rows, together, strict=True):
            torch.testing.assert_close(states, model(row)[0])


# ---- losses --------------------------------------------------------------------------------------


def documents_of(model, sizes=(9, 6, 12), prompts=None, seed: int = 0):
    rows = [random_tokens(n, seed + n) for n in sizes]
    states = [model(row)[0] for row in rows]
    return rows, distill.Documents(rows, prompts or [3] * len(rows), states)


def spares_the_target(loss, trained, target) -> bool:
    trained.requires_grad_(True)
    loss(torch.tensor([0, 2])).backward()
    return all(p.grad is not None for p in trained.parameters()) and all(
        p.grad is None for p in target.parameters()
    )


def test_a_draft_s_loss_is_the_cross_entropy_of_the_distributions():
    """Those of generated tokens alone, in documents of different lengths; one is all prompt."""
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
    assert loss(torch.tensor([2])) == 0 and spares_the_target(loss, small, target)


@pytest.mark.parametrize("shared", [True, False])
def test_medusa_s_loss_is_the_paper_s(shared):
    """Σ over heads of 0.8^k · the mean of -log p(token t + k + 2 | hidden state t)."""
    model = random_model(dtype=torch.float32)
    rows, documents = documents_of(model, (9, 6, 12), [2, 2, 2])
    heads = randomise(untrained(3, 1, model, shared), 0)
    loss, by_formula = distill.HeadsLoss(heads, model, documents), 0.0
    for k in range(3):
        logs = [
            -heads(hidden[t], model)[k].log_softmax(-1)[row[t + k + 2]]
            for row, hidden in zip(rows, documents.hidden)
            for t in range(len(row) - k - 2)
        ]
        by_formula += 0.8**k * torch.stack(logs).mean()
    assert torch.allclose(loss(torch.arange(3)), by_formula, atol=1e-5)
    assert spares_the_target(loss, heads, model)


def test_the_head_s_loss_is_over_generated_tokens_of_one_document_only():
    """With soft labels: the target's distributions stand where the labels are. Hard ones, steps and
    weights are assignment 6's."""
    model = random_model(dtype=torch.float32)
    head, (rows, documents) = random_head(model, 0), documents_of(model)
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
    assert spares_the_target(loss, head, model)


def test_heads_can_learn_the_words_of_a_vocabulary_alone():
    """A label that is none of them does not count."""
    model = random_model(dtype=torch.float32)
    words = Subset(model.lm_head.weight, list(range(3, 32, 2)))
    rows, documents = documents_of(model)
    head, heads = random_head(model, 0), randomise(untrained(3, 1, model, True), 0)

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
    accuracy = tree.accuracy_of(torch.tensor([[0, 0, 1, RANKS], [2, -1, -1, 0]]))
    assert accuracy[0, :2].tolist() == [0.5, 0.25] and accuracy[1, [0, 2]].tolist() == [0.5, 0.5]
    assert accuracy.shape == (2, RANKS)


@pytest.mark.parametrize("seed", range(4))
def test_paths_that_are_right_together_come_in_the_order_of_their_counts(seed):
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.randint(0, 4, (3, 200), generator=generator)
    ranks[ranks == 3] = RANKS  # not among the best
    ranks[2, -1] = ranks[1, -1] = -1  # the end of a text, which does not count
    columns = [tuple(column) for column in ranks.T[:-1].tolist()]
    shares = tree.together(ranks)
    every = [p for n in (1, 2, 3) for p in itertools.product(range(3), repeat=n)]
    right = {p: sum(c[: len(p)] == p for c in columns) / len(columns) for p in every}
    assert shares == {p: share for p, share in right.items() if share}
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    for n in range(len(shares)):
        first = list(shares)[:n]
        assert set(complete(first, 3, 3)) == set(first), "the first n are a tree"
    assert tree.together(ranks[:, :0]) == {}


# ---- whole trainings -----------------------------------------------------------------------------

TINY = "--layers", 1, "--width", 8, "--heads", 2, "--ffn", 8
TRAININGS = {  # its flags, others, the file it makes, the method and its flag
    "draft": (TINY, ("--layers", 2), "model", "speculative", "--draft"),
    "medusa": (("--heads", 2), ("--layers", 2), "medusa_lm_head", "medusa", "--heads"),
    "medusa --shared": (("--heads", 2), ("--heads", 3), "medusa_lm_head", "medusa", "--heads"),
    "mtp": ((), ("--beta", 0.5), "model", "fastmtp", "--heads"),
    "mtp --soft --k 1": ((), ("--mode", "parallel"), "model", "fastmtp", "--heads"),
}


@pytest.mark.parametrize("command", TRAININGS)
def test_what_is_trained_loads_and_another_begins_with_it(target, data, tmp_path, capsys, command):
    own, (kind, *flags), whole = tmp_path / "own.jsonl", command.split(), tmp_path / "whole"
    sizes, other, file, method, flag = TRAININGS[command]
    made(target, data, own, 60)
    (asked,) = {row["kind"] for row in read_own(own)[1][:1]}  # held out
    options = [kind, "--model", target, "--own", own, "--device", "cpu", *flags, *sizes]
    options += ["--rows", 8, "--context", 40, "--steps"]
    run(*options, 8, "--out", whole)
    card = (whole / "README.md").read_text()
    assert "8 steps" in card and (f"| {asked} |" in card or "| 1 |" in card)
    assert str(tmp_path) not in card and len(card.splitlines()) <= 60
    run(*options, 1, "--out", tmp_path / "next", "--init", whole, "--lr", 1e-9, "--seed", 1)
    tensors = [load_file(tmp_path / name / f"{file}.safetensors") for name in ("whole", "next")]
    for name, tensor in tensors[0].items():
        assert torch.allclose(tensors[1][name], tensor, atol=1e-3), name
    missing = refused(capsys, *options, 1, "--out", tmp_path / "new", "--init", tmp_path / "no")
    assert "no such directory" in missing
    assert "(other options)" in refused(capsys, *options, 9, "--out", whole, *other)
    generate.main(["ab", "--model", str(target), "--method", method, flag, str(whole), "--device",
                   "cpu", "--json", "--max-new-tokens", "9"])  # fmt: skip
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 9
    if kind == "medusa":
        run("tree", "--model", target, "--heads", whole, "--own", own, "--device", "cpu")
        heads = load_medusa(whole, *load(target, "float32", "cpu"))
        assert f"a tree of {len(heads.tree)} nodes" in capsys.readouterr().out
        assert heads.accuracy.shape == (2, RANKS) and (heads.tree or not heads.accuracy[0].any())


@pytest.mark.parametrize("command, method", [("mtp", "fastmtp"), ("medusa --shared", "medusa")])
def test_heads_draft_from_the_vocabulary_that_they_have_learnt(
    target, data, tmp_path, capsys, command, method
):
    own, words, whole = (tmp_path / name for name in ("own.jsonl", "words.json", "whole"))
    made(target, data, own, 20)
    run("vocabulary", "--model", target, "--size", 12, "--text", f"own={own}", "--out", words)
    run(*command.split(), "--model", target, "--own", own, "--device", "cpu", "--vocabulary", words,
        "--rows", 2, "--context", 40, "--steps", 1, "--out", whole)  # fmt: skip
    asked = ["ab", "--model", str(target), "--method", method, "--heads", str(whole), "--json",
             "--dtype", "float64", "--max-new-tokens", "9"]  # fmt: skip
    for more in [], ["--vocabulary-size", "5"], ["--vocabulary", "none"]:
        generate.main([*asked, *more])
    capsys.readouterr()
    model, tokenizer = load(target, "float64", "cpu")
    vocabulary = load_drafter(method, model, tokenizer, str(whole))["vocabulary"]
    assert vocabulary.languages == load_vocabulary(words, model, tokenizer).languages
    (whole / "training.pt").unlink()
    run(*command.split(), "--model", target, "--own", own, "--device", "cpu", "--rows", 2,
        "--context", 40, "--steps", 1, "--out", whole)  # fmt: skip
    assert not (whole / "vocabulary.json").exists()  # they have learnt all words now


@pytest.mark.parametrize(
    "command",
    ["draft", "medusa", "medusa --shared --vocabulary words.json", "mtp --vocabulary words.json"],
)
def test_documents_without_a_label_are_skipped_and_counted(target, tmp_path, capsys, command):
    """Prompts that fill the context, two tokens in all, none of the vocabulary's."""
    own, out, one = tmp_path / "own.jsonl", tmp_path / "out", "draft" in command
    words = tmp_path / "words.json"
    save_vocabulary({"x": Language((65,), (1,))}, TOKENIZER, words)
    parts = command.replace("words.json", str(words)).split()
    options = [*parts, "--model", target, "--own", own, "--device", "cpu", "--context", 8, "--rows",
               2, "--steps", 1, "--out", out, *(TINY if one else ())]  # fmt: skip
    full = {"kind": "x", "prompt": list(range(97, 109)), "tokens": [65, 65]}
    short, other = ({"kind": "x", "prompt": [97], "tokens": t} for t in ([65], [97] * 4))
    good = {"kind": "x", "prompt": [97], "tokens": [65, 65, 65, 65]}

    def write(*rows: dict) -> None:
        own.write_text("".join(json.dumps(row) + "\n" for row in rows))

    useless = [full] * 3 + ([] if one else [short] * 2) + ([other] if "words" in command else [])
    write(good, *useless)
    said = refused(capsys, *options)
    assert "nothing to learn from: the prompt fills the context of 8 tokens (3)" in said
    assert one or "the text is too short (2)" in said
    assert "words" not in command or "no generated token is in the vocabulary (1)" in said
    assert not (out / CHECKPOINT).exists()
    write(full, *[good] * 3)
    assert "nothing to measure by: the prompt fills" in refused(capsys, *options)
    write(good, *[{**good, "tokens": [65, 65, 65, i]} for i in range(3)], *useless)
    run(*options)
    said = capsys.readouterr().err
    n = len(useless)
    assert f"skipped {n} of {n + 3} documents, which have nothing to learn from" in said


def test_a_tree_is_not_chosen_by_documents_without_labels(target, tmp_path, capsys):
    model = byte_model().float()
    save_medusa(untrained(2, 1, model, True), tmp_path / "heads", "", TOKENIZER, model.dtype)
    before = (tmp_path / "heads" / "config.json").read_bytes()
    own = tmp_path / "own.jsonl"
    own.write_text('{"kind": "x", "prompt": [1], "tokens": [2]}\n' * 3)
    said = refused(capsys, "tree", "--model", target, "--heads", tmp_path / "heads", "--own", own)
    assert "nothing to measure by: the text is too short (1)" in said
    assert (tmp_path / "heads" / "config.json").read_bytes() == before


def test_two_trainings_never_share_an_out(target, tmp_path, capsys):
    own, out = tmp_path / "own.jsonl", tmp_path / "out"
    own.write_text('{"kind": "x", "prompt": [1], "tokens": [2, 3, 4]}\n' * 3)
    options = ["mtp", "--model", target, "--own", own, "--steps", 1, "--device", "cpu", "--context",
               8, "--out", out]  # fmt: skip
    out.mkdir()
    folder = os.open(out, os.O_RDONLY)
    try:
        lock(folder, "here")
        said = refused(capsys, *options)
        assert f"--out {out}: another process is writing it" in said and not list(out.iterdir())
    finally:
        os.close(folder)
    run(*options)
    run(*options)  # continues


def test_ranks_are_those_among_the_words_that_are_drafted():
    model, ids = random_model(dtype=torch.float32), list(range(3, 32, 2))
    heads = randomise(untrained(3, 1, model, True), 0)
    row = {"prompt": random_tokens(4), "tokens": random_tokens(30, 1)}
    text = row["prompt"] + row["tokens"]
    ranks = tree.ranks_of(heads, Subset(model.lm_head.weight, ids), model, [row], 64)
    said = heads(model(text)[0], model)[..., ids]  # (K, n, words)
    for k, t in itertools.product(range(3), range(len(text))):
        label = text[t + k + 2] if 3 <= t + 2 and t + k + 2 < len(text) else None
        if t + 2 < 4 or label is None:
            assert ranks[k, t] == -1
        elif label not in ids:
            assert ranks[k, t] == RANKS
        else:
            above = int((said[k, t] > said[k, t, ids.index(label)]).sum())
            assert ranks[k, t] == min(above, RANKS)


def test_agreement_is_of_best_tokens_and_of_distributions_after_the_prompt():
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


# ---- vocabularies and refusals -------------------------------------------------------------------


def test_the_command_counts_a_corpus(target, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("abab\n<|endoftext|>\nabc")
    (tmp_path / "z.jsonl").write_text('{"prompt": "从前"}')
    out, text = tmp_path / "v.json", [f"en={tmp_path / 'a.txt'}", f"zh={tmp_path / 'z.jsonl'}"]
    options = ["vocabulary", "--model", target, "--size", 12, "--out", out]
    run(*options, "--text", text[0], "--text", text[1])
    model, tokenizer = load(target, "float32", "cpu")
    words = load_vocabulary(out, model, tokenizer).languages
    assert set(tokenizer.controls.values()) <= set(words["en"].ids) & set(words["zh"].ids)
    (a,) = tokenizer.encode("a", special=False)
    assert a in words["en"].ids and a not in words["zh"].ids
    made(target, tmp_path / "a.txt", tmp_path / "own.jsonl", 1)
    said = [token for row in read_own(tmp_path / "own.jsonl")[1] for token in row["tokens"]]
    run(*options, "--text", f"own={tmp_path / 'own.jsonl'},{tmp_path / 'a.txt'}")
    words = load_vocabulary(out, model, tokenizer).languages["own"]
    for word in "abab", "abc":
        said += tokenizer.encode(word)
    assert words.counts == tuple(said.count(token) for token in words.ids)
    assert words.counts[-1] == min(words.counts[-5:]) > 0
    for wrong in "en=", f"{text[0]},", f"{text[0]},,{text[0][3:]}", f"en=,{text[0][3:]}":
        assert "argument --text" in refused(capsys, *options, "--text", wrong)
    for wrong in ["en"], ["en=nowhere.txt"], ["=" + text[0][3:]], [text[0], "--text", text[0]]:
        assert refused(capsys, *options, "--text", *wrong)


@pytest.mark.parametrize("command", ["generate", "draft", "mtp", "medusa", "tree", "vocabulary"])
def test_what_cannot_be_is_refused_first(target, command, tmp_path, capsys):
    """A target without a tokenizer, and a place that cannot be written."""
    (tmp_path / "file").touch()
    given = {"generate": ("--data", "x"), "vocabulary": ("--text", f"en={__file__}")}
    given = command, *given.get(command, ("--own", "x")), "--model", target
    place = "--heads" if command == "tree" else "--out"
    assert place in refused(capsys, *given, place, tmp_path / "file" / "out")
    (target / "tokenizer.json").unlink()
    said = refused(capsys, *given, place, tmp_path)
    assert "has no tokenizer.json" in said or command in ("generate", "vocabulary")
