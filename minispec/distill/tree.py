"""Measure Medusa heads and choose the fastest tree for them on this machine."""

import argparse
from collections import Counter
from itertools import accumulate

import torch
from torch import Tensor

from minispec.checkpoints.heads import save_tree
from minispec.distill.documents import hidden_states, load_for_measuring, texts_of
from minispec.generate.drafters import tree_costs
from minispec.methods.medusa import RANKS, MedusaHeads
from minispec.methods.vocabulary import DraftHead, FullVocabulary, Vocabulary
from minispec.model import Transformer
from minispec.training.loop import markdown_table
from minispec.tree import RankPath


def labels_of(tokens: list[int], prompt: int, heads: int) -> Tensor:
    """Labels (n, heads): head k's label at t is token t + k + 2, or -100 past the end of the text.

    Rows with a label inside the prompt (the first `prompt` tokens) get -100 for every head.
    """
    labels = torch.full((len(tokens), heads), -100)
    for k in range(heads):
        first = max(prompt - 2, 0)
        rest = torch.tensor(tokens[first + k + 2 :], dtype=torch.long)
        labels[first : first + len(rest), k] = rest
    return labels


@torch.no_grad()
def ranks_of(
    heads: MedusaHeads, draft_head: DraftHead, target: Transformer, generated: list[dict],
    context: int,
) -> Tensor:  # fmt: skip
    """The rank (K, n) that each head gives its label among the draft head's tokens, at the n tokens
    of all documents, cut to `context`. RANKS stands for any worse rank and for a label that the
    draft head lacks, -1 for no label."""
    rows, ranks = texts_of(generated, context), []
    for i, hidden in enumerate(hidden_states(target, rows)):
        logits = heads(hidden.to(target.device, target.dtype), draft_head)  # (K, n, V)
        label = labels_of(rows[i], len(generated[i]["prompt"]), len(heads)).T  # (K, n)
        label = label.to(logits.device)
        index = draft_head.to_subset_ids(label)
        label_logit = logits.gather(-1, index.clamp(min=0)[..., None])
        above = (logits > label_logit).sum(-1).clamp(max=RANKS).where(index >= 0, RANKS)
        ranks.append(above.where(label >= 0, -1).cpu())
    return torch.cat(ranks, 1)


def accuracy_of(ranks: Tensor) -> Tensor:
    """a[k][r], (K, RANKS): how often head k's rank-r token is right, where it has a label."""
    labelled = (ranks >= 0).sum(1, keepdim=True).clamp(min=1)
    return torch.stack([(ranks == r).sum(1) for r in range(RANKS)], 1) / labelled


def path_frequencies(ranks: Tensor) -> dict[RankPath, float]:
    """How often all tokens of a path were right, most frequent path first, over the positions where
    every head has a label. Unlike a product of accuracies, this accounts for heads being right at
    the same positions."""
    columns, right = ranks[:, (ranks >= 0).all(0)].T.tolist(), Counter()
    for column in columns:
        depth = next((k for k, rank in enumerate(column) if rank == RANKS), len(column))
        right.update(tuple(column[:n]) for n in range(1, depth + 1))
    paths = sorted(right, key=lambda path: (-right[path], len(path), path))  # prefixes first
    return {path: right[path] / len(columns) for path in paths}


def choose_tree(
    heads: MedusaHeads, vocabulary: Vocabulary | None, target: Transformer, generated: list[dict],
    context: int,
) -> None:  # fmt: skip
    """Set the heads' accuracy on `generated` documents, and their tree: the paths that were right
    most often, with the number of nodes (at least one) that is fastest on this machine. A round
    costs a pass over the nodes and the root, plus the heads, which draft from the vocabulary (None:
    all tokens)."""
    draft_head = (vocabulary or FullVocabulary(target)).select([])
    ranks = ranks_of(heads, draft_head, target, generated, context)
    heads.accuracy = accuracy_of(ranks)
    shares = path_frequencies(ranks)
    tokens = list(accumulate(shares.values(), initial=1.0))  # of trees of 0, 1, … nodes
    costs = tree_costs(target, heads, vocabulary)
    speedups = [n / cost for n, cost in zip(tokens, costs)]
    speedups[0] = 0.0  # an empty tree would not use the heads
    best = speedups.index(max(speedups))
    print(
        f"a tree of {best} nodes: {tokens[best]:.2f} tokens per round, which costs "
        f"{costs[best]:.2f} passes"
    )
    heads.tree = list(shares)[:best]


def accuracy_table(heads: MedusaHeads) -> str:
    """A Markdown table with a row per head and a column per rank."""
    ranks = [f"rank {r}" for r in range(RANKS)]
    return markdown_table("head", ranks, dict(enumerate(heads.accuracy.tolist())))


def run(args: argparse.Namespace) -> None:
    target, folder, drafter, rows = load_for_measuring(args, "medusa", args.dtype)
    heads = drafter["heads"]
    choose_tree(heads, drafter["vocabulary"], target, rows, target.config.context)
    save_tree(heads, folder)
    print(accuracy_table(heads))


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16")
