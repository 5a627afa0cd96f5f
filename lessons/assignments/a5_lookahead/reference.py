"""The reference solution is the package."""

from minispec.methods.lookahead import (
    Pool,
    Window,
    combined_mask,
    jacobi,
    lookahead,
    window_layout,
)
from minispec.tree import Tree

merged = Tree.merged

__all__ = [
    "Pool", "Window", "combined_mask", "jacobi", "lookahead", "merged", "window_layout",
]  # fmt: skip
