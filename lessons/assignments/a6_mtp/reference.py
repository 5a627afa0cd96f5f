"""The reference solution is the package."""

from minispec.distill import Documents, MTPLoss, step_weights
from minispec.methods import fastmtp
from minispec.methods.adaptive import FixedNodes
from minispec.methods.fastmtp import MTPHead
from minispec.methods.vocabulary import DraftHead

__all__ = ["Documents", "Drafter", "MTPHead", "MTPLoss", "step_weights"]


class Drafter(fastmtp.HeadDrafter):
    def grow(
        self, newest: int, n: int, width: int, depth: int, draft_head: DraftHead
    ) -> tuple[list[int], list[int]]:
        self.policy = FixedNodes(n, (width, depth))
        tree = self.tree([newest], n, draft_head, {})
        return tree.tokens, tree.parents
