"""The reference solution is the package."""

from minispec.checkpoints.eagle3 import read_ids
from minispec.distill import MTPLoss
from minispec.methods.eagle3 import Eagle3Head, Midlayer, default_layers

__all__ = ["Eagle3Head", "MTPLoss", "Midlayer", "default_layers", "read_ids"]
