"""What a measurement depends on: the machine, the versions and the time."""

import platform
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


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


def describe_machine() -> dict[str, object]:
    """Return the machine, the versions and the time, as fields of JSON."""
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "versions": {
            "minispec": package_version("minispec"), "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }  # fmt: skip
