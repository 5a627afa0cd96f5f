"""Measure Medusa heads, and choose the tree that pays most for them on this machine."""

import argparse
from collections import Counter
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from minispec.checkpoints.heads import save_tree
from minispec.errors import UserError
from minispec.generate.drafters import found_beside, load_drafter, tree_costs
from minispec.methods.medusa import RANKS, MedusaHeads
from minispec.methods.vocabulary import DraftHead, FullVocabulary, Vocabulary
from minispec.model import Transformer
from minispec.training.distill.documents import hidden_states, labelled, load_target
from minispec.training.loop import markdown
from minispec.training.own_text import read_training
from minispec.tree import RankPath


def labels_of(tokens: list[int], prompt: int, heads: int) -> Tensor:
    """Head k's label at t is token t + k + 2, -100 where the text has ended; (n, heads).

    Rows of which a label would be a token of the prompt (the first `prompt` ones) have none.
    """
    labels = torch.full((len(tokens), heads), -100)
    for k in range(heads):
        first = max(prompt - 2, 0)
        rest = torch.tensor(tokens[first + k + 2 :], dtype=torch.long)
        labels[first : first + len(rest), k] = rest
    return labels


@torch.no_grad()
def ranks_of(
    heads: MedusaHeads, words: DraftHead, target: Transformer, own: list[dict], context: int
) -> Tensor:
    """The rank among `words` that each head gives its label, (K, n) for all n tokens of documents,
    each cut to `context`: RANKS for all worse and for a label that is none of them, -1 without a
    label."""
    rows = [(row["prompt"] + row["tokens"])[:context] for row in own]
    ranks = []
    for i, hidden in enumerate(hidden_states(target, rows, torch.float32)):
        logits = heads(hidden.to(target.device, target.dtype), words)  # (K, n, V)
        label = labels_of(rows[i], len(own[i]["prompt"]), len(heads)).T.to(logits.device)  # (K, n)
        number = words.to_subset_ids(label)
        own_logit = logits.gather(-1, number.clamp(min=0)[..., None])
        above = (logits > own_logit).sum(-1).clamp(max=RANKS).where(number >= 0, RANKS)
        ranks.append(above.where(label >= 0, -1).cpu())
    return torch.cat(ranks, 1)


def accuracy_of(ranks: Tensor) -> Tensor:
    """a[k][r], (K, RANKS): the share of labelled positions where head k's rank-r token is right."""
    labelled = (ranks >= 0).sum(1, keepdim=True).clamp(min=1)
    return torch.stack([(ranks == r).sum(1) for r in range(RANKS)], 1) / labelled


def together(ranks: Tensor) -> dict[RankPath, float]:
    """How often all tokens of a path were right, the most frequent path first, over the positions
    where every head has a label. Unlike a product of accuracies this knows that heads are right at
    the same places."""
    columns, right = ranks[:, (ranks >= 0).all(0)].T.tolist(), Counter()
    for column in columns:
        depth = next((k for k, rank in enumerate(column) if rank == RANKS), len(column))
        right.update(tuple(column[:n]) for n in range(1, depth + 1))
    paths = sorted(right, key=lambda path: (-right[path], len(path), path))  # beginnings first
    return {path: right[path] / len(columns) for path in paths}


def choose_tree(
    heads: MedusaHeads, vocabulary: Vocabulary | None, target: Transformer, own: list[dict],
    context: int,
) -> None:  # fmt: skip
    """Give the heads their accuracies on the target's documents, and a tree of the paths that are
    right most often there: of as many nodes as pay most on this machine, but one at least. A round
    costs a pass over the nodes and the root, and the heads, which draft from the vocabulary (None:
    all)."""
    words = (vocabulary or FullVocabulary(target)).select([])
    ranks = ranks_of(heads, words, target, own, context)
    heads.accuracy = accuracy_of(ranks)
    shares = together(ranks)
    tokens = list(accumulate(shares.values(), initial=1.0))  # of trees of 0, 1, … nodes
    costs = tree_costs(target, heads, vocabulary)
    speedups = [each / cost for each, cost in zip(tokens, costs)]
    speedups[0] = 0.0  # no tree at all would make heads for nothing
    best = speedups.index(max(speedups))
    print(f"a tree of {best} nodes: {tokens[best]:.2f} tokens for {costs[best]:.2f} passes")
    heads.tree = list(shares)[:best]


def accuracy_table(heads: MedusaHeads) -> str:
    """Markdown: a row per head, a column per rank."""
    ranks = [f"rank {r}" for r in range(RANKS)]
    return markdown("head", ranks, dict(enumerate(heads.accuracy.tolist())))


def run(args: argparse.Namespace) -> None:
    """Measures along the target's own text that a training on it would hold out."""
    target, tokenizer = load_target(args, args.dtype)
    folder = Path(args.heads or found_beside("medusa", target))
    if not folder.is_dir():
        raise UserError(f"--heads {folder}: must be a directory, where its tree can be written")
    drafter = load_drafter("medusa", target, tokenizer, folder)
    heads, vocabulary = drafter["heads"], drafter["vocabulary"]
    measured = read_training(args.own, target, tokenizer)[1]
    own = labelled(measured, target.config.context, "measure by")
    choose_tree(heads, vocabulary, target, own, target.config.context)
    save_tree(heads, folder)
    print(accuracy_table(heads))


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--heads", help="their directory, whose tree is replaced (default: the one next "
                   "to the model)")  # fmt: skip
    p.add_argument("--dtype", default="auto")
    p.add_argument("--device", default="auto")
