"""Read and write Medusa heads, MTP heads and compressed vocabularies in their published layouts."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from minispec import distributed
from minispec.checkpoints.config import Keys, attention_sizes, config_json, read_rope
from minispec.checkpoints.load import check_fingerprint, resolve
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.checkpoints.weights import (
    fill,
    read_file,
    read_tensors,
    weight_files,
    write_tensors,
    write_text,
)
from minispec.cli import UserError, optional_json, read_json
from minispec.methods.fastmtp import MTPHead
from minispec.methods.medusa import MedusaHeads, with_prefixes
from minispec.methods.vocabulary import Compressed, Language, Subset
from minispec.model import Config, Transformer
from minispec.tree import RankPath

MEDUSA_PREFIX, MTP_PREFIX = "medusa_head.", "model.mtp_layers.0."  # of tensors in a full model
VLLM_NAME = re.compile(
    r"(?:medusa_heads\.)?(?:token_map|(blocks|lm_heads)\.(\d{1,4})\.(?:layers\.(\d{1,4})\.)?(\w+))"
)
QKV_BIASES = "q_proj.bias", "k_proj.bias", "v_proj.bias"
MEDUSA_FILES = "medusa_lm_head.safetensors", "medusa_lm_head.pt"  # these hold only the heads
# the trees published with Medusa (FasterDecoding/Medusa, Apache-2.0), as lists of paths
PUBLISHED_TREES: dict[str, list[RankPath]] = {
    name: [tuple(path) for path in paths]
    for name, paths in read_json(Path(__file__).with_name("medusa_trees.json")).items()
}


def read_heads(
    source: str | os.PathLike, prefix: str, config: Config, tokenizer: Tokenizer | None
) -> tuple[dict[str, Tensor], Path]:
    """Return the tensors of heads for a model with this config, without the prefix, and their
    directory. `source` is a file, a directory or a hub id that holds a full model or only the
    heads. Raises UserError if a tokenizer or a fingerprint next to the heads shows that they belong
    to another tokenizer."""
    path = Path(source)
    folder = path.parent if path.is_file() else resolve(source)
    names = MEDUSA_FILES if prefix == MEDUSA_PREFIX else ()
    only_heads = [path] if path.is_file() else [folder / name for name in names]
    only_heads = [file for file in only_heads if file.is_file()][:1]
    tensors: dict[str, Tensor] = {}
    for file in only_heads or weight_files(folder):
        for name, tensor in read_tensors(file, config).items():
            if only_heads or name.startswith(prefix) or VLLM_NAME.match(name):
                tensors[name] = tensor
    if any(map(VLLM_NAME.match, tensors)):
        tensors, only_heads = from_vllm(tensors, str(source)), [folder]
    heads = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    heads = heads or (tensors if only_heads else {})
    if not heads:
        raise UserError(f"{source} has no heads: no tensors {prefix}* and no {MEDUSA_FILES[0]}")
    fingerprint = optional_json(folder / "config.json").get("tokenizer_fingerprint")
    if (folder / "tokenizer.json").exists():
        fingerprint = Tokenizer.from_directory(folder).fingerprint
    check_fingerprint(str(source), fingerprint, tokenizer)
    return heads, folder


# ---- Medusa --------------------------------------------------------------------------------------


def load_medusa(
    source: str | os.PathLike, model: Transformer, tokenizer: Tokenizer | None = None
) -> MedusaHeads:
    """Load the heads from a file, a directory or a hub id to the model's device and dtype.

    Reads the layouts v1 (projections in the file), v2 (residual blocks only), Medusa-1.0 (in a full
    model, under `medusa_head.`) and vLLM's. The tensors determine the numbers of heads and layers,
    not config.json. Raises UserError for heads of another model or tokenizer.
    """
    tensors, folder = read_heads(source, MEDUSA_PREFIX, model.config, tokenizer)
    heads = empty_medusa(tensors, model, str(source))
    fill(heads, tensors, str(source), model.dtype, model.device)
    read_tree(heads, folder / "config.json")
    return heads.eval()


def from_vllm(tensors: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    """Rename tensors from vLLM's layout (blocks.0.layers.0.weight, lm_heads.0.weight) to v1's.
    Missing biases become 0. If only the first projection is stored, all heads share it."""
    parts = {name: VLLM_NAME.fullmatch(name) for name in tensors}
    layers = 1 + max((int(part[3]) for part in parts.values() if part and part[3]), default=-1)
    found: dict[str, Tensor] = {}
    for name, part in parts.items():
        if not (part and part[1]) or (part[1] == "blocks") != (part[3] is not None):
            raise UserError(f"{where}: {name} of vLLM's layout is not supported")
        kind, head, layer, end = part.groups()
        if kind == "blocks":
            found[f"{head}.{layer}.linear.{end}"] = tensor = tensors[name]
            found.setdefault(f"{head}.{layer}.linear.bias", tensor.new_zeros(len(tensor)))
        else:
            found[f"{head}.{layers}.{end}"] = tensors[name]
    projections = [name for name in found if name.endswith(f".{layers}.weight")]
    if projections == [f"0.{layers}.weight"]:
        heads = {name.partition(".")[0] for name in found}
        found |= {f"{head}.{layers}.weight": found[projections[0]].clone() for head in heads}
    return found


def empty_medusa(tensors: dict[str, Tensor], model: Transformer, where: str) -> MedusaHeads:
    """Create heads without weights, with as many heads and layers as the tensors' names show."""
    pattern = re.compile(r"(\d{1,4})\.(\d{1,4})\.(linear\.weight|linear\.bias|weight)")
    matches = [pattern.fullmatch(name) for name in tensors]
    if None in matches:
        unknown = list(tensors)[matches.index(None)]
        raise UserError(f"{where}: {unknown} is not a tensor of Medusa heads")
    heads = 1 + max(int(match[1]) for match in matches)
    layers = 1 + max((int(match[2]) for match in matches if match[3] != "weight"), default=-1)
    if max(heads, layers) > len(tensors):
        raise UserError(f"{where}: the heads or layers are not numbered consecutively from 0")
    c, shared = model.config, all(match[3] != "weight" for match in matches)
    with torch.device("meta"):
        return MedusaHeads(heads, layers, c.hidden_size, None if shared else c.vocab_size)


def read_tree(heads: MedusaHeads, path: Path) -> None:
    """Set the tree and the accuracies from config.json. The default is the published tree, cut to
    the number of heads."""
    config, depth = optional_json(path), len(heads)
    heads.tree = [ranks for ranks in PUBLISHED_TREES["mc_sim_7b_63"] if len(ranks) <= depth]
    try:
        if config.get("medusa_choices") is not None:
            heads.tree = [tuple(ranks) for ranks in config["medusa_choices"]]
            with_prefixes(heads.tree, depth, 2**31)
        if config.get("medusa_accuracy") is not None:
            heads.accuracy = torch.tensor(config["medusa_accuracy"], dtype=torch.float64)
            if heads.accuracy.dim() != 2 or len(heads.accuracy) != depth:
                raise ValueError("each head needs a list of accuracies")
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{path}: invalid medusa_choices or medusa_accuracy: {error}") from None


def save_medusa(
    heads: MedusaHeads, directory: Path, base: str, tokenizer: Tokenizer | None, dtype: torch.dtype
) -> None:
    """Write the heads for `load_medusa`, in layout v1, or v2 if they share lm_head."""
    write_tensors(directory / MEDUSA_FILES[0], heads.state_dict(), dtype)
    config = {
        "base_model_name_or_path": base,
        "medusa_num_heads": len(heads),
        "medusa_num_layers": heads.layers,
        "version": "2" if heads.shared else "1",
        "tokenizer_fingerprint": tokenizer.fingerprint if tokenizer else None,
    }
    write_text(directory / "config.json", json.dumps(config))
    save_tree(heads, directory)


def save_tree(heads: MedusaHeads, directory: Path) -> None:
    """Update the tree and the accuracies in config.json, and nothing else."""
    config = optional_json(directory / "config.json")
    config["medusa_choices"] = heads.tree
    config["medusa_accuracy"] = None if heads.accuracy is None else heads.accuracy.tolist()
    write_text(directory / "config.json", json.dumps(config) + "\n")


# ---- MTP -----------------------------------------------------------------------------------------


def load_mtp(
    source: str | os.PathLike, model: Transformer, tokenizer: Tokenizer | None = None
) -> MTPHead:
    """Load the head from a directory, a hub id or a file that holds a full MiMo model or only the
    head. Raises UserError for a head of another model or tokenizer."""
    tensors, folder = read_heads(source, MTP_PREFIX, model.config, tokenizer)
    if not model.config.qkv_bias:  # `export` adds zeros, since vLLM's layout always has biases
        tensors = {n: t for n, t in tensors.items() if not n.endswith(QKV_BIASES) or t.any()}
    check_attention(str(source), folder, model.config)
    with torch.device("meta"):
        head = MTPHead(model.config)
    fill(head, tensors, str(source), model.dtype, model.device)
    distributed.all_reduce_outputs(head)
    head.acceptance = read_acceptance(folder / "config.json")
    return head.eval()


def read_acceptance(path: Path) -> list[float] | None:
    """A head's acceptance by step in its config.json; None if it was not measured."""
    rates = optional_json(path).get("mtp_acceptance")
    numbers = isinstance(rates, list) and all(isinstance(r, int | float) for r in rates)
    if rates is not None and not (numbers and rates and all(0 <= r <= 1 for r in rates)):
        raise UserError(f"{path}: mtp_acceptance {rates!r}: must be a list of rates from 0 to 1")
    return rates


def check_attention(where: str, folder: Path, config: Config) -> None:
    """Raise UserError if a head's config.json differs from the model's in attention heads or
    rotation, which the shapes of the weights do not show."""
    keys = Keys(folder / "config.json", optional_json(folder / "config.json"))
    if "num_attention_heads" not in keys.raw:
        return
    kv_heads, head_dim = attention_sizes(keys)
    values = kv_heads, head_dim, *read_rope(keys)
    kv_heads_of_all = config.kv_heads * config.ranks // config.kv_copies
    config = replace(config, kv_heads=kv_heads_of_all)
    for name, value in zip(("kv_heads", "head_dim", "rope_theta", "rope_scaling"), values):
        expected = getattr(config, name)
        if value != expected:
            raise UserError(
                f"{where} is for another model: its {name} is {value}, the model's is {expected}"
            )


def save_mtp(
    head: MTPHead, directory: Path, base: str, tokenizer: Tokenizer | None, dtype: torch.dtype,
    weights: list[float],
) -> None:  # fmt: skip
    """Write only the head, under MiMo's names, for `load_mtp`. `weights` are those of its steps in
    the loss."""
    tensors = {MTP_PREFIX + name: tensor for name, tensor in head.state_dict().items()}
    write_tensors(directory / "model.safetensors", tensors, dtype)
    config = config_json(head.config, dtype) | {
        "base_model_name_or_path": base,
        "num_nextn_predict_layers": 1,
        "num_speculative_steps": len(weights),
        "mtp_loss_step_weights": [round(weight, 4) for weight in weights],
        "tokenizer_fingerprint": tokenizer.fingerprint if tokenizer else None,
    }
    write_text(directory / "config.json", json.dumps(config, indent=2) + "\n")
    save_acceptance(head, directory)


def save_acceptance(head: MTPHead, directory: Path) -> None:
    """Update the acceptance by step in config.json, and nothing else."""
    config = optional_json(directory / "config.json")
    config["mtp_acceptance"] = head.acceptance and [round(rate, 3) for rate in head.acceptance]
    write_text(directory / "config.json", json.dumps(config, indent=2) + "\n")


# ---- vocabularies --------------------------------------------------------------------------------


def load_vocabulary(
    path: str | Path, model: Transformer, tokenizer: Tokenizer | None = None,
    size: int | None = None,
) -> Compressed:  # fmt: skip
    """Load the languages of a file that `save_vocabulary` wrote, or FastMTP's list of ids in a .pt
    file, and keep at most `size` tokens of each."""
    path, vocab = Path(path), model.config.vocab_size
    stored = read_ids(path) if path.suffix == ".pt" else read_languages(path, tokenizer)
    languages = {n: Language(lang.ids[:size], lang.counts[:size]) for n, lang in stored.items()}
    if not languages or not all(language.ids for language in languages.values()):
        raise UserError(f"{path} has no languages, or one without tokens")
    for name, language in languages.items():
        if not 0 <= min(language.ids) <= max(language.ids) < vocab:
            raise UserError(
                f"{path}: {name} has ids outside the target's vocabulary of {vocab}; it was made "
                "for another model"
            )
    return Compressed(languages, model)


def load_subset(
    path: str | Path | None, model: Transformer, tokenizer: Tokenizer | None = None
) -> Subset | None:
    """Return the tokens of all languages of a vocabulary together; None without a file."""
    return load_vocabulary(path, model, tokenizer).select([]) if path else None


def read_ids(path: Path) -> dict[str, Language]:
    """Read FastMTP's map: a list or tensor of ids, the most frequent first."""
    stored = read_file(path)
    try:
        ids = torch.as_tensor(stored)
        if ids.dtype == torch.bool or ids.is_floating_point():
            raise TypeError("ids must be whole numbers")
        ids = tuple(dict.fromkeys(map(int, ids.tolist())))
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UserError(f"{path} is not a list of token ids: {error}") from None
    return {path.stem: Language(ids, (0,) * len(ids))}


def read_languages(path: Path, tokenizer: Tokenizer | None) -> dict[str, Language]:
    """Read a file that `save_vocabulary` wrote."""
    raw = read_json(path)
    check_fingerprint(str(path), raw.get("tokenizer_fingerprint"), tokenizer)
    languages = {}
    try:
        for name, fields in raw["languages"].items():
            ids, counts = (tuple(map(int, fields[key])) for key in ("ids", "counts"))
            if len(ids) != len(counts) or min(counts, default=0) < 0:
                raise ValueError("each id needs a count of at least 0")
            languages[name] = Language(ids, counts)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(f"{path} was not written by `distill vocabulary`: {error!r}") from None
    return languages


def save_vocabulary(languages: dict[str, Language], tokenizer: Tokenizer, path: Path) -> None:
    """Write a file for `load_vocabulary`."""
    rows = {name: {"ids": lang.ids, "counts": lang.counts} for name, lang in languages.items()}
    content = {"tokenizer_fingerprint": tokenizer.fingerprint, "languages": rows}
    write_text(path, json.dumps(content) + "\n")
