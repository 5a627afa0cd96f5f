"""The shapes of real models: random weights, and a draft that is right as often as --acceptance."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec import distributed
from minispec.bench.methods import Methods
from minispec.bench.tables import format_bytes
from minispec.cache import KVCache
from minispec.checkpoints.load import pick_device, pick_dtype
from minispec.cli import UserError
from minispec.generate import decode
from minispec.model import Config, Transformer

M = TypeVar("M", bound=nn.Module)
DEFAULT_ACCEPTANCE = 0.8  # of a draft model
# hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary; context limited to 2,048
MODEL_SHAPES = {
    "smollm2-135m": Config(576, 1536, 30, 9, 3, 64, 49152, 2048),
    "qwen2.5-0.5b": Config(896, 4864, 24, 14, 2, 64, 151936, 2048, "qwen2", qkv_bias=True),
    "llama-3.2-1b": Config(2048, 8192, 16, 32, 8, 64, 128256, 2048),
    "llama-2-7b": Config(4096, 11008, 32, 32, 32, 128, 32000, 2048, tied=False),
    "llama-3.1-8b": Config(4096, 14336, 32, 32, 8, 128, 128256, 2048, tied=False),
    "llama-3.1-70b": Config(8192, 28672, 80, 64, 8, 128, 128256, 2048, tied=False),
}


def without_data(make: Callable[[], M], dtype: torch.dtype) -> M:
    """Return the module that `make` makes, on the meta device."""
    with torch.device("meta"):
        return make().to(dtype)


def stored_bytes(*modules: nn.Module) -> int:
    """Count the bytes of all weights as stored. Weights that a module ties count once."""
    return sum(t.nbytes for module in modules for t in (*module.parameters(), *module.buffers()))


def random_weights(config: Config, dtype: str = "auto", device: str = "auto") -> Transformer:
    """Make a model of this shape: its text is noise, but its passes cost what real ones do. Ranks
    that share it all have the same shard, so that their embeddings and lm_heads are equal."""
    torch_device, previous_dtype = pick_device(device), torch.get_default_dtype()
    torch_dtype, config = pick_dtype(dtype, torch_device), distributed.shard_config(config)
    if torch_device.type == "cpu":  # a GPU reports by itself that its memory is full
        check_memory(config, torch_dtype)
    torch.manual_seed(0)
    torch.set_default_dtype(torch_dtype)
    try:
        with torch_device:
            model = Transformer(config).eval()
    finally:
        torch.set_default_dtype(previous_dtype)
    distributed.all_reduce_outputs(model)
    return model


def check_memory(config: Config, dtype: torch.dtype) -> None:
    """Raise UserError if the weights of all ranks do not fit in this machine's memory."""
    shard = stored_bytes(without_data(partial(Transformer, config), dtype))
    needed, free = config.ranks * shard, psutil.virtual_memory().available
    if needed > free:
        raise UserError(f"the weights need {format_bytes(needed)}, but {format_bytes(free)} are "
                        "free; --plan needs no memory")  # fmt: skip


class OracleDraft:
    """A draft that costs nothing. It knows the target's output and predicts each of its tokens with
    probability `acceptance`. With a real draft, the speedup is lower by the draft's cost."""

    prefill, prefill_chunks = Transformer.prefill, Transformer.prefill_chunks
    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, model: Transformer, tokens: list[int], acceptance: float):
        self.config = replace(model.config, hidden_size=1)
        wrong = torch.rand(len(tokens), generator=torch.Generator().manual_seed(0)) >= acceptance
        self.predictions = (torch.tensor(tokens) + wrong) % model.config.vocab_size

    def new_cache(self, capacity: int) -> KVCache:
        return KVCache(1, 1, 1, capacity, torch.float32)

    def __call__(self, tokens, cache: KVCache) -> Tensor:
        """Return the position after each token, (1, n, 1), in place of hidden states."""
        return torch.arange(1, len(tokens) + 1)[None, :, None] + cache.length

    def logits(self, hidden: Tensor) -> Tensor:
        positions = hidden.flatten().clamp(max=len(self.predictions) - 1)
        return F.one_hot(self.predictions[positions], self.config.vocab_size).float()


def oracle_methods(args: argparse.Namespace, model: Transformer, prompt: list[int]) -> Methods:
    """Build the rows of --shape: plain decoding, and chains of 1 to 16 draft tokens."""
    plain = decode(model, None, prompt, max_new_tokens=args.max_new_tokens, ignore_eos=True)
    acceptance = DEFAULT_ACCEPTANCE if args.acceptance is None else args.acceptance
    draft = OracleDraft(model, prompt + plain.tokens, acceptance)
    chains = {f"speculative k={k}": {"draft": draft, "k": k} for k in (1, 2, 4, 8, 16)}
    return {"autoregressive": {}} | chains
