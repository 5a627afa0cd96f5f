"""The reference solution is the package."""

from minispec.methods.lookahead import Pool, Window, beside, jacobi, window_layout
from minispec.tree import Tree

merged = Tree.merged

__all__ = ["Pool", "Window", "beside", "jacobi", "merged", "window_layout"]
