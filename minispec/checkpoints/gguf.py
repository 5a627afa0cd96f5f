"""Read GGUF files, the format of llama.cpp, as if they were checkpoint directories.

The `gguf` package reads the file and dequantises its tensors. This module gives them the names and
the layout of a Hugging Face checkpoint, and converts the metadata to a config and a tokenizer."""

import re
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from torch import Tensor

from minispec.checkpoints.config import CheckedJson, parse_config
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.cli import UserError, user_error
from minispec.model import Config, Transformer, rope_frequencies

ARCHITECTURES = "llama", "qwen2", "qwen3"  # Mistral's files use llama's
CONFIG_KEYS = {  # GGUF key, without the architecture -> key in config.json
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.dimension_count": "head_dim",  # with partial rotation, the weights do not fit
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
}
SCALING_KEYS = {  # the same for rope_scaling
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
# keys that contain one of these change the mathematics
UNSUPPORTED_KEYS = re.compile("scal|softcap|expert_count|sections")
CONTROL, USER_DEFINED = 3, 4  # in tokenizer.ggml.token_type
SPECIAL_KEYS = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}  # GGUF -> HF
END_KEYS = "eos", "eot", "eom"  # end of sequence, of turn, of message
# These are control tokens, whatever type the file gives them; the end tokens are llama.cpp's list.
# None can be part of an ordinary word: every pre-tokenizer separates letters from these symbols.
END_TOKENS = {"<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|eom_id|>",
              "<|end_of_text|>", "<end_of_turn>", "<end_of_utterance>", "</s>",
              "<｜end▁of▁sentence｜>"}  # fmt: skip
CONTROL_TOKENS = END_TOKENS | {"<|im_start|>", "<|start_header_id|>", "<|end_header_id|>"}


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

    with user_error(f"{path} cannot be read as GGUF"):
        reader = GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        tensors = reader.tensors
    if metadata.get("split.count", 1) != 1:
        raise UserError(f"{path} is part of a split file; merge it with llama-gguf-split --merge")
    if (kind := metadata.get("general.type", "model")) != "model":
        raise UserError(f"{path} is not a model but of type {kind}; choose the model's own file")
    return metadata, tensors


def read_gguf(path: Path) -> tuple[Config, dict[str, Tensor], Tokenizer | None]:
    """Read the config, the dequantised tensors under their published names, and the tokenizer (None
    if it is not supported: prompts of token ids need none)."""
    metadata, stored = open_gguf(path)
    from gguf import dequantize  # open_gguf has imported it already

    vocabulary = tokenizer_keys(metadata)
    tokenizer = None if unsupported_reason(vocabulary) else build_tokenizer(vocabulary, path)
    with user_error(f"{path}: this quantisation is not supported"):
        tensors = {t.name: torch.tensor(dequantize(t.data, t.tensor_type)) for t in stored}
    divisors = tensors.pop("rope_freqs.weight", None)
    keys = CheckedJson(path, config_keys(metadata, tensors, path))
    config = parse_config(keys, keys)
    if divisors is not None:
        config = with_llama3_scaling(config, divisors, path)
    names = published_names(config)
    named = {names.get(name, name): tensor for name, tensor in tensors.items()}
    if config.model_type == "llama":
        for name in filter(re.compile(r".*self_attn\.[qk]_proj").match, named):
            with user_error(f"{path}: {name} does not fit head_dim {config.head_dim}"):
                pairs = named[name].unflatten(0, (-1, config.head_dim // 2, 2))  # rotary, adjacent
                named[name] = pairs.transpose(1, 2).reshape(named[name].shape)  # to halves
    return config, named, tokenizer


def read_gguf_tokenizer(path: Path) -> Tokenizer:
    """Read the tokenizer without the tensors."""
    return build_tokenizer(tokenizer_keys(open_gguf(path)[0]), path)


# ---- config and tensors --------------------------------------------------------------------------


def config_keys(metadata: dict, tensors: dict[str, Tensor], path: Path) -> dict:
    """Return the keys of a config.json. Raise UserError if others would change the mathematics."""
    if (kind := metadata.get("general.architecture")) not in ARCHITECTURES:
        raise UserError(f"{path}: the architecture {kind} is not one of {', '.join(ARCHITECTURES)}")
    prefix = f"{kind}."
    settings = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    for name, value in settings.items():
        if UNSUPPORTED_KEYS.search(name) and name not in SCALING_KEYS and value not in (0, 1, None):
            raise UserError(f"{path}: {name} = {value} is not supported")
    raw = {key: settings[name] for name, key in CONFIG_KEYS.items() if name in settings}
    scaling = {key: settings[name] for name, key in SCALING_KEYS.items() if name in settings}
    rope_type = scaling.setdefault("rope_type", "linear" if "factor" in scaling else "none")
    vocabulary = tokenizer_keys(metadata)
    return raw | {
        "model_type": kind,
        "vocab_size": len(tensors.get("token_embd.weight", [])),
        "rope_scaling": None if rope_type == "none" else scaling,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "bos_token_id": vocabulary["special"].get("bos"),
        "eos_token_id": vocabulary["ends"],
    }


def with_llama3_scaling(config: Config, divisors: Tensor, path: Path) -> Config:
    """Return the config with Llama 3's scaling, after checking that it yields the divisors of the
    frequencies (head_dim / 2,), which are all that a Llama 3 file stores."""
    scaling = {"rope_type": "llama3", "factor": float(divisors.max()), "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    scaled = replace(config, rope_scaling=scaling)
    ratio = rope_frequencies(config)[0] / rope_frequencies(scaled)[0]
    if divisors.shape != ratio.shape or not torch.allclose(divisors, ratio, rtol=1e-4):
        raise UserError(f"{path}: rope_freqs other than Llama 3's are not supported")
    return scaled


def published_names(config: Config) -> dict[str, str]:
    """Map GGUF's names of the model's tensors to the published ones."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    name_map = get_tensor_name_map(MODEL_ARCH[config.model_type.upper()], config.layers)
    with torch.device("meta"):
        names = Transformer(config).state_dict()
    return {name_map.get_name(name, (".weight", ".bias")): name for name in names}


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


def tokenizer_keys(metadata: dict) -> dict:
    """Return the tokenizer's keys, without their prefix and with llama.cpp's defaults. Adds
    `special`, the ids of the tokens with keys of their own (bos, eos, eot, …), and `ends`, the ids
    at which llama.cpp stops, some of which it knows by name."""
    keys = {re.sub(r"^tokenizer\.(ggml\.)?", "", key): value for key, value in metadata.items()}
    pre = str(keys.get("pre", ""))
    keys["pre"] = PRE_ALIASES.get(pre, pre)
    keys.setdefault("add_bos_token", keys["pre"] in IGNORE_MERGES)
    if not isinstance(keys.get("tokens"), list):
        keys["tokens"] = []
    ids = {name: keys.get(f"{name}_token_id") for name in (*SPECIAL_KEYS, *END_KEYS)}
    known = range(len(keys["tokens"]))  # converters write -1 or 4294967295 for "none"
    keys["special"] = {n: i for n, i in ids.items() if type(i) is int and i in known}
    ends = [keys["special"].get(name) for name in END_KEYS]
    ends += [i for i, token in enumerate(keys["tokens"]) if token in END_TOKENS]
    keys["ends"] = [i for i in dict.fromkeys(ends) if i is not None]
    return keys


def unsupported_reason(keys: dict) -> str | None:
    """Return why a file's tokenizer is not supported; None if it is supported."""
    kind, pre, known = keys.get("model"), keys["pre"], ", ".join(PRE_TOKENIZERS)
    no_bos = keys["add_bos_token"] and "bos" not in keys["special"]
    no_pre = "it does not name its pre-tokenizer (gguf-new-metadata --pre-tokenizer NAME adds it)"
    reasons = {
        f"its tokenizer, {kind}, is not supported, only gpt2 (byte-level BPE)": kind != "gpt2",
        no_pre: not pre,  # llama.cpp would guess, with a warning
        f"its pre-tokenizer, {pre}, is not one of {known}": pre not in PRE_TOKENIZERS,
        "its texts begin with a BOS token, but it does not define one": no_bos,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def build_tokenizer(keys: dict, path: Path) -> Tokenizer:
    """Build the tokenizer from its keys: a byte-level BPE, which llama.cpp calls gpt2."""
    if reason := unsupported_reason(keys):
        raise UserError(f"{path}: {reason}; use token ids (--prompt-ids with --json) or the "
                        "model's safetensors and tokenizer.json")  # fmt: skip
    tokens, pre = keys["tokens"], keys["pre"]
    with user_error(f"{path}: the tokenizer's tokens, token_type and merges do not fit"):
        types = dict(zip(tokens, keys["token_type"], strict=True))
        ids = {t: i for i, t in enumerate(tokens) if t != f"[PAD{i}]"}  # rows without a token
        pairs = [tuple(merge.split(" ")) for merge in keys["merges"]]
        backend = Backend(models.BPE(ids, pairs, ignore_merges=pre in IGNORE_MERGES))
    backend.pre_tokenizer, backend.decoder = PRE_TOKENIZERS[pre], decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    special = keys["special"]
    controls = {special.get("bos"), *keys["ends"]}  # not padding, which may be a word
    for token, i in ids.items():
        control = types[token] == CONTROL or i in controls or token in CONTROL_TOKENS
        if control or types[token] == USER_DEFINED:
            backend.add_tokens([AddedToken(token, special=control, normalized=False)])
    if keys["add_bos_token"]:
        bos = tokens[special["bos"]]
        begins = {"single": f"{bos} $A", "special_tokens": [(bos, special["bos"])]}
        backend.post_processor = processors.TemplateProcessing(**begins)
    named = {f"{name}_token": tokens[special[key]] for key, name in SPECIAL_KEYS.items()
             if key in special}  # fmt: skip
    return Tokenizer(backend, named, keys.get("chat_template"))
