"""Read files of weights, check them, load them into a model, and write them."""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten

import safetensors.torch
import torch
from torch import Tensor, nn

from minispec import distributed
from minispec.checkpoints.config import FLAT_OBJECT, CheckedJson
from minispec.cli import UserError, user_error
from minispec.model import Config

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
IGNORED_TENSORS = re.compile(r"model\.mtp_layers\.|medusa_head\.|.*inv_freq$")  # heads, buffers
FIRST_LAYER = re.compile(r"(|.*?\.)(model\.|)layers\.0\.input_layernorm\.weight")
TIED_NAMES = "model.embed_tokens.weight", "lm_head.weight"  # one tensor in a tied model


def weight_files(directory: Path) -> list[Path]:
    """Return the files of a checkpoint, one or several: safetensors or, without any, .bin."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (directory / name).exists():
            return [directory / name]
        index = directory / f"{name}.index.json"
        if index.exists():
            weight_map = CheckedJson(index).get("weight_map", FLAT_OBJECT)
            shards = sorted(set(map(str, weight_map.values())))
            if outside := [s for s in shards if Path(s).is_absolute() or ".." in Path(s).parts]:
                raise UserError(f"{index} names {outside[0]}, which is outside its folder")
            return [directory / shard for shard in shards]
    raise UserError(f"{directory} has no weights (model.safetensors or pytorch_model.bin)")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise UserError if a file of weights cannot be read."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # any exception; torch's message suggests unpickling
        raise UserError(
            f"{path} cannot be read ({type(error).__name__}): it is missing, damaged, a Git LFS "
            "pointer (run `git lfs pull`), or contains code, which is never unpickled"
        ) from None


def read_pickle(path: Path) -> object:
    """Read a .bin or .pt file without running code in it."""
    with reading(path):
        return torch.load(path, map_location="cpu", weights_only=True)


def read_tensors(path: Path, config: Config) -> dict[str, Tensor]:
    """Read a file's tensors, by name; if ranks share the model, this rank's shards of them. Whole
    tensors of a .safetensors file are mapped: writing to one never changes the file."""
    if path.suffix == ".safetensors":
        with reading(path), safetensors.safe_open(path, "pt") as file:
            read = file.get_tensor if config.ranks == 1 else file.get_slice
            return {name: distributed.shard(name, read(name), config) for name in file.keys()}
    tensors = read_pickle(path)
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise UserError(f"{path} must map names to tensors")
    # copies, since tensors in a pickle may share memory; training would change both
    names = list(tensors)
    return {str(n): distributed.shard(str(n), tensors.pop(n), config).clone() for n in names}


def read_weights(directory: Path, config: Config) -> dict[str, Tensor]:
    """Read a checkpoint directory's tensors of the model, for this rank, by published names."""
    tensors: dict[str, Tensor] = {}
    for file in weight_files(directory):
        tensors |= read_tensors(file, config)
    return {n: t for n, t in strip_prefixes(tensors).items() if not IGNORED_TENSORS.match(n)}


def fill(
    module: nn.Module, tensors: dict[str, Tensor], where: str, dtype: torch.dtype,
    device: torch.device, tied: bool = False,
) -> None:  # fmt: skip
    """Move tensors into a module on the meta device and freeze it. Names and shapes must match, and
    all values must be finite. Tensors of this dtype and device are not copied."""
    state = {}
    for name in list(tensors):
        tensor = tensors.pop(name)  # not kept: memory never holds the model in both dtypes
        if tensor.dtype not in DTYPES.values():
            raise UserError(f"{where}: {name} is {tensor.dtype}: quantised weights are not "
                            "supported; use the unquantised model or a GGUF file")  # fmt: skip
        if not is_finite(tensor):
            raise UserError(f"{where}: {name} contains NaN or infinity; the checkpoint is corrupt")
        state[name] = tensor.to(device, dtype)
    if tied:
        tie(state)
    try:
        module.load_state_dict(state, assign=True)
    except RuntimeError as error:  # torch lists missing, unexpected and misshapen tensors
        problems = shorten(str(error).split("\n\t", 1)[-1], 500, placeholder=" …")
        raise UserError(f"{where}: the tensors do not fit the model: {problems}") from None
    module.requires_grad_(False)


def is_finite(tensor: Tensor) -> bool:
    """Return whether no value is NaN or infinite. A finite sum proves it, without the memory of
    `isfinite`, which is needed only if large values make the sum overflow."""
    if tensor.sum().isfinite():
        return True
    return all(part.isfinite().all() for part in tensor.flatten().split(2**20))


def tie(tensors: dict[str, Tensor]) -> None:
    """Store a tied tensor under both of its names, whichever of them the file has."""
    found = [tensors[name] for name in TIED_NAMES if name in tensors]
    if len(found) == 2 and not torch.equal(*found):
        names = " and ".join(TIED_NAMES)
        raise UserError(f"tie_word_embeddings is true, but {names} differ; set it to false")
    if found:
        tensors.update(dict.fromkeys(TIED_NAMES, found[0]))


def strip_prefixes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors to their published names: remove a common prefix (`_orig_mod.` of
    torch.compile, `module.` of DataParallel), and add `model.` if only the backbone was saved."""
    found = next(filter(None, map(FIRST_LAYER.fullmatch, tensors)), None)
    if not found:
        return tensors
    bare = {name.removeprefix(found[1]): tensor for name, tensor in tensors.items()}
    if found[2]:
        return bare
    return {n if n.startswith("lm_head.") else f"model.{n}": t for n, t in bare.items()}


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`, which replaces `path` once it is written. If writing
    fails, as on a full disk, the old file stays and no new one is left. Links are followed."""
    path = path.resolve()
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")  # others may be writing it too
    try:
        with user_error(f"{path} cannot be written", OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield partial
            partial.replace(path)
    finally:
        with contextlib.suppress(OSError):  # the folder does not exist
            partial.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    device = user_error(f"{path} cannot be written", OSError)  # such as /dev/null: not replaced
    with device if path.is_char_device() else atomic_write(path) as partial:
        (partial or path).write_bytes(content)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, content: dict | list, indent: int | None = 2) -> None:
    write_text(path, json.dumps(content, indent=indent) + "\n")


def write_tensors(path: Path, tensors: dict[str, Tensor], dtype: torch.dtype | None = None) -> None:
    """Write a .safetensors file, with its tensors converted to `dtype` if given."""
    stored = {name: t.detach().to("cpu", dtype).contiguous() for name, t in tensors.items()}
    # safetensors' own save_file ignores the umask
    write_bytes(path, safetensors.torch.save(stored, {"format": "pt"}))
