"""Everything that makes a model faster or smaller, applied to the plain model after loading.

The model itself knows nothing about this, and nothing is ever undone: to get the plain model back,
load it again.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec import distributed
from minispec.cli import UserError
from minispec.fast.captured import capture_passes, is_captured
from minispec.fast.graphs import compile_passes, is_compiled, is_on_gpu
from minispec.fast.products import MeasuredLinear, fastest_products, key_of
from minispec.methods.fastmtp import RecurrentHead
from minispec.methods.medusa import MedusaHeads
from minispec.methods.vocabulary import Compressed
from minispec.model import Transformer


def optimize(model: Transformer, int8: bool = False, compiled: bool = False) -> None:
    """Optimise a loaded model in place, as `generate` and `bench` do. On a CPU, each linear layer
    gets the matrix products that are fastest on this machine (see products.py). They are measured
    the first time, in under a second for a small model. Heads that a method finds next to the model
    are optimised like it.

    On a GPU, passes run as CUDA graphs (see captured.py), unless several processes share the model.

    If requested, weights are rounded to int8 and passes are compiled. Raises UserError if
    compilation is impossible.
    """
    if int8:
        names = {layer: name for name, layer in model.named_modules()}
        swap(model, lambda layer: Int8Linear(layer, names[layer]))
    if compiled and distributed.tensor_parallel.size > 1:
        raise UserError(distributed.NOT_COMPILED)
    if compiled:
        compile_passes(model)
    if is_on_gpu(model) and distributed.tensor_parallel.size == 1:
        capture_passes(model)
    optimize_layers(model)


def optimize_drafter(drafter: dict, model: Transformer) -> None:
    """Optimise what a method drafts with for an optimised model: the modules and the vocabulary in
    `drafter`, a method's options."""
    compiled, captured = is_compiled(model), is_captured(model)
    if type(model.lm_head) is nn.Linear and not compiled and not captured:  # not optimised
        return
    for value in drafter.values():
        if isinstance(value, RecurrentHead) and compiled:
            compile_passes(value)
            compile_passes(model, value.feature_layers)
        if isinstance(value, Transformer | RecurrentHead | MedusaHeads) and captured:
            capture_passes(value)
        if isinstance(value, nn.Module):
            optimize_layers(value)
        elif isinstance(value, Compressed) and value.weight.device.type == "cpu":
            value.set_layer(measured)


def optimize_layers(module: nn.Module) -> None:
    """Let each linear layer on a CPU use the fastest products."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    weights = [layer.weight for layer in layers]
    if weights and weights[0].device.type == "cpu":
        products = distributed.from_rank_0(lambda: fastest_products(weights))
        swap(module, lambda layer: MeasuredLinear(layer, products[key_of(layer.weight)]))


def measured(layer: nn.Linear) -> MeasuredLinear:
    """The layer with the products that are fastest for it."""
    products = distributed.from_rank_0(lambda: fastest_products([layer.weight]))
    return MeasuredLinear(layer, products[key_of(layer.weight)])


# ---- linear layers -------------------------------------------------------------------------------


def swap(module: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Replace each nn.Linear in the module by `make(linear)`, in place."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, make(child))
        else:
            swap(child, make)


class Int8Linear(nn.Module):
    """Weights rounded to 8 bits, with one scale per output: a quarter of the memory of float32.
    The layer's `name` in its model determines how ranks share it."""

    def __init__(self, linear: nn.Linear, name: str = ""):
        super().__init__()
        weight = linear.weight.detach()
        precise = weight.to(torch.promote_types(weight.dtype, torch.float32))
        largest = distributed.largest_in_rows(precise, f"{name}.weight")
        scale = largest.clamp(min=1e-12) / 127  # (out,)
        self.register_buffer("rounded", (precise / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale.to(weight.dtype))
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        """The dequantised weights."""
        return self.rounded * self.scale[:, None]

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.rounded.to(x.dtype)) * self.scale
        return y if self.bias is None else y + self.bias
