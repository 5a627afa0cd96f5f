"""Lesson 11: how much of one vector a linear map finds in another, and the head that it trains."""

from collections.abc import Callable

import torch
from torch import Tensor

from minispec.distill import AllSteps
from minispec.methods.eagle3 import Eagle3Head
from minispec.model import ForwardContext, Transformer

PENALTIES = 1e3, 3e3, 9e3  # a wider x needs a larger one


def explained(x: Tensor, y: Tensor) -> float:
    """The share of the variance of y (tokens, e) that a linear map of x (tokens, d) explains. It is
    fitted to two thirds of the tokens, by ridge regression with the best of three penalties, and
    measured on the others."""
    n = 2 * len(x) // 3
    x, y = (x - x[:n].mean(0)) / x[:n].std(0), y - y[:n].mean(0)
    squares, products = x[:n].T @ x[:n], x[:n].T @ y[:n]
    maps = (torch.linalg.solve(squares + p * torch.eye(x.shape[1]), products) for p in PENALTIES)
    errors = min(float((y[n:] - x[n:] @ each).square().sum()) for each in maps)
    return 1 - errors / float(y[n:].square().sum())


def runner(head: Eagle3Head, target: Transformer) -> Callable:
    """What `unroll` gets as `run`, for one batch of texts: it keeps the keys of all its calls."""
    keys = AllSteps()

    def run(hidden: Tensor, tokens: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        ctx = ForwardContext(*head.rope(position[None], hidden.dtype), mask[None, None], keys)
        return head.run_block(hidden, head.embed(tokens, target), ctx)

    return run
