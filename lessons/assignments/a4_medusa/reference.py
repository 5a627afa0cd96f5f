"""The reference solution is the package."""

from minispec.methods.adaptive import expected, grow_tree
from minispec.methods.medusa import MedusaHeads, ResBlock, propose, typical_path, untrained
from minispec.training.distill import labels_of
from minispec.tree import Tree

from_paths = Tree.from_paths

__all__ = [
    "MedusaHeads", "ResBlock", "expected", "from_paths", "grow_tree", "labels_of", "propose",
    "typical_path", "untrained",
]  # fmt: skip
