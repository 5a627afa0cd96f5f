"""The order in which temperature, top-k and top-p are applied: a convention, not a mistake."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from minispec.certify.common import Result
from minispec.certify.scoring import Warp
from minispec.sampling import Sampling, probs

# An order is given by filters: each removes the tokens that its sampling would not draw.
Order = Callable[[Sampling], list[Sampling]]
OTHER_ORDERS: dict[str, Order] = {
    "top-p before temperature": lambda s: [replace(s, temperature=1.0)],
    "top-p before top-k": lambda s: [replace(s, top_k=0), replace(s, top_p=1.0)],
    "top-p before top-k and temperature": lambda s: [Sampling(1.0, top_p=s.top_p),
                                                     Sampling(1.0, s.top_k)],
}  # fmt: skip


@cache
def warper(sampling: Sampling, order: Order | None = None) -> Warp:
    """Return these warpers, by default in our order: logits (n, V) -> distributions (n, V)."""

    def warp(logits: Tensor) -> Tensor:
        for chosen in order(sampling) if order else [sampling]:
            logits = logits.masked_fill(probs(logits, chosen) == 0, -torch.inf)
        return probs(logits, Sampling(sampling.temperature))

    return warp


class Conventions:
    """The orders that explain all rows so far."""

    def __init__(self):
        self.possible = dict(OTHER_ORDERS)

    def resolve(self, sampling: Sampling, ours: Result, test: Callable[[Order], Result]) -> Result:
        """Return `ours`, the result with our order of warpers. If it failed, but another order may
        explain all rows so far, name that one, and neither pass nor fail."""
        passed, detail = ours
        if passed is None or sampling.top_p == 1:  # the order does not matter
            return passed, detail
        results = {name: test(x)[0] for name, x in self.possible.items()}
        explained = {name: x for name, x in self.possible.items() if results[name]}
        if passed or explained:
            self.possible = explained
        # an order may leave so few tokens that the test proves nothing
        orders = explained or [name for name, result in results.items() if result is None]
        if passed or not orders:
            return passed, detail
        return None, f"convention: {' or '.join(orders)}; with ours, {detail}"
