"""Shared by all checks: verdicts, and descriptions of samplings and differences."""

from collections.abc import Iterable
from dataclasses import dataclass

from minispec.generate.api import common_prefix_length
from minispec.sampling import Sampling

GREEDY = Sampling()
RUNS = 400  # seeded runs of one statistical check


@dataclass(frozen=True)
class Verdict:
    """One row of the table."""

    check: str
    case: str
    passed: bool | None  # None: neither passed nor failed; the detail says why
    detail: str


def first_difference(a: Iterable[int], b: Iterable[int]) -> str:
    """Describe where `a` first differs from the expected tokens `b`."""
    a, b = list(a), list(b)
    at = common_prefix_length(a, b)
    return f"differs at token {at}: {a[at : at + 3]} instead of {b[at : at + 3]}"


def describe(sampling: Sampling) -> str:
    return f"T={sampling.temperature:g} top-k {sampling.top_k} top-p {sampling.top_p:g}"


def drafting_result(drafted: int, accepted: int) -> tuple[bool | None, str]:
    """Pass if drafts were both accepted and rejected; otherwise acceptance was not fully tested."""
    if drafted == 0:
        return None, "no token was drafted: only plain decoding was tested"
    if accepted == drafted:
        return None, f"all {drafted} drafts were accepted: no rejection was tested"
    return True, f"{accepted} of {drafted} drafts accepted"
