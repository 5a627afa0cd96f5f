"""Intercept another decoder's random numbers, to enumerate every outcome of its own loop.

Within `InterceptedRandomness`, the enumerator chooses the results of torch's multinomial, bernoulli
and randint. A uniform number is not drawn at all: when it is compared with a threshold, the
enumerator chooses the side on which it lies, and the remaining interval is recorded. A decoder that
uses torch.rand and similar functions therefore has an exact distribution, as our methods have.
"""

import math
import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from minispec.sampling import Randomness
from minispec.toys import ScriptedRandomness, every_outcome

RANDOM_SOURCES = "torch, random.random and numpy.random"
MAX_INTEGERS = 64  # randint is enumerated up to this many values
ALIASES = {
    "le": "lt", "less": "lt", "less_equal": "lt", "ge": "gt", "greater": "gt",
    "greater_equal": "gt", "multiply": "mul", "divide": "div", "true_divide": "div",
    "subtract": "sub", "negative": "neg",
}  # fmt: skip
REFLECTED = {"lt": "gt", "gt": "lt", "add": "add", "mul": "mul", "sub": "rsub", "div": "rdiv",
             "searchsorted": "searchsorted"}  # fmt: skip
VIEWS = ("reshape", "view", "squeeze", "unsqueeze", "flatten", "expand", "ravel", "select",
         "permute", "transpose", "t", "index_select", "gather")  # fmt: skip
UNCHANGED = ("to", "cpu", "cuda", "float", "double", "clone", "detach", "contiguous", "type_as",
             "clamp", "clamp_min", "numpy")  # fmt: skip


class CannotEnumerate(Exception):
    """The reason why a decoder's outcomes cannot be enumerated."""


class TooManyOutcomes(CannotEnumerate):
    """There are more outcomes than the limit."""


def enumerate_outcomes(
    function: Callable[[int], tuple[int, ...]], limit: float = math.inf
) -> dict[tuple[int, ...], float]:
    """Return the distribution of function(seed) over all outcomes of its random choices. Raise
    CannotEnumerate if it has other random sources, TooManyOutcomes beyond `limit` outcomes."""
    seeds, used = count(), set()

    def run_once(randomness: Randomness) -> tuple[int, ...]:
        try:
            with InterceptedRandomness(randomness) as source:
                tokens = function(next(seeds))
            used.add(source.used)
            return tokens
        except IndexError as error:  # fewer choices than in the previous run
            raise CannotEnumerate(f"not only random numbers matter ({error})") from error

    if len({run_once(ScriptedRandomness([])) for _ in range(12)}) > 1:
        raise CannotEnumerate(f"it uses random numbers from sources other than {RANDOM_SOURCES}")
    total: dict[tuple[int, ...], float] = Counter()
    for n, (tokens, weight) in enumerate(every_outcome(run_once), start=1):
        if n > limit:
            raise TooManyOutcomes(f"there are more than {limit} outcomes")
        total[tokens] += weight
    if used == {False}:
        raise CannotEnumerate(f"it uses no random numbers from {RANDOM_SOURCES}")
    if abs(sum(total.values()) - 1) > 1e-6:
        raise CannotEnumerate("not only random numbers matter: probabilities do not sum to 1")
    return total


class SymbolicUniform:
    """Stands in for a tensor of random numbers that have not been drawn: scale · g(u) + shift.

    `index` identifies the uniform number u of `source` behind each element. g is "u" for u itself,
    "log" for log u, and "gumbel" for -log(-log u), a Gumbel number. An exponential waiting time
    E = -log u therefore has scale -1. A quotient x / E, of which only the argmax is ever needed,
    has g "race" and is represented by its logarithm.
    """

    __array_ufunc__ = None  # numpy defers operators to this class

    def __init__(
        self, source: "InterceptedRandomness", index: Tensor, g: str = "u", scale=1.0, shift=0.0
    ):
        self.source, self.g = source, g
        parts = torch.broadcast_tensors(index, to_float64(scale), to_float64(shift))
        self.index, self.scale, self.shift = parts
        self.shape, self.device = self.index.shape, self.index.device

    @classmethod
    def __torch_function__(cls, function, types, args=(), options=None):
        name = function.__name__.strip("_")
        name = ALIASES.get(name, name)
        if not isinstance(args[0], SymbolicUniform):
            args, name = [args[1], args[0], *args[2:]], REFLECTED.get(name, name)
        if not isinstance(args[0], SymbolicUniform):
            raise CannotEnumerate(f"it calls torch's {name} with several random numbers")
        return getattr(args[0], name)(*args[1:], **(options or {}))

    def __getattr__(self, name: str):
        if name in UNCHANGED:
            return lambda *args, **options: self
        if name in VIEWS:
            return lambda *args, **options: self.apply_view(
                lambda x: getattr(x, name)(*args, **options)
            )
        if name.startswith("__"):
            raise AttributeError(name)
        raise CannotEnumerate(f"it calls torch's {name} with a random number")

    def apply_view(self, view: Callable[[Tensor], Tensor]) -> "SymbolicUniform":
        scale, shift = view(self.scale), view(self.shift)
        return SymbolicUniform(self.source, view(self.index), self.g, scale, shift)

    def __getitem__(self, at) -> "SymbolicUniform":
        return self.apply_view(lambda x: x[at])

    def __len__(self) -> int:
        return len(self.index)

    def item(self) -> "SymbolicUniform":
        return self.reshape(())

    def tolist(self) -> list:
        return [self[i].tolist() for i in range(len(self))] if self.shape else self

    def __float__(self) -> float:
        raise CannotEnumerate("it uses the value of a random number, not only comparisons")

    __int__ = __bool__ = __index__ = __float__

    # ---- arithmetic ------------------------------------------------------------------------------

    def mul(self, x) -> "SymbolicUniform":
        x = to_float64(x)
        return SymbolicUniform(self.source, self.index, self.g, self.scale * x, self.shift * x)

    def add(self, x) -> "SymbolicUniform":
        shift = self.shift + to_float64(x)
        return SymbolicUniform(self.source, self.index, self.g, self.scale, shift)

    def neg(self) -> "SymbolicUniform":
        return self.mul(-1)

    def div(self, x) -> "SymbolicUniform":
        return self.mul(1 / to_float64(x))

    def sub(self, x) -> "SymbolicUniform":
        return self.add(-to_float64(x))

    def rsub(self, x) -> "SymbolicUniform":
        return self.neg().add(x)

    def log(self) -> "SymbolicUniform":
        if self.g == "u":  # a shift of u only avoids log 0
            return SymbolicUniform(self.source, self.index, "log")
        self.require(self.g == "log" and bool((self.scale < 0).all()), "log")
        return SymbolicUniform(self.source, self.index, "gumbel", -1.0, self.scale.neg().log())

    def rdiv(self, x) -> "SymbolicUniform":
        self.require(self.g == "log" and bool((self.scale < 0).all()), "div")
        log_rate = (to_float64(x) / -self.scale).log()
        return SymbolicUniform(self.source, self.index, "race", 1.0, log_rate)

    __mul__ = __rmul__ = mul
    __add__ = __radd__ = add
    __neg__, __truediv__, __rtruediv__, __sub__, __rsub__ = neg, div, rdiv, sub, rsub

    def require(self, supported: bool, name: str) -> None:
        if not supported:
            raise CannotEnumerate(f"it calls torch's {name} with a function of random numbers")

    # ---- choices ---------------------------------------------------------------------------------

    def lt(self, x) -> Tensor:
        """Return which elements are below x: chosen, unless earlier choices decide it."""
        self.require(self.g != "race", "lt")
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
        elif self.g == "gumbel":
            bound = math.exp(-math.exp(min(-bound, 700.0)))
        return self.source.is_below(index, bound) == (scale > 0)

    def gt(self, x) -> Tensor:
        return ~self.lt(x)

    __lt__ = __le__ = lt
    __gt__ = __ge__ = gt

    def argmax(self, dim: int = -1, keepdim: bool = False) -> Tensor:
        """Choose i with probability proportional to exp(shift_i): for Gumbel numbers, or x / E."""
        self.require(self.g in ("gumbel", "race") and bool((self.scale == 1).all()), "argmax")
        return self.race_winner(self.shift.exp(), dim, keepdim)

    def argmin(self, dim: int = -1, keepdim: bool = False) -> Tensor:
        """Choose i with probability proportional to its rate: for waiting times."""
        self.require(self.g == "log" and bool((self.scale < 0).all()), "argmin")
        return self.race_winner(-1 / self.scale, dim, keepdim)

    def race_winner(self, weights: Tensor, dim: int, keepdim: bool) -> Tensor:
        self.require(dim in (-1, weights.dim() - 1), "argmax")
        return self.source.categorical(weights, keepdim)

    def searchsorted(self, thresholds, **options) -> Tensor:
        """Count the thresholds below each element."""
        return self[..., None].gt(thresholds).sum(-1)

    bucketize = searchsorted


def to_float64(x) -> Tensor:
    if isinstance(x, SymbolicUniform):
        raise CannotEnumerate("it compares or combines two random numbers")
    return torch.as_tensor(x, dtype=torch.float64)


class InterceptedRandomness(TorchFunctionMode):
    """A context in which torch, `random` and numpy's functions draw from `randomness`. Other
    sources of random numbers are not intercepted."""

    def __init__(self, randomness: Randomness):
        super().__init__()
        self.randomness, self.used = randomness, False
        self.intervals: list[tuple[float, float]] = []  # where each uniform number lies
        self.filled_in_place: dict[int, tuple[Tensor, SymbolicUniform]] = {}  # by tensor id

    def __torch_function__(self, function, types, args=(), options=None):
        options = options or {}
        name = getattr(function, "__name__", "")
        if name in INTERCEPTED:
            self.used, drawn = True, getattr(self, f"on_{name.strip('_')}")
            result = drawn(*args, **{k: v for k, v in options.items() if k not in IGNORED_OPTIONS})
            if name.endswith("_"):  # in-place: later uses of the tensor see the numbers
                self.filled_in_place[id(args[0])] = args[0], result
            return result
        if name in UNSUPPORTED:
            raise CannotEnumerate(f"it uses torch.{name}")
        if self.filled_in_place:
            args = [self.filled_in_place.get(id(x), (x, x))[1] for x in args]
        return function(*args, **options)

    # ---- torch's functions -----------------------------------------------------------------------

    def on_rand(self, *size, **_) -> SymbolicUniform:
        size = size[0] if size and not isinstance(size[0], int) else size
        n, self.used = math.prod(size), True
        self.intervals += [(0.0, 1.0)] * n
        index = torch.arange(len(self.intervals) - n, len(self.intervals))
        return SymbolicUniform(self, index.reshape(tuple(size)))

    def on_rand_like(self, x, **_) -> SymbolicUniform:
        return self.on_rand(*x.shape)

    def on_uniform(self, x, low=0.0, high=1.0, **_) -> SymbolicUniform:
        return self.on_rand(*x.shape).mul(high - low).add(low)

    def on_exponential(self, x, rate=1.0, **_) -> SymbolicUniform:
        return self.on_rand(*x.shape).log().div(-rate)

    def on_bernoulli(self, x, p=None, **_) -> Tensor:
        chances = (x if p is None else torch.as_tensor(p).broadcast_to(x.shape)).double()
        chosen = [self.randomness.bernoulli(chance) for chance in chances.flatten().tolist()]
        return torch.tensor(chosen).reshape(x.shape).to(x.dtype)

    def on_multinomial(self, p, num_samples, replacement=False, **_) -> Tensor:
        remaining, drawn = p.double().clone(), []
        valid = remaining.isfinite().all() and (remaining >= 0).all()
        if not (valid and (remaining.sum(-1) > 0).all()):
            raise RuntimeError("torch.multinomial rejects such probabilities")
        for _ in range(num_samples):
            drawn.append(self.categorical(remaining, keepdim=True))
            if not replacement:
                remaining.scatter_(-1, drawn[-1], 0.0)
        return torch.cat(drawn, -1)

    def on_randint(self, *args, **options) -> Tensor:
        low, high, size = args if len(args) == 3 else (0, *args)
        if high - low > MAX_INTEGERS:
            raise CannotEnumerate(f"it draws one of {high - low} integers")
        weights = torch.ones(*size, high - low)
        return low + self.categorical(weights)

    # ---- choices ---------------------------------------------------------------------------------

    def categorical(self, weights: Tensor, keepdim: bool = False) -> Tensor:
        """Draw an index (...) for each row of weights (..., V), with proportional probability."""
        rows = weights.reshape(-1, weights.shape[-1])
        drawn = torch.tensor([self.randomness.categorical(row) for row in rows])
        return drawn.reshape([*weights.shape[:-1]] + [1] * keepdim)

    def is_below(self, index: int, bound: float) -> bool:
        """Choose whether a uniform number is below the bound, and narrow its interval."""
        low, high = self.intervals[index]
        bound = min(max(bound, low), high)
        if self.randomness.bernoulli((bound - low) / (high - low)):
            self.intervals[index] = low, bound
            return True
        self.intervals[index] = bound, high
        return False

    def __enter__(self):
        self.patches = ExitStack()
        for module, name in (random, "random"), (np.random, "random"), (np.random, "rand"):
            self.patches.enter_context(mock.patch.object(module, name, self.on_rand))
        return super().__enter__()

    def __exit__(self, *error):
        self.patches.close()
        return super().__exit__(*error)


INTERCEPTED = {"rand", "rand_like", "uniform_", "exponential_", "bernoulli", "bernoulli_",
               "multinomial", "randint"}  # fmt: skip
UNSUPPORTED = {"randn", "randn_like", "randperm", "normal", "normal_", "geometric_", "cauchy_",
               "log_normal_", "randint_like", "poisson"}  # fmt: skip
IGNORED_OPTIONS = "generator", "device", "dtype", "layout", "out", "requires_grad", "pin_memory"
