"""The key-value cache. Rejected drafts are rolled back here."""

import torch
from torch import Tensor


class KVCache:
    """Keys and values of every layer, allocated once.

    Rows [0, length) are committed. A pass writes its rows after them as *scratch* and never changes
    the length; only `commit` and `truncate` do. These two verbs reuse a prefix, append a token,
    roll back a rejected draft and compact an accepted path.
    """

    def __init__(
        self, layers: int, heads: int, head_dim: int, capacity: int,
        dtype: torch.dtype | None = None, device: torch.device | str | None = None,
    ):  # fmt: skip
        shape = (2, layers, 1, capacity, heads, head_dim)
        self.set_storage(torch.zeros(shape, dtype=dtype, device=device), 0)
        self.capacity, self.device = capacity, self.kv.device
        self.row_ids = torch.arange(capacity, device=device)
        self.user: object = None  # the `user` of the run that decodes with it; no other run may

    def set_storage(self, kv: Tensor, length: int) -> None:
        """Hold `kv`, rotated keys and values, the first `length` rows of which are committed."""
        self.kv, self.length = kv, length
        # views of the layers, (1, capacity, heads, head_dim). `.data` lets a pass with gradients
        # write to one layer without invalidating what autograd saved for another
        self.k, self.v = ([layer.data for layer in keys_or_values] for keys_or_values in kv)

    @property
    def free_rows(self) -> int:
        """Number of scratch rows that still fit."""
        return self.capacity - self.length

    def place(self, n: int, depth: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute where the `n` rows of the next pass go and what they attend to (see `placement`).
        Raises ValueError if they do not fit."""
        if n > self.free_rows:
            raise ValueError(
                f"{n} more tokens do not fit: the cache holds {self.capacity} and "
                f"{self.length} are committed"
            )
        # slices of self.row_ids, not torch.tensor(length): a copy from the host would synchronise
        start = self.row_ids[self.length : self.length + 1, None]  # (1, 1)
        row_ids = self.row_ids[: self.length + n]
        return placement(start, row_ids[:1, None], row_ids, depth, mask)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k and v (1, n, heads, head_dim) to rows `slots` (1, n) of a layer. Returns the keys
        and values that the pass may attend to, (1, span, heads, head_dim) each."""
        keys, values, span = self.k[layer], self.v[layer], self.length + k.shape[1]
        keys[:, slots[0]] = k
        values[:, slots[0]] = v
        return keys[:, :span], values[:, :span]

    def commit(self, path: list[int]) -> None:
        """Keep scratch rows `path`, in order, right after the committed ones."""
        start = self.length
        assert path == sorted(set(path)), "the rows of a path must be distinct and ascending"
        if path != list(range(len(path))):  # the rows of a chain are already in place
            rows = torch.tensor(path, device=self.device) + start
            # node i of the path was rotated for position start + i, the row it moves to
            self.kv[:, :, :, start : start + len(path)] = self.kv[:, :, :, rows]
        self.length = start + len(path)

    def truncate(self, length: int) -> None:
        """Discard every row from `length` on."""
        assert 0 <= length <= self.length
        self.length = length


def placement(
    starts: Tensor, sequence_ids: Tensor, row_ids: Tensor, depth: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Where the n rows of a pass go and what they attend to, after `starts` (B, 1) committed rows.

    `sequence_ids` (B, 1) and `row_ids` (span,) count the sequences and the rows that the pass
    reads; `depth` (n,) is each new row's position relative to the end of the committed ones.
    `mask` (n, m), with m >= n, says which of the last m - n committed rows and the n new ones each
    new row attends to; all attend to every earlier committed row. Returns slots (B, n), positions
    (B, n) and a boolean mask (B, 1, n, span).
    """
    n, m = mask.shape
    columns = starts + (row_ids[:m] - (m - n))  # (B, m)
    attn_mask = (row_ids < starts)[:, None].repeat(1, n, 1)  # (B, n, span)
    # indices (B, 1, 1), (n, 1), (B, 1, m)
    attn_mask[sequence_ids[..., None], row_ids[:n, None], columns[:, None]] = mask
    return starts + row_ids[:n], starts + depth, attn_mask[:, None]
