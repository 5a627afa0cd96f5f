"""Lazy uniform random numbers: each comparison with one branches. They support the operations that
have a method `on_…`; any other ends the enumeration, and its name is reported."""

import sys
import threading
from collections.abc import Callable
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

ALIASES = {
    "less": "lt", "less_equal": "lt", "le": "lt", "greater": "gt", "greater_equal": "gt",
    "ge": "gt", "negative": "neg", "multiply": "mul", "rmul": "mul", "radd": "add",
    "subtract": "sub", "divide": "div", "true_divide": "div", "truediv": "div", "rtruediv": "rdiv",
    "clip": "clamp", "clamp_min": "clamp", "digitize": "bucketize", "int": "floor",
    "long": "floor", "trunc": "floor", **dict.fromkeys(
        ("copy", "astype", "to", "float", "double", "type_as", "numpy"), "clone"),
}  # fmt: skip
REFLECTED = {"lt": "gt", "gt": "lt", "add": "add", "mul": "mul", "sub": "rsub", "div": "rdiv",
             "searchsorted": "bucketize"}  # fmt: skip
AFFINE = {  # functions of scale, shift and the other operand
    "add": lambda a, b, x: (a, b + x), "sub": lambda a, b, x: (a, b - x),
    "rsub": lambda a, b, x: (-a, x - b), "mul": lambda a, b, x: (a * x, b * x),
    "div": lambda a, b, x: (a / x, (b / x).where(b != 0, 0.0)), "neg": lambda a, b: (-a, -b),
}  # fmt: skip
VIEWS = ("reshape", "view", "squeeze", "unsqueeze", "flatten", "expand", "ravel", "select",
         "permute", "transpose", "t", "index_select", "gather", "cpu", "detach", "contiguous",
         "unbind", "__getitem__")  # fmt: skip
METADATA = {"__get__", "__len__", "size", "dim", "numel", "stride", "shape", "ndim", "dtype"}
NEGLIGIBLE = 1e-6  # what decoders add to a random number to avoid log 0 or a division by 0
CLOSE = 1e-4  # a difference due to float32
MAX_INTEGERS = 64  # that a random number may be rounded down to


class CannotEnumerate(BaseException):
    """The reason why a decoder's outcomes cannot be enumerated. It is not an Exception, so that a
    decoder's own handlers let it through; `last` shows it even if they do not."""

    last: "CannotEnumerate | None" = None

    def __init__(self, reason: str):
        super().__init__(reason)
        CannotEnumerate.last = self


class NeedsFloat(CannotEnumerate):
    """Python's float() or a function of math is called in the module with this `namespace`. They
    return floats only, so other functions must take their place there."""

    def __init__(self, reason: str):
        super().__init__(reason)
        frame = sys._getframe(1)
        while frame.f_globals["__name__"].startswith(("minispec.certify", "torch")):
            frame = frame.f_back
        self.namespace = frame.f_globals


class SymbolicUniform:
    """Stands in for an array of lazy random numbers: scale · g(u) + shift.

    `index` identifies the uniform number u behind each element, or ~index if it is 1 - u; its
    `source`, an InterceptedRandomness, makes the choices. g is "u" for u itself, "log" for log u,
    and "gumbel" for -log(-log u), a Gumbel number. An exponential waiting time E = -log u therefore
    has scale -1. A quotient x / E has g "race", and is represented by its logarithm.

    `sample` are the numbers for the source's samples of u, in the type that the decoder expects.
    The library computes them in each operation, and they must equal the formula. When their source
    is no longer `active`, ordinary numbers replace this object. Other threads draw real numbers."""

    active = None

    def __init__(self, source, sample, index, scale=1.0, shift=0.0, g="u", values=None):
        self.source, self.sample, self.g = source, sample, g
        parts = torch.broadcast_tensors(index, to_float64(scale), to_float64(shift))
        self.index, self.scale, self.shift = parts
        if values is not None:
            self.values = values

    @classmethod
    def __torch_function__(cls, function, types, args=(), options=None):
        return dispatch(function, function.__name__, args, options or {})

    def __array_ufunc__(self, ufunc, method, *args, **options):
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        return dispatch(getattr(ufunc, method), name, args, options)

    def __array_function__(self, function, types, args, options):
        return dispatch(function, function.__name__, args, options)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return dispatch(np.array, "__array__", (self, *([] if dtype is None else [dtype])), {})

    @property
    def __class__(self):
        """The type that a decoder expects. Torch must not take this object for a tensor."""
        return SymbolicUniform if isinstance(self.sample, Tensor) else type(self.sample)

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        if self.source is not SymbolicUniform.active or name in METADATA:
            return getattr(like(self.sample, self.at(self.source.samples)), name)
        self.find(name, 0)
        return partial(method_of(name), self)

    def at(self, samples: Tensor) -> Tensor:
        """Evaluate the formula for these values (N,) of all uniform numbers."""
        u = torch.where(self.index < 0, 1 - samples[~self.index], samples[self.index])
        x = u if self.g == "u" else u.log() if self.g == "log" else -(-u.log()).log()
        x = self.scale * x + self.shift
        return x.exp() if self.g == "race" else x

    @cached_property
    def values(self) -> Tensor:
        return self.at(self.source.samples)  # these do not change while the source is active

    def check(self, name: str, sample) -> None:
        """Raise CannotEnumerate if these numbers are not those of the formula, or too coarse."""
        expected, real = self.values, to_float64(sample)
        dtype = str(getattr(sample, "dtype", "float64")).removeprefix("torch.")
        fine = real.shape == expected.shape and dtype in ("float32", "float64")
        close = fine and (torch.equal(expected, real)  # usually, and much cheaper
                          or torch.allclose(expected, real, CLOSE, CLOSE, equal_nan=True))
        self.require(close, name)

    def require(self, supported: bool, name: str) -> None:
        if not supported:
            library = type(self.sample).__module__.replace("builtins", "python")
            error = NeedsFloat if name == "__float__" else CannotEnumerate
            raise error(f"it calls {library}'s {name.strip('_')} with a random number, which "
                        "cannot be followed")  # fmt: skip

    def find(self, name: str, position: int) -> Callable:
        """Return the method for the function of this name, whose argument at `position` is this."""
        short = name.strip("_") if name not in ("__float__", "__getitem__") else name
        short = short[1:] if name.startswith("__i") and short != "int" else short  # in place
        short = ALIASES.get(short, short)
        short = (short, REFLECTED.get(short), None)[min(position, 2)]
        if short in VIEWS:
            return partial(self.apply_view, short)
        if rule := AFFINE.get(short):
            return lambda *x: self.derive(*rule(self.scale, self.shift, *map(to_float64, x)))
        if short in ("item", "tolist"):
            return getattr(self.on_array(), short)
        if short == "floor":
            return partial(self.round_down, name)
        self.require(hasattr(type(self), f"on_{short}"), name)
        return getattr(self, f"on_{short}")

    # ---- views, copies and arithmetic ------------------------------------------------------------

    def derive(self, scale, shift, index=None, values=None, g="") -> "SymbolicUniform":
        index = self.index if index is None else index
        return SymbolicUniform(self.source, self.sample, index, scale, shift, g or self.g, values)

    def apply_view(self, name: str, *args, **options):
        """Return a view of these numbers, or a tuple of them."""
        parts = self.scale, self.shift, self.index, self.values
        parts = [getattr(x, name)(*args, **options) for x in parts]
        if isinstance(parts[0], tuple):
            return tuple(self.derive(*x) for x in zip(*parts))
        return self.derive(*parts)

    def on_clone(self, *_, **options) -> "SymbolicUniform":
        return self.derive(self.scale, self.shift)

    def on_array(self, *_, **options) -> np.ndarray:
        """An array of Python's objects, which numpy's functions combine one by one."""
        real, array = np.asarray(self.sample), np.empty(self.index.shape, object)
        for at in np.ndindex(array.shape):
            array[at] = self.apply_view("__getitem__", at)
            array[at].sample = float(real[at])
        return array

    def on_log(self, name: str = "log") -> "SymbolicUniform":
        if self.g == "u":  # of u, or of 1 - u, which is also uniform
            rising = self.scale > 0
            difference = (self.scale.abs() - 1).abs() + (self.shift - 1 + rising.double()).abs()
            self.require(bool((difference < NEGLIGIBLE).all()), name)
            return self.derive(1.0, 0.0, torch.where(rising, self.index, ~self.index), g="log")
        waiting_times = (self.scale < 0) & (self.shift.abs() < NEGLIGIBLE)
        self.require(self.g == "log" and bool(waiting_times.all()), name)
        return self.derive(-1.0, self.scale.neg().log(), g="gumbel")

    def on_rdiv(self, x) -> "SymbolicUniform":
        log = self.on_log("div")
        return log.derive(-log.scale, to_float64(x).log() - log.shift, g="race")

    def on_clamp(self, min=-torch.inf, max=torch.inf) -> "SymbolicUniform":
        """Only bounds that are almost never exceeded are supported."""
        for u in NEGLIGIBLE, 1 - NEGLIGIBLE:
            x = self.at(torch.full_like(self.source.samples, u))
            inside = (x >= to_float64(min)) & (x <= to_float64(max))
            self.require(bool(inside.all()), "clamp")
        return self.on_clone()

    # ---- choices ---------------------------------------------------------------------------------

    def round_down(self, name: str, *_, **options) -> Tensor:
        """Choose which of a few integers these numbers are rounded down to."""
        ends = [self.at(torch.full_like(self.source.samples, u)) for u in (0.0, 1.0)]
        low, high = torch.minimum(*ends).min().floor(), torch.maximum(*ends).max().ceil()
        few = self.g == "u" and 0 <= low and high - low <= MAX_INTEGERS
        self.require(few, name)
        return low + self.on_bucketize(torch.arange(float(low) + 1, float(high)))

    def on_round(self, decimals: int | None = None, **options) -> Tensor:
        self.require(not decimals and not options, "round")
        return self.derive(self.scale, self.shift + 0.5).round_down("round")

    def on_lt(self, x) -> Tensor:
        """Return which elements are below x, none if it is NaN. Chosen, unless already decided."""
        self.require(self.g in ("u", "log") and bool((self.scale != 0).all()), "comparison")
        bound = (to_float64(x) - self.shift) / self.scale
        bound = bound.clamp(max=0).exp() if self.g == "log" else bound
        parts = torch.broadcast_tensors(self.index, self.scale > 0, bound)
        rows = zip(*(part.flatten().tolist() for part in parts))
        chosen = [u == u and self.source.is_below(i, u) == rising for i, rising, u in rows]
        return torch.tensor(chosen, dtype=torch.bool).reshape(bound.shape)

    def on_gt(self, x) -> Tensor:
        return self.derive(-self.scale, -self.shift).on_lt(-to_float64(x))

    def on_bucketize(self, thresholds, side=None, sorter=None, **options) -> Tensor:
        """Count the thresholds below each element."""
        x = to_float64(thresholds)
        self.require(sorter is None and bool((x.diff() >= 0).all()), "searchsorted")
        column = self.apply_view("unsqueeze", -1)
        return column.on_gt(x.unsqueeze(-2) if x.dim() > 1 else x).sum(-1)

    def on_argmax(self, dim=None, keepdim: bool = False, axis=None, out: None = None) -> Tensor:
        """Choose i with probability proportional to exp(shift_i): for Gumbel numbers, or x / E."""
        dim, shape, scale = dim if axis is None else axis, self.index.shape, self.scale
        last = dim in (-1, len(shape) - 1) or (dim is None and shape.numel() == shape[-1])
        equal = bool((scale > 0).all() and (scale == scale.flatten()[:1]).all())
        self.require(self.g in ("gumbel", "race") and last and equal and out is None, "argmax")
        weights = (self.shift / scale).softmax(-1).reshape(-1, shape[-1])
        rows = zip(self.index.reshape(-1, shape[-1]).tolist(), weights)
        return torch.tensor([self.source.race(*row) for row in rows])

    def on_argmin(self, *args, **options) -> Tensor:
        """Return the argmax of -log E, which is a Gumbel number."""
        log = self.on_log("argmin")
        return log.derive(-log.scale, -log.shift).on_argmax(*args, **options)


# ---- every operator ------------------------------------------------------------------------------


def method_of(name: str) -> Callable:
    def call(x, *args, **options):
        if name.startswith("__i") and not hasattr(x, name):  # numbers are not changed in place
            return NotImplemented
        return getattr(x, name)(*args, **options)

    return lambda self, *args, **options: dispatch(call, name, (self, *args), options)


KEPT = {"__new__", "__getattribute__", "__setattr__", "__delattr__", "__init_subclass__", "__dir__",
        "__subclasshook__", "__iter__"}  # fmt: skip
for name in {*dir(float), *dir(np.ndarray)} - KEPT - {*vars(SymbolicUniform)}:
    is_operator = any(callable(getattr(cls, name, None)) for cls in (float, np.ndarray))
    if name.startswith("__") and is_operator:
        setattr(SymbolicUniform, name, method_of(name))


def active_source():
    """Return the InterceptedRandomness of this thread, if any: other threads are left alone."""
    source = SymbolicUniform.active
    return source if source and source.thread == threading.get_ident() else None


def dispatch(function: Callable, name: str, args: tuple, options: dict):
    """Call a function that has a SymbolicUniform among its arguments."""
    if SymbolicUniform.active:
        return SymbolicUniform.active.operate(function, name, args, options)
    args, options = map_nested(ordinary, (args, options))
    return function(*args, **options)


def ordinary(x):
    """Return ordinary numbers if x are random numbers that are left over from an earlier call."""
    left_over = type(x) is SymbolicUniform and x.source is not SymbolicUniform.active
    return like(x.sample, x.at(x.source.samples)) if left_over else x


def map_nested(function: Callable, x):
    """Apply a function to the items of nested lists, tuples and dicts."""
    if type(x) in (list, tuple):
        return type(x)(map_nested(function, item) for item in x)
    if type(x) is dict:
        return {key: map_nested(function, item) for key, item in x.items()}
    return function(x)


def like(real, x: Tensor):
    """Return x in the type of `real`."""
    if isinstance(real, Tensor):
        return x.to(real.dtype)
    array = x.numpy().astype(np.asarray(real).dtype)
    return array if isinstance(real, np.ndarray) else type(real)(array)


def to_float64(x) -> Tensor:
    if isinstance(x, np.ndarray):
        x = x.copy()  # torch rejects negative strides
    return torch.as_tensor(x, dtype=torch.float64)
