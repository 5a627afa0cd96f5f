"""Heads, trees and vocabularies as published: every layout is read, and what we write is one."""

import json

import pytest
import torch
import torch.nn.functional as F
from conftest import SHARED, needs_shared, random_model, random_tokens
from safetensors.torch import load_file, save_file
from test_generate import TOKENIZER, VOCAB, byte_model
from test_tokenizer import byte_tokenizer

from minispec import UserError, generate, load
from minispec.certify import random_head, random_heads, randomise
from minispec.checkpoint import save
from minispec.generate import decode
from minispec.heads import (
    PREFIX,
    PUBLISHED,
    load_medusa,
    load_mtp,
    load_vocabulary,
    mtp_tensors,
    save_medusa,
    save_mtp,
    save_tree,
    save_vocabulary,
)
from minispec.methods.medusa import complete, untrained
from minispec.methods.vocabulary import count


def foreign_tokenizer():
    """One with a token more than TOKENIZER."""
    other = byte_tokenizer()
    other.backend.add_tokens(["extra"])
    return other


# ---- Medusa --------------------------------------------------------------------------------------


def v1_tensors(model, heads: int, layers: int) -> dict[str, torch.Tensor]:
    """Random tensors under the names of FasterDecoding's files."""
    d, generator = model.config.hidden_size, torch.Generator().manual_seed(heads)
    shapes = {}
    for i in range(heads):
        for j in range(layers):
            shapes |= {f"{i}.{j}.linear.weight": (d, d), f"{i}.{j}.linear.bias": (d,)}
        shapes[f"{i}.{layers}.weight"] = (model.config.vocab_size, d)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def by_hand(tensors, hidden, i: int, layers: int, projection) -> torch.Tensor:
    """What head `i` says."""
    for j in range(layers):
        w, b = tensors[f"{i}.{j}.linear.weight"], tensors[f"{i}.{j}.linear.bias"]
        hidden = hidden + F.silu(hidden @ w.T.double() + b.double())
    return hidden @ projection.T.double()


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("layout", ["v1.pt", "v1.safetensors", "v2", "1.0", "file"])
def test_every_layout_loads_whatever_its_config_counts(tmp_path, layout, layers):
    model, heads = random_model(), 5
    tensors = v1_tensors(model, heads, layers)
    if layout == "v2":
        tensors = {name: t for name, t in tensors.items() if "linear" in name}
    claims = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "x"}
    (tmp_path / "config.json").write_text(json.dumps(claims))
    source = tmp_path
    if layout in ("v1.pt", "file"):
        torch.save(tensors, tmp_path / "medusa_lm_head.pt")
        source = tmp_path / "medusa_lm_head.pt" if layout == "file" else tmp_path
    elif layout == "1.0":
        save(model, None, tmp_path, extra={f"medusa_head.{n}": t for n, t in tensors.items()})
        again, _ = load(tmp_path, "float64", "cpu")  # the model itself loads without its heads
        assert torch.allclose(again([1, 2]), model([1, 2]))
    else:
        save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    loaded = load_medusa(source, model)
    assert len(loaded) == heads and loaded.shared == (layout == "v2")
    assert loaded.tree == [path for path in PUBLISHED["mc_sim_7b_63"] if len(path) <= heads]
    hidden = model(random_tokens(4))[0, -1]
    for i, logits in enumerate(loaded(hidden, model)):
        projection = tensors.get(f"{i}.{layers}.weight", model.lm_head.weight)
        assert torch.allclose(logits, by_hand(tensors, hidden, i, layers, projection))


@pytest.mark.parametrize("shared", [True, False])
def test_what_is_written_is_read_back_and_has_the_layout_s_names(tmp_path, shared):
    model = byte_model()
    heads = randomise(untrained(3, 2, model, shared), 0)
    heads.tree, heads.accuracy = [(0,), (0, 1)], torch.rand(3, 10)
    save_medusa(heads, tmp_path, "base", TOKENIZER, torch.float64)
    again = load_medusa(tmp_path, model, TOKENIZER)
    hidden = model([1, 2, 3])
    assert torch.equal(again(hidden, model), heads(hidden, model))
    assert again.tree == heads.tree and torch.allclose(again.accuracy, heads.accuracy.double())
    names = load_file(tmp_path / "medusa_lm_head.safetensors").keys()
    assert ("0.2.weight" in names) == (not shared) and "2.1.linear.bias" in names
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, 2)


def test_a_tree_is_renewed_and_nothing_else(tmp_path):
    model = byte_model()
    heads = random_heads(model, 0)
    save_medusa(heads, tmp_path, "base", TOKENIZER, torch.float32)
    before = json.loads((tmp_path / "config.json").read_text())
    heads.tree = [(0,), (1,), (1, 0)]
    save_tree(heads, tmp_path)
    after = json.loads((tmp_path / "config.json").read_text())
    assert load_medusa(tmp_path, model, TOKENIZER).tree == heads.tree
    assert before | {"medusa_choices": [[0], [1], [1, 0]]} == after


@needs_shared
def test_the_published_trees_are_those_of_the_reference():
    trees = json.loads((SHARED / "reference" / "medusa_trees.json").read_text())
    assert trees.keys() == PUBLISHED.keys()
    for name, paths in trees.items():
        assert sorted(PUBLISHED[name]) == sorted(map(tuple, paths))
        assert complete(PUBLISHED[name], 5, 10) == sorted(PUBLISHED[name])  # no beginning lacks


def test_heads_of_something_else_are_refused_with_the_reason(tmp_path):
    model = byte_model()

    def refused(message: str, tensors: dict | None = None, tokenizer=None, config: dict = {}):
        if tensors is not None:
            save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=message):
            load_medusa(tmp_path, model, tokenizer)

    refused("has no weights|no Medusa heads")
    good = v1_tensors(model, 3, 1)
    wide = random_model(hidden_size=32, vocab_size=VOCAB)
    refused("hidden size 32, but the target's is 16", v1_tensors(wide, 3, 1))
    refused("heads of 40 tokens, but the target", v1_tensors(random_model(vocab_size=40), 3, 1))
    for name in ("1.0.linear.bias", "2.1.weight"):
        refused(f"Missing.*{name}", {k: t for k, t in good.items() if k != name})
    refused("0.q.weight is not a tensor of Medusa heads", good | {"0.q.weight": torch.zeros(2)})
    refused("1.0.linear.weight.*shape", good | {"1.0.linear.weight": torch.zeros(16, 8)})
    for wrong in ([[0, 0, 0, 0]], [[-1]], [0], 7):
        refused("medusa_choices", good, config={"medusa_choices": wrong})
    for wrong in ([[0.5]], [0.5, 0.5, 0.5], "high"):
        refused("medusa_accuracy", good, config={"medusa_accuracy": wrong})
    refused("another tokenizer", good, TOKENIZER, {"tokenizer_fingerprint": "0123"})
    foreign_tokenizer().save(tmp_path)
    refused("another tokenizer", good, TOKENIZER)
    with pytest.raises(UserError, match="no such directory"):
        load_medusa(tmp_path / "nowhere", model)
    (tmp_path / "medusa_lm_head.safetensors").write_bytes(b"rubbish")
    with pytest.raises(UserError, match="cannot be read"):
        load_medusa(tmp_path, model)


@pytest.mark.parametrize(
    "tensors", [{"0.0.linear.weight": 3}, {3: torch.zeros(2)}, {"0.0.weight": torch.tensor(1.0)},
                {"7.0.weight": torch.zeros(4, 4)}]
)  # fmt: skip
def test_odd_pt_files_are_one_line(tmp_path, tensors):
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(UserError, match="not a tensor of Medusa heads|not numbered"):
        load_medusa(tmp_path, random_model())


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit('ran')",)


def test_code_in_a_pt_file_is_never_run(tmp_path):
    torch.save({"0.0.linear.weight": Evil()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(UserError, match="code is never unpickled"):
        load_medusa(tmp_path, random_model())
    torch.save([Evil()], tmp_path / "words.pt")
    with pytest.raises(UserError, match="is not a list of token ids"):
        load_vocabulary(tmp_path / "words.pt", random_model())


# ---- MTP -----------------------------------------------------------------------------------------


def same(a, b) -> bool:
    """Whether two heads have the same parameters."""
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def tiny_mimo(folder) -> tuple:
    """A MiMo checkpoint as published: qwen2-like, with the head inside the model."""
    model = random_model(model_type="mimo", qkv_bias=True, tied=False)
    head = random_head(model, 5)
    save(model, None, folder, extra=mtp_tensors(head, torch.float64))
    return model, head


def test_a_mimo_checkpoint_gives_model_and_head(tmp_path, capsys):
    model, head = tiny_mimo(tmp_path)
    assert len(mtp_tensors(head, torch.float64)) == 16  # as many as MiMo's layer has
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1 and config["model_type"] == "mimo"
    loaded, _ = load(tmp_path, "float64", "cpu")
    assert same(head, load_mtp(tmp_path, loaded))
    plain = decode(model, None, [1, 2, 3], max_new_tokens=20)
    result = decode(loaded, None, [1, 2, 3], "fastmtp", max_new_tokens=20)  # its own head
    assert result.tokens == plain.tokens and result.stats["drafted"] > 0
    generate.main(["--model", str(tmp_path), "--method", "fastmtp", "--prompt-ids", "1,2,3",
                   "--max-new-tokens", "5", "--device", "cpu", "--json"])  # fmt: skip
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 5


def test_a_head_in_a_file_of_its_own_and_back(tmp_path):
    model, head = random_model(), random_head(random_model(), 3)
    save_mtp(head, tmp_path, "base", None, torch.float64, [1.0])
    for source in (tmp_path, tmp_path / "model.safetensors"):
        assert same(head, load_mtp(source, model))
    names = set(load_file(tmp_path / "model.safetensors"))
    assert names == set(mtp_tensors(head, torch.float64))
    assert all(name.startswith("model.mtp_layers.0.") for name in names)


def test_a_missing_or_foreign_tensor_is_an_error(tmp_path):
    model, _ = tiny_mimo(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    for change, message in (
        ({PREFIX + "input_proj.weight": None}, "Missing.*input_proj.weight"),
        ({PREFIX + "self_attn.q_proj.bias": None}, "Missing.*self_attn.q_proj.bias"),
        ({PREFIX + "mtp_block.x": torch.zeros(2)}, "Unexpected.*mtp_block.x"),
        ({PREFIX + "input_proj.weight": torch.zeros(16, 16)}, "input_proj.weight.*shape"),
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


# ---- vocabularies --------------------------------------------------------------------------------


def test_a_vocabulary_is_written_read_and_cut(tmp_path):
    model, path = byte_model(), tmp_path / "v.json"
    languages = {"en": count([[97, 98, 98]], TOKENIZER.special_ids, 50)}
    save_vocabulary(languages, TOKENIZER, path)
    assert load_vocabulary(path, model, TOKENIZER).languages == languages
    assert load_vocabulary(path, model, TOKENIZER, 2).languages["en"].ids == languages["en"].ids[:2]
    for ids in ([9, 4, 9, 7], torch.tensor([9, 4, 9, 7])):  # as FastMTP publishes its
        torch.save(ids, tmp_path / "freq.pt")
        assert load_vocabulary(tmp_path / "freq.pt", model).pick([1]).ids.tolist() == [9, 4, 7]


def test_a_vocabulary_of_something_else_is_refused_with_the_reason(tmp_path):
    model, path = byte_model(), tmp_path / "v.json"
    save_vocabulary({"en": count([[97]], TOKENIZER.special_ids, 50)}, TOKENIZER, path)

    def refused(message: str, path=path, model=model, tokenizer=None, size=None):
        with pytest.raises(UserError, match=message):
            load_vocabulary(path, model, tokenizer, size)

    refused("another tokenizer", tokenizer=foreign_tokenizer())
    refused("outside the target's vocabulary", model=random_model())
    refused("no such vocabulary file", path=tmp_path / "no.json")
    refused("vocabulary size 0: must be at least 1", size=0)
    for wrong in "3", '{"ids": [1, 2], "counts": [-1, 5]}', '{"ids": [1, 2], "counts": [5]}':
        path.write_text('{"languages": {"en": ' + wrong + "}}")
        refused("not a file of `distill vocabulary`")
    path.write_text('{"languages": {"en": {"ids": [], "counts": []}}}')
    refused("en has no tokens")
    path.write_text('{"languages": {}}')
    refused("has no languages")
    torch.save({"a": "b"}, tmp_path / "odd.pt")
    refused("not a list of token ids", path=tmp_path / "odd.pt")
