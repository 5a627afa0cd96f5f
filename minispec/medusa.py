"""Medusa (Cai et al. 2024, arXiv 2401.10774): heads on the target's own hidden state guess several
tokens ahead, and one pass verifies a tree of their best candidates.

Head k (from 0) guesses token t + k + 2 from the hidden state at t: the model's own lm_head already
says t + 1, which is the root of the next tree.
"""

import heapq
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Literal
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec.cache import KVCache
from minispec.checkpoint import (
    check_tokenizer,
    check_width,
    fitting,
    read_tensors,
    resolve,
    weight_files,
    write_tensors,
)
from minispec.cost import cost_curve, in_passes, once, one_pass
from minispec.errors import UserError, optional_json
from minispec.linear import Half, Packed, fastest
from minispec.model import Preparable, Transformer
from minispec.sampling import OneHot, Randomness, Sampling, probs
from minispec.tokenizer import Tokenizer
from minispec.tree import Step, Tree
from minispec.verify import accept

BEST = 10  # candidates per head whose accuracy is measured, as many as the published trees use
RARE = 0.02  # of likelier nodes `auto` looks for the best number: to list the rest takes too long
Ranks = tuple[int, ...]  # a path: (0, 2) is head 0's best token, then head 1's third best


# ---- heads ---------------------------------------------------------------------------------------


class Heads(Preparable):
    """K heads of L residual blocks x + SiLU(Wx + b) and a projection each, computed side by side.

    Blocks begin as the identity. Without projections of their own (`vocab_size` None) the heads
    end in the target's lm_head. `tree` and `accuracy` (K, ranks) came with them, or are None.
    """

    def __init__(self, heads: int, layers: int, hidden_size: int, vocab_size: int | None):
        super().__init__()
        self.heads, size = heads, hidden_size
        # (L, K, in, out), not a Linear's (out, in): one row is multiplied in a third of the time
        self.weight = nn.Parameter(torch.zeros(layers, heads, size, size))
        self.bias = nn.Parameter(torch.zeros(layers, heads, 1, size))
        own = None if vocab_size is None else nn.Parameter(torch.zeros(heads, vocab_size, size))
        self.register_parameter("projection", own)
        self.tree: list[Ranks] | None = None
        self.accuracy: Tensor | None = None
        self.packed: list[Half | Packed | None] = [None] * layers  # of each layer, once prepared
        self.biases: list[Tensor] = []

    def prepare(self) -> "Heads":
        """Lay the blocks' weights out for decoding as well, as `linear` reads them: they must not
        change any more; converting the heads undoes it."""
        layers = [weight.mT.flatten(0, 1).detach() for weight in self.weight]  # (K · out, in)
        self.packed = [fastest(weight) for weight in layers]
        self.biases = list(self.bias.detach())  # each (K, 1, out)
        return self

    def undo(self) -> None:
        self.packed, self.biases = [None] * len(self.weight), []

    def __len__(self) -> int:
        return self.heads

    def forward(self, hidden: Tensor, model: Transformer) -> Tensor:
        """Logits (K, ..., V) of hidden states (..., d), which are the target's after its norm."""
        x = self.blocks(hidden)
        logits = model.logits(x) if self.projection is None else x @ self.projection.mT
        return logits.view(self.heads, *hidden.shape[:-1], -1)

    def blocks(self, hidden: Tensor) -> Tensor:
        """What each head's projection is to multiply, (K, n, d), of n hidden states (..., d)."""
        x = hidden.reshape(1, -1, hidden.shape[-1]).expand(self.heads, -1, -1)  # (K, n, d)
        for layer in range(len(self.weight)):
            x = x + F.silu(self.linear(layer, x))
        return x

    def scores(self, hidden: Tensor, model: Transformer, ids: Tensor) -> Tensor:
        """Logits (K, n, len(ids)) of these tokens alone, of n hidden states (..., d)."""
        own = self.projection
        rows = model.head_rows(ids) if own is None else own.index_select(1, ids)
        return self.blocks(hidden) @ rows.mT

    def linear(self, layer: int, x: Tensor) -> Tensor:
        """Wx + b of each head's own x, (K, n, d)."""
        packed = self.packed[layer]
        learnt = x, self.weight, self.bias
        trained = torch.is_grad_enabled() and any(each.requires_grad for each in learnt)
        if packed is None or trained or x.shape[1] != 1:
            return torch.baddbmm(self.bias[layer], x, self.weight[layer])
        # all heads' rows by all heads' weights, of which each row wants its own head's: further
        # rows cost little, and the weights are read once, at half the bits
        every = packed.product(x, None).view(self.heads**2, 1, -1)
        return self.biases[layer] + every[:: self.heads + 1]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Views of the parameters under the names of Medusa's checkpoints."""
        for i in range(self.heads):
            for j, (weight, bias) in enumerate(zip(self.weight, self.bias)):
                yield f"{i}.{j}.linear.weight", weight[i].mT
                yield f"{i}.{j}.linear.bias", bias[i, 0]
            if self.projection is not None:
                yield f"{i}.{len(self.weight)}.weight", self.projection[i]


def untrained(heads: int, layers: int, model: Transformer, shared: bool) -> Heads:
    """Heads that all say what the model's lm_head says."""
    config = model.config
    new = Heads(heads, layers, config.hidden_size, None if shared else config.vocab_size)
    new.to(model.device, model.dtype)
    if not shared:
        ids = torch.arange(config.vocab_size, device=model.device)
        new.projection.data.copy_(model.head_rows(ids))
    return new


# ---- decoding ------------------------------------------------------------------------------------


def medusa(
    model: Transformer, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    cache: KVCache | None = None, heads: Heads, tree: list[Ranks] | Literal["auto"] | None = None,
) -> Iterator[Step]:  # fmt: skip
    """Medusa with the lossless rule: greedy or sampled, the output has the target's law.

    `tree` is a list of rank paths, none longer than there are heads; by default the heads' own.
    "auto" makes one for each position: see Worth.
    """
    return rounds(model, prompt, sampling, randomness, cache, heads, tree, accept)


def medusa_typical(
    model: Transformer, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    cache: KVCache | None = None, heads: Heads, tree: list[Ranks] | Literal["auto"] | None = None,
    epsilon: float = 0.09, delta: float = 0.3,
) -> Iterator[Step]:  # fmt: skip
    """Medusa with typical acceptance: LOSSY, sampled output does not have the target's law.

    (A greedy law has no entropy, so at temperature 0 the rule accepts what `accept` does.)
    """

    def rule(laws: Tensor | OneHot, tree: Tree, randomness: Randomness) -> tuple[list[int], int]:
        path = typical_path(laws, tree, epsilon, delta)
        return path, randomness.categorical(laws[path[-1]])

    return rounds(model, prompt, sampling, randomness, cache, heads, tree, rule)


def rounds(
    model: Transformer, prompt: list[int], sampling: Sampling, randomness: Randomness,
    cache: KVCache | None, heads: Heads, tree: list[Ranks] | Literal["auto"] | None,
    rule: Callable[[Tensor | OneHot, Tree, Randomness], tuple[list[int], int]],
) -> Iterator[Step]:  # fmt: skip
    """The loop of both."""
    proposed = proposer(heads, model, tree)
    cache = cache or model.new_cache()
    tokens = list(prompt)
    hidden = model.prefill(tokens[cache.length : -1], cache)[0, -1:]  # (1, d), or none
    yield Step()
    while True:
        tree = proposed(hidden, tokens[-1], cache.room - 1)
        hidden = model(tree.tokens, cache, tree.depth, tree.mask)[0]
        path, fresh = rule(probs(model.logits(hidden), sampling), tree, randomness)
        cache.commit(path)
        hidden = hidden[path[-1:]]  # the heads read the accepted node: no second target pass
        new = tree.tokens_at(path[1:]) + [fresh]
        tokens += new
        yield Step(new, tree, path)


def proposer(
    heads: Heads, model: Transformer, tree: list[Ranks] | Literal["auto"] | None
) -> Callable[[Tensor, int, int], Tree]:
    """What makes each round's tree: of a hidden state (1, d), or none (0, d), the newest token, and
    the room for nodes below it."""
    if tree == "auto":
        return Worth(heads, model).propose
    paths = tree_of(heads) if tree is None else tree
    paths = complete(paths, len(heads), model.config.vocab_size)
    return lambda hidden, root, room: propose(heads, model, hidden, root, paths[:room])


def propose(
    heads: Heads, model: Transformer, hidden: Tensor, root: int, paths: list[Ranks]
) -> Tree:
    """The tree of the heads' candidates below the newest token; the lone root where no hidden
    state is at hand, as before the first pass of a prompt of one token."""
    if not len(hidden) or not paths:
        return Tree.chain(root, [])
    most = 1 + max(rank for path in paths for rank in path)
    depth = max(map(len, paths))
    candidates = heads(hidden[0], model)[:depth].topk(most).indices.tolist()  # (depth, most)
    return Tree.from_paths(root, paths, candidates)


def typical_path(laws: Tensor | OneHot, tree: Tree, epsilon: float, delta: float) -> list[int]:
    """The longest path all of whose tokens have p(x) > min(ε, δ · exp(-H(p))); of several, the
    likeliest. Section 2.3.1 of the paper."""
    paths, likelihood = {0: [0]}, {0: 1.0}
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        if parent not in paths:
            continue
        law = laws[parent]
        p, entropy = float(law[tree.tokens[node]]), float(torch.special.entr(law).sum())
        if p > min(epsilon, delta * math.exp(-entropy)):
            paths[node] = paths[parent] + [node]
            likelihood[node] = likelihood[parent] * p
    return max(paths.values(), key=lambda path: (len(path), likelihood[path[-1]]))


# ---- trees ---------------------------------------------------------------------------------------

# The trees published with Medusa (FasterDecoding/Medusa, Apache-2.0): how many children each node
# has, breadth first from the root, in hexadecimal; children have the ranks from 0 on, and what is
# left out at the end are leaves.
PUBLISHED = {
    "mc_sim_7b_63": "aa732111111a3211111002000000100000000002",
    "vicuna_7b_stage1": "aa743221111932111000020000001000000000000001",
    "vicuna_7b_stage1_ablation": "aa422111000a4211100003100101000041100000001",
    "vicuna_7b_stage2": "aa522111100942111000031000100000004110000001",
    "vicuna_13b_stage1": "aa742211110a42111000021000001000000000001",
    "vicuna_13b_stage2": "aa421110000a42111000031001010042100000001000000001",
    "vicuna_33b_stage1": "aa8532211119321100000200000001",
    "vicuna_33b_stage2": "aa532111100a4211100003100010000000031000000001",
    "zephyr_stage2": "aa642211100a4211100002100001000000000021",
}


def published(name: str) -> list[Ranks]:
    """The paths of a published tree."""
    paths: list[Ranks] = [()]
    for node, count in enumerate(PUBLISHED[name]):
        paths += [paths[node] + (rank,) for rank in range(int(count, 16))]
    return paths[1:]


def complete(paths: list[Ranks], depth: int, ranks: int) -> list[Ranks]:
    """The paths and all their beginnings, each once; checked against the number of heads (`depth`)
    and of candidates (`ranks`). Depth first: the path of best ranks comes first of all, and what
    is accepted of it already lies in the cache where it belongs."""
    deepest = max(map(len, paths), default=0)
    if deepest > depth:
        raise UserError(
            f"the tree is {deepest} deep, but there are only {depth} heads: cut its paths"
        )
    for rank in (rank for path in paths for rank in path):
        if type(rank) is not int or not 0 <= rank < ranks:
            raise UserError(f"the tree's rank {rank!r}: must be an integer from 0 to {ranks - 1}")
    return sorted({tuple(path[:n]) for path in paths for n in range(1, len(path) + 1)})


def tree_of(heads: Heads) -> list[Ranks]:
    """The tree that came with the heads, else the published one as deep as they go."""
    if heads.tree is not None:
        return heads.tree
    return [path for path in published("mc_sim_7b_63") if len(path) <= len(heads)]


def grow_tree(accuracy: Tensor, nodes: int) -> list[Ranks]:
    """The tree of `nodes` nodes below the root that gains most by `expected`, best node first;
    fewer where no more gain anything."""
    return [path for path, _ in islice(best_first(accuracy), nodes)]


def best_first(chances: Tensor) -> Iterator[tuple[Ranks, float]]:
    """Paths and their gains, while there is any: the product of chances[k][r] along the path.

    It falls from parent to child and from rank to rank, so taking the best node next, then its
    first child and its next sibling into the queue, is optimal.
    """
    a = chances.tolist()
    queue = [(-a[0][0], (0,))]
    while queue and queue[0][0] < 0:
        gain, path = heapq.heappop(queue)
        yield path, -gain
        depth, rank = len(path) - 1, path[-1]
        if depth + 1 < len(a):
            heapq.heappush(queue, (gain * a[depth + 1][0], path + (0,)))
        if rank + 1 < len(a[depth]):
            sibling = gain / a[depth][rank] * a[depth][rank + 1]
            heapq.heappush(queue, (sibling, path[:-1] + (rank + 1,)))


def expected(accuracy: Tensor, paths: list[Ranks]) -> float:
    """Tokens per pass if heads were right independently: 1 + Σ over nodes of Π a[k][r]."""
    a = accuracy.tolist()
    total = 1.0
    for path in paths:
        gain = 1.0
        for depth, rank in enumerate(path):
            gain *= a[depth][rank]
        total += gain
    return total


def accuracy_of(ranks: Tensor) -> Tensor:
    """a[k][r], the share of positions at which head k's rank-r token is right, of those at which it
    has a label; (K, BEST). `ranks` (K, n) is the true token's rank, BEST for all worse, -1
    without a label."""
    labelled = (ranks >= 0).sum(1, keepdim=True).clamp(min=1)
    return torch.stack([(ranks == r).sum(1) for r in range(BEST)], 1) / labelled


def together(ranks: Tensor) -> list[Ranks]:
    """The paths all of whose tokens were right somewhere, the most frequent first, counted where
    every head has a label. Unlike a product of accuracies this knows that heads are right at the
    same places. `ranks` (K, n) as for `accuracy_of`."""
    columns = ranks[:, (ranks >= 0).all(0)].T.tolist()
    right: Counter[Ranks] = Counter()
    for column in columns:
        depth = next((k for k, rank in enumerate(column) if rank == BEST), len(column))
        right.update(tuple(column[:n]) for n in range(1, depth + 1))
    return sorted(right, key=lambda path: (-right[path], len(path), path))  # beginnings first


def replayed(ranks: Tensor, paths: list[Ranks]) -> tuple[int, int]:
    """(tokens, passes) of greedy decoding along a text whose tokens have these ranks (K, n)."""
    nodes, columns = set(paths), [tuple(column) for column in ranks.T.tolist()]
    at = passes = 0
    while at < len(columns):
        length = 0
        while length < len(ranks) and columns[at][: length + 1] in nodes:
            length += 1
        at, passes = at + length + 1, passes + 1
    return at, passes


class Worth:
    """A tree for each position: its likeliest paths by the heads' own probabilities there (as
    EAGLE-2, Li et al. 2024, grows its), as many as promise the most tokens for the cost of a round.

    Costs, in passes over one token, are measured once. The tree follows from the text before the
    round and from them, never from what the round draws: it is lossless as any fixed one. But a
    seed repeats a sampled run only as far as the costs repeat.
    """

    def __init__(self, heads: Heads, model: Transformer):
        self.heads, self.model = heads, model
        self.curve = cost_curve(model)
        self.drafting = once(model, ref(heads), lambda: heads_cost(heads, model))

    def propose(self, hidden: Tensor, root: int, room: int) -> Tree:
        """As `propose`, of at most `room` nodes below the root."""
        if not len(hidden) or room < 1:
            return Tree.chain(root, [])
        best = most_likely(self.heads(hidden[0], self.model))
        return Tree.from_paths(root, self.paths(best.values, room), best.indices.tolist())

    def paths(self, chances: Tensor, room: int) -> list[Ranks]:
        """For the probabilities of each head's best candidates (K, ranks), best first."""
        tokens, best, count, paths = 1.0, 1 / (1 + self.drafting), 0, []
        for path, gain in islice(best_first(chances), min(room, len(self.curve) - 2)):
            if gain < RARE:
                break
            paths.append(path)
            tokens += gain
            worth = tokens / (self.curve[len(paths) + 1] + self.drafting)
            if worth > best:
                best, count = worth, len(paths)
        return sorted(paths[:count])


def most_likely(logits: Tensor) -> torch.return_types.topk:
    """Probabilities (`values`) and tokens (`indices`) of each head's best candidates, (K, ranks);
    of its logits (K, V)."""
    return logits.softmax(-1).topk(min(BEST, logits.shape[-1]))


@torch.inference_mode()
def heads_cost(heads: Heads, model: Transformer) -> float:
    """Of the heads' part of a round, in passes of the target over one token. They are timed behind
    one, as in decoding, whose bytes they find in the processor's caches."""
    hidden, before = model.prefill([0], model.new_cache(64))[0, -1], one_pass(model, 1)

    def both() -> list:
        before()
        best = most_likely(heads(hidden, model))
        return best.values.tolist() + best.indices.tolist()

    return max(0.0, in_passes(both, model) - 1)


# ---- checkpoints ---------------------------------------------------------------------------------

NAMES = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
PART = re.compile(r"(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")


def load_heads(
    source: str | os.PathLike, model: Transformer, tokenizer: Tokenizer | None = None
) -> Heads:
    """The heads of a file, a directory or a hub id, on the model's device and in its type.

    Reads the layouts v1 (projections in the file), v2 (residual blocks only) and Medusa-1.0 (in a
    full model, under `medusa_head.`). Counts come from the tensors, whatever config.json says.
    Raises UserError for heads of another hidden size, vocabulary or tokenizer.
    """
    tensors, folder = read_medusa(source)
    check_tokenizer(str(source), folder, tokenizer)
    heads = heads_like(tensors, model, str(source)).to(model.device, model.dtype)
    fill(heads, tensors, str(source))
    read_tree(heads, folder / "config.json")
    return heads.eval().prepare()


def read_medusa(source: str | os.PathLike) -> tuple[dict[str, Tensor], Path]:
    """The tensors of a file, a directory or a hub id, under the names of `Heads.tensors`; and the
    directory they lie in."""
    path = Path(source)
    if path.is_file():
        folder = path.parent
    else:
        folder = resolve(source, ("*.json", "*.safetensors", "medusa_lm_head.pt"))
        path = next((folder / name for name in NAMES if (folder / name).exists()), folder)
    files = weight_files(path) if path.is_dir() else [path]
    tensors = {
        str(name).removeprefix("medusa_head."): tensor
        for file in files
        for name, tensor in read_tensors(file)
        if path.is_file() or name.startswith("medusa_head.")
    }
    if not tensors:
        raise UserError(f"{source} has no Medusa heads: neither {' nor '.join(NAMES)}, nor a model "
                        "with medusa_head. tensors")  # fmt: skip
    return tensors, folder


def heads_like(tensors: dict[str, Tensor], model: Transformer, where: str) -> Heads:
    """Empty heads with the counts that the names of the tensors tell."""
    parts = {name: PART.fullmatch(str(name)) for name in tensors}
    strange = [
        name for name, part in parts.items()
        if not part or not isinstance(tensors[name], Tensor) or not tensors[name].dim()
    ]  # fmt: skip
    if strange:
        raise UserError(f"{where}: {strange[0]} is no tensor of Medusa heads")
    heads = len({part[1] for part in parts.values()})
    if any(int(part[1]) >= heads for part in parts.values()):
        raise UserError(f"{where}: its heads are not numbered from 0 to {heads - 1}")
    layers = 1 + max((int(p[2]) for p in parts.values() if p[3] != "weight"), default=-1)
    last = tensors.get(f"0.{layers}.weight")
    width = next(tensor for tensor in tensors.values()).shape[-1]
    config = model.config
    check_width(where, width, model)
    if last is not None and len(last) != config.vocab_size:
        raise UserError(
            f"{where}: heads of {len(last)} tokens, but the target has {config.vocab_size}: "
            "they belong to another model"
        )
    return Heads(heads, layers, width, None if last is None else config.vocab_size)


def fill(heads: Heads, tensors: dict[str, Tensor], where: str) -> None:
    """Copy the tensors of a file into the heads; every one must be there and fit."""
    slots = dict(heads.tensors())
    shapes = {name: slot.shape for name, slot in slots.items()}
    with torch.no_grad():
        for name, tensor in fitting(shapes, tensors.items(), where):
            slots[name].copy_(tensor)
    heads.requires_grad_(False)


def read_tree(heads: Heads, path: Path) -> None:
    """The tree and the accuracies that config.json holds, if it does."""
    config = optional_json(path)
    try:
        if config.get("medusa_choices") is not None:
            heads.tree = [tuple(ranks) for ranks in config["medusa_choices"]]
            complete(heads.tree, len(heads), sys.maxsize)
        if config.get("medusa_accuracy") is not None:
            heads.accuracy = torch.tensor(config["medusa_accuracy"], dtype=torch.float64)
            assert heads.accuracy.shape[0] == len(heads) and heads.accuracy.dim() == 2
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"{path}: medusa_choices or medusa_accuracy: {error}") from None


def save_heads(
    heads: Heads, directory: Path, base: str, tokenizer: Tokenizer | None, dtype: torch.dtype
) -> None:
    """Write layout v1, or v2 where the projections are shared, that `load_heads` reads."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().to("cpu", dtype).contiguous() for name, t in heads.tensors()}
    write_tensors(tensors, directory / NAMES[0])
    config = {
        "base_model_name_or_path": base,
        "medusa_num_heads": len(heads),
        "medusa_num_layers": len(heads.weight),
        "version": "2" if heads.projection is None else "1",
        "tokenizer_fingerprint": tokenizer.fingerprint if tokenizer else None,
    }
    (directory / "config.json").write_text(json.dumps(config) + "\n", encoding="utf-8")
    save_tree(heads, directory)


def save_tree(heads: Heads, directory: Path) -> None:
    """Renew the tree and the accuracies in config.json, and nothing else."""
    path = directory / "config.json"
    config = optional_json(path)
    config["medusa_choices"] = heads.tree
    config["medusa_accuracy"] = None if heads.accuracy is None else heads.accuracy.tolist()
    path.write_text(json.dumps(config) + "\n", encoding="utf-8")
