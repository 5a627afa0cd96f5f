"""Read JSON fields that may be missing or of any type. Nothing here raises."""

import json
import math


def parse_json(text: str):
    """Return the JSON value of a text, or None if it is not valid JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def value_at(value, *path: str):
    """Return the value at a path of names, or None."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def list_at(value, *path: str) -> list:
    """Return the list at a path of names, or an empty list."""
    found = value_at(value, *path)
    return found if isinstance(found, list) else []


def text_at(value, *path: str) -> str:
    """Return the string at a path of names, or "". A lone surrogate becomes U+FFFD."""
    found = value_at(value, *path)
    found = found if isinstance(found, str) else ""
    return found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def as_number(value) -> float | None:
    """Return a finite number, also from a string; None for anything else."""
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def count_at(value, *path: str) -> int | None:
    """Return the number at a path of names as an int; None if it is missing or negative."""
    found = as_number(value_at(value, *path))
    return None if found is None or found < 0 else int(found)
