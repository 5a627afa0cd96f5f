"""Read and write Medusa heads, MTP heads and compressed vocabularies in their published layouts."""

import re
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from minispec import distributed
from minispec.checkpoints import weights
from minispec.checkpoints.config import CheckedJson, attention_sizes, config_json, read_rope
from minispec.checkpoints.load import Place, check_matching, resolve
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.cli import UserError, optional_json, read_json, user_error
from minispec.methods.fastmtp import MTPHead, RecurrentHead
from minispec.methods.medusa import MedusaHeads, with_prefixes
from minispec.methods.vocabulary import Compressed, Language, Subset
from minispec.model import Config, Transformer
from minispec.tree import RankPath

MEDUSA_PREFIX, MTP_PREFIX = "medusa_head.", "model.mtp_layers.0."  # of tensors in a full model
MEDUSA_NAME = re.compile(r"(\d{1,4})\.(\d{1,4})\.(linear\.weight|linear\.bias|weight)")
VLLM_NAME = re.compile(r"(medusa_heads\.)?(token_map|blocks\.\d|lm_heads\.\d)")
VLLM_BLOCK = re.compile(r"(?:medusa_heads\.)?blocks\.(\d{1,4})\.layers\.(\d{1,4})\.")
VLLM_PROJECTION = re.compile(r"(?:medusa_heads\.)?lm_heads\.(\d{1,4})\.")
QKV_BIASES = "q_proj.bias", "k_proj.bias", "v_proj.bias"
MEDUSA_FILES = "medusa_lm_head.safetensors", "medusa_lm_head.pt"  # these hold only the heads
# the trees published with Medusa (FasterDecoding/Medusa, Apache-2.0), as lists of paths
PUBLISHED_TREES: dict[str, list[RankPath]] = {
    name: [tuple(path) for path in paths]
    for name, paths in read_json(Path(__file__).with_name("medusa_trees.json")).items()
}


def read_heads(
    source: Place, prefix: str, config: Config, tokenizer: Tokenizer | None
) -> tuple[dict[str, Tensor], Path]:
    """Return the tensors of heads for a model with this config, without the prefix, and their
    directory. `source` holds a full model or only the heads. Raises UserError if they were made
    with another tokenizer."""
    path, names = Path(source), MEDUSA_FILES if prefix == MEDUSA_PREFIX else ()
    folder = path.parent if path.is_file() else resolve(source)
    only_heads = [path] if path.is_file() else [folder / n for n in names if (folder / n).is_file()]
    tensors: dict[str, Tensor] = {}
    for file in only_heads[:1] or weights.weight_files(folder):
        for name, tensor in weights.read_tensors(file, config).items():
            if only_heads or name.startswith(prefix) or VLLM_NAME.match(name):
                tensors[name] = tensor
    heads = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    if any(map(VLLM_NAME.match, tensors)):
        heads = from_vllm(tensors, str(source))
    elif only_heads:
        heads = heads or tensors
    if not heads:
        raise UserError(f"{source} has no heads: no tensors {prefix}* and no {MEDUSA_FILES[0]}")
    fingerprint = optional_json(folder / "config.json").get("tokenizer_fingerprint")
    check_matching(str(source), Tokenizer.from_directory(folder) or fingerprint, tokenizer)
    return heads, folder


def header(base: str, tokenizer: Tokenizer | None) -> dict[str, str | None]:
    """Return the fields that every format's config.json has. `base` is the target's name."""
    fingerprint = tokenizer.fingerprint if tokenizer else None
    return {"base_model_name_or_path": base, "tokenizer_fingerprint": fingerprint}


def save_measured(
    heads: MedusaHeads | RecurrentHead, directory: Path, config: dict | None = None
) -> None:
    """Write `config` (default: the present config.json) with the heads' tree and accuracy, or their
    acceptance by step."""
    file = directory / "config.json"
    config = config or optional_json(file)
    if isinstance(heads, MedusaHeads):
        accuracy = None if heads.accuracy is None else heads.accuracy.tolist()
        measured = {"medusa_choices": heads.tree, "medusa_accuracy": accuracy}
        return weights.write_json(file, config | measured, indent=None)
    rates = heads.acceptance and [round(rate, 3) for rate in heads.acceptance]
    weights.write_json(file, config | {"mtp_acceptance": rates})


# ---- Medusa --------------------------------------------------------------------------------------


def load_medusa(
    source: Place, model: Transformer, tokenizer: Tokenizer | None = None
) -> MedusaHeads:
    """Load the heads from a file, a directory or a hub id: in the layouts v1 (with projections), v2
    (residual blocks only), Medusa-1.0 (in a full model, under `medusa_head.`) and vLLM's. The
    tensors determine the numbers of heads and layers, not config.json. Raises UserError for heads
    of another model or tokenizer."""
    tensors, folder = read_heads(source, MEDUSA_PREFIX, model.config, tokenizer)
    matches = list(filter(None, map(MEDUSA_NAME.fullmatch, tensors)))
    count = 1 + max((int(match[1]) for match in matches), default=-1)
    layers = 1 + max((int(match[2]) for match in matches if match[3] != "weight"), default=-1)
    c, shared = model.config, all(match[3] != "weight" for match in matches)
    with torch.device("meta"):
        heads = MedusaHeads(count, layers, c.hidden_size, None if shared else c.vocab_size)
    weights.fill(heads, tensors, str(source), model.dtype, model.device)
    read_tree(heads, folder / "config.json")
    return heads.eval()


def from_vllm(tensors: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    """Rename tensors from vLLM's layout (blocks.0.layers.0.weight, lm_heads.0.weight) to v1's.
    Missing biases become 0. If only the first projection is stored, all heads share it."""
    blocks = filter(None, map(VLLM_BLOCK.match, tensors))
    layers = 1 + max((int(block[2]) for block in blocks), default=-1)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        renamed = VLLM_BLOCK.sub(r"\1.\2.linear.", name)
        renamed = VLLM_PROJECTION.sub(rf"\1.{layers}.", renamed)
        if not MEDUSA_NAME.fullmatch(renamed):
            raise UserError(f"{where}: {name} of vLLM's layout is not supported")
        found[renamed] = tensor
        if renamed.endswith("linear.weight"):
            found.setdefault(renamed[: -len("weight")] + "bias", tensor.new_zeros(len(tensor)))
    projections = [name for name in found if name.endswith(f".{layers}.weight")]
    if projections == [f"0.{layers}.weight"]:
        heads = {name.partition(".")[0] for name in found}
        found |= {f"{head}.{layers}.weight": found[projections[0]].clone() for head in heads}
    return found


def read_tree(heads: MedusaHeads, path: Path) -> None:
    """Set the tree and the accuracies from config.json. By default, the tree is the published one,
    cut to the number of heads."""
    config, depth = optional_json(path), len(heads)
    heads.tree = [ranks for ranks in PUBLISHED_TREES["mc_sim_7b_63"] if len(ranks) <= depth]
    with user_error(f"{path}: invalid medusa_choices or medusa_accuracy"):
        if config.get("medusa_choices") is not None:
            heads.tree = [tuple(ranks) for ranks in config["medusa_choices"]]
            with_prefixes(heads.tree, depth, 2**31)
        if config.get("medusa_accuracy") is not None:
            heads.accuracy = torch.tensor(config["medusa_accuracy"], dtype=torch.float64)
            if heads.accuracy.dim() != 2 or len(heads.accuracy) != depth:
                raise ValueError("each head needs a list of accuracies")


def save_medusa(
    heads: MedusaHeads, directory: Path, base: str, tokenizer: Tokenizer | None, dtype: torch.dtype
) -> None:
    """Write the heads for `load_medusa`, in layout v1, or v2 if they share lm_head."""
    weights.write_tensors(directory / MEDUSA_FILES[0], heads.state_dict(), dtype)
    numbers = {"medusa_num_heads": len(heads), "medusa_num_layers": heads.layers}
    config = numbers | {"version": "2" if heads.shared else "1"}
    save_measured(heads, directory, config | header(base, tokenizer))


# ---- MTP -----------------------------------------------------------------------------------------


def load_mtp(source: Place, model: Transformer, tokenizer: Tokenizer | None = None) -> MTPHead:
    """Load the head from a directory, a hub id or a file with a full MiMo model or only the head.
    Raises UserError for a head of another model or tokenizer."""
    tensors, folder = read_heads(source, MTP_PREFIX, model.config, tokenizer)
    if not model.config.qkv_bias:  # `export` adds zeros, since vLLM's layout always has biases
        tensors = {n: t for n, t in tensors.items() if not n.endswith(QKV_BIASES) or t.any()}
    check_attention(str(source), folder, model.config)
    with torch.device("meta"):
        head = MTPHead(model.config)
    return fill_head(head, tensors, source, folder, model)


def fill_head(
    head: RecurrentHead, tensors: dict[str, Tensor], source: Place, folder: Path, model: Transformer
) -> RecurrentHead:
    """Move the tensors of a head of a `model` into it and set its acceptance."""
    weights.fill(head, tensors, str(source), model.dtype, model.device)
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
    """Raise UserError if a head's config.json has other attention heads or another rotation than
    the model's, which the shapes of the weights do not show."""
    keys = CheckedJson(folder / "config.json")
    if "num_attention_heads" not in keys.raw:
        return
    values = *attention_sizes(keys), *read_rope(keys)
    config = replace(config, kv_heads=config.kv_heads * config.ranks // config.kv_copies)
    for name, value in zip(("kv_heads", "head_dim", "rope_theta", "rope_scaling"), values):
        if value != (expected := getattr(config, name)):
            raise UserError(f"{where} is for another model: its {name} is {value}, the model's is "
                            f"{expected}")  # fmt: skip


def save_mtp(
    head: MTPHead, directory: Path, base: str, tokenizer: Tokenizer | None, dtype: torch.dtype,
    step_weights: list[float],
) -> None:  # fmt: skip
    """Write the head for `load_mtp`, with MiMo's names. `step_weights` are those of the loss."""
    tensors = {MTP_PREFIX + name: tensor for name, tensor in head.state_dict().items()}
    weights.write_tensors(directory / "model.safetensors", tensors, dtype)
    config = config_json(head.config, dtype) | {
        "num_nextn_predict_layers": 1,
        "num_speculative_steps": len(step_weights),
        "mtp_loss_step_weights": [round(weight, 4) for weight in step_weights],
    }
    save_measured(head, directory, config | header(base, tokenizer))


# ---- vocabularies --------------------------------------------------------------------------------


def load_vocabulary(
    path: str | Path, model: Transformer, tokenizer: Tokenizer | None = None,
    size: int | None = None,
) -> Compressed:  # fmt: skip
    """Load at most `size` tokens of each language from a file that `save_vocabulary` wrote, or in a
    .pt file from FastMTP's map: a list or tensor of ids, the most frequent first."""
    path, vocab = Path(path), model.config.vocab_size
    stored = weights.read_pickle(path) if path.suffix == ".pt" else read_json(path)
    problem = "was not written by `distill vocabulary` and is not a list of token ids"
    with user_error(f"{path} {problem}"):
        if path.suffix == ".pt":
            ids = list(dict.fromkeys(torch.as_tensor(stored, dtype=torch.long).tolist()))
            stored = {"languages": {path.stem: {"ids": ids, "counts": [0] * len(ids)}}}
        languages = {name: Language(tuple(fields["ids"][:size]), tuple(fields["counts"][:size]))
                     for name, fields in stored["languages"].items()}  # fmt: skip
    check_matching(str(path), stored.get("tokenizer_fingerprint"), tokenizer)
    if not languages or not all(language.ids for language in languages.values()):
        raise UserError(f"{path} has no languages, or one without tokens")
    if not all(token in range(vocab) for lang in languages.values() for token in lang.ids):
        raise UserError(f"{path} has ids outside the target's vocabulary of {vocab}; it was made "
                        "for another model")  # fmt: skip
    return Compressed(languages, model)


def load_subset(
    path: str | Path | None, model: Transformer, tokenizer: Tokenizer | None = None
) -> Subset | None:
    """Return the tokens of all languages of a vocabulary together; None without a file."""
    return load_vocabulary(path, model, tokenizer).select([]) if path else None


def save_vocabulary(languages: dict[str, Language], tokenizer: Tokenizer, path: Path) -> None:
    """Write a file for `load_vocabulary`."""
    rows = {name: {"ids": lang.ids, "counts": lang.counts} for name, lang in languages.items()}
    content = {"tokenizer_fingerprint": tokenizer.fingerprint, "languages": rows}
    weights.write_json(path, content, indent=None)
