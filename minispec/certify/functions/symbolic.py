"""Lazy uniform random numbers: each comparison with one branches. They support the operations that
have a method `on_…` here, exactly; any other ends the enumeration and is named."""

import math
from collections.abc import Callable
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

ALIASES = {
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "negative": "neg",
    "multiply": "mul", "rmul": "mul", "divide": "div", "true_divide": "div", "truediv": "div",
    "rtruediv": "rdiv", "radd": "add", "subtract": "sub", "clip": "clamp", "clamp_min": "clamp",
    "digitize": "bucketize", "as_tensor": "tensor", "from_numpy": "tensor", "copy": "clone",
    "deepcopy": "clone",
}  # fmt: skip
REFLECTED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "add": "add", "mul": "mul",
             "sub": "rsub", "div": "rdiv", "searchsorted": "bucketize"}  # fmt: skip
IN_PLACE = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div", "add_": "add",
            "sub_": "sub", "mul_": "mul", "div_": "div", "clamp_": "clamp"}  # fmt: skip
VIEWS = ("reshape", "view", "squeeze", "unsqueeze", "flatten", "expand", "ravel", "select",
         "permute", "transpose", "t", "index_select", "gather", "cpu", "clone", "detach",
         "contiguous")  # fmt: skip
METADATA = "dtype", "ndim", "shape", "size"
PRECISE = torch.float32, torch.float64  # rounding to others, such as bfloat16, is a bias
NEGLIGIBLE = 1e-6  # what decoders add to a random number to avoid log 0 or a division by 0


class CannotEnumerate(BaseException):
    """The reason why a decoder's outcomes cannot be enumerated. It is not an Exception, so that a
    decoder's own handlers let it through; `last` shows it even if they do not."""

    last: "CannotEnumerate | None" = None

    def __init__(self, reason: str):
        super().__init__(reason)
        CannotEnumerate.last = self


class SymbolicUniform:
    """Stands in for an array of lazy random numbers: scale · g(u) + shift.

    `index` identifies the uniform number u behind each element, or ~index if it is 1 - u; its
    `source`, an InterceptedRandomness, makes the choices. g is "u" for u itself, "log" for log u,
    and "gumbel" for -log(-log u), a Gumbel number. An exponential waiting time E = -log u therefore
    has scale -1. A quotient x / E, of which only the argmax is ever needed, has g "race" and is
    represented by its logarithm. Views share the memory of these tensors, like those of arrays.

    `origin` is the library that the number seems to come from: "numpy", "python" or "torch". A
    decoder sees the first two as objects of this class, the third as tensors that the source knows.
    After the interception, they are ordinary numbers."""

    def __init__(
        self, source, index: Tensor, scale: Tensor, shift: Tensor, g="u", origin="torch",
        precision=torch.float64,
    ):  # fmt: skip
        self.source, self.g, self.origin, self.precision = source, g, origin, precision
        self.index, self.scale, self.shift = index, scale, shift

    @classmethod
    def __torch_function__(cls, function, types, args=(), options=None):
        return dispatch(function, function.__name__, args, options or {})

    def __array_ufunc__(self, ufunc, method, *args, **options):
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        return dispatch(getattr(ufunc, method), name, args, options)

    def __array_function__(self, function, types, args, options):
        return dispatch(function, function.__name__, args, options)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        if self.source.ended:
            return np.array(self.value(), dtype)
        return dispatch(np.asarray, "__array__", (self, *([] if dtype is None else [dtype])), {})

    @property
    def __class__(self):
        """The type that the number seems to have, but for torch, which relies on it."""
        if self.origin == "torch":
            return SymbolicUniform
        return type(self.convert(torch.zeros(self.index.shape, dtype=self.precision)))

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        if self.source.ended:
            return getattr(self.value(), name)
        if name in METADATA:
            zeros = torch.zeros(self.index.shape, dtype=self.precision)
            return getattr(self.convert(zeros), name)
        if not hasattr(type(self), f"on_{ALIASES.get(name, name)}"):
            self.reject(name)
        return lambda *args, **options: dispatch(None, name, (self, *args), options)

    def value(self):
        """Return ordinary numbers: of uniform numbers that lie in the intervals chosen so far."""
        u = [self.source.value(i) for i in self.index.flatten().tolist()]
        x = torch.tensor(u, dtype=torch.float64).reshape(self.index.shape)
        if self.g != "u":
            x = x.log() if self.g == "log" else -(-x.log()).log()
        x = self.scale * x + self.shift
        return self.convert((x.exp() if self.g == "race" else x).to(self.precision))

    def operate(self, name: str, args: tuple, options: dict):
        """Call the function of this name; this number is one of its arguments."""
        short = name.strip("_") if name.startswith("__") else name
        short = IN_PLACE.get(short, short)
        short = ALIASES.get(short, short)
        position = next((i for i, x in enumerate(args) if x is self), None)
        if position == 1:
            short = REFLECTED.get(short, "")
        method = getattr(type(self), f"on_{short}", None)
        if method is None or position not in (0, 1):
            self.reject(name)
        try:
            return method(self, *(x for x in args if x is not self), **options)
        except TypeError as error:
            raise CannotEnumerate(f"it calls {self.origin}'s {name.strip('_')} with a random number"
                                  f" in a way that cannot be followed: {error}") from error

    def reject(self, name: str) -> NoReturn:
        raise CannotEnumerate(f"it calls {self.origin}'s {name.strip('_')} with a random number, "
                              "which cannot be followed")  # fmt: skip

    def require(self, supported: bool, name: str) -> None:
        if not supported:
            raise CannotEnumerate(f"it calls {self.origin}'s {name} with a function of random "
                                  "numbers")  # fmt: skip

    # ---- views and copies ------------------------------------------------------------------------

    def derive(self, scale, shift, g: str | None = None, index=None, x=None) -> "SymbolicUniform":
        """Return numbers in new memory; `x` is the other operand."""
        index = self.index if index is None else index
        parts = torch.broadcast_tensors(index, to_float64(scale), to_float64(shift))
        number = SymbolicUniform(self.source, *(part.clone() for part in parts), g or self.g,
                                 self.origin, self.precision)  # fmt: skip
        if isinstance(x, Tensor):
            zeros = torch.zeros(self.index.shape, dtype=self.precision)
            number.origin, number.precision = "torch", precise(torch.result_type(zeros, x))
        elif isinstance(x, np.ndarray) and self.origin == "python":
            number.origin = "numpy"
        return number

    def apply_view(self, view: Callable[[Tensor], Tensor]) -> "SymbolicUniform":
        index, *others = map(view, (self.index, self.scale, self.shift))
        self.require((index.dtype, others[0].dtype) == (torch.int64, torch.float64), "view")
        return SymbolicUniform(self.source, index, *others, self.g, self.origin, self.precision)

    def overwrite(self, other: "SymbolicUniform") -> None:
        """Assign in place, so that views of these numbers see it, too."""
        self.require((self.g, self.index.shape) == (other.g, other.index.shape), "assignment")
        for name in "index", "scale", "shift":
            getattr(self, name).copy_(getattr(other, name))

    def on_getitem(self, at) -> "SymbolicUniform":
        return self.apply_view(lambda x: x[at])

    def on_len(self) -> int:
        return len(self.index)

    def on_iter(self):
        return iter([self.on_getitem(i) for i in range(len(self.index))])

    def on_unbind(self, dim: int = 0) -> tuple["SymbolicUniform", ...]:
        return tuple(self.apply_view(lambda x: x.select(dim, i)) for i in range(self.shape[dim]))

    def on_item(self) -> "SymbolicUniform":
        number = self.apply_view(lambda x: x.clone().reshape(()))
        number.origin = "python"
        return number

    def on_tolist(self) -> list:
        return [x.on_tolist() for x in self.on_iter()] if self.index.dim() else self.on_item()

    def on_array(self, dtype=None, copy=None) -> np.ndarray:
        """An array of Python's objects, which numpy's functions combine one by one."""
        self.require(dtype is None, "conversion")
        array = np.empty(self.index.shape, object)
        for at in np.ndindex(array.shape):
            array[at] = self.on_getitem(at).on_item()
        return array

    def on_numpy(self) -> "SymbolicUniform":
        number = self.apply_view(lambda x: x)
        number.origin = "numpy"
        return number

    def on_tensor(self, dtype=None, device=None) -> "SymbolicUniform":
        default = torch.get_default_dtype() if self.origin == "python" else self.precision
        number = self.on_to(dtype or default)
        number.origin = "torch"
        return number

    def on_to(self, *args, **options) -> "SymbolicUniform":
        targets = [getattr(x, "dtype", x) for x in (*args, *options.values())]
        dtypes = [x for x in targets if isinstance(x, torch.dtype)] or [self.precision]
        number = self.apply_view(lambda x: x if dtypes[-1] == self.precision else x.clone())
        number.precision = precise(dtypes[-1])
        return number

    on_type_as = on_to

    def on_float(self) -> "SymbolicUniform":
        return self.on_to(torch.float32)

    def on_double(self) -> "SymbolicUniform":
        return self.on_to(torch.float64)

    def on_astype(self, dtype, copy: bool = True) -> "SymbolicUniform":
        return self.on_clone().on_to(torch.from_numpy(np.empty(0, dtype)).dtype)

    # ---- arithmetic ------------------------------------------------------------------------------

    def on_mul(self, x) -> "SymbolicUniform":
        factor = to_float64(x)
        if self.g == "race":
            self.require(bool((factor >= 0).all()), "mul")
            return self.derive(self.scale, self.shift + factor.log(), x=x)
        return self.derive(self.scale * factor, self.shift * factor, x=x)

    def on_add(self, x) -> "SymbolicUniform":
        self.require(self.g != "race", "add")
        return self.derive(self.scale, self.shift + to_float64(x), x=x)

    def on_neg(self) -> "SymbolicUniform":
        return self.on_mul(-1)

    def on_sub(self, x) -> "SymbolicUniform":
        return self.on_add(-x if isinstance(x, Tensor) else -np.asarray(x))

    def on_rsub(self, x) -> "SymbolicUniform":
        return self.on_neg().on_add(x)

    def on_div(self, x) -> "SymbolicUniform":
        return self.on_mul(1 / x if isinstance(x, Tensor) else 1 / np.asarray(x, float))

    def on_rdiv(self, x) -> "SymbolicUniform":
        x_log = to_float64(x).log()
        self.require(self.is_waiting_time() and not bool(x_log.isnan().any()), "div")
        return self.derive(1.0, x_log - self.scale.neg().log(), "race", x=x)

    def on_log(self) -> "SymbolicUniform":
        if self.g == "u":  # of u, or of 1 - u, which is also uniform
            ends = torch.stack([self.shift, self.shift + self.scale], -1).sort().values
            unit = torch.tensor([0.0, 1.0], dtype=torch.float64)
            self.require(bool(((ends - unit).abs() < NEGLIGIBLE).all()), "log")
            return self.derive(1.0, 0.0, "log", torch.where(self.scale > 0, self.index, ~self.index))
        if self.g == "race":
            return self.derive(self.scale, self.shift, "gumbel")
        self.require(self.is_waiting_time(), "log")
        return self.derive(-1.0, self.scale.neg().log(), "gumbel")

    def is_waiting_time(self) -> bool:
        """Whether these are exponential waiting times."""
        negligible = self.shift.abs() < NEGLIGIBLE
        return self.g == "log" and bool((self.scale < 0).all() and negligible.all())

    def on_clamp(self, min=None, max=None) -> "SymbolicUniform":
        """Choose which elements are outside; these are constants."""
        number = self
        for bound, sign in (min, 1), (max, -1):
            if bound is not None:
                bound = to_float64(bound)
                outside = number.on_mul(sign).below(sign * bound)
                shift = torch.where(outside, bound, number.shift)
                number = number.derive(number.scale.masked_fill(outside, 0.0), shift)
        return number

    # ---- choices ---------------------------------------------------------------------------------

    def below(self, x, or_equal: bool = False) -> Tensor:
        """Return which elements are below x: chosen, unless earlier choices decide it."""
        self.require(self.g in ("u", "log"), "comparison")
        parts = torch.broadcast_tensors(self.index, self.scale, self.shift, to_float64(x))
        rows = zip(*(part.flatten().tolist() for part in parts))
        chosen = [self.choose_below(*row, or_equal) for row in rows]
        return torch.tensor(chosen, dtype=torch.bool).reshape(parts[0].shape)

    def choose_below(
        self, index: int, scale: float, shift: float, x: float, or_equal: bool
    ) -> bool:
        if scale == 0:
            return shift < x or (or_equal and shift == x)
        if math.isnan(x):
            return False
        bound = (x - shift) / scale
        self.require(not math.isnan(bound), "comparison")
        if self.g == "log":
            bound = math.exp(min(bound, 0.0))
        return self.source.is_below(index, bound) == (scale > 0)

    def on_lt(self, x):
        return self.convert(self.below(x), x)

    def on_le(self, x):
        return self.convert(self.below(x, or_equal=True), x)

    def on_gt(self, x):
        return self.convert(self.on_neg().below(-to_float64(x)), x)

    def on_ge(self, x):
        return self.convert(self.on_neg().below(-to_float64(x), or_equal=True), x)

    def on_argmax(self, dim: int | None = None, keepdim: bool = False, axis=None, out: None = None):
        """Choose i with probability proportional to exp(shift_i): for Gumbel numbers, or x / E."""
        scale = self.scale.flatten()[:1]
        equal = bool((self.scale == scale).all() and (scale > 0).all())
        self.require(self.g in ("gumbel", "race") and equal, "argmax")
        weights = self.shift / scale
        weights = (weights - weights.amax(-1, keepdim=True)).exp()
        return self.race_winner(weights, "argmax", dim, keepdim, axis, out)

    def on_argmin(self, dim: int | None = None, keepdim: bool = False, axis=None, out: None = None):
        """Choose i with probability proportional to its rate: for waiting times."""
        self.require(self.is_waiting_time(), "argmin")
        return self.race_winner(-1 / self.scale, "argmin", dim, keepdim, axis, out)

    def race_winner(self, weights: Tensor, name: str, dim, keepdim: bool, axis, out):
        dim, index = dim if axis is None else axis, self.index
        if dim is None and weights.numel() == weights.shape[-1]:
            weights, index, dim = weights.reshape(-1), index.reshape(-1), -1
        self.require(dim in (-1, weights.dim() - 1) and out is None, name)
        rows = zip(index.reshape(-1, index.shape[-1]).tolist(), weights.reshape(-1, index.shape[-1]))
        winners = torch.tensor([self.source.race(*row) for row in rows])
        return self.convert(winners.reshape([*weights.shape[:-1]] + [1] * keepdim))

    def on_bucketize(self, thresholds, side=None, sorter=None, **options):
        """Count the thresholds below each element."""
        x = to_float64(thresholds)
        increasing = sorter is None and bool((x.diff() >= 0).all())
        self.require(increasing and bool((self.scale != 0).all()), "searchsorted")
        above = ~self.on_getitem((..., None)).below(x.unsqueeze(-2) if x.dim() > 1 else x)
        return self.convert(above.sum(-1), thresholds)

    def convert(self, result: Tensor, other=None):
        """Return a result in the type that it has for numbers of this origin."""
        if self.origin == "torch" or isinstance(other, Tensor):
            return result
        if self.origin == "python" and result.dim() == 0 and not isinstance(other, np.ndarray):
            return result.item()
        return result.numpy()[()]


def view_method(name: str) -> Callable:
    def method(self, *args, **options):
        return self.apply_view(lambda x: getattr(x, name)(*args, **options))

    return method


def operator_method(name: str) -> Callable:
    def apply(number, *args):
        return getattr(number, name)(*args) if hasattr(number, name) else NotImplemented

    def method(self, *args):
        if name[2:-2] in IN_PLACE and self.origin == "python":
            return NotImplemented  # so that Python assigns a new number
        return dispatch(apply, name, (self, *args), {})

    return method


for name in VIEWS:
    setattr(SymbolicUniform, f"on_{name}", view_method(name))
OF_VALUES = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__repr__",
             "__str__", "__format__", "__reduce__", "__reduce_ex__"}  # fmt: skip
for name in OF_VALUES | {*dir(float), *dir(np.ndarray)} - {*dir(object)}:
    callable_in = any(callable(getattr(cls, name, None)) for cls in (float, np.ndarray))
    if name.startswith("__") and callable_in and name not in vars(SymbolicUniform):
        setattr(SymbolicUniform, name, operator_method(name))


def map_nested(function: Callable, x):
    """Apply a function to the items of nested lists, tuples and dicts."""
    if type(x) in (list, tuple):
        return type(x)(map_nested(function, item) for item in x)
    if type(x) is dict:
        return {key: map_nested(function, item) for key, item in x.items()}
    return function(x)


def numbers_in(x) -> list[SymbolicUniform]:
    found: list[SymbolicUniform] = []
    map_nested(lambda item: found.append(item) if type(item) is SymbolicUniform else None, x)
    return found


def dispatch(function: Callable, name: str, args: tuple, options: dict):
    """Call a function that has a SymbolicUniform among its arguments."""
    for number in numbers_in((args, options)):
        if not number.source.ended:
            return number.source.operate(function, name, args, options)
    args, options = map_nested(ordinary, (args, options))
    return function(*args, **options)


def ordinary(x):
    """Return the ordinary number if x is left over from an earlier interception, otherwise x."""
    return x.value() if type(x) is SymbolicUniform and x.source.ended else x


def to_float64(x) -> Tensor:
    if isinstance(x, np.ndarray):
        x = x.copy()  # torch rejects negative strides
    return torch.as_tensor(x, dtype=torch.float64)


def precise(dtype: torch.dtype) -> torch.dtype:
    """Raise CannotEnumerate if numbers of this type are not nearly continuous."""
    if dtype not in PRECISE:
        raise CannotEnumerate(f"it rounds a random number to {dtype}")
    return dtype
