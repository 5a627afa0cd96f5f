"""Lazy uniform random numbers: each comparison with one branches."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

ALIASES = {
    "le": "lt", "less": "lt", "less_equal": "lt", "ge": "gt", "greater": "gt",
    "greater_equal": "gt", "multiply": "mul", "divide": "div", "true_divide": "div",
    "subtract": "sub", "negative": "neg", "bucketize": "searchsorted", "digitize": "searchsorted",
}  # fmt: skip
REFLECTED = {"lt": "gt", "gt": "lt", "add": "add", "mul": "mul", "sub": "rsub", "div": "rdiv",
             "searchsorted": "searchsorted"}  # fmt: skip
VIEWS = ("reshape", "view", "squeeze", "unsqueeze", "flatten", "expand", "ravel", "select",
         "permute", "transpose", "t", "index_select", "gather")  # fmt: skip
UNCHANGED = ("to", "cpu", "cuda", "float", "double", "clone", "detach", "contiguous", "type_as",
             "clamp", "clamp_min", "numpy", "astype", "copy")  # fmt: skip
NEGLIGIBLE = 1e-6  # what decoders add to a random number to avoid log 0 or a division by 0


class CannotEnumerate(BaseException):
    """The reason why a decoder's outcomes cannot be enumerated. It is not an Exception, so that a
    decoder's own handlers let it through."""


class SymbolicUniform:
    """Stands in for a tensor of lazy random numbers: scale · g(u) + shift.

    `index` identifies the uniform number u behind each element; its `source`, an
    InterceptedRandomness, makes the choices. g is "u" for u itself,
    "log" for log u, and "gumbel" for -log(-log u), a Gumbel number. An exponential waiting time
    E = -log u therefore has scale -1. A quotient x / E, of which only the argmax is ever needed,
    has g "race" and is represented by its logarithm. `origin` is the library that the number seems
    to come from ("torch", "numpy" or "python"); results of choices have its types.
    """

    def __init__(self, source, index: Tensor, g="u", scale=1.0, shift=0.0, origin="torch"):
        self.source, self.g, self.origin = source, g, origin
        parts = torch.broadcast_tensors(index, to_float64(scale), to_float64(shift))
        self.index, self.scale, self.shift = parts
        self.shape, self.device = self.index.shape, self.index.device

    @classmethod
    def __torch_function__(cls, function, types, args=(), options=None):
        return dispatch(function.__name__, args, options or {})

    def __array_ufunc__(self, ufunc, method, *args, **options):
        if method != "__call__" or options:
            raise CannotEnumerate(f"it calls numpy's {ufunc.__name__}.{method} with random numbers")
        return dispatch(ufunc.__name__, args, {})

    def __array_function__(self, function, types, args, options):
        return dispatch(function.__name__, args, options)

    def __getattr__(self, name: str):
        if name in UNCHANGED:
            return lambda *args, **options: self
        if name in VIEWS:
            return lambda *args, **options: self.apply_view(
                lambda x: getattr(x, name)(*args, **options)
            )
        if name.startswith("__"):
            raise AttributeError(name)
        raise CannotEnumerate(f"it calls {self.origin}'s {name} with a random number")

    def derive(self, scale, shift, g: str | None = None, index=None) -> "SymbolicUniform":
        """Return a number of the same source and origin."""
        index = self.index if index is None else index
        return SymbolicUniform(self.source, index, g or self.g, scale, shift, self.origin)

    def apply_view(self, view: Callable[[Tensor], Tensor]) -> "SymbolicUniform":
        return self.derive(view(self.scale), view(self.shift), index=view(self.index))

    def __getitem__(self, at) -> "SymbolicUniform":
        return self.apply_view(lambda x: x[at])

    def __len__(self) -> int:
        return len(self.index)

    def item(self) -> "SymbolicUniform":
        number = self.reshape(())
        number.origin = "python"
        return number

    def tolist(self) -> list:
        return [self[i].tolist() for i in range(len(self))] if self.shape else self.item()

    def __float__(self) -> float:
        raise CannotEnumerate("it uses the value of a random number, not only comparisons (compare "
                              "the tensor or its .item(); float() cannot be followed)")  # fmt: skip

    __int__ = __bool__ = __index__ = __float__

    # ---- arithmetic ------------------------------------------------------------------------------

    def mul(self, x) -> "SymbolicUniform":
        x = to_float64(x)
        return self.derive(self.scale * x, self.shift * x)

    def add(self, x) -> "SymbolicUniform":
        return self.derive(self.scale, self.shift + to_float64(x))

    def neg(self) -> "SymbolicUniform":
        return self.mul(-1)

    def sub(self, x) -> "SymbolicUniform":
        return self.add(-to_float64(x))

    def rsub(self, x) -> "SymbolicUniform":
        return self.neg().add(x)

    def div(self, x) -> "SymbolicUniform":
        return self.mul(1 / to_float64(x))

    def log(self) -> "SymbolicUniform":
        if self.g == "u":  # of u, or of 1 - u, which is also uniform
            ends = torch.stack([self.shift, self.shift + self.scale], -1).sort().values
            unit = torch.tensor([0.0, 1.0], dtype=torch.float64)
            self.require(bool(((ends - unit).abs() < NEGLIGIBLE).all()), "log")
            return self.derive(1.0, 0.0, "log")
        self.require(self.is_waiting_time(), "log")
        return self.derive(-1.0, self.scale.neg().log(), "gumbel")

    def rdiv(self, x) -> "SymbolicUniform":
        self.require(self.is_waiting_time(), "div")
        return self.derive(1.0, (to_float64(x) / -self.scale).log(), "race")

    def is_waiting_time(self) -> bool:
        """Whether these are exponential waiting times."""
        negligible = self.shift.abs() < NEGLIGIBLE
        return self.g == "log" and bool((self.scale < 0).all() and negligible.all())

    __mul__ = __rmul__ = mul
    __add__ = __radd__ = add
    __neg__, __truediv__, __rtruediv__, __sub__, __rsub__ = neg, div, rdiv, sub, rsub

    def require(self, supported: bool, name: str) -> None:
        if not supported:
            raise CannotEnumerate(f"it calls {self.origin}'s {name} with a function of random "
                                  "numbers")  # fmt: skip

    # ---- choices ---------------------------------------------------------------------------------

    def below(self, x) -> Tensor:
        """Return which elements are below x: chosen, unless earlier choices decide it."""
        self.require(self.g in ("u", "log"), "lt")
        parts = torch.broadcast_tensors(self.index, self.scale, self.shift, to_float64(x))
        rows = zip(*(part.flatten().tolist() for part in parts))
        chosen = [self.choose_below(*row) for row in rows]
        return torch.tensor(chosen, dtype=torch.bool).reshape(parts[0].shape)

    def choose_below(self, index: int, scale: float, shift: float, x: float) -> bool:
        if scale == 0:
            return shift < x
        bound = (x - shift) / scale
        if self.g == "log":
            bound = math.exp(min(bound, 0.0))
        return self.source.is_below(index, bound) == (scale > 0)

    def lt(self, x):
        return self.convert(self.below(x), x)

    def gt(self, x):
        return self.convert(~self.below(x), x)

    __lt__ = __le__ = lt
    __gt__ = __ge__ = gt

    def argmax(self, dim: int | None = None, keepdim: bool = False, axis=None, out=None):
        """Choose i with probability proportional to exp(shift_i): for Gumbel numbers, or x / E."""
        scale = self.scale.flatten()[:1]
        equal = bool((self.scale == scale).all() and (scale > 0).all())
        self.require(self.g in ("gumbel", "race") and equal, "argmax")
        weights = self.shift / scale
        weights = (weights - weights.amax(-1, keepdim=True)).exp()
        return self.race_winner(weights, dim, keepdim, axis)

    def argmin(self, dim: int | None = None, keepdim: bool = False, axis=None, out=None):
        """Choose i with probability proportional to its rate: for waiting times."""
        self.require(self.is_waiting_time(), "argmin")
        return self.race_winner(-1 / self.scale, dim, keepdim, axis)

    def race_winner(self, weights: Tensor, dim: int | None, keepdim: bool, axis: int | None):
        dim = dim if axis is None else axis
        if dim is None and weights.numel() == weights.shape[-1]:
            weights, dim = weights.reshape(-1), -1
        self.require(dim in (-1, weights.dim() - 1), "argmax")
        return self.convert(self.source.categorical(weights, keepdim))

    def searchsorted(self, thresholds, *_, **options):
        """Count the thresholds below each element."""
        return self.convert((~self[..., None].below(thresholds)).sum(-1), thresholds)

    def convert(self, result: Tensor, other=None):
        """Return a result in the type that it has for numbers of this origin."""
        if self.origin == "torch" or isinstance(other, Tensor):
            return result
        if self.origin == "python" and result.dim() == 0:
            return result.item()
        return result.numpy()[()]


def dispatch(name: str, args: tuple, options: dict):
    """Call a function of torch or numpy that has a SymbolicUniform among its arguments."""
    name = name.strip("_")
    name = ALIASES.get(name, name)
    if len(args) > 1 and not isinstance(args[0], SymbolicUniform):
        args, name = [args[1], args[0], *args[2:]], REFLECTED.get(name, name)
    if not (args and isinstance(args[0], SymbolicUniform)):
        raise CannotEnumerate(f"it calls {name} with several random numbers")
    return getattr(args[0], name)(*args[1:], **options)


def to_float64(x) -> Tensor:
    if isinstance(x, SymbolicUniform):
        raise CannotEnumerate("it compares or combines two random numbers")
    if isinstance(x, np.ndarray):
        x = x.copy()  # torch rejects negative strides
    return torch.as_tensor(x, dtype=torch.float64)
