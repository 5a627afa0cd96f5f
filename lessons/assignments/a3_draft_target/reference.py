"""The reference solution is the package."""

from minispec.methods.prompt_lookup import lookup
from minispec.methods.speculative import propose, speculative, speedup, tokens_per_pass

__all__ = ["lookup", "propose", "speculative", "speedup", "tokens_per_pass"]
