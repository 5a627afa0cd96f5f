"""A device that is not there: Python poses as a backend of PyTorch. Its tensors lie on the host,
where they are computed, but no operator may mix them with the host's own, and what crosses to the
host is counted. So "it runs on CUDA, and waits for it once a round" is tested without a GPU.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("simulated")
DEVICE = torch.device("simulated:0")
aten = torch.ops.aten
WAITS = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape


class Simulated(torch.Tensor):
    """A tensor of the device, around the host's tensor that holds its numbers."""

    crossings = 0  # how often the host waited for the device

    @staticmethod
    def __new__(cls, host: torch.Tensor):
        made = torch.Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(),
            dtype=host.dtype, device=DEVICE,
        )  # fmt: skip
        made.host = host
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return computed(function, args, kwargs or {})

    def tolist(self):  # which torch does not offer to subclasses
        return self.cpu().tolist()


class Running(TorchDispatchMode):
    """Within, tensors can be made on the device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return computed(function, args, kwargs or {})


@torch.inference_mode(False)  # what decoding makes in it may be views of what was made without
@torch.no_grad()
def computed(function, args: tuple, kwargs: dict):
    """On the host, what was asked of the device or, within Running, of the host itself."""
    leaves = tree_leaves((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    ours = [t for t in tensors if isinstance(t, Simulated)]
    others = [t for t in tensors if not isinstance(t, Simulated)]
    device = next((x for x in leaves if isinstance(x, torch.device)), None)
    here = bool(ours) if device is None else device.type == DEVICE.type
    if function is aten.copy_.default:  # into the first from the second
        here = isinstance(args[0], Simulated)
    elif ours and device is None and any(t.dim() for t in others):  # the host's numbers may be used
        raise RuntimeError(f"{function} mixes tensors of the host and of the device")
    if ours and (not here or waits(function, args)):
        Simulated.crossings += 1
    known = {id(t.host): t for t in ours}

    def on_host(x):
        if isinstance(x, torch.device):
            return torch.device("cpu")
        return x.host if isinstance(x, Simulated) else x

    def wrapped(x):
        if not (here and isinstance(x, torch.Tensor)):
            return x
        return known[id(x)] if id(x) in known else Simulated(x)  # in place: the same tensor again

    args, kwargs = tree_map(on_host, (args, kwargs))
    return tree_map(wrapped, function(*args, **kwargs))


def waits(function, args: tuple) -> bool:
    """Whether the host must know numbers of the device to go on."""
    if function in (aten.index.Tensor, aten.index_put_.default):  # by a mask
        return any(i is not None and i.dtype == torch.bool for i in args[1])
    return any(tag in function.tags for tag in WAITS)


@torch.library.impl("aten::empty.memory_format", "PrivateUse1")
def empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return Simulated(torch.empty(size, dtype=dtype))


@torch.library.impl("aten::empty_strided", "PrivateUse1")
def empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    return Simulated(torch.empty_strided(size, stride, dtype=dtype))


@torch.library.impl("aten::_copy_from", "PrivateUse1")
def copy_from(source, destination, non_blocking=False):
    return computed(aten.copy_.default, (destination, source), {})
