"""Describe how a result was made: the machine, the versions, the commit, the command, the time."""

import contextlib
import platform
import re
import shlex
import subprocess
from datetime import datetime
from importlib.metadata import distributions
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]  # the checkout, unless the package is installed


def processor() -> str:
    """Return the processor's name."""
    with contextlib.suppress(OSError):  # only Linux has this file
        if found := re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M):
            return found[1].strip()
    return platform.processor() or platform.machine()


def package_version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    return next((package.version for package in distributions(name=name)), None)


def commit() -> str | None:
    """Return the checkout's commit, with "+" if tracked files have changed, or None without one."""
    git = "git", f"--git-dir={ROOT / '.git'}", f"--work-tree={ROOT}"
    command = *git, "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"
    with contextlib.suppress(OSError):  # there is no git
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None


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
