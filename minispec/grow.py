"""Begin a training with what another checkpoint knows: one of the same sizes, or a smaller one.

The larger model then begins with the smaller one's function (after Net2Net, Chen et al. 2016, arXiv
1511.05641), but for the part of norm_eps in it: whatever is new writes zeros to the residual
stream, be it a column of that, a unit of an MLP, a head of queries or a repeated layer. So all that
reads may begin at random, and learns at once.
"""

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from minispec.checkpoint import check_tokenizer, read_tensors, resolve, weight_files
from minispec.errors import UserError
from minispec.tokenizer import Tokenizer

LAYER = re.compile(r"(model\.layers\.)(\d+)(\..*)")
OUT = "o_proj.weight", "down_proj.weight"  # what a layer writes with


def begin(new: dict[str, Tensor], source: str, tokenizer: Tokenizer) -> None:
    """`grow` from a directory or a hub id, whose tokenizer must be this one."""
    folder = resolve(source)
    check_tokenizer(f"--init {source}", folder, tokenizer)
    files = weight_files(folder)
    grow(new, dict(pair for file in files for pair in read_tensors(file)), source)


@torch.no_grad()
def grow(new: dict[str, Tensor], old: dict[str, Tensor], where: str) -> None:
    """Give parameters that were initialised at random what those of the same names in `old` know.

    Old layers are spread evenly over the new ones, each repeated until the next. Raises UserError
    where one is missing or larger, or the keys' sizes differ.
    """
    layers, theirs = count_layers(new), count_layers(old)
    for name, weight in new.items():
        layer = LAYER.fullmatch(name)
        at = int(layer[2]) if layer else 0
        source = at * theirs // layers
        known = old.get(f"{layer[1]}{source}{layer[3]}" if layer else name)
        if layers < theirs or known is None or not larger(name, weight.shape, known.shape):
            raise UserError(
                f"--init {where}: has no {name} that fits into {list(weight.shape)} and "
                f"{layers} layers: give sizes like its own or larger, "
                "and for heads of keys its own"
            )
        if name.endswith("norm.weight"):
            weight.fill_(known.float().mean())
            put(weight, known)
            weight *= (len(known) / len(weight)) ** 0.5  # for zeros make the mean square smaller
            continue
        if name.endswith((*OUT, "embed_tokens.weight", "input_proj.weight")) or ".linear." in name:
            weight.zero_()
        if name.endswith(OUT) and at > 0 and source == (at - 1) * theirs // layers:
            continue  # a repeated layer
        parts = 2 if name.endswith("input_proj.weight") else 1  # reads a hidden state, and a token
        for part, theirs_part in zip(weight.chunk(parts, -1), known.chunk(parts, -1)):
            put(part, theirs_part)


def count_layers(names: Iterable[str]) -> int:
    return 1 + max((int(m[2]) for m in map(LAYER.fullmatch, names) if m), default=0)


def larger(name: str, new: torch.Size, old: torch.Size) -> bool:
    """Whether a parameter can hold the old one."""
    if name.endswith(("k_proj.weight", "v_proj.weight")) and new[0] != old[0]:
        return False  # other heads of keys
    return len(new) == len(old) and all(a >= b for a, b in zip(new, old))


def put(weight: Tensor, known: Tensor) -> None:
    """Into the beginning of each dimension."""
    weight[tuple(slice(n) for n in known.shape)] = known.to(weight.device, weight.dtype)
