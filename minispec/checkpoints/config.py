"""Convert a checkpoint's config.json to the model's Config and back.

Settings that would change the mathematics and are not implemented raise UserError, so the logits
are never silently wrong."""

from collections.abc import Callable
from math import inf
from pathlib import Path
from reprlib import repr as brief

import torch

from minispec.cli import UserError, optional_json
from minispec.model import Config

# model_type -> class name in transformers
FAMILIES = {name: f"{name.title()}ForCausalLM" for name in ("llama", "mistral", "qwen2", "qwen3")}
FAMILIES["mimo"] = "MiMoForCausalLM"
HF_TYPES = {"mimo": "qwen2"}  # transformers does not know mimo; its main model is a qwen2
ORIGINAL = "original_max_position_embeddings"
ZERO_IS_ABSENT = "beta_fast", "beta_slow", "mscale", "mscale_all_dim"
YARN_KEYS = ORIGINAL, "attention_factor", *ZERO_IS_ABSENT
ROPE_TYPES = {  # rope_type: the numbers it requires
    "default": (), "dynamic": (), "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ("factor",),
}  # fmt: skip

Check = tuple[str, Callable[[object], bool]]  # a rule for a value, in words and as a test


def one_of(*choices: str) -> Check:
    return f"one of {', '.join(choices)}", lambda v: v in choices


def integer(low: int, high: int) -> Check:
    rule = f"a whole number from {low} to {high}"
    return rule, lambda v: type(v) is int and low <= v <= high


def as_list(value: object) -> list:
    return value if isinstance(value, list) else [value]


SIZE = integer(1, 2**24)
EVEN = "an even whole number", lambda v: SIZE[1](v) and v % 2 == 0
LAYER_COUNT = integer(1, 1000)  # building a layer takes time, even one that the weights lack
POSITIVE = "a number above 0", lambda v: type(v) in (int, float) and 0 < v < inf
BOOLEAN = "true or false", lambda v: type(v) is bool
TOKEN_IDS = "a token id or a list of them", lambda v: all(type(i) is int for i in as_list(v))
FLAT_OBJECT = "a flat JSON object", lambda v: type(v) is dict and dict not in map(type, v.values())
FULL_ROTATION = "1.0, as partial rotation is not supported", lambda v: v == 1
FIELDS = {  # field of Config: (key in config.json, check, default)
    "model_type": ("model_type", one_of(*FAMILIES), None),
    "hidden_size": ("hidden_size", SIZE, None),
    "intermediate_size": ("intermediate_size", SIZE, None),
    "layers": ("num_hidden_layers", LAYER_COUNT, None),
    "heads": ("num_attention_heads", SIZE, None),
    "vocab_size": ("vocab_size", SIZE, None),
    "context": ("max_position_embeddings", SIZE, 2048),
    "norm_eps": ("rms_norm_eps", POSITIVE, 1e-6),
    "tied": ("tie_word_embeddings", BOOLEAN, False),
    "mlp_bias": ("mlp_bias", BOOLEAN, False),
}
HEADS = {  # a key of a config.json that is not a model's: (what it describes, the method)
    "draft_vocab_size": ("an EAGLE-3 head", "eagle3"),
    "medusa_num_heads": ("Medusa heads", "medusa"),
    "num_heads": ("Medusa heads", "medusa"),  # vLLM's layout
    "num_nextn_predict_layers": ("an MTP head", "fastmtp"),
}


class CheckedJson:
    """The keys of a JSON file, checked when read. A null counts as absent, no file as empty."""

    def __init__(self, path: Path, raw: dict | None = None):
        self.path, self.raw = path, optional_json(path) if raw is None else raw

    def get(self, key: str, check: Check, default: object = None):
        rule, holds = check
        value = default if self.raw.get(key) is None else self.raw[key]
        if not holds(value):
            raise UserError(f"{self.path}: {key} must be {rule} (it is {brief(value)})")
        return value


def read_config(directory: Path) -> Config:
    """Read the Config of a checkpoint directory."""
    path, generation = directory / "config.json", directory / "generation_config.json"
    if not path.exists():
        raise UserError(f"{directory} has no config.json: it is not a Hugging Face checkpoint")
    if (directory / "adapter_config.json").exists():
        raise UserError(f"{directory} contains a PEFT adapter; merge it into its base model first")
    keys = CheckedJson(path)
    no_model = keys.raw.get("model_type") in (None, "medusa")
    for key, (heads, method) in HEADS.items():
        if key in keys.raw and (no_model or method == "eagle3"):
            raise UserError(f"{directory} holds {heads}, not a model; use it with --heads and "
                            f"--method {method}")  # fmt: skip
    return parse_config(keys, CheckedJson(generation))


def parse_config(keys: CheckedJson, generation: CheckedJson) -> Config:
    """Build the Config from the keys of config.json. `generation` has those of
    generation_config.json: its BOS and EOS tokens take precedence, and it lists all EOS tokens."""
    fields = {field: keys.get(*row) for field, row in FIELDS.items()}
    if keys.raw.get("architectures") == [FAMILIES["mimo"]]:
        fields["model_type"] = "mimo"
    keys.get("hidden_act", one_of("silu", "swish"), "silu")
    fields["kv_heads"], fields["head_dim"] = attention_sizes(keys)
    fields["rope_theta"], fields["rope_scaling"] = read_rope(keys)
    fields["context"] = read_context(keys, fields["context"], fields["rope_scaling"])
    bias = qwen2 = fields["model_type"] in ("qwen2", "mimo")  # on q, k and v, but never on o
    if fields["model_type"] not in ("qwen2", "mistral"):  # which do not read this key
        bias = keys.get("attention_bias", BOOLEAN, qwen2)
    names = "bos_token_id", "eos_token_id"
    bos, eos = (as_list(generation.get(n, TOKEN_IDS, keys.get(n, TOKEN_IDS, []))) for n in names)
    return Config(
        **fields, qkv_bias=bias, o_bias=bias and not qwen2,
        qk_norm=fields["model_type"] == "qwen3", bos_id=next(iter(bos), None), eos_ids=tuple(eos),
    )  # fmt: skip


def attention_sizes(keys: CheckedJson) -> tuple[int, int]:
    """Return the number of key/value heads and the size of each head."""
    heads = keys.get("num_attention_heads", SIZE)
    kv_heads = keys.get("num_key_value_heads", SIZE, heads)
    if heads % kv_heads:
        raise UserError(f"{keys.path}: {kv_heads} key/value heads do not divide {heads} heads")
    head_dim = keys.get("head_dim", EVEN, keys.get("hidden_size", SIZE) // heads)
    return kv_heads, head_dim


def read_context(keys: CheckedJson, context: int, scaling: dict | None) -> int:
    """Return the longest context: max_position_embeddings, or more if RoPE is scaled from a shorter
    one (yarn) or the config has the longer one (linear). It ends at a sliding window, up to which
    attention is full, and where dynamic scaling would begin."""
    if scaling and scaling["rope_type"] == "yarn":
        context = max(context, int(scaling[ORIGINAL] * scaling["factor"]))
    if scaling and scaling["rope_type"] == "linear":  # vicuna-16k
        longer = keys.get("max_sequence_length", SIZE, context)
        context = max(context, int(min(longer, context * scaling["factor"])))
    if not has_window(keys) or keys.raw.get("sliding_window", 4096) is None:
        return context
    return min(context, keys.get("sliding_window", SIZE, 4096))


def has_window(keys: CheckedJson) -> bool:
    """Return whether any layer has a sliding window, by transformers' rules and defaults."""
    kind = keys.raw["model_type"]
    if kind in ("llama", "mistral") or not keys.get("use_sliding_window", BOOLEAN, False):
        return kind == "mistral"  # neither of the two reads use_sliding_window
    full = keys.get("max_window_layers", integer(0, 2**24), 28)  # layers before the first window
    default = "sliding_attention" if keys.raw["num_hidden_layers"] > full else "full_attention"
    types = as_list(keys.raw.get("layer_types") or default)
    return any(layer_type != "full_attention" for layer_type in types)


def read_rope(keys: CheckedJson) -> tuple[float, dict | None]:
    """Return rope_theta and the scaling, both of which newer files have in rope_parameters. As in
    transformers 5, rope_scaling takes precedence over that."""
    names = "rope_scaling", "rope_parameters"
    scaling, parameters = (CheckedJson(keys.path, keys.get(n, FLAT_OBJECT, {})) for n in names)
    rope = scaling if scaling.raw else parameters
    theta = float(rope.get("rope_theta", POSITIVE, keys.get("rope_theta", POSITIVE, 10000.0)))
    for place in keys, scaling, parameters:
        place.get("partial_rotary_factor", FULL_ROTATION, 1.0)
        if (other := place.get("rope_theta", POSITIVE, theta)) != theta:
            raise UserError(f"{keys.path}: rope_theta must be the same in rope_scaling, in "
                            f"rope_parameters and next to them (it is {other} and {theta})")
    default = rope.raw.get("type") or (None if "factor" in rope.raw else "default")
    rope_type = rope.get("rope_type", one_of(*ROPE_TYPES), default)  # `type` is the older name
    if rope_type in ("default", "dynamic"):  # dynamic scaling starts beyond the context
        return theta, None
    found = {} if rope_type == "linear" else {ORIGINAL: keys.get(*FIELDS["context"])}
    for raw in rope.raw, {ORIGINAL: keys.raw.get(ORIGINAL), "rope_type": rope_type}:
        found |= {k: v for k, v in raw.items() if v is not None and (v or k not in ZERO_IS_ABSENT)}
    for key in (*ROPE_TYPES[rope_type], *(found.keys() & YARN_KEYS)):
        CheckedJson(keys.path, found).get(key, POSITIVE)
    others = "rope_theta", "partial_rotary_factor", "type"
    return theta, {key: v for key, v in found.items() if key not in others}


def config_json(config: Config, dtype: torch.dtype) -> dict:
    """Return a config.json for read_config and transformers to read."""
    raw = {key: getattr(config, field) for field, (key, _, _) in FIELDS.items()} | {
        "model_type": HF_TYPES.get(config.model_type, config.model_type),
        "architectures": [FAMILIES[config.model_type]],
        "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim, "hidden_act": "silu",
        "rope_theta": config.rope_theta, "rope_scaling": config.rope_scaling,
        "attention_bias": config.qkv_bias, "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": config.bos_id, "eos_token_id": list(config.eos_ids) or None,
    }  # fmt: skip
    windowed = config.model_type in ("mistral", "qwen2", "mimo")
    return raw | ({"sliding_window": None} if windowed else {})
