"""Several processes, started by torchrun. In decoding, they share every layer of a model: tensor
parallelism (Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053). In distill, each holds the whole
model and computes a part of the data (see `join`).

    torchrun --nproc-per-node 2 -m minispec.generate "Once upon a time" --model DIR

A rank's model is an ordinary Transformer with 1/N of the heads and of the MLP's inner size. From
the checkpoint it reads the rows of q, k, v, gate and up that compute its part, and the columns of o
and down that multiply it. What its attention and its MLP return are then terms of a sum over the
ranks. This sum is all that ranks exchange in a pass; the cache holds the rank's own heads.

Embedding, lm_head and norms are whole on every rank: drafts and heads use the first two, and ranks
that compute the same logits and draw from the same seed choose the same tokens without a message.
Measurements differ from rank to rank, so all of them use those of rank 0.
"""

import atexit
import contextlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minispec.errors import UserError, out_of_memory
from minispec.model import MLP, Attention, Config

T = TypeVar("T")
PATIENCE = timedelta(days=7)  # a chat may be idle; a process that has ended is noticed at once
# set by torchrun
NUMERIC_VARIABLES = "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"
ADDRESS_VARIABLES = ("MASTER_ADDR",)
COLUMN_PARALLEL = re.compile(r"(.*\.)?(self_attn\.[qkv]_proj|mlp\.(gate|up)_proj)\.(weight|bias)")
ROW_PARALLEL = re.compile(r"(.*\.)?(self_attn\.o_proj|mlp\.down_proj)\.weight")
RANK_0_BIASES = re.compile(r"(.*\.)?(self_attn\.o_proj|mlp\.down_proj)\.bias")


@dataclass(frozen=True)
class Ranks:
    """The number of a process and how many there are."""

    rank: int = 0
    size: int = 1


processes = Ranks()  # those that torchrun started
ranks = Ranks()  # those that share the models that they load


def start() -> None:
    """Join the processes that torchrun started, if it did, and share models with them. From now on,
    `load` reads only this rank's part of a model; of a file that is not .safetensors, it reads all
    and keeps the part. Raises UserError as `join` does."""
    global ranks
    join()
    ranks = processes


def join() -> None:
    """Join the processes that torchrun started, if it did. The device `cuda` becomes the process's
    own, and only rank 0 prints. Raises UserError if variables that torchrun sets are missing."""
    global processes
    size = os.environ.get("WORLD_SIZE") or "1"
    if size == "1" or processes.size > 1:
        return
    invalid = [name for name in NUMERIC_VARIABLES if not os.environ.get(name, "").isdecimal()]
    invalid += [name for name in ADDRESS_VARIABLES if not os.environ.get(name)]
    if invalid:
        raise UserError(f"WORLD_SIZE is {size}, but torchrun has not set {', '.join(invalid)}: "
                        "start N processes with torchrun --nproc-per-node N -m …")  # fmt: skip
    try:
        dist.init_process_group(timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"the {size} processes did not find each other: {error}") from None
    atexit.register(dist.destroy_process_group)
    if torch.cuda.is_available():
        gpus, local_rank = torch.cuda.device_count(), int(os.environ["LOCAL_RANK"])
        if local_rank >= gpus:
            raise UserError(f"there are {gpus} GPUs here, too few for process {local_rank + 1}")
        torch.cuda.set_device(local_rank)
    processes = Ranks(dist.get_rank(), dist.get_world_size())
    if processes.rank:
        sys.stdout = sys.stderr = open(os.devnull, "w")
        sys.excepthook = lambda *error: traceback.print_exception(*error, file=sys.__stderr__)


def require_one_process(name: str) -> None:
    """Raise UserError if torchrun started several processes."""
    join()
    with together():
        if processes.size > 1:
            raise UserError(f"{name} runs in one process: start it without torchrun")


# ---- a rank's part of a model --------------------------------------------------------------------


def narrow(config: Config, n: int | None = None) -> Config:
    """The config of a rank's part of a model that `n` ranks share (default: the current number).
    Raises UserError if a size is not divisible by it."""
    n = ranks.size if n is None else n
    sizes = {name: getattr(config, name) for name in ("heads", "kv_heads", "intermediate_size")}
    for name, size in sizes.items():
        if size % n:
            raise UserError(f"{n} processes cannot share this model: its {name}, {size}, must be a "
                            "multiple of the number of processes")  # fmt: skip
    return replace(config, **{name: size // n for name, size in sizes.items()})


def part_of(name: str, tensor: Tensor) -> Tensor:
    """The rank's part of a checkpoint's tensor. `tensor` may also be a slice of safetensors, of
    which only the part is read."""
    match = COLUMN_PARALLEL.fullmatch(name) or ROW_PARALLEL.fullmatch(name)
    shape = tensor.shape if isinstance(tensor, Tensor) else tensor.get_shape()
    dim = 0 if match and match.re is COLUMN_PARALLEL else 1
    if ranks.size == 1 or match is None or len(shape) <= dim:  # `fill` names a tensor without `dim`
        whole = tensor if isinstance(tensor, Tensor) else tensor[...]
        return torch.zeros_like(whole) if ranks.rank and RANK_0_BIASES.fullmatch(name) else whole
    if shape[dim] % ranks.size:
        raise UserError(f"{name} has the shape {list(shape)}, which {ranks.size} processes cannot "
                        "share")  # fmt: skip
    share = shape[dim] // ranks.size
    part = slice(ranks.rank * share, (ranks.rank + 1) * share)
    return tensor[part] if dim == 0 else tensor[:, part]


def add_up(module: nn.Module) -> None:
    """Let each attention and MLP in a rank's part of a module return the sum over all ranks."""
    if ranks.size == 1:
        return
    for layer in module.modules():
        if isinstance(layer, Attention | MLP):
            layer.register_forward_hook(sum_over_ranks)


def sum_over_ranks(layer: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
    """A forward hook. Every rank gets the same bits."""
    output = output.contiguous()
    with connected():
        dist.all_reduce(output)
    return output


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Raise UserError if a rank has ended in the meantime."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0].rpartition("] ")[2]  # without torch's source line
        raise UserError(f"the exchange between the {processes.size} processes failed; one of them "
                        f"has probably ended ({reason})") from None  # fmt: skip


# ---- messages between processes -----------------------------------------------------------------


def from_rank_0(function: Callable[[], T]) -> T:
    """If processes share a model, call the function on rank 0 only, and return its result, or raise
    its UserError, on all."""
    if ranks.size == 1:
        return function()
    result: list = [None, None]  # what the function returns, the message of its UserError
    if ranks.rank == 0:
        try:
            result[0] = function()
        except UserError as error:
            result[1] = str(error)
    with connected():
        dist.broadcast_object_list(result)
    if result[1] is not None:
        raise UserError(result[1])
    return result[0]


@contextlib.contextmanager
def together() -> Iterator[None]:
    """If the block fails in any process, raise UserError in all of them, with the first one's
    message. Without this, the others would wait for a process that has ended."""
    message = None
    try:
        yield
    except (UserError, OSError, MemoryError, RuntimeError) as error:
        bug = isinstance(error, RuntimeError) and not out_of_memory(error)
        if processes.size == 1 or bug:
            raise
        message = str(error) or "not enough memory"
    messages = gather(message)
    failed = [rank for rank, message in enumerate(messages) if message is not None]
    if failed:
        where = f"rank {failed[0]}: " if len(failed) < processes.size else ""
        raise UserError(where + messages[failed[0]])


def gather(value: T) -> list[T]:
    """The values of all processes, by rank, in each of them."""
    values = [value] * processes.size
    if processes.size > 1:
        with connected():
            dist.all_gather_object(values, value)
    return values


def sum_over_processes(x: Tensor) -> Tensor:
    """The sum of a tensor over all processes, without gradients."""
    if processes.size > 1:
        x = x.detach().clone()
        with connected():
            dist.all_reduce(x)
    return x
