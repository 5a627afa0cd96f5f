"""Several processes, started by torchrun and numbered by rank. In decoding, they share every layer
of a model: tensor parallelism (Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053). In training,
each holds the whole model and computes a part of the data: data parallelism.

    torchrun --nproc-per-node 2 -m minispec.generate "Once upon a time" --model DIR

A rank's shard of a model is an ordinary Transformer with 1/N of the heads and of the MLP's inner
size: the rows of q, k, v, gate and up, and the columns of o and down. With more ranks than
key/value heads, each rank holds the one that its query heads read. An all-reduce sums the outputs
of each attention and MLP over the ranks. A draft model that N ranks cannot share is whole on each.

Embedding, lm_head and norms are replicated, so ranks that draw from the same seed choose the same
tokens without a message. Measurements differ from rank to rank, so all use those of rank 0.
"""

import atexit
import contextlib
import os
import re
import signal
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minispec.cli import UserError, out_of_memory, user_error
from minispec.model import MLP, Attention, Config, Transformer, count_parameters

T = TypeVar("T")
JOIN_TIMEOUT = timedelta(minutes=5)
TIMEOUT = timedelta(days=7)  # a chat may be idle; a process that has ended is noticed at once
NOT_COMPILED = "a model that several processes share cannot be compiled: omit --compile"
# dimension -> the weights that ranks split along it; those of Int8Linear are `rounded` and `scale`
SPLIT = {
    0: re.compile(r".*\b(self_attn\.[qkv]|mlp\.(gate|up))_proj\.(weight|bias|rounded|scale)"),
    1: re.compile(r".*\b(self_attn\.o|mlp\.down)_proj\.(weight|rounded)"),
}
RANK_0_BIASES = "self_attn.o_proj.bias", "mlp.down_proj.bias"


@dataclass(frozen=True)
class Group:
    """The rank of this process in a group of processes, and their number."""

    rank: int = 0
    size: int = 1


world = Group()  # all processes that torchrun started
tensor_parallel = Group()  # those that share each model: the world in generate and bench


def join(share_models: bool = False) -> None:
    """Join the processes that torchrun started, if it did. The device `cuda` becomes this process's
    own, and only rank 0 prints. If they are to `share_models`, `load` returns this rank's shard
    from now on. Raises UserError if variables are not as torchrun sets them."""
    global world, tensor_parallel
    if world.size == 1 and os.environ.get("WORLD_SIZE") not in (None, "", "1"):
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # A handler in Python would wait for the end of an exchange, which may never come.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        connect()
        if gpus := torch.cuda.device_count():
            if (local_rank := dist.get_node_local_rank(0)) >= gpus:
                raise UserError(f"there are {gpus} GPUs here, too few for process {local_rank + 1}")
            torch.cuda.set_device(local_rank)
        world = Group(dist.get_rank(), dist.get_world_size())
        if world.rank:
            sys.stdout = sys.stderr = open(os.devnull, "w")
            sys.excepthook = lambda *error: traceback.print_exception(*error, file=sys.__stderr__)
    if share_models:
        tensor_parallel = world


def connect() -> None:
    """Find the other processes. Raises UserError if they are not all there after JOIN_TIMEOUT."""
    with user_error("the processes did not find each other; start them with torchrun "
                    "--nproc-per-node N, or unset WORLD_SIZE"):  # fmt: skip
        store, rank, processes = next(dist.rendezvous("env://", timeout=JOIN_TIMEOUT))
        dist.init_process_group(store=store, rank=rank, world_size=processes, timeout=TIMEOUT)
    atexit.register(dist.destroy_process_group)


def require_one_process(name: str) -> None:
    """Raise UserError if torchrun started several processes."""
    join()
    with together():
        if world.size > 1:
            raise UserError(f"{name} runs in one process: start it without torchrun")


# ---- a rank's shard of a model -------------------------------------------------------------------


def shard_config(config: Config, n: int | None = None, draft: bool = False) -> Config:
    """The config of a rank's shard of a model that `n` ranks share (default: the current number).
    Raises UserError if they cannot share it; a `draft` is left whole instead."""
    n = tensor_parallel.size if n is None else n
    copies = n // config.kv_heads if n % config.kv_heads == 0 else 1
    for name, parts in ("heads", n), ("kv_heads", n // copies), ("intermediate_size", n):
        if (size := getattr(config, name)) % parts:
            if draft:
                return config
            divisor = " or a divisor" if name == "kv_heads" else ""
            raise UserError(f"{n} processes cannot share this model: its {name}, {size}, must be a "
                            f"multiple{divisor} of the number of processes")  # fmt: skip
    return replace(
        config, heads=config.heads // n, kv_heads=config.kv_heads * copies // n,
        intermediate_size=config.intermediate_size // n, ranks=n, kv_copies=copies,
    )  # fmt: skip


def shard(name: str, tensor: Tensor, config: Config) -> Tensor:
    """This rank's shard of a checkpoint's tensor, or all of it if it is replicated. `tensor` may
    also be a slice of safetensors, of which only the shard is read."""
    rank = tensor_parallel.rank if config.ranks > 1 else 0
    dim, parts = split_of(name, config)
    shape = tensor.shape if isinstance(tensor, Tensor) else tensor.get_shape()
    if parts == 1 or len(shape) <= dim:  # `fill` names a tensor without `dim`
        whole = tensor if isinstance(tensor, Tensor) else tensor[...]
        return torch.zeros_like(whole) if rank and name.endswith(RANK_0_BIASES) else whole
    if shape[dim] % parts:
        raise UserError(f"{name} has the shape {list(shape)}, which {config.ranks} processes "
                        "cannot share")  # fmt: skip
    start = rank * parts // config.ranks * shape[dim] // parts
    own = (slice(None),) * dim + (slice(start, start + shape[dim] // parts),)
    return tensor[own].clone()  # not a view of the whole


def split_of(name: str, config: Config) -> tuple[int, int]:
    """The dimension along which ranks split the weight of this name, and the number of parts: 1 if
    it is replicated, fewer than ranks if several hold the same keys and values."""
    dim = next((dim for dim, names in SPLIT.items() if names.fullmatch(name)), None)
    copies = config.kv_copies if re.search(r"self_attn\.[kv]_proj", name) else 1
    return (0, 1) if dim is None else (dim, config.ranks // copies)


def count_whole(module: nn.Module) -> int:
    """Number of parameters in the shards of all ranks together. A replicated weight counts once."""
    config = getattr(module, "config", None)
    tensors = module.state_dict() if config else {}  # Medusa heads are replicated
    further = (t.numel() * (split_of(name, config)[1] - 1) for name, t in tensors.items())
    return count_parameters(module) + sum(further)


def largest_in_rows(weight: Tensor, name: str) -> Tensor:
    """The largest absolute value in each row of a weight matrix. `weight` may be a shard of it."""
    largest = weight.abs().amax(1)  # (out,)
    is_split = SPLIT[1].fullmatch(name)  # a shard has parts of all rows
    return all_reduce(largest, dist.ReduceOp.MAX) if is_split else largest


def all_reduce_outputs(module: nn.Module) -> None:
    """Let each attention and MLP in a rank's shard of a module return the sum over all ranks, which
    has the same bits on each."""
    if module.config.ranks == 1:
        return
    if isinstance(module, Transformer):
        module.register_forward_pre_hook(lambda _, inputs: check_agreement(*inputs))
    for layer in module.modules():
        if isinstance(layer, Attention | MLP):
            layer.register_forward_hook(lambda _, inputs, x: all_reduce(x))


def check_agreement(*values: object) -> None:
    """Raise UserError on all ranks that share a model unless the lists and tensors among these
    values are the same on all. (Ranks choose tokens alone, and processors may round differently.)
    """
    if tensor_parallel.size == 1:
        return
    arrays = [torch.as_tensor(x).cpu().numpy() for x in values if isinstance(x, list | Tensor)]
    digest = zlib.crc32(b"".join(array.tobytes() for array in arrays))
    largest = all_reduce(torch.tensor([digest, -digest]), dist.ReduceOp.MAX)
    if largest.sum():  # the largest digest minus the smallest
        raise UserError("the ranks computed different tokens; use processors of one kind")


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Raise UserError, on every rank that is left, if one has ended in the meantime."""
    try:
        yield
    except RuntimeError as error:
        sys.stderr = sys.__stderr__ or sys.stderr  # rank 0, which reports errors, may have ended
        # without torch's source line and advice
        reason = str(error).splitlines()[0].rpartition("] ")[2].partition(". ")[0]
        raise UserError(f"the exchange between the {world.size} processes failed; one of them "
                        f"has probably ended ({reason})") from None  # fmt: skip


# ---- messages between processes -----------------------------------------------------------------


def from_rank_0(function: Callable[[], T]) -> T:
    """Call the function on rank 0 only; return its result, or raise its error, on all ranks."""
    if tensor_parallel.size == 1:
        return function()
    with together():
        result = function() if tensor_parallel.rank == 0 else None
    return all_gather(result)[0]


@contextlib.contextmanager
def together() -> Iterator[None]:
    """If the block fails in any process, raise UserError with the first one's message in all of
    them. (Otherwise the others would wait for a process that has ended.)"""
    message = None
    try:
        yield
    except (UserError, OSError, MemoryError, RuntimeError) as error:
        bug = isinstance(error, RuntimeError) and not out_of_memory(error)
        if world.size == 1 or bug:
            raise
        message = str(error) or "not enough memory"
    failed = [(rank, text) for rank, text in enumerate(all_gather(message)) if text is not None]
    if failed:
        where = f"rank {failed[0][0]}: " if len(failed) < world.size else ""
        raise UserError(where + failed[0][1])


def all_gather(value: T) -> list[T]:
    """The values of all processes, by rank, in each of them."""
    values = [value] * world.size
    if world.size > 1:
        with connected():
            dist.all_gather_object(values, value)
    return values


def all_reduce(x: Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM) -> Tensor:
    """The sum of a tensor, or another reduction, over all processes, without gradients."""
    if world.size == tensor_parallel.size == 1:
        return x
    x = x.detach().clone(memory_format=torch.contiguous_format)
    with connected():
        dist.all_reduce(x, op)
    return x
