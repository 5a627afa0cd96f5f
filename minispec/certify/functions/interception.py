"""A context in which torch's random numbers are choices of an enumerator."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from minispec.certify.functions.symbolic import CannotEnumerate, SymbolicUniform, dispatch
from minispec.sampling import Randomness

MAX_CHOICES = 2000  # of one call


class InterceptedRandomness(TorchFunctionMode):
    """While it is active, torch's functions draw from `randomness`, and so do those of `random` and
    numpy that generators.py replaces. `used` is whether anything was drawn.

    `seeds` are the seeds that this call of the decoder gave to its sources; `drawn_from` are those
    after which a number was drawn. A seed is a pair: the kind of source and the number."""

    active: "InterceptedRandomness | None" = None

    def __init__(self, randomness: Randomness):
        super().__init__()
        self.randomness, self.used, self.choices = randomness, False, 0
        self.intervals: list[tuple[float, float]] = []  # where each uniform number lies
        self.filled_in_place: dict[int, tuple[Tensor, SymbolicUniform]] = {}  # by storage
        self.seeds: dict[object, tuple[tuple[str, str], object]] = {}  # by source; a mark each time
        self.drawn_from: dict[tuple[str, str], object] = {}  # the mark of each seed

    def __enter__(self):
        InterceptedRandomness.active = self
        return super().__enter__()

    def __exit__(self, *error):
        InterceptedRandomness.active = None
        return super().__exit__(*error)

    def __torch_function__(self, function, types, args=(), options=None):
        name = getattr(function, "__name__", "")
        if name in UNSUPPORTED or hasattr(self, f"on_{name}"):
            return self.draw(name, args, dict(options or {}))
        if self.filled_in_place and name not in METADATA:
            replaced = self.replace_filled(tuple(args))
            options = {key: self.replace_filled(x) for key, x in (options or {}).items()}
            if any(a is not b for a, b in zip(args, replaced)):
                return dispatch(name, replaced, options)
        return function(*args, **(options or {}))

    def draw(self, name: str, args: tuple, options: dict):
        """Call one of torch's random functions."""
        self.note_torch_draw(options.pop("generator", None))
        if name in UNSUPPORTED:
            raise CannotEnumerate(f"it uses torch.{name}")
        if "input" in options:
            args = options.pop("input"), *args
        in_place = name.endswith("_")
        target = args[0] if in_place else options.get("out")
        args = *args[:in_place], *self.replace_filled(tuple(args[in_place:]))
        options = {key: x for key, x in options.items() if key not in IGNORED_OPTIONS}
        result = getattr(self, f"on_{name}")(*args, **options)
        if target is None:
            return result
        if isinstance(result, Tensor):
            return target.copy_(result)
        # later uses of the tensor see the numbers
        self.filled_in_place[target.untyped_storage().data_ptr()] = target, result
        return result

    def replace_filled(self, x):
        """Replace tensors that were filled with random numbers in place."""
        if type(x) in (list, tuple):
            parts = type(x)(self.replace_filled(part) for part in x)
            return parts if any(a is not b for a, b in zip(parts, x)) else x
        if not isinstance(x, Tensor):
            return x
        tensor, numbers = self.filled_in_place.get(x.untyped_storage().data_ptr(), (x, x))
        if tensor is not x:
            raise CannotEnumerate("it fills a tensor with random numbers and uses a view of it")
        return numbers

    # ---- seeds -----------------------------------------------------------------------------------

    def note_seed(self, kind: str, source: object, seed: str) -> None:
        """Record that a source was given a seed."""
        self.seeds[source] = (kind, seed), object()

    def note_draw(self, kind: str, source: object) -> None:
        """Record that a source was drawn from."""
        self.used = True
        if source not in self.seeds:
            return
        seed, given = self.seeds[source]
        if self.drawn_from.setdefault(seed, given) is not given:
            raise CannotEnumerate(f"it draws from {kind} twice after the same seed, so that its "
                                  "random numbers repeat within a call")  # fmt: skip

    def note_torch_draw(self, generator: torch.Generator | None) -> None:
        generator = None if generator is torch.default_generator else generator
        if generator is not None and generator not in self.seeds:
            seed = generator.initial_seed()
            unused = torch.Generator(generator.device).manual_seed(seed)
            if torch.equal(unused.get_state(), generator.get_state()):
                self.note_seed("torch", generator, str(seed))
        self.note_draw("torch", "torch" if generator is None else generator)

    # ---- torch's functions -----------------------------------------------------------------------

    def uniform(self, size: tuple[int, ...], origin: str = "torch") -> SymbolicUniform:
        """Return lazy uniform random numbers."""
        n = math.prod(size)
        self.intervals += [(0.0, 1.0)] * n
        index = torch.arange(len(self.intervals) - n, len(self.intervals))
        return SymbolicUniform(self, index.reshape(tuple(size)), origin=origin)

    def on_rand(self, *size, **options) -> SymbolicUniform:
        size = options.get("size", size)
        return self.uniform(size[0] if size and not isinstance(size[0], int) else size)

    def on_rand_like(self, x) -> SymbolicUniform:
        return self.uniform(x.shape)

    def on_uniform_(self, x, low=0.0, high=1.0) -> SymbolicUniform:
        return self.uniform(x.shape).mul(high - low).add(low)

    def on_exponential_(self, x, lambd=1.0) -> SymbolicUniform:
        return self.uniform(x.shape).log().div(-lambd)

    def on_bernoulli(self, x, p=None) -> Tensor:
        chances = x if p is None else torch.as_tensor(p).broadcast_to(x.shape)
        chosen = [self.choose(self.randomness.bernoulli, p) for p in chances.flatten().tolist()]
        return torch.tensor(chosen, dtype=x.dtype).reshape(chances.shape)

    def on_bernoulli_(self, x, p=0.5) -> Tensor:
        return self.on_bernoulli(x, p)

    def on_multinomial(self, p, num_samples, replacement=False) -> Tensor:
        remaining, drawn = p.double().clone(), []
        valid = remaining.isfinite().all() and (remaining >= 0).all()
        if not (valid and (remaining.sum(-1) > 0).all()):
            raise RuntimeError("torch.multinomial rejects such probabilities")
        for _ in range(num_samples):
            drawn.append(self.categorical(remaining, keepdim=True))
            if not replacement:
                remaining.scatter_(-1, drawn[-1], 0.0)
        return torch.cat(drawn, -1)

    # ---- choices ---------------------------------------------------------------------------------

    def categorical(self, weights: Tensor, keepdim: bool = False) -> Tensor:
        """Draw an index (...) for each row of weights (..., V), with proportional probability."""
        rows = weights.reshape(-1, weights.shape[-1])
        drawn = torch.tensor([self.choose(self.randomness.categorical, row) for row in rows])
        return drawn.long().reshape([*weights.shape[:-1]] + [1] * keepdim)

    def is_below(self, index: int, bound: float) -> bool:
        """Choose whether a uniform number is below the bound, and narrow its interval."""
        low, high = self.intervals[index]
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


UNSUPPORTED = {
    "randint", "randint_like", "random_", "randn", "randn_like", "randperm", "normal", "normal_",
    "geometric_", "cauchy_", "log_normal_", "poisson", "binomial",
}  # fmt: skip
METADATA = {"__get__", "size", "dim", "numel", "stride"}  # the same before and after filling
IGNORED_OPTIONS = "device", "dtype", "layout", "out", "requires_grad", "pin_memory"
