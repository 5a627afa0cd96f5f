"""Fields of JSON that may be missing, or of any type. Nothing here raises."""

import json
import math


def parsed(text: str):
    """The JSON value that a text spells; None if it spells none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def field(value, *path: str):
    """The field at a path of names; None if there is none."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def items(value, *path: str) -> list:
    """The list at a path of names; empty if there is none."""
    found = field(value, *path)
    return found if isinstance(found, list) else []


def spelt(value, *path: str) -> str:
    """The text at a path of names; empty if there is none. Half a surrogate pair is U+FFFD."""
    found = field(value, *path)
    found = found if isinstance(found, str) else ""
    return found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def as_number(value) -> float | None:
    """A finite number, or one that a text spells; None for anything else."""
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def count(value, *path: str) -> int | None:
    """The number at a path of names, as an int; None if there is none, or it is negative."""
    found = as_number(field(value, *path))
    return None if found is None or found < 0 else int(found)
