"""Every layout a loader meets, and every mistake a user can make with one."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import GOLDEN, random_model, random_tokens
from safetensors.torch import load_file, save_file

from minispec import UserError, load
from minispec.checkpoint import read_config, save


@pytest.fixture
def folder(tmp_path):
    """A copy of a golden checkpoint to damage."""
    return shutil.copytree(GOLDEN / "llama", tmp_path / "model")


def edit(folder, **changes):
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))


def tensors(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def logits(folder) -> torch.Tensor:
    model, _ = load(folder, "float64", "cpu")
    return model.logits(model(random_tokens(20)))


def refused(folder, match: str, **options) -> None:
    with pytest.raises(UserError, match=match) as caught:
        load(folder, **({"device": "cpu"} | options))
    assert len(str(caught.value)) < 700 and "\n" not in str(caught.value)


# ---- layouts


@pytest.mark.parametrize("variant", sorted(f.name for f in GOLDEN.iterdir()))
def test_save_then_load_is_the_same_model(variant, tmp_path):
    model, _ = load(GOLDEN / variant, "float32", "cpu")
    save(model, None, tmp_path / "copy")
    assert read_config(tmp_path / "copy") == model.config
    assert torch.equal(logits(tmp_path / "copy"), logits(GOLDEN / variant))


def test_shards_and_bin_files_give_the_same_model(folder, tmp_path):
    expected, parts = logits(folder), tensors(folder)
    names = sorted(parts)
    halves = {"a": names[: len(names) // 2], "b": names[len(names) // 2 :]}
    for suffix, write in (("safetensors", save_file), ("bin", torch.save)):
        (folder / "model.safetensors").unlink(missing_ok=True)
        stem = "model" if suffix == "safetensors" else "pytorch_model"
        for part, keys in halves.items():
            write({k: parts[k] for k in keys}, folder / f"{stem}-{part}.{suffix}")
        index = {k: f"{stem}-{part}.{suffix}" for part, keys in halves.items() for k in keys}
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": index}))
        assert torch.equal(logits(folder), expected)
        if suffix == "safetensors":
            (folder / f"{stem}-b.{suffix}").unlink()
            refused(folder, "lacks model-b.safetensors")
            (folder / f"{stem}.{suffix}.index.json").unlink()
    for file in folder.glob("pytorch_model*"):
        file.unlink()
    torch.save(parts, folder / "pytorch_model.bin")
    assert torch.equal(logits(folder), expected)


def test_a_tied_head_stored_at_either_end_or_both(folder):
    """Loaded, it is one tensor; saved, it is stored once, as the embedding."""
    expected, parts = logits(folder), tensors(folder)
    embedding = parts.pop("model.embed_tokens.weight")
    both = {"lm_head.weight": embedding.clone(), "model.embed_tokens.weight": embedding}
    for stored in {"lm_head.weight": embedding}, {"model.embed_tokens.weight": embedding}, both:
        save_file(parts | stored, folder / "model.safetensors")
        assert torch.equal(logits(folder), expected)
        model, _ = load(folder, "float64", "cpu")
        assert model.lm_head.weight is model.model.embed_tokens.weight
        save(model, None, folder.with_name("saved"))
        assert "lm_head.weight" not in tensors(folder.with_name("saved"))
    both["lm_head.weight"][3, 4] += 1
    save_file(parts | both, folder / "model.safetensors")
    refused(folder, "tie_word_embeddings, but .* differ: set it to false")
    edit(folder, tie_word_embeddings=False)
    assert not torch.equal(logits(folder), expected)
    save_file(parts, folder / "model.safetensors")
    for tied in False, True:
        edit(folder, tie_word_embeddings=tied)
        refused(folder, 'Missing key.*"model.embed_tokens.weight", "lm_head.weight"')
    save_file(parts | {"model.embed_tokens.weight": embedding}, folder / "model.safetensors")
    edit(folder, tie_word_embeddings=False)
    refused(folder, r'Missing key\(s\) in state_dict: "lm_head.weight"\.$')


def test_derived_tensors_are_left_out_and_mimos_prediction_layers_too(tmp_path):
    for variant, extra in (
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("mimo", "model.mtp_layers.0.input_proj.weight"),
    ):
        copy = shutil.copytree(GOLDEN / variant, tmp_path / variant)
        save_file(tensors(copy) | {extra: torch.ones(4)}, copy / "model.safetensors")
        assert torch.equal(logits(copy), logits(GOLDEN / variant))


@pytest.mark.parametrize("variant", ["llama-linear", "llama-llama3", "llama-yarn"])
def test_both_spellings_of_the_rope_keys(variant, tmp_path):
    """Each alone, or both, as in files meant for old and new readers; the original length within
    them, or beside them, where it takes precedence."""
    old, expected = shutil.copytree(GOLDEN / variant, tmp_path / "old"), logits(GOLDEN / variant)
    new = json.loads((old / "config.json").read_text())["rope_parameters"]
    rope = {key: value for key, value in new.items() if key != "rope_theta"}
    rope["type"] = rope.pop("rope_type")
    edit(old, rope_parameters=..., rope_theta=new["rope_theta"], rope_scaling=rope)
    assert torch.equal(logits(old), expected)
    edit(old, rope_parameters=new, rope_scaling=rope | {"rope_theta": new["rope_theta"]})
    assert torch.equal(logits(old), expected)
    edit(old, rope_parameters=..., rope_scaling=rope | {"type": "x", "rope_type": rope["type"]})
    assert torch.equal(logits(old), expected)
    key = "original_max_position_embeddings"
    if key in rope:
        edit(old, rope_scaling=rope | {key: 77}, **{key: rope[key]})
        assert torch.equal(logits(old), expected)


def test_a_sliding_window_ends_the_context_and_yarn_stretches_it(folder):
    """Attention is full up to the window's length; beside yarn, max_position_embeddings may still
    give the original length."""
    for changes, context in (
        ({"model_type": "mistral", "sliding_window": 8, "use_sliding_window": False}, 8),
        ({"model_type": "mistral", "sliding_window": 500}, 128),
        ({"model_type": "mistral", "sliding_window": None}, 128),
        ({"model_type": "mistral", "max_position_embeddings": 9000, "sliding_window": ...}, 4096),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}, 128),
        ({"max_window_layers": 1}, 8),
        ({"max_window_layers": 0}, 8),
        ({"max_window_layers": None}, 128),
        ({"layer_types": ["full_attention"] * 2}, 128),
        ({"layer_types": ["full_attention", "sliding_attention"]}, 8),
        ({"layer_types": ..., "use_sliding_window": False}, 128),
    ):
        edit(folder, **{"max_position_embeddings": 128} | changes)
        assert read_config(folder).context == context, changes
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}
    edit(folder, rope_parameters=..., rope_scaling=yarn)
    assert read_config(folder).context == 400


def test_end_tokens_from_either_file_single_or_many(folder):
    (folder / "generation_config.json").unlink()
    for eos, expected in ((7, (7,)), ([3, 5], (3, 5)), (None, ())):
        edit(folder, eos_token_id=eos)
        assert read_config(folder).eos_ids == expected
    edit(folder, eos_token_id="</s>")
    with pytest.raises(UserError, match="a token id or a list of them"):
        read_config(folder)
    edit(folder, eos_token_id=4)
    (folder / "generation_config.json").write_text('{"eos_token_id": null}')
    assert read_config(folder).eos_ids == (4,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 2]}')
    assert read_config(folder).eos_ids == (9, 2)


def test_absent_keys_take_the_familys_defaults(folder):
    edit(
        folder, num_key_value_heads=..., head_dim=None, attention_bias=..., tie_word_embeddings=...
    )
    config = read_config(folder)
    assert (config.kv_heads, config.head_dim, config.tied, config.qkv_bias) == (4, 8, False, False)
    edit(folder, model_type="qwen2")
    assert read_config(folder).qkv_bias and not read_config(folder).o_bias


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_loading_and_decoding_take_little_more_memory_than_the_weights(tmp_path):
    """At the peak 1.05 times the weights, as stored or widened, and as int8 less than half of them
    afterwards: there is never a second copy."""
    model = random_model(dtype=torch.float32, hidden_size=512, intermediate_size=2048, layers=8,
                         heads=8, kv_heads=8, head_dim=64, vocab_size=16384)  # fmt: skip
    save(model, None, tmp_path / "float32")
    save(model, None, tmp_path / "bfloat16", torch.bfloat16)
    script = (
        "import gc, sys, minispec\n"
        "from minispec.fast import quicken\n"
        "from minispec.generate import decode\n"
        "def memory(key):\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return next(int(x.split()[1]) for x in lines if x.startswith(key)) * 1024\n"
        "def run(path, int8):\n"
        "    gc.collect()\n"
        "    with open('/proc/self/clear_refs', 'w') as file:\n"
        "        file.write('5')\n"
        "    before = memory('VmRSS')\n"
        "    model, _ = minispec.load(path, 'float32', 'cpu')\n"
        "    quicken(model, int8)\n"
        "    decode(model, None, [1, 2, 3], max_new_tokens=3)\n"
        "    return memory('VmHWM') - before, memory('VmRSS') - before\n"
        "for int8 in False, True:\n"
        "    run(sys.argv[1], int8)\n"  # so that libraries are loaded
        "for path in sys.argv[2:]:\n"
        "    for int8 in False, True:\n"
        "        print(*run(path, int8))\n"
    )
    size = (tmp_path / "float32" / "model.safetensors").stat().st_size
    # freed blocks go back to the system, so RSS is what the program holds, not its allocator
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    folders = [str(tmp_path / "float32"), str(tmp_path / "bfloat16")]
    command = [sys.executable, "-c", script, str(GOLDEN / "llama"), *folders]
    out = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    for line, most_held in zip(out.stdout.splitlines(), (1.05, 0.5) * 2, strict=True):
        peak, held = (int(x) / size for x in line.split())
        assert peak < 1.12 and held < most_held, (peak, held)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_hub_id_downloads_safetensors_and_only_without_them_bin(suffix, tmp_path, monkeypatch):
    import huggingface_hub

    source, cache, asked = GOLDEN / "llama", tmp_path / "cache", []

    def snapshot_download(name, allow_patterns, ignore_patterns):
        asked.append((name, "*.bin" in allow_patterns))
        cache.mkdir(exist_ok=True)
        shutil.copy(source / "config.json", cache)
        if suffix == "safetensors":
            shutil.copy(source / "model.safetensors", cache)
        elif "*.bin" in allow_patterns:
            torch.save(tensors(source), cache / "pytorch_model.bin")
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert torch.equal(logits("somebody/model"), logits(source))
    expected = [("somebody/model", False), ("somebody/model", True)]
    assert asked == expected[: 1 if suffix == "safetensors" else 2]


# ---- mistakes


def test_no_such_directory_or_id(tmp_path, monkeypatch):
    refused(tmp_path / "nowhere", "no such directory")
    refused("x" * 300, "no such directory")  # too long a name for any
    (tmp_path / "model.gguf").touch()
    refused(tmp_path / "model.gguf", r"is a file: give the directory")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused("nobody/nothing-at-all", "could not be fetched from the hub")


def test_a_directory_that_is_no_checkpoint(tmp_path, folder):
    refused(tmp_path, "no config.json")
    (folder / "model.safetensors").unlink()
    refused(folder, "has no weights")
    (folder / "config.json").write_text("{")
    refused(folder, "cannot be read as JSON")
    (folder / "config.json").write_text("[]")
    refused(folder, "must hold a JSON object")
    (folder / "adapter_config.json").touch()
    refused(folder, "holds an adapter")


def test_truncated_and_foreign_weight_files(folder):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for damaged in (data[: len(data) // 2], data[:4], b"", b"not a tensor file at all"):
        path.write_bytes(damaged)
        refused(folder, "model.safetensors cannot be read")
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    refused(folder, "only points to its file: fetch that with git lfs pull")
    path.unlink()
    torch.save({"x": print}, folder / "pytorch_model.bin")  # would run code if it were unpickled
    refused(folder, "holds more than tensors")
    old = GOLDEN.parent / "golden" / "llama" / "model.safetensors"
    torch.save(load_file(old), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(logits(folder), logits(GOLDEN / "llama"))  # of before torch 1.6


def test_missing_extra_and_misshapen_tensors_are_named(folder):
    """In torch's own words; a list that would fill the screen is cut."""
    parts, name = tensors(folder), "model.layers.1.mlp.up_proj.weight"
    path, other = folder / "model.safetensors", "model.layers.7.mlp.up_proj.weight"
    lacking = {k: v for k, v in parts.items() if k != name}
    save_file(lacking, path)
    refused(folder, rf'weights do not belong together: Missing key.*: "{name}"\.$')
    save_file(parts | {other: parts[name].clone()}, path)
    refused(folder, rf'Unexpected key.*: "{other}"\.$')
    save_file(lacking | {other: parts[name]}, path)
    refused(folder, f'Missing key.*"{name}".*Unexpected key.*"{other}"')
    save_file(parts | {name: parts[name][:5].clone()}, path)
    refused(folder, rf"size mismatch for {name}: .*\[5, 32\].*\[48, 32\]")
    save_file(parts, path)
    edit(folder, num_hidden_layers=40)
    refused(folder, "Missing key.* …$")


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"model_type": ...}, "model_type None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        ({"rope_parameters": ..., "rope_scaling": {"type": "dynamic"}}, "rope type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor must be a positive number"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types must be a list of"),
        ({"model_type": "mistral", "sliding_window": "x"}, "sliding_window must be a positive"),
        ({"model_type": ["llama"]}, "is not supported"),
        ({"use_sliding_window": True, "max_window_layers": "2"}, "max_window_layers must be a pos"),
        ({"rope_parameters": {"rope_type": ["x"]}}, r"rope type \['x'\] is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": math.inf}}, "factor must be a pos"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is not supported",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_size": "many"}, "hidden_size must be a positive integer"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers must be at most 1000"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"num_key_value_heads": "two"}, "num_key_value_heads must be a positive integer"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"rope_parameters": ..., "rope_theta": "x"}, "rope_theta must be a positive number"),
        ({"rope_parameters": ..., "rope_scaling": "linear"}, "rope_scaling must be one flat"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "must be one flat object"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "contradict each other"),
        ({"rope_parameters": {"factor": 4.0}}, "rope_type must be one of"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor must be a positive"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps must be a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"rope_parameters": {"rope_theta": "1e4"}}, "rope_theta must be a positive number"),
        (
            {"rope_parameters": {"rope_theta": 0}, "rope_theta": 5.0},
            "rope_theta must be a positive",
        ),
        ({"rope_parameters": {"rope_theta": 1}}, "rope_theta must be above 1"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": "x"}},
            "beta_fast must be a positive number",
        ),
    ],
)
def test_unsupported_configurations_are_refused_by_name(folder, changes, match):
    edit(folder, **changes)
    refused(folder, match)


def test_quantised_tensors_are_refused(folder):
    name = "model.layers.1.mlp.up_proj.weight"
    whole = tensors(folder)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        save_file(whole | {name: whole[name].to(dtype)}, folder / "model.safetensors")
        refused(folder, f"{name} is stored as {dtype}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_damaged_numbers_are_refused(folder, value, dtype):
    name = "model.layers.1.mlp.up_proj.weight"
    whole = tensors(folder)
    odd = whole[name].to(dtype)
    odd.view(-1)[-1] = value
    save_file(whole | {name: odd}, folder / "model.safetensors")
    refused(folder, f"{name} has a NaN or an infinity")


def test_a_model_without_end_tokens_is_saved_without_them(tmp_path):
    save(random_model(), None, tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] is None


def test_a_tokenizer_larger_than_the_embedding(folder):
    vocabulary = {chr(0x4E00 + i): i for i in range(65)}
    data = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "一"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(data))
    refused(folder, "the tokenizer has 65 tokens, the embedding only 64")
    del vocabulary[chr(0x4E00 + 64)]
    padding = {"id": 64, "content": "<pad>", "special": True, "single_word": False,
               "lstrip": False, "rstrip": False, "normalized": False}  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(data | {"added_tokens": [padding]}))
    assert load(folder, device="cpu")[1].size == 65  # as Llama 2 has it: a token nobody uses
    (folder / "tokenizer.json").write_text("{}")
    refused(folder, "is not a tokenizer")


def test_devices_and_dtypes_that_are_not_there(folder):
    refused(folder, "device abacus is not available", device="abacus")
    refused(folder, "dtype int3 is not supported", dtype="int3")
    refused(folder, "device cpu:x is not available", device="cpu:x")
    refused(folder, "device cpu: is not available", device="cpu:")
    assert load(folder, device=torch.device("cpu"))[0].device.type == "cpu"
    if not torch.cuda.is_available():
        refused(folder, "device cuda is not available: use one of cpu", device="cuda")
