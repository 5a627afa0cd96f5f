"""The seam: all that makes passes faster or smaller, done to a plain model after loading.

The model does not know of it, nothing is undone, and who wants the plain model loads it again.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec.model import Transformer

FEW = 16  # rows up to which WideLinear's product is the faster one


def quicken(model: Transformer, int8: bool = False, compiled: bool = False) -> None:
    """What `generate` and `bench` do after loading."""
    if int8:
        swap(model, Int8Linear)
    elif model.device.type == "cpu" and model.dtype == torch.float32:
        swap(model, WideLinear)


def swap(module: nn.Module, make) -> None:
    """Replace each nn.Linear in the module by `make(linear)`, in place."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, make(child))
        else:
            swap(child, make)


class WideLinear(nn.Module):
    """A linear layer that computes the product for 2 to FEW rows as weight @ rowsᵀ: the CPU
    libraries read a weight for four rows so as fast as for one, and the other way round not."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])  # (n, in)
        if not 2 <= len(rows) <= FEW:
            return F.linear(x, self.weight, self.bias)
        y = (self.weight @ rows.T).T  # (n, out)
        y = y if self.bias is None else y + self.bias
        return y.reshape(*x.shape[:-1], -1)


class Int8Linear(nn.Module):
    """Weights rounded to 8 bits, with a scale per output: a quarter of float32's memory."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.abs().amax(1).clamp(min=1e-12) / 127  # (out,)
        self.register_buffer("weight", (weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight.to(x.dtype)) * self.scale
        return y if self.bias is None else y + self.bias
