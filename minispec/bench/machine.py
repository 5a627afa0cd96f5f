"""What a measurement depends on besides our own work: other processes."""

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import psutil

from minispec import distributed
from minispec.cli import UserError, note

T = TypeVar("T")
MAX_OTHERS_SHARE = 0.5  # of the cores, for other processes; above it, speeds are not reported


def check_others(share: float | None, when: str, consequence: str, busy: bool) -> None:
    """Raise UserError, or with --busy note it, if other processes used too much of the cores."""
    if share is None or share <= MAX_OTHERS_SHARE:
        return
    fault = f"{when}, other processes used {share:.0%} of the cores"
    if not busy:
        raise UserError(f"{fault}, so {consequence}; wait until they end, or add --busy")
    note(f"{fault}, so speeds may be wrong")


def others_share_now() -> float | None:
    """The share of the cores that other processes use while this one sleeps."""
    return watch(partial(time.sleep, 1.0))[1]


def watch(work: Callable[[], T]) -> tuple[T, float | None]:
    """Do the work on all ranks; return its result and the share of the cores' time that other
    processes used meanwhile, from 0 to 1. It is None if the system does not count this time."""
    before = read_cpu_seconds()
    result = work()
    elapsed, busy, own = (b - a for a, b in zip(before, read_cpu_seconds()))
    own = sum(distributed.all_gather(own))  # all ranks run on this machine
    share = None
    if elapsed > 0:  # some sandboxes have a /proc/stat that never changes
        share = min(max((busy - own) / elapsed, 0.0), 1.0)
    return result, distributed.from_rank_0(lambda: share)


def read_cpu_seconds() -> tuple[float, float, float]:
    """The time of the cores that this process may use: in total, the part in which they were busy,
    and the part used by this process and its descendants, such as torch's compilers."""
    process, cores = psutil.Process(), psutil.cpu_times(percpu=True)
    if hasattr(process, "cpu_affinity"):  # a container may list all cores of its host
        cores = [cores[n] for n in process.cpu_affinity() if n < len(cores)] or cores
    elapsed = sum(sum(core[:8]) for core in cores)  # the other fields are parts of the first two
    idle = sum(core.idle + getattr(core, "iowait", 0.0) for core in cores)
    own = 0.0
    for member in process, *process.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            own += sum(member.cpu_times()[:4])  # with the children for which it has waited
    return elapsed, elapsed - idle, own
