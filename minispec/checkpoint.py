"""Hugging Face checkpoints: a directory or a hub id -> model and tokenizer; and back."""

import contextlib
import json
import os
import pickle
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import shorten

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from minispec.config import FLAT, Keys, config_json, read_config
from minispec.errors import UserError, optional_json, read_json
from minispec.model import Config, Transformer
from minispec.tokenizer import Tokenizer

WEIGHTS = Path(__file__).resolve().parent.parent / "weights"  # the shipped ones
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
LEFT_OUT = re.compile(r"model\.mtp_layers\.|medusa_head\.|.*inv_freq$")  # heads', derived
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"

# ---- tensors -------------------------------------------------------------------------------------


def weight_files(directory: Path) -> list[Path]:
    """The files of one checkpoint: single or sharded safetensors, else the same of .bin."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (directory / name).exists():
            return [directory / name]
        index = directory / f"{name}.index.json"
        if index.exists():
            shards = Keys(index, read_json(index)).get("weight_map", FLAT)
            files = [directory / shard for shard in sorted(set(map(str, shards.values())))]
            missing = ", ".join(file.name for file in files if not file.exists())
            if missing:
                raise UserError(f"{directory} lacks {missing}: download the shards again")
            return files
    raise UserError(f"{directory} has no weights: neither model.safetensors nor pytorch_model.bin")


def read_file(path: Path) -> object:
    """What a .safetensors, .bin or .pt file holds; code in a pickle is never run."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # torch would advise to run it
        raise UserError(
            f"{path} holds more than tensors, and code is never unpickled; or it is damaged"
        ) from None
    except Exception as error:  # a damaged file may raise anything
        raise UserError(
            f"{path} cannot be read: it is damaged, cut short, or only a pointer, in the place of "
            f"which git lfs pull fetches it ({shorten(str(error), 200)})"
        ) from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, by name."""
    tensors = read_file(path)
    if not isinstance(tensors, dict):
        raise UserError(f"{path} holds no tensors by name")
    return {str(name): tensor for name, tensor in tensors.items()}


def fill(
    module: nn.Module, tensors: dict[str, Tensor], where: str, dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    """Copy tensors into a module made on the meta device, and freeze it; every name and shape must
    fit, and all be finite numbers that need no scale."""
    state = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.is_meta or tensor.layout != torch.strided:
            raise UserError(f"{where}: {name} is not a tensor")
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise UserError(f"{where}: {name} is quantised, to {tensor.dtype}: not supported")
        if not tensor.isfinite().all():
            raise UserError(f"{where}: {name} has a NaN or an infinity: take undamaged weights")
        state[name] = tensor.to(device, dtype, copy=True)
    try:
        module.load_state_dict(state, assign=True)
    except RuntimeError as error:  # torch lists what is missing, unexpected and misshapen
        said = shorten(str(error).split("\n\t", 1)[-1], 500, placeholder=" …")
        raise UserError(f"{where}: weights and config.json do not fit each other: {said}") from None
    module.requires_grad_(False)


def tie(tensors: dict[str, Tensor]) -> None:
    """A tied head at both ends of the model, whichever of them the file has."""
    ends = [tensors[name] for name in (EMBEDDING, LM_HEAD) if name in tensors]
    if len(ends) == 2 and not torch.equal(*ends):
        raise UserError(
            f"config.json says tie_word_embeddings, but {EMBEDDING} and {LM_HEAD} differ: set it "
            "to false"
        )
    if ends:
        tensors[EMBEDDING] = tensors[LM_HEAD] = ends[0]


# ---- load ----------------------------------------------------------------------------------------


def resolve(source: str | os.PathLike) -> Path:
    """A local directory, or the snapshot of a hub id, downloaded where it is not at hand."""
    name = str(source)
    if os.path.isdir(name):
        return Path(name)
    if os.path.exists(name) or not re.fullmatch(r"[^/.~][^/]*/[^/]+", name):
        raise UserError(f"no such directory: {name} (nor is it an id on the hub, OWNER/MODEL)")
    from huggingface_hub import snapshot_download

    # not the same weights in another layout, or of other times
    fetch = partial(snapshot_download, name, ignore_patterns=["consolidated*", "*/*"])
    wanted = ["*.json", "*.jinja", "*.safetensors", "medusa_lm_head.pt"]
    try:
        directory = Path(fetch(allow_patterns=wanted))
        if not any(directory.glob("*.safetensors")):  # an old one
            directory = Path(fetch(allow_patterns=[*wanted, "*.bin"]))
        return directory
    except Exception as error:  # the library's own and those of its HTTP client, which changes
        raise UserError(
            f"no directory {name}, and it could not be fetched from the hub "
            f"({type(error).__name__}): check the name and the network"
        ) from None


def pick_device(device: str | torch.device) -> torch.device:
    """`auto`: cuda, else mps, else cpu."""
    there = [kind for kind in ("cuda", "mps") if getattr(torch, kind).is_available()] + ["cpu"]
    with contextlib.suppress(RuntimeError):  # no such name, or number
        place = torch.device(there[0] if str(device) == "auto" else device)
        if place.type in there:
            torch.empty(0, device=place)
            return place
    raise UserError(f"device {device} is not available: use one of {', '.join(there)}")


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 on a GPU, float32 on a CPU."""
    name = str(dtype).removeprefix("torch.")
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise UserError(f"dtype {name} is not supported: use auto, {', '.join(DTYPES)}")
    if name == "float64" and device.type == "mps":
        raise UserError("dtype float64 is not available on mps: use --device cpu")
    return DTYPES[name]


def load(
    source: str | os.PathLike, dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
) -> tuple[Transformer, Tokenizer | None]:  # fmt: skip
    """Model and tokenizer (None where there is no tokenizer.json) of a directory or hub id;
    `model.source` remembers the directory.

    Raises UserError for whatever is missing, damaged or not implemented.
    """
    place = pick_device(device)
    kind = pick_dtype(dtype, place)
    directory = resolve(source)
    config, files = read_config(directory), weight_files(directory)
    tokenizer = None
    if (directory / "tokenizer.json").exists():
        tokenizer = Tokenizer.from_directory(directory)
        check_size(str(directory), tokenizer, config)
        if tokenizer.bos and config.bos_id is None:
            config = replace(config, bos_id=tokenizer.backend.token_to_id(tokenizer.bos))
    tensors = {}
    for file in files:
        tensors |= {n: t for n, t in read_tensors(file).items() if not LEFT_OUT.match(n)}
    if config.tied:
        tie(tensors)
    with torch.device("meta"):
        model = Transformer(config)
    fill(model, tensors, str(directory), kind, place)
    if config.tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.source = directory
    return model.eval(), tokenizer


def read_tokenizer(source: str | os.PathLike) -> Tokenizer:
    """The tokenizer of a directory or hub id."""
    directory = resolve(source)
    if not (directory / "tokenizer.json").exists():
        raise UserError(f"{source} has no tokenizer.json")
    return Tokenizer.from_directory(directory)


# ---- what belongs together -----------------------------------------------------------------------


def check_size(where: str, tokenizer: Tokenizer, config: Config) -> None:
    """Refuse a tokenizer with more tokens than the model has. Added ones may lie beyond: some
    files have a padding token that the model never learnt."""
    words = tokenizer.backend.get_vocab_size(with_added_tokens=False)
    if words > config.vocab_size:
        raise UserError(
            f"{where}: the tokenizer has {words} tokens, the embedding only {config.vocab_size}: "
            "they do not belong together"
        )


def check_tokenizer(where: str, folder: Path, tokenizer: Tokenizer | None) -> None:
    """Refuse what was made with another tokenizer, where it came with that or its fingerprint."""
    theirs = optional_json(folder / "config.json").get("tokenizer_fingerprint")
    if (folder / "tokenizer.json").exists():
        theirs = Tokenizer.from_directory(folder).fingerprint
    check_fingerprint(where, theirs, tokenizer)


def check_fingerprint(where: str, theirs: str | None, tokenizer: Tokenizer | None) -> None:
    """Refuse what was made with another tokenizer, as far as both are known."""
    if tokenizer and theirs and theirs != tokenizer.fingerprint:
        raise UserError(
            f"{where}: made with another tokenizer than the model's; take what was made with that"
        )


# ---- save ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to write, which takes its place once it is whole: on a full disk what
    was there stays, and nothing is added."""
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        mode = part.stat().st_mode  # by the umask, which safetensors does not heed
        yield part
        part.chmod(mode)
        part.replace(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be written: {error}") from None
    finally:
        with contextlib.suppress(OSError):  # no such folder
            part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def write_tensors(path: Path, tensors: dict[str, Tensor], dtype: torch.dtype | None = None) -> None:
    """Write a .safetensors file, its tensors in another type if `dtype` is given."""
    stored = {name: t.detach().to("cpu", dtype).contiguous() for name, t in tensors.items()}
    with replacing(path) as part:
        save_file(stored, part, {"format": "pt"})


def save(
    model: Transformer, tokenizer: Tokenizer | None, directory: Path,
    dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Write a directory that `load` and transformers read, each file whole or not at all."""
    if next(model.buffers(), None) is not None:
        raise UserError("int8 weights cannot be saved: load the model again, and save that")
    # `named_parameters` lists a tied weight once, under the embedding's name
    write_tensors(directory / "model.safetensors", dict(model.named_parameters()), dtype)
    config = config_json(model.config, dtype or model.dtype)
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    texts = tokenizer.files() if tokenizer else {}
    for name, keys in (("config.json", config), ("generation_config.json", ends)):
        texts[name] = json.dumps(keys, indent=2) + "\n"
    for name, text in texts.items():
        write_text(directory / name, text)
