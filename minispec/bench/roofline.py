"""The roofline (Williams et al. 2009): a pass takes as long as reading its bytes from memory or as
its arithmetic, whichever is longer. Real passes take longer, because the time to launch kernels and
the latency of messages are left out.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from minispec.methods.fastmtp import MTPHead
from minispec.methods.medusa import MedusaHeads
from minispec.model import Transformer, count_parameters

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Work:
    """What one card does in a pass."""

    read_bytes: int  # from memory, for any number of rows
    row_flops: int  # per row; a multiplication and an addition are two
    sent_bytes: float = 0.0  # per row, to the other ranks


@dataclass(frozen=True)
class Hardware:
    """The speed of a card at its best."""

    bandwidth: float  # bytes/s read from memory
    flops: float  # FLOP/s in large matrix products
    link: float = math.inf  # bytes/s sent to other cards
    source: str = ""  # of these figures

    def seconds(self, work: Work, rows: int = 1) -> float:
        """The least time of a pass over `rows` tokens. The next layer has to wait for messages."""
        memory, compute = work.read_bytes / self.bandwidth, rows * work.row_flops / self.flops
        return max(memory, compute) + self.link_seconds(work, rows)

    def link_seconds(self, work: Work, rows: int = 1) -> float:
        """The share of `seconds` that is spent on messages."""
        return rows * work.sent_bytes / self.link

    def memory_bound_rows(self, work: Work) -> int:
        """The most rows in a pass for which reading takes longer than the arithmetic."""
        return int(work.read_bytes / self.bandwidth * self.flops / work.row_flops)


# FLOP rates are those of bfloat16 without sparsity, with sums in float32. The link is what a card
# can send: half of the data sheets' figure for NVLink, which counts both directions.
CARDS = {
    "h100": Hardware(3.35e12, 989e12, 450e9, "NVIDIA's data sheet of the H100 SXM; NVLink 4"),
    "h200": Hardware(4.8e12, 989e12, 450e9, "NVIDIA's data sheet of the H200 SXM; NVLink 4"),
    "a100": Hardware(2.039e12, 312e12, 300e9, "NVIDIA's data sheet of the A100 80GB SXM; NVLink 3"),
    "rtx-4090": Hardware(1.008e12, 165.2e12, 31.5e9, "NVIDIA's white paper on Ada; PCIe 4.0 x16"),
}


def stored_bytes(*modules: nn.Module) -> int:
    """Count the bytes of all weights as stored. Weights that a module ties count once."""
    return sum(t.nbytes for module in modules for t in (*module.parameters(), *module.buffers()))


def pass_work(model: Transformer, cached: int = 0) -> Work:
    """The work of a pass of a model, or of a rank's part of it, after `cached` tokens. It reads all
    weights of the layers and lm_head; of the embedding, it reads only a row per token."""
    return block_work(model, (model.model.layers, model.lm_head), cached)


def block_work(blocks: Transformer | MTPHead, read: tuple[nn.Module, ...], cached: int) -> Work:
    """The work of a pass that reads these modules and multiplies by their weights. `blocks` is the
    model or head that holds the attention layers among them."""
    c, kv = blocks.config, blocks.new_cache(1).kv  # (2, layers, 1, 1, kv_heads, head_dim)
    layers = kv.shape[1]
    attention = 4 * layers * c.heads * c.head_dim * cached  # q · k and p · v, with every cached row
    summed = 2 * layers * c.hidden_size * kv.dtype.itemsize  # per row, after o and after down
    return Work(
        read_bytes=stored_bytes(*read) + cached * kv.nbytes,
        row_flops=2 * sum(map(count_parameters, read)) + attention,
        # in a ring, a rank sends (N - 1) / N of a buffer twice: to add it up, to pass on the sums
        sent_bytes=summed * 2 * (c.ranks - 1) / c.ranks,
    )


def heads_work(heads: MedusaHeads, lm_head: nn.Module) -> Work:
    """The work of Medusa heads in a round. If they share lm_head, each multiplies by it."""
    read, flops = stored_bytes(heads), count_parameters(heads)
    if heads.shared:
        read += stored_bytes(lm_head)
        flops += len(heads) * count_parameters(lm_head)
    return Work(read, 2 * flops)


def without_data(make: Callable[[], M], dtype: torch.dtype) -> M:
    """Return the module that `make` makes, on the meta device."""
    with torch.device("meta"):
        return make().to(dtype)
