"""The reference solution is the package."""

from minispec.distill import labels_of
from minispec.methods.adaptive import expected_tokens, grow_tree
from minispec.methods.medusa import MedusaHeads, ResBlock, new_heads, propose, typical_path
from minispec.tree import Tree

from_paths = Tree.from_paths

__all__ = [
    "MedusaHeads", "ResBlock", "expected_tokens", "from_paths", "grow_tree", "labels_of",
    "new_heads", "propose", "typical_path",
]  # fmt: skip
