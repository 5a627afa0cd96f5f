"""What a result was made with: the machine, the versions, the commit, the command and the time."""

import platform
import shlex
import subprocess
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]  # the checkout, unless the package is installed


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
