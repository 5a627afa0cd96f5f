"""A checkpoint's config.json -> the model's Config; and back.

What would change the mathematics, and is not implemented, is refused: never silently wrong logits.
"""

from collections.abc import Callable
from math import inf
from pathlib import Path
from reprlib import repr as brief

import torch

from minispec.errors import UserError, optional_json, read_json
from minispec.model import Config

FAMILIES = {  # and what transformers calls them
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mimo": "MiMoForCausalLM",
}
HF_TYPES = {"mimo": "qwen2"}  # transformers does not know mimo: its main model is a qwen2
UNQUANTISED = "take the unquantised model, or a GGUF file of it"
ENDS = "bos_token_id", "eos_token_id"
CONTEXTS = {"mistral": 2**17, "qwen2": 2**15, "qwen3": 2**15, "mimo": 2**15}  # where none is named
ORIGINAL = "original_max_position_embeddings"
YARN = ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"
ROPE_TYPES = {  # the numbers that each needs, and those that it may have
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": ((), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", ORIGINAL), ()),
    "yarn": (("factor",), YARN),
}

Kind = tuple[str, Callable[[object], bool]]  # what a value must be, in words and as a test


def one_of(*known: str) -> Kind:
    return f"one of {', '.join(known)}", lambda v: v in known


def whole(least: int, most: int) -> Kind:
    words = f"a whole number from {least} to {most}"
    return words, lambda v: type(v) is int and least <= v <= most


def listed(value: object) -> list:
    return value if isinstance(value, list) else [value]


SIZE = whole(1, 2**24)
LAYERS = whole(1, 1000)  # each takes time to make, even if the weights have no more
NUMBER = "a number above 0", lambda v: type(v) in (int, float) and 0 < v < inf
BASE = "a number above 1", lambda v: type(v) in (int, float) and 1 < v < inf
FLAG = "true or false", lambda v: type(v) is bool
IDS = "a token id or a list of them", lambda v: all(type(i) is int for i in listed(v))
FLAT = "one flat object", lambda v: type(v) is dict and dict not in map(type, v.values())
WHOLE = "1.0: partial rotation is not supported", lambda v: v == 1
SLIDING = ["full_attention", "sliding_attention"]
ATTENTIONS = f"a list of {SLIDING}", lambda v: type(v) is list and all(x in SLIDING for x in v)
FIELDS = {  # of a Config: the key in config.json, what it must be, and what it is if absent
    "model_type": ("model_type", one_of(*FAMILIES), None),
    "hidden_size": ("hidden_size", SIZE, None),
    "intermediate_size": ("intermediate_size", SIZE, None),
    "layers": ("num_hidden_layers", LAYERS, None),
    "heads": ("num_attention_heads", SIZE, None),
    "vocab_size": ("vocab_size", SIZE, None),
    "context": ("max_position_embeddings", SIZE, 2048),
    "norm_eps": ("rms_norm_eps", NUMBER, 1e-6),
    "tied": ("tie_word_embeddings", FLAG, False),
    "mlp_bias": ("mlp_bias", FLAG, False),
}


class Keys:
    """The keys of a JSON file, each checked when it is looked up; null is as absent."""

    def __init__(self, path: Path, raw: dict):
        self.path, self.raw = path, raw

    def get(self, key: str, kind: Kind, default: object = None):
        words, holds = kind
        value = default if self.raw.get(key) is None else self.raw[key]
        if not holds(value):
            raise self.wrong(key, words)
        return value

    def wrong(self, key: str, words: str) -> UserError:
        return UserError(f"{self.path}: {key} must be {words} (it is {brief(self.raw.get(key))})")


def read_config(directory: Path) -> Config:
    """The Config of a checkpoint directory."""
    path, ends = directory / "config.json", directory / "generation_config.json"
    if not path.exists():
        raise UserError(f"{directory} has no config.json: not a Hugging Face checkpoint directory")
    if (directory / "adapter_config.json").exists():
        raise UserError(f"{directory} holds an adapter (PEFT): merge it into its model first")
    return config_of(Keys(path, read_json(path)), Keys(ends, optional_json(ends)))


def config_of(keys: Keys, ends: Keys) -> Config:
    """The Config that the keys of a config.json make. `ends` are those of generation_config.json:
    its begin and end tokens take precedence, and it names all end tokens."""
    fields = {field: keys.get(*row) for field, row in FIELDS.items()}
    if keys.raw.get("architectures") == [FAMILIES["mimo"]]:
        fields["model_type"] = "mimo"
    keys.get("hidden_act", one_of("silu", "swish"), "silu")
    for key, method in ("quantization", "mlx"), ("quantization_config", "by an unknown method"):
        if given := keys.raw.get(key):
            method = given.get("quant_method", method) if isinstance(given, dict) else method
            raise UserError(f"{keys.path}: {key}: quantised weights ({method}): {UNQUANTISED}")
    fields["kv_heads"], fields["head_dim"] = attention_sizes(keys)
    fields["rope_theta"], fields["rope_scaling"] = read_rope(keys)
    fields["context"] = read_context(keys, fields["rope_scaling"])
    qwen2 = fields["model_type"] in ("qwen2", "mimo")  # a bias on q, k and v, and never on o
    # qwen2 always has one and mistral never: their code does not read attention_bias
    asks = fields["model_type"] in ("llama", "qwen3", "mimo")
    bias = keys.get("attention_bias", FLAG, qwen2) if asks else qwen2
    bos, eos = (listed(ends.get(key, IDS, keys.get(key, IDS, []))) for key in ENDS)
    return Config(
        **fields,
        qkv_bias=bias,
        o_bias=bias and not qwen2,
        qk_norm=fields["model_type"] == "qwen3",
        bos_id=bos[0] if bos else None,
        eos_ids=tuple(eos),
    )


def attention_sizes(keys: Keys) -> tuple[int, int]:
    """How many heads of keys and values, and the size of each."""
    heads = keys.get("num_attention_heads", SIZE)
    kv_heads = keys.get("num_key_value_heads", SIZE, heads)
    if heads % kv_heads:
        raise keys.wrong("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
    head_dim = keys.get("head_dim", SIZE, keys.get("hidden_size", SIZE) // heads)
    if head_dim % 2:
        raise keys.wrong("head_dim", "even")
    return kv_heads, head_dim


def read_context(keys: Keys, scaling: dict | None) -> int:
    """The longest text. Scaled positions may stretch max_position_embeddings, where a config names
    the longer text as well or, for yarn, the original one; and a sliding window ends it, within
    which attention is still full. Beyond max_position_embeddings dynamic scaling would begin."""
    context = keys.get("max_position_embeddings", SIZE, CONTEXTS.get(keys.raw["model_type"], 2048))
    if scaling and scaling["rope_type"] == "yarn":
        context = max(context, int(min(scaling.get(ORIGINAL, 0) * scaling["factor"], 2**24)))
    if scaling and scaling["rope_type"] == "linear":  # vicuna-16k
        longer = keys.get("max_sequence_length", SIZE, context)
        context = max(context, int(min(longer, context * scaling["factor"])))
    kinds = keys.get("layer_types", ATTENTIONS, [])
    if keys.raw["model_type"] == "mistral":  # no flag switches it off there
        slides = True
    elif kinds:
        slides = "sliding_attention" in kinds
    else:
        full = keys.get("max_window_layers", whole(0, 2**24), 28)
        layers = keys.get("num_hidden_layers", LAYERS)
        slides = keys.get("use_sliding_window", FLAG, False) and full < layers
    if not slides or keys.raw.get("sliding_window", 4096) is None:
        return context
    return min(context, keys.get("sliding_window", SIZE, 4096))


def read_rope(keys: Keys) -> tuple[float, dict | None]:
    """rope_theta and scaling: older files have rope_theta and rope_scaling, newer ones have both in
    rope_parameters, and some have all three."""
    old, new = (spelled(keys.get(key, FLAT, {})) for key in ("rope_scaling", "rope_parameters"))
    thetas = new.pop("rope_theta", None), old.pop("rope_theta", None), keys.raw.get("rope_theta")
    given = {"rope_theta": next((theta for theta in thetas if theta is not None), 10000.0)}
    theta = float(Keys(keys.path, given).get("rope_theta", BASE))
    if old and new and old != new:
        raise UserError(f"{keys.path}: rope_scaling and rope_parameters contradict each other")
    scaling = Keys(keys.path, new or old)
    keys.get("partial_rotary_factor", WHOLE, 1.0)
    scaling.get("partial_rotary_factor", WHOLE, 1.0)
    kind = scaling.get("rope_type", one_of(*ROPE_TYPES), None if scaling.raw else "default")
    if kind in ("default", "dynamic"):  # which is plain in the context
        return theta, None
    if kind != "linear" and keys.raw.get(ORIGINAL) is not None:  # beside rope_scaling it counts
        scaling.raw[ORIGINAL] = keys.raw[ORIGINAL]
    needed, possible = ROPE_TYPES[kind]
    for key in (*needed, *(key for key in possible if key in scaling.raw)):
        scaling.get(key, NUMBER)
    return theta, scaling.raw


def spelled(rope: dict) -> dict:
    """Without nulls, and with rope_type, which older files call type."""
    known = {key: value for key, value in rope.items() if value is not None}
    return {"rope_type": known.pop("type"), **known} if "type" in known else known


def config_json(config: Config, dtype: torch.dtype) -> dict:
    """The config.json that read_config and transformers read."""
    raw = {key: getattr(config, field) for field, (key, _, _) in FIELDS.items()} | {
        "model_type": HF_TYPES.get(config.model_type, config.model_type),
        "architectures": [FAMILIES[config.model_type]],
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "attention_bias": config.qkv_bias,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) or None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if config.model_type in ("mistral", "qwen2", "mimo"):
        raw["sliding_window"] = None
    return raw
