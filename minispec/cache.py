"""The key-value cache: what a rejected draft must be rolled back in."""

import torch
from torch import Tensor


class KVCache:
    """Keys and values of every layer, allocated once.

    Rows [0, length) of a sequence are committed. A pass writes its rows behind them as *scratch*
    and never advances; only `commit` (`extend` for a batch) and `truncate` move the boundary. So
    the reuse of a prefix, the append of a token, the rollback of a rejected draft and the
    compaction of an accepted tree path are all done by these two verbs.

    A batch (data generation) has one length per sequence: right padding is scratch that is never
    committed.
    """

    def __init__(
        self, layers: int, heads: int, head_dim: int, capacity: int, batch: int = 1,
        dtype: torch.dtype | None = None, device: torch.device | str | None = None,
    ):  # fmt: skip
        shape = (2, layers, batch, capacity, heads, head_dim)
        self.hold(torch.zeros(shape, dtype=dtype, device=device), [0] * batch)
        self.capacity, self.device = capacity, self.kv.device
        self.row = torch.arange(capacity, device=device)

    def hold(self, kv: Tensor, lengths: list[int]) -> None:
        """Hold these keys, rotated, and values, of which each sequence has committed `lengths`."""
        self.kv, self.lengths = kv, lengths
        # of each layer, in the same memory: (batch, capacity, heads, head_dim); `.data`, so that a
        # pass with gradients may write into a layer without touching what autograd kept of another
        self.k, self.v = ([layer.data for layer in each] for each in kv)
        self.sequence = torch.arange(len(lengths), device=kv.device)[:, None]  # (B, 1)

    @property
    def length(self) -> int:
        """Committed rows of the only sequence."""
        assert len(self.lengths) == 1, "a batched cache has `lengths`"
        return self.lengths[0]

    @property
    def free_rows(self) -> int:
        """How many scratch rows still fit."""
        return self.capacity - max(self.lengths)

    def place(self, n: int, depth: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where the `n` rows of the next pass go, and what they see.

        `depth` (n,) counts each row's positions behind the committed ones, `mask` (n, n) says which
        scratch rows it sees. Returns slots (B, n), positions (B, n) and the visibility (B, 1, n,
        span) of the first `span` cache rows: the committed ones for everybody, scratch row j for
        row i if `mask[i, j]`. Raises ValueError where there is no room.
        """
        if n > self.free_rows:
            raise ValueError(
                f"{n} more tokens do not fit: the cache holds {self.capacity} and "
                f"{max(self.lengths)} are committed"
            )
        # slices of self.row, not torch.tensor(lengths): a copy from the host would wait
        starts = torch.stack([self.row[length] for length in self.lengths])[:, None]  # (B, 1)
        slots, span = starts + self.row[:n], max(self.lengths) + n
        attn_mask = (self.row[:span] < starts)[:, None].repeat(1, n, 1)  # (B, n, span)
        # (B, 1, 1), (n, 1), (B, 1, n): each sequence's own scratch columns get the mask
        attn_mask[self.sequence[..., None], self.row[:n, None], slots[:, None]] = mask
        return slots, starts + depth, attn_mask[:, None]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put k, v (B, n, heads, head_dim) into rows `slots` (B, n) of a layer. Returns what the
        pass may see of both, (B, span, heads, head_dim)."""
        keys, values, span = self.k[layer], self.v[layer], max(self.lengths) + k.shape[1]
        keys[self.sequence, slots] = k
        values[self.sequence, slots] = v
        return keys[:, :span], values[:, :span]

    def commit(self, path: list[int]) -> None:
        """Keep scratch rows `path`, in order, right after the committed ones."""
        start = self.length
        assert path == sorted(set(path)), "a path descends: its rows are distinct and ascending"
        if path != list(range(len(path))):  # a chain's rows already lie where they belong
            rows = torch.tensor(path, device=self.device) + start
            # node i of the path was rotated for position start + i, the row it moves to
            self.kv[:, :, :, start : start + len(path)] = self.kv[:, :, :, rows]
        self.lengths = [start + len(path)]

    def extend(self, counts: list[int]) -> None:
        """Commit the first `counts[b]` scratch rows of each sequence b of a batch."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def keep(self, sequences: list[int]) -> None:
        """Go on with these sequences of a batch alone."""
        self.hold(self.kv[:, :, sequences], [self.lengths[i] for i in sequences])

    def truncate(self, length: int) -> None:
        """Forget every row from `length` on."""
        assert 0 <= length <= self.length
        self.lengths = [length]
