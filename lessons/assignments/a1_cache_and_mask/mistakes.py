"""Wrong answers to assignment 1: `layout`, and each method of the cache, with one slip."""

import torch

from lessons.assignments import mutants
from lessons.assignments.grading import Mistake
from minispec.cache import KVCache
from minispec.tree import layout

place, commit = KVCache.place, KVCache.commit


def with_depths(change):
    """`layout`, but with other depths: change(parents, depths)."""

    def wrong(parents):
        depths, _, mask = layout(parents)
        depths = change(parents, list(depths))
        return depths, torch.tensor(depths), mask

    return wrong


def with_mask(change):
    """`layout`, but with another mask: change(parents, mask)."""

    def wrong(parents):
        depths, depth, mask = layout(parents)
        return depths, depth, change(parents, mask.clone())

    return wrong


def with_siblings(parents, mask):
    for i, parent in enumerate(parents):
        for j, other in enumerate(parents[:i]):
            mask[i, j] |= parent == other and i > 0
    return mask


def parent_only(parents, mask):
    mask = torch.eye(len(parents), dtype=torch.bool)
    for i, parent in enumerate(parents[1:], start=1):
        mask[i, parent] = True
    return mask


def blind_to_itself(parents, mask):
    return mask & ~torch.eye(len(parents), dtype=torch.bool)


def at_their_slots(self, n, depth, mask):
    slots, _, visible = place(self, n, depth, mask)
    return slots, slots.clone(), visible


def from_the_start(self, n, depth, mask):
    slots, positions, visible = place(self, n, depth, mask)
    return slots - self.length, positions, visible


def without_the_prefix(self, n, depth, mask):
    slots, positions, visible = place(self, n, depth, mask)
    visible[..., : self.length] = False
    return slots, positions, visible


def advancing(self, n, depth, mask):
    placed = place(self, n, depth, mask)
    self.length = self.length + n
    return placed


def all_scratch_rows(self, n, depth, mask):
    slots, positions, visible = place(self, n, depth, mask)
    visible[..., self.length :] = True
    return slots, positions, visible


def unchecked(self, n, depth, mask):
    rows = torch.arange(self.length, self.length + n)[None]
    visible = torch.ones(n, self.length + n, dtype=torch.bool)
    visible[:, self.length :] = mask
    return rows, self.length + depth[None], visible[None, None]


def up_to_the_last_row(self, path):
    start = self.length
    commit(self, path)
    self.length = start + (path[-1] + 1 if path else 0)


def from_the_cache_start(self, path):
    """The path's numbers are read as rows of the cache."""
    start = self.length
    for i, row in enumerate(path):
        for rows in (*self.k, *self.v):
            rows[:, start + i] = rows[:, row]
    self.length = start + len(path)


def keys_only(self, path):
    start = self.length
    for i, row in enumerate(path):
        for rows in self.k:
            rows[:, start + i] = rows[:, start + row]
    self.length = start + len(path)


def last_row_first(self, path):
    """Rows are overwritten before they have been read."""
    start = self.length
    for i, row in reversed(list(enumerate(path))):
        for rows in (*self.k, *self.v):
            rows[:, start + i] = rows[:, start + row]
    self.length = start + len(path)


def clears_rows(self, length):
    for rows in (*self.k, *self.v):
        rows[:, length:] = 0
    self.length = length


def drops_that_many(self, length):
    self.length = self.length - length


MISTAKES = [
    Mistake("depth, together", "a node's number is taken for its depth",
            {"layout": with_depths(lambda parents, depths: list(range(len(parents))))}),
    Mistake("depth, together", "the root has depth 1: it has 0",
            {"layout": with_depths(lambda parents, depths: [d + 1 for d in depths])}),
    Mistake("depth, together", "the parent's number is taken for the depth",
            {"layout": with_depths(lambda parents, depths: [p + 1 for p in parents])}),
    Mistake("mask, together", "a node sees every node before it: that is a chain's mask",
            {"layout": with_mask(lambda parents, mask: torch.ones_like(mask).tril())}),
    Mistake("mask, together", "siblings see each other",
            {"layout": with_mask(with_siblings)}),
    Mistake("mask, together", "a node sees its parent, but not its parent's ancestors",
            {"layout": with_mask(parent_only)}),
    Mistake("mask", "a node does not see itself", {"layout": with_mask(blind_to_itself)}),
    Mistake("mask, together", "the mask is transposed: row i is what node i sees",
            {"layout": with_mask(lambda parents, mask: mask.T)}),
    Mistake("place", "rows stand at their slots: siblings share a position, not a slot",
            {"KVCache.place": at_their_slots}),
    Mistake("place, together", "scratch rows overwrite the committed ones",
            {"KVCache.place": from_the_start}),
    Mistake("place, together", "the committed rows are invisible",
            {"KVCache.place": without_the_prefix}),
    Mistake("place", "the pass itself advances `length`", {"KVCache.place": advancing}),
    Mistake("place, together", "all scratch rows see each other, whatever `mask` says",
            {"KVCache.place": all_scratch_rows}),
    Mistake("place", "a pass that does not fit raises no ValueError", {"KVCache.place": unchecked}),
    Mistake("commit, together", "rows are counted, but not moved",
            {"KVCache.commit": mutants.commit_in_place}),
    Mistake("commit, together", "one row too many is kept",
            {"KVCache.commit": mutants.commit_one_too_many}),
    Mistake("commit, together", "everything up to the path's last row is kept",
            {"KVCache.commit": up_to_the_last_row}),
    Mistake("commit, together", "the path counts scratch rows, not rows of the cache: add `length`",
            {"KVCache.commit": from_the_cache_start}),
    Mistake("commit, together", "only the keys are moved", {"KVCache.commit": keys_only}),
    Mistake("commit, together", "a row is overwritten before it was read: begin with the first",
            {"KVCache.commit": last_row_first}),
    Mistake("truncate, together", "one stale row is kept",
            {"KVCache.truncate": mutants.truncate_one_short}),
    Mistake("truncate", "rows are cleared: moving the boundary is enough",
            {"KVCache.truncate": clears_rows}),
    Mistake("truncate", "`length` is what stays, not how many rows go",
            {"KVCache.truncate": drops_that_many}),
]  # fmt: skip
