"""Another decoder's randomness, taken over, so that every outcome of its own loop can be followed.

Inside `TakenOver`, torch's multinomial, bernoulli and randint are choices that an enumerator makes.
A uniform number is not drawn at all: where it is compared with a threshold, the enumerator chooses
on which side it lies, and the interval that is left is remembered. So a decoder that somebody else
wrote against torch.rand and its kin has an exact distribution, as our methods have.
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
from minispec.toys import Enumerate, every_outcome

KNOWN = "torch, random.random and numpy.random"
COUNTABLE = 64  # at most so many equally likely integers are enumerated
ALIASES = {
    "le": "lt", "less": "lt", "less_equal": "lt", "ge": "gt", "greater": "gt",
    "greater_equal": "gt", "multiply": "mul", "divide": "div", "true_divide": "div",
    "subtract": "sub", "negative": "neg",
}  # fmt: skip
REVERSED = {"lt": "gt", "gt": "lt", "add": "add", "mul": "mul", "sub": "rsub", "div": "rdiv",
            "searchsorted": "searchsorted"}  # fmt: skip
VIEWS = ("reshape", "view", "squeeze", "unsqueeze", "flatten", "expand", "ravel", "select",
         "permute", "transpose", "t", "index_select", "gather")  # fmt: skip
AS_IT_IS = ("to", "cpu", "cuda", "float", "double", "clone", "detach", "contiguous", "type_as",
            "clamp", "clamp_min", "numpy")  # fmt: skip


class NotTaken(Exception):
    """Why a decoder's randomness cannot be taken over."""


class TooMany(NotTaken):
    """There are more outcomes than were to be followed."""


def enumerate_outcomes(
    function: Callable[[int], tuple[int, ...]], most: float = math.inf
) -> dict[tuple[int, ...], float]:
    """The distribution of function(seed) over every outcome of its random choices. Raises NotTaken
    where it draws elsewhere, TooMany where there are more than `most`."""
    seeds, asked = count(), set()

    def once(randomness: Randomness) -> tuple[int, ...]:
        try:
            with TakenOver(randomness) as taken:
                tokens = function(next(seeds))
            asked.add(taken.asked)
            return tokens
        except IndexError as error:  # fewer choices than the last time
            raise NotTaken(f"it is not led by its random numbers alone ({error})") from error

    if len({once(Enumerate([])) for _ in range(12)}) > 1:
        raise NotTaken(f"it draws elsewhere than from {KNOWN}")
    total: dict[tuple[int, ...], float] = Counter()
    for n, (tokens, weight) in enumerate(every_outcome(once), start=1):
        if n > most:
            raise TooMany(f"there are more than {most} outcomes")
        total[tokens] += weight
    if asked == {False}:
        raise NotTaken(f"it draws nothing from {KNOWN}")
    if abs(sum(total.values()) - 1) > 1e-6:
        raise NotTaken("its outcomes do not add up: it is not led by its random numbers alone")
    return total


class SymbolicUniform:
    """Random numbers that nobody has drawn yet, in place of a tensor: scale · g(u) + shift.

    `index` says which uniform number u of `taken` each is; g is u itself, log u, or -log(-log u), a
    Gumbel number. So -log u, an exponential waiting time E, has scale -1. A quotient x / E, of
    which only the largest is ever asked for, has g "race" and stands for its logarithm.
    """

    __array_ufunc__ = None  # numpy leaves operators to this class

    def __init__(self, taken: "TakenOver", index: Tensor, g: str = "u", scale=1.0, shift=0.0):
        self.taken, self.g = taken, g
        parts = torch.broadcast_tensors(index, real(scale), real(shift))
        self.index, self.scale, self.shift = parts
        self.shape, self.device = self.index.shape, self.index.device

    @classmethod
    def __torch_function__(cls, function, types, args=(), options=None):
        name = function.__name__.strip("_")
        name = ALIASES.get(name, name)
        if not isinstance(args[0], SymbolicUniform):
            args, name = [args[1], args[0], *args[2:]], REVERSED.get(name, name)
        if not isinstance(args[0], SymbolicUniform):
            raise NotTaken(f"it calls torch's {name} with several random numbers")
        return getattr(args[0], name)(*args[1:], **(options or {}))

    def __getattr__(self, name: str):
        if name in AS_IT_IS:
            return lambda *args, **options: self
        if name in VIEWS:
            return lambda *args, **options: self.viewed(
                lambda x: getattr(x, name)(*args, **options)
            )
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotTaken(f"it calls torch's {name} with a random number")

    def viewed(self, view: Callable[[Tensor], Tensor]) -> "SymbolicUniform":
        return SymbolicUniform(self.taken, view(self.index), self.g, view(self.scale), view(self.shift))

    def __getitem__(self, at) -> "SymbolicUniform":
        return self.viewed(lambda x: x[at])

    def __len__(self) -> int:
        return len(self.index)

    def item(self) -> "SymbolicUniform":
        return self.reshape(())

    def tolist(self) -> list:
        return [self[i].tolist() for i in range(len(self))] if self.shape else self

    def __float__(self) -> float:
        raise NotTaken("it uses a random number for itself, not only in comparisons")

    __int__ = __bool__ = __index__ = __float__

    # ---- arithmetic ------------------------------------------------------------------------------

    def mul(self, x) -> "SymbolicUniform":
        return SymbolicUniform(self.taken, self.index, self.g, self.scale * real(x), self.shift * real(x))

    def add(self, x) -> "SymbolicUniform":
        return SymbolicUniform(self.taken, self.index, self.g, self.scale, self.shift + real(x))

    def neg(self) -> "SymbolicUniform":
        return self.mul(-1)

    def div(self, x) -> "SymbolicUniform":
        return self.mul(1 / real(x))

    def sub(self, x) -> "SymbolicUniform":
        return self.add(-real(x))

    def rsub(self, x) -> "SymbolicUniform":
        return self.neg().add(x)

    def log(self) -> "SymbolicUniform":
        if self.g == "u":  # what is added to u only keeps 0 away
            return SymbolicUniform(self.taken, self.index, "log")
        self.check(self.g == "log" and bool((self.scale < 0).all()), "log")
        return SymbolicUniform(self.taken, self.index, "gumbel", -1.0, self.scale.neg().log())

    def rdiv(self, x) -> "SymbolicUniform":
        self.check(self.g == "log" and bool((self.scale < 0).all()), "div")
        return SymbolicUniform(self.taken, self.index, "race", 1.0, (real(x) / -self.scale).log())

    __mul__ = __rmul__ = mul
    __add__ = __radd__ = add
    __neg__, __truediv__, __rtruediv__, __sub__, __rsub__ = neg, div, rdiv, sub, rsub

    def check(self, known: bool, name: str) -> None:
        if not known:
            raise NotTaken(f"it calls torch's {name} with a number made of random ones")

    # ---- choices ---------------------------------------------------------------------------------

    def lt(self, x) -> Tensor:
        """Which are below x; each chosen, unless what was chosen before decides it."""
        self.check(self.g != "race", "lt")
        parts = torch.broadcast_tensors(self.index, self.scale, self.shift, real(x))
        chosen = [self.below(*each) for each in zip(*(part.flatten().tolist() for part in parts))]
        return torch.tensor(chosen, dtype=torch.bool).reshape(parts[0].shape)

    def below(self, index: int, scale: float, shift: float, x: float) -> bool:
        if scale == 0:
            return shift < x
        bound = (x - shift) / scale
        if self.g == "log":
            bound = math.exp(min(bound, 0.0))
        elif self.g == "gumbel":
            bound = math.exp(-math.exp(min(-bound, 700.0)))
        return self.taken.less(index, bound) == (scale > 0)

    def gt(self, x) -> Tensor:
        return ~self.lt(x)

    __lt__ = __le__ = lt
    __gt__ = __ge__ = gt

    def argmax(self, dim: int = -1, keepdim: bool = False) -> Tensor:
        """Of Gumbel numbers, or x / E: i with probability in proportion to exp(shift_i)."""
        self.check(self.g in ("gumbel", "race") and bool((self.scale == 1).all()), "argmax")
        return self.raced(self.shift.exp(), dim, keepdim)

    def argmin(self, dim: int = -1, keepdim: bool = False) -> Tensor:
        """Of waiting times: i with probability in proportion to its rate."""
        self.check(self.g == "log" and bool((self.scale < 0).all()), "argmin")
        return self.raced(-1 / self.scale, dim, keepdim)

    def raced(self, weights: Tensor, dim: int, keepdim: bool) -> Tensor:
        self.check(dim in (-1, weights.dim() - 1), "argmax")
        return self.taken.categorical(weights, keepdim)

    def searchsorted(self, thresholds, **options) -> Tensor:
        """How many thresholds lie below each."""
        return self[..., None].gt(thresholds).sum(-1)

    bucketize = searchsorted


def real(x) -> Tensor:
    if isinstance(x, SymbolicUniform):
        raise NotTaken("it compares or combines two random numbers")
    return torch.as_tensor(x, dtype=torch.float64)


class TakenOver(TorchFunctionMode):
    """While it is entered, what torch, `random` and numpy's functions draw is asked of
    `randomness`. What a decoder draws elsewhere is not seen."""

    def __init__(self, randomness: Randomness):
        super().__init__()
        self.randomness, self.asked = randomness, False
        self.left: list[tuple[float, float]] = []  # of each uniform number: where it can be
        self.inside: dict[int, tuple[Tensor, SymbolicUniform]] = {}  # tensors that were filled in place

    def __torch_function__(self, function, types, args=(), options=None):
        options = options or {}
        name = getattr(function, "__name__", "")
        if name in RANDOM:
            self.asked, drawn = True, getattr(self, f"on_{name.strip('_')}")
            result = drawn(*args, **{k: v for k, v in options.items() if k not in PLACE})
            if name.endswith("_"):  # whoever holds the tensor finds the numbers in it
                self.inside[id(args[0])] = args[0], result
            return result
        if name in UNKNOWN:
            raise NotTaken(f"it draws by torch.{name}")
        if self.inside:
            args = [self.inside[id(x)][1] if id(x) in self.inside else x for x in args]
        return function(*args, **options)

    # ---- torch's functions -----------------------------------------------------------------------

    def on_rand(self, *size, **_) -> SymbolicUniform:
        size = size[0] if size and not isinstance(size[0], int) else size
        n, self.asked = math.prod(size), True
        self.left += [(0.0, 1.0)] * n
        return SymbolicUniform(self, torch.arange(len(self.left) - n, len(self.left)).reshape(tuple(size)))

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
        left, drawn = p.double().clone(), []
        if not (left.isfinite().all() and (left >= 0).all() and (left.sum(-1) > 0).all()):
            raise RuntimeError("torch.multinomial refuses such probabilities")
        for _ in range(num_samples):
            drawn.append(self.categorical(left, keepdim=True))
            if not replacement:
                left.scatter_(-1, drawn[-1], 0.0)
        return torch.cat(drawn, -1)

    def on_randint(self, *args, **options) -> Tensor:
        low, high, size = args if len(args) == 3 else (0, *args)
        if high - low > COUNTABLE:
            raise NotTaken(f"it draws one of {high - low} integers")
        weights = torch.ones(*size, high - low)
        return low + self.categorical(weights)

    # ---- choices ---------------------------------------------------------------------------------

    def categorical(self, weights: Tensor, keepdim: bool = False) -> Tensor:
        """For each row of weights (..., V) an index (...) drawn in proportion."""
        rows = weights.reshape(-1, weights.shape[-1])
        drawn = torch.tensor([self.randomness.categorical(row) for row in rows])
        return drawn.reshape([*weights.shape[:-1]] + [1] * keepdim)

    def less(self, index: int, bound: float) -> bool:
        """Whether a uniform number is below the bound."""
        low, high = self.left[index]
        bound = min(max(bound, low), high)
        if self.randomness.bernoulli((bound - low) / (high - low)):
            self.left[index] = low, bound
            return True
        self.left[index] = bound, high
        return False

    def __enter__(self):
        self.patches = ExitStack()
        for module, name in (random, "random"), (np.random, "random"), (np.random, "rand"):
            self.patches.enter_context(mock.patch.object(module, name, self.on_rand))
        return super().__enter__()

    def __exit__(self, *error):
        self.patches.close()
        return super().__exit__(*error)


RANDOM = {"rand", "rand_like", "uniform_", "exponential_", "bernoulli", "bernoulli_", "multinomial",
          "randint"}  # fmt: skip
UNKNOWN = {"randn", "randn_like", "randperm", "normal", "normal_", "geometric_", "cauchy_",
           "log_normal_", "randint_like", "poisson"}  # fmt: skip
PLACE = "generator", "device", "dtype", "layout", "out", "requires_grad", "pin_memory"
