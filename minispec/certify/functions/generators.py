"""Stand-ins for the random numbers of `random` and numpy, under every module-level name that they
have, also under names that were imported before. They know the draws that decoders use to sample a
token; any other draw cannot be enumerated."""

import math
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from minispec.certify.functions.symbolic import (
    CannotEnumerate,
    SymbolicUniform,
    active_source,
    to_float64,
)

STATE = "seed", "getstate", "setstate", "get_state", "set_state"  # numbers drawn again are noticed


class StandIn:
    """Draws from the active InterceptedRandomness. Without one it is the real generator, because a
    decoder may keep it. A method gets the result of the real one, which it replaces; methods that
    this class does not have raise CannotEnumerate."""

    _kind, _real_class = "", object

    def __init__(self, seed=None, real: object | None = None):
        self._real = self._real_class(seed) if real is None else real

    def __getattribute__(self, name: str):
        if name.startswith("_"):
            return object.__getattribute__(self, name)
        if active_source() is None or name in STATE:
            return getattr(self._real, name)
        method = getattr(type(self), name, None)
        if method is None:
            self._note_draw()
            raise CannotEnumerate(f"it uses {name} of {self._kind}")

        def call(*args, **options):
            if not active_source():
                return getattr(self._real, name)(*args, **options)
            self._note_draw()
            real = getattr(self._real, name)(*args, **options)  # raises the errors of arguments
            try:
                return method(self, real, *args, **options)
            except TypeError as error:
                raise CannotEnumerate(f"it uses {name} of {self._kind}: {error}") from error

        return call

    def _note_draw(self) -> None:
        SymbolicUniform.active.note_draw(self._kind, self._real.random())

    def _uniform(self, real, *_, size=None, dtype=None) -> SymbolicUniform:
        return SymbolicUniform.active.uniform(real)

    def _index(self, weights) -> int:
        return int(SymbolicUniform.active.categorical(to_float64(weights)))


class PythonRandom(StandIn):
    """random.Random, and the functions of `random`."""

    _kind, _real_class = "random", random.Random
    random = StandIn._uniform

    def uniform(self, real, a: float, b: float) -> SymbolicUniform:
        return self._uniform(real) * (b - a) + a

    def choices(self, real, population, weights=None, *, cum_weights=None, k: int = 1) -> list:
        if cum_weights is not None:
            weights = np.diff(np.asarray(cum_weights, dtype=float), prepend=0.0)
        weights = [1.0] * len(population) if weights is None else list(weights)
        return [population[self._index(weights)] for _ in range(k)]


class NumpyDraws(StandIn):
    """The draws that RandomState and Generator have in common."""

    random = StandIn._uniform

    def uniform(self, real, low=0.0, high=1.0, size=None) -> SymbolicUniform:
        return self._uniform(real) * np.subtract(high, low) + np.asarray(low)

    def gumbel(self, real, loc=0.0, scale=1.0, size=None) -> SymbolicUniform:
        return -np.log(-np.log(self._uniform(real))) * np.asarray(scale) + np.asarray(loc)

    def choice(self, real, a, size=None, replace: bool = True, p=None):
        if not replace and np.size(real) > 1:
            raise CannotEnumerate(f"it uses choice without replacement of {self._kind}")
        values = np.arange(a) if np.ndim(a) == 0 else np.asarray(a)
        weights = np.ones(len(values)) if p is None else p
        drawn = [self._index(weights) for _ in range(np.size(real))]
        return values[np.array(drawn, dtype=int).reshape(np.shape(real))]

    def multinomial(self, real, n: int, pvals, size=None):
        if n != 1 or np.ndim(real) > 1:
            raise CannotEnumerate(f"it uses multinomial of {self._kind} for several draws")
        *weights, _ = np.asarray(pvals, dtype=float)  # the last has what is left
        weights.append(max(0.0, 1 - sum(weights)))
        return np.eye(len(weights), dtype=int)[self._index(weights)]


class NumpyRandomState(NumpyDraws):
    """numpy.random.RandomState, and the functions of numpy.random."""

    _kind, _real_class = "numpy.random", np.random.RandomState
    random_sample = ranf = sample = rand = NumpyDraws.random


class NumpyGenerator(NumpyDraws):
    """numpy.random.Generator, made of a bit generator."""

    _kind, _real_class = "numpy.random.Generator", np.random.Generator


def default_rng(seed=None) -> NumpyGenerator:
    if isinstance(seed, NumpyGenerator):
        return seed
    return NumpyGenerator(REAL_DEFAULT_RNG(seed).bit_generator)


# ---- names in modules ----------------------------------------------------------------------------

REAL_DEFAULT_RNG = np.random.default_rng
STAND_INS = PythonRandom, NumpyRandomState, NumpyGenerator
STAND_IN_OF = {id(stand_in._real_class): stand_in for stand_in in STAND_INS}
REPLACED_LIBRARIES = "random", "numpy.random"
PLAIN_FUNCTIONS = "ranf", "sample", "seed"  # of numpy.random; the others are bound methods
REMOVED = object()  # marks a name that was not there
UNTOUCHED = {*sys.stdlib_module_names, "torch", "numpy", "scipy", "minispec"}


def intercepted_call(original: Callable, stand_in: StandIn, name: str) -> Callable:
    def call(*args, **options):
        function = getattr(stand_in, name) if active_source() else original
        return function(*args, **options)

    return call


def replacements() -> dict[int, tuple[object, object]]:
    """Return (original, replacement) of each function and class, by the original's id."""
    pairs = [(stand_in._real_class, stand_in) for stand_in in STAND_INS]
    pairs.append((REAL_DEFAULT_RNG, default_rng))
    for library, stand_in in (random, PythonRandom()), (np.random, NumpyRandomState()):
        cls = type(stand_in)._real_class
        for name, value in vars(library).items():
            if name in PLAIN_FUNCTIONS or isinstance(getattr(value, "__self__", None), cls):
                pairs.append((value, intercepted_call(value, stand_in, name)))
    return {id(original): (original, replacement) for original, replacement in pairs}


def converted(x, function: Callable):
    """Return function(x), but a random number as it is."""
    x = x.item() if isinstance(x, (Tensor, np.ndarray)) else x
    return x if type(x) is SymbolicUniform else function(x)


class FloatClass(type):
    def __instancecheck__(cls, x) -> bool:
        return isinstance(x, float)


class LazyFloat(float, metaclass=FloatClass):
    """What the name `float` means in modules that convert random numbers by it."""

    dtype = np.dtype(float)

    def __new__(cls, x=0.0):
        return converted(x, float)


def lazy_log(x, *base):
    x = converted(x, lambda x: x)
    return np.log(x) if type(x) is SymbolicUniform and not base else math.log(x, *base)


LAZY = {id(math): SimpleNamespace(**vars(math) | {"log": lazy_log}), id(math.log): lazy_log}


@contextmanager
def generators_replaced(converting: list[dict] = ()) -> Iterator[None]:
    """Replace all module-level names of random functions and classes, and the names of float and
    log in the `converting` namespaces; restore all afterwards. Compiled functions run as they are
    written meanwhile, so that they can be followed, too."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    known, undo = replacements(), []
    for name, module in list(sys.modules.items()):
        if name not in REPLACED_LIBRARIES and name.partition(".")[0] in UNTOUCHED:
            continue
        namespace = getattr(module, "__dict__", {})
        for key, value in list(namespace.items()):
            stand_in = STAND_IN_OF.get(id(type(value)))
            if id(value) in known:
                replacement = known[id(value)][1]
            elif stand_in and name not in REPLACED_LIBRARIES:
                replacement = stand_in(real=value)
            else:
                continue
            undo.append((namespace, key, value))
            namespace[key] = replacement
    for namespace in converting:
        lazy = {key: LAZY[id(value)] for key, value in namespace.items() if id(value) in LAZY}
        for key, replacement in ({"float": LazyFloat} | lazy).items():
            undo.append((namespace, key, namespace.get(key, REMOVED)))
            namespace[key] = replacement
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for namespace, key, value in undo:
            namespace[key] = value
            if value is REMOVED:
                del namespace[key]
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
