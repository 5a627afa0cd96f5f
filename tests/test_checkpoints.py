"""Every checkpoint layout that can be loaded, and every mistake a user can make with one."""

import json
import math
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import GOLDEN, equal_up_to_rounding, file_limit, random_model, random_tokens
from safetensors.torch import load_file, save_file

from minispec import UserError, load
from minispec.checkpoints import weights
from minispec.checkpoints.config import read_config
from minispec.checkpoints.load import save
from minispec.checkpoints.weights import write_tensors, write_text
from minispec.generate import decode

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path):
    """A copy of a golden checkpoint to damage."""
    return shutil.copytree(GOLDEN / "llama", tmp_path / "model")


def edit(folder, **changes):
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))


def tensors(folder) -> dict[str, torch.Tensor]:
    # clones, as the file may be overwritten
    return {k: t.clone() for k, t in load_file(folder / "model.safetensors").items()}


def logits(folder) -> torch.Tensor:
    model, _ = load(folder, "float64", "cpu")
    return model.logits(model(random_tokens(20)))


def rejects(folder, match: str, **options) -> None:
    with pytest.raises(UserError, match=match) as caught:
        load(folder, **({"device": "cpu"} | options))
    assert len(str(caught.value)) < 700 and "\n" not in str(caught.value)


@pytest.mark.parametrize("variant", sorted(f.name for f in GOLDEN.iterdir()))
def test_save_then_load_returns_the_same_model(variant, tmp_path):
    model, _ = load(GOLDEN / variant, "float32", "cpu")
    save(model, None, tmp_path / "copy")
    assert read_config(tmp_path / "copy") == model.config
    assert equal_up_to_rounding(logits(tmp_path / "copy"), logits(GOLDEN / variant))


@pytest.mark.parametrize("suffix, write", [("safetensors", save_file), ("bin", torch.save)])
def test_shards_and_bin_files_give_the_same_model(folder, suffix, write):
    expected, parts = logits(folder), tensors(folder)
    (folder / "model.safetensors").unlink()
    stem = {"safetensors": "model", "bin": "pytorch_model"}[suffix]
    write(parts, folder / f"{stem}.{suffix}")
    assert equal_up_to_rounding(logits(folder), expected)
    (folder / f"{stem}.{suffix}").unlink()
    names, index = sorted(parts), {}
    for part, keys in ("a", names[:7]), ("b", names[7:]):
        write({key: parts[key] for key in keys}, folder / f"{stem}-{part}.{suffix}")
        index |= {key: f"{stem}-{part}.{suffix}" for key in keys}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": index}))
    assert equal_up_to_rounding(logits(folder), expected)
    (folder / f"{stem}-b.{suffix}").unlink()
    rejects(folder, f"{stem}-b.{suffix} cannot be read .FileNotFoundError")
    for outside in "../a.bin", "/etc/passwd", "x/../../a":
        weight_map = {"weight_map": index | {names[0]: outside}}
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(weight_map))
        rejects(folder, f"names {outside}, which is outside its folder")


def test_weights_in_the_files_dtype_are_mapped_and_training_never_writes_to_the_file(
    folder, monkeypatch
):
    """Not copied. Saving the trained model replaces the file; the old one stays mapped."""
    read, read_tensors, path = {}, weights.read_tensors, folder / "model.safetensors"
    monkeypatch.setattr(
        weights, "read_tensors", lambda *which: read.update(read_tensors(*which)) or dict(read)
    )
    write_tensors(path, tensors(folder), torch.float32)
    stored, before = path.read_bytes(), logits(folder)
    model, _ = load(folder, "float32", "cpu")
    mapped = {tensor.data_ptr() for tensor in read.values()}
    assert {p.data_ptr() for p in model.parameters()} <= mapped
    model.requires_grad_(True)
    model.logits(model(random_tokens(20))).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert path.read_bytes() == stored and equal_up_to_rounding(logits(folder), before)
    trained = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save(model, None, folder)
    for found in model, load(folder, "float32", "cpu")[0]:
        assert all(torch.equal(t, trained[name]) for name, t in found.state_dict().items())


def test_each_tensor_is_released_before_the_next_is_converted(folder, monkeypatch):
    alive, counts, is_finite = [], [], weights.is_finite

    def read_tensors(path, config):
        tensors = load_file(path)
        alive.extend(map(weakref.ref, tensors.values()))
        return tensors

    def count(tensor):
        counts.append(sum(ref() is not None for ref in alive))
        return is_finite(tensor)

    monkeypatch.setattr(weights, "read_tensors", read_tensors)
    monkeypatch.setattr(weights, "is_finite", count)
    load(folder, "float64", "cpu")
    assert counts == list(range(len(alive), 0, -1))


def test_weights_that_share_memory_in_a_pickle_are_trained_separately(folder):
    parts = tensors(folder)
    (folder / "model.safetensors").unlink()
    torch.save(parts | {UP: parts[UP.replace("1", "0")]}, folder / "pytorch_model.bin")
    model, _ = load(folder, "float32", "cpu")
    first, second = (layer.mlp.up_proj.weight for layer in model.model.layers)
    first.zero_()
    assert first.any() != second.any()


def test_loading_does_not_import_the_compiler():
    """It takes seconds; sympy is one of its parts."""
    code = f"import sys, minispec; minispec.load({str(GOLDEN / 'llama')!r}); print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "minispec" in ran.stdout.split() and "sympy" not in ran.stdout.split()


def test_a_tied_head_is_stored_as_embedding_as_lm_head_or_as_both(folder):
    """It is loaded as one tensor and saved once, as the embedding."""
    expected, parts = logits(folder), tensors(folder)
    embedding, saved = parts.pop("model.embed_tokens.weight"), folder.with_name("saved")
    both = {"lm_head.weight": embedding.clone(), "model.embed_tokens.weight": embedding}
    for stored in *({name: tensor} for name, tensor in both.items()), both:
        save_file(parts | stored, folder / "model.safetensors")
        assert equal_up_to_rounding(logits(folder), expected)
        model, _ = load(folder, "float64", "cpu")
        assert model.lm_head.weight is model.model.embed_tokens.weight
        save(model, None, saved)
        assert "lm_head.weight" not in tensors(saved)
    both["lm_head.weight"][3, 4] += 1
    save_file(parts | both, folder / "model.safetensors")
    rejects(folder, "tie_word_embeddings is true, but .* differ")
    edit(folder, tie_word_embeddings=False)
    assert not equal_up_to_rounding(logits(folder), expected)
    for stored, missing in (({}, "embed_tokens"), ({"model.embed_tokens.weight": embedding}, "lm")):
        save_file(parts | stored, folder / "model.safetensors")
        rejects(folder, f"Missing key.*{missing}")


def test_derived_tensors_and_prediction_layers_are_ignored(folder):
    expected = logits(folder)
    extra = {"model.layers.0.rotary_emb.inv_freq": 4, "model.mtp_layers.0.x": 2}
    more = {name: torch.ones(n) for name, n in extra.items()}
    save_file(tensors(folder) | more, folder / "model.safetensors")
    assert equal_up_to_rounding(logits(folder), expected)


@pytest.mark.parametrize(
    "variant", ["llama-linear", "llama-dynamic", "llama-llama3", "llama-yarn"]
)
def test_both_spellings_of_the_rope_keys(variant, tmp_path):
    """Only one of them, or both, as in files for old and new readers. The original length is inside
    them or at the top level, where it takes precedence."""
    copy, expected = shutil.copytree(GOLDEN / variant, tmp_path / "old"), logits(GOLDEN / variant)
    new = json.loads((copy / "config.json").read_text())["rope_parameters"]
    theta = {"rope_theta": new["rope_theta"]}
    rope = {key: value for key, value in new.items() if key != "rope_theta"}
    rope["type"] = rope.pop("rope_type")
    key = "original_max_position_embeddings"
    for changes in (
        {"rope_parameters": ..., "rope_scaling": rope} | theta,
        {"rope_parameters": new, "rope_scaling": rope | theta},
        {"rope_parameters": ..., "rope_scaling": rope | {"type": "x", "rope_type": rope["type"]}},
        {"rope_scaling": rope | {key: 77}, key: rope[key]} if key in rope else {},
    ):
        edit(copy, **changes)
        assert equal_up_to_rounding(logits(copy), expected)


@pytest.mark.parametrize("variant", ["llama-linear", "llama-llama3", "llama-yarn"])
def test_rope_scaling_replaces_rope_parameters(variant, tmp_path):
    """As in transformers 5, whatever rope_parameters says; only rope_theta must be the same."""
    copy, expected = shutil.copytree(GOLDEN / variant, tmp_path / "new"), logits(GOLDEN / variant)
    scaling = json.loads((copy / "config.json").read_text())["rope_parameters"]
    default = {"rope_type": "default", "rope_theta": scaling["rope_theta"]}
    for other in default, scaling | {"factor": 77.0}, {"rope_type": "yarn", "factor": 2.0}, {}:
        edit(copy, rope_scaling=scaling, rope_parameters=other)
        assert equal_up_to_rounding(logits(copy), expected)
    edit(copy, rope_scaling={}, rope_parameters=scaling)
    assert equal_up_to_rounding(logits(copy), expected)
    edit(copy, rope_scaling=default, rope_parameters=scaling)
    assert read_config(copy).rope_scaling is None


@pytest.mark.parametrize("zero", ["mscale", "mscale_all_dim", "beta_fast", "beta_slow"])
def test_a_zero_in_yarn_counts_as_absent(zero, tmp_path):
    """As in transformers, for these keys; mscale and mscale_all_dim only count together."""
    copy, expected = shutil.copytree(GOLDEN / "llama-yarn", tmp_path / "copy"), {}
    rope = json.loads((copy / "config.json").read_text())["rope_parameters"]
    for value in 0, None:
        edit(copy, rope_parameters=rope | {"mscale": 0.5, "mscale_all_dim": 0.25} | {zero: value})
        expected[value] = logits(copy)
    assert equal_up_to_rounding(expected[0], expected[None])
    assert zero not in read_config(copy).rope_scaling


def test_the_original_length_is_max_position_embeddings_by_default(tmp_path):
    """Even if a sliding window is shorter."""
    expected, copy = logits(GOLDEN / "llama-yarn"), tmp_path / "copy"
    shutil.copytree(GOLDEN / "llama-yarn", copy)
    rope = {"rope_type": "yarn", "factor": 4.0}
    edit(copy, rope_parameters=rope, max_position_embeddings=32)
    assert equal_up_to_rounding(logits(copy), expected)
    assert read_config(copy).context == 128
    edit(copy, model_type="mistral", sliding_window=25)
    assert equal_up_to_rounding(logits(copy), expected)


def test_a_sliding_window_limits_the_context_and_yarn_extends_it(folder):
    """Attention is full up to the window's length. With yarn, max_position_embeddings may still be
    the original length."""
    window = {"use_sliding_window": True, "sliding_window": 8}
    for changes, context in (
        ({"model_type": "mistral", "sliding_window": 8, "use_sliding_window": False}, 8),
        ({"model_type": "mistral", "sliding_window": 500}, 128),
        ({"model_type": "mistral", "sliding_window": None}, 128),
        ({"model_type": "mistral", "max_position_embeddings": 9000, "sliding_window": ...}, 4096),
        ({"model_type": "qwen2", "max_window_layers": 1} | window, 8),
        ({"model_type": "qwen3", "max_window_layers": 2}, 128),  # QwQ, as no layer has the window
        ({"max_window_layers": ...}, 128),  # the default is 28
        ({"layer_types": ["full_attention", "sliding_attention"]}, 8),
        ({"layer_types": ["full_attention"] * 2, "max_window_layers": 0}, 128),
        ({"layer_types": ..., "use_sliding_window": False}, 128),
        ({"model_type": "llama", "use_sliding_window": True}, 128),
    ):
        edit(folder, **{"max_position_embeddings": 128} | changes)
        assert read_config(folder).context == context, changes
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}
    edit(folder, rope_parameters=..., rope_scaling=yarn)
    assert read_config(folder).context == 400


def test_defaults_of_absent_keys_and_eos_tokens_from_either_file(folder):
    absent = "num_key_value_heads", "attention_bias", "tie_word_embeddings"
    edit(folder, model_type="qwen2", head_dim=None, **dict.fromkeys(absent, ...))
    c = read_config(folder)
    assert (c.kv_heads, c.head_dim, c.tied, c.qkv_bias, c.o_bias) == (4, 8, False, True, False)
    for family, bias in ("qwen2", True), ("mistral", False):  # their code does not read this key
        edit(folder, model_type=family, attention_bias=not bias)
        assert read_config(folder).qkv_bias == bias
    shutil.copy(GOLDEN / "llama" / "config.json", folder)
    (folder / "generation_config.json").unlink()
    for config, generation, expected in (
        (7, None, (7,)), ([3, 5], None, (3, 5)), (None, None, ()),
        (4, {"eos_token_id": None}, (4,)), (4, {"eos_token_id": [9, 2]}, (9, 2)),
    ):  # fmt: skip
        edit(folder, eos_token_id=config)
        if generation:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        assert read_config(folder).eos_ids == expected
        save(load(folder, device="cpu")[0], None, folder.with_name("saved"))
        assert read_config(folder.with_name("saved")).eos_ids == expected


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_hub_id_downloads_bin_files_only_without_safetensors(suffix, tmp_path, monkeypatch):
    import huggingface_hub

    source, cache, bins = GOLDEN / "llama", tmp_path, []

    def snapshot_download(name, allow_patterns, ignore_patterns):
        assert name == "somebody/model"
        bins.append("*.bin" in allow_patterns)
        shutil.copy(source / "config.json", cache)
        if suffix == "safetensors":
            shutil.copy(source / "model.safetensors", cache)
        elif bins[-1]:
            torch.save(tensors(source), cache / "pytorch_model.bin")
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert equal_up_to_rounding(logits("somebody/model"), logits(source))
    assert bins == ([False] if suffix == "safetensors" else [False, True])


class HTTPFailure(Exception):
    """As of any HTTP client."""

    def __init__(self, status: int, message: str):
        headers = {"x-error-message": message} if message else {}
        self.response = SimpleNamespace(status_code=status, headers=headers)


@pytest.mark.parametrize("cause, match", [
    (HTTPFailure(401, "Access is restricted."), "HTTP 401: Access is restricted; .*hf auth login"),
    (HTTPFailure(404, ""), "HTTP 404: Not Found; check the name; if"),
    (HTTPFailure(429, ""), "HTTP 429: .*try again later"),
    (HTTPFailure(503, ""), "HTTP 503: .*try again later"),
    (PermissionError(13, "Permission denied", "/cache"), "Permission denied: '/cache'.*HF_HOME"),
    (OSError(28, "No space left on device"), "No space left on device.*HF_HOME"),
    (ConnectionRefusedError(111, "refused"), "refused.*check the name, the network.*, https_proxy"),
    (ValueError("Unknown scheme for proxy"), "Unknown scheme for proxy.*, https_proxy"),
])  # fmt: skip
def test_a_failed_download_says_why_and_what_to_do(cause, match, monkeypatch):
    import huggingface_hub

    def snapshot_download(*_, **options):
        raise FileNotFoundError("not in the cache") from cause

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setenv("https_proxy", "socks://x")
    rejects("somebody/model", f"could not be downloaded from the hub: .*{match}")


def test_broken_links_are_named(folder, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    rejects(tmp_path / "link", "link is a broken link to .*nothing; copy .* cp -rL")
    for name in "config.json", "model.safetensors":
        copied = shutil.copytree(folder, tmp_path / f"without {name}")
        (copied / name).unlink()
        (copied / name).symlink_to("../../blobs/0")
        rejects(copied, f"{name} is a broken link to ../../blobs/0; copy")
    model, tokenizer = load(folder, device="cpu")
    (tmp_path / "without config.json").rename(tmp_path / "draft")
    with pytest.raises(UserError, match="draft/config.json is a broken link"):
        decode(model, tokenizer, [1], "speculative")


def test_paths_that_are_not_directories_or_not_checkpoints(tmp_path, folder, monkeypatch):
    (tmp_path / "a.file").touch()
    outside, absent = "../nowhere/at/all", tmp_path / "absent.gguf"
    for name in tmp_path / "nowhere", "x" * 300, tmp_path / "a.file", absent, "", "a/b/c", outside:
        rejects(name, "no such directory")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rejects("nobody/nothing-at-all", "could not be downloaded from the hub")
    rejects(tmp_path, "no config.json")
    (folder / "model.safetensors").unlink()
    rejects(folder, "has no weights")
    (folder / "config.json").write_text("[]")
    rejects(folder, "must hold a JSON object")
    (folder / "adapter_config.json").touch()
    rejects(folder, "contains a PEFT adapter")


@pytest.mark.parametrize("text", ["{", '{"a":' * 100_000 + "1" + "}" * 100_000])
@pytest.mark.parametrize("name", ["config", "generation_config", "tokenizer", "tokenizer_config",
                                  "special_tokens_map", "model.safetensors.index"])  # fmt: skip
def test_unreadable_json(folder, name, text):
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {}, "merges": []}}')
    (folder / f"{name}.json").write_text(text)
    if "index" in name:
        (folder / "model.safetensors").unlink()
    rejects(folder, f"{name}.json (cannot be read|is not a valid tokenizer)")


def test_truncated_and_invalid_weight_files(folder):
    path, expected = folder / "model.safetensors", logits(folder)
    data, deep = path.read_bytes(), b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    header = len(deep).to_bytes(8, "little") + deep
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    for damaged in data[: len(data) // 2], data[:4], b"", b"not a tensor file", header, pointer:
        path.write_bytes(damaged)
        rejects(folder, "model.safetensors cannot be read .*git lfs pull")
    path.write_bytes(data)
    parts, file = tensors(folder), folder / "pytorch_model.bin"
    path.unlink()
    torch.save(parts, file, _use_new_zipfile_serialization=False)  # as before torch 1.6
    assert equal_up_to_rounding(logits(folder), expected)
    for odd, match in (
        ({"x": print}, "code, which is never unpickled"),
        (parts | {"lm_head.weight": 3}, "must map names to tensors"),
        ([torch.ones(2)], "must map names to tensors"),
    ):
        torch.save(odd, file)
        rejects(folder, match)


def test_the_error_names_missing_extra_and_misshapen_tensors(folder):
    """In torch's own words, shortened if they would fill the screen."""
    parts, path, other = tensors(folder), folder / "model.safetensors", UP.replace("1", "7")
    incomplete = {k: v for k, v in parts.items() if k != UP}
    for stored, match in (
        (incomplete, f'do not fit the model: Missing key.*: "{UP}"\\.$'),
        (parts | {other: parts[UP].clone()}, f'Unexpected key.*: "{other}"\\.$'),
        (incomplete | {other: parts[UP]}, f'Missing key.*"{UP}".*Unexpected key.*"{other}"'),
        (parts | {UP: parts[UP][:5].clone()}, rf"mismatch for {UP}: .*\[5, 32\].*\[48, 32\]"),
    ):
        save_file(stored, path)
        rejects(folder, match)
    save_file(parts, path)
    edit(folder, num_hidden_layers=40)
    rejects(folder, "Missing key.* …$")


def test_nan_infinity_and_quantised_weights_are_rejected(folder):
    parts = tensors(folder)
    for dtype in torch.float32, torch.float16, torch.bfloat16, torch.float64:
        for value in math.nan, math.inf, -math.inf:
            odd = parts[UP].to(dtype)
            odd.view(-1)[-1] = value
            save_file(parts | {UP: odd}, folder / "model.safetensors")
            rejects(folder, f"{UP} contains NaN or infinity")
        large = torch.full_like(odd, torch.finfo(dtype).max)  # their sum is not finite
        save_file(parts | {UP: large}, folder / "model.safetensors")
        load(folder, dtype, "cpu")
    for dtype in torch.int8, torch.float8_e4m3fn:
        save_file(parts | {UP: parts[UP].to(dtype)}, folder / "model.safetensors")
        rejects(folder, f"{UP} is {dtype}: quantised weights are not supported")


@pytest.mark.parametrize("name", ["llama", "llama-bias"])
@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "module._orig_mod."])
@pytest.mark.parametrize("backbone", ["", "model."])
def test_prefixes_from_training_are_removed(name, prefix, backbone, tmp_path):
    """Those of torch.compile and data parallelism. A backbone saved on its own lacks `model.`."""
    folder = shutil.copytree(GOLDEN / name, tmp_path / "model")
    expected = logits(folder)
    renamed = {prefix + n.replace("model.", backbone, 1): t for n, t in tensors(folder).items()}
    save_file(renamed, folder / "model.safetensors")
    assert equal_up_to_rounding(logits(folder), expected)
    save_file(renamed | {"other.weight": torch.ones(2)}, folder / "model.safetensors")
    rejects(folder, "do not fit the model")


ROPE = {"rope_type": "linear", "factor": 2.0}
OLD = {"rope_parameters": ...}  # as files from before transformers 5
DEEP = json.loads("[" * 500 + "]" * 500)


@pytest.mark.parametrize(
    "key, changes",
    [
        ("model_type", {"model_type": DEEP}),
        ("hidden_act", {"hidden_act": "gelu"}),
        ("hidden_size", {"hidden_size": 10**12}),
        ("num_hidden_layers", {"num_hidden_layers": 10**6}),
        ("3 key/value heads do not divide", {"num_key_value_heads": 3}),
        ("head_dim", {"head_dim": 7}),
        ("rms_norm_eps", {"rms_norm_eps": "x"}),
        ("tie_word_embeddings", {"tie_word_embeddings": "yes"}),
        ("eos_token_id", {"eos_token_id": "</s>"}),
        ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
        ("partial_rotary_factor", {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}),
        ("rope_type", {"rope_parameters": {"rope_type": "longrope"}}),
        ("rope_type", {"rope_parameters": {"factor": 4.0}}),
        ("rope_scaling", OLD | {"rope_scaling": "linear"}),
        ("rope_parameters", {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}),
        ("rope_theta", OLD | {"rope_theta": "x"}),
        ("rope_theta .*9 and 5.0", {"rope_parameters": {"rope_theta": 5}, "rope_theta": 9}),
        ("rope_theta", {"rope_parameters": {"rope_theta": 5}, "rope_scaling": ROPE}),
        ("factor", {"rope_parameters": {"rope_type": "linear"}}),
        ("factor", {"rope_parameters": {"rope_type": "yarn", "factor": math.inf}}),
        ("beta_fast", {"rope_parameters": ROPE | {"rope_type": "yarn", "beta_fast": "x"}}),
        ("attention_factor", {"rope_parameters": ROPE | {"attention_factor": 0}}),
    ],
)
def test_the_error_names_the_unsupported_key(folder, key, changes):
    (folder / "generation_config.json").unlink()
    edit(folder, **changes)
    rejects(folder, f"config.json: {key}")


def test_a_tokenizer_larger_than_the_embedding(folder):
    vocabulary = {chr(0x4E00 + i): i for i in range(65)}
    data = {"model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "一"}}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    rejects(folder, "the tokenizer has 65 tokens but the embedding only 64")
    del vocabulary[chr(0x4E00 + 64)]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    padding = {"id": 64, "content": "<pad>", "special": True} | flags
    (folder / "tokenizer.json").write_text(json.dumps(data | {"added_tokens": [padding]}))
    assert load(folder, device="cpu")[1].size == 65  # like Llama 2's, which is never used


def test_unavailable_devices_and_dtypes(folder):
    missing = "" if torch.cuda.is_available() else "cuda"
    for device in None, 5.0, "abacus", "cpu:x", "cpu:", "meta", missing:
        rejects(folder, f"device {device} is not available; use one of .*cpu", device=device)
    rejects(folder, "dtype int3 is not supported", dtype="int3")
    assert load(folder, device=torch.device("cpu"))[0].device.type == "cpu"


@pytest.mark.parametrize("limit", [0, 10_000])
def test_on_a_full_disk_the_old_checkpoint_stays(tmp_path, limit):
    old, new = random_model(0), random_model(1)
    umask = os.umask(0o027)
    save(old, None, tmp_path)
    os.umask(umask)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o640}
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with file_limit(limit):
        with pytest.raises(UserError, match="model.safetensors cannot be written: .* too large$"):
            save(new, None, tmp_path)
        with pytest.raises(UserError, match="other.safetensors cannot be written: "):
            write_tensors(tmp_path / "other.safetensors", {"x": torch.ones(10_000)})
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        save(new, None, tmp_path / "file")
    (tmp_path / "x.part").write_text("another's")  # another process that is writing the same file
    write_text(tmp_path / "x", "ours")
    assert (tmp_path / "x.part").read_text() == "another's"
    (tmp_path / "link").symlink_to("x")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "x").read_text() == "new"
    write_text(Path(os.devnull), "nothing")  # stays a device
    assert Path(os.devnull).is_char_device()
