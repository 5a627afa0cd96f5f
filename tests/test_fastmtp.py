"""FastMTP: the head, drafting, trees, training, vocabularies, checkpoints."""

import json
import random

import pytest
import torch
from conftest import SHARED, needs_shared, random_model, random_tokens
from safetensors.torch import load_file, save_file
from test_distill import run, target  # noqa: F401  a small checkpoint
from test_generate import TOKENIZER, byte_model
from test_pretrain import data  # noqa: F401  a small corpus
from test_tokenizer import byte_tokenizer
from tokenizers import Tokenizer as Backend

from minispec import Sampling, UserError, distill, fastmtp, generate, load, vocabulary
from minispec.certify import random_head, switching
from minispec.checkpoint import save
from minispec.methods.fastmtp import PREFIX, Drafter, Length, mtp_tensors, load_mtp, save_mtp
from minispec.generate import decode
from minispec.tokenizer import Tokenizer
from minispec.tree import Tree
from minispec.methods.vocabulary import Compressed, Language, Subset, count, load_vocabulary, votes

# ---- the head and its drafts ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "k, tree", [(k, t) for k in range(1, 7) for t in (0, 1, 7)] + [("auto", 0)]
)
def test_greedy_tokens_are_plain_decoding_s(k, tree):
    for seed in range(2):
        model, prompt = random_model(seed), random_tokens(1 + 3 * seed, seed)
        head = random_head(model, seed)
        plain = decode(model, None, prompt, max_new_tokens=30)
        for words in (None, switching(model)):
            result = decode(model, None, prompt, "fastmtp", head=head, k=k, tree=tree,
                            vocabulary=words, max_new_tokens=30)  # fmt: skip
            assert result.tokens == plain.tokens


def test_a_prompt_of_one_token_and_the_end_of_the_context():
    model = random_model(context=40)
    head = random_head(model, 0)
    plain = decode(model, None, [5], max_new_tokens=1000)
    for options in ({"k": 3}, {"k": 3, "tree": 6}):
        result = decode(model, None, [5], "fastmtp", head=head, max_new_tokens=1000, **options)
        assert result.tokens == plain.tokens and result.finish_reason == "context"


def test_it_goes_on_from_a_kept_cache():
    """The rows of a kept cache have no hidden states: the head begins behind them."""
    model, cache = random_model(), random_model().new_cache()
    head, prompt = random_head(model, 1), random_tokens(9)
    for n in (9, 4, 12):
        plain = decode(model, None, prompt, max_new_tokens=n)
        options = {"head": head, "cache": cache, "max_new_tokens": n}
        assert decode(model, None, prompt, "fastmtp", **options).tokens == plain.tokens
        prompt = prompt + plain.tokens + [3]


@pytest.mark.parametrize(("asked", "own"), [(0.0, None), (1e-9, None), (0.7, None), (0.7, 2.0)])
def test_a_tree_is_as_sure_as_drafts_are_drawn(monkeypatch, asked, own):
    seen, tree = [], Drafter.tree

    def watched(drafter, root, nodes, depth, words, temperature):
        seen.append(temperature)
        return tree(drafter, root, nodes, depth, words, temperature)

    monkeypatch.setattr(Drafter, "tree", watched)
    model = random_model()
    options = {"head": random_head(model, 0), "k": 2, "tree": 3, "temperature": asked}
    if own:
        options["draft_sampling"] = Sampling(own)
    decode(model, None, [1, 2, 3], "fastmtp", max_new_tokens=9, **options)
    assert set(seen) == {own or asked}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("temperature", [2.0, 1.0, 0.5, 0.0])
def test_the_tree_is_the_best_of_all_by_the_product_of_probabilities(temperature, seed):
    """Against every path, its laws from the head run anew along it; BEAM lifted."""
    model = random_model(seed, vocab_size=5)
    head, prompt = random_head(model, seed), random_tokens(6, seed, vocab=5)
    drafter = Drafter(head, model, 64, 0)
    drafter.extend(model(prompt[:-1])[0], prompt[1:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fastmtp, "BEAM", 100)
        tree = drafter.tree(prompt[-1], 12, 3, Subset(model), temperature)
    chance = {(): 1.0}
    for path in [()] + [(a,) for a in range(5)] + [(a, b) for a in range(5) for b in range(5)]:
        hidden, tokens = model(prompt[:-1])[0], prompt[1:]
        for token in path:
            row = Drafter(head, model, 64, 0).run(hidden, tokens)[-1:]
            hidden, tokens = torch.cat([hidden, row]), tokens + [token]
        logits = model.logits(Drafter(head, model, 64, 0).run(hidden, tokens)[-1])
        law = (logits / max(temperature, 0.5)).softmax(-1)
        chance |= {(*path, token): chance[path] * float(law[token]) for token in range(5)}
    best = sorted((p for p in chance if p), key=lambda p: -chance[p])[:12]
    paths = {0: ()}
    for node in range(1, len(tree)):
        paths[node] = (*paths[tree.parents[node]], tree.tokens[node])
    assert set(paths.values()) - {()} == set(best)
    assert drafter.cache.length == len(prompt) - 1


def test_sampled_drafts_carry_the_law_they_were_drawn_from():
    model, seen = random_model(2), []
    words = switching(model)

    class Watching:
        def bernoulli(self, p):
            return p > 0.5

        def categorical(self, law):
            seen.append(law)
            return int(law.argmax())

    drafter = Drafter(random_head(model, 0), model, 64, 0)
    drafter.extend(model([1, 2, 3])[0], [2, 3, 4])
    subset = words.pick([0] * 9)
    guess, laws = drafter.chain(3, Sampling(1.0), Watching(), subset)
    assert len(guess) == 3 and all(torch.equal(a, b) for a, b in zip(laws, seen))
    for law, token in zip(laws, guess):
        assert law.shape == (32,) and abs(float(law.sum()) - 1) < 1e-9 and law[token] > 0
        outside = [i for i in range(32) if i not in subset.ids]
        assert outside and float(law[outside].sum()) == 0


def test_k_follows_what_was_accepted_and_what_it_costs():
    length = object.__new__(Length)
    length.curve, length.draft = [0.0] + [1 + 0.02 * (n - 1) for n in range(1, 65)], 0.1
    length.rate = [0.8, 0.1, 0.1, 0.1]
    for _ in range(200):  # the second draft is never tried as long as it seems bad, but it is not
        k = length.best()
        length.observe(Tree.chain(0, [1] * k), list(range(k + 1)))
    assert length.best() == 4
    for _ in range(100):
        length.observe(Tree.chain(0, [1] * length.best()), [0])
    assert length.best() == 1
    length.rate, tried = [0.8] * 8, []
    for i in range(400):  # 7 of 10 first drafts are right, and no second one
        tried.append(length.best())
        path = [0, 1] if i % 10 in (0, 1, 3, 4, 6, 7, 9) else [0]
        length.observe(Tree.chain(0, [1] * tried[-1]), path)
    assert tried[100:].count(1) > 0.8 * 300
    length.rate = [0.8] * 8
    for i in range(100):  # what is not reached says nothing
        length.observe(Tree.chain(0, [1] * 4), [[0], [0, 1, 2, 3, 4]][i % 2])
    assert min(length.rate[1:4]) > 0.95 and abs(length.rate[0] - 0.5) < 0.1
    length.rate = [0.5] * 6
    by_hand = (1 + 0.5 + 0.25) / (1 + 0.02 * 2 + 2 * 0.1)
    assert abs(length.speedup(2) - by_hand) < 1e-12


# ---- training ------------------------------------------------------------------------------------


def documents_of(model, seed: int = 0, sizes=(9, 6, 12)):
    rows = [random_tokens(n, seed + n) for n in sizes]
    states = [model(row)[0] for row in rows]
    return rows, distill.Documents(rows, [3] * len(rows), states)


@pytest.mark.parametrize("seed", range(3))
def test_aligned_training_is_incremental_drafting(seed):
    """Step k's logits at row i = the head run row by row: extended to i, then on its own output
    with the true tokens."""
    model = random_model(seed)
    head, (rows, documents) = random_head(model, seed), documents_of(model, seed)
    loss = distill.MTPLoss(head, model, documents, 4, 0.6, True, torch.float64)
    tokens = torch.tensor([rows[2] + [0] * 4])
    logits = loss.steps(documents.hidden[2][None, :10], tokens)
    for i in range(8):
        drafter = Drafter(head, model, 64, 0)
        drafter.extend(documents.hidden[2][: i + 1], rows[2][1 : i + 2])
        out = drafter.last
        for k in range(4):
            worst = (model.logits(out)[0] - logits[k][0, i]).abs().max()
            assert worst < 1e-10, (i, k)
            out = drafter.run(out, [tokens[0, i + k + 2].item()])
            drafter.cache.commit([0])


def test_parallel_training_keeps_position_and_mask_and_so_differs_from_step_2_on():
    model = random_model(1)
    head, (rows, documents) = random_head(model, 1), documents_of(model)
    tokens = torch.tensor([rows[0] + [0] * 4])
    hidden = documents.hidden[0][None, :7]
    both = [
        distill.MTPLoss(head, model, documents, 3, 0.6, aligned, torch.float64).steps(
            hidden, tokens
        )
        for aligned in (True, False)
    ]
    assert torch.allclose(both[0][0], both[1][0])
    assert (both[0][1] - both[1][1]).abs().max() > 1e-3
    x, now = hidden, model.plan(7, None, None, None)
    for k in range(3):  # the published forward, by hand
        x = head(x, model.model.embed_tokens(tokens[:, k + 1 : k + 8]), now)
        assert torch.allclose(model.logits(x), both[1][k])


@pytest.mark.parametrize("seed", range(3))
def test_soft_labels_are_the_target_s_laws_where_the_labels_are(seed):
    model = random_model(seed, dtype=torch.float32)
    head, (rows, documents) = random_head(model, seed), documents_of(model, seed)
    loss = distill.MTPLoss(head, model, documents, 3, 0.6, True, torch.float32, soft=True)
    logits = loss.steps(*loss.gather(torch.arange(3))[:2])
    by_hand = 0.0
    for k, weight in enumerate(loss.weights):
        each = [
            -(model.logits(documents.hidden[i][at - 1]).softmax(-1)
              * logits[k][i, at - k - 2].log_softmax(-1)).sum()
            for i, row in enumerate(rows)
            for at in range(max(3, k + 2), len(row))  # of the token generated there
        ]  # fmt: skip
        by_hand += weight * sum(each) / len(each)
    assert abs(loss(torch.arange(3)) - by_hand) < 1e-5


def test_the_loss_is_the_paper_s_over_generated_tokens_of_one_document_only():
    model = random_model(dtype=torch.float32)
    head, (rows, documents) = random_head(model, 0), documents_of(model)
    loss = distill.MTPLoss(head, model, documents, 3, 0.6, True, torch.float32)
    assert [round(w, 3) for w in loss.weights] == [0.510, 0.306, 0.184]
    total = loss(torch.tensor([0, 1, 2]))
    by_hand = 0.0
    for k, weight in enumerate(loss.weights):
        logs = []
        for row, hidden in zip(rows, documents.hidden):
            tokens = torch.tensor([row + [0] * 4])
            logits = loss.steps(hidden[None, : len(row) - 2], tokens)[k][0].log_softmax(-1)
            for i in range(len(row) - 2):
                if 3 <= i + k + 2 < len(row):
                    logs.append(-logits[i, row[i + k + 2]])
        by_hand += weight * torch.stack(logs).mean()
    assert torch.allclose(total, by_hand, atol=1e-5)
    for p in head.parameters():
        p.requires_grad_(True)
    loss(torch.tensor([0, 2])).backward()
    assert all(p.grad is not None for p in head.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_a_loaded_target_s_packed_weights_let_gradients_through(tmp_path, monkeypatch):
    """lm_head of a loaded model is packed where it is large, and packed products have none."""
    monkeypatch.setattr("minispec.linear.SMALL", 2**16)
    save(random_model(vocab_size=9000, dtype=torch.float32), None, tmp_path)
    model, _ = load(tmp_path, "float32", "cpu")
    assert model.head.packed is not None
    head, (_, documents) = random_head(model, 0), documents_of(model)
    documents.hidden = [hidden.detach() for hidden in documents.hidden]
    for p in head.parameters():
        p.requires_grad_(True)
    distill.MTPLoss(head, model, documents, 2, 0.6, True, torch.float32)(torch.arange(3)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())


def test_what_a_run_leaves_behind_can_be_trained_on():
    """Runs are in inference mode, whose tensors no gradient passes; what they keep is not."""
    model = random_model(0)
    words = Compressed({"en": Language((3, 1, 4, 15, 9), (5, 4, 3, 2, 1))}, model)
    run = decode(
        model, None, random_tokens(5), "fastmtp", head=random_head(model, 0), vocabulary=words,
        max_new_tokens=9,
    )  # fmt: skip
    assert not any(step.tree.mask.is_inference() for step in run.rounds)
    model.model.norm.weight.requires_grad_(True)
    model.model.layers[0].input_layernorm.weight.requires_grad_(True)
    hidden = model([3], run.cache)  # one row: cos and sin are views of the table
    assert run.cache.k[0].grad_fn is not None  # of rows written in place
    words.pick([3]).logits(model, hidden).square().sum().backward()
    for norm in (model.model.norm, model.model.layers[0].input_layernorm):
        assert norm.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("mode", ["aligned", "parallel"])
def test_a_head_learns_resumes_and_is_used(target, data, tmp_path, capsys, mode):  # noqa: F811
    own, small = tmp_path / "own.jsonl", ["--context", 40, "--batch-tokens", 320, "--device", "cpu"]
    run("generate", "--model", target, "--data", data, "--tokens", 20, "--batch", 16,
        "--documents", 100, "--device", "cpu", "--out", own, "--top-k", 3)  # fmt: skip
    options = ["mtp", "--model", target, "--mode", mode, "--save-every", 4, *small]
    whole, parts, corpus = tmp_path / "whole", tmp_path / "parts", tmp_path / "corpus"
    run(*options, "--own", own, "--out", whole, "--steps", 10)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        train = distill.train

        def stopped(trainer, args, objective):
            args.steps = 4
            train(trainer, args, objective)
            raise KeyboardInterrupt

        patch.setattr(distill, "train", stopped)
        argv = [*options, "--own", own, "--out", parts, "--steps", 10]
        distill.mtp(distill.parse(list(map(str, argv))))
    run(*options, "--own", own, "--out", parts, "--steps", 10)
    tensors = [load_file(folder / "model.safetensors") for folder in (whole, parts)]
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
    run(*options, "--data", data, "--documents", 60, "--out", corpus, "--steps", 2, "--k", 1)
    card = (whole / "README.md").read_text()
    assert "0.510, 0.306, 0.184" in card and mode in card and str(tmp_path) not in card
    soft = [*options, "--own", own, "--out", parts, "--soft"]
    with pytest.raises(SystemExit):  # soft labels do not go on from hard ones
        run(*soft, "--steps", 12)
    assert "of another training" in capsys.readouterr().err
    (parts / "training.pt").unlink()
    run(*soft, "--steps", 2)
    assert "by the target's laws (soft labels)" in (parts / "README.md").read_text()
    config = json.loads((whole / "config.json").read_text())
    assert config["num_speculative_steps"] == 3 and config["num_nextn_predict_layers"] == 1
    capsys.readouterr()
    command = ["ab", "--model", target, "--method", "fastmtp", "--heads", whole, "--device", "cpu",
               "--json", "--max-new-tokens", 9]  # fmt: skip
    generate.main(list(map(str, command)))
    result = json.loads(capsys.readouterr().out)
    assert result["stats"]["drafted"] > 0 and len(result["tokens"]) == 9
    with pytest.raises(SystemExit):
        run("mtp", "--model", target, "--out", whole, "--steps", 2, *small)
    assert "either --own" in capsys.readouterr().err


# ---- vocabularies --------------------------------------------------------------------------------


def test_the_set_is_by_frequency_with_forced_tokens_first():
    texts = [[5, 5, 5, 7, 7, 2], [2, 9, 9, 9, 9]]
    assert count(texts, [3, 7], 4) == Language((3, 7, 9, 5), (0, 2, 4, 3))
    assert count(texts, [], 99).ids == (9, 5, 2, 7)  # equal counts by id


def test_the_small_head_is_the_full_one_s_rows():
    model = random_model()
    subset, hidden = Subset(model, [4, 30, 7]), model([1, 2])[0]
    assert torch.allclose(subset.logits(model, hidden), model.logits(hidden)[:, [4, 30, 7]])
    assert [subset.full(j) for j in range(3)] == [4, 30, 7]
    law = subset.scatter(torch.tensor([0.5, 0.2, 0.3]))
    assert law.shape == (32,) and law[[4, 30, 7]].tolist() == pytest.approx([0.5, 0.2, 0.3])
    everything = Compressed({}, model).pick([1, 2])
    assert torch.equal(everything.logits(model, hidden), model.logits(hidden))
    assert everything.full(9) == 9 and everything.scatter(law) is law


def test_the_language_is_that_of_the_latest_tokens():
    languages = {
        "en": Language((0, 1, 2, 3), (50, 90, 90, 50)),
        "zh": Language((0, 11, 12), (50, 80, 80)),
        "code": Language((0, 21, 22, 3), (50, 70, 70, 50)),
    }
    words = Compressed(languages, random_model())
    assert words.votes == {1: "en", 2: "en", 11: "zh", 12: "zh", 21: "code", 22: "code"}
    assert words.spoken([1, 2, 0, 1]) == ("en",)
    assert words.spoken([1, 2] * 20 + [11, 12] * 20) == ("zh",)  # the text has changed
    assert words.spoken([1, 1, 21, 22]) == ("code", "en")  # mixed
    assert words.spoken([1] * 9 + [21]) == ("en",)
    assert words.spoken([0, 3, 99]) == words.spoken([]) == ("code", "en", "zh")
    assert set(words.pick([1, 1, 21, 22]).ids) == {0, 1, 2, 3, 21, 22}
    assert words.pick([11]) is words.pick([12, 11])
    assert votes({"one": Language((1,), (5,))}) == {}


def test_files_are_written_read_cut_and_checked(tmp_path):
    model, path = byte_model(), tmp_path / "v.json"
    languages = {"en": count([[97, 98, 98]], TOKENIZER.special_ids, 50)}
    vocabulary.save_vocabulary(languages, TOKENIZER, path)
    words = load_vocabulary(path, model, TOKENIZER)
    assert words.languages == languages
    assert load_vocabulary(path, model, TOKENIZER, 2).languages["en"].ids == languages["en"].ids[:2]
    torch.save([9, 4, 9, 7], tmp_path / "freq.pt")
    assert load_vocabulary(tmp_path / "freq.pt", model).pick([1]).ids == [9, 4, 7]
    other = byte_tokenizer()
    other.backend.add_tokens(["extra"])
    for bad, message in (
        (lambda: load_vocabulary(path, model, other), "another tokenizer"),
        (lambda: load_vocabulary(path, random_model(), None), "outside the target's vocabulary"),
        (lambda: load_vocabulary(tmp_path / "no.json", model), "no such vocabulary file"),
    ):
        with pytest.raises(UserError, match=message):
            bad()
    for bad in "3", '{"ids": [1, 2], "counts": [-1, 5]}', '{"ids": [1, 2], "counts": [5]}':
        path.write_text('{"languages": {"en": ' + bad + "}}")
        with pytest.raises(UserError, match="not a file of minispec.methods.vocabulary"):
            load_vocabulary(path, model)
    torch.save({"a": "b"}, tmp_path / "odd.pt")
    with pytest.raises(UserError, match="not a list of token ids"):
        load_vocabulary(tmp_path / "odd.pt", model)


def test_the_command_counts_a_corpus(target, tmp_path, capsys):  # noqa: F811
    (tmp_path / "a.txt").write_text("abab\n<|endoftext|>\nabc")
    (tmp_path / "z.txt").write_text("从前")
    out = tmp_path / "v.json"
    text = [f"en={tmp_path / 'a.txt'}", f"zh={tmp_path / 'z.txt'}"]
    options = ["--model", str(target), "--size", "12", "--out", str(out)]
    vocabulary.main([*options, "--text", text[0], "--text", text[1]])
    words = load_vocabulary(out, *load(target, "float32", "cpu"))
    special = load(target)[1].special_ids
    assert set(special) <= set(words.languages["en"].ids) & set(words.languages["zh"].ids)
    (a,) = TOKENIZER.encode("a", special=False)
    assert a in words.languages["en"].ids and a not in words.languages["zh"].ids
    for wrong in (
        ["--text", "en"],
        ["--text", "en=nowhere.txt"],
        ["--text", "=" + text[0][3:]],
        ["--text", text[0], "--text", text[0]],
        ["--text", text[0], "--size", "0"],
    ):
        with pytest.raises(SystemExit) as ended:
            vocabulary.main([*options, *wrong])
        assert ended.value.code == 2


@needs_shared
def test_frequencies_over_a_real_large_vocabulary():
    """Qwen2's 151,643 tokens: a language's set is small, and a text's language is told."""
    folder = SHARED / "tokenizers" / "qwen2"
    tokenizer = Tokenizer(Backend.from_file(str(folder / "tokenizer.built.json")))
    texts = {
        "en": (SHARED / "data" / "train" / "stories_en.txt").read_text()[:400_000],
        "zh": (SHARED / "data" / "train" / "stories_zh.txt").read_text()[:200_000],
    }
    special = tokenizer.special_ids
    languages = {
        name: count([tokenizer.encode(text[2000:])], special, 8000) for name, text in texts.items()
    }
    model = random_model(vocab_size=tokenizer.size, hidden_size=8, heads=2, kv_heads=1)
    words = Compressed(languages, model)
    for name, text in texts.items():
        assert words.spoken(tokenizer.encode(text[:200])) == (name,)
        held_out = tokenizer.encode(text[:2000])
        inside = sum(token in set(languages[name].ids) for token in held_out) / len(held_out)
        assert inside > 0.9 and len(languages[name].ids) < tokenizer.size / 15
        assert set(special) <= set(languages[name].ids)


# ---- checkpoints ---------------------------------------------------------------------------------


def tiny_mimo(folder) -> tuple:
    """A MiMo checkpoint as published: qwen2-like, with the head inside the model."""
    model = random_model(model_type="mimo", qkv_bias=True, tied=False)
    head = random_head(model, 5)
    save(model, None, folder)
    whole = load_file(folder / "model.safetensors") | mtp_tensors(head)
    save_file(whole, folder / "model.safetensors")
    return model, head


def test_a_mimo_checkpoint_gives_model_and_head(tmp_path, capsys):
    model, head = tiny_mimo(tmp_path)
    assert len(mtp_tensors(head)) == 16  # as many as MiMo's layer has
    loaded, _ = load(tmp_path, "float64", "cpu")
    again = load_mtp(tmp_path, loaded)
    plain = decode(model, None, [1, 2, 3], max_new_tokens=20)
    result = decode(loaded, None, [1, 2, 3], "fastmtp", head=again, max_new_tokens=20)
    assert result.tokens == plain.tokens
    for (name, a), (_, b) in zip(head.named_parameters(), again.named_parameters()):
        assert torch.equal(a, b), name
    generate.main(["--model", str(tmp_path), "--method", "fastmtp", "--prompt-ids", "1,2,3",
                   "--max-new-tokens", "5", "--device", "cpu", "--json"])  # fmt: skip
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 5


def test_a_head_in_a_file_of_its_own_and_back(tmp_path):
    model, head = random_model(), random_head(random_model(), 3)
    save_mtp(head, tmp_path, "base", None, torch.float64, [1.0])
    for source in (tmp_path, tmp_path / "model.safetensors"):
        again = load_mtp(source, model)
        assert all(torch.equal(a, b) for a, b in zip(head.parameters(), again.parameters()))
    assert set(load_file(tmp_path / "model.safetensors")) == set(mtp_tensors(head))


def test_a_whole_checkpoint_is_written_as_mimo_reads_it(tmp_path):
    model = random_model(model_type="mimo", qkv_bias=True, tied=False)
    head = random_head(model, 5)
    save(model, None, tmp_path, extra=mtp_tensors(head))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1 and config["model_type"] == "mimo"
    loaded, _ = load(tmp_path, "float64", "cpu")
    again = load_mtp(tmp_path, loaded)
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), again.parameters()))


def test_a_missing_or_foreign_tensor_is_an_error(tmp_path):
    model, head = tiny_mimo(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    for change, message in (
        ({PREFIX + "input_proj.weight": None}, "lacks tensors: input_proj.weight"),
        ({PREFIX + "self_attn.q_proj.bias": None}, "lacks tensors: self_attn.q_proj.bias"),
        ({PREFIX + "mtp_block.x": torch.zeros(2)}, "unexpected tensors: mtp_block.x"),
        ({PREFIX + "input_proj.weight": torch.zeros(16, 16)}, "misshapen"),
    ):
        tensors = {n: t for n, t in (whole | change).items() if t is not None}
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=message):
            load_mtp(tmp_path, model)
    save_file(whole, tmp_path / "model.safetensors")
    width = model.config.hidden_size
    other = random_model(hidden_size=2 * width)
    with pytest.raises(UserError, match=f"hidden size {width}, but the target's is {2 * width}"):
        load_mtp(tmp_path, other)
    save(model, None, tmp_path)
    with pytest.raises(UserError, match="has no prediction head"):
        load_mtp(tmp_path, model)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"k": 0}, "k 0: must be auto or at least 1"),
        ({"tree": -1}, "tree -1: must be 0"),
        ({"k": "auto", "tree": 4}, "k auto is for chains"),
    ],
)
def test_impossible_sizes_are_refused(options, message):
    model = random_model()
    with pytest.raises(UserError, match=message):
        decode(model, None, [1, 2], "fastmtp", head=random_head(model, 0), **options)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tree", "wide"], "must be a number of nodes for fastmtp"),
        (["--heads", "nowhere"], "no such directory: nowhere"),
        (["--vocabulary", "nowhere.json"], "no such vocabulary file"),
        (["--k", "many"], "--k many: must be a number"),
        (["--vocabulary-size", "0"], "vocabulary size 0: must be at least 1"),
        (["--vocabulary", "none", "--vocabulary-size", "9"], "needs a --vocabulary"),
    ],
)
def test_wrong_flags_are_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        generate.main(["x", "--method", "fastmtp", *arguments])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_another_vocabulary_than_the_text_s_costs_speed_not_text():
    model, rng = random_model(3), random.Random(0)
    words = Compressed({"wrong": count([rng.choices(range(32), k=9)], [], 4)}, model)
    plain = decode(model, None, [1, 2, 3], max_new_tokens=40)
    result = decode(model, None, [1, 2, 3], "fastmtp", head=random_head(model, 1),
                    vocabulary=words, max_new_tokens=40)  # fmt: skip
    assert result.tokens == plain.tokens


@pytest.mark.gpu
def test_on_a_gpu_it_equals_plain_decoding():
    model, head = random_model().cuda(), random_head(random_model(), 0).cuda()
    plain = decode(model, None, [1, 2, 3], max_new_tokens=40)
    for options in ({"k": 3}, {"k": 3, "tree": 6}, {"k": "auto"}):
        result = decode(model, None, [1, 2, 3], "fastmtp", head=head, max_new_tokens=40, **options)
        assert result.tokens == plain.tokens
