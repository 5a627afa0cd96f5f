"""A context in which torch's random numbers are choices of an enumerator."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from minispec.certify.functions.symbolic import (
    IN_PLACE,
    NEGLIGIBLE,
    CannotEnumerate,
    SymbolicUniform,
    map_nested,
    numbers_in,
    precise,
)
from minispec.sampling import Randomness

MAX_CHOICES = 2000  # of one call
UNSUPPORTED = {
    "randint", "randint_like", "random_", "randn", "randn_like", "randperm", "normal", "normal_",
    "geometric_", "cauchy_", "log_normal_", "poisson", "binomial",
}  # fmt: skip
METADATA = {"__get__", "__hash__", "__len__", "size", "dim", "numel", "stride"}  # not of values
REAL = np.random.default_rng(0)  # ordinary numbers, for what the enumerator does not choose


class InterceptedRandomness(TorchFunctionMode):
    """While it is active, torch's functions draw from `randomness`, and so do those of `random` and
    numpy that generators.py replaces. `used` is whether anything was drawn.

    Before each draw, a number is taken from the real generator: `drawn` are these numbers, with the
    generators' kinds. The same number twice means that a stream of random numbers is repeated."""

    active: "InterceptedRandomness | None" = None

    def __init__(self, randomness: Randomness):
        super().__init__()
        self.randomness, self.used, self.ended, self.choices = randomness, False, False, 0
        self.intervals: list[tuple[float, float] | None] = []  # of uniform numbers; None: raced
        self.races: dict[tuple[int, ...], tuple[Tensor, int]] = {}  # chances and winner, by numbers
        self.tensors: dict[int, tuple[Tensor, SymbolicUniform]] = {}  # of numbers, by storage
        self.drawn: dict[float, str] = {}

    def __enter__(self):
        InterceptedRandomness.active = self
        self.note_torch_state()
        return super().__enter__()

    def __exit__(self, *error):
        InterceptedRandomness.active, self.ended = None, True
        super().__exit__(*error)
        with torch.inference_mode():
            for tensor, number in self.tensors.values():
                tensor.copy_(number.value())

    def __torch_function__(self, function, types, args=(), options=None):
        name, options = getattr(function, "__name__", ""), options or {}
        if name in UNSUPPORTED or hasattr(self, f"on_{name}") or options.get("generator"):
            return self.draw(function, name, args, options)
        if name in METADATA:
            return function(*args, **options)
        return self.operate(function, name, args, options)

    def draw(self, function: Callable, name: str, args: tuple, options: dict):
        """Call one of torch's random functions."""
        self.note_torch_draw(options.get("generator"))
        if not hasattr(self, f"on_{name}"):
            raise CannotEnumerate(f"it uses torch.{name}")
        kept = name.endswith(("_", "_like"))  # the values of its first argument are not used
        args = *args[:kept], *map_nested(self.number_of, tuple(args[kept:]))
        options = {key: x if key == "out" else self.number_of(x) for key, x in options.items()}
        real = function(*args, **options)  # raises the errors of wrong arguments
        self.note_torch_state()
        result = getattr(self, f"on_{name}")(real, *args, **options)
        if isinstance(result, Tensor):
            return real.copy_(result)
        if name.endswith("_") or options.get("out") is not None:
            return self.fill(real, result)
        return self.stand_in(result)

    # ---- numbers and tensors ---------------------------------------------------------------------

    def operate(self, function: Callable, name: str, args: tuple, options: dict):
        """Call a function that may have random numbers among its arguments."""
        symbolic = map_nested(self.number_of, (tuple(args), options))
        numbers = numbers_in(symbolic)
        if not numbers:
            return function(*symbolic[0], **symbolic[1])
        if len(numbers) > 1:
            raise CannotEnumerate(f"it calls {name.strip('_')} with several random numbers")
        result = numbers[0].operate(name, *symbolic)
        if name in IN_PLACE or name[2:-2] in IN_PLACE:
            return self.fill(args[0], result)
        return map_nested(self.stand_in, result)

    def number_of(self, x):
        """Return the random numbers for which a tensor stands."""
        if type(x) is SymbolicUniform:
            return x.value() if x.source.ended else x
        if not (self.tensors and isinstance(x, Tensor) and x.layout == torch.strided):
            return x
        tensor, number = self.tensors.get(x.untyped_storage().data_ptr(), (x, x))
        if tensor is not x:
            raise CannotEnumerate("it fills a tensor with random numbers and uses a view of it")
        return number

    def stand_in(self, x):
        """Return a tensor that stands for random numbers that seem to come from torch."""
        if type(x) is not SymbolicUniform or x.origin != "torch":
            return x
        return self.fill(torch.empty(x.index.shape, dtype=x.precision), x)

    def fill(self, target, number: SymbolicUniform):
        """Assign random numbers to a tensor, or to an array of them. Its memory gets others, so
        that a use of them which is not noticed changes from run to run."""
        known = self.number_of(target)
        if type(known) is SymbolicUniform:
            known.overwrite(number)
        number.require(target.shape == number.index.shape, "assignment")
        if isinstance(target, Tensor) and target.numel():
            if known is target:
                self.tensors[target.untyped_storage().data_ptr()] = target, number
            target.copy_(torch.from_numpy(REAL.random((*target.shape, 1)))[..., 0])
        return target

    # ---- seeds -----------------------------------------------------------------------------------

    def note_draw(self, kind: str, number: float) -> None:
        """Record that a generator is drawn from, whose next number would be this."""
        self.used = True
        if number in self.drawn:
            raise CannotEnumerate(f"it draws from {kind} twice after the same seed, so that its "
                                  "random numbers repeat within a call")  # fmt: skip
        self.drawn[number] = kind

    def note_torch_draw(self, generator: torch.Generator | None) -> None:
        device = generator.device if generator else "cpu"
        number = torch.randint(2**62, (), generator=generator, device=device)
        self.note_draw("torch", number.item())
        self.note_torch_state()

    def note_torch_state(self) -> None:
        """Note the state that torch's global generator has if nothing else uses it."""
        self.torch_state = torch.get_rng_state().numpy().tobytes()

    # ---- torch's functions: `real` is their result for real random numbers -----------------------

    def uniform(self, size, origin: str = "torch", precision=torch.float64) -> SymbolicUniform:
        """Return lazy uniform random numbers."""
        n = math.prod(size)
        self.intervals += [(0.0, 1.0)] * n
        index = torch.arange(len(self.intervals) - n, len(self.intervals)).reshape(tuple(size))
        parts = index, torch.ones_like(index).double(), torch.zeros_like(index).double()
        return SymbolicUniform(self, *parts, origin=origin, precision=precise(precision))

    def on_rand(self, real, *_, **options) -> SymbolicUniform:
        return self.uniform(real.shape, precision=real.dtype)

    on_rand_like = on_rand

    def on_uniform_(self, real, x, low=0.0, high=1.0, **options) -> SymbolicUniform:
        low, high = options.get("from", low), options.get("to", high)
        return self.on_rand(real).on_mul(high - low).on_add(low)

    def on_exponential_(self, real, x, lambd=1.0, **options) -> SymbolicUniform:
        return self.on_rand(real).on_log().on_div(-lambd)

    def on_bernoulli(self, real, input, p=None, **options) -> Tensor:
        chances = torch.as_tensor(input if p is None else p).broadcast_to(real.shape)
        chosen = [self.choose(self.randomness.bernoulli, p) for p in chances.flatten().tolist()]
        return torch.tensor(chosen, dtype=real.dtype).reshape(real.shape)

    def on_bernoulli_(self, real, x, p=0.5, **options) -> Tensor:
        return self.on_bernoulli(real, x, p)

    def on_multinomial(self, real, input, num_samples, replacement=False, **options) -> Tensor:
        precise(input.dtype)
        remaining, drawn = input.double().clone(), []
        for _ in range(num_samples):
            drawn.append(self.categorical(remaining))
            if not replacement:
                remaining.scatter_(-1, drawn[-1], 0.0)
        return torch.cat(drawn, -1)

    # ---- choices ---------------------------------------------------------------------------------

    def categorical(self, weights: Tensor) -> Tensor:
        """Draw an index (..., 1) for each row of weights (..., V), with proportional chance."""
        rows = weights.reshape(-1, weights.shape[-1])
        drawn = torch.tensor([self.choose(self.randomness.categorical, row) for row in rows])
        return drawn.long().reshape([*weights.shape[:-1], 1])

    def race(self, index: list[int], weights: Tensor) -> int:
        """Choose which of these uniform numbers wins, with proportional chance. Afterwards they are
        no longer independent, so they may only be used again in the same race."""
        chances = weights / weights.sum()
        before = self.races.get(tuple(index))
        if before and torch.allclose(before[0], chances, rtol=0, atol=1e-9):
            return before[1]
        numbers = {max(i, ~i) for i in index}
        intervals = [self.interval(i) for i in numbers]
        unused = all(low < NEGLIGIBLE and high > 1 - NEGLIGIBLE for low, high in intervals)
        if len(numbers) < len(index) or not (unused and chances.isfinite().all()):
            raise CannotEnumerate("it takes an argmax of random numbers that are not independent")
        winner = self.choose(self.randomness.categorical, weights)
        self.races[tuple(index)] = chances, winner
        for i in numbers:
            self.intervals[i] = None
        return winner

    def interval(self, index: int) -> tuple[float, float]:
        if self.intervals[index] is None:
            raise CannotEnumerate("it uses random numbers again after an argmax or argmin of them")
        return self.intervals[index]

    def is_below(self, index: int, bound: float) -> bool:
        """Choose whether a uniform number is below the bound, and narrow its interval."""
        if index < 0:
            return not self.is_below(~index, 1 - bound)
        low, high = self.interval(index)
        bound = min(max(bound, low), high)
        if self.choose(self.randomness.bernoulli, (bound - low) / (high - low)):
            self.intervals[index] = low, bound
            return True
        self.intervals[index] = bound, high
        return False

    def choose(self, verb: Callable, argument):
        """Make one choice, by a verb of `randomness`."""
        self.choices += 1
        if self.choices > MAX_CHOICES:  # perhaps it draws until a number is accepted
            raise CannotEnumerate(f"it makes more than {MAX_CHOICES} random choices in one call")
        try:
            return verb(argument)
        except IndexError as error:  # the script has more options than there are
            raise CannotEnumerate(f"not only random numbers matter ({error})") from error

    def value(self, index: int) -> float:
        """Return an ordinary random number in the interval of a uniform number."""
        if index < 0:
            return 1 - self.value(~index)
        x = REAL.uniform(*(self.intervals[index] or (0.0, 1.0)))
        self.intervals[index] = x, x
        return x
