"""A simulated device: a PyTorch backend in Python. Its tensors are stored and computed on the host,
but no operator may mix them with host tensors, and every synchronisation is counted. So "it runs on
CUDA and synchronises once per round" is tested without a GPU.
"""

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
    if simulated and (not on_device or synchronises(function, args)):
        Simulated.synchronisations += 1
    wrappers = {id(t.host): t for t in simulated}

    def to_host(x):
        if isinstance(x, torch.device):
            return torch.device("cpu")
        return x.host if isinstance(x, Simulated) else x

    def wrap(x):
        if not (on_device and isinstance(x, torch.Tensor)):
            return x
        return wrappers[id(x)] if id(x) in wrappers else Simulated(x)  # in place: the same tensor

    args, kwargs = tree_map(to_host, (args, kwargs))
    return tree_map(wrap, function(*args, **kwargs))


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
