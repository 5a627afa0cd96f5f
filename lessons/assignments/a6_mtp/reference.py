"""The reference solution is the package."""

from minispec.distill import Documents, MTPLoss, step_weights
from minispec.methods.fastmtp import Drafter, MTPHead

__all__ = ["Documents", "Drafter", "MTPHead", "MTPLoss", "step_weights"]
