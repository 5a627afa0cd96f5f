"""Heads, trees and vocabularies: every published layout can be loaded, and ours is one of them."""

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    ROOT,
    SHARED,
    equal_up_to_rounding,
    last_error_line,
    needs_shared,
    random_model,
    random_tokens,
)
from safetensors.torch import load_file, save_file

from minispec import UserError, load
from minispec.certify.toys import letter_tokenizer, random_medusa_heads, random_mtp_head, randomise
from minispec.checkpoints.heads import (
    PUBLISHED_TREES,
    load_medusa,
    load_mtp,
    load_vocabulary,
    save_measured,
    save_medusa,
    save_mtp,
    save_vocabulary,
)
from minispec.checkpoints.load import save
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.checkpoints.weights import write_tensors
from minispec.cli import read_json
from minispec.distill.__main__ import main as distill
from minispec.generate import decode
from minispec.methods.medusa import new_heads, with_prefixes
from minispec.methods.vocabulary import count
from minispec.model import Transformer

TOKENIZER, OTHER_TOKENIZER = letter_tokenizer(32), letter_tokenizer(31)
UP = "1.0.linear.weight"


def rejects(match: str, read, *args, **options) -> None:
    with pytest.raises(UserError, match=match) as caught:
        read(*args, **options)
    assert "\n" not in str(caught.value)


def medusa_tensors(model, heads: int, layers: int, shared: bool = False) -> dict[str, torch.Tensor]:
    """Random tensors under the names of FasterDecoding's files."""
    return randomise(new_heads(heads, layers, model, shared), heads).state_dict()


@pytest.mark.parametrize("layout", ["v1.pt", "v1.safetensors", "v2", "1.0", "file"])
def test_every_layout_loads_even_if_its_config_has_wrong_counts(tmp_path, layout):
    model, source = random_model(), tmp_path
    tensors = medusa_tensors(model, 5, 2, shared=layout == "v2")
    if layout == "1.0":
        save(model, None, tmp_path)
        parts = {f"medusa_head.{name}": t for name, t in tensors.items()}
        write_tensors(tmp_path / "model.safetensors", dict(model.named_parameters()) | parts)
        again, _ = load(tmp_path, "float64", "cpu")  # the model itself loads without its heads
        assert equal_up_to_rounding(again([1, 2]), model([1, 2]))
    elif layout in ("v1.pt", "file"):
        torch.save(tensors, tmp_path / "medusa_lm_head.pt")
        source = tmp_path / "medusa_lm_head.pt" if layout == "file" else tmp_path
    else:
        save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    if layout != "1.0":
        claims = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "x"}
        (tmp_path / "config.json").write_text(json.dumps(claims))
    loaded = load_medusa(source, model)
    assert len(loaded) == 5 and loaded.shared == (layout == "v2")
    assert loaded.tree == [path for path in PUBLISHED_TREES["mc_sim_7b_63"] if len(path) <= 5]
    last = model(random_tokens(4))[0, -1]
    for i, logits in enumerate(loaded(last, model)):
        hidden = last
        for j in range(2):
            part = tensors[f"{i}.{j}.linear.weight"], tensors[f"{i}.{j}.linear.bias"]
            hidden = hidden + F.silu(F.linear(hidden, *part))
        projection = tensors.get(f"{i}.2.weight", model.lm_head.weight)
        assert torch.allclose(logits, F.linear(hidden, projection))


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_heads_in_vllm_s_layout(tmp_path, prefix):
    """In a folder of their own, also without biases and with one projection for all heads."""
    model = random_model()
    heads = random_medusa_heads(model, 0, 3)
    stored = {}
    for i, (block, projection) in enumerate(heads):
        stored[f"{prefix}blocks.{i}.layers.0.weight"] = block.linear.weight
        stored[f"{prefix}blocks.{i}.layers.0.bias"] = block.linear.bias
        stored[f"{prefix}lm_heads.{i}.weight"] = projection.weight
    (tmp_path / "config.json").write_text('{"model_type": "medusa", "num_heads": 3}')
    hidden = model([1, 2, 3])

    def read(tensors) -> torch.Tensor:
        write_tensors(tmp_path / "model.safetensors", tensors)
        return load_medusa(tmp_path, model)(hidden, model)

    assert equal_up_to_rounding(read(stored), heads(hidden, model))
    some = {n: t for n, t in stored.items() if not n.endswith(("bias", "1.weight", "2.weight"))}
    some |= {n: t for n, t in stored.items() if "blocks" in n and n.endswith("weight")}
    for block, projection in heads:
        block.linear.bias.zero_()
        projection.weight.copy_(heads[0][-1].weight.clone())
    assert equal_up_to_rounding(read(some), heads(hidden, model))
    with pytest.raises(UserError, match="token_map of vLLM's layout is not supported"):
        read(stored | {"token_map": torch.arange(9)})
    with pytest.raises(UserError, match="Missing key.*1.1.weight"):
        read({n: t for n, t in stored.items() if n != f"{prefix}lm_heads.1.weight"})


@pytest.mark.parametrize("shared", [True, False])
def test_heads_are_saved_and_loaded_and_the_tree_is_updated(tmp_path, shared):
    model = random_model()
    heads = randomise(new_heads(3, 2, model, shared), 0)
    heads.tree, heads.accuracy = [(0,), (0, 1)], torch.rand(3, 10)
    save_medusa(heads, tmp_path, "base", TOKENIZER, torch.float64)
    again, hidden = load_medusa(tmp_path, model, TOKENIZER), model([1, 2, 3])
    assert equal_up_to_rounding(again(hidden, model), heads(hidden, model))
    assert again.tree == heads.tree and torch.allclose(again.accuracy, heads.accuracy.double())
    names = load_file(tmp_path / "medusa_lm_head.safetensors").keys()
    assert ("0.2.weight" in names) == (not shared) and "2.1.linear.bias" in names
    before = json.loads((tmp_path / "config.json").read_text())
    assert (before["medusa_num_heads"], before["medusa_num_layers"]) == (3, 2)
    heads.tree = [(0,), (1,), (1, 0)]
    save_measured(heads, tmp_path)
    after = json.loads((tmp_path / "config.json").read_text())
    assert load_medusa(tmp_path, model, TOKENIZER).tree == heads.tree
    assert before | {"medusa_choices": [[0], [1], [1, 0]]} == after


@needs_shared
def test_the_published_trees_equal_the_reference():
    trees = json.loads((SHARED / "reference" / "medusa_trees.json").read_text())
    for name, paths in trees.items():  # complete: with every prefix of every path
        assert sorted(map(tuple, paths)) == with_prefixes(PUBLISHED_TREES[name], 5, 10)
    assert trees.keys() == PUBLISHED_TREES.keys()


def test_heads_that_do_not_fit_are_rejected_with_a_reason(tmp_path):
    model = random_model()
    rejects("has no weights", load_medusa, tmp_path, model)
    rejects("no such directory", load_medusa, tmp_path / "nowhere", model)
    good = medusa_tensors(model, 3, 1)
    for tensors, match in (
        (medusa_tensors(random_model(hidden_size=32), 3, 1), r"do not fit.*\[32, 32\].*\[16,"),
        (medusa_tensors(random_model(vocab_size=40), 3, 1), r"do not fit.*\[40, 16\].*\[32,"),
        ({k: t for k, t in good.items() if k != "1.0.linear.bias"}, "Missing.*1.0.linear.bias"),
        ({k: t for k, t in good.items() if k != "2.1.weight"}, "Missing.*2.1.weight"),
        (good | {"0.q.weight": torch.zeros(2)}, "Unexpected key.*0.q.weight"),
        ({UP: 3}, "must map names to tensors"),
        ({3: torch.zeros(2)}, 'Unexpected key.*"3"'),
        ({"0.0.weight": torch.tensor(1.0)}, "do not fit"),
        ({"7.0.weight": torch.zeros(4, 4)}, "Missing key"),
        ({f"{'9' * 5000}.0.weight": torch.zeros(4, 4)}, "do not fit the model"),
        ({}, "has no heads"),
        ({UP: Evil()}, "code, which is never unpickled"),
    ):
        torch.save(tensors, tmp_path / "medusa_lm_head.pt")
        rejects(match, load_medusa, tmp_path, model)


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit('ran')",)


@pytest.mark.parametrize(
    "config, match",
    [
        *(({"medusa_choices": tree}, "medusa_choices") for tree in ([[0] * 4], [[-1]], [0], 7)),
        *(({"medusa_accuracy": a}, "medusa_accuracy") for a in ([[0.5]], [0.5] * 3, "high", [[]])),
        ({"medusa_choices": json.loads("[" * 500 + "]" * 500)}, "medusa_choices"),
        ({"tokenizer_fingerprint": "0123"}, "another tokenizer"),
        ([], "must hold a JSON object"),
        ({}, None),
    ],
)
def test_a_config_that_does_not_fit_the_heads_is_rejected(tmp_path, config, match):
    model = random_model()
    save_medusa(random_medusa_heads(model, 0, 3), tmp_path, "base", None, torch.float32)
    (tmp_path / "config.json").write_text(json.dumps(config))
    if match:
        return rejects(match, load_medusa, tmp_path, model, TOKENIZER)
    load_medusa(tmp_path, model, TOKENIZER)
    for name, text in OTHER_TOKENIZER.files().items():
        (tmp_path / name).write_text(text)
    rejects("another tokenizer", load_medusa, tmp_path, model, TOKENIZER)


def test_heads_of_a_tokenizer_with_other_added_tokens_are_accepted(tmp_path):
    """By its tokenizer.json or its fingerprint; an old one is the hash of the whole vocabulary."""
    model = random_model()
    heads, words = random_medusa_heads(model, 0, 3), ["<a>", "<b>", "<c>"]
    first, second = letter_tokenizer(30), letter_tokenizer(30)
    first.backend.add_tokens(words[:1]), second.backend.add_tokens(words)
    for ours, theirs in (first, second), (second, first), (first, letter_tokenizer(30)):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        save_medusa(heads, folder, "base", theirs, torch.float32)
        load_medusa(folder, model, ours)
        rejects("another tokenizer", load_medusa, folder, model, TOKENIZER)
        (folder / "tokenizer.json").write_text(theirs.backend.to_str())
        load_medusa(folder, model, ours)
        rejects("another tokenizer", load_medusa, folder, model, TOKENIZER)
    old = {"tokenizer_fingerprint": first.fingerprint[:16]}
    (tmp_path / "0" / "config.json").write_text(json.dumps(old))
    (tmp_path / "0" / "tokenizer.json").unlink()
    for ours in first, second:
        load_medusa(tmp_path / "0", model, ours)
    for ours in TOKENIZER, OTHER_TOKENIZER:
        rejects("another tokenizer", load_medusa, tmp_path / "0", model, ours)


def test_shipped_heads_fit_their_tokenizer_with_a_token_more():
    weights = ROOT / "weights"
    tokenizer = Tokenizer.from_directory(weights / "target")
    files = [weights / "medusa" / "config.json", *weights.glob("mtp*/*.json")]
    for more in "", "<new>", "<newer>":
        tokenizer.backend.add_tokens([more] if more else [])
        assert all(tokenizer.matches(read_json(f)["tokenizer_fingerprint"]) for f in files)


@pytest.mark.parametrize("name, method, config", [
    ("Medusa heads", "medusa", {"medusa_num_heads": 3, "model_type": None}),
    ("Medusa heads", "medusa", {"num_heads": 3, "model_type": "medusa"}),  # vLLM's
    ("an MTP head", "fastmtp", {"model_type": ...}),  # as in older files
    ("an MTP head", "fastmtp", {}),
])  # fmt: skip
def test_heads_given_as_a_model_or_a_draft_are_named(name, method, config, tmp_path):
    save_mtp(random_mtp_head(random_model(), 0), tmp_path, "base", None, torch.float32, [1.0])
    config = json.loads((tmp_path / "config.json").read_text()) | config
    config = {key: value for key, value in config.items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rejects(f"{name}.* with --heads and --method {method}$", load, tmp_path)


def mimo_tensors(head) -> dict[str, torch.Tensor]:
    """The head's tensors under MiMo's names."""
    return {f"model.mtp_layers.0.{name}": t for name, t in head.state_dict().items()}


def tiny_mimo(folder) -> tuple:
    """Write a MiMo checkpoint as published: like qwen2, with the head inside the model."""
    model = random_model(model_type="mimo", qkv_bias=True, tied=False)
    head = random_mtp_head(model, 5)
    save(model, None, folder)
    tensors = dict(model.named_parameters()) | mimo_tensors(head)
    write_tensors(folder / "model.safetensors", tensors)
    return model, head


def test_a_head_inside_its_model_or_in_a_file_of_its_own(tmp_path):
    model, head = tiny_mimo(tmp_path / "whole")
    save_mtp(head, tmp_path / "alone", "base", None, torch.float64, [1.0])
    assert len(mimo_tensors(head)) == 16  # like MiMo's layer
    assert load_file(tmp_path / "alone" / "model.safetensors").keys() == mimo_tensors(head).keys()
    loaded, _ = load(tmp_path / "whole", "float64", "cpu")
    for folder in tmp_path / "whole", tmp_path / "alone":
        for source in folder, folder / "model.safetensors":
            again = load_mtp(source, loaded).parameters()
            assert all(map(torch.equal, head.parameters(), again))
    plain = decode(model, None, [1, 2, 3], max_new_tokens=20)
    result = decode(loaded, None, [1, 2, 3], "fastmtp", max_new_tokens=20)  # its own head
    assert result.tokens == plain.tokens and result.stats["drafted"] > 0
    for changes, match in (
        ({"rope_theta": 5e5}, "rope_theta is 10000.0, the model's is 500000.0"),
        ({"kv_heads": 1, "head_dim": 8, "heads": 2}, "kv_heads is 2, the model's is 1"),
    ):
        other = Transformer(replace(model.config, **changes))
        rejects(match, load_mtp, tmp_path / "alone", other)
    path = tmp_path / "alone" / "config.json"
    yarn = {"rope_scaling": {"type": "yarn", "factor": 2}, "rope_parameters": {"factor": 3}}
    path.write_text(json.dumps(json.loads(path.read_text()) | yarn))  # the former counts
    rejects("rope_scaling is .*'factor': 2.*, the model's is None", load_mtp, path.parent, model)


def test_a_head_remembers_its_acceptance_by_step(tmp_path):
    model = random_model()
    head = random_mtp_head(model, 5)
    for rates in None, [0.7], [0.70123, 0, 1.0]:
        head.acceptance = rates
        save_mtp(head, tmp_path, "base", None, torch.float64, [1.0])
        assert load_mtp(tmp_path, model).acceptance == (rates and [round(r, 3) for r in rates])
    config = json.loads((tmp_path / "config.json").read_text())
    for wrong in [], [1.5], ["high"], 0.7, {"0": 0.7}, [None]:
        (tmp_path / "config.json").write_text(json.dumps(config | {"mtp_acceptance": wrong}))
        rejects("mtp_acceptance .*: must be a list of rates", load_mtp, tmp_path, model)


@pytest.mark.parametrize("name", ["mtp", "mtp-vanilla", "smollm2/mtp"])
def test_shipped_heads_have_their_acceptance(name):
    rates = json.loads((ROOT / "weights" / name / "config.json").read_text())["mtp_acceptance"]
    assert all(0.3 < rate < 0.7 for rate in rates)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["medusa", "medusa, shared", "mtp", "mtp, qwen2"])
def test_heads_exported_for_vllm_can_be_loaded(kind, tmp_path, capsys):
    """And predict the same. vLLM itself is tested by hand (tests/engines)."""
    biased = {"model_type": "qwen2", "qkv_bias": True} if "qwen2" in kind else {}
    model, prompt = random_model(**biased), [1, 2, 3]
    save(model, TOKENIZER, tmp_path / "target", torch.float32)
    name = kind.partition(",")[0]
    if name == "medusa":
        heads = randomise(new_heads(3, 2, model, shared=kind.endswith("shared")), 4)
        save_medusa(heads, tmp_path / "heads", "base", TOKENIZER, torch.float32)
    else:
        head = random_mtp_head(model, 5)
        save_mtp(head, tmp_path / "heads", "b", TOKENIZER, torch.float32, [1.0])
    target, heads, out = (str(tmp_path / part) for part in ("target", "heads", "out"))
    distill(["export", "--model", target, f"--{name}", heads, "--dtype", "float32", "--out", out])
    printed = capsys.readouterr().out
    assert f'"method": "{name}"' in printed
    assert (f"--speculative-draft-model-path {out} " in printed) == (name == "mtp")  # SGLang
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    if name == "medusa":
        before, after = load_medusa(heads, model), load_medusa(out, model)
        hidden = model(prompt)[0]
        assert torch.allclose(before(hidden, model), after(hidden, model), atol=1e-5)
        assert (config["num_heads"], config["num_hidden_layers"]) == (3, 2)
    else:
        twin = Transformer(replace(model.config, model_type="qwen2", qkv_bias=True)).double()
        for bias in twin.load_state_dict(model.state_dict(), strict=False).missing_keys:
            twin.get_parameter(bias).data.zero_()
        runs = [
            decode(target, None, prompt, "fastmtp", k=3, head=load_mtp(folder, target))
            for target, folder in ((model, heads), (model, out), (twin, out))
        ]
        for run in runs:
            assert run.tokens == runs[0].tokens and run.rounds == runs[0].rounds
        assert config["architectures"] == ["MiMoForCausalLM"] and config["model_type"] == "qwen2"
        assert config["num_nextn_predict_layers"] == 1


def test_heads_without_a_class_in_vllm_are_not_exported(tmp_path, capsys):
    model = random_model(model_type="qwen3", qk_norm=True)
    save(model, None, tmp_path / "target")
    save_mtp(random_mtp_head(model, 5), tmp_path / "heads", "b", None, torch.float32, [1.0])
    target, heads, out = (str(tmp_path / part) for part in ("target", "heads", "out"))
    command = ["export", "--model", target, "--mtp", heads, "--out", out]
    assert "is a qwen2" in last_error_line(capsys, lambda: distill(command))


def test_a_missing_or_unknown_tensor_is_an_error(tmp_path):
    model, _ = tiny_mimo(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {n: t.clone() for n, t in load_file(file).items()}
    for name, tensor, match in (
        ("self_attn.q_proj.bias", None, "Missing.*self_attn.q_proj.bias"),
        ("mtp_block.x", torch.zeros(2), "Unexpected.*mtp_block.x"),
        ("input_proj.weight", torch.zeros(16, 16), "input_proj.weight.*shape"),
    ):
        changed = tensors | {f"model.mtp_layers.0.{name}": tensor}
        save_file({n: t for n, t in changed.items() if t is not None}, file)
        rejects(match, load_mtp, tmp_path, model)
    save(model, None, tmp_path)
    rejects("has no heads: no tensors model.mtp_layers", load_mtp, tmp_path, model)


def test_a_vocabulary_is_saved_loaded_and_truncated(tmp_path):
    model, path = random_model(), tmp_path / "v.json"
    languages = {"en": count([[7, 8, 8]], [31, 30], 20)}
    save_vocabulary(languages, TOKENIZER, path)
    assert load_vocabulary(path, model, TOKENIZER).languages == languages
    assert load_vocabulary(path, model, TOKENIZER, 2).languages["en"].ids == (31, 30)
    rejects("another tokenizer", load_vocabulary, path, model, OTHER_TOKENIZER)
    small = random_model(vocab_size=9)
    rejects("outside the target's vocabulary of 9", load_vocabulary, path, small)
    rejects("no.json cannot be read", load_vocabulary, tmp_path / "no.json", model)
    rejects("one without tokens", load_vocabulary, path, model, size=0)


def test_a_vocabulary_as_fastmtp_publishes_it(tmp_path):
    file, model = tmp_path / "freq.pt", random_model()
    for ids in ([9, 4, 9, 7], torch.tensor([9, 4, 9, 7])):  # a list or a tensor
        torch.save(ids, file)
        assert load_vocabulary(file, model).select([1]).ids.tolist() == [9, 4, 7]
    for odd in {"a": "b"}, 7, [[1]], [-1], [math.inf], ["a"], [Evil()]:
        torch.save(odd, file)
        match = "is not a list of token ids|outside|code, which is never unpickled"
        rejects(match, load_vocabulary, file, model)


@pytest.mark.parametrize(
    "text, match",
    [
        ('{"en": 3}', "was not written by `distill vocabulary`"),
        ('{"en": {"ids": [1, 2]}}', "was not written by `distill vocabulary`"),
        ('{"en": {"ids": [1e999], "counts": [5]}}', "outside the target's vocabulary"),
        ("[" * 100_000 + "]" * 100_000, "cannot be read as JSON"),
        ('{"en": {"ids": [], "counts": []}}', "no languages, or one without tokens"),
        ("{}", "no languages"),
    ],
)
def test_an_invalid_vocabulary_is_rejected(tmp_path, text, match):
    (tmp_path / "v.json").write_text('{"languages": ' + text + "}")
    rejects(match, load_vocabulary, tmp_path / "v.json", random_model())
