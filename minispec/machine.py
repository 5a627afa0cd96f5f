"""What a measurement depends on: the machine, the versions, the time and the other processes."""

import contextlib
import os
import platform
import re
import shlex
import subprocess
import time
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]  # the checkout, unless the package is installed
CORE_LINE = re.compile(r"^cpu(\d+) ((?:\d+ ?){8})", re.M)  # user nice system idle iowait irq …
MEMINFO = Path("/proc/meminfo")
MEMORY_LIMITS = [  # of a container: cgroup v2, cgroup v1
    Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
]  # fmt: skip
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def processor() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def package_version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """Return the checkout's commit, followed by "+" if tracked files have changed since. Returns
    None if the package is not in a checkout."""
    if not (ROOT / ".git").exists():  # otherwise git would search the folders above
        return None
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def command_line(module: str, argv: list[str], processes: int = 1) -> str:
    """Return the shell command that runs a module with these arguments."""
    torchrun = ["torchrun", "--nproc-per-node", str(processes)]
    return shlex.join([*(torchrun if processes > 1 else ["python"]), "-m", module, *argv])


def describe_machine() -> dict[str, object]:
    """Return the machine, the versions, the commit and the time, as fields of JSON."""
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "versions": {
            "minispec": package_version("minispec"), "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "commit": commit(),
    }  # fmt: skip


def free_memory(device: torch.device) -> int | None:
    """The bytes that can be allocated on a device; None if this is unknown. On a CPU, this is what
    Linux estimates or, if that is less, the limit of this container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        found = re.search(r"^MemAvailable: +(\d+) kB", MEMINFO.read_text(), re.M)
    except OSError:
        found = None
    if found is None or device.type != "cpu":
        return None
    available = 1024 * int(found[1])
    for file in MEMORY_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # absent, or "max"
            available = min(available, int(file.read_text()))
    return available


# ---- other processes -----------------------------------------------------------------------------


@dataclass(frozen=True)
class CpuTimes:
    """A reading of the clocks, in seconds since an arbitrary moment, summed over all cores."""

    elapsed: float
    own: float  # used by this process and its descendants
    busy: float | None = None  # used by any process; None without Linux's /proc/stat
    load: float | None = None  # instead: processes that want a core, per core, in the last minute


def others_share(before: CpuTimes, after: CpuTimes) -> float | None:
    """The share of the cores' time between two readings that other processes used, from 0 to 1.
    None if it is unknown."""
    elapsed = after.elapsed - before.elapsed
    if elapsed <= 0:  # some sandboxes have a /proc/stat that never changes
        return None
    if after.busy is not None and before.busy is not None:
        busy = after.busy - before.busy
    elif after.load is not None:
        busy = after.load * elapsed
    else:
        return None
    return min(max((busy - (after.own - before.own)) / elapsed, 0.0), 1.0)


def others_share_now(seconds: float = 1.0) -> float | None:
    """Do nothing for this long; return the share of the cores that other processes used."""
    before = read_cpu_times()
    time.sleep(seconds)
    return others_share(before, read_cpu_times())


def read_cpu_times() -> CpuTimes:
    own = own_seconds()
    try:
        elapsed, busy = core_seconds(Path("/proc/stat").read_text(), os.sched_getaffinity(0))
        return CpuTimes(elapsed, own, busy=busy)
    except (OSError, AttributeError):  # not Linux
        cores = os.cpu_count() or 1
        load = os.getloadavg()[0] / cores if hasattr(os, "getloadavg") else None
        return CpuTimes(time.monotonic() * cores, own, load=load)


def core_seconds(stat: str, usable: set[int]) -> tuple[float, float]:
    """The elapsed and the busy time of cores, in seconds, from the text of /proc/stat. A container
    may see all cores of its host there, so only the `usable` ones count, unless none is listed."""
    cores = {int(n): list(map(int, ticks.split())) for n, ticks in CORE_LINE.findall(stat)}
    chosen = [cores[n] for n in cores.keys() & usable] or list(cores.values())
    elapsed = sum(sum(ticks) for ticks in chosen)
    idle = sum(ticks[3] + ticks[4] for ticks in chosen)  # idle, iowait
    return elapsed / TICKS_PER_SECOND, (elapsed - idle) / TICKS_PER_SECOND


def own_seconds() -> float:
    """The CPU time of this process and its descendants, in seconds. `os.times` lacks the children
    that are still running, such as torch's compilers; on Linux, they are added."""
    stats = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            stats[int(file.parent.name)] = file.read_text(errors="replace")
        except OSError:  # the process has ended
            continue
    return sum(os.times()[:4]) + running_descendants_seconds(stats, os.getpid())


def running_descendants_seconds(stats: dict[int, str], pid: int) -> float:
    """The CPU time of a process's running descendants and of the children for which these have
    waited, in seconds, from the texts of /proc/PID/stat."""
    fields = {child: text.rpartition(")")[2].split() for child, text in stats.items()}
    seconds, parents = 0.0, {pid}
    while parents:
        parents = {child for child, values in fields.items() if int(values[1]) in parents}
        for child in parents:  # utime, stime, cutime, cstime
            seconds += sum(map(int, fields[child][11:15])) / TICKS_PER_SECOND
    return seconds
