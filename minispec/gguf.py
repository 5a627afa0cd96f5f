"""A GGUF file, as llama.cpp runs it -> what a checkpoint directory holds.

The `gguf` package reads the file and dequantises its tensors; here they get the names, the layout
and the tokenizer of a Hugging Face checkpoint.
"""

import re
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from torch import Tensor

from minispec.config import Keys, config_of
from minispec.errors import UserError, check_package
from minispec.model import Config, rope_frequencies
from minispec.tokenizer import Tokenizer

FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
CONFIG = {  # after the architecture's name: the key in config.json
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
}
SCALING = {  # the same of rope_scaling
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
NAMES = {
    "token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"}, "attn_output": "self_attn.o_proj",
    **{f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}  # fmt: skip
CONTROL, USER_DEFINED = 3, 4  # token types
END_TOKENS = "eos", "eot", "eom"  # of a text, of a turn, of a message
NAMED = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}  # as transformers calls it


def find_gguf(source: Path) -> Path | None:
    """The GGUF file that `source` is, or is the folder of; None for a checkpoint directory."""
    if source.suffix == ".gguf":
        return source
    files = sorted(source.glob("*.gguf")) if not (source / "config.json").exists() else []
    if len(files) > 1:
        raise UserError(f"{source} holds {len(files)} GGUF files: name one, as {files[0]}")
    return files[0] if files else None


def read_gguf(path: Path) -> tuple[Config, dict[str, Tensor], Tokenizer]:
    """Config, tensors under published names, in float32 or as stored, and tokenizer of a file."""
    check_package("gguf", str(path))
    from gguf import GGUFReader, dequantize

    try:
        reader = GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        stored = {
            t.name: torch.from_numpy(dequantize(t.data, t.tensor_type).copy())
            for t in reader.tensors
        }
        return config_and_tensors(metadata, stored, path) + (read_tokenizer(metadata, path),)
    except UserError:
        raise
    except Exception as error:  # whatever damage, or an unknown quantisation, makes of it
        raise UserError(f"{path} cannot be read as GGUF: {error!r}") from None


def config_and_tensors(
    metadata: dict, stored: dict[str, Tensor], path: Path
) -> tuple[Config, dict[str, Tensor]]:
    """The same as a checkpoint directory would hold them."""
    if metadata.get("split.count", 1) != 1:
        raise UserError(f"{path} is a part of a file: merge it first with llama-gguf-split --merge")
    divisors = stored.pop("rope_freqs.weight", None)
    keys = Keys(path, config_keys(metadata, stored, path))
    config = config_of(keys, keys)
    if divisors is not None:
        config = with_divisors(config, divisors, path)
    tensors = {published(name): tensor for name, tensor in stored.items()}
    if config.model_type == "llama":
        for name, tensor in tensors.items():
            if part := re.search(r"self_attn\.([qk])_proj\.", name):
                heads = config.heads if part[1] == "q" else config.kv_heads
                tensors[name] = halves(tensor, heads)
    return config, tensors


def config_keys(metadata: dict, stored: dict[str, Tensor], path: Path) -> dict:
    """What a config.json would say."""
    architecture = metadata.get("general.architecture")
    if architecture not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(f"{path}: the architecture {architecture} is not one of {known}")
    raw = {key: metadata.get(f"{architecture}.{name}") for name, key in CONFIG.items()}
    scaling = {
        key: metadata.get(f"{architecture}.rope.scaling.{name}") for name, key in SCALING.items()
    }
    head_dim = raw["head_dim"] or (raw["hidden_size"] or 0) // (raw["num_attention_heads"] or 1)
    rotated = metadata.get(f"{architecture}.rope.dimension_count", head_dim)
    ids = [metadata.get(f"tokenizer.ggml.{end}_token_id") for end in END_TOKENS]
    return raw | {
        "model_type": FAMILIES[architecture],
        "vocab_size": len(stored.get("token_embd.weight", [])),
        "partial_rotary_factor": rotated / max(head_dim, 1),
        "rope_scaling": scaling if scaling["rope_type"] not in (None, "none") else None,
        "tie_word_embeddings": "output.weight" not in stored,
        "attention_bias": "blk.0.attn_q.bias" in stored,
        "mlp_bias": "blk.0.ffn_up.bias" in stored,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(i for i in ids if i is not None)),
    }


def with_divisors(config: Config, divisors: Tensor, path: Path) -> Config:
    """The config with Llama 3's scaling, whose file has the divisors (head_dim / 2,) of frequencies
    in its place."""
    scaling = {
        "rope_type": "llama3",
        "factor": float(divisors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaled = replace(config, rope_scaling=scaling)
    ratio = rope_frequencies(config)[0] / rope_frequencies(scaled)[0]
    if divisors.shape != ratio.shape or not torch.allclose(divisors, ratio, rtol=1e-4):
        raise UserError(f"{path}: its rope_freqs are not those of Llama 3: not supported")
    return scaled


def published(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    block, part, kind = re.fullmatch(r"(?:blk\.(\d+)\.)?(.*)\.(\w+)", name).groups()
    return f"{'' if block is None else f'model.layers.{block}.'}{NAMES.get(part, part)}.{kind}"


def halves(rows: Tensor, heads: int) -> Tensor:
    """Rows of q or k whose pairs are neighbours, as llama's files have them, in halves."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


# ---- the tokenizer -------------------------------------------------------------------------------

WORDS = (  # llama 3's; qwen's has single digits
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)  # gpt-2's words
BYTES_ALONE = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def words_of(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, BYTES_ALONE])


PRE = {  # how a text is cut before its bytes are merged
    "gpt-2": BYTES,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES]),
    "qwen2": words_of(WORDS.replace("{1,3}", "")),
    "llama-bpe": words_of(WORDS),
}


def read_tokenizer(metadata: dict, path: Path) -> Tokenizer:
    """The tokenizer that the metadata holds: a BPE over bytes, which llama.cpp calls gpt2."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in PRE:
        raise UserError(
            f"{path}: the tokenizer {kind} with pre {pre} is not supported, only gpt2 with "
            f"{', '.join(PRE)}: take the model's safetensors and tokenizer.json"
        )
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ")) for pair in metadata["tokenizer.ggml.merges"]]
    ids = {token: i for i, token in enumerate(tokens)}
    if not all(len(pair) == 2 and {*pair, "".join(pair)} <= ids.keys() for pair in merges):
        raise UserError(f"{path}: the tokenizer's merges do not go with its tokens")
    whole = pre == "llama-bpe"  # a word that is a token is not merged from its parts
    backend = Backend(models.BPE(ids, merges, ignore_merges=whole))
    backend.pre_tokenizer, backend.decoder = PRE[pre], decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    for token, kind in zip(tokens, types, strict=True):
        if kind in (CONTROL, USER_DEFINED):
            backend.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False)])
    given = {NAMED[k]: metadata.get(f"tokenizer.ggml.{k}_token_id") for k in NAMED}
    named = {f"{name}_token": tokens[i] for name, i in given.items() if i is not None}
    if metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        bos = named["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, ids[bos])]
        )
    return Tokenizer(backend, named, metadata.get("tokenizer.chat_template"))
