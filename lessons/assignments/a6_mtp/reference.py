"""The reference solution is the package."""

from dataclasses import dataclass

from minispec.distill import Documents, MTPLoss, step_weights
from minispec.methods import fastmtp
from minispec.methods.fastmtp import MTPHead
from minispec.methods.vocabulary import DraftHead
from minispec.tree import FixedNodes

__all__ = ["Documents", "Drafter", "MTPHead", "MTPLoss", "step_weights"]


@dataclass(frozen=True)
class FixedShape(FixedNodes):
    """`n` nodes, with this width and depth of the expansion."""

    width: int
    depth: int

    def shape(self, *_) -> tuple[int, int]:
        return self.width, self.depth


class Drafter(fastmtp.Drafter):
    def grow(
        self, newest: int, n: int, width: int, depth: int, draft_head: DraftHead
    ) -> tuple[list[int], list[int]]:
        tree = self.tree([newest], FixedShape(n, width, depth), n, draft_head)
        return tree.tokens, tree.parents
