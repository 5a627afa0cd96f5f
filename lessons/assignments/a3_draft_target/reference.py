"""The reference solution is the package."""

from minispec.prompt_lookup import lookup
from minispec.speculative import propose, speculative, speedup, tokens_per_pass

__all__ = ["lookup", "propose", "speculative", "speedup", "tokens_per_pass"]
