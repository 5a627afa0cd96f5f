"""Load a model and its tokenizer from a directory, a hub id or a GGUF file, and save them."""

import contextlib
import errno
import os
import re
from dataclasses import replace
from http.client import responses
from pathlib import Path
from textwrap import shorten

import torch

from minispec import paths
from minispec.checkpoints import weights
from minispec.checkpoints.config import config_json, read_config
from minispec.checkpoints.gguf import find_gguf, read_gguf, read_gguf_tokenizer
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.checkpoints.weights import write_text
from minispec.cli import MODEL_FILES, UserError, user_error
from minispec.distributed import all_reduce_outputs, shard, shard_config
from minispec.model import Transformer

ACCESS_ADVICE = ("check the name; if access to the model is restricted, accept its licence on its "
                 "page and log in with `hf auth login`")  # fmt: skip
NETWORK_VARIABLE = re.compile("(HTTPS?|ALL|NO)_PROXY|SSL_CERT_FILE|REQUESTS_CA_BUNDLE|HF_ENDPOINT|"
                              "HF_HUB_OFFLINE", re.IGNORECASE)  # fmt: skip
Place = str | os.PathLike  # a directory, a hub id or a file
OTHER_TOKENIZERS = "tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json"


def resolve(source: Place) -> Path:
    """Return the path of a model: a local directory or GGUF file, the snapshot of a hub id
    (downloaded if necessary), or SmolLM2 for the name `smollm2`."""
    name = str(source)
    if name == "smollm2" and not os.path.exists(name):
        return find_smollm2()
    check_links(name)
    if os.path.isdir(name) or name.lower().endswith(".gguf") and os.path.isfile(name):
        return Path(name)
    if os.path.exists(name) or not re.fullmatch(r"[^/.~][^/]*/[^/]+", name):
        raise UserError(f"no such directory: {name} (and it is not a hub id like OWNER/MODEL)")
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.jinja", "*.safetensors", "medusa_lm_head.pt"]
    ignored = ["consolidated*", "*/*"]  # the same weights in another layout, or older ones
    try:
        for patterns in wanted, [*wanted, "*.bin"]:  # the latter for an old checkpoint
            path = Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=ignored))
            if any(path.glob("*.safetensors")):
                break
        return path
    except Exception as error:  # from the library or from its HTTP client, which varies
        failure = f"could not be downloaded from the hub: {explain_failure(error)}"
        raise UserError(f"{name} is not a directory and {failure}") from None


def check_links(name: str) -> None:
    """Raise UserError if a model's directory or file, or a file in the directory, is a broken link,
    as in a copy of a hub snapshot that did not follow links."""
    inside = Path(name).iterdir() if os.path.isdir(name) else ()
    for file in name, *(file for file in inside if file.suffix in MODEL_FILES):
        if os.path.islink(file) and not os.path.exists(file):
            raise UserError(f"{file} is a broken link to {os.readlink(file)}; copy the original "
                            "directory again with cp -rL, or download the model")  # fmt: skip


def explain_failure(error: BaseException) -> str:
    """Say why a download failed and what to do about it, from the HTTP response, if any, and the
    original OSError. (Other details vary with the library's version.)"""
    while getattr(error, "response", None) is None and error.__cause__:
        error = error.__cause__
    response = getattr(error, "response", None)
    if response is not None:
        status = response.status_code
        reason = response.headers.get("x-error-message") or responses.get(status, "")
        advice = ACCESS_ADVICE if status in (401, 403, 404) else "try again later"
        return f"HTTP {status}: {reason.rstrip('.')}; {advice}"
    reason = shorten(f"{type(error).__name__}: {error}", 200).rstrip(".")
    if isinstance(error, OSError) and (error.filename or error.errno == errno.ENOSPC):
        return f"{reason}; set HF_HOME to a directory that can be written and has enough space"
    variables = filter(NETWORK_VARIABLE.fullmatch, os.environ)
    return f"{reason}; check {', '.join(['the name', 'the network', *variables])}"


def find_smollm2() -> Path:
    """Return SmolLM2-135M-Instruct in the hub's cache or, failing that, where fetch wrote it."""
    from huggingface_hub import snapshot_download

    with contextlib.suppress(Exception):  # absent or incomplete
        directory = Path(snapshot_download(paths.SMOLLM2_ID, local_files_only=True))
        needed = *weights.weight_files(directory), "config.json", "tokenizer.json"
        if all((directory / name).exists() for name in needed):
            return directory
    if (paths.SMOLLM2 / "target" / "config.json").exists():
        return paths.SMOLLM2 / "target"
    raise UserError("smollm2 has not been downloaded; run `python -m minispec fetch` (93 MB)")


def pick_device(device: str | torch.device) -> torch.device:
    """Resolve a device. `auto` means cuda if available, then mps, then cpu."""
    available = [name for name in ("cuda", "mps") if getattr(torch, name).is_available()] + ["cpu"]
    with contextlib.suppress(RuntimeError, TypeError):  # no device of this name or index
        resolved = torch.device(available[0] if str(device) == "auto" else device)
        if resolved.type in available:
            torch.empty(0, device=resolved)
            return resolved
    raise UserError(f"device {device} is not available; use one of {', '.join(available)}")


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Resolve a dtype. `auto` means bfloat16 on cuda and float32 elsewhere."""
    name = str(dtype).removeprefix("torch.")
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in weights.DTYPES:
        raise UserError(f"dtype {name} is not supported; use auto, {', '.join(weights.DTYPES)}")
    if name == "float64" and device.type == "mps":
        raise UserError("dtype float64 is not available on mps; use --device cpu")
    return weights.DTYPES[name]


def load(
    source: Place, dtype: str | torch.dtype = "auto", device: str | torch.device = "auto",
    draft: bool = False,
) -> tuple[Transformer, Tokenizer | None]:  # fmt: skip
    """Load the model and tokenizer (None if there is none) from a directory, hub id or GGUF file.
    Weights stored in this dtype are mapped from their file, which must not be overwritten meanwhile
    (replacing it is safe). Sets `model.source` to the path. After ranks have joined, the model is
    this rank's shard, or a whole `draft` that cannot be shared. Raises UserError if something is
    missing or not supported."""
    device = pick_device(device)
    dtype = pick_dtype(dtype, device)
    path = resolve(source)
    if file := find_gguf(path):
        config, tensors, tokenizer = read_gguf(file)
    else:
        config, tokenizer = read_config(path), Tokenizer.from_directory(path)
    with user_error(str(path)):
        config = shard_config(config, draft=draft)
    if file:
        tensors = {name: shard(name, tensor, config) for name, tensor in tensors.items()}
    elif not (tensors := weights.read_weights(path, config)):
        raise UserError(f"{path} holds no tensors of a model; use an MTP head with --heads and "
                        "--method fastmtp")  # fmt: skip
    if tokenizer:
        # not counting added tokens: some files add a padding token that was never trained
        tokens = tokenizer.backend.get_vocab_size(with_added_tokens=False)
        if tokens > config.vocab_size:
            raise UserError(f"{path}: the tokenizer has {tokens} tokens but the embedding only "
                            f"{config.vocab_size}; use the model's own tokenizer")  # fmt: skip
        if config.bos_id is None:
            config = replace(config, bos_id=tokenizer.id_of("bos_token"))
    with torch.device("meta"):
        model = Transformer(config)
    weights.fill(model, tensors, str(path), dtype, device, config.tied)
    all_reduce_outputs(model)
    if config.tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.source = path
    return model.eval(), tokenizer


def read_tokenizer(source: Place) -> Tokenizer:
    """Read the tokenizer of a directory, a hub id or a GGUF file."""
    path = resolve(source)
    return require_tokenizer(None if find_gguf(path) else Tokenizer.from_directory(path), path)


def require_tokenizer(
    tokenizer: Tokenizer | None, source: Path | None, advice: str = ""
) -> Tokenizer:
    """Return the tokenizer, or that of a GGUF `source`. Raises UserError saying how to get one."""
    if tokenizer is not None:
        return tokenizer
    if source and (file := find_gguf(source)):
        return read_gguf_tokenizer(file)
    advice = advice or "copy the model's tokenizer.json into its directory"
    if other := [name for name in OTHER_TOKENIZERS if source and (source / name).exists()]:
        advice = (f"create it with transformers from {other[0]}: "
                  "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)")  # fmt: skip
    raise UserError(f"{source or 'this model'} has no tokenizer.json; {advice}")


def check_matching(where: str, other: Tokenizer | str | None, tokenizer: Tokenizer | None) -> None:
    """Raise UserError if both tokenizers (or a fingerprint) are known and do not match."""
    if tokenizer and other and not tokenizer.matches(other):
        raise UserError(f"{where} was made with another tokenizer; use one made with the model's "
                        "tokenizer")  # fmt: skip


def save(
    model: Transformer, tokenizer: Tokenizer | None, directory: Path,
    dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Write a directory for `load` and transformers, each file completely or not at all."""
    if next(model.buffers(), None) is not None:
        raise UserError("int8 weights cannot be saved; save the model before quantising it")
    # `named_parameters` lists a tied weight once, under the embedding's name
    weights.write_tensors(directory / "model.safetensors", dict(model.named_parameters()), dtype)
    for name, text in (tokenizer.files() if tokenizer else {}).items():
        write_text(directory / name, text)
    config = config_json(model.config, dtype or model.dtype)
    weights.write_json(directory / "config.json", config)
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    weights.write_json(directory / "generation_config.json", ends)
