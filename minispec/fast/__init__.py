"""Everything that makes a model faster or smaller, applied to the plain model after loading.

The model itself knows nothing about this, and nothing is ever undone: to get the plain model back,
load it again.
"""

from collections.abc import Callable

import torch
from torch import nn

from minispec import distributed
from minispec.checkpoints.load import pick_device
from minispec.cli import UserError, note
from minispec.fast.bitwise import NOT_COMPILED, make_bitwise
from minispec.fast.captured import capture_passes
from minispec.fast.compiled import CompiledLinear, compile_passes, is_on_gpu
from minispec.fast.products import (
    INT8_ROWS,
    ROUNDED_BYTES,
    DraftLinear,
    Int8Linear,
    MeasuredLinear,
    faster_rounded,
    fastest_products,
    int8_dtype,
    key_of,
)
from minispec.methods.fastmtp import RecurrentHead
from minispec.methods.medusa import MedusaHeads
from minispec.methods.vocabulary import Compressed
from minispec.model import Transformer


def optimize(
    model: Transformer, int8: bool = False, compiled: bool = False, bitwise: bool = False
) -> None:
    """Optimise a loaded model in place, as `generate` and `bench` do. On a CPU, each linear layer
    gets the matrix products that are fastest on this machine (see products.py). They are measured
    the first time, in seconds for a small model. Heads that a method finds next to the model
    are optimised, too, and their weights are rounded to 8 bits if that is faster. Afterwards, the
    weights must not change.

    On a GPU, passes run as CUDA graphs (see captured.py), unless several processes share the model.

    If requested, weights are rounded to int8 and passes are compiled. With `bitwise`, a row of a
    pass has the same bits, however many rows share it (see bitwise.py). Raises UserError if this is
    impossible here.
    """
    if int8:
        names = {layer: name for name, layer in model.named_modules()}
        swap(model, lambda layer: Int8Linear(layer, names[layer]))
        choose_int8_products(model)
    if bitwise and compiled:
        raise UserError(NOT_COMPILED)
    if bitwise:
        return make_bitwise(model)
    if compiled and distributed.tensor_parallel.size > 1:
        raise UserError(distributed.NOT_COMPILED)
    if compiled:
        compile_passes(model)
        if not is_on_gpu(model) and isinstance(model.lm_head, nn.Linear):
            model.lm_head = CompiledLinear(model.lm_head)
    if is_on_gpu(model) and distributed.tensor_parallel.size == 1:
        capture_passes(model)
    optimize_layers(model)


def optimize_drafter(drafter: dict, model: Transformer) -> None:
    """Optimise what a method drafts with for an optimised model: the modules and the vocabulary in
    `drafter`, a method's options."""
    if type(model.lm_head) is nn.Linear and not model.compiled and not model.graphs:
        return  # the model is not optimised
    for value in drafter.values():
        if isinstance(value, RecurrentHead | MedusaHeads):
            swap(value, for_drafts)
        elif isinstance(value, Transformer):
            optimize_layers(value)
        elif isinstance(value, Compressed) and value.weight.device.type == "cpu":
            value.set_layer(for_drafts)
        if isinstance(value, RecurrentHead) and model.compiled:
            compile_passes(value)
            compile_passes(model, value.feature_layers)
        if isinstance(value, Transformer | RecurrentHead | MedusaHeads) and model.graphs:
            capture_passes(value)


def optimize_layers(module: nn.Module) -> None:
    """Let each linear layer on a CPU use the fastest products."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    weights = [layer.weight for layer in layers]
    if weights and weights[0].device.type == "cpu":
        products = distributed.from_rank_0(lambda: fastest_products(weights))
        swap(module, lambda layer: MeasuredLinear(layer, products[key_of(layer.weight)]))


def quantized_dtype(dtype: str, device: str) -> str | torch.dtype:
    """The dtype for a model with int8 weights: on a CPU, `auto` is the faster one there."""
    if dtype != "auto" or pick_device(device).type != "cpu":
        return dtype
    if (chosen := int8_dtype()) == torch.bfloat16:
        note("int8 weights: computing in bfloat16, which is faster here than --dtype float32")
    return chosen


def choose_int8_products(model: Transformer) -> None:
    """Let each int8 layer on a CPU use the fastest products, if its rows are in bfloat16."""
    layers = [layer for layer in model.modules() if isinstance(layer, Int8Linear)]
    if model.device.type == "cpu" and model.dtype == INT8_ROWS:
        weights = [layer.rounded for layer in layers]
        products = distributed.from_rank_0(lambda: fastest_products(weights))
        for layer in layers:
            layer.products = products[key_of(layer.rounded)]


def for_drafts(layer: nn.Linear) -> nn.Module:
    """The layer with the products that are fastest for it on a CPU. In float32 and bfloat16, the
    weights of a large layer are rounded to 8 bits if that is faster: a draft need not be precise,
    since the target verifies it."""
    weight, key = layer.weight, key_of(layer.weight)
    if weight.device.type != "cpu":
        return layer
    rounds = weight.dtype in (torch.float32, torch.bfloat16) and weight.nbytes >= ROUNDED_BYTES
    if rounds and distributed.tensor_parallel.size == 1 and faster_rounded([weight])[key]:
        rounded = DraftLinear(layer)
        rounded.products = fastest_products([rounded.rounded])[key_of(rounded.rounded)]
        return rounded
    products = distributed.from_rank_0(lambda: fastest_products([weight]))
    return MeasuredLinear(layer, products[key])


# ---- linear layers -------------------------------------------------------------------------------


def swap(module: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Replace each nn.Linear in the module by `make(linear)`, in place."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, make(child))
        else:
            swap(child, make)
