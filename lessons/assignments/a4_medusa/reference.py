"""The reference solution is the package."""

from minispec.distill import labels_of
from minispec.methods.medusa import Heads, expected, grow_tree, propose, typical_path, untrained
from minispec.tree import Tree

from_paths = Tree.from_paths

__all__ = [
    "Heads", "expected", "from_paths", "grow_tree", "labels_of", "propose", "typical_path",
    "untrained",
]  # fmt: skip
