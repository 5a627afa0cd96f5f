"""A simulated device: a PyTorch backend in Python. Its tensors are stored and computed on the host,
but no operator may mix them with host tensors, and every synchronisation and launch is counted. So
"it runs on CUDA and synchronises once per round" is tested without a GPU. `capture` records
operators like a CUDA graph, whose replay repeats them on the same tensors with the same numbers.
"""

import weakref
from collections.abc import Callable, Iterable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("simulated")
DEVICE = torch.device("simulated:0")
aten = torch.ops.aten
SYNCHRONISING = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape


class Simulated(torch.Tensor):
    """A tensor on the simulated device. It wraps the host tensor that holds its values."""

    synchronisations = 0  # how often the host waited for the device
    launches = 0  # operators and copies, but not views; a graph is one
    arriving: list[tuple[torch.Tensor, torch.Tensor]] = []  # copied to the host at the next one
    tape: list | None = None  # the operators of the graph that is being captured
    results: list[weakref.ref] = []  # of graphs: they share a pool, so each overwrites the others'

    @staticmethod
    def __new__(cls, host: torch.Tensor):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(),
            dtype=host.dtype, device=DEVICE,
        )  # fmt: skip
        tensor.host = host
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return compute_on_host(function, args, kwargs or {})

    def tolist(self):  # torch does not support it for subclasses
        return self.cpu().tolist()


class SimulatedDevice(TorchDispatchMode):
    """Inside this context, tensors can be created on the device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return compute_on_host(function, args, kwargs or {})


@torch.inference_mode(False)  # decoding in inference mode may view tensors created outside it
@torch.no_grad()
def compute_on_host(function, args: tuple, kwargs: dict):
    """Run on the host an operator of the device or, inside SimulatedDevice, of the host itself."""
    leaves = tree_leaves((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    simulated = [t for t in tensors if isinstance(t, Simulated)]
    others = [t for t in tensors if not isinstance(t, Simulated)]
    device = next((x for x in leaves if isinstance(x, torch.device)), None)
    on_device = bool(simulated) if device is None else device.type == DEVICE.type
    if function is aten.copy_.default:  # copies the second argument to the first
        on_device = isinstance(args[0], Simulated)
    elif simulated and device is None and any(t.dim() for t in others):  # host scalars are allowed
        raise RuntimeError(f"{function} mixes tensors of the host and of the device")
    if Simulated.tape is not None and (on_device and others or simulated and not on_device):
        if any(t.dim() for t in others) or not on_device or function is aten._to_copy.default:
            raise RuntimeError(f"{function} is not permitted while a graph is captured")
    later = bool(simulated) and not on_device and kwargs.get("non_blocking", False)
    if simulated and not later and (not on_device or synchronises(function, args)):
        synchronise()
    wrappers = {id(t.host): t for t in simulated}

    def to_host(x):
        if isinstance(x, torch.device):
            return torch.device("cpu")
        return x.host if isinstance(x, Simulated) else x

    def wrap(x):
        if not (on_device and isinstance(x, torch.Tensor)):
            return x
        return wrappers[id(x)] if id(x) in wrappers else Simulated(x)  # in place: the same tensor

    host_args, host_kwargs = tree_map(to_host, (args, kwargs))
    result = function(*host_args, **host_kwargs)
    if simulated and not on_device or on_device and not is_view(function, host_args, result):
        Simulated.launches += Simulated.tape is None
    if later:
        unknown = torch.full_like(result, -1)
        Simulated.arriving.append((unknown, result.clone()))
        return unknown
    wrapped = tree_map(wrap, result)
    if on_device and Simulated.tape is not None:
        Simulated.tape.append((function, host_args, host_kwargs, result))
    return wrapped


def is_view(function, args: tuple, result) -> bool:
    """Whether an operator only made views of its arguments, or allocated memory."""
    inputs, outputs = (
        {t.untyped_storage().data_ptr() for t in tree_leaves(x) if isinstance(t, torch.Tensor)}
        for x in (args, result)
    )
    made_nothing = bool(outputs) and outputs <= inputs
    return made_nothing and not function._schema.is_mutable or "empty" in function._schema.name


def synchronise() -> None:
    """The host waits for the device; what is on its way to the host has arrived afterwards."""
    assert Simulated.tape is None, "a synchronisation while a graph is captured"
    Simulated.synchronisations += 1
    for unknown, arrived in Simulated.arriving:
        unknown.copy_(arrived)
    Simulated.arriving.clear()


def capture(run: Callable[[], object]) -> tuple[object, Callable[[], None]]:
    """What `fast.captured.capture` does on a GPU: return the result of `run` and its replay."""
    Simulated.tape = tape = []
    try:
        result = run()
    finally:
        Simulated.tape = None

    Simulated.results.extend(map(weakref.ref, tree_leaves(result)))

    def replay() -> None:
        Simulated.launches += 1
        alive = [ref() for ref in Simulated.results]
        for other in alive:
            if other is not None:
                other.host.fill_(-1)
        poison(tape)
        for function, args, kwargs, expected in tape:
            for old, new in zip(tree_leaves(expected), tree_leaves(function(*args, **kwargs))):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    return result, torch.no_grad()(torch.inference_mode(False)(replay))


def addresses(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """What `fast.captured.addresses` returns on a GPU."""
    return tuple(getattr(x, "host", x).data_ptr() for x in tensors)


def poison(tape: list) -> None:
    """Overwrite what the operators of a graph have allocated: a replay must compute it anew."""
    for function, args, _, result in tape:
        if is_view(function, args, result) or function._schema.is_mutable:
            continue
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                tensor.fill_(-1)


def synchronises(function, args: tuple) -> bool:
    """Whether the host needs values from the device before it can continue."""
    if function in (aten.index.Tensor, aten.index_put_.default):  # only if indexed by a mask
        return any(i is not None and i.dtype == torch.bool for i in args[1])
    return any(tag in function.tags for tag in SYNCHRONISING)


@torch.library.impl("aten::empty.memory_format", "PrivateUse1")
def empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return Simulated(torch.empty(size, dtype=dtype))


@torch.library.impl("aten::empty_strided", "PrivateUse1")
def empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    return Simulated(torch.empty_strided(size, stride, dtype=dtype))


@torch.library.impl("aten::_copy_from", "PrivateUse1")
def copy_from(source, destination, non_blocking=False):
    return compute_on_host(aten.copy_.default, (destination, source), {})
