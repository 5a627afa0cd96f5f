"""What is published beside models: Medusa heads, MTP heads and compressed vocabularies, read into
the modules of `methods`, and written.
"""

import json
import os
import re
from pathlib import Path

import torch
from torch import Tensor

from minispec.checkpoint import (
    check_attention,
    check_fingerprint,
    check_tokenizer,
    fill,
    load_pickle,
    read_tensors,
    read_weights,
    resolve,
    weight_files,
    write_tensors,
)
from minispec.errors import UserError, optional_json, read_json
from minispec.methods.fastmtp import Head
from minispec.methods.medusa import Heads, Ranks, complete
from minispec.methods.vocabulary import Compressed, Language
from minispec.model import Transformer
from minispec.tokenizer import Tokenizer

# ---- Medusa --------------------------------------------------------------------------------------

NAMES = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
# the trees published with Medusa (FasterDecoding/Medusa, Apache-2.0), as lists of paths
PUBLISHED: dict[str, list[Ranks]] = {
    name: [tuple(path) for path in paths]
    for name, paths in read_json(Path(__file__).with_name("medusa_trees.json")).items()
}


def load_medusa(
    source: str | os.PathLike, model: Transformer, tokenizer: Tokenizer | None = None
) -> Heads:
    """The heads of a file, a directory or a hub id, on the model's device and in its type.

    Reads the layouts v1 (projections in the file), v2 (residual blocks only) and Medusa-1.0 (in a
    full model, under `medusa_head.`). Counts come from the tensors, whatever config.json says.
    Raises UserError for heads of another hidden size, vocabulary or tokenizer.
    """
    tensors, folder = read_medusa(source)
    check_tokenizer(str(source), folder, tokenizer)
    heads = medusa_like(tensors, model, str(source))
    state = read_weights(str(source), tensors.items(), model.dtype, model.device)
    fill(heads, state, str(source))
    read_tree(heads, folder / "config.json")
    return heads.eval()


def read_medusa(source: str | os.PathLike) -> tuple[dict[str, Tensor], Path]:
    """The tensors of a file, a directory or a hub id, under the names of Heads' state dict; and the
    directory they lie in."""
    path = Path(source)
    if path.is_file():
        folder = path.parent
    else:
        folder = resolve(source, ("*.json", "*.safetensors", "medusa_lm_head.pt"))
        path = next((folder / name for name in NAMES if (folder / name).exists()), folder)
    files = weight_files(path) if path.is_dir() else [path]
    tensors = {
        str(name).removeprefix("medusa_head."): tensor
        for file in files
        for name, tensor in read_tensors(file)
        if path.is_file() or name.startswith("medusa_head.")
    }
    if not tensors:
        raise UserError(f"{source} has no Medusa heads: neither {' nor '.join(NAMES)}, nor a model "
                        "with medusa_head. tensors")  # fmt: skip
    return tensors, folder


def medusa_like(tensors: dict[str, Tensor], model: Transformer, where: str) -> Heads:
    """Uninitialised heads; the tensor names give the numbers of heads and layers."""
    part = re.compile(r"(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")
    parts = {name: part.fullmatch(name) for name in tensors}
    for name, found in parts.items():
        if not found or not isinstance(tensors[name], Tensor) or not tensors[name].dim():
            raise UserError(f"{where}: {name} is not a tensor of Medusa heads")
    heads = 1 + max(int(found[1]) for found in parts.values())
    layers = 1 + max((int(p[2]) for p in parts.values() if p[3] != "weight"), default=-1)
    if max(heads, layers) > len(tensors):
        raise UserError(f"{where}: its heads are not numbered from 0 on")
    width, config = next(iter(tensors.values())).shape[-1], model.config
    check_width(where, width, model)
    last = tensors.get(f"0.{layers}.weight")
    if last is not None and len(last) != config.vocab_size:
        raise UserError(
            f"{where}: heads of {len(last)} tokens, but the target has {config.vocab_size}: "
            "they belong to another model"
        )
    with torch.device("meta"):
        return Heads(heads, layers, width, None if last is None else config.vocab_size)


def check_width(where: str, width: int, model: Transformer) -> None:
    """Refuse heads for hidden states of another size than the model's."""
    if width != model.config.hidden_size:
        raise UserError(
            f"{where}: heads of hidden size {width}, but the target's is "
            f"{model.config.hidden_size}: they belong to another model"
        )


def read_tree(heads: Heads, path: Path) -> None:
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
            assert heads.accuracy.dim() == 2 and len(heads.accuracy) == depth
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"{path}: medusa_choices or medusa_accuracy: {error}") from None


def save_medusa(
    heads: Heads, directory: Path, base: str, tokenizer: Tokenizer | None, dtype: torch.dtype
) -> None:
    """Write layout v1, or v2 where the projections are shared, that `load_medusa` reads."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(as_stored(heads.state_dict(), dtype), directory / NAMES[0])
    config = {
        "base_model_name_or_path": base,
        "medusa_num_heads": len(heads),
        "medusa_num_layers": heads.layers,
        "version": "2" if heads.shared else "1",
        "tokenizer_fingerprint": tokenizer.fingerprint if tokenizer else None,
    }
    (directory / "config.json").write_text(json.dumps(config) + "\n", encoding="utf-8")
    save_tree(heads, directory)


def save_tree(heads: Heads, directory: Path) -> None:
    """Renew the tree and the accuracies in config.json, and nothing else."""
    path = directory / "config.json"
    config = optional_json(path)
    config["medusa_choices"] = heads.tree
    config["medusa_accuracy"] = None if heads.accuracy is None else heads.accuracy.tolist()
    path.write_text(json.dumps(config) + "\n", encoding="utf-8")


def as_stored(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """On the host, in the type of the file."""
    return {name: t.detach().to("cpu", dtype, copy=True) for name, t in tensors.items()}


# ---- MTP -----------------------------------------------------------------------------------------

PREFIX = "model.mtp_layers.0."


def load_mtp(
    source: str | os.PathLike, model: Transformer, tokenizer: Tokenizer | None = None
) -> Head:
    """The head in a directory, a hub id or a file: a whole MiMo model, or the head alone.

    Raises UserError for a missing or misshapen tensor, and for heads of another tokenizer or model.
    """
    tensors, folder = read_mtp(source)
    check_tokenizer(str(source), folder, tokenizer)
    norm = tensors.get("hidden_layernorm.weight")
    if isinstance(norm, Tensor):
        check_width(str(source), norm.numel(), model)
    check_attention(str(source), folder, model.config)
    with torch.device("meta"):
        head = Head(model.config)
    state = read_weights(str(source), tensors.items(), model.dtype, model.device)
    fill(head, state, str(source))
    return head.eval()


def read_mtp(source: str | os.PathLike) -> tuple[dict[str, Tensor], Path]:
    """A head's tensors, under the names of Head's parameters, and the directory they lie in."""
    path = Path(source)
    folder = path.parent if path.is_file() else resolve(source)
    files = [path] if path.is_file() else weight_files(folder)
    tensors = {
        name.removeprefix(PREFIX): tensor
        for file in files
        for name, tensor in read_tensors(file)
        if name.startswith(PREFIX)
    }
    if not tensors:
        raise UserError(f"{source} has no prediction head: no tensors {PREFIX}*")
    return tensors, folder


def mtp_tensors(head: Head, dtype: torch.dtype) -> dict[str, Tensor]:
    """The head under MiMo's names."""
    return as_stored({PREFIX + name: t for name, t in head.state_dict().items()}, dtype)


def save_mtp(
    head: Head, directory: Path, base: str, tokenizer: Tokenizer | None, dtype: torch.dtype,
    weights: list[float],
) -> None:  # fmt: skip
    """Write the head alone, in MiMo's names, that `load_mtp` reads; `weights` are those of its
    steps in the loss."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(mtp_tensors(head, dtype), directory / "model.safetensors")
    c = head.config
    config = {
        "base_model_name_or_path": base,
        "hidden_size": c.hidden_size,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "rope_theta": c.rope_theta,
        "rope_scaling": c.rope_scaling,
        "num_nextn_predict_layers": 1,
        "num_speculative_steps": len(weights),
        "mtp_loss_step_weights": [round(weight, 4) for weight in weights],
        "tokenizer_fingerprint": tokenizer.fingerprint if tokenizer else None,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


# ---- vocabularies --------------------------------------------------------------------------------


def load_vocabulary(
    path: str | Path, model: Transformer, tokenizer: Tokenizer | None = None,
    size: int | None = None,
) -> Compressed:  # fmt: skip
    """The languages of a file of `save_vocabulary`, or FastMTP's list of ids in a .pt; of each at
    most `size` tokens."""
    path = Path(path)
    if size is not None and size < 1:
        raise UserError(f"vocabulary size {size}: must be at least 1")
    if not path.exists():
        raise UserError(f"no such vocabulary file: {path}")
    published = path.suffix == ".pt"
    languages = {path.stem: read_ids(path)} if published else read_languages(path, tokenizer)
    for name, language in languages.items():
        if not language.ids:
            raise UserError(f"{path}: {name} has no tokens")
        wrong = [i for i in language.ids if not 0 <= i < model.config.vocab_size]
        if wrong:
            raise UserError(
                f"{path}: id {wrong[0]} of {name} is outside the target's vocabulary of "
                f"{model.config.vocab_size}: it was made for another model"
            )
    if not languages:
        raise UserError(f"{path} has no languages")
    cut = {n: Language(each.ids[:size], each.counts[:size]) for n, each in languages.items()}
    return Compressed(cut, model)


def read_ids(path: Path) -> Language:
    """FastMTP's map: a list or tensor of ids, most frequent first."""
    try:
        ids = torch.as_tensor(load_pickle(path)).tolist()
        return Language(tuple(dict.fromkeys(int(i) for i in ids)), (0,) * len(set(ids)))
    except Exception as error:  # whatever reading a damaged pickle raises
        raise UserError(f"{path} is not a list of token ids: {error}") from None


def read_languages(path: Path, tokenizer: Tokenizer | None) -> dict[str, Language]:
    """What `save_vocabulary` wrote."""
    raw = read_json(path)
    check_fingerprint(str(path), raw.get("tokenizer_fingerprint"), tokenizer)
    try:
        languages = {
            name: Language(tuple(map(int, each["ids"])), tuple(map(int, each["counts"])))
            for name, each in raw["languages"].items()
        }
        for name, each in languages.items():
            if len(each.ids) != len(each.counts) or min(each.counts, default=0) < 0:
                raise ValueError(f"{name} needs a count, from 0, for each id")
        return languages
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is not a file of `distill vocabulary`: {error!r}") from None


def save_vocabulary(languages: dict[str, Language], tokenizer: Tokenizer, path: Path) -> None:
    """Write what `load_vocabulary` reads."""
    rows = {n: {"ids": each.ids, "counts": each.counts} for n, each in languages.items()}
    whole = {"tokenizer_fingerprint": tokenizer.fingerprint, "languages": rows}
    path.write_text(json.dumps(whole) + "\n", encoding="utf-8")
