"""Train a draft on the target's own text.

It learns the target's whole distributions there, not only the tokens drawn from them (Zhou et al.
2023, DistillSpec, arXiv 2310.08461).
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec.checkpoint import save
from minispec.distill.documents import HELD_OUT, Documents, learn, load_target, own_argument
from minispec.model import Transformer, count_parameters
from minispec.pretrain import new_model
from minispec.training import (
    markdown,
    muon_and_adamw,
    prepare,
    size_arguments,
    training_arguments,
    write_card,
)


class SoftLabels(nn.Module):
    """Indices of documents -> cross-entropy of the draft against the target's whole distributions
    of the generated tokens, in nats. The target's hidden states are known: only its lm_head runs.
    """

    def __init__(
        self, draft: Transformer, target: Transformer, documents: Documents, dtype: torch.dtype
    ):
        super().__init__()
        self.draft, self.documents, self.dtype = draft, documents, dtype
        self.target = [target]  # no parameters of this module

    def forward(self, index: Tensor) -> Tensor:
        tokens, generated, hidden = self.gather(index)
        with torch.autocast(index.device.type, self.dtype, enabled=self.dtype != torch.float32):
            with torch.no_grad():
                p = self.target[0].logits(hidden).float().softmax(-1)  # (N, V)
            logits = self.draft.logits(self.draft(tokens)[generated])
        return F.cross_entropy(logits.float(), p, reduction="sum") / max(len(p), 1)

    def gather(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (B, T - 1), which of them a generated one follows, and the target's hidden states
        (N, d) at these."""
        at, device, documents = index.cpu(), index.device, self.documents
        tokens = documents.tokens[at, :-1]
        follows = torch.arange(tokens.shape[1]) + 1
        generated = follows >= documents.prompts[at, None]
        generated &= follows < documents.lengths[at, None]
        hidden = documents.states(at, tokens.shape[1])[generated]
        return tokens.to(device), generated.to(device), hidden.to(device)


@torch.no_grad()
def agreement(
    draft: Transformer, target: Transformer, rows: list[dict]
) -> dict[str, list[float]]:  # fmt: skip
    """Per kind: how often both argmaxes are equal, and Σ min(p, q), the chance that a draft drawn
    from q is accepted, over the generated tokens of `rows`."""
    both: dict[str, list[Tensor]] = {}
    for row in rows:
        tokens = (row["prompt"] + row["tokens"])[:-1]
        p, q = (m.logits(m(tokens))[0, len(row["prompt"]) - 1 :] for m in (target, draft))
        same, overlap = p.argmax(-1) == q.argmax(-1), torch.minimum(p.softmax(-1), q.softmax(-1))
        both.setdefault(row["kind"], []).append(torch.stack([same.float(), overlap.sum(-1)]))
    return {kind: torch.cat(each, 1).mean(1).tolist() for kind, each in sorted(both.items())}


def run(args: argparse.Namespace) -> None:
    prepare(args, args.words)
    target, tokenizer = load_target(args, "float32")
    c = target.config
    draft = new_model(args, tokenizer, c.vocab_size, c.bos_id, c.eos_ids)
    run, measured = learn(
        args, target, tokenizer, draft, muon_and_adamw(draft),
        lambda documents: SoftLabels(draft, target, documents, args.dtype), str(draft.config),
    )  # fmt: skip
    save(draft, tokenizer, args.out, torch.float16)
    draft.half().float()  # as it is stored
    table = markdown("kind", ["same argmax", "Σ min(p, q)"], agreement(draft, target, measured))
    write_card(
        args, run, f"A draft of {count_parameters(draft):,} parameters",
        f"{args.layers} layers of width {args.width}, {args.heads} heads. Llama layout, float16. "
        "Learnt from the target's distributions along its own output.",
        f"On every {HELD_OUT}th document, not trained on and near to none that was: how often the "
        "draft's best token is the target's, and Σ min(p, q), the chance that a token drawn from "
        f"the draft is accepted at temperature 1.\n\n{table}",
    )  # fmt: skip
    print(table)


def arguments(p: argparse.ArgumentParser) -> None:
    own_argument(p)
    size_arguments(p, layers=2, width=96, heads=3, ffn=256)
    training_arguments(p, steps=1500, batch_tokens=4096, context=256, least_context=3)
