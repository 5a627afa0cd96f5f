"""Text and training: what a target is sampled, what drafts and heads learn from it, and when a run
goes on."""

import functools
import itertools
import json
import random
import shutil

import pytest
import torch
from conftest import random_model, random_tokens
from safetensors.torch import load_file
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from minispec import Sampling, UserError, distill, generate, load, pretrain
from minispec.checkpoint import WEIGHTS, save
from minispec.distill import documents as documents_module
from minispec.distill import draft, tree
from minispec.distill.documents import Shuffled, read_own, read_training
from minispec.distill.generate import alone
from minispec.generate import decode
from minispec.heads import load_medusa, load_mtp, load_vocabulary
from minispec.methods.adaptive import grow_tree
from minispec.methods.fastmtp import Drafter
from minispec.methods.medusa import RANKS, complete, untrained
from minispec.tokenizer import Tokenizer
from minispec.toys import random_head, random_heads, randomise


@functools.cache
def byte_tokenizer() -> Tokenizer:
    return pretrain.complete(pretrain.train_tokenizer({"x": ["abc"]}, 260))


@pytest.fixture
def target(tmp_path):
    model = random_model(vocab_size=260, hidden_size=64, bos_id=0, eos_ids=(0, 3))
    save(model.float(), byte_tokenizer(), tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def data(tmp_path):
    """Tales, dialogues and questions."""
    rng, folder = random.Random(0), tmp_path / "data"
    folder.mkdir()
    words = "the cat sat on a mat and saw one red bird fly over it".split()
    tales = [" ".join(rng.choices(words, k=30)) for _ in range(120)]
    (folder / "tales.txt").write_text("\n<|endoftext|>\n".join(tales))
    talk = "User: hi\nAssistant: hello\nUser: a\nb\nAssistant: bye\n<|endoftext|>\n"
    (folder / "talk.txt").write_text(talk * 60)
    rows = [{"prompt": "".join(rng.choices("abc", k=5))} for _ in range(60)]
    (folder / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(*arguments) -> None:
    distill.main([str(a) for a in arguments])


def refused(capsys, *arguments) -> str:
    """The one line that a command ends with."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        run(*arguments)
    error = capsys.readouterr().err.splitlines()[-1]
    assert caught.value.code == 2 and error.startswith("minispec: ")
    return error


def made(target, data, out, documents: int, *more) -> list[dict]:
    """What `generate` writes."""
    run("generate", "--model", target, "--data", data, "--tokens", 20, "--batch", 8, "--out", out,
        "--documents", documents, "--device", "cpu", *more)  # fmt: skip
    return read_own(out)[1]


# ---- the target's own text -----------------------------------------------------------------------


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


def test_generation_goes_on_as_if_it_had_not_stopped(target, data, tmp_path, capsys):
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    rows = made(target, data, whole, 60)
    made(target, data, parts, 20)
    parts.write_text(parts.read_text()[:-30])  # killed while writing
    made(target, data, parts, 60)
    assert whole.read_text() == parts.read_text()
    assert len(rows) >= 60 and all(0 < len(row["tokens"]) <= 20 for row in rows)
    assert {row["kind"] for row in rows} == {"tales", "talk", "asked"}
    options = "generate", "--model", target, "--data", data, "--tokens", 20, "--device", "cpu"
    options += "--out", parts, "--batch", 8
    other = tmp_path / "other"
    shutil.copytree(target, other)
    model, tokenizer = load(target, "float32", "cpu")
    model.model.norm.weight *= 2
    save(model, tokenizer, other)
    for changed, said in (
        (("--top-k", 3), "--top-k 20"),
        (("--keep-duplicates",), "--keep-duplicates False"),
        (("--data", data / "tales.txt"), "another --data"),
        (("--model", other), "another --model"),
    ):
        assert f"was begun with {said}" in refused(capsys, *options, *changed)
    parts.write_text('{"kind": "x", "prompt": [1], "tokens": [2]}\n')
    assert "was not begun by minispec.distill" in refused(capsys, *options)


def test_two_processes_do_not_write_one_file(target, data, tmp_path, capsys):
    out = tmp_path / "own.jsonl"
    with alone(out):
        said = refused(capsys, "generate", "--model", target, "--data", data, "--out", out,
                       "--tokens", 9, "--device", "cpu")  # fmt: skip
    assert "another process is writing it" in said
    assert len(made(target, data, out, 8)) >= 8


def test_near_duplicates_are_kept_where_that_is_asked_for(target, data, tmp_path):
    """What comes without them is what is left of all once they are taken out."""
    greedy = "--temperature", 0, "--top-k", 0, "--top-p", 1
    every = made(target, data, tmp_path / "all.jsonl", 64, "--keep-duplicates", *greedy)
    different = made(target, data, tmp_path / "different.jsonl", 4, *greedy)
    known = distill.Duplicates()
    kept = [row for row in every if not known.add(row["tokens"])]
    assert len(every) == 64 > len(kept) and different == kept[: len(different)]
    first, second = ([r["prompt"] for r in every if r["batch"] == batch] for batch in (0, 1))
    assert first != second


def test_a_conversation_is_asked_by_the_template_and_a_control_is_the_corpus(
    target, data, tmp_path
):
    decoded = byte_tokenizer().backend.decode
    shown = functools.partial(decoded, skip_special_tokens=False)
    rows = made(target, data / "talk.txt", tmp_path / "talk.jsonl", 16, "--corpus",
                "--keep-duplicates")  # fmt: skip
    first = "<|endoftext|><|user|>hi<|end|><|assistant|>"
    second = first + "hello<|end|><|user|>a\nb<|end|><|assistant|>"
    assert {shown(row["prompt"]) for row in rows} == {first, second}
    assert {decoded(row["tokens"]) for row in rows} == {"hello", "bye"}
    asked = made(target, data / "asked.jsonl", tmp_path / "asked.jsonl", 9)
    questions = {json.loads(line)["prompt"] for line in (data / "asked.jsonl").open()}
    assert {shown(row["prompt"])[21:-20] for row in asked} <= questions
    tales = made(target, data / "tales.txt", tmp_path / "tales.jsonl", 9, "--corpus")
    text = (data / "tales.txt").read_text()
    assert all(decoded(row["prompt"] + row["tokens"]) in text for row in tales)


def test_a_model_with_any_tokenizer_is_asked(data, tmp_path):
    """No begin token, no end tokens, no chat template."""
    backend = Backend(models.WordLevel({"the": 0, "cat": 1, "sat": 2, "?": 3}, "?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    save(random_model(vocab_size=6).float(), Tokenizer(backend), tmp_path / "plain")
    rows = made(tmp_path / "plain", data, tmp_path / "own.jsonl", 60)
    assert len(rows) >= 60 and all(max(row["prompt"]) < 4 for row in rows)
    assert all(len(row["tokens"]) == 20 for row in rows)
    run("mtp", "--model", tmp_path / "plain", "--own", tmp_path / "own.jsonl", "--steps", 2,
        "--out", tmp_path / "mtp", "--batch-tokens", 300, "--device", "cpu")  # fmt: skip
    load_mtp(tmp_path / "mtp", *load(tmp_path / "plain", "float32", "cpu"))


@pytest.mark.parametrize(
    "rows, said",
    [
        (["{"], "is not a file of minispec.distill generate"),
        (['{"a": 1}'], "is not a file"),
        (['{"options": [], "tokenizer": "x"}'], "options that are no object"),
        (['{"options": {}, "tokenizer": [1]}'], "a tokenizer that is no hash"),
        (['{"options": {}, "tokenizer": "x"}'], "another tokenizer"),
        (['{"kind": "a", "prompt": [1], "tokens": [-1]}'], "tokens that are no ids"),
        (['{"kind": "a", "prompt": "abc", "tokens": [1]}'], "is not a file"),
        (['{"kind": "a", "prompt": [1], "tokens": []}'], "an empty row"),
        (['{"kind": "a", "prompt": [1], "tokens": [1000]}'] * 2, "another model wrote it"),
        (['{"kind": "a", "prompt": [1], "tokens": [2]}'], "none to learn from"),
        ([], "none to learn from"),
        (["[" * 100_000], "is not a file"),
    ],
)
def test_own_text_that_is_none_is_refused(tmp_path, rows, said):
    (tmp_path / "own.jsonl").write_text("".join(row + "\n" for row in rows))
    with pytest.raises(UserError, match=said):
        read_training([tmp_path / "own.jsonl"], 260, byte_tokenizer())


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
    learn, measured = read_training(files, 99, None)
    assert measured == [rows[0], rows[60], rows[110]]
    assert learn == [row for i, row in enumerate(rows) if i not in (0, 50, 60, 110)]
    files[0].write_text((json.dumps(rows[0]) + "\n") * 3)
    assert read_training(files[:1], 99, None) == ([rows[0]] * 2, rows[:1])  # rather than nothing


def test_batches_show_every_document_once_an_epoch_and_begin_anywhere():
    shuffled = Shuffled(10, 0)
    epochs = [torch.cat([shuffled.take(i * 60 + j * 20, 2, 10) for j in range(5)]) for i in (0, 5)]
    assert all(sorted(each.tolist()) == list(range(10)) for each in epochs)
    assert not torch.equal(*epochs)
    assert len(Shuffled(3, 0).take(100, 8, 10)) == 3


# ---- losses --------------------------------------------------------------------------------------


def documents_of(model, sizes=(9, 6, 12), prompts=None, seed: int = 0):
    rows = [random_tokens(n, seed + n) for n in sizes]
    states = [model(row)[0] for row in rows]
    return rows, distill.Documents(rows, prompts or [3] * len(rows), states)


def test_a_draft_s_loss_is_the_cross_entropy_of_the_distributions():
    """Those of generated tokens alone, in documents of different lengths; one is all prompt."""
    target, small = (random_model(seed, dtype=torch.float32) for seed in (1, 2))
    prompts = [3, 1, 7, 2]
    rows, documents = documents_of(target, (9, 4, 7, 5), prompts)
    loss = draft.SoftLabels(small, target, documents, torch.float32)
    each = []
    for row, prompt in zip(rows[1:], prompts[1:]):
        p = target.logits(target(row[:-1]))[0, prompt - 1 :].softmax(-1)
        log_q = small.logits(small(row[:-1]))[0, prompt - 1 :].log_softmax(-1)
        each.append(-(p * log_q).sum(-1))
    torch.testing.assert_close(loss(torch.tensor([1, 2, 3])), torch.cat(each).mean())
    assert loss(torch.tensor([2])) == 0


@pytest.mark.parametrize("shared", [True, False])
def test_medusa_s_loss_is_the_paper_s_and_its_gradient_spares_the_target(shared):
    """Σ over heads of 0.8^k · the mean of -log p(token t + k + 2 | hidden state t)."""
    model = random_model(dtype=torch.float32)
    rows, documents = documents_of(model, (9, 6, 12), [2, 2, 2])
    heads = randomise(untrained(3, 1, model, shared), 0).requires_grad_(True)
    total = distill.HeadsLoss(heads, model, documents, torch.float32)(torch.arange(3))
    by_formula = 0.0
    for k in range(3):
        logs = [
            -heads(hidden[t], model)[k].log_softmax(-1)[row[t + k + 2]]
            for row, hidden in zip(rows, documents.hidden)
            for t in range(len(row) - k - 2)
        ]
        by_formula += 0.8**k * torch.stack(logs).mean()
    assert torch.allclose(total, by_formula, atol=1e-5)
    total.backward()
    assert all(p.grad is not None for p in heads.parameters())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("seed", range(3))
def test_aligned_training_is_incremental_drafting(seed):
    """Step k's logits at row i = the head run row by row: extended to i, then on its own output
    with the true tokens."""
    model = random_model(seed)
    head, (rows, documents) = random_head(model, seed), documents_of(model, seed=seed)
    loss = distill.MTPLoss(head, model, documents, 4, 0.6, True, torch.float64)
    tokens = torch.tensor([rows[2] + [0] * 4])
    logits = loss.steps(documents.hidden[2][None, :10], tokens)
    for i in range(8):
        drafter = Drafter(head, model, 64, 0)
        drafter.extend(documents.hidden[2][: i + 1], rows[2][1 : i + 2])
        out = drafter.last
        for k in range(4):
            assert (model.logits(out)[0] - logits[k][0, i]).abs().max() < 1e-10, (i, k)
            out = drafter.run(out, [tokens[0, i + k + 2].item()])
            drafter.cache.commit([0])


def test_parallel_training_keeps_position_and_mask_and_so_differs_from_step_2_on():
    model = random_model(1)
    head, (rows, documents) = random_head(model, 1), documents_of(model)
    x, tokens = documents.hidden[0][None, :7], torch.tensor([rows[0] + [0] * 4])
    aligned, parallel = (
        distill.MTPLoss(head, model, documents, 3, 0.6, mode, torch.float64).steps(x, tokens)
        for mode in (True, False)
    )
    assert torch.allclose(aligned[0], parallel[0])
    assert (aligned[1] - parallel[1]).abs().max() > 1e-3
    for k in range(3):  # the published forward, by hand
        x = head(x, model.model.embed_tokens(tokens[:, k + 1 : k + 8]))
        assert torch.allclose(model.logits(x), parallel[k])


@pytest.mark.parametrize("soft", [False, True])
def test_the_head_s_loss_is_the_paper_s_over_generated_tokens_of_one_document_only(soft):
    """With soft labels, the target's distributions stand where the labels are."""
    model = random_model(dtype=torch.float32)
    head, (rows, documents) = random_head(model, 0), documents_of(model)
    loss = distill.MTPLoss(head, model, documents, 3, 0.6, True, torch.float32, soft)
    assert [round(w, 3) for w in loss.weights] == [0.510, 0.306, 0.184]
    by_hand = 0.0
    for k, weight in enumerate(loss.weights):
        each = []
        for row, hidden in zip(rows, documents.hidden):
            steps = loss.steps(hidden[None, : len(row) - 2], torch.tensor([row + [0] * 4]))
            for i in range(max(0, 3 - k - 2), len(row) - k - 2):
                log_q = steps[k][0, i].log_softmax(-1)
                p = model.logits(hidden[i + k + 1]).softmax(-1)
                each.append(-(p * log_q).sum() if soft else -log_q[row[i + k + 2]])
        by_hand += weight * torch.stack(each).mean()
    assert torch.allclose(loss(torch.arange(3)), by_hand, atol=1e-5)
    head.requires_grad_(True)
    loss(torch.tensor([0, 2])).backward()
    assert all(p.grad is not None for p in head.parameters())
    assert all(p.grad is None for p in model.parameters())


# ---- trees ---------------------------------------------------------------------------------------


def test_accuracies_have_the_right_denominators():
    labels = distill.labels_of([10, 11, 12, 13, 14, 15], prompt=3, heads=3)
    # position 1 is the first whose head 0 guesses a generated token (13, at index 3)
    assert labels.tolist() == [
        [-100] * 3, [13, 14, 15], [14, 15, -100], [15, -100, -100], [-100] * 3, [-100] * 3
    ]  # fmt: skip
    assert distill.labels_of([7, 8], prompt=1, heads=2).tolist() == [[-100] * 2] * 2
    accuracy = tree.accuracy_of(torch.tensor([[0, 0, 1, RANKS], [2, -1, -1, 0]]))
    assert accuracy[0, :2].tolist() == [0.5, 0.25] and accuracy[1, [0, 2]].tolist() == [0.5, 0.5]
    assert accuracy.shape == (2, RANKS)


@pytest.mark.parametrize("seed", range(8))
def test_paths_that_are_right_together_come_in_the_order_of_their_counts(seed):
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.randint(0, 4, (3, 200), generator=generator)
    ranks[ranks == 3] = RANKS  # not among the best
    ranks[2, -1] = ranks[1, -1] = -1  # the end of a text, which does not count
    columns = [tuple(column) for column in ranks.T[:-1].tolist()]
    paths = tree.together(ranks)
    every = [p for n in (1, 2, 3) for p in itertools.product(range(3), repeat=n)]
    counts = {p: sum(c[: len(p)] == p for c in columns) for p in every}
    assert set(paths) == {p for p in every if counts[p]}
    assert [counts[p] for p in paths] == sorted(map(counts.get, paths), reverse=True)
    for n in range(len(paths)):
        assert set(complete(paths[:n], 3, 3)) == set(paths[:n]), "the first n are a tree"


def test_a_tree_for_heads_that_are_right_at_the_same_places_is_deep():
    """Of two places one is easy for both heads, the other for none: the second head's best
    candidate below the first's is worth more than the product of accuracies says."""
    ranks = torch.tensor([[0, 1, 0, 1, 0, 2], [0, 3, 0, 3, 0, 3]])
    assert tree.together(ranks)[:2] == [(0,), (0, 0)]
    assert grow_tree(tree.accuracy_of(ranks), 2) == [(0,), (1,)]
    assert tree.together(ranks[:, :0]) == []


@pytest.mark.parametrize("seed", range(4))
def test_ranks_replayed_along_a_greedy_text_are_its_decoding(seed):
    model, paths = random_model(seed), [(0,), (1,), (2,), (3,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
    heads, prompt = random_heads(model, seed), random_tokens(6, seed)
    plain = decode(model, None, prompt, max_new_tokens=60)
    ranks = tree.ranks_of(heads, model, [prompt + plain.tokens], [len(prompt)])
    run = decode(model, None, prompt, "medusa", heads=heads, tree=paths, max_new_tokens=60)
    assert run.tokens == plain.tokens
    tokens = tree.along(ranks, complete(paths, 4, 32))
    assert abs(tokens - len(run.tokens) / len(run.rounds)) < 0.15
    assert tree.along(ranks, []) == 1


# ---- whole trainings -----------------------------------------------------------------------------

TINY = "--layers", 1, "--width", 8, "--heads", 2, "--ffn", 8
TRAININGS = {
    "draft": TINY, "medusa": ("--heads", 2), "medusa --shared": ("--heads", 2), "mtp": (),
    "mtp --mode parallel": (), "mtp --soft --k 1": (),
}  # fmt: skip
MADE = {"draft": "model", "medusa": "medusa_lm_head", "mtp": "model"}


@pytest.mark.parametrize("command", TRAININGS)
def test_what_is_trained_loads_and_another_begins_with_it(target, data, tmp_path, capsys, command):
    own, (kind, *flags) = tmp_path / "own.jsonl", command.split()
    made(target, data, own, 60)
    options = [kind, "--model", target, "--own", own, "--device", "cpu", *flags]
    options += [*TRAININGS[command], "--batch-tokens", 320, "--context", 40, "--steps"]
    whole = tmp_path / "whole"

    def tensors(folder):
        return load_file(folder / f"{MADE[kind]}.safetensors")

    run(*options, 8, "--out", whole)
    card = (whole / "README.md").read_text()
    assert "8 steps" in card and "| tales |" in card or "| 1 |" in card
    assert str(tmp_path) not in card and len(card.splitlines()) <= 60
    run(*options, 1, "--out", tmp_path / "next", "--init", whole, "--lr", 1e-9, "--seed", 1)
    for name, tensor in tensors(whole).items():
        assert torch.allclose(tensors(tmp_path / "next")[name], tensor, atol=1e-3), name
    missing = refused(capsys, *options, 1, "--out", tmp_path / "new", "--init", tmp_path / "no")
    assert "no such directory" in missing
    other = {"draft": ("--layers", 2), "medusa": ("--layers", 2), "mtp": ("--beta", 0.5)}[kind]
    said = refused(capsys, *options, 9, "--out", whole, *other)
    assert "is of another training, with another options" in said
    if kind != "mtp":
        new = refused(capsys, *options, 9, "--out", tmp_path / "new", "--init", whole, *other)
        assert "give " in new and "sizes" in new
    method = {"draft": "speculative", "medusa": "medusa", "mtp": "fastmtp"}[kind]
    flag = "--draft" if kind == "draft" else "--heads"
    generate.main(["ab", "--model", str(target), "--method", method, flag, str(whole), "--device",
                   "cpu", "--json", "--max-new-tokens", "9"])  # fmt: skip
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 9
    if kind == "medusa":
        measure = "--documents", 4, "--tokens", 20, "--nodes", 5, "--device", "cpu"
        run("tree", "--model", target, "--heads", whole, "--data", data, *measure)
        heads = load_medusa(whole, *load(target, "float32", "cpu"))
        assert 1 <= len(heads.tree) <= 5 and heads.accuracy.shape == (2, RANKS)
        assert f"chosen: {len(heads.tree)} nodes" in capsys.readouterr().out


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
    assert set(tokenizer.special_ids) <= set(words["en"].ids) & set(words["zh"].ids)
    (a,) = tokenizer.encode("a", special=False)
    assert a in words["en"].ids and a not in words["zh"].ids
    for wrong in ["en"], ["en=nowhere.txt"], ["=" + text[0][3:]], [text[0], "--text", text[0]]:
        assert refused(capsys, *options, "--text", *wrong)


def test_a_target_without_a_tokenizer_is_refused(target, data, tmp_path, capsys):
    (target / "tokenizer.json").unlink()
    own = ("--own", tmp_path / "own.jsonl", "--out", tmp_path / "out")
    for command in (
        ("generate", "--data", data, "--out", tmp_path / "out.jsonl"),
        *((kind, *own) for kind in ("draft", "mtp", "medusa")),
        ("tree", "--data", data, "--heads", data),
    ):
        said = refused(capsys, *command, "--model", target, "--device", "cpu")
        assert "has no tokenizer.json" in said


@pytest.mark.parametrize(
    "command", [("generate", "--data", "x"), ("vocabulary", "--text", f"en={__file__}"),
                ("mtp", "--own", "x")]
)  # fmt: skip
@pytest.mark.parametrize("out", [".", "file/out"])
def test_an_output_that_cannot_be_is_refused_first(command, out, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(documents_module, "load", lambda *_: pytest.fail("the weights were read"))
    (tmp_path / "file").touch()
    (tmp_path / "training.pt").mkdir()
    said = refused(capsys, *command, "--model", WEIGHTS / "target", "--out", tmp_path / out)
    assert "--out" in said


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["draft", "--context", 1], "--context: 1 must be a whole number, at least 3"),
        (["draft", "--width", 7], "--width 7 must be an even multiple"),
        (["mtp", "--beta", -1], "--beta: -1 must be a number, from 0 to 10"),
        (["medusa", "--lr", "nan"], "--lr: nan must be a number"),
        (["medusa", "--seed", 2**63], "--seed: 9223372036854775808 must be"),
        (["mtp", "--mode", "x"], "invalid choice: 'x'"),
    ],
)
def test_values_that_cannot_be_are_refused_first(arguments, said, tmp_path, capsys):
    own = "--own", tmp_path / "own.jsonl", "--out", tmp_path / "out"
    assert said in refused(capsys, *arguments, *own)


def test_it_runs_in_one_process(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "runs in one process" in refused(capsys, "mtp", "--own", "x", "--out", "y")
