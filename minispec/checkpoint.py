"""Hugging Face checkpoints: a directory or a hub id -> model and tokenizer; and back."""

import json
import math
import os
import pickle
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minispec.errors import UserError, optional_json, read_json
from minispec.model import Config, Transformer
from minispec.tokenizer import Tokenizer

# What each family leaves unsaid: (q, k, v bias; q and k norms)
FAMILIES = {
    "llama": (False, False),
    "mistral": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
    "mimo": (True, False),
}
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
YARN_NUMBERS = "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"  # optional
LEFT_OUT = re.compile(r"model\.mtp_layers\.|medusa_head\.|.*inv_freq$")  # heads', derived
MOST_LAYERS = 1000  # each takes time to make, even where the weights turn out to have no more
WEIGHTS = Path(__file__).resolve().parent.parent / "weights"  # the shipped ones
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


# ---- config --------------------------------------------------------------------------------------


class Keys:
    """The keys of a config.json, each looked up with the type it must have."""

    def __init__(self, path: Path, raw: dict):
        self.path, self.raw = path, raw

    def wrong(self, key: str, must: str) -> UserError:
        return UserError(f"{self.path}: {key} must be {must}, not {self.raw.get(key)!r}")

    def count(self, key: str, default: int | None = None, most: float = math.inf) -> int:
        value = default if self.raw.get(key) is None else self.raw[key]
        if type(value) is not int or value < 1:
            raise self.wrong(key, "a positive integer")
        if value > most:
            raise self.wrong(key, f"at most {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = default if self.raw.get(key) is None else self.raw[key]
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.wrong(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = default if self.raw.get(key) is None else self.raw[key]
        if type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def mapping(self, key: str) -> dict:
        value = self.raw.get(key) or {}
        if not isinstance(value, dict) or any(isinstance(v, dict) for v in value.values()):
            raise self.wrong(key, "one flat object")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them."""
        value = self.raw.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(i) is not int for i in ids):
            raise self.wrong(key, "a token id or a list of them")
        return tuple(ids)


def read_config(directory: Path) -> Config:
    """The Config of a checkpoint directory; what would change the mathematics is refused."""
    path = directory / "config.json"
    if not path.exists():
        raise UserError(f"{directory} has no config.json: not a Hugging Face checkpoint directory")
    if (directory / "adapter_config.json").exists():
        raise UserError(f"{directory} holds an adapter (PEFT): merge it into its model first")
    raw = read_json(path)
    keys, family = Keys(path, raw), raw.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise UserError(
            f"{path}: model_type {family!r} is not supported (only {', '.join(FAMILIES)})"
        )
    refuse_unsupported(path, raw)
    heads, kv_heads, head_dim = attention_sizes(keys)
    bias, qk_norm = FAMILIES[family]
    if family in ("llama", "qwen3", "mimo"):  # the others' code does not ask
        bias = keys.flag("attention_bias", bias)
    theta, scaling = read_rope(keys)
    bos = keys.ids("bos_token_id")
    return Config(
        hidden_size=keys.count("hidden_size"),
        intermediate_size=keys.count("intermediate_size"),
        layers=keys.count("num_hidden_layers", most=MOST_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=keys.count("vocab_size"),
        context=read_context(keys, scaling),
        model_type=family,
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=keys.flag("tie_word_embeddings", False),
        qkv_bias=bias,
        # attention_bias covers o_proj too, but not in qwen2 and mimo
        o_bias=bias and family in ("llama", "qwen3"),
        mlp_bias=keys.flag("mlp_bias", False),
        qk_norm=qk_norm,
        bos_id=bos[0] if bos else None,
        eos_ids=read_eos(directory, keys),
    )


def attention_sizes(keys: Keys) -> tuple[int, int, int]:
    """Heads, heads of keys and values, and the size of each."""
    heads = keys.count("num_attention_heads")
    kv_heads = keys.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise UserError(
            f"{keys.path}: num_attention_heads {heads} is no multiple of num_key_value_heads "
            f"{kv_heads}"
        )
    head_dim = keys.count("head_dim", keys.count("hidden_size") // heads)
    if head_dim % 2:
        raise keys.wrong("head_dim", "even")
    return heads, kv_heads, head_dim


def read_eos(directory: Path, keys: Keys) -> tuple[int, ...]:
    """The end tokens that generation_config.json names, else those of config.json."""
    path = directory / "generation_config.json"
    return Keys(path, optional_json(path)).ids("eos_token_id") or keys.ids("eos_token_id")


def refuse_unsupported(path: Path, raw: dict) -> None:
    """Keys that mean other mathematics than ours are errors, never silently wrong logits."""
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UserError(f"{path}: hidden_act {raw['hidden_act']!r} is not supported (only silu)")
    if raw.get("quantization_config"):
        raise UserError(
            f"{path}: quantization_config is not supported: use the unquantised checkpoint"
        )


def read_context(keys: Keys, scaling: dict | None) -> int:
    """The longest text: yarn may stretch max_position_embeddings; and a sliding window caps it:
    within the window, attention is still full."""
    context, kinds = keys.count("max_position_embeddings"), keys.raw.get("layer_types") or []
    if scaling and scaling["rope_type"] == "yarn":
        original = scaling.get("original_max_position_embeddings") or 0
        context = max(context, int(original * scaling["factor"]))
    known = "full_attention", "sliding_attention"
    if not isinstance(kinds, list) or any(kind not in known for kind in kinds):
        raise keys.wrong("layer_types", f"a list of {' and '.join(known)}")
    if keys.raw["model_type"] == "mistral":  # no flag switches it off there
        slides = True
    elif kinds:
        slides = "sliding_attention" in kinds
    else:
        whole = 0 if keys.raw.get("max_window_layers") == 0 else keys.count("max_window_layers", 28)
        slides = keys.flag("use_sliding_window", False) and whole < keys.count("num_hidden_layers")
    if not slides or keys.raw.get("sliding_window", 4096) is None:
        return context
    return min(context, keys.count("sliding_window", 4096))


def read_rope(keys: Keys) -> tuple[float, dict | None]:
    """rope_theta and scaling, spelled rope_theta + rope_scaling or rope_parameters."""
    old, new = spelled(keys.mapping("rope_scaling")), spelled(keys.mapping("rope_parameters"))
    thetas = new.pop("rope_theta", None), old.pop("rope_theta", None), keys.raw.get("rope_theta")
    given = next((theta for theta in thetas if theta is not None), 10000.0)
    theta = Keys(keys.path, {"rope_theta": given}).number("rope_theta")
    if theta <= 1:
        raise UserError(f"{keys.path}: rope_theta must be above 1, not {theta}")
    if old and new and old != new:
        raise UserError(f"{keys.path}: rope_scaling and rope_parameters contradict each other")
    scaling = Keys(keys.path, new or old)
    for part in (place.raw.get("partial_rotary_factor", 1.0) for place in (keys, scaling)):
        if part != 1.0:
            raise UserError(f"{keys.path}: partial_rotary_factor is not supported: {part}")
    if scaling.raw and scaling.raw.get("rope_type") is None:
        raise scaling.wrong("rope_type", f"one of {', '.join(ROPE_TYPES)}")
    kind = scaling.raw.get("rope_type") or "default"
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise UserError(
            f"{keys.path}: rope type {kind!r} is not supported (only {', '.join(ROPE_TYPES)})"
        )
    if kind == "default":
        return theta, None
    original = "original_max_position_embeddings"
    if kind != "linear" and keys.raw.get(original) is not None:  # beside rope_scaling it counts
        scaling.raw[original] = keys.raw[original]
    if scaling.raw.get(original) is not None:
        scaling.count(original)
    more = [key for key in YARN_NUMBERS if kind == "yarn" and scaling.raw.get(key) is not None]
    for key in (*ROPE_TYPES[kind], *more):
        scaling.number(key)
    return theta, scaling.raw


def spelled(rope: dict) -> dict:
    """With rope_type, which older files call type."""
    rest = {key: value for key, value in rope.items() if key != "type"}
    return {"rope_type": rope["type"], **rest} if "type" in rope else rest


# ---- tensors -------------------------------------------------------------------------------------


def weight_files(directory: Path) -> list[Path]:
    """The files of one checkpoint: single or sharded safetensors, else the same of .bin."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (directory / name).exists():
            return [directory / name]
        index = directory / f"{name}.index.json"
        if index.exists():
            names = map(str, Keys(index, read_json(index)).mapping("weight_map").values())
            files = [directory / name for name in sorted(set(names))]
            missing = [f.name for f in files if not f.exists()]
            if missing:
                raise UserError(
                    f"{directory} lacks {', '.join(missing)}, which {index.name} names: "
                    "download the shards again"
                )
            return files
    raise UserError(f"{directory} has no weights: neither model.safetensors nor pytorch_model.bin")


UNREADABLE = (
    SafetensorError, OSError, RuntimeError, ValueError, EOFError, AttributeError, MemoryError,
)  # fmt: skip


def read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of one file, which is mapped anew for each: what was read and copied does
    not stay in memory."""
    try:
        with path.open("rb") as file:
            pointer = file.read(23) == b"version https://git-lfs"
        if pointer:
            raise UserError(f"{path} only points to its file: fetch that with git lfs pull")
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                names = list(file.keys())
            for name in names:
                with safe_open(path, "pt") as file:
                    yield name, file.get_tensor(name)
        else:
            yield from ((str(name), tensor) for name, tensor in load_pickle(path).items())
    except pickle.UnpicklingError:
        raise UserError(
            f"{path} holds more than tensors, and code is never unpickled; or it is damaged"
        ) from None
    except UNREADABLE as error:
        raise UserError(
            f"{path} cannot be read (damaged, truncated, or too large for this memory): {error}"
        ) from None


def load_pickle(path: Path) -> dict[str, Tensor]:
    """A .bin of tensors; those of before torch 1.6 cannot be mapped."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:
        return torch.load(path, map_location="cpu", weights_only=True)


def read_weights(
    where: str, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """The tensors as a state dict: checked, copied, one after the other."""
    return {
        str(name): check_floating(where, name, tensor).to(device, dtype, copy=True)
        for name, tensor in tensors
    }


def fill(module: torch.nn.Module, state: dict[str, Tensor], where: str) -> None:
    """Load a state dict into a module made on the meta device, frozen; every name and shape must
    fit."""
    try:
        module.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:  # torch lists what is missing, unexpected and misshapen
        said = " ".join(str(error).split("\n\t", 1)[-1].split())
        raise UserError(
            f"{where}: its config.json and its weights do not belong together: "
            + (said if len(said) < 500 else said[:500] + " …")
        ) from None
    module.requires_grad_(False)


def check_floating(where: str, name: str, tensor: object) -> Tensor:
    """The tensor, if it is one of numbers that need no scale, all of them finite."""
    if not isinstance(tensor, Tensor):
        raise UserError(f"{where}: {name} is not a tensor")
    if not tensor.is_floating_point() or tensor.itemsize < 2:
        raise UserError(
            f"{where}: {name} is stored as {tensor.dtype}: quantised weights are not supported"
        )
    if tensor.numel() and not all(torch.stack(tensor.aminmax()).isfinite()):
        raise UserError(f"{where}: {name} has a NaN or an infinity: take an undamaged checkpoint")
    return tensor


def tie(state: dict[str, Tensor]) -> None:
    """A tied head at both ends of the model, whichever of them the file has."""
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    if embedding in state and head in state and not torch.equal(state[embedding], state[head]):
        raise UserError(
            f"config.json says tie_word_embeddings, but {embedding} and {head} differ: set it to "
            "false"
        )
    for name, other in ((embedding, head), (head, embedding)):
        if other in state:
            state[name] = state[other]


# ---- tokenizers ----------------------------------------------------------------------------------


def read_tokenizer(source: str | os.PathLike) -> Tokenizer:
    """The tokenizer of a directory or hub id."""
    directory = resolve(source)
    if not (directory / "tokenizer.json").exists():
        raise UserError(f"{source} has no tokenizer.json")
    return Tokenizer.from_directory(directory)


def check_tokenizer(where: str, folder: Path, tokenizer: Tokenizer | None) -> None:
    """Refuse what was made with another tokenizer, where it came with that or its fingerprint."""
    theirs = optional_json(folder / "config.json").get("tokenizer_fingerprint")
    if (folder / "tokenizer.json").exists():
        theirs = Tokenizer.from_directory(folder).fingerprint
    check_fingerprint(where, theirs, tokenizer)


def check_attention(where: str, folder: Path, config: Config) -> None:
    """Refuse other heads of keys than a model's, or heads that are rotated otherwise, where a
    config.json tells of heads: weight shapes alone cannot show this."""
    path = folder / "config.json"
    keys = Keys(path, optional_json(path))
    if "num_attention_heads" not in keys.raw:
        return
    _, kv_heads, head_dim = attention_sizes(keys)
    theta, scaling = read_rope(keys)
    check_same(where, "num_key_value_heads", kv_heads, config.kv_heads)
    check_same(where, "head_dim", head_dim, config.head_dim)
    check_same(where, "rope_theta", theta, config.rope_theta)
    check_same(where, "rope_scaling", scaling, config.rope_scaling)


def check_same(where: str, name: str, theirs: object, ours: object) -> None:
    """Refuse what has another value of a key of config.json than the model has."""
    if theirs != ours:
        raise UserError(f"{where}: its {name} is {theirs}, the model's is {ours}: they must be the "
                        "same, so take others or another model")  # fmt: skip


def check_fingerprint(where: str, theirs: str | None, tokenizer: Tokenizer | None) -> None:
    """Refuse what was made with another tokenizer, as far as both are known."""
    if tokenizer and theirs and theirs != tokenizer.fingerprint:
        raise UserError(
            f"{where}: made with another tokenizer than the model's; take what was made with that"
        )


# ---- load and save -------------------------------------------------------------------------------


def resolve(
    source: str | os.PathLike, patterns: tuple[str, ...] = ("*.json", "*.jinja", "*.safetensors")
) -> Path:
    """A local directory, or the snapshot of a hub id: those of its files that fit `patterns` are
    downloaded where they are not at hand."""
    path, name = Path(source), str(source)
    if os.path.isdir(path):
        return path
    if os.path.exists(path):
        raise UserError(
            f"{name} is a file: give the directory of a Hugging Face checkpoint (no GGUF)"
        )
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or name.endswith("/"):
        raise UserError(f"no such directory: {name}")
    from huggingface_hub import snapshot_download

    # the same weights in another layout, or of other times
    fetch = partial(snapshot_download, name, ignore_patterns=["consolidated*", "*/*"])
    try:
        directory = Path(fetch(allow_patterns=list(patterns)))
        if "*.safetensors" in patterns and not any(directory.glob("*.safetensors")):  # an old one
            directory = Path(fetch(allow_patterns=["*.json", "*.jinja", "*.bin"]))
        return directory
    except Exception as error:  # the library's own and those of its HTTP client, which changes
        raise UserError(
            f"no directory {name}, and it could not be fetched from the hub "
            f"({type(error).__name__}): check the name and the network"
        ) from None


def pick_device(device: str | torch.device) -> torch.device:
    """`auto`: cuda, else mps, else cpu."""
    device = str(device)
    there = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if device == "auto":
        device = next(name for name, present in there.items() if present)
    kind, colon, index = device.partition(":")
    count = torch.cuda.device_count() if kind == "cuda" else 1
    if not there.get(kind) or (colon and not (index.isdecimal() and int(index) < count)):
        raise UserError(
            f"device {device} is not available: use one of "
            f"{', '.join(name for name, present in there.items() if present)}"
        )
    return torch.device(device)


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 on a GPU, float32 on a CPU."""
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype} is not supported: use auto, {', '.join(DTYPES)}")
    if dtype == "float64" and device.type == "mps":
        raise UserError("dtype float64 is not available on mps: use --device cpu")
    return DTYPES[dtype]


def load(
    source: str | os.PathLike,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
) -> tuple[Transformer, Tokenizer | None]:
    """Model and tokenizer (None where there is no tokenizer.json) of a directory or hub id;
    `model.source` remembers the directory.

    Raises UserError for whatever is missing, damaged or not implemented.
    """
    place = pick_device(device)
    kind = pick_dtype(dtype, place)
    directory = resolve(source)
    config = read_config(directory)
    files = weight_files(directory)
    tokenizer = (
        Tokenizer.from_directory(directory) if (directory / "tokenizer.json").exists() else None
    )
    # added tokens may lie beyond: some files have a padding token that the model never learnt
    words = tokenizer.backend.get_vocab_size(with_added_tokens=False) if tokenizer else 0
    if words > config.vocab_size:
        raise UserError(
            f"{directory}: the tokenizer has {words} tokens, the embedding only "
            f"{config.vocab_size}: they do not belong together"
        )
    if tokenizer and tokenizer.bos and config.bos_id is None:
        config = replace(config, bos_id=tokenizer.backend.token_to_id(tokenizer.bos))
    with torch.device("meta"):
        model = Transformer(config)
    tensors = (pair for file in files for pair in read_tensors(file) if not LEFT_OUT.match(pair[0]))
    state = read_weights(str(directory), tensors, kind, place)
    if config.tied:
        tie(state)
    fill(model, state, str(directory))
    if config.tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.source = directory
    return model.eval(), tokenizer


def config_json(config: Config, dtype: torch.dtype) -> dict:
    """The config.json that read_config and transformers read."""
    names = {
        "llama": "Llama",
        "mistral": "Mistral",
        "qwen2": "Qwen2",
        "qwen3": "Qwen3",
        "mimo": "MiMo",
    }
    raw = {
        "architectures": [names[config.model_type] + "ForCausalLM"],
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "tie_word_embeddings": config.tied,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) or None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if config.model_type in ("mistral", "qwen2", "mimo"):
        raw["sliding_window"] = None
    return raw


def write_tensors(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a .safetensors file; it appears whole or not."""
    part = path.with_name(path.name + ".part")
    save_file(tensors, part, metadata=metadata or {"format": "pt"})
    part.replace(path)


def save(
    model: Transformer,
    tokenizer: Tokenizer | None,
    directory: Path,
    dtype: torch.dtype | None = None,
    extra: dict[str, Tensor] | None = None,
) -> None:
    """Write a directory that `load` and transformers read; the weights appear whole or not.

    `extra` tensors, a prediction head's, stand in the same file, as MiMo's do.
    """
    if next(model.buffers(), None) is not None:
        raise UserError("int8 weights cannot be saved: load the model again, and save that")
    directory.mkdir(parents=True, exist_ok=True)
    dtype = dtype or model.dtype
    # `named_parameters` lists a tied weight once, under the embedding's name
    tensors = {name: p.detach().to("cpu", dtype, copy=True) for name, p in model.named_parameters()}
    tensors |= {name: t.to("cpu", dtype, copy=True) for name, t in (extra or {}).items()}
    write_tensors(tensors, directory / "model.safetensors")
    config = config_json(model.config, dtype)
    if extra:
        config["num_nextn_predict_layers"] = 1
    text = json.dumps(config, indent=2)
    (directory / "config.json").write_text(text + "\n", encoding="utf-8")
    eos = list(model.config.eos_ids) or None
    ends = {"bos_token_id": model.config.bos_id, "eos_token_id": eos}
    (directory / "generation_config.json").write_text(
        json.dumps(ends, indent=2) + "\n", encoding="utf-8"
    )
    if tokenizer:
        tokenizer.save(directory)
