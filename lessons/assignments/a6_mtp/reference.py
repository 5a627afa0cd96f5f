"""The reference solution is the package."""

from minispec.distill import Documents, MTPLoss, step_weights
from minispec.methods.fastmtp import Drafter, Head

__all__ = ["Documents", "Drafter", "Head", "MTPLoss", "step_weights"]
