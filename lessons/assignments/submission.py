"""Processes for submissions: started once, with torch, this forks one for each test.

Each may read a copy of the package, and Python's own libraries; it may write nothing, start
nothing, and reach no network and no other process. The kernel sees to that, whatever its code does.
"""

import contextlib
import ctypes
import json
import math
import os
import select
import signal
import socket
import struct
import sys
import tempfile
from multiprocessing.connection import Connection

import numpy as np
import torch

sys.path.insert(0, os.path.dirname(__file__))
from link import Link  # noqa: E402

try:
    import resource
except ImportError:  # Windows
    resource = None

NOBODY = 65534
libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Fork a process for each request, until the grader is gone."""
    torch.set_num_threads(1)  # a fork has none of its parent's threads
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    while True:
        request, handles, *_ = socket.recv_fds(control, 2**16, 2)
        if not request:
            return
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            watch(*handles, json.loads(request))
            os._exit(0)
        for handle in handles:
            os.close(handle)


def watch(conversation: int, status: int, request: dict) -> None:
    """Run a submission in one more process. Tell the grader how it ended, and end it if the grader
    no longer listens."""
    child = os.fork()
    if child == 0:
        os.close(status)
        with contextlib.suppress(BaseException):
            serve(conversation, request)
        os._exit(1)
    os.close(conversation)
    ended = 0
    while not ended:
        if select.select([status], [], [], 0.02)[0]:
            os.kill(child, signal.SIGKILL)
        ended, code = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(OSError):
        os.write(status, str(os.waitstatus_to_exitcode(code)).encode())


def serve(conversation: int, request: dict) -> None:
    os.chdir("/")
    sys.path[:] = [*request["path"], *(p for p in sys.path if p != os.path.dirname(__file__))]
    tempfile.tempdir = request["writes"] or None
    confine(request["reads"], request["writes"], request["seconds"], request["gigabytes"])
    link = Served(Connection(conversation))
    with contextlib.suppress(EOFError, OSError):
        while True:
            _, *question = link.receive()
            link.answer(*question)
    os._exit(0)


class Served(Link):
    """The submission's end: it sends data as plain data, and all else by reference."""

    def by_value(self, x: object) -> bool:
        kind = x if isinstance(x, type) else type(x)
        name = f"{kind.__module__}.{kind.__qualname__}"
        return x is None or name in COPIED or issubclass(kind, (np.generic, *PLAIN)) and (
            kind is not x or kind in PLAIN)  # fmt: skip

    def plain(self, x: object):
        """What inherits from plain data, as what it inherits from."""
        if isinstance(x, np.generic):
            return type(x.item()), (x.item(),)
        base = next((base for base in PLAIN if isinstance(x, base)), bool)
        if base is bool:
            return NotImplemented
        if base in (int, float):
            return base, (base.__add__(x, 0),)
        if base is str:
            return base, (str.__str__(x),)
        return base, ([*dict.items(x)] if base is dict else [*base.__iter__(x)],)


PLAIN = int, float, str, list, tuple, dict, set
COPIED = {"builtins.bytes"} | {f"minispec.{name}" for name in (
    "tree.Tree", "tree.Step", "sampling.OneHot", "methods.vocabulary.Language")}  # fmt: skip

# ---- what the kernel forbids ---------------------------------------------------------------------


def confine(reads: list[str], writes: str, seconds: float, gigabytes: float) -> None:
    """From here on this process can read only these folders, write to at most one, and start
    nothing."""
    become_nobody()
    restrict_files(reads, writes)
    if resource is not None:
        for name, limit in ("DATA", gigabytes * 2**30), ("CPU", seconds), ("NPROC", 0), ("CORE", 0):
            # hard ones are higher: at the soft one SIGXCPU ends a process, at the hard one SIGKILL
            limits = math.ceil(limit), math.ceil(limit) + (name == "CPU")
            with contextlib.suppress(ValueError, OSError):  # a lower limit holds already
                resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), limits)


def become_nobody() -> None:
    """Root could start processes without limit. Nobody cannot, but may read what root may."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return
    libc.prctl(8, 1, 0, 0, 0)  # PR_SET_KEEPCAPS
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    reading = 1 << 2  # CAP_DAC_READ_SEARCH
    header = struct.pack("Ii", 0x20080522, 0)
    libc.capset(header, struct.pack("6I", reading, reading, 0, 0, 0, 0))


def restrict_files(reads: list[str], writes: str) -> None:
    """By Linux's Landlock. Where there is none, files can be read that this user may read."""
    create, add, restrict = 444, 445, 446  # the same on all processors
    version = libc.syscall(create, None, 0, 1)
    if sys.platform != "linux" or version < 1:
        return
    everything = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    # files; from version 4 on, TCP; from version 6 on, sockets and signals of other processes
    size = 8 if version < 4 else 16 if version < 6 else 24
    attributes = struct.pack("3Q", everything, 3, 3)[:size]
    rules = libc.syscall(create, attributes, len(attributes), 0)
    for folder in {*reads, writes} - {""}:
        with contextlib.suppress(FileNotFoundError):
            handle = os.open(folder, os.O_PATH | os.O_CLOEXEC)
            reading = 1 << 2 | os.path.isdir(folder) << 3  # files, and lists of files
            rights = everything if folder == writes else reading
            libc.syscall(add, rules, 1, struct.pack("=Qi", rights, handle), 0)
            os.close(handle)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    libc.syscall(restrict, rules, 0)
    os.close(rules)


if __name__ == "__main__":
    main()
