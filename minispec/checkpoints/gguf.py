"""Read GGUF files, the format of llama.cpp, as if they were checkpoint directories.

The `gguf` package reads the file and dequantises its tensors. This module gives them the names and
the layout of a Hugging Face checkpoint, and converts the metadata to a config and a tokenizer.
"""

import re
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from torch import Tensor

from minispec.checkpoints.config import Keys, parse_config
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.cli import UserError
from minispec.model import Config, rope_frequencies

ARCHITECTURES = "llama", "qwen2", "qwen3"  # Mistral's files use llama's
CONFIG_KEYS = {  # GGUF key, without the architecture -> key in config.json
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
SCALING_KEYS = {  # the same for rope_scaling
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scale_linear": "factor",  # in older files
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.finetuned": "finetuned",
}
# keys that contain one of these change the mathematics
UNSUPPORTED_KEYS = re.compile("scal|softcap|expert_count|sections")
TENSOR_NAMES = {
    "token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"}, "attn_output": "self_attn.o_proj",
    **{f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}  # fmt: skip
CONTROL, USER_DEFINED = 3, 4  # in tokenizer.ggml.token_type
SPECIAL_KEYS = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}  # GGUF -> HF
END_KEYS = "eos", "eot", "eom"  # end of sequence, of turn, of message
# These are control tokens, whatever type the file gives them; the end tokens are llama.cpp's list.
# None can be part of an ordinary word: every pre-tokenizer separates letters from these symbols.
END_TOKENS = {"<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|eom_id|>",
              "<|end_of_text|>", "<end_of_turn>", "<end_of_utterance>", "</s>",
              "<｜end▁of▁sentence｜>"}  # fmt: skip
CONTROL_TOKENS = END_TOKENS | {"<|im_start|>", "<|start_header_id|>", "<|end_header_id|>"}
PROJECTOR = "a multimodal projector, not a model; choose the model's own file"
NOT_A_MODEL = {  # by general.type or general.architecture
    "adapter": "a LoRA adapter, not a model; merge it into its model with llama-export-lora",
    "imatrix": "an importance matrix, not a model; choose the model's own file",
    "mmproj": PROJECTOR,
    "clip": PROJECTOR,
}


def find_gguf(source: Path) -> Path | None:
    """Return the GGUF file that `source` is or contains; None for a checkpoint directory."""
    if source.is_file():
        return source
    if any(source.glob("*.safetensors")) or any(source.glob("*.bin")):
        return None
    files = sorted(source.glob("*.gguf"))
    if len(files) > 1:
        raise UserError(f"{source} has {len(files)} GGUF files; choose one, such as {files[0]}")
    return files[0] if files else None


def open_gguf(path: Path) -> tuple[dict, list]:
    """Read a file's metadata, by key, and its tensors as stored."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        tensors = reader.tensors
    except Exception as error:  # a damaged file may raise anything
        raise UserError(f"{path} cannot be read as GGUF: {error!r}") from None
    if metadata.get("split.count", 1) != 1:
        raise UserError(f"{path} is part of a split file; merge it with llama-gguf-split --merge")
    for key in "general.type", "general.architecture":
        if (kind := str(metadata.get(key))) in NOT_A_MODEL:
            raise UserError(f"{path} is {NOT_A_MODEL[kind]}")
    return metadata, tensors


def read_gguf(path: Path) -> tuple[Config, dict[str, Tensor], Tokenizer | None]:
    """Read the config, the dequantised tensors under their published names, and the tokenizer (None
    if it is not supported, as prompts of token ids do not need one)."""
    metadata, stored = open_gguf(path)
    from gguf import dequantize  # open_gguf has imported it already

    if not stored:
        raise UserError(f"{path} has only a vocabulary; choose a file with the model's weights")
    tokenizer = None if unsupported_reason(metadata) else build_tokenizer(metadata, path)
    try:
        tensors = {t.name: torch.tensor(dequantize(t.data, t.tensor_type)) for t in stored}
    except (NotImplementedError, ValueError) as error:
        raise UserError(f"{path}: this quantisation is not supported: {error}") from None
    divisors = tensors.pop("rope_freqs.weight", None)
    keys = Keys(path, config_keys(metadata, tensors, path))
    config = parse_config(keys, keys)
    rotated = metadata.get(f"{config.model_type}.rope.dimension_count", config.head_dim)
    if rotated != config.head_dim:
        dimensions = f"{rotated} of {config.head_dim} dimensions"
        raise UserError(f"{path}: partial rotation ({dimensions}) is not supported")
    if divisors is not None:
        config = with_llama3_scaling(config, divisors, path)
    named = {hf_name(name): tensor for name, tensor in tensors.items()}
    if config.model_type == "llama":
        for name, tensor in named.items():
            if part := re.search(r"self_attn\.([qk])_proj\.", name):
                heads = config.heads if part[1] == "q" else config.kv_heads
                named[name] = unpermute(tensor, heads, path)
    return config, named, tokenizer


def read_gguf_tokenizer(path: Path) -> Tokenizer:
    """Read the tokenizer without the tensors."""
    return build_tokenizer(open_gguf(path)[0], path)


# ---- config and tensors --------------------------------------------------------------------------


def config_keys(metadata: dict, tensors: dict[str, Tensor], path: Path) -> dict:
    """Return the keys of a config.json. Raise UserError if others would change the mathematics."""
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UserError(f"{path}: the architecture {architecture} is not one of {known}")
    settings = {
        key.removeprefix(f"{architecture}."): value
        for key, value in metadata.items()
        if key.startswith(f"{architecture}.")
    }
    for name, value in settings.items():
        if UNSUPPORTED_KEYS.search(name) and name not in SCALING_KEYS and value not in (0, 1, None):
            raise UserError(f"{path}: {name} = {value} is not supported")
    raw = {key: settings.get(name) for name, key in CONFIG_KEYS.items()}
    scaling = {key: settings[name] for name, key in SCALING_KEYS.items() if name in settings}
    rope_type = scaling.setdefault("rope_type", "linear" if "factor" in scaling else "none")
    return raw | {
        "model_type": architecture,
        "vocab_size": len(tensors.get("token_embd.weight", [])),
        "rope_scaling": None if rope_type == "none" else scaling,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "bos_token_id": special_ids(metadata).get("bos"),
        "eos_token_id": end_ids(metadata),
    }


def token_list(metadata: dict) -> list[str]:
    """Return the vocabulary; empty if the file has none."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    return tokens if isinstance(tokens, list) else []


def special_ids(metadata: dict) -> dict[str, int]:
    """Return the ids of the tokens that have their own keys: bos, eos, eot, … Ids out of range are
    ignored: converters write -1 or 4294967295 for "none"."""
    size, names = len(token_list(metadata)), (*SPECIAL_KEYS, *END_KEYS)
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names}
    return {name: i for name, i in ids.items() if type(i) is int and 0 <= i < size}


def end_ids(metadata: dict) -> list[int]:
    """Return the tokens at which llama.cpp stops: those with their own keys, and some by name."""
    special = special_ids(metadata)
    ids = [special[key] for key in END_KEYS if key in special]
    ids += [i for i, token in enumerate(token_list(metadata)) if token in END_TOKENS]
    return list(dict.fromkeys(ids))


def with_llama3_scaling(config: Config, divisors: Tensor, path: Path) -> Config:
    """Return the config with Llama 3's scaling, after checking that it yields the divisors of the
    frequencies (head_dim / 2,), which are all that a Llama 3 file stores."""
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
        raise UserError(f"{path}: rope_freqs other than Llama 3's are not supported")
    return scaled


def hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    layer = ""
    if name.startswith("blk."):
        _, number, name = name.split(".", 2)
        layer = f"model.layers.{number}."
    part, _, kind = name.rpartition(".")
    return f"{layer}{TENSOR_NAMES.get(part, part)}.{kind}"


def unpermute(rows: Tensor, heads: int, path: Path) -> Tensor:
    """Reorder rows of q or k from adjacent rotary pairs, as GGUF llamas store them, to halves."""
    if len(rows) % (2 * heads):
        raise UserError(f"{path}: {len(rows)} rows of q or k do not fit {heads} heads")
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


# ---- the tokenizer -------------------------------------------------------------------------------

LLAMA3_PATTERN = (  # qwen2's is the same, but with single digits
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN_PATTERN = (  # Mistral's; words also end before a capital letter
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2_SPLIT = pre_tokenizers.ByteLevel(add_prefix_space=False)  # with GPT-2's pattern
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, BYTE_LEVEL])


PRE_TOKENIZERS = {  # how text is split before bytes are merged
    "gpt-2": GPT2_SPLIT,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2_SPLIT]),
    "qwen2": split_by(LLAMA3_PATTERN.replace("{1,3}", "")),
    "llama-bpe": split_by(LLAMA3_PATTERN),
    "smaug-bpe": split_by(LLAMA3_PATTERN),
    "tekken": split_by(TEKKEN_PATTERN),
}
PRE_ALIASES = {  # other names for the same: llama.cpp splits and merges alike
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "midm-2.0"), "llama-bpe"),
    **dict.fromkeys(("mellum", "a.x-4.0", "trillion"), "gpt-2"),
    **dict.fromkeys(("starcoder", "refact", "minerva-7b"), "smollm"),
    "deepseek-r1-qwen": "qwen2", "dbrx": "smaug-bpe",
}  # fmt: skip
# these look up a whole word before merging its parts; their texts begin with BOS by default
IGNORE_MERGES = "llama-bpe", "tekken"


def pre_tokenizer_name(metadata: dict) -> str:
    """Return the name of the pre-tokenizer; empty if the file has none."""
    name = str(metadata.get("tokenizer.ggml.pre", ""))
    return PRE_ALIASES.get(name, name)


def adds_bos(metadata: dict) -> bool:
    """Return whether texts begin with BOS."""
    default = pre_tokenizer_name(metadata) in IGNORE_MERGES
    return metadata.get("tokenizer.ggml.add_bos_token", default)


def unsupported_reason(metadata: dict) -> str | None:
    """Return why a file's tokenizer is not supported; None if it is supported."""
    kind, pre = metadata.get("tokenizer.ggml.model"), pre_tokenizer_name(metadata)
    if kind != "gpt2":
        return f"its tokenizer, {kind}, is not supported, only gpt2 (byte-level BPE)"
    if not pre:  # llama.cpp would guess, with a warning
        return "it does not name its pre-tokenizer (gguf-new-metadata --pre-tokenizer NAME adds it)"
    if pre not in PRE_TOKENIZERS:
        return f"its pre-tokenizer, {pre}, is not one of {', '.join(PRE_TOKENIZERS)}"
    if adds_bos(metadata) and "bos" not in special_ids(metadata):
        return "its texts begin with a BOS token, but it does not define one"
    return None


def build_tokenizer(metadata: dict, path: Path) -> Tokenizer:
    """Build the tokenizer from the metadata: a byte-level BPE, which llama.cpp calls gpt2."""
    if reason := unsupported_reason(metadata):
        raise UserError(
            f"{path}: {reason}; use token ids (--prompt-ids with --json) or the model's "
            "safetensors and tokenizer.json"
        )
    lists = [metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type", "merges")]
    if not all(isinstance(values, list) for values in lists) or len(lists[0]) != len(lists[1]):
        raise UserError(f"{path}: the tokenizer has no valid tokens, token_type or merges")
    tokens, types, merges = lists
    ids = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(str(merge).split(" ")) for merge in merges]
    if not all(len(pair) == 2 and {*pair, "".join(pair)} <= ids.keys() for pair in pairs):
        raise UserError(f"{path}: the tokenizer's merges do not match its tokens")
    pre = pre_tokenizer_name(metadata)
    backend = Backend(models.BPE(ids, pairs, ignore_merges=pre in IGNORE_MERGES))
    backend.pre_tokenizer, backend.decoder = PRE_TOKENIZERS[pre], decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    special = special_ids(metadata)
    controls = {special.get("bos"), *end_ids(metadata)}  # not padding, which may be a word
    for i, (token, kind) in enumerate(zip(tokens, types)):
        control = kind == CONTROL or i in controls or token in CONTROL_TOKENS
        if control or kind == USER_DEFINED:
            backend.add_tokens([AddedToken(token, special=control, normalized=False)])
    if adds_bos(metadata):
        bos = tokens[special["bos"]]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, ids[bos])]
        )
    named = {f"{name}_token": tokens[special[key]] for key, name in SPECIAL_KEYS.items()
             if key in special}  # fmt: skip
    return Tokenizer(backend, named, metadata.get("tokenizer.chat_template"))
