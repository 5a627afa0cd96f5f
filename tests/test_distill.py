"""The target's own text: batched sampling is right, resumable, without near-duplicates."""

import json
import random
import shutil

import pytest
import torch
from conftest import random_model
from test_generate import TOKENIZER, VOCAB, byte_model
from test_pretrain import data  # noqa: F401  a small corpus

from minispec import Sampling, UserError, distill, load
from minispec.checkpoint import WEIGHTS, save
from minispec.generate import decode
from minispec.pretrain import Batches, NextToken


def test_a_batch_says_what_each_prompt_says_alone():
    model = random_model(eos_ids=(5, 9))
    prompts = [[1], [2, 3, 4], [5, 6, 7, 8, 9, 10, 11]]
    together = distill.sample_batch(model, prompts, 20, Sampling(), torch.Generator())
    for prompt, tokens in zip(prompts, together):
        assert tokens == decode(model, None, prompt, max_new_tokens=20).tokens


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


@pytest.fixture
def target(tmp_path):
    model = random_model(vocab_size=VOCAB, hidden_size=64, bos_id=256, eos_ids=(256, 259))
    save(model, TOKENIZER, tmp_path / "target")
    return tmp_path / "target"


def run(*arguments) -> None:
    distill.main([str(a) for a in arguments])


def test_generation_resumes_and_a_draft_learns_from_it(target, data, tmp_path, capsys):  # noqa: F811
    options = ("--model", target, "--data", data, "--tokens", 20, "--batch", 8, "--device", "cpu")
    run("generate", *options, "--out", tmp_path / "whole.jsonl", "--documents", 60)
    run("generate", *options, "--out", tmp_path / "parts.jsonl", "--documents", 20)
    text = (tmp_path / "parts.jsonl").read_text()
    (tmp_path / "parts.jsonl").write_text(text[:-30])  # killed while writing
    run("generate", *options, "--out", tmp_path / "parts.jsonl", "--documents", 60)
    assert (tmp_path / "whole.jsonl").read_text() == (tmp_path / "parts.jsonl").read_text()
    rows = [json.loads(line) for line in (tmp_path / "whole.jsonl").read_text().splitlines()]
    assert len(rows) >= 60 and all(0 < len(row["tokens"]) <= 20 for row in rows)

    sizes = ("--layers", 1, "--heads", 2, "--ffn", 8, "--context", 16, "--batch-tokens", 64,
             "--device", "cpu")  # fmt: skip
    train = ("draft", "--model", target, "--own", tmp_path / "whole.jsonl", "--steps", 3)
    with pytest.raises(SystemExit):
        run(*train, "--out", tmp_path / "draft", *sizes, "--width", 64)
    assert "at most a tenth" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(*train, "--out", tmp_path / "whole", *sizes, "--width", 4, "--own", target)
    for more in ((), ("--soft",)):
        shutil.rmtree(tmp_path / "draft", ignore_errors=True)
        run(*train, "--out", tmp_path / "draft", *sizes, "--width", 4, *more)
        draft, tokenizer = load(tmp_path / "draft", "float32", "cpu")
        assert tokenizer.backend.get_vocab() == TOKENIZER.backend.get_vocab()
        card = (tmp_path / "draft" / "README.md").read_text()
        assert f"3 steps, 192 tokens{' with padding' if more else ''}, " in card
    with pytest.raises(SystemExit):  # soft labels do not go on as hard ones
        run(*train, "--out", tmp_path / "draft", *sizes, "--width", 4)
    assert "of another training" in capsys.readouterr().err


def test_near_duplicates_are_kept_where_that_is_asked_for(target, data, tmp_path, capsys):  # noqa: F811
    """What comes without them is what is left of all once they are taken out."""
    options = ("--model", target, "--data", data, "--tokens", 20, "--batch", 8, "--device", "cpu",
               "--temperature", 0, "--top-k", 0, "--top-p", 1)  # fmt: skip
    files = tmp_path / "all.jsonl", tmp_path / "different.jsonl"
    run("generate", *options, "--documents", 64, "--keep-duplicates", "--out", files[0])
    run("generate", *options, "--documents", 4, "--out", files[1])
    every, different = (
        [json.loads(line)["tokens"] for line in file.read_text().splitlines()] for file in files
    )
    known = distill.Duplicates()
    kept = [tokens for tokens in every if not known.add(tokens)]
    assert len(every) == 64 > len(kept) and different == kept[: len(different)]
    for file, begun, more in (
        (files[0], "--keep-duplicates", ()),
        (files[1], "no --keep-duplicates", ("--keep-duplicates",)),
    ):
        with pytest.raises(SystemExit):
            run("generate", *options, *more, "--out", file)
        assert f"was begun with {begun}: give what" in capsys.readouterr().err
    rows = [json.loads(line) for line in files[1].read_text().splitlines()]
    for row in rows:
        del row["options"]["keep_duplicates"]  # as a file from before there was this option
    files[1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SystemExit):
        run("generate", *options, "--keep-duplicates", "--out", files[1])
    assert "was begun with no --keep-duplicates" in capsys.readouterr().err


def test_a_target_without_a_tokenizer_is_refused(target, data, tmp_path, capsys):  # noqa: F811
    bare = tmp_path / "bare"
    shutil.copytree(target, bare)
    (bare / "tokenizer.json").unlink()
    own = ("--own", tmp_path / "own.jsonl", "--out", tmp_path / "out")
    for command in (
        ("generate", "--data", data, "--out", tmp_path / "out.jsonl"),
        *((kind, *own) for kind in ("draft", "mtp", "medusa")),
        ("tree", "--data", data),
    ):
        with pytest.raises(SystemExit) as caught:
            run(*command, "--model", bare, "--device", "cpu")
        assert caught.value.code == 2 and "has no tokenizer.json" in capsys.readouterr().err


def test_generation_goes_on_only_as_it_was_begun(target, data, tmp_path, capsys):  # noqa: F811
    options = ("--model", target, "--data", data, "--tokens", 20, "--batch", 8, "--device", "cpu")
    run("generate", *options, "--out", tmp_path / "parts.jsonl", "--documents", 20)
    text = (tmp_path / "parts.jsonl").read_text()
    (data / "stories_zh.txt").write_text("a b c d e f\n<|endoftext|>\n" * 60)
    other = tmp_path / "other"
    shutil.copytree(target, other)
    model, tokenizer = load(target, "float32", "cpu")
    model.model.norm.weight *= 2
    save(model, tokenizer, other)
    for changed, said in (
        (("--top-k", 3), "was begun with --top-k 20"),
        (("--kind", "stories_en"), "was begun with no --kind"),
        (("--model", other), "was begun with another --model"),
        ((), "was begun with another --data"),
    ):
        with pytest.raises(SystemExit):
            run("generate", *options, "--out", tmp_path / "parts.jsonl", *changed)
        assert said in capsys.readouterr().err
    row = json.loads(text.split("\n")[0]) | {"options": None}
    (tmp_path / "odd.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(SystemExit):
        run("generate", *options, "--out", tmp_path / "odd.jsonl")
    assert "is not a file of minispec.distill generate: options" in capsys.readouterr().err
    (tmp_path / "odd.jsonl").write_text(json.dumps(row | {"options": {}, "tokenizer": [1]}) + "\n")
    with pytest.raises(SystemExit):
        run("generate", *options, "--out", tmp_path / "odd.jsonl")
    assert "a tokenizer that is no hash" in capsys.readouterr().err


def test_text_of_one_kind_and_training_on_several_files(target, data, tmp_path, capsys):  # noqa: F811
    options = ("--model", target, "--data", data, "--tokens", 20, "--batch", 8, "--device", "cpu",
               "--documents", 60)  # fmt: skip
    files = tmp_path / "stories.jsonl", tmp_path / "dialogues.jsonl"
    for kind, file in zip(("stories_en", "dialogue_en"), files):
        run("generate", *options, "--kind", kind, "--out", file)
        assert {json.loads(line)["kind"] for line in file.read_text().splitlines()} == {kind}
    run("draft", "--model", target, "--own", *files, "--out", tmp_path / "draft", "--steps", 2,
        "--layers", 1, "--width", 4, "--heads", 2, "--ffn", 8, "--context", 16, "--batch-tokens",
        64, "--device", "cpu")  # fmt: skip
    card = (tmp_path / "draft" / "README.md").read_text()
    assert "| stories_en |" in card and "| dialogue_en |" in card
    for kind in ("poems", "stories_distilled"):  # the latter is for warming up a target alone
        (data / f"{kind}.txt").write_text("a b c d e f g\n<|endoftext|>\n" * 60)
        with pytest.raises(SystemExit):
            run("generate", *options, "--kind", kind, "--out", files[0])
        assert f"--kind {kind}: " in capsys.readouterr().err


def test_what_is_measured_was_neither_learnt_nor_is_near_to_what_was(tmp_path):
    rng = random.Random(0)
    rows = [
        {"kind": "maths", "prompt": [1], "tokens": [rng.randrange(99) for _ in range(40)]}
        for _ in range(130)
    ]
    rows[50]["tokens"] = rows[7]["tokens"][:30] + rows[50]["tokens"][30:]
    files = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for file, part in zip(files, (rows[:60], rows[60:])):
        file.write_text("".join(json.dumps(row) + "\n" for row in part))
    rows = distill.read_training(files, random_model(vocab_size=99), None)
    learn, measured = distill.split(rows)
    assert measured == [0, 60, 110] and learn == sorted(set(range(130)) - {0, 50, 60, 110})
    copies = [row | {"held out": i == 0} for i, row in enumerate([rows[0]] * 3)]
    assert distill.split(copies) == ([1, 2], [0])  # rather than nothing


def test_soft_labels_are_the_cross_entropy_of_the_distributions():
    """Those of generated tokens alone, in documents of different lengths; one is all prompt."""
    target, draft = (random_model(seed, dtype=torch.float32) for seed in (1, 2))
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(32, (n,), generator=generator).tolist() for n in (9, 4, 7, 5)]
    prompts = [3, 1, 7, 2]
    loss = distill.SoftLabels(draft, target, documents_of(target, rows, prompts), torch.float32)
    each = []
    for row, prompt in zip(rows[1:], prompts[1:]):
        p = target.logits(target(row[:-1]))[0, prompt - 1 :].softmax(-1)
        log_q = draft.logits(draft(row[:-1]))[0, prompt - 1 :].log_softmax(-1)
        each.append(-(p * log_q).sum(-1))
    torch.testing.assert_close(loss(torch.tensor([1, 2, 3])), torch.cat(each).mean())
    assert loss(torch.tensor([2])) == 0


def documents_of(model, rows: list[list[int]], prompts: list[int]) -> distill.Documents:
    return distill.Documents(rows, prompts, distill.hidden_states(model, rows, torch.float32))


def test_a_draft_trained_on_a_target_agrees_with_it(target, tmp_path):
    """Hard and soft labels both raise the agreement with a tiny target on its own text."""
    model, _ = load(target, "float32", "cpu")
    prompts = [[i] for i in range(64)]
    answers = distill.sample_batch(model, prompts, 30, Sampling(), torch.Generator())
    rows = [{"kind": "maths", "prompt": p, "tokens": a} for p, a in zip(prompts, answers)]
    texts = [prompt + answer for prompt, answer in zip(prompts, answers)]
    documents = documents_of(model, texts, [1] * len(texts))
    for soft in (True, False):
        draft = byte_model(5).float()
        for p in draft.parameters():
            p.requires_grad_(True)
        before = distill.agreement(draft, model, rows)["maths"]
        if soft:
            objective = distill.SoftLabels(draft, model, documents, torch.float32)
            batches = distill.Shuffled(list(range(len(texts))), seed=0)
        else:
            objective = NextToken(draft, torch.float32)
            batches = Batches({"maths": texts}, seed=0)
        optimizer = torch.optim.AdamW(draft.parameters(), lr=0.02)
        for step in range(100):
            loss = objective(batches.take(step, 0.5, rows=8, context=31))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        after = distill.agreement(draft, model, rows)["maths"]
        assert after[0] > before[0] + 0.03 and after[1] > before[1]


@pytest.mark.parametrize(
    "command", [("generate", "--data", "x"), ("vocabulary", "--text", f"en={__file__}")]
)
@pytest.mark.parametrize("out", [".", "file/out"])
def test_an_output_that_cannot_be_is_refused_first(command, out, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(distill, "load", lambda *_: pytest.fail("the weights were read"))
    monkeypatch.setattr(distill, "count", lambda *_: pytest.fail("the texts were read"))
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as caught:
        run(*command, "--model", WEIGHTS / "target", "--out", tmp_path / out)
    error = capsys.readouterr().err
    assert caught.value.code == 2 and "--out" in error and error.count("\n") == 1


def test_wrong_input_is_refused(tmp_path):
    with pytest.raises(UserError, match="is not a file of minispec.distill generate"):
        distill.read_own(tmp_path / "nothing.jsonl")
    (tmp_path / "bad.jsonl").write_text("{\n")
    with pytest.raises(UserError, match="is not a file"):
        distill.read_own(tmp_path / "bad.jsonl")
    row = {"kind": "maths", "prompt": [1], "tokens": [2]}  # enough to train on, not to go on with
    (tmp_path / "others.jsonl").write_text(json.dumps(row) + "\n")
    assert distill.read_own(tmp_path / "others.jsonl") == [row]
    with pytest.raises(UserError, match="was not begun by minispec.distill generate"):
        distill.resumed(tmp_path / "others.jsonl", None, {})


def test_text_of_another_model_is_refused(target, tmp_path):
    model, tokenizer = load(target, device="cpu")
    row = {"kind": "code", "prompt": [1], "tokens": [2], "tokenizer": tokenizer.fingerprint}
    file = tmp_path / "own.jsonl"
    for change, match in (
        ({}, None), ({"tokenizer": "other"}, "another tokenizer"),
        ({"tokens": [2, 10**6]}, "another model wrote it"),
        ({"tokens": [-1]}, "is not a file"), ({"prompt": "abc"}, "is not a file"),
        ({"tokens": []}, "is not a file"),
    ):  # fmt: skip
        file.write_text((json.dumps(row | change) + "\n") * 3)
        if match is None:
            assert len(distill.read_training([file], model, tokenizer)) == 3
        else:
            with pytest.raises(UserError, match=match):
                distill.read_training([file], model, tokenizer)


def test_hidden_states_that_were_damaged_are_made_anew(tmp_path):
    model, rows = random_model(dtype=torch.float32), [[1, 2, 3], [4, 5]]
    file = tmp_path / "hidden.safetensors"
    first = distill.stored_states(model, rows, torch.float32, file)
    file.write_bytes(file.read_bytes()[:20])
    again = distill.stored_states(model, rows, torch.float32, file)
    assert all(torch.equal(a, b) for a, b in zip(first, again))


@pytest.mark.parametrize(
    "arguments, match",
    [
        (["draft", "--context", 1], "--context 1: must be at least 2"),
        (["mtp", "--context", 4], "--context 4: must be at least 5"),
        (["mtp", "--beta", -1], "--beta -1.0: must be a positive number"),
        (["mtp", "--documents", 5], "--documents counts those of --data"),
        (["medusa", "--lr", "nan"], "--lr nan: must be a positive number"),
        (["medusa", "--seed", -1], "--seed -1: must be at least 0"),
        (["draft", "--seed", 2**63], "must fit in 64 bits"),
    ],
)
def test_values_that_cannot_be_are_refused_first(arguments, match, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(*arguments, "--own", tmp_path / "own.jsonl", "--out", tmp_path / "out")
    assert match in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", '{"kind": "code", "prompt": [1], "tokens": [2]}\n', '{"a": 1}\n']
)
@pytest.mark.parametrize("command", ["draft", "medusa", "mtp"])
def test_too_few_or_odd_documents_are_one_line(target, tmp_path, capsys, text, command):
    (tmp_path / "own.jsonl").write_text(text)
    with pytest.raises(SystemExit) as ended:
        run(command, "--model", target, "--own", tmp_path / "own.jsonl", "--out", tmp_path / "out",
            "--device", "cpu", "--steps", 1)  # fmt: skip
    assert ended.value.code == 2 and capsys.readouterr().err.count("\n") == 1
