"""The reference solution is the package."""

from minispec.methods.vocabulary import Compressed, Subset, count, votes

__all__ = ["Compressed", "Subset", "count", "votes"]
