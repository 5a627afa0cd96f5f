"""A context in which torch's random numbers are choices of an enumerator."""

import re
import threading
from collections.abc import Callable
from functools import cache
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from minispec.certify.functions import symbolic
from minispec.certify.functions.symbolic import NEGLIGIBLE, CannotEnumerate, SymbolicUniform, like
from minispec.sampling import Randomness

MAX_CHOICES = 2000  # of one call
DRAWS = ("(rand|normal_|geometric_|cauchy_|log_normal_|binomial)|"
         "(normal|poisson|uniform_|exponential_|bernoulli_?|multinomial)$")  # fmt: skip
is_draw = cache(re.compile(DRAWS).match)  # of a function's name
HARMLESS = symbolic.METADATA | {"__hash__"}  # functions that reveal nothing about the numbers
REAL = np.random.default_rng(0)  # of the numbers that nobody chooses


class InterceptedRandomness(TorchFunctionMode):
    """While it is active, torch's functions draw from `randomness`, and so do those of `random` and
    numpy that generators.py replaces. `used` is whether anything was drawn.

    The decoder gets tensors, whose use is intercepted. Any other use of them sees other numbers in
    every run. `memory` holds what they stand for, as long as the decoder keeps them.

    Before each draw, a number is taken from the real generator: `drawn` maps it to the generator's
    kind. The same number twice means that a stream of random numbers is repeated."""

    def __init__(self, randomness: Randomness):
        super().__init__()
        self.randomness, self.used, self.busy, self.choices = randomness, False, False, 0
        self.intervals: list[tuple[float, float] | None] = []  # of uniform numbers; None: raced
        self.samples = torch.zeros(0, dtype=torch.float64)  # a value of each uniform number
        self.memory = WeakKeyDictionary()  # storage -> {view: SymbolicUniform}
        self.filled, self.drawn = [], {}  # tensors whose memory numpy may have, too; see above
        self.torch_states = {torch_state()}  # of the global generator, if nothing else uses it

    def __enter__(self):
        SymbolicUniform.active, self.thread = self, threading.get_ident()
        return super().__enter__()

    def __exit__(self, *error):
        """Turn random numbers that are left over into ordinary ones, within their intervals."""
        SymbolicUniform.active = None
        super().__exit__(*error)
        low, high = np.array([x or (0, 1) for x in self.intervals], float).reshape(-1, 2).T
        self.samples = torch.from_numpy(REAL.uniform(low, high))
        with torch.inference_mode():
            for storage, numbers in list(self.memory.items()):
                for (_, *part), x in numbers.items():
                    if 0 not in part[-1]:  # the strides of an expanded view
                        x.sample.new_empty(0).set_(storage, *part).copy_(x.at(self.samples))

    def __torch_function__(self, function, types, args=(), options=None):
        name, options = getattr(function, "__name__", ""), options or {}
        if is_draw(name) or options.get("generator"):
            return self.draw(function, name, args, options)
        if self.busy or name in HARMLESS or not self.has_numbers([*args, *options.values()]):
            return function(*args, **options)
        return self.operate(function, name, args, options)

    def has_numbers(self, x) -> bool:
        """Return whether x is, or holds, random numbers or views of them."""
        if type(x) in (tuple, list, dict):
            return any(map(self.has_numbers, x.values() if type(x) is dict else x))
        return type(x) is SymbolicUniform or bool(self.memory and storage_of(x) in self.memory)

    def draw(self, function: Callable, name: str, args: tuple, options: dict):
        """Call one of torch's random functions."""
        generator = options.get("generator")
        self.require_torch_state()
        device = getattr(generator, "device", "cpu")
        number = torch.randint(2**62, (), generator=generator, device=device)
        self.note_draw("torch", number.item())
        if not hasattr(self, f"on_{name}"):
            raise CannotEnumerate(f"it uses torch.{name}")
        kept = name.endswith(("_", "_like"))  # the values of its first argument are not used
        args = *args[:kept], *symbolic.map_nested(self.number_of, tuple(args[kept:]))
        options = {key: x if key == "out" else self.number_of(x) for key, x in options.items()}
        real = function(*args, **options)  # raises the errors of wrong arguments
        self.torch_states.add(torch_state())
        result = getattr(self, f"on_{name}")(real, *args, **options)
        if isinstance(result, Tensor):
            return real.copy_(result)
        real.copy_(result.values)
        self.filled += [real] * (name.endswith("_") or "out" in options)
        return self.stand_in(result, real, name)

    def operate(self, function: Callable, name: str, args: tuple, options: dict):
        """Call a function that may have random numbers among its arguments."""
        if self.thread != threading.get_ident():
            raise CannotEnumerate("it uses a random number in another thread")
        numbers: list[tuple[SymbolicUniform, object]] = []

        def real_of(x):
            number = self.number_of(x)
            if type(number) is not SymbolicUniform:
                return number
            numbers.append((number, number.sample if x is number else x))
            return numbers[-1][1]

        args, options = symbolic.map_nested(real_of, (tuple(args), options))
        if not numbers or name in symbolic.METADATA:
            return function(*args, **options)
        if len(numbers) > 1:
            raise CannotEnumerate(f"it calls {name.strip('_')} with several random numbers")
        ((number, sample),) = numbers
        position = [i for i, x in enumerate(args) if x is sample] or [2]
        method = number.find(name, *position)
        try:
            self.busy = True  # the functions called here are not intercepted
            number.check("assignment", sample)  # to the same memory under another name
            result = method(*(x for x in args if x is not sample), **options)
            return self.stand_in(result, function(*args, **options), name)
        except Exception as error:
            function(*args, **options)  # raises if it is the decoder's own error
            raise CannotEnumerate(f"it calls {name} with a random number: {error}") from error
        finally:
            self.busy = False

    def stand_in(self, result, real, name: str):
        """Return what the decoder gets for a result that it expects to be like `real`."""
        if type(result) in (list, np.ndarray):  # of numbers that stand for themselves
            return result
        if isinstance(result, tuple):
            return tuple(self.stand_in(x, y, name) for x, y in zip(result, real))
        if real is NotImplemented:
            return real
        if type(result) is not SymbolicUniform:
            return like(real, result.reshape(np.shape(real)))
        result.sample = real
        result.check(name, real)
        if isinstance(real, Tensor) and real.numel():
            result.sample = real.clone()  # `real` itself is only kept by the decoder
            view = real.dtype, real.storage_offset(), real.shape, real.stride()
            self.memory.setdefault(storage_of(real), {})[view] = result
        return real if isinstance(real, Tensor) else result

    def number_of(self, x):
        """Return the random numbers for which x stands."""
        if not self.memory or (storage := storage_of(x)) not in self.memory:
            return symbolic.ordinary(x)
        view = x.dtype, x.storage_offset(), x.shape, x.stride()
        if view not in self.memory[storage]:
            raise CannotEnumerate("it fills a tensor with random numbers and uses a view of it")
        return self.memory[storage][view]

    def note_draw(self, kind: str, number: float) -> None:
        """Note that a generator is drawn from, whose next number would be this."""
        self.used = True
        if number in self.drawn:
            raise CannotEnumerate(f"it draws from {kind} twice after the same seed, so that its "
                                  "random numbers repeat within a call")  # fmt: skip
        self.drawn[number] = kind

    def require_torch_state(self) -> None:
        """Raise CannotEnumerate if torch's global generator was used, not only seeded."""
        unused = torch_state(torch.Generator().manual_seed(torch.initial_seed()))
        if torch_state() not in {*self.torch_states, unused}:
            raise CannotEnumerate("it uses torch in a way that cannot be intercepted")

    # ---- torch's functions, and their results for real random numbers ----------------------------

    def uniform(self, real, *_, **options) -> SymbolicUniform:
        """Return lazy uniform random numbers in the shape and type of `real`."""
        shape, n = tuple(np.shape(real)), len(self.samples)
        samples = torch.from_numpy(REAL.uniform(0.01, 0.99, (*shape, 1)))[..., 0]
        self.intervals += [(0.0, 1.0)] * samples.numel()
        self.samples = torch.cat([self.samples, samples.flatten()])
        index = torch.arange(n, len(self.samples)).reshape(shape)
        return SymbolicUniform(self, like(real, samples), index, values=samples)

    on_rand = on_rand_like = uniform

    def on_uniform_(self, real, x, low=0.0, high=1.0, **options) -> SymbolicUniform:
        low, high = options.get("from", low), options.get("to", high)
        return self.uniform(real).derive(high - low, low)

    def on_exponential_(self, real, x, lambd=1.0, **options) -> SymbolicUniform:
        return self.uniform(real).on_log().derive(-1 / lambd, 0.0)

    def on_bernoulli(self, real, input, p=None, **options) -> Tensor:
        p = (0.5 if input is real else input) if p is None else p  # in place or not
        chances = torch.as_tensor(p).broadcast_to(real.shape).flatten().tolist()
        chosen = [self.choose(self.randomness.bernoulli, chance) for chance in chances]
        return torch.tensor(chosen).reshape(real.shape)

    on_bernoulli_ = on_bernoulli

    def on_multinomial(self, real, input, num_samples, replacement=False, **options) -> Tensor:
        if input.dtype.itemsize < 4:
            raise CannotEnumerate(f"it uses torch.multinomial with {input.dtype}")
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

    def race(self, indices: list[int], weights: Tensor) -> int:
        """Choose which of these independent uniform numbers wins, with proportional chance."""
        intervals = [self.interval(i) for i in {max(i, ~i) for i in indices}]
        unused = all(low < NEGLIGIBLE and high > 1 - NEGLIGIBLE for low, high in intervals)
        if len(intervals) < len(indices) or not (unused and weights.isfinite().all()):
            raise CannotEnumerate("it takes an argmax of random numbers that are not independent")
        for i in indices:
            self.intervals[max(i, ~i)] = None
        return self.choose(self.randomness.categorical, weights)

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
        below = self.choose(self.randomness.bernoulli, (bound - low) / (high - low))
        self.intervals[index] = (low, bound) if below else (bound, high)
        return below

    def choose(self, verb: Callable, argument):
        """Make one choice, by a verb of `randomness`."""
        self.choices += 1
        if self.choices > MAX_CHOICES:  # perhaps it draws until a number is accepted
            raise CannotEnumerate(f"it makes more than {MAX_CHOICES} random choices in one call")
        try:
            return verb(argument)
        except IndexError as error:  # the script has more options than there are
            raise CannotEnumerate(f"not only random numbers matter ({error})") from error


def storage_of(x) -> torch.UntypedStorage | None:
    """Return the memory of a tensor, which its views share."""
    return x.untyped_storage() if isinstance(x, Tensor) and x.layout == torch.strided else None


def torch_state(generator: torch.Generator = torch.default_generator) -> bytes:
    return generator.get_state().numpy().tobytes()
