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

from minispec.checkpoints.config import Keys, config_of
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.errors import UserError
from minispec.model import Config, rope_frequencies

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
# Control tokens by name, whatever type a file gives them; the ends are llama.cpp's. None of them is
# ever an ordinary word: every pre-tokenizer separates letters from these signs.
ENDS_BY_NAME = {"<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|eom_id|>",
                "<|end_of_text|>", "<end_of_turn>", "<end_of_utterance>", "</s>",
                "<｜end▁of▁sentence｜>"}  # fmt: skip
CONTROL_BY_NAME = ENDS_BY_NAME | {"<|im_start|>", "<|start_header_id|>", "<|end_header_id|>"}
PROJECTOR = "a multimodal projector, not a model: choose the model's own file"
NO_MODEL = {  # by general.type or general.architecture
    "adapter": "an adapter (LoRA), not a model: merge it into its model with llama-export-lora",
    "imatrix": "an importance matrix, not a model: choose the model's own file",
    "mmproj": PROJECTOR,
    "clip": PROJECTOR,
}


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
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        tensors = reader.tensors
    except Exception as error:  # whatever a damaged file raises
        raise UserError(f"{path} cannot be read as GGUF: {error!r}") from None
    if metadata.get("split.count", 1) != 1:
        raise UserError(f"{path} is a part of a file: merge it with llama-gguf-split --merge")
    for key in "general.type", "general.architecture":
        if (kind := str(metadata.get(key))) in NO_MODEL:
            raise UserError(f"{path} holds {NO_MODEL[kind]}")
    return metadata, tensors


def read_gguf(path: Path) -> tuple[Config, dict[str, Tensor], Tokenizer | None]:
    """Config, tensors under published names, dequantised, and tokenizer of a file; None if that
    tokenizer is not supported, as a prompt of token ids does not need one."""
    metadata, stored = open_gguf(path)
    from gguf import dequantize  # which is there, as the file could be opened

    if not stored:
        raise UserError(f"{path} holds only a vocabulary: choose a file with the model's weights")
    tokenizer = None if unsupported(metadata) else tokenizer_of(metadata, path)
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
    named = {hf_name(name): tensor for name, tensor in tensors.items()}
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
        "bos_token_id": special_ids(metadata).get("bos"),
        "eos_token_id": end_ids(metadata),
    }


def token_list(metadata: dict) -> list[str]:
    """The vocabulary; empty if the file has none."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    return tokens if isinstance(tokens, list) else []


def special_ids(metadata: dict) -> dict[str, int]:
    """The tokens that have keys of their own: bos, eos, eot, … An id out of range names no token;
    converters write -1 or 4294967295 for none."""
    size = len(token_list(metadata))
    given = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in (*SPECIAL, *ENDS)}
    return {name: i for name, i in given.items() if type(i) is int and 0 <= i < size}


def end_ids(metadata: dict) -> list[int]:
    """The tokens that llama.cpp ends at: those with a key of their own, and some by their names."""
    named = special_ids(metadata)
    ids = [named[end] for end in ENDS if end in named]
    ids += [i for i, token in enumerate(token_list(metadata)) if token in ENDS_BY_NAME]
    return list(dict.fromkeys(ids))


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


def hf_name(name: str) -> str:
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
CASED = (  # mistral's: words also end before a capital letter
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
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
    "smaug-bpe": words_of(WORDS),
    "tekken": words_of(CASED),
}
SAME = {  # other names of these: llama.cpp cuts and merges alike
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "midm-2.0"), "llama-bpe"),
    **dict.fromkeys(("mellum", "a.x-4.0", "trillion"), "gpt-2"),
    **dict.fromkeys(("starcoder", "refact", "minerva-7b"), "smollm"),
    "deepseek-r1-qwen": "qwen2", "dbrx": "smaug-bpe",
}  # fmt: skip
# a word that is a token is not merged from its parts; texts begin with BOS unless the file says not
WHOLE = "llama-bpe", "tekken"


def pre_of(metadata: dict) -> str:
    """The name of the pre-tokenizer; empty if the file has none."""
    name = str(metadata.get("tokenizer.ggml.pre", ""))
    return SAME.get(name, name)


def adds_bos(metadata: dict) -> bool:
    """Whether texts begin with BOS."""
    return metadata.get("tokenizer.ggml.add_bos_token", pre_of(metadata) in WHOLE)


def unsupported(metadata: dict) -> str | None:
    """Why a file's tokenizer cannot be read, if that is so."""
    kind, pre = metadata.get("tokenizer.ggml.model"), pre_of(metadata)
    if kind != "gpt2":
        return f"its tokenizer, {kind}, is not supported, only gpt2 (BPE over bytes)"
    if not pre:  # llama.cpp would guess, with a warning
        return "it does not name its pre-tokenizer; gguf-new-metadata --pre-tokenizer NAME adds it"
    if pre not in PRE:
        return f"its pre-tokenizer, {pre}, is not one of {', '.join(PRE)}"
    if adds_bos(metadata) and "bos" not in special_ids(metadata):
        return "texts begin with a BOS token, but it does not name one"
    return None


def tokenizer_of(metadata: dict, path: Path) -> Tokenizer:
    """The tokenizer that the metadata hold: a BPE over bytes, which llama.cpp calls gpt2."""
    if reason := unsupported(metadata):
        raise UserError(
            f"{path}: {reason}: use token ids (--prompt-ids with --json), or the model's "
            "safetensors and tokenizer.json"
        )
    lists = [metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type", "merges")]
    if not all(isinstance(each, list) for each in lists) or len(lists[0]) != len(lists[1]):
        raise UserError(f"{path}: the tokenizer's tokens, token_type or merges are missing or odd")
    tokens, types, merges = lists
    ids = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(str(merge).split(" ")) for merge in merges]
    if not all(len(pair) == 2 and {*pair, "".join(pair)} <= ids.keys() for pair in pairs):
        raise UserError(f"{path}: the tokenizer's merges do not go with its tokens")
    pre = pre_of(metadata)
    backend = Backend(models.BPE(ids, pairs, ignore_merges=pre in WHOLE))
    backend.pre_tokenizer, backend.decoder = PRE[pre], decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    named = special_ids(metadata)
    controls = {named.get("bos"), *end_ids(metadata)}  # but padding may be an ordinary word
    for i, (token, kind) in enumerate(zip(tokens, types)):
        special = kind == CONTROL or i in controls or token in CONTROL_BY_NAME
        if special or kind == USER_DEFINED:
            backend.add_tokens([AddedToken(token, special=special, normalized=False)])
    if adds_bos(metadata):
        bos = tokens[named["bos"]]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, ids[bos])]
        )
    texts = {f"{SPECIAL[name]}_token": tokens[i] for name, i in named.items() if name in SPECIAL}
    return Tokenizer(backend, texts, metadata.get("tokenizer.chat_template"))
