"""Shared by all checks: verdicts, exceptions, and descriptions of samplings and differences."""

import math
import signal
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

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


class RowTimeOver(BaseException):
    """A row took longer than its `time_limit`. Not an Exception, which decoders suppress."""


class CallTimeOver(BaseException):
    """A call of the decoder did."""


@contextmanager
def time_limit(seconds: float, error: type[BaseException]) -> Iterator[None]:
    """Raise an error in the block after so many seconds, even if it waits for a lock, and every
    second until it listens. A limit around it that ends sooner stays. There is none in another
    thread, on Windows, and while a library does not return to Python."""
    in_main = threading.current_thread() is threading.main_thread()
    timed = in_main and hasattr(signal, "setitimer") and math.isfinite(seconds)
    if not timed or 0 < signal.getitimer(signal.ITIMER_REAL)[0] < seconds:
        yield
        return

    def expire(*_):
        raise error(f"did not return within {seconds:.0f} s")

    handler, begin = signal.signal(signal.SIGALRM, expire), time.monotonic()
    outer, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if outer:
            left = max(outer - (time.monotonic() - begin), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, left, interval)


def describe_error(error: BaseException, request: str = "") -> str:
    """Describe an exception of a decoder, with its own deepest line: in the folder of the first
    frame that is neither the certifier's nor a decorator's of torch or Python."""
    message = (str(error).strip().splitlines() or ["no message"])[-1]
    others = Path(__file__).parent, Path(torch.__file__).parent
    folders = [(f, Path(f.filename).parent) for f in traceback.extract_tb(error.__traceback__)]
    folders = [(f, folder) for f, folder in folders if folder != Path(traceback.__file__).parent
               and not any(other in (folder, *folder.parents) for other in others)]  # fmt: skip
    own = [f for f, folder in folders if folder == folders[0][1]]
    where = f"{Path(own[-1].filename).name}, line {own[-1].lineno}" if own else ""
    where = "; ".join(filter(None, (request, where)))
    return f"raised {type(error).__name__}: {message}" + f" ({where})" * bool(where)


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
