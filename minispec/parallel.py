"""Several processes, started by torchrun and numbered by rank. In decoding, they share every layer
of a model: tensor parallelism (Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053). In training,
each holds the whole model and computes a part of the data: data parallelism.

    torchrun --nproc-per-node 2 -m minispec.generate "Once upon a time" --model DIR

A rank's shard of a model is an ordinary Transformer with 1/N of the heads and of the MLP's inner
size. From the checkpoint it reads the rows of q, k, v, gate and up that compute its part, and the
columns of o and down that multiply it. What its attention and its MLP return are then terms of a
sum over the ranks. Apart from a digest of the tokens (see `check_agreement`), this all-reduce is
all that ranks exchange in a pass; the cache holds the rank's own heads.

Embedding, lm_head and norms are replicated: drafts and heads use the first two, and ranks that
compute the same logits and draw from the same seed choose the same tokens without a message.
Measurements differ from rank to rank, so all of them use those of rank 0.
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

from minispec.errors import UserError, out_of_memory
from minispec.model import MLP, Attention, Config, Transformer, count_parameters

T = TypeVar("T")
JOIN_TIMEOUT = timedelta(minutes=5)
TIMEOUT = timedelta(days=7)  # a chat may be idle; a process that has ended is noticed at once
NOT_COMPILED = "a model that several processes share cannot be compiled: omit --compile"
# names of weights; those of Int8Linear are `rounded` and `scale`
COLUMN_PARALLEL = re.compile(
    r"(.*\.)?(self_attn\.[qkv]_proj|mlp\.(gate|up)_proj)\.(weight|bias|rounded|scale)"
)
ROW_PARALLEL = re.compile(r"(.*\.)?(self_attn\.o_proj|mlp\.down_proj)\.(weight|rounded)")
RANK_0_BIASES = re.compile(r"(.*\.)?(self_attn\.o_proj|mlp\.down_proj)\.bias")


@dataclass(frozen=True)
class Group:
    """The rank of this process in a group of processes, and their number."""

    rank: int = 0
    size: int = 1


world = Group()  # all processes that torchrun started
tensor_parallel = Group()  # those that share each model: the world in generate and bench


def join_tensor_parallel() -> None:
    """Join the processes that torchrun started, if it did, and share models with them. From now on,
    `load` reads only this rank's shard of a model; of a file that is not .safetensors, it reads all
    and keeps the shard. Raises UserError as `join` does."""
    global tensor_parallel
    join()
    tensor_parallel = world


def join() -> None:
    """Join the processes that torchrun started, if it did. The device `cuda` becomes the process's
    own, and only rank 0 prints. Raises UserError if variables are not as torchrun sets them."""
    global world
    size = os.environ.get("WORLD_SIZE") or "1"
    if size == "1" or world.size > 1:
        return
    check_variables()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # A handler in Python would have to wait for the end of an exchange, which may never come.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        store, rank, processes = next(dist.rendezvous("env://", timeout=JOIN_TIMEOUT))
        dist.init_process_group(store=store, rank=rank, world_size=processes, timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"the {size} processes did not find each other: {error}") from None
    atexit.register(dist.destroy_process_group)
    if torch.cuda.is_available():
        gpus, local_rank = torch.cuda.device_count(), int(os.environ["LOCAL_RANK"])
        if local_rank >= gpus:
            raise UserError(f"there are {gpus} GPUs here, too few for process {local_rank + 1}")
        torch.cuda.set_device(local_rank)
    world = Group(dist.get_rank(), dist.get_world_size())
    if world.rank:
        sys.stdout = sys.stderr = open(os.devnull, "w")
        sys.excepthook = lambda *error: traceback.print_exception(*error, file=sys.__stderr__)


def check_variables() -> None:
    """Raise UserError unless the environment has the variables that torchrun sets."""
    size = os.environ["WORLD_SIZE"]
    processes = int(size) if size.isdecimal() else 0
    limits = {"RANK": processes, "LOCAL_RANK": processes, "MASTER_PORT": 2**16}
    values = {name: os.environ.get(name, "") for name in limits}
    invalid = [f"{n}={v}" for n, v in values.items() if not (v.isdecimal() and int(v) < limits[n])]
    if not os.environ.get("MASTER_ADDR"):
        invalid.append("MASTER_ADDR=")
    if invalid:
        raise UserError(f"WORLD_SIZE={size}, but {', '.join(invalid)} is missing or invalid: start "
                        "processes with torchrun --nproc-per-node N, or unset it")  # fmt: skip


def require_one_process(name: str) -> None:
    """Raise UserError if torchrun started several processes."""
    join()
    with together():
        if world.size > 1:
            raise UserError(f"{name} runs in one process: start it without torchrun")


# ---- a rank's shard of a model -------------------------------------------------------------------


def shard_config(config: Config, n: int | None = None) -> Config:
    """The config of a rank's shard of a model that `n` ranks share (default: the current number).
    Raises UserError if a size is not divisible by it."""
    n = tensor_parallel.size if n is None else n
    sizes = {name: getattr(config, name) for name in ("heads", "kv_heads", "intermediate_size")}
    for name, size in sizes.items():
        if size % n:
            raise UserError(f"{n} processes cannot share this model: its {name}, {size}, must be a "
                            "multiple of the number of processes")  # fmt: skip
    return replace(config, **{name: size // n for name, size in sizes.items()})


def shard(name: str, tensor: Tensor) -> Tensor:
    """The rank's shard of a checkpoint's tensor: the whole of it, if it is replicated. `tensor` may
    also be a slice of safetensors, of which only the shard is read."""
    rank, n = tensor_parallel.rank, tensor_parallel.size
    shape = tensor.shape if isinstance(tensor, Tensor) else tensor.get_shape()
    dim = 1 if ROW_PARALLEL.fullmatch(name) else 0
    if n == 1 or not is_sharded(name) or len(shape) <= dim:  # `fill` names a tensor without `dim`
        whole = tensor if isinstance(tensor, Tensor) else tensor[...]
        return torch.zeros_like(whole) if rank and RANK_0_BIASES.fullmatch(name) else whole
    if shape[dim] % n:
        raise UserError(f"{name} has the shape {list(shape)}, which {n} processes cannot share")
    share = shape[dim] // n
    own = slice(rank * share, (rank + 1) * share)
    return (tensor[own] if dim == 0 else tensor[:, own]).clone()  # not a view of the whole


def is_sharded(name: str) -> bool:
    """Whether each rank holds only a shard of the weight of this name."""
    return (COLUMN_PARALLEL.fullmatch(name) or ROW_PARALLEL.fullmatch(name)) is not None


def count_whole(module: nn.Module) -> int:
    """Number of parameters in the shards of all ranks together. A replicated weight counts once."""
    sharded = sum(t.numel() for name, t in module.state_dict().items() if is_sharded(name))
    return count_parameters(module) + (tensor_parallel.size - 1) * sharded


def largest_in_rows(weight: Tensor, name: str) -> Tensor:
    """The largest absolute value in each row of a weight matrix. `weight` may be a shard of it."""
    largest = weight.abs().amax(1)  # (out,)
    if tensor_parallel.size > 1 and ROW_PARALLEL.fullmatch(name):  # a shard has parts of all rows
        with connected():
            dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest


def all_reduce_outputs(module: nn.Module) -> None:
    """Let each attention and MLP in a rank's shard of a module return the sum over all ranks."""
    if tensor_parallel.size == 1:
        return
    if isinstance(module, Transformer):
        module.register_forward_pre_hook(lambda _, inputs: check_agreement(*inputs))
    for layer in module.modules():
        if isinstance(layer, Attention | MLP):
            layer.register_forward_hook(all_reduce_output)


def all_reduce_output(layer: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
    """A forward hook. Every rank gets the same bits."""
    output = output.contiguous()
    with connected():
        dist.all_reduce(output)
    return output


def check_agreement(*values: object) -> None:
    """Raise UserError on all ranks that share a model if a list or tensor among these values is not
    the same on all. Each rank chooses tokens by itself, and processors may round differently."""
    if tensor_parallel.size == 1:
        return
    arrays = [torch.as_tensor(x).cpu().numpy() for x in values if isinstance(x, list | Tensor)]
    digest = zlib.crc32(b"".join(array.tobytes() for array in arrays))
    largest = torch.tensor([digest, -digest])
    with connected():
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    if largest.sum():  # the largest digest minus the smallest
        raise UserError("the ranks computed different tokens; use processors of one kind")


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Raise UserError if a rank has ended in the meantime."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0].rpartition("] ")[2]  # without torch's source line
        raise UserError(f"the exchange between the {world.size} processes failed; one of them "
                        f"has probably ended ({reason})") from None  # fmt: skip


# ---- messages between processes -----------------------------------------------------------------


def from_rank_0(function: Callable[[], T]) -> T:
    """If processes share a model, call the function on rank 0 only, and return its result, or raise
    its UserError, on all."""
    if tensor_parallel.size == 1:
        return function()
    result: list = [None, None]  # what the function returns, the message of its UserError
    if tensor_parallel.rank == 0:
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
        if world.size == 1 or bug:
            raise
        message = str(error) or "not enough memory"
    messages = all_gather(message)
    failed = [rank for rank, message in enumerate(messages) if message is not None]
    if failed:
        where = f"rank {failed[0]}: " if len(failed) < world.size else ""
        raise UserError(where + messages[failed[0]])


def all_gather(value: T) -> list[T]:
    """The values of all processes, by rank, in each of them."""
    values = [value] * world.size
    if world.size > 1:
        with connected():
            dist.all_gather_object(values, value)
    return values


def gather(value: T) -> list[T]:
    """The values of all processes, by rank, in rank 0; an empty list in the others."""
    values = [value] * world.size if world.rank == 0 else []
    if world.size > 1:
        with connected():
            dist.gather_object(value, values or None)
    return values


def all_reduce(x: Tensor) -> Tensor:
    """The sum of a tensor over all processes, without gradients."""
    if world.size > 1:
        x = x.detach().clone()
        with connected():
            dist.all_reduce(x)
    return x
