"""Read and write EAGLE-3 heads, in the layouts of EAGLE and of vLLM's library `speculators`."""

import re
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from minispec.checkpoints.config import BOOLEAN, SIZE, CheckedJson, config_json, parse_config
from minispec.checkpoints.heads import fill_head, header, read_heads, save_measured
from minispec.checkpoints.load import Place, resolve
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.checkpoints.weights import write_tensors
from minispec.cli import UserError
from minispec.distributed import shard_config
from minispec.methods.eagle3 import Eagle3Head, default_layers
from minispec.model import Config, Transformer

LAYER_IDS, RESIDUAL = "eagle_aux_hidden_state_layer_ids", "norm_before_residual"
UNSUPPORTED = "norm_before_fc", "fc_norm", "norm_output"  # other norms of speculators
IGNORED = re.compile(r"verifier_.*|.*inv_freq")  # copies of the target's tensors, and buffers
EMBEDDING = "embed_tokens.weight"
ONE, OBJECT = ("1", lambda v: v == 1), ("a JSON object", lambda v: type(v) is dict)
ASCENDING = "ascending layer numbers", lambda v: type(v) is list and all(
    type(i) is int for i in v) and v == sorted(set(v)) != []  # fmt: skip
FALSE = "false, as this norm is not supported", lambda v: v is False
TRUE = "true, as heads that read only the last layer are not supported", lambda v: v is True


def is_eagle3(source: Place) -> bool:
    """Return whether a directory, a hub id or a file in a directory holds an EAGLE-3 head."""
    return "draft_vocab_size" in config_of(source).raw


def config_of(source: Place) -> CheckedJson:
    """The config.json of heads. Some files have a part of the keys in an `eagle_config`."""
    folder = Path(source).parent if Path(source).is_file() else resolve(source)
    keys = CheckedJson(folder / "config.json")
    own = {key: value for key, value in keys.raw.items() if value is not None}
    return CheckedJson(keys.path, keys.get("eagle_config", OBJECT, {}) | own)


def load_eagle3(
    source: Place, model: Transformer, tokenizer: Tokenizer | None = None
) -> Eagle3Head:
    """Load the head from a directory, a hub id or a file. Raises UserError for a head of another
    model or tokenizer."""
    keys, target = config_of(source), model.config
    config = shard_config(head_config(keys), draft=True)
    tensors, folder = read_heads(source, "", config, tokenizer)
    tensors = {n.replace("layers.0.", "midlayer."): t for n, t in tensors.items()
               if not IGNORED.fullmatch(n)}  # fmt: skip
    ids = read_ids(str(source), tensors, keys.get("draft_vocab_size", SIZE), target.vocab_size)
    shared, own = model.model.embed_tokens.weight, tensors.get(EMBEDDING)
    if own is not None and torch.equal(own.to(shared.device, shared.dtype), shared):
        del tensors[EMBEDDING]
    if EMBEDDING not in tensors and config.hidden_size != target.hidden_size:
        raise UserError(f"{source} is for another model: its hidden_size is {config.hidden_size}, "
                        f"the model's is {target.hidden_size}")  # fmt: skip
    options = read_layers(keys, target), keys.get(RESIDUAL, BOOLEAN, False), EMBEDDING in tensors
    with torch.device("meta"):
        head = Eagle3Head(config, target, ids, *options)
    head.ids = head.host_ids.to(model.device)
    return fill_head(head, tensors, source, folder, model)


def head_config(keys: CheckedJson) -> Config:
    """The Config of a head's layer."""
    kind = keys.raw.get("speculators_model_type", "eagle3")
    if "draft_vocab_size" not in keys.raw or kind != "eagle3":
        raise UserError(f"{keys.path} is not that of an EAGLE-3 head: it needs draft_vocab_size"
                        " and, if any, speculators_model_type eagle3")  # fmt: skip
    for place in keys, CheckedJson(keys.path, keys.get("eagle_config", OBJECT, {})):
        place.get("use_aux_hidden_state", TRUE, True)
        for name in UNSUPPORTED:
            place.get(name, FALSE, False)
    layer = CheckedJson(keys.path, keys.get("transformer_layer_config", OBJECT, keys.raw))
    layer.get("num_hidden_layers", ONE)
    return parse_config(layer, CheckedJson(keys.path, {}))


def read_layers(keys: CheckedJson, target: Config) -> tuple[int, ...]:
    """The layers whose inputs the head reads."""
    layers = keys.get(LAYER_IDS, ASCENDING, list(default_layers(target.layers)))
    if not 0 <= layers[0] <= layers[-1] < target.layers:
        raise UserError(f"{keys.path}: {LAYER_IDS} {layers} are not layers of the model, which has "
                        f"{target.layers}")  # fmt: skip
    return tuple(layers)


def read_ids(where: str, tensors: dict[str, Tensor], count: int, vocab: int) -> list[int]:
    """The token ids of the rows of a head's lm_head. `d2t`, which is removed from `tensors`, holds
    each row's token minus the row's own number; `t2d` marks the same tokens in the vocabulary."""
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    ids = torch.arange(vocab) if d2t is None else torch.arange(len(d2t)) + d2t.long()
    marked = torch.zeros(vocab, dtype=torch.bool)
    if len(ids) == count and 0 <= ids.min() <= ids.max() < vocab:
        marked[ids] = True
    if marked.sum() < count or t2d is not None and not torch.equal(t2d.bool(), marked):
        raise UserError(f"{where} does not fit the model: d2t and t2d must name {count} different "
                        f"tokens (draft_vocab_size) of its {vocab}")  # fmt: skip
    return ids.tolist()


def save_eagle3(
    head: Eagle3Head, directory: Path, base: str, tokenizer: Tokenizer | None, dtype: torch.dtype,
    speculators: bool = False,
) -> None:  # fmt: skip
    """Write the head for `load_eagle3` and vLLM, in EAGLE's layout or that of `speculators`."""
    ids, t2d = head.host_ids, torch.zeros(head.size, dtype=torch.bool)
    t2d[ids] = True
    layer = config_json(replace(head.config, layers=1, vocab_size=head.size, tied=False), dtype)
    config = {
        "draft_vocab_size": len(ids),
        "target_hidden_size": head.target_size,
        RESIDUAL: head.midlayer.norm_before_residual,
        LAYER_IDS: list(head.feature_layers),
        "num_aux_hidden_states": len(head.feature_layers),  # vLLM expects 3 otherwise
    } | header(base, tokenizer)
    if speculators:
        config |= {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "speculators_config": {
                "algorithm": "eagle3", "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"name_or_path": base, "architectures": layer["architectures"]},
            },
            "transformer_layer_config": layer,
        }
    else:
        config = layer | config | {"architectures": ["LlamaForCausalLMEagle3"]}
    prefix = "layers.0." if speculators else "midlayer."
    tensors = {n.replace("midlayer.", prefix): t.to(dtype) for n, t in head.state_dict().items()}
    if not torch.equal(ids, torch.arange(head.size)):  # vLLM rejects d2t of a full vocabulary
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": t2d}
    write_tensors(directory / "model.safetensors", tensors)
    save_measured(head, directory, config)
