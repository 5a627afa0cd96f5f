"""Shared by all checks: verdicts, exceptions, and descriptions of samplings and differences."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from minispec.generate.api import common_prefix_length
from minispec.sampling import Sampling

GREEDY = Sampling()
Result = tuple[bool | None, str]  # passed, detail


@dataclass(frozen=True)
class Verdict:
    """One row of the table."""

    check: str
    case: str
    passed: bool | None  # None: neither passed nor failed; the detail says why
    detail: str
    evidence: dict = field(default_factory=dict)  # the request that failed, and its tokens
    detectable_tv: float | None = None  # at one token, by a χ² test


class Failed(Exception):
    """The decoder under examination raised an exception or gave an invalid answer."""


class NotSupported(Exception):
    """The decoder under examination does not support what a check needs."""


def first_difference(a: Iterable[int], b: Iterable[int]) -> str:
    """Describe where `a` first differs from the expected tokens `b`."""
    a, b = list(a), list(b)
    at = common_prefix_length(a, b)
    return f"differs at token {at}: {a[at : at + 3]} instead of {b[at : at + 3]}"


def describe(sampling: Sampling) -> str:
    return f"T={sampling.temperature:g} top-k {sampling.top_k} top-p {sampling.top_p:g}"


def drafting_result(drafted: int, accepted: int) -> Result:
    """Pass if drafts were both accepted and rejected; otherwise acceptance was not fully tested."""
    if drafted == 0:
        return None, "no token was drafted: only plain decoding was tested"
    if accepted == drafted:
        return None, f"all {drafted} drafts were accepted: no rejection was tested"
    return True, f"{accepted} of {drafted} drafts accepted"
