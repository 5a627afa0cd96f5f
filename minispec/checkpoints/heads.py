"""What is published beside models: Medusa heads, MTP heads and compressed vocabularies, read into
the modules of `methods`, and written.
"""

import json
import os
import re
from pathlib import Path

import torch
from torch import Tensor

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
from minispec.errors import UserError, optional_json, read_json
from minispec.methods.fastmtp import MTPHead
from minispec.methods.medusa import MedusaHeads, complete
from minispec.methods.vocabulary import Compressed, Language, Subset
from minispec.model import Config, Transformer
from minispec.tree import RankPath

MEDUSA, MTP = "medusa_head.", "model.mtp_layers.0."  # before their tensors' names in whole models
VLLM = re.compile(
    r"(?:medusa_heads\.)?(?:token_map|(blocks|lm_heads)\.(\d{1,4})\.(?:layers\.(\d{1,4})\.)?(\w+))"
)
FILES = "medusa_lm_head.safetensors", "medusa_lm_head.pt"  # of Medusa heads alone
# the trees published with Medusa (FasterDecoding/Medusa, Apache-2.0), as lists of paths
PUBLISHED: dict[str, list[RankPath]] = {
    name: [tuple(path) for path in paths]
    for name, paths in read_json(Path(__file__).with_name("medusa_trees.json")).items()
}


def read_heads(
    source: str | os.PathLike, prefix: str, tokenizer: Tokenizer | None
) -> tuple[dict[str, Tensor], Path]:
    """The tensors of a model's heads, without the prefix, and the directory they lie in; `source`
    is a file, a directory or a hub id, of a whole model or the heads alone. Raises UserError if
    they were made with another tokenizer, where its files or its fingerprint lie beside them."""
    path = Path(source)
    folder = path.parent if path.is_file() else resolve(source)
    alone = [path] if path.is_file() else [folder / name for name in FILES if prefix == MEDUSA]
    alone = [file for file in alone if file.is_file()][:1]
    tensors: dict[str, Tensor] = {}
    for file in alone or weight_files(folder):
        kept = read_tensors(file).items()  # of a whole model only the heads
        tensors |= {n: t for n, t in kept if alone or n.startswith(prefix) or VLLM.match(n)}
    if any(map(VLLM.match, tensors)):
        tensors, alone = from_vllm(tensors, str(source)), [folder]
    heads = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    heads = heads or (tensors if alone else {})
    if not heads:
        raise UserError(f"{source} has no heads: no tensors {prefix}* in its model, no {FILES[0]}")
    theirs = optional_json(folder / "config.json").get("tokenizer_fingerprint")
    if (folder / "tokenizer.json").exists():
        theirs = Tokenizer.from_directory(folder).fingerprint
    check_fingerprint(str(source), theirs, tokenizer)
    return heads, folder


# ---- Medusa --------------------------------------------------------------------------------------


def load_medusa(
    source: str | os.PathLike, model: Transformer, tokenizer: Tokenizer | None = None
) -> MedusaHeads:
    """The heads of a file, a directory or a hub id, on the model's device and in its type.

    Reads the layouts v1 (projections in the file), v2 (residual blocks only), Medusa-1.0 (in a full
    model, under `medusa_head.`) and vLLM's. Counts come from the tensors, whatever config.json
    says. Raises UserError for heads of another model or tokenizer.
    """
    tensors, folder = read_heads(source, MEDUSA, tokenizer)
    heads = medusa_like(tensors, model, str(source))
    fill(heads, tensors, str(source), model.dtype, model.device)
    read_tree(heads, folder / "config.json")
    return heads.eval()


def from_vllm(tensors: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    """Tensors in vLLM's layout (blocks.0.layers.0.weight, lm_heads.0.weight) under the names of v1.
    Missing biases are 0. If only the first projection is stored, all heads share it."""
    parts = {name: VLLM.fullmatch(name) for name in tensors}
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
        found |= {f"{head}.{layers}.weight": found[projections[0]] for head in heads}
    return found


def medusa_like(tensors: dict[str, Tensor], model: Transformer, where: str) -> MedusaHeads:
    """Uninitialised heads; the tensors' names give the numbers of heads and layers."""
    part = re.compile(r"(\d{1,4})\.(\d{1,4})\.(linear\.weight|linear\.bias|weight)")
    parts = [part.fullmatch(name) for name in tensors]
    if None in parts:
        raise UserError(f"{where}: {list(tensors)[parts.index(None)]} is no tensor of Medusa heads")
    heads = 1 + max(int(each[1]) for each in parts)
    layers = 1 + max((int(each[2]) for each in parts if each[3] != "weight"), default=-1)
    if max(heads, layers) > len(tensors):
        raise UserError(f"{where}: its heads are not numbered from 0 on")
    c, shared = model.config, all(each[3] != "weight" for each in parts)
    with torch.device("meta"):
        return MedusaHeads(heads, layers, c.hidden_size, None if shared else c.vocab_size)


def read_tree(heads: MedusaHeads, path: Path) -> None:
    """The tree and the accuracies that config.json holds; without one the published tree, as deep
    as there are heads."""
    config, depth = optional_json(path), len(heads)
    heads.tree = [ranks for ranks in PUBLISHED["mc_sim_7b_63"] if len(ranks) <= depth]
    try:
        if config.get("medusa_choices") is not None:
            heads.tree = [tuple(ranks) for ranks in config["medusa_choices"]]
            complete(heads.tree, depth, 2**31)
        if config.get("medusa_accuracy") is not None:
            heads.accuracy = torch.tensor(config["medusa_accuracy"], dtype=torch.float64)
            if heads.accuracy.dim() != 2 or len(heads.accuracy) != depth:
                raise ValueError("each head needs a list of accuracies")
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{path}: medusa_choices or medusa_accuracy: {error}") from None


def save_medusa(
    heads: MedusaHeads, directory: Path, base: str, tokenizer: Tokenizer | None, dtype: torch.dtype
) -> None:
    """Write layout v1, or v2 where the projections are shared, that `load_medusa` reads."""
    write_tensors(directory / FILES[0], heads.state_dict(), dtype)
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
    """Renew the tree and the accuracies in config.json, and nothing else."""
    config = optional_json(directory / "config.json")
    config["medusa_choices"] = heads.tree
    config["medusa_accuracy"] = None if heads.accuracy is None else heads.accuracy.tolist()
    write_text(directory / "config.json", json.dumps(config) + "\n")


# ---- MTP -----------------------------------------------------------------------------------------


def load_mtp(
    source: str | os.PathLike, model: Transformer, tokenizer: Tokenizer | None = None
) -> MTPHead:
    """The head in a directory, a hub id or a file: a whole MiMo model, or the head alone. Raises
    UserError for a head of another model or tokenizer."""
    tensors, folder = read_heads(source, MTP, tokenizer)
    check_attention(str(source), folder, model.config)
    with torch.device("meta"):
        head = MTPHead(model.config)
    fill(head, tensors, str(source), model.dtype, model.device)
    return head.eval()


def check_attention(where: str, folder: Path, config: Config) -> None:
    """Refuse a head whose config.json tells of other heads of attention than the model's, or of
    another rotation: the shapes of its weights cannot."""
    keys = Keys(folder / "config.json", optional_json(folder / "config.json"))
    if "num_attention_heads" not in keys.raw:
        return
    its = *attention_sizes(keys), *read_rope(keys)
    for name, value in zip(("kv_heads", "head_dim", "rope_theta", "rope_scaling"), its):
        own = getattr(config, name)
        if value != own:
            raise UserError(
                f"{where}: {name} is {value}, the model's {own}: it belongs to another model"
            )


def save_mtp(
    head: MTPHead, directory: Path, base: str, tokenizer: Tokenizer | None, dtype: torch.dtype,
    weights: list[float],
) -> None:  # fmt: skip
    """Write the head alone, in MiMo's names, that `load_mtp` reads; `weights` are those of its
    steps in the loss."""
    tensors = {MTP + name: tensor for name, tensor in head.state_dict().items()}
    write_tensors(directory / "model.safetensors", tensors, dtype)
    config = config_json(head.config, dtype) | {
        "base_model_name_or_path": base,
        "num_nextn_predict_layers": 1,
        "num_speculative_steps": len(weights),
        "mtp_loss_step_weights": [round(weight, 4) for weight in weights],
        "tokenizer_fingerprint": tokenizer.fingerprint if tokenizer else None,
    }
    write_text(directory / "config.json", json.dumps(config, indent=2) + "\n")


# ---- vocabularies --------------------------------------------------------------------------------


def load_vocabulary(
    path: str | Path, model: Transformer, tokenizer: Tokenizer | None = None,
    size: int | None = None,
) -> Compressed:  # fmt: skip
    """The languages of a file of `save_vocabulary`, or FastMTP's list of ids in a .pt; of each at
    most `size` tokens."""
    path, vocab = Path(path), model.config.vocab_size
    read = read_ids(path) if path.suffix == ".pt" else read_languages(path, tokenizer)
    languages = {n: Language(each.ids[:size], each.counts[:size]) for n, each in read.items()}
    if not languages or not all(each.ids for each in languages.values()):
        raise UserError(f"{path} has no languages, or one without tokens")
    for name, language in languages.items():
        if not 0 <= min(language.ids) <= max(language.ids) < vocab:
            raise UserError(
                f"{path}: {name} has ids outside the target's vocabulary of {vocab}: it was made "
                "for another model"
            )
    return Compressed(languages, model)


def load_subset(
    path: str | Path | None, model: Transformer, tokenizer: Tokenizer | None = None
) -> Subset | None:
    """All tokens of a vocabulary's languages together; None for no file."""
    return load_vocabulary(path, model, tokenizer).select([]) if path else None


def read_ids(path: Path) -> dict[str, Language]:
    """FastMTP's map: a list or tensor of ids, most frequent first."""
    stored = read_file(path)
    try:
        ids = torch.as_tensor(stored)
        if ids.dtype == torch.bool or ids.is_floating_point():
            raise TypeError("they must be whole numbers")
        ids = tuple(dict.fromkeys(map(int, ids.tolist())))
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UserError(f"{path} is not a list of token ids: {error}") from None
    return {path.stem: Language(ids, (0,) * len(ids))}


def read_languages(path: Path, tokenizer: Tokenizer | None) -> dict[str, Language]:
    """What `save_vocabulary` wrote."""
    raw = read_json(path)
    check_fingerprint(str(path), raw.get("tokenizer_fingerprint"), tokenizer)
    languages = {}
    try:
        for name, each in raw["languages"].items():
            ids, counts = (tuple(map(int, each[key])) for key in ("ids", "counts"))
            if len(ids) != len(counts) or min(counts, default=0) < 0:
                raise ValueError("each id needs a count, from 0")
            languages[name] = Language(ids, counts)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(f"{path} is not a file of `distill vocabulary`: {error!r}") from None
    return languages


def save_vocabulary(languages: dict[str, Language], tokenizer: Tokenizer, path: Path) -> None:
    """Write what `load_vocabulary` reads."""
    rows = {n: {"ids": each.ids, "counts": each.counts} for n, each in languages.items()}
    whole = {"tokenizer_fingerprint": tokenizer.fingerprint, "languages": rows}
    write_text(path, json.dumps(whole) + "\n")
