"""The reference solution is the package."""

from minispec.cache import KVCache
from minispec.tree import layout

__all__ = ["KVCache", "layout"]
