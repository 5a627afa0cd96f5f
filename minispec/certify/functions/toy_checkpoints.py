"""Small random checkpoints for examining functions."""

import hashlib
import json
from pathlib import Path

import torch

from minispec.certify.toys import letter_tokenizer, small_model
from minispec.checkpoints.load import load, save
from minispec.checkpoints.weights import write_text
from minispec.model import Transformer

MODEL_SHAPE = {  # such that engines support it
    "hidden_size": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "intermediate_size": 64,
}  # fmt: skip
# a model in which rounding errors grow; in short sums, engines may not round differently at all
SENSITIVE = {"layers": 16, "intermediate_size": 1536}
HALF_RIGHT, NEARLY_RIGHT = 0.06, 0.004  # noise in the draft's weights
FLATNESS = 0.4  # of distributions: scales the weight of the last norm
CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
POOL = (  # at which requests are drawn: vocabulary, context, flatness, noise, loops, end tokens
    (24, 128, 0.4, 0.03, False, 0, ""), (24, 128, 0.4, NEARLY_RIGHT, False, 0, ""),
    (2, 128, 0.2, HALF_RIGHT, False, 0, ""), (4, 128, 0.05, HALF_RIGHT, False, 0, ""),
    (8, 128, 0.3, 0.02, True, 0, ""), (24, 512, 0.4, 0.03, False, 0, ""),
    (60, 256, 0.1, HALF_RIGHT, False, 0, ""), (24, 128, 0.4, 0.02, False, 1, CONFIG),
    (12, 128, 0.3, 0.03, True, 1, CONFIG), (24, 128, 0.3, 0.02, True, 2, GENERATION_CONFIG),
    (60, 128, 0.2, 0.03, False, 3, GENERATION_CONFIG),
)  # fmt: skip


def write_checkpoint(
    path: Path, seed: int, vocab: int, context: int = 128, noise: float = HALF_RIGHT,
    flatness: float = FLATNESS, loops: bool = False,
    eos: tuple[str, int | list[int]] | None = None, sensitive: bool = False,
) -> tuple[str, Transformer]:  # fmt: skip
    """Write a small random llama with a tokenizer, and a noisy draft in its folder `draft`. Return
    the path and the model as loaded in float64.

    With `loops`, its attention adds nothing, so that the next token depends on the last one only
    and greedy text soon repeats itself. `eos` is a file name and the end tokens to write there. In
    a `sensitive` model, each layer outweighs those before it, so that rounding errors grow. Its
    weights are also bfloat16 numbers, and its draft differs in the last norm only."""
    shape = MODEL_SHAPE | (SENSITIVE if sensitive else {"layers": 2})
    model = small_model(seed, vocab, context, **shape)
    model.model.norm.weight.mul_(flatness)
    if sensitive:
        for i, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight.mul_(4**i)
            layer.mlp.down_proj.weight.mul_(4**i)
        model.bfloat16().double()
    if loops:
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    save(model, letter_tokenizer(vocab), path, torch.float32)
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in [model.model.norm.weight] if sensitive else model.parameters():
        random = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.add_(noise * random)
    save(model, letter_tokenizer(vocab), path / "draft", torch.float32)
    if eos:
        write_eos_tokens(path, *eos)
    return str(path), load(path, "float64", "cpu")[0]


def write_eos_tokens(folder: Path, where: str, tokens: int | list[int]) -> None:
    """Write eos_token_id to one file of a checkpoint and of its draft. generation_config.json is
    deleted first, because transformers reads one without eos_token_id as "no end token"."""
    for checkpoint in folder, folder / "draft":
        (checkpoint / GENERATION_CONFIG).unlink(missing_ok=True)
        values = json.loads((checkpoint / "config.json").read_text())
        values.pop("eos_token_id", None)
        write_text(checkpoint / "config.json", json.dumps(values))
        updated = (values if where == "config.json" else {}) | {"eos_token_id": tokens}
        write_text(checkpoint / where, json.dumps(updated))


def digest(checkpoint: Path) -> str:
    """Return a hash of the weights and of the files next to them."""
    found = hashlib.sha256()
    for file in sorted(checkpoint.iterdir()):
        if file.is_file():
            found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()[:16]
