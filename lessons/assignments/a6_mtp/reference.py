"""The reference solution is the package."""

from minispec.methods.fastmtp import Drafter, MTPHead
from minispec.training.distill import Documents, MTPLoss, step_weights

__all__ = ["Documents", "Drafter", "MTPHead", "MTPLoss", "step_weights"]
