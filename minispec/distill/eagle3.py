"""Train an EAGLE-3 head on text that the target generated.

As in the paper's training-time test, each step reads the head's own output of the step before. The
head drafts only the tokens of --vocabulary, whose lm_head rows it starts from.
"""

import argparse
from dataclasses import replace

import torch

from minispec.checkpoints.eagle3 import load_eagle3, save_eagle3
from minispec.checkpoints.heads import load_subset
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.cli import UserError
from minispec.distill.documents import load_target
from minispec.distill.mtp import head_arguments, train_head
from minispec.methods.eagle3 import OWN_VOCABULARY, Eagle3Head, default_layers
from minispec.model import Transformer
from minispec.training.loop import without_folder
from minispec.training.new_model import initialise


def run(args: argparse.Namespace) -> None:
    if args.init and args.vocabulary:
        raise UserError(f"--init: {OWN_VOCABULARY}")
    target, tokenizer = load_target(args)
    loaded = load_eagle3(args.init, target, tokenizer) if args.init else None
    head = (loaded or new_head(args, target, tokenizer)).requires_grad_(True)

    def save() -> None:
        save_eagle3(head, args.out, without_folder(args.model), tokenizer, torch.float16)

    train_head(args, target, tokenizer, head, head, save, "An EAGLE-3 head")


def new_head(args: argparse.Namespace, target: Transformer, tokenizer: Tokenizer) -> Eagle3Head:
    """A head with the target's sizes and the plain llama block of published heads."""
    c, subset = target.config, load_subset(args.vocabulary, target, tokenizer)
    ids = sorted(subset.host_ids.tolist()) if subset else list(range(c.vocab_size))
    plain = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias", "qk_norm"), False)
    config = replace(c, model_type="llama", **plain)
    head = Eagle3Head(config, c, ids, default_layers(c.layers))
    initialise(head, args.seed)
    head.lm_head.weight.data.copy_(target.lm_head.weight[ids])
    return head.to(args.device)


def arguments(p: argparse.ArgumentParser) -> None:
    p.set_defaults(mode="aligned")
    head_arguments(p, k=7, beta=0.8)
