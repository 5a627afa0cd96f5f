"""A GGUF file, as llama.cpp runs it -> what a checkpoint directory holds.

The `gguf` package reads the file and dequantises its tensors; here they get the names and the
layout of a Hugging Face checkpoint, and the metadata become its config and tokenizer.
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

ARCHITECTURES = "llama", "qwen2", "qwen3"  # Mistral's files are of llama's
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
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scale_linear": "factor",  # in older files
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.finetuned": "finetuned",
}
CHANGES = re.compile("scal|softcap|expert_count|sections")  # in keys that change the mathematics
TENSORS = {
    "token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"}, "attn_output": "self_attn.o_proj",
    **{f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}  # fmt: skip
CONTROL, USER_DEFINED = 3, 4  # types of tokens
SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}  # and in transformers
ENDS = "eos", "eot", "eom"  # of a text, of a turn, of a message
ENDS_BY_NAME = {"<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|eom_id|>",
                "<end_of_turn>"}  # which llama.cpp ends at as well  # fmt: skip


def find_gguf(source: Path) -> Path | None:
    """The GGUF file that `source` is, or is the folder of; None for a checkpoint directory."""
    if source.is_file():
        return source
    if any(source.glob("*.safetensors")) or any(source.glob("*.bin")):
        return None
    files = sorted(source.glob("*.gguf"))
    if len(files) > 1:
        raise UserError(f"{source} holds {len(files)} GGUF files: name one, as {files[0]}")
    return files[0] if files else None


def open_gguf(path: Path) -> tuple[dict, list]:
    """A file's metadata by key, and its tensors as they are stored."""
    check_package("gguf", str(path))
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        tensors = reader.tensors
    except Exception as error:  # whatever a damaged file raises
        raise UserError(f"{path} cannot be read as GGUF: {error!r}") from None
    if metadata.get("split.count", 1) != 1:
        raise UserError(f"{path} is a part of a file: merge it with llama-gguf-split --merge")
    return metadata, tensors


def read_gguf(path: Path) -> tuple[Config, dict[str, Tensor], Tokenizer]:
    """Config, tensors under published names, dequantised, and tokenizer of a file."""
    metadata, stored = open_gguf(path)
    from gguf import dequantize  # which is there, as the file could be opened

    tokenizer = tokenizer_of(metadata, path)
    try:
        tensors = {t.name: torch.tensor(dequantize(t.data, t.tensor_type)) for t in stored}
    except (NotImplementedError, ValueError) as error:
        raise UserError(f"{path}: a quantisation that is not supported: {error}") from None
    divisors = tensors.pop("rope_freqs.weight", None)
    keys = Keys(path, config_keys(metadata, tensors, path))
    config = config_of(keys, keys)
    rotated = metadata.get(f"{config.model_type}.rope.dimension_count", config.head_dim)
    if rotated != config.head_dim:
        raise UserError(f"{path}: rotates {rotated} of {config.head_dim} dimensions: not supported")
    if divisors is not None:
        config = with_divisors(config, divisors, path)
    named = {published(name): tensor for name, tensor in tensors.items()}
    if config.model_type == "llama":
        for name, tensor in named.items():
            if part := re.search(r"self_attn\.([qk])_proj\.", name):
                heads = config.heads if part[1] == "q" else config.kv_heads
                named[name] = halves(tensor, heads, path)
    return config, named, tokenizer


def read_gguf_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer alone: no tensor is read."""
    return tokenizer_of(open_gguf(path)[0], path)


# ---- config and tensors --------------------------------------------------------------------------


def config_keys(metadata: dict, tensors: dict[str, Tensor], path: Path) -> dict:
    """What a config.json would say. Whatever else would change the mathematics is refused."""
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UserError(f"{path}: the architecture {architecture} is not one of {known}")
    given = {
        key.removeprefix(f"{architecture}."): value
        for key, value in metadata.items()
        if key.startswith(f"{architecture}.")
    }
    for name, value in given.items():
        if CHANGES.search(name) and name not in SCALING and value not in (0, 1, None):
            raise UserError(f"{path}: {name} = {value} is not supported")
    raw = {key: given.get(name) for name, key in CONFIG.items()}
    scaling = {key: given[name] for name, key in SCALING.items() if name in given}
    kind = scaling.setdefault("rope_type", "linear" if "factor" in scaling else "none")
    return raw | {
        "model_type": architecture,
        "vocab_size": len(tensors.get("token_embd.weight", [])),
        "rope_scaling": None if kind == "none" else scaling,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_ids(metadata),
    }


def end_ids(metadata: dict) -> list[int]:
    """The tokens that llama.cpp ends at: those with a key of their own, and some by their names."""
    ids = [metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ENDS]
    tokens = zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"])
    ids += [i for i, (token, kind) in enumerate(tokens)
            if kind == CONTROL and token in ENDS_BY_NAME]  # fmt: skip
    return list(dict.fromkeys(i for i in ids if i is not None))


def with_divisors(config: Config, divisors: Tensor, path: Path) -> Config:
    """A Llama 3 file stores no scaling, only the divisors (head_dim / 2,) of the frequencies: the
    config with the scaling that makes them."""
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
    layer = ""
    if name.startswith("blk."):
        _, number, name = name.split(".", 2)
        layer = f"model.layers.{number}."
    part, _, kind = name.rpartition(".")
    return f"{layer}{TENSORS.get(part, part)}.{kind}"


def halves(rows: Tensor, heads: int, path: Path) -> Tensor:
    """Rows of q or k whose pairs are neighbours, as llama's files have them, in halves."""
    if len(rows) % (2 * heads):
        raise UserError(f"{path}: its rows of q or k do not go with its heads")
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


def tokenizer_of(metadata: dict, path: Path) -> Tokenizer:
    """The tokenizer that the metadata hold: a BPE over bytes, which llama.cpp calls gpt2."""
    kind, pre = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if kind != "gpt2" or pre not in PRE:
        raise UserError(
            f"{path}: the tokenizer {kind} with pre {pre} is not supported, only gpt2 with "
            f"{', '.join(PRE)}: take the model's safetensors and tokenizer.json"
        )
    lists = [metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type", "merges")]
    if not all(isinstance(each, list) for each in lists) or len(lists[0]) != len(lists[1]):
        raise UserError(f"{path}: the tokenizer's tokens, token_type or merges are missing or odd")
    tokens, types, merges = lists
    ids = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(str(merge).split(" ")) for merge in merges]
    if not all(len(pair) == 2 and {*pair, "".join(pair)} <= ids.keys() for pair in pairs):
        raise UserError(f"{path}: the tokenizer's merges do not go with its tokens")
    whole = pre == "llama-bpe"  # a word that is a token is not merged from its parts
    backend = Backend(models.BPE(ids, pairs, ignore_merges=whole))
    backend.pre_tokenizer, backend.decoder = PRE[pre], decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    named = special_tokens(metadata, tokens, path)
    for token, kind in zip(tokens, types):
        special = kind == CONTROL or token in named.values()
        if special or kind == USER_DEFINED:
            backend.add_tokens([AddedToken(token, special=special, normalized=False)])
    if metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        bos = named.get("bos_token")
        if bos is None:
            raise UserError(f"{path}: texts begin with a BOS token, but none is named")
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, ids[bos])]
        )
    return Tokenizer(backend, named, metadata.get("tokenizer.chat_template"))


def special_tokens(metadata: dict, tokens: list[str], path: Path) -> dict[str, str]:
    """bos_token, eos_token, unk_token and pad_token, as far as the file names them."""
    named = {}
    for ours, theirs in SPECIAL.items():
        i = metadata.get(f"tokenizer.ggml.{ours}_token_id")
        if i is not None and not (type(i) is int and i < len(tokens)):
            raise UserError(f"{path}: {ours}_token_id {i} is no token")
        if i is not None:
            named[f"{theirs}_token"] = tokens[i]
    return named
