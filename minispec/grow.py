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

from minispec.checkpoint import (
    LEFT_OUT,
    check_attention,
    check_floating,
    check_same,
    check_tokenizer,
    read_config,
    read_tensors,
    read_weights,
    resolve,
    tie,
    weight_files,
)
from minispec.errors import UserError
from minispec.model import Transformer
from minispec.tokenizer import Tokenizer

LAYER = re.compile(r"(model\.layers\.)(\d+)(\..*)")
# what a layer writes with, and all that writes to a hidden state
OUT = "o_proj.weight", "down_proj.weight", "o_proj.bias", "down_proj.bias"
WRITERS = *OUT, "embed_tokens.weight", "input_proj.weight", "linear.weight", "linear.bias"
# what has a row for every token
VOCABULARY = re.compile(r"(.*\.)?(embed_tokens|lm_head|\d+\.\d+)\.weight")


def begin(model: Transformer, source: str, tokenizer: Tokenizer) -> None:
    """`grow` from a directory or a hub id, whose tokenizer must be this one."""
    folder = resolve(source)
    check_tokenizer(f"--init {source}", folder, tokenizer)
    theirs = read_config(folder)
    check_attention(f"--init {source}", folder, model.config)
    ours = model.config
    check_same(f"--init {source}", "tie_word_embeddings", theirs.tied, ours.tied)
    check_same(f"--init {source}", "rms_norm_eps", theirs.norm_eps, ours.norm_eps)
    files = weight_files(folder)
    tensors = (pair for file in files for pair in read_tensors(file) if not LEFT_OUT.match(pair[0]))
    known = read_weights(f"--init {source}", tensors, model.dtype, model.device)
    if theirs.tied:
        tie(known)
        known.pop("lm_head.weight", None)  # `named_parameters` lists a tied weight once
    grow(dict(model.named_parameters()), known, source, theirs.kv_heads)


@torch.no_grad()
def grow(new: dict[str, Tensor], old: dict[str, Tensor], where: str, kv_heads: int = 1) -> None:
    """Give parameters that were initialised at random what those of the same names in `old` know.

    `old` are smaller in any dimension, or have fewer layers: these are spread evenly over the new
    ones, each repeated until the next. Each of the `kv_heads` keeps its heads of queries. Raises
    UserError where a tensor is missing, larger or left over.
    """
    layers, theirs = count_layers(new), count_layers(old)
    if layers < theirs:
        raise UserError(f"--init {where}: has {theirs} layers, more than the {layers} here: "
                        "give as many, or another --init")  # fmt: skip
    used = set()
    for name, weight in new.items():
        layer = LAYER.fullmatch(name)
        at = int(layer[2]) if layer else 0
        source = at * theirs // layers
        key = f"{layer[1]}{source}{layer[3]}" if layer else name
        if key not in old:
            raise UserError(
                f"--init {where}: has no {key}, which is needed here: give sizes like its own, or "
                "another --init"
            )
        used.add(key)
        known = check_floating(f"--init {where}", key, old[key])
        if not fits(name, weight.shape, known.shape):
            raise UserError(
                f"--init {where}: {key} {list(known.shape)} does not fit into "
                f"{list(weight.shape)}: give sizes like its own or larger, for keys and tokens "
                "its own"
            )
        if name.endswith("norm.weight"):
            weight.fill_(known.float().mean())
            put(weight, known)
            weight *= (len(known) / len(weight)) ** 0.5  # for zeros make the mean square smaller
            continue
        if name.endswith(WRITERS):
            weight.zero_()
        if name.endswith(OUT) and at > 0 and source == (at - 1) * theirs // layers:
            continue  # a repeated layer
        for part, known_part in zip(parts(name, weight, kv_heads), parts(name, known, kv_heads)):
            put(part, known_part)
    left = sorted(old.keys() - used)
    if left:
        raise UserError(
            f"--init {where}: has {left[0]}, for which there is no place here: give sizes like its "
            "own, or another --init"
        )


def count_layers(names: Iterable[str]) -> int:
    return 1 + max((int(m[2]) for m in map(LAYER.fullmatch, names) if m), default=0)


def fits(name: str, new: torch.Size, old: torch.Size) -> bool:
    """Whether a parameter can hold the old one."""
    if len(new) != len(old):
        return False
    if re.search(r"\b[kv]_proj\.", name) or VOCABULARY.fullmatch(name):
        return new[0] == old[0] and new[1:] >= old[1:]  # other heads of keys, or tokens
    return all(a >= b for a, b in zip(new, old))


def parts(name: str, weight: Tensor, kv_heads: int) -> Iterable[Tensor]:
    """Views of a parameter that grow each for itself."""
    if name.endswith("input_proj.weight"):
        return weight.chunk(2, -1)  # reads a hidden state, and a token
    if re.search(r"\bq_proj\.", name):
        return weight.chunk(kv_heads, 0)  # queries of a head of keys
    if name.endswith("o_proj.weight"):
        return weight.chunk(kv_heads, -1)
    return [weight]


def put(weight: Tensor, known: Tensor) -> None:
    """Into the beginning of each dimension."""
    weight[tuple(slice(n) for n in known.shape)] = known.to(weight.device, weight.dtype)
