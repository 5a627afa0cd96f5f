"""Train and measure Medusa heads, and choose the fastest tree for them on this machine."""

import argparse
from collections import Counter
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.checkpoints.heads import load_medusa, load_subset, save_measured, save_medusa
from minispec.cli import UserError, number
from minispec.distill import documents as data
from minispec.distill.documents import Documents, cross_entropy
from minispec.generate.drafters import tree_costs
from minispec.methods.medusa import RANKS, MedusaHeads, new_heads
from minispec.methods.vocabulary import DraftHead, FullVocabulary, Subset, Vocabulary
from minispec.model import Transformer, count_parameters
from minispec.training import loop
from minispec.tree import RankPath


class HeadsLoss:
    """Document indices -> Σ over heads of 0.8^k · CE_k, in nats (section 2.2.1). CE_k compares head
    k's prediction at t with the generated token t + k + 2, over the full vocabulary. Heads that end
    in the target's lm_head can use a smaller `vocabulary`; labels outside it are ignored."""

    def __init__(self, heads: MedusaHeads, target: Transformer, documents: Documents,
                 vocabulary: Subset | None = None):  # fmt: skip
        self.heads, self.target, self.documents = heads, target, documents
        self.draft_head = vocabulary or FullVocabulary(target)

    def __call__(self, index: Tensor) -> Tensor:
        hidden, _, labels = self.documents.gather(index, len(self.heads), self.target.device)
        labels = self.draft_head.to_subset_ids(torch.stack(labels))  # (K, B, n)
        labelled = (labels >= 0).any(0)
        logits = self.heads(hidden[:, : labels.shape[-1]][labelled], self.draft_head)  # (K, N, V)
        losses = map(cross_entropy, logits, labels[:, labelled])
        return sum(0.8**k * loss for k, loss in enumerate(losses))


def run(args: argparse.Namespace) -> None:
    """Train Medusa heads on text that the target generated (Medusa-1: the target stays frozen)."""
    target, tokenizer = data.load_target(args)
    if args.init:
        heads = load_medusa(args.init, target, tokenizer)
    else:
        heads = new_heads(args.heads, args.layers, target, args.shared)
    if args.vocabulary and not heads.shared:
        raise UserError("--vocabulary needs --shared heads; these have projections of their own")
    vocabulary = load_subset(args.vocabulary, target, tokenizer)
    loss = partial(HeadsLoss, heads, target, vocabulary=vocabulary)
    adamw = torch.optim.AdamW(heads.parameters(), betas=(0.9, 0.95), weight_decay=0.0)

    def finish(held_out: list[dict]) -> tuple[str, str, str]:
        table = choose_tree(heads, vocabulary, target, held_out, args.context)
        save_medusa(heads, args.out, loop.without_folder(args.model), tokenizer, torch.float16)
        data.store_vocabulary(args, target, tokenizer)
        title = f"{len(heads)} Medusa heads of {count_parameters(heads):,} parameters"
        measured = (f"The tree has {len(heads.tree)} nodes; `minispec distill tree` chooses one "
                    "for your machine. How often the head's token of each rank is right on "
                    "held-out documents:")  # fmt: skip
        return title, measured, table

    data.train_on_generated(
        args, target, tokenizer, heads, loss, str(heads), finish, [adamw], vocabulary
    )


def arguments(p: argparse.ArgumentParser) -> None:
    loop.add_flags(
        p,
        ("heads", number(1), 4, "Medusa heads"),
        ("layers", number(0), 1, "residual blocks per head"),
    )
    p.add_argument("--shared", action="store_true", help="use the target's lm_head (layout v2)")
    loop.training_arguments(p, steps=2000, context=256, lr=1e-3)


# ---- measuring heads and choosing a tree ---------------------------------------------------------


def labels_of(tokens: list[int], prompt: int, heads: int) -> Tensor:
    """Labels (n, heads): head k's label at t is token t + k + 2, or -100 past the end of the text.
    Rows with a label inside the prompt (the first `prompt` tokens) get -100 for every head."""
    n = len(tokens)
    following = F.pad(torch.tensor(tokens, dtype=torch.long), (0, heads + 1), value=-100)
    labels = following[2:].unfold(0, heads, 1)  # (n, heads)
    return labels.where(torch.arange(n)[:, None] >= prompt - 2, -100)


@torch.no_grad()
def ranks_of(
    heads: MedusaHeads, draft_head: DraftHead, target: Transformer, generated: list[dict],
    context: int,
) -> Tensor:  # fmt: skip
    """The rank (K, n) that each head gives its label among the draft head's tokens, at the n tokens
    of all documents, cut to `context`. RANKS stands for any worse rank and for a label that the
    draft head lacks, -1 for no label."""
    rows, ranks = data.texts_of(generated, context), []
    for i, hidden in enumerate(data.hidden_states(target, rows)):
        logits = heads(hidden.to(target.device, target.dtype), draft_head)  # (K, n, V)
        label = labels_of(rows[i], len(generated[i]["prompt"]), len(heads)).T.to(logits.device)
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
    """Map each path to the share of positions where all of its tokens were right, among those where
    every head has a label; the most frequent path first. Unlike a product of accuracies, this
    accounts for heads being right at the same positions."""
    columns, right = ranks[:, (ranks >= 0).all(0)].T.tolist(), Counter()
    for column in columns:
        depth = next((k for k, rank in enumerate(column) if rank == RANKS), len(column))
        right.update(tuple(column[:n]) for n in range(1, depth + 1))
    paths = sorted(right, key=lambda path: (-right[path], len(path), path))  # prefixes first
    return {path: right[path] / len(columns) for path in paths}


def choose_tree(
    heads: MedusaHeads, vocabulary: Vocabulary | None, target: Transformer, generated: list[dict],
    context: int,
) -> str:  # fmt: skip
    """Set the heads' accuracy on `generated` documents, and their tree: the paths that were right
    most often, with the number of nodes (at least one) that is fastest on this machine. A round
    costs a pass over the nodes and the root, plus the heads, which draft from the vocabulary (None:
    all tokens). Returns a Markdown table with a row per head and a column per rank."""
    draft_head = (vocabulary or FullVocabulary(target)).select([])
    ranks = ranks_of(heads, draft_head, target, generated, context)
    heads.accuracy = accuracy_of(ranks)
    shares = path_frequencies(ranks)
    tokens = list(accumulate(shares.values(), initial=1.0))  # of trees of 0, 1, … nodes
    costs = tree_costs(target, heads, vocabulary)
    speedups = [n / cost for n, cost in zip(tokens, costs)]
    speedups[0] = 0.0  # an empty tree would not use the heads
    best = speedups.index(max(speedups))
    print(f"a tree of {best} nodes: {tokens[best]:.2f} tokens per round, "
          f"which costs {costs[best]:.2f} passes")  # fmt: skip
    heads.tree = list(shares)[:best]
    columns = [f"rank {r}" for r in range(RANKS)]
    return loop.markdown_table("head", columns, dict(enumerate(heads.accuracy.tolist())))


def run_tree(args: argparse.Namespace) -> None:
    """Measure Medusa heads and choose the fastest tree for them on this machine."""
    target, folder, drafter, rows = data.load_for_measuring(args, "medusa", args.dtype)
    heads = drafter["heads"]
    table = choose_tree(heads, drafter["vocabulary"], target, rows, target.config.context)
    save_measured(heads, folder)
    print(table)
