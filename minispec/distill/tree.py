"""Measure Medusa heads, and choose the tree that pays most for them on this machine."""

import argparse
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from minispec.cost import cost_curve, heads_cost
from minispec.distill.documents import hidden_states, load_target
from minispec.distill.generate import sample_batch, sampling_arguments
from minispec.errors import UserError, number
from minispec.fast import quicken
from minispec.heads import load_medusa, save_tree
from minispec.methods.medusa import RANKS, Heads
from minispec.model import Transformer
from minispec.sampling import Sampling
from minispec.text import held_out_prompts
from minispec.training import markdown
from minispec.tree import Ranks

# ---- how often heads are right -------------------------------------------------------------------


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
    heads: Heads, target: Transformer, rows: list[list[int]], prompts: list[int]
) -> list[Tensor]:
    """The rank that each head gives its label, (K, n) for each text of n tokens, of which the first
    are a prompt: RANKS for all worse, -1 without a label."""
    ranks = []
    for row, prompt, hidden in zip(rows, prompts, hidden_states(target, rows, torch.float32)):
        logits = heads(hidden.to(target.device, target.dtype), target).cpu()  # (K, n, V)
        label = labels_of(row, prompt, len(heads)).T[..., None]  # (K, n, 1)
        above = (logits > logits.gather(-1, label.clamp(min=0))).sum(-1).clamp(max=RANKS)
        ranks.append(above.where(label[..., 0] >= 0, -1))
    return ranks


def accuracy_of(ranks: Tensor) -> Tensor:
    """a[k][r], (K, RANKS): the share of labelled positions where head k's rank-r token is right."""
    labelled = (ranks >= 0).sum(1, keepdim=True).clamp(min=1)
    return torch.stack([(ranks == r).sum(1) for r in range(RANKS)], 1) / labelled


def accuracy_table(accuracy: Tensor) -> str:
    """Markdown: a row per head, a column per rank."""
    ranks = [f"rank {r}" for r in range(accuracy.shape[1])]
    return markdown("head", ranks, dict(enumerate(accuracy.tolist())))


# ---- trees ---------------------------------------------------------------------------------------


def together(ranks: Tensor) -> list[Ranks]:
    """The paths all of whose tokens were right somewhere, the most frequent first, counted where
    every head has a label. Unlike a product of accuracies this knows that heads are right at the
    same places."""
    right: Counter[Ranks] = Counter()
    for column in ranks[:, (ranks >= 0).all(0)].T.tolist():
        depth = next((k for k, rank in enumerate(column) if rank == RANKS), len(column))
        right.update(tuple(column[:n]) for n in range(1, depth + 1))
    return sorted(right, key=lambda path: (-right[path], len(path), path))  # beginnings first


def along(ranks: list[Tensor], paths: list[Ranks]) -> float:
    """Tokens per pass of greedy decoding along these very texts, with the tree of these paths."""
    nodes, tokens, passes = set(paths), 0, 0
    for each in ranks:
        columns, at = [tuple(column) for column in each[:, (each >= 0).any(0)].T.tolist()], 0
        while at < len(columns):
            length = 0
            while length < len(each) and columns[at][: length + 1] in nodes:
                length += 1
            at, passes = at + length + 1, passes + 1
        tokens += at
    return tokens / passes if passes else 1.0


def choose_tree(
    ranks: list[Tensor], heads: Heads, target: Transformer, nodes: int | None = None
) -> None:
    """Give the heads their accuracies and a tree of the paths that are right most often: of so many
    nodes, or of as many as pay most on this machine, where a round costs a pass over the nodes and
    the root, and the heads."""
    heads.accuracy = accuracy_of(torch.cat(ranks, 1))
    quicken(target)  # a tree is chosen for passes as they will be
    drafting = heads_cost(target, heads)
    costs = [cost + drafting for cost in cost_curve(target)[1:]]  # of trees of 0, 1, … nodes
    paths = together(torch.cat(ranks, 1))[: len(costs) - 1]
    tokens = [along(ranks, paths[:n]) for n in range(len(paths) + 1)]
    speedups = [each / cost for each, cost in zip(tokens, costs)]
    best = min(nodes, len(paths)) if nodes else speedups.index(max(speedups))
    print("nodes  tokens a pass   cost of a round   speedup")
    for n in sorted({1, 2, 4, 8, 16, 32, best, len(paths)} & set(range(len(paths) + 1))):
        print(f"{n:>5}{tokens[n]:>15.2f}{costs[n]:>18.2f}{speedups[n]:>10.2f}")
    print(f"chosen: {best} nodes")
    heads.tree = paths[:best]


# ---- the command ---------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> None:
    """Measures along the target's own continuations of held-out beginnings."""
    if not Path(args.heads).is_dir():
        raise UserError(f"--heads {args.heads}: must be a directory, where its tree can be written")
    target, tokenizer = load_target(args, args.dtype)
    if args.prompt_tokens + args.tokens > target.config.context:
        raise UserError(f"--prompt-tokens {args.prompt_tokens} and --tokens {args.tokens} must fit "
                        f"in the context of {target.config.context}")  # fmt: skip
    heads = load_medusa(args.heads, target, tokenizer)
    asked = held_out_prompts(
        args.data, None, tokenizer, args.documents, args.prompt_tokens, skip=50
    )  # the first 50 are the benchmark's
    prompts = [prompt for each in asked.values() for prompt in each]
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    generator = torch.Generator().manual_seed(args.seed)
    answers = sample_batch(target, prompts, args.tokens, sampling, generator)
    rows = [prompt + answer for prompt, answer in zip(prompts, answers)]
    ranks = ranks_of(heads, target, rows, list(map(len, prompts)))
    choose_tree(ranks, heads, target, args.nodes)
    save_tree(heads, Path(args.heads))
    print(accuracy_table(heads.accuracy))


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--heads", default="weights/medusa", help="their directory; its tree is renewed")
    p.add_argument("--data", type=Path, required=True, help="whose held-out texts begin")
    for name, least, default, text in (
        ("documents", 1, 100, "texts of a kind"),
        ("prompt-tokens", 1, 16, "given of each"),
        ("tokens", 3, 150, "that the target adds"),
    ):
        p.add_argument(f"--{name}", type=number(least), default=default,
                       help=f"{text} (default: {default})")  # fmt: skip
    p.add_argument("--nodes", type=number(1), help="default: what pays most on this machine")
    sampling_arguments(p, temperature=0.0, top_k=0, top_p=1.0)
