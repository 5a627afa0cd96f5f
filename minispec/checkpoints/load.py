"""Hugging Face checkpoints: a directory or a hub id -> model and tokenizer; and back."""

import contextlib
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from minispec.checkpoints import places
from minispec.checkpoints.config import UNQUANTISED, config_json, read_config
from minispec.checkpoints.gguf import find_gguf, read_gguf, read_gguf_tokenizer
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.checkpoints.weights import (
    DTYPES,
    LAYOUTS,
    LEFT_OUT,
    fill,
    read_tensors,
    tie,
    unwrapped,
    weight_files,
    write_tensors,
    write_text,
)
from minispec.errors import UserError
from minispec.model import Config, Transformer

OTHERS = "tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json"  # of other libraries


def resolve(source: str | os.PathLike) -> Path:
    """A local directory or GGUF file, the snapshot of a hub id, fetched where it is not here, or
    what `smollm2` means."""
    name = str(source)
    if name == "smollm2" and not os.path.exists(name):
        return real_model()
    if os.path.isdir(name) or name.lower().endswith(".gguf") and os.path.isfile(name):
        return Path(name)
    if os.path.exists(name) or not re.fullmatch(r"[^/.~][^/]*/[^/]+", name):
        raise UserError(f"no such directory: {name} (nor is it an id on the hub, OWNER/MODEL)")
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.jinja", "*.safetensors", "medusa_lm_head.pt"]
    # not the same weights in another layout, or of other times
    left_out = ["consolidated*", "*/*"]
    try:
        directory = snapshot_download(name, allow_patterns=wanted, ignore_patterns=left_out)
        if not any(Path(directory).glob("*.safetensors")):  # an old one
            wanted.append("*.bin")
            directory = snapshot_download(name, allow_patterns=wanted, ignore_patterns=left_out)
        return Path(directory)
    except Exception as error:  # the library's own and those of its HTTP client, which changes
        raise UserError(
            f"no directory {name}, and it could not be fetched from the hub "
            f"({type(error).__name__}): check the name and the network"
        ) from None


def real_model() -> Path:
    """SmolLM2-135M-Instruct in the hub's cache, else where minispec.fetch has written it."""
    from huggingface_hub import snapshot_download

    with contextlib.suppress(Exception):  # not there, or not a whole one
        directory = Path(snapshot_download(places.REAL_ID, local_files_only=True))
        needed_files = *weight_files(directory), directory / "config.json"
        if all(f.exists() for f in (*needed_files, directory / "tokenizer.json")):
            return directory
    if (places.REAL / "target" / "config.json").exists():
        return places.REAL / "target"
    raise UserError("smollm2 has not been downloaded; run `python -m minispec.fetch` (93 MB)")


def pick_device(device: str | torch.device) -> torch.device:
    """`auto`: cuda, else mps, else cpu."""
    there = [kind for kind in ("cuda", "mps") if getattr(torch, kind).is_available()] + ["cpu"]
    with contextlib.suppress(RuntimeError, TypeError):  # no such name, or number
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
    """Model and tokenizer (None where there is none) of a directory, hub id or GGUF file, which
    `model.source` remembers. Raises UserError for what is missing, damaged or not implemented."""
    place = pick_device(device)
    kind = pick_dtype(dtype, place)
    path = resolve(source)
    if file := find_gguf(path):
        config, tensors, tokenizer = read_gguf(file)
    else:
        config, tensors, tokenizer = read_directory(path)
    if tokenizer:
        # added tokens may lie beyond: some files pad with one that the model never learnt
        words = tokenizer.backend.get_vocab_size(with_added_tokens=False)
        if words > config.vocab_size:
            raise UserError(
                f"{path}: the tokenizer has {words} tokens, the embedding only "
                f"{config.vocab_size}: they do not belong together"
            )
        if config.bos_id is None:
            config = replace(config, bos_id=tokenizer.id_of("bos_token"))
    if config.tied:
        tie(tensors)
    with torch.device("meta"):
        model = Transformer(config)
    fill(model, tensors, str(path), kind, place)
    if config.tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.source = path
    return model.eval(), tokenizer


def read_directory(path: Path) -> tuple[Config, dict[str, Tensor], Tokenizer | None]:
    """Config, tensors and tokenizer of a checkpoint directory."""
    config, files = read_config(path), weight_files(path)
    tokenizer, tensors = tokenizer_in(path), {}  # what can be wrong with it is told before the work
    for file in files:
        tensors |= read_tensors(file)
    for end, layout in LAYOUTS.items():
        if any(name.endswith(end) for name in tensors):
            raise UserError(f"{path}: quantised weights ({layout}): {UNQUANTISED}")
    tensors = {n: t for n, t in unwrapped(tensors).items() if not LEFT_OUT.match(n)}
    return config, tensors, tokenizer


def tokenizer_in(directory: Path) -> Tokenizer | None:
    there = (directory / "tokenizer.json").exists()
    return Tokenizer.from_directory(directory) if there else None


def read_tokenizer(source: str | os.PathLike) -> Tokenizer:
    """The tokenizer of a directory, a hub id or a GGUF file."""
    path = resolve(source)
    file = find_gguf(path)
    return needed(read_gguf_tokenizer(file) if file else tokenizer_in(path), path)


def needed(tokenizer: Tokenizer | None, source: Path | None, instead: str = "") -> Tokenizer:
    """The tokenizer; refuse a model that has none, and say why or how it gets one."""
    if tokenizer is not None:
        return tokenizer
    if source and (file := find_gguf(source)):
        read_gguf_tokenizer(file)  # raises UserError with the reason
    cure = instead or "put the file of its tokenizer there"
    for name in OTHERS:
        if source and (source / name).exists():
            cure = (f"transformers makes one from {name}, once: "
                    "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)")  # fmt: skip
            break
    raise UserError(f"{source or 'this model'} has no tokenizer.json: {cure}")


def check_fingerprint(where: str, theirs: str | None, tokenizer: Tokenizer | None) -> None:
    """Refuse what was made with another tokenizer, as far as both are known."""
    if tokenizer and theirs and theirs != tokenizer.fingerprint:
        raise UserError(
            f"{where}: made with another tokenizer than the model's; take what was made with that"
        )


def save(
    model: Transformer, tokenizer: Tokenizer | None, directory: Path,
    dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Write a directory that `load` and transformers read, each file whole or not at all."""
    if next(model.buffers(), None) is not None:
        raise UserError("int8 weights cannot be saved: save the model before it is quantised")
    # `named_parameters` lists a tied weight once, under the embedding's name
    write_tensors(directory / "model.safetensors", dict(model.named_parameters()), dtype)
    config = config_json(model.config, dtype or model.dtype)
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    texts = tokenizer.files() if tokenizer else {}
    for name, keys in (("config.json", config), ("generation_config.json", ends)):
        texts[name] = json.dumps(keys, indent=2) + "\n"
    for name, text in texts.items():
        write_text(directory / name, text)
