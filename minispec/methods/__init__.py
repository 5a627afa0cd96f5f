"""The decoding methods, one per file (Jacobi decoding is in lookahead.py), and what they share:
`declaration` says what a method is, vocabulary chooses the tokens that heads draft from, adaptive
how much to draft. The methods import only the core (model, cache, sampling, tree, verify), errors,
declaration, adaptive and vocabulary; hybrid and eagle3 import other methods, on which they build.
They read no files, handle no text and measure no time.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import replace

from minispec.cli import UserError, import_function, suggestion, user_error
from minispec.methods.declaration import DECLARED, Method

for module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{module.name}")
# every function that declares itself, by name
METHODS: dict[str, Callable] = {m.name: m.function for m in sorted(DECLARED.values(), key=str)}


def find_method(method: str | Callable | Method) -> Method:
    """The method of this name, in `file.py:function` or `module:function`, or a function itself,
    declared or not."""
    if isinstance(method, Method):
        return method
    if isinstance(method, str) and method not in METHODS and ":" in method:
        method = import_function(method, "--method")
    if not callable(method) and (not isinstance(method, str) or method not in METHODS):
        raise UserError(f"unknown method {method!r}; {suggestion(str(method), METHODS)}")
    function = method if callable(method) else METHODS[method]
    declared = DECLARED.get(inspect.unwrap(function))
    return replace(declared, function=function) if declared else undeclared(function)


def undeclared(function: Callable) -> Method:
    """A function of somebody's own that is used as a method without a declaration."""
    name = getattr(function, "__name__", type(function).__name__)
    with user_error(f"{name} is not a method"):
        inspect.signature(function).bind_partial(None, None, None, None, cache=None)
    return Method(name, function)
