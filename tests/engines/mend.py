"""Mend a function of somebody else's package."""

import inspect
import textwrap


def mend(function, *changes: tuple[str, str]):
    """Return the function with parts of its source replaced: each pair is the old and the new."""
    function = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in changes:
        assert old in source, f"{function.__qualname__} does not contain: {old}"
        source = source.replace(old, new)
    names = {}
    exec(source, function.__globals__, names)
    return names[function.__name__]
