"""Files of weights: read, checked, put into a model, and written."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten

import safetensors.torch
import torch
from torch import Tensor, nn

from minispec.checkpoints.config import FLAT, UNQUANTISED, Keys
from minispec.errors import UserError, read_json

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
LEFT_OUT = re.compile(r"model\.mtp_layers\.|medusa_head\.|.*inv_freq$")  # heads', derived
FIRST_LAYER = re.compile(r"(|.*?\.)(model\.|)layers\.0\.input_layernorm\.weight")
LAYOUTS = {".g_idx": "GPTQ", ".qweight": "AWQ", ".biases": "mlx", "weight_scale_inv": "FP8",
           ".weight_scale": "FP8"}  # fmt: skip
ENDS = "model.embed_tokens.weight", "lm_head.weight"  # one tensor in a tied model


def weight_files(directory: Path) -> list[Path]:
    """The files of one checkpoint: single or sharded safetensors, else the same of .bin."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (directory / name).exists():
            return [directory / name]
        index = directory / f"{name}.index.json"
        if index.exists():
            weight_map = Keys(index, read_json(index)).get("weight_map", FLAT)
            shards = sorted(set(map(str, weight_map.values())))
            for shard in map(Path, shards):
                if shard.is_absolute() or ".." in shard.parts:
                    raise UserError(f"{index} names {shard}, which is outside its folder")
            return [directory / shard for shard in shards]
    raise UserError(f"{directory} has no weights: neither model.safetensors nor pytorch_model.bin")


def read_file(path: Path) -> object:
    """What a .safetensors, .bin or .pt file holds; code in a pickle is never run."""
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file may raise anything; torch would advise to unpickle
        raise UserError(
            f"{path} cannot be read ({type(error).__name__}): it is missing, damaged, a pointer of "
            "git lfs (git lfs pull fetches the file), or has code, which is never unpickled"
        ) from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, by name."""
    tensors = read_file(path)
    for name, tensor in tensors.items() if isinstance(tensors, dict) else [("it", None)]:
        if not isinstance(tensor, Tensor) or tensor.is_meta or tensor.layout != torch.strided:
            raise UserError(f"{path} must hold tensors by name: {name} is none")
    return {str(name): tensor for name, tensor in tensors.items()}


def fill(
    module: nn.Module, tensors: dict[str, Tensor], where: str, dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    """Copy tensors into a module made on the meta device, and freeze it; every name and shape must
    fit, and all be finite numbers."""
    state = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES.values():
            raise UserError(
                f"{where}: {name} is {tensor.dtype}, a quantised weight: {UNQUANTISED}"
            )
        if not tensor.isfinite().all():
            raise UserError(f"{where}: {name} contains NaN or infinity; the checkpoint is corrupt")
        state[name] = tensor.to(device, dtype, copy=True)
    try:
        module.load_state_dict(state, assign=True)
    except RuntimeError as error:  # torch lists what is missing, unexpected and misshapen
        said = shorten(str(error).split("\n\t", 1)[-1], 500, placeholder=" …")
        raise UserError(f"{where}: the tensors do not fit the model: {said}") from None
    module.requires_grad_(False)


def tie(tensors: dict[str, Tensor]) -> None:
    """A tied head at both ends of the model, whichever of them the file has."""
    ends = [tensors[name] for name in ENDS if name in tensors]
    if len(ends) == 2 and not torch.equal(*ends):
        raise UserError(f"tie_word_embeddings is true, but {' and '.join(ENDS)} differ")
    if ends:
        tensors.update(dict.fromkeys(ENDS, ends[0]))


def unwrapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under published names: without a prefix that all have, as torch.compile
    (`_orig_mod.`) and data parallelism (`module.`) leave it, and with the `model.` that a body
    saved alone lacks."""
    found = next(filter(None, map(FIRST_LAYER.fullmatch, tensors)), None)
    if not found or not all(name.startswith(found[1]) for name in tensors):
        return tensors
    bare = {name.removeprefix(found[1]): tensor for name, tensor in tensors.items()}
    if found[2]:
        return bare
    return {n if n.startswith("lm_head.") else f"model.{n}": t for n, t in bare.items()}


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to write, which takes its place once it is whole: on a full disk what
    was there stays, and nothing is added."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")  # others may write it at this moment
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        part.replace(path)
    except (OSError, RuntimeError) as error:  # which torch makes of an OSError
        raise UserError(f"{path} cannot be written: {shorten(str(error), 200)}") from None
    finally:
        with contextlib.suppress(OSError):  # no such folder
            part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def write_tensors(path: Path, tensors: dict[str, Tensor], dtype: torch.dtype | None = None) -> None:
    """Write a .safetensors file, its tensors in another type if `dtype` is given."""
    stored = {name: t.detach().to("cpu", dtype).contiguous() for name, t in tensors.items()}
    with replacing(path) as part:  # safetensors' own save_file does not heed the umask
        part.write_bytes(safetensors.torch.save(stored, {"format": "pt"}))
