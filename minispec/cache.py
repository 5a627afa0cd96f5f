"""The key-value cache: the only mutable state of a decoding run."""

import torch
from torch import Tensor

# A pass attends to a multiple of this many rows, so that its shapes rarely change from pass to
# pass.
SPAN = 64


class KVCache:
    """Keys and values of every layer, allocated once.

    Rows [0, length) of a sequence are committed. A pass writes its rows behind them as *scratch*
    and never advances; `commit` and `truncate` alone move the boundary. So the reuse of a prefix,
    the append of a token, the rollback of a rejected draft and the compaction of an accepted tree
    path are all these two verbs.

    A batch (data generation) has one length per sequence: right padding is scratch nobody commits.
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        head_dim: int,
        capacity: int,
        batch: int = 1,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        shape = (2, layers, batch, capacity, heads, head_dim)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)  # K is stored rotated
        # of each layer (batch, capacity, heads, head_dim), in the same memory. `.data`, as views
        # share a version: a layer's write would spoil what autograd kept of another's
        self.k, self.v = ([self.kv[i, layer].data for layer in range(layers)] for i in (0, 1))
        self.lengths = [0] * batch
        self.capacity = capacity
        self.device = self.kv.device
        # (B, 1), the row index of a write
        self.sequence = torch.arange(batch, device=device)[:, None]
        self.row = torch.arange(capacity, device=device)

    @property
    def length(self) -> int:
        """Committed rows of the only sequence."""
        assert len(self.lengths) == 1, "a batched cache has `lengths`"
        return self.lengths[0]

    @property
    def room(self) -> int:
        """How many scratch rows still fit."""
        return self.capacity - max(self.lengths)

    def place(self, n: int, depth: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where the `n` rows of the next pass go, and what they see.

        `depth` (n,) counts each row's positions behind the committed ones, `mask` (n, n) says which
        scratch rows it sees. Returns slots (B, n), positions (B, n) and the visibility (B, 1, n,
        span) of cache rows: the committed ones for everybody, scratch row j for row i if
        `mask[i, j]`. Raises ValueError where there is no room.
        """
        if n > self.room:
            raise ValueError(
                f"{n} more tokens do not fit: the cache holds {self.capacity} and "
                f"{max(self.lengths)} are committed"
            )
        span = min(-(-(max(self.lengths) + n) // SPAN) * SPAN, self.capacity)
        if len(self.lengths) == 1:  # slices: cheaper than indices
            start = self.length
            visible = torch.zeros(1, n, span, dtype=torch.bool, device=self.device)
            visible[:, :, :start] = True
            visible[:, :, start : start + n] = mask
            return self.row[None, start : start + n], (start + depth)[None], visible[:, None]
        starts = torch.tensor(self.lengths, device=self.device)[:, None]  # (B, 1)
        slots = starts + self.row[:n]
        visible = (self.row[:span] < starts)[:, None].repeat(1, n, 1)  # (B, n, span)
        visible[self.sequence[..., None], self.row[:n, None], slots[:, None]] = mask
        return slots, starts + depth, visible[:, None]

    def write(
        self, layer: int, slots: Tensor | None, k: Tensor, v: Tensor, span: int
    ) -> tuple[Tensor, Tensor]:
        """Put k, v (B, n, heads, head_dim) into `slots` (None: right behind the committed rows of
        the only sequence). Returns the layer's first `span` rows of both, (B, span, heads,
        head_dim), as views."""
        keys, values = self.k[layer], self.v[layer]
        if slots is None:
            start, n = self.length, k.shape[1]
            keys.narrow(1, start, n).copy_(k)
            values.narrow(1, start, n).copy_(v)
        else:
            keys[self.sequence, slots] = k
            values[self.sequence, slots] = v
        return keys.narrow(1, 0, span), values.narrow(1, 0, span)

    def commit(self, path: list[int]) -> None:
        """Keep scratch rows `path`, in order, right after the committed ones."""
        start = self.length
        assert path == sorted(set(path)), "a path descends: its rows are distinct and ascending"
        if path != list(range(len(path))):  # a chain's rows already lie where they belong
            graded = any(each.requires_grad for each in (*self.k, *self.v))
            assert not (graded and torch.is_grad_enabled()), "gradients would not follow the rows"
            rows = torch.tensor(path, device=self.device) + start
            # K was rotated at its depth, which is its final row
            self.kv[:, :, :, start : start + len(path)] = self.kv[:, :, :, rows]
        self.lengths = [start + len(path)]

    def extend(self, counts: list[int]) -> None:
        """Commit the first `counts[b]` scratch rows of each sequence b of a batch."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def truncate(self, length: int) -> None:
        """Forget every row from `length` on."""
        assert 0 <= length <= self.length
        self.lengths = [length]
