"""A model of chosen sizes to train, or a checkpoint to continue from."""

import argparse
from dataclasses import replace

import torch
from torch import nn

from minispec.checkpoints.load import check_fingerprint, load
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.errors import UserError, number
from minispec.model import Config, Transformer


def size_arguments(p: argparse.ArgumentParser, **sizes: int) -> None:
    """The sizes of a new model, with these defaults, and the model it may begin with."""
    for name, size in {**sizes, "kv-heads": 1}.items():
        most = 1000 if name == "layers" else 2**16
        p.add_argument(f"--{name}", type=number(1, most), default=size, help="default: %(default)s")
    p.add_argument("--init", help="begin with this checkpoint, whose sizes then count")


def new_model(args: argparse.Namespace, tokenizer: Tokenizer, **known) -> Transformer:
    """An untrained model of the command line's sizes, or that of --init, in --context tokens.
    `known` is what no flag says: vocab_size, bos_id and eos_ids."""
    if args.init:
        model, its = load(args.init, "float32", args.device)
        check_fingerprint(f"--init {args.init}", its.fingerprint if its else None, tokenizer)
        if model.config.vocab_size != known["vocab_size"]:
            raise UserError(f"--init {args.init}: its vocabulary has another size")
        model.config = replace(model.config, context=args.context)
        return model.requires_grad_(True)
    if args.width % args.heads or args.heads % args.kv_heads or args.width // args.heads % 2:
        raise UserError(f"--width {args.width} must be an even multiple of --heads {args.heads}, "
                        f"and those a multiple of --kv-heads {args.kv_heads}")  # fmt: skip
    config = Config(
        hidden_size=args.width, intermediate_size=args.ffn, layers=args.layers, heads=args.heads,
        kv_heads=args.kv_heads, head_dim=args.width // args.heads, context=args.context, **known,
    )  # fmt: skip
    model = Transformer(config)
    initialise(model, args.seed)
    return model.to(args.device)


def initialise(model: nn.Module, seed: int) -> None:
    """Weights normal, of deviation 0.02; biases 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02, generator=generator)
        elif name.endswith(".bias"):
            nn.init.zeros_(parameter)
