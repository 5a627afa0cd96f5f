"""The key-value cache. Rejected drafts are rolled back here."""

import copy

import torch
from torch import Tensor


class KVCache:
    """Keys and values of every layer, allocated once; of one sequence or, in a batch, of several.

    Rows [0, length) are committed. A pass writes its rows after them as *scratch* and never changes
    the length; only `commit` and `truncate` do. These two verbs reuse a prefix, append a token,
    roll back a rejected draft and compact an accepted path.
    """

    def __init__(
        self, layers: int, heads: int, head_dim: int, capacity: int,
        dtype: torch.dtype | None = None, device: torch.device | str | None = None,
        sequences: int = 1,
    ):  # fmt: skip
        shape = (2, layers, sequences, capacity, heads, head_dim)
        self.set_storage(torch.zeros(shape, dtype=dtype, device=device), 0)
        self.row_ids = torch.arange(max(capacity, sequences), device=device)
        self.user: object = None  # the `user` of the run that decodes with it; no other run may

    def set_storage(self, kv: Tensor, length: int | Tensor) -> None:
        """Hold `kv`, rotated keys and values, the first `length` rows of which are committed."""
        self.kv, self.length, self.capacity, self.device = kv, length, kv.shape[3], kv.device
        # views of the layers, (sequences, capacity, heads, head_dim). `.data` lets a pass with
        # gradients write to one layer without invalidating what autograd saved for another
        self.k, self.v = ([layer.data for layer in keys_or_values] for keys_or_values in kv)

    def view(self, span: int, length: Tensor) -> "KVCache":
        """The first `span` rows of each sequence, in the same memory, for a batch or a CUDA graph:
        `length`, (sequences, 1) or (1, 1) if all are equal, is on the device, so passes of any
        length are the same operations. They read all `span` rows. Only chains can be committed."""
        view = copy.copy(self)
        view.set_storage(self.kv[:, :, :, :span], length)
        return view

    @property
    def free_rows(self) -> int:
        """Number of scratch rows that still fit."""
        return self.capacity - self.length

    def place(self, n: int, depth: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute where the `n` rows of the next pass go and what they attend to.

        `depth` (n,) is each new row's position relative to the end of the committed ones. `mask`
        (n, m), with m >= n, says which of the last m - n committed rows and the n new ones each new
        row attends to; all attend to every earlier committed row. Returns slots (B, n), positions
        (B, n) and a boolean mask (B, 1, n, span), with B = 1 if all sequences have one length.
        Raises ValueError if the rows do not fit."""
        starts, span, m = self.length, self.capacity, mask.shape[1]
        if not isinstance(starts, Tensor):
            if n > self.free_rows:
                raise ValueError(
                    f"{n} more tokens do not fit: the cache holds {self.capacity} and "
                    f"{self.length} are committed"
                )
            # slices of row_ids, not torch.tensor(length): a copy from the host would synchronise
            starts, span = self.row_ids[starts : starts + 1, None], starts + n  # (1, 1)
        row_ids, sequences = self.row_ids[:span], self.row_ids[: len(starts)]
        columns = starts + (row_ids[:m] - (m - n))  # (B, m)
        attn_mask = (row_ids < starts)[:, None].repeat(1, n, 1)  # (B, n, span)
        # indices (B, 1, 1), (n, 1), (B, 1, m)
        attn_mask[sequences[:, None, None], row_ids[:n, None], columns[:, None]] = mask
        return starts + row_ids[:n], starts + depth, attn_mask[:, None]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k and v (sequences, n, heads, head_dim) to rows `slots` (B, n) of a layer. Returns
        the keys and values that the pass may attend to, (sequences, span, heads, head_dim) each."""
        keys, values = self.k[layer], self.v[layer]
        rows = slice(None), slots[0]
        if len(slots) > 1:
            rows = self.row_ids[: len(slots), None], slots
        keys[rows], values[rows] = k, v
        span = None if isinstance(self.length, Tensor) else self.length + k.shape[1]
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
        assert isinstance(length, Tensor) or 0 <= length <= self.length
        self.length = length
