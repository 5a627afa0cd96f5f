"""Create the model to train, at the sizes asked for or from an existing checkpoint."""

import argparse
from dataclasses import replace

import torch
from torch import nn

from minispec.checkpoints.config import ORIGINAL
from minispec.checkpoints.load import check_matching, load
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.cli import Source, UserError, number
from minispec.model import Config, Transformer
from minispec.training.loop import add_flags


def size_arguments(p: argparse.ArgumentParser, **defaults: int) -> None:
    """Add flags for the sizes of a new model, with these defaults, and --init."""
    meanings = {"layers": "transformer layers", "width": "hidden size", "heads": "attention heads",
                "ffn": "hidden size of the MLP", "kv-heads": "key-value heads"}  # fmt: skip
    for name, meaning in meanings.items():
        most = 1000 if name == "layers" else 2**16
        add_flags(p, (name, number(1, most), defaults.get(name, 1), meaning))
    p.add_argument("--init", type=Source,
                   help="start from this checkpoint; its sizes override the flags")  # fmt: skip


def new_model(args: argparse.Namespace, tokenizer: Tokenizer, **config) -> Transformer:
    """A new model with the sizes in `args`, or the checkpoint --init, for --context tokens.
    `config` holds the fields without a flag: vocab_size, bos_id and eos_ids."""
    if args.init:
        model, old = load(args.init, "float32", args.device)
        check_matching(f"--init {args.init}", old, tokenizer)
        if model.config.vocab_size != config["vocab_size"]:
            raise UserError(f"--init {args.init}: its vocabulary size differs")
        scaling = model.config.rope_scaling  # whose original length may default to the context
        if scaling and not scaling.get(ORIGINAL):
            scaling = scaling | {ORIGINAL: model.config.context}
        model.config = replace(model.config, context=args.context, rope_scaling=scaling)
        return model.requires_grad_(True)
    if args.width % args.heads or args.heads % args.kv_heads or args.width // args.heads % 2:
        raise UserError(f"--width {args.width} must be an even multiple of --heads {args.heads}, "
                        f"which must be a multiple of --kv-heads {args.kv_heads}")  # fmt: skip
    model = Transformer(Config(
        hidden_size=args.width, intermediate_size=args.ffn, layers=args.layers, heads=args.heads,
        kv_heads=args.kv_heads, head_dim=args.width // args.heads, context=args.context, **config,
    ))  # fmt: skip
    initialise(model, args.seed)
    return model.to(args.device)


def initialise(model: nn.Module, seed: int) -> None:
    """Draw weights from a normal distribution with standard deviation 0.02; set biases to 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02, generator=generator)
        elif name.endswith(".bias"):
            nn.init.zeros_(parameter)
