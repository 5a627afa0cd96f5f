"""Train a draft model on text that the target generated.

It learns the target's full distribution at each position, not only the sampled token (Zhou et al.
2023, DistillSpec, arXiv 2310.08461).
"""

import argparse
from functools import partial

import torch
from torch import Tensor

from minispec.checkpoints.load import save
from minispec.distill.documents import Documents, cross_entropy, load_target, train_on_generated
from minispec.model import Transformer, count_parameters
from minispec.training.loop import markdown_table, training_arguments
from minispec.training.new_model import new_model, size_arguments


class SoftLabels:
    """Document indices -> cross-entropy of the draft against the target's full distributions, in
    nats, over the generated tokens. Of the target, only lm_head runs, on the stored hidden states.
    """

    def __init__(self, draft: Transformer, target: Transformer, documents: Documents):
        self.draft, self.target, self.documents = draft, target, documents

    def __call__(self, index: Tensor) -> Tensor:
        n, device = self.documents.tokens.shape[1] - 1, self.draft.device
        labels = self.documents.labels(index, 0, n)
        generated = labels >= 0  # (B, n)
        hidden = self.documents.states(index, n)[generated].to(device)  # (N, d)
        p = self.target.logits(hidden).float().softmax(-1)  # (N, V)
        outputs = self.draft(self.documents.tokens[index, :n])
        logits = self.draft.logits(outputs[generated.to(device)])
        return cross_entropy(logits, labels[generated].to(device), p)


@torch.no_grad()
def agreement(draft: Transformer, target: Transformer, rows: list[dict]) -> dict[str, list[float]]:
    """For each kind, over the generated tokens of `rows`: how often the two argmaxes agree, and
    Σ min(p, q), the probability that a token drawn from q is accepted."""
    rates: dict[str, list[Tensor]] = {}
    for row in rows:
        tokens = (row["prompt"] + row["tokens"])[:-1]
        p, q = (m.logits(m(tokens))[0, len(row["prompt"]) - 1 :] for m in (target, draft))
        same, overlap = p.argmax(-1) == q.argmax(-1), torch.minimum(p.softmax(-1), q.softmax(-1))
        rates.setdefault(row["kind"], []).append(torch.stack([same.float(), overlap.sum(-1)]))
    return {name: torch.cat(parts, 1).mean(1).tolist() for name, parts in sorted(rates.items())}


def run(args: argparse.Namespace) -> None:
    """Train a draft model on text that the target generated."""
    target, tokenizer = load_target(args)
    c = target.config
    draft = new_model(args, tokenizer, vocab_size=c.vocab_size, bos_id=c.bos_id, eos_ids=c.eos_ids)
    loss = partial(SoftLabels, draft, target)

    def finish(held_out: list[dict]) -> tuple[str, str, str]:
        save(draft, tokenizer, args.out, torch.float16)
        rates = agreement(draft, target, held_out)
        measured = ("On held-out documents: how often the draft's best token is the target's, and "
                    "Σ min(p, q), the acceptance probability of a sampled token at temperature "
                    "1:")  # fmt: skip
        table = markdown_table("kind", ["same argmax", "Σ min(p, q)"], rates)
        return f"A draft of {count_parameters(draft):,} parameters", measured, table

    train_on_generated(args, target, tokenizer, draft, loss, str(draft.config), finish)


def arguments(p: argparse.ArgumentParser) -> None:
    size_arguments(p, layers=2, width=96, heads=3, ffn=256)
    training_arguments(p, steps=1500, context=256, lr=4e-3)
