"""Stand-ins for the random numbers of `random`, `secrets` and numpy, and for every module-level
name of them, also for names that were imported before."""

import math
import random
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from minispec.certify.functions.interception import MAX_INTEGERS, InterceptedRandomness
from minispec.certify.functions.symbolic import CannotEnumerate, SymbolicUniform


class StandIn:
    """Draws from the active InterceptedRandomness. Without one it is the real generator, because a
    decoder may keep it. Methods that cannot be enumerated raise CannotEnumerate."""

    kind, origin = "", "python"

    def __init__(self, real: object, seed: str | None = None):
        self._real = real
        if seed is not None and InterceptedRandomness.active:
            InterceptedRandomness.active.note_seed(self.kind, self, seed)

    def __getattribute__(self, name: str):
        if InterceptedRandomness.active is None and not name.startswith("_"):
            return getattr(self._real, name)
        return object.__getattribute__(self, name)

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        self._draws()
        raise CannotEnumerate(f"it uses {name} of {self.kind}")

    def _draws(self) -> InterceptedRandomness:
        source = InterceptedRandomness.active
        source.note_draw(self.kind, self)
        return source

    def _uniform(self, size: tuple[int, ...] = ()) -> SymbolicUniform:
        return self._draws().uniform(size, self.origin)

    def _index(self, weights: list[float]) -> int:
        return int(self._draws().categorical(torch.as_tensor(weights, dtype=torch.float64)))

    def _below(self, n: int) -> int:
        if n > MAX_INTEGERS:
            raise CannotEnumerate(f"it draws one of {n} integers")
        return self._index([1.0] * n)


class PythonRandom(StandIn):
    """random.Random, and the functions of `random`."""

    kind = "random"

    def __init__(self, seed=None, real: random.Random | None = None):
        super().__init__(REAL_RANDOM(seed) if real is None else real, _name(seed))

    def seed(self, a=None, version: int = 2) -> None:
        InterceptedRandomness.active.note_seed(self.kind, self, str(a))

    def getstate(self) -> tuple:
        return self._real.getstate()

    def setstate(self, state: tuple) -> None:
        self.seed("a saved state")

    def random(self) -> SymbolicUniform:
        return self._uniform()

    def uniform(self, a, b) -> SymbolicUniform:
        return self._uniform() * (b - a) + a

    def expovariate(self, lambd=1.0) -> SymbolicUniform:
        return self._uniform().log().div(-lambd)

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        values = range(start) if stop is None else range(start, stop, step)
        return values[self._below(len(values))]

    def randint(self, a: int, b: int) -> int:
        return a + self._below(b - a + 1)

    def getrandbits(self, k: int) -> int:
        return self._below(2**k)

    def choice(self, seq):
        return seq[self._below(len(seq))]

    def choices(self, population, weights=None, *, cum_weights=None, k: int = 1) -> list:
        if cum_weights is not None:
            weights = np.diff(np.asarray(cum_weights, dtype=float), prepend=0.0)
        weights = [1.0] * len(population) if weights is None else weights
        weights = [float(weight) for weight in weights]
        return [population[self._index(weights)] for _ in range(k)]

    def sample(self, population, k: int) -> list:
        remaining = list(population)
        return [remaining.pop(self._below(len(remaining))) for _ in range(k)]

    def shuffle(self, x: list) -> None:
        x[:] = self.sample(x, len(x))


class SystemRandom(PythonRandom):
    """random.SystemRandom, and the functions of `secrets`."""

    kind = "secrets"

    def __init__(self, seed=None):
        super().__init__(real=REAL_SYSTEM_RANDOM())

    def seed(self, *args) -> None:  # ignored, as in the original
        pass

    def randbelow(self, n: int) -> int:
        return self._below(n)

    randbits = PythonRandom.getrandbits


class NumpyDraws(StandIn):
    """What RandomState and Generator have in common."""

    origin = "numpy"

    def random(self, size=None, dtype=None, out=None) -> SymbolicUniform:
        if out is not None:
            raise CannotEnumerate("it uses numpy's random(out=...)")
        return self._uniform(_shape(size))

    def uniform(self, low=0.0, high=1.0, size=None) -> SymbolicUniform:
        low, high = np.asarray(low), np.asarray(high)
        size = np.broadcast(low, high).shape if size is None else size
        return self._uniform(_shape(size)) * (high - low) + low

    def exponential(self, scale=1.0, size=None) -> SymbolicUniform:
        size = np.shape(scale) if size is None else size
        return self._uniform(_shape(size)).log() * -np.asarray(scale)

    def standard_exponential(self, size=None, dtype=None, method=None) -> SymbolicUniform:
        return self.exponential(1.0, size)

    def gumbel(self, loc=0.0, scale=1.0, size=None) -> SymbolicUniform:
        size = np.broadcast(loc, scale).shape if size is None else size
        return -((-self._uniform(_shape(size)).log()).log()) * np.asarray(scale) + np.asarray(loc)

    def choice(self, a, size=None, replace=True, p=None, axis=0, shuffle=True):
        values = np.arange(a) if np.ndim(a) == 0 else np.asarray(a)
        weights = np.ones(len(values)) if p is None else np.array(p, dtype=float)
        n = math.prod(_shape(size))
        if axis != 0 or (not replace and n > 1 and p is not None):
            raise CannotEnumerate(f"it uses choice without replacement, or an axis, of {self.kind}")
        drawn = []
        for _ in range(n):
            drawn.append(self._index(weights))
            if not replace:
                weights[drawn[-1]] = 0.0
        return values[np.array(drawn, dtype=int).reshape(_shape(size))]

    def multinomial(self, n: int, pvals, size=None):
        if n > MAX_INTEGERS:
            raise CannotEnumerate(f"it uses multinomial of {self.kind} with n = {n}")
        total = np.zeros((*_shape(size), len(pvals)), dtype=int)
        for row in total.reshape(-1, len(pvals)):
            for _ in range(n):
                row[self._index(pvals)] += 1
        return total

    def binomial(self, n: int, p, size=None):
        if n != 1:
            raise CannotEnumerate(f"it uses binomial of {self.kind} with n = {n}")
        chances = np.broadcast_to(p, np.shape(p) if size is None else _shape(size))
        drawn = self._draws().bernoulli(torch.tensor(chances, dtype=torch.float64))
        return drawn.long().numpy()[()]

    def _integers(self, low: int, high: int | None, size):
        low, high = (0, low) if high is None else (low, high)
        drawn = [low + self._below(high - low) for _ in range(math.prod(_shape(size)))]
        return np.array(drawn, dtype=int).reshape(_shape(size))[()]


class NumpyRandomState(NumpyDraws):
    """numpy.random.RandomState, and the functions of numpy.random."""

    kind = "numpy.random"

    def __init__(self, seed=None, real: np.random.RandomState | None = None):
        super().__init__(REAL_RANDOM_STATE(seed) if real is None else real, _name(seed))

    def seed(self, seed=None) -> None:
        InterceptedRandomness.active.note_seed(self.kind, self, str(seed))

    def get_state(self, legacy: bool = True) -> dict | tuple:
        return self._real.get_state(legacy)

    def set_state(self, state: dict | tuple) -> None:
        self.seed("a saved state")

    random_sample = ranf = sample = NumpyDraws.random

    def rand(self, *shape: int) -> SymbolicUniform:
        return self._uniform(shape)

    def randint(self, low, high=None, size=None, dtype=int):
        return self._integers(low, high, size)


class NumpyGenerator(NumpyDraws):
    """numpy.random.Generator."""

    kind = "numpy.random.Generator"

    def __init__(self, bit_generator, real: np.random.Generator | None = None):
        if real is not None:
            super().__init__(real)
        else:
            super().__init__(REAL_GENERATOR(bit_generator), repr(bit_generator.state))

    def integers(self, low, high=None, size=None, dtype=int, endpoint: bool = False):
        low, high = (0, low) if high is None else (low, high)
        return self._integers(low, high + endpoint, size)


def default_rng(seed=None) -> NumpyGenerator:
    if isinstance(seed, NumpyGenerator):
        return seed
    if isinstance(seed, REAL_GENERATOR):
        return NumpyGenerator(None, seed)
    return NumpyGenerator(REAL_DEFAULT_RNG(seed).bit_generator)


def noting_seeds(manual_seed: Callable) -> Callable:
    def call(seed) -> torch.Generator:
        if InterceptedRandomness.active:
            InterceptedRandomness.active.note_seed("torch", "torch", str(seed))
        return manual_seed(seed)

    return call


def _name(seed) -> str | None:
    return None if seed is None else str(seed)


def _shape(size) -> tuple[int, ...]:
    """Return numpy's `size` argument as a tuple."""
    if size is None:
        return ()
    return (int(size),) if np.ndim(size) == 0 else tuple(size)


# ---- names in modules ----------------------------------------------------------------------------

REAL_RANDOM, REAL_SYSTEM_RANDOM = random.Random, random.SystemRandom
REAL_RANDOM_STATE, REAL_GENERATOR = np.random.RandomState, np.random.Generator
REAL_DEFAULT_RNG = np.random.default_rng
STAND_INS = {  # of generators, by the id of their class
    id(REAL_RANDOM): lambda real: PythonRandom(real=real),
    id(REAL_SYSTEM_RANDOM): lambda real: SystemRandom(),
    id(REAL_RANDOM_STATE): lambda real: NumpyRandomState(real=real),
    id(REAL_GENERATOR): lambda real: NumpyGenerator(None, real),
}
REPLACED_LIBRARIES = "random", "secrets", "numpy.random", "torch", "torch.random"
UNTOUCHED = {*sys.stdlib_module_names, "torch", "numpy", "scipy", "minispec"}


def intercepted_call(original: Callable, stand_in: StandIn, name: str) -> Callable:
    def call(*args, **options):
        function = getattr(stand_in, name) if InterceptedRandomness.active else original
        return function(*args, **options)

    return call


def replacements() -> dict[int, tuple[object, object]]:
    """Return (original, replacement) of each function and class, by the original's id."""
    pairs = [
        (REAL_RANDOM, PythonRandom), (REAL_SYSTEM_RANDOM, SystemRandom),
        (REAL_RANDOM_STATE, NumpyRandomState), (REAL_GENERATOR, NumpyGenerator),
        (REAL_DEFAULT_RNG, default_rng),
    ]  # fmt: skip
    # torch.manual_seed is another function once torch.compile has been used
    pairs += [(f, noting_seeds(f)) for f in (torch.manual_seed, torch.random.manual_seed)]
    libraries = (
        (random, PythonRandom(), REAL_RANDOM, ()),
        (secrets, SystemRandom(), REAL_SYSTEM_RANDOM, ("randbelow", "randbits")),
        (np.random, NumpyRandomState(), REAL_RANDOM_STATE, ("seed", "ranf", "sample")),
    )
    for library, stand_in, cls, functions in libraries:
        for name, value in vars(library).items():
            if name in functions or isinstance(getattr(value, "__self__", None), cls):
                pairs.append((value, intercepted_call(value, stand_in, name)))
    return {id(original): (original, replacement) for original, replacement in pairs}


@contextmanager
def generators_replaced() -> Iterator[None]:
    """Replace every module-level name of a random function, class or generator."""
    known, undo = replacements(), []
    for name, module in list(sys.modules.items()):
        if name not in REPLACED_LIBRARIES and name.partition(".")[0] in UNTOUCHED:
            continue
        namespace = getattr(module, "__dict__", {})
        for key, value in list(namespace.items()):
            stand_in = STAND_INS.get(id(type(value)))
            if id(value) in known:
                replacement = known[id(value)][1]
            elif stand_in and name not in REPLACED_LIBRARIES:
                replacement = stand_in(value)
            else:
                continue
            undo.append((namespace, key, value))
            namespace[key] = replacement
    try:
        yield
    finally:
        for namespace, key, value in undo:
            namespace[key] = value
