"""What runs a submission: a process of its own, with a copy of the package without the solutions.
It returns nothing but data. Submissions never run in the process that judges them."""

import ast
import atexit
import compileall
import inspect
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FunctionType, GeneratorType, MethodType

import torch

from lessons.assignments.link import Ended, Link
from minispec.cache import KVCache
from minispec.certify.toys import ScriptedRandomness, Toy
from minispec.checkpoints.weights import write_text
from minispec.methods.vocabulary import Language
from minispec.sampling import OneHot, Seeded
from minispec.tree import Step, Tree

GRADER = Path(__file__).parent
ROOT = GRADER.parent.parent
PATIENCE = 5  # other programs may keep the processor busy for this many times a test's seconds

# ---- what a submission may read ------------------------------------------------------------------

GIVEN = (  # of the lessons
    "assignments/a8_engine/proposers.py", "assignments/meter.py",
)  # fmt: skip
LIBRARIES = {
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), sys.prefix,
    sys.base_prefix, "/usr/lib", "/lib", "/lib64", "/sys/devices/system", "/proc/cpuinfo",
    "/proc/meminfo",
}  # fmt: skip


@cache
def scratch() -> Path:
    """A folder that is removed when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="grader-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def whole_copy() -> Path:
    """A copy of the package and of what the lessons give, compiled, as nobody will write to it."""
    copy = scratch() / "whole"
    shutil.copytree(ROOT / "minispec", copy / "minispec",
                    ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
    for name in GIVEN:
        (copy / "lessons" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / "lessons" / name, copy / "lessons" / name)
    (copy / "weights").symlink_to(ROOT / "weights")
    compileall.compile_dir(copy / "minispec", quiet=2)
    return copy


@cache
def copy_without(functions: tuple[Callable, ...]) -> Path:
    """A copy in which those of these functions that are the package's say: write it."""
    copy = scratch() / f"copy-{len(list(scratch().iterdir()))}"
    shutil.copytree(whole_copy(), copy, symlinks=True, copy_function=os.link)
    for file, codes in by_file(functions).items():
        path = copy / file.relative_to(ROOT)
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        nodes = {min(x.lineno for x in (node, *node.decorator_list)): node
                 for node in ast.walk(ast.parse("".join(lines)))
                 if isinstance(node, ast.FunctionDef)}  # fmt: skip
        for line in sorted(codes, reverse=True):
            first, last = nodes[line].body[0], nodes[line].end_lineno
            problem = f"uses minispec's own {codes[line]}, which earns nothing: write it"
            stub = f'raise type("Borrowed", (Exception,), {{}})("{problem}")\n'
            lines[first.lineno - 1 : last] = [" " * first.col_offset + stub]
        write_text(path, "".join(lines))  # a new file: the old one is also the whole copy's
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()
    return copy


def by_file(functions: Iterable[Callable]) -> dict[Path, dict[int, str]]:
    """The package's file -> the first line of each of these functions in it -> its name."""
    found: dict[Path, dict[int, str]] = {}
    for function in functions:
        code = code_of(function)
        file = Path(code.co_filename) if code else GRADER
        if file.is_relative_to(ROOT / "minispec"):
            found.setdefault(file, {})[code.co_firstlineno] = code.co_qualname
    return found


def code_of(function: object) -> CodeType | None:
    """The code of a function or method, below its decorators; None if it is not in Python."""
    return getattr(inspect.unwrap(function), "__code__", None)


# ---- its process ---------------------------------------------------------------------------------


@cache
def processes() -> socket.socket:
    """Start what forks a process for each submission (submission.py). It knows no test."""
    ours, theirs = socket.socketpair()
    command = sys.executable, "-I", GRADER / "submission.py", str(theirs.fileno())
    nothing = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    variables = {"OMP_NUM_THREADS": "1", "PATH": os.environ.get("PATH", "")}
    subprocess.Popen(command, pass_fds=[theirs.fileno()], env=variables, cwd="/",
                     start_new_session=True, **nothing)  # fmt: skip
    theirs.close()
    return ours


class Submission(Link):
    """The grader's end of a conversation with a submission's process. The models, caches and random
    numbers of a test are used from there and stay here; `stays` names more classes of this kind.
    Raises Ended, with the reason, if there is no answer."""

    def __init__(
        self, path: list[Path], inbox: Path, seconds: float, gigabytes: float,
        stays: tuple[type, ...] = (), reads: Iterable[Path] = (), writes: bool = False,
    ):  # fmt: skip
        (ours, theirs), (self.status, status) = socket.socketpair(), socket.socketpair()
        inbox.chmod(0o777 if writes else 0o755)
        request = {
            "path": [*map(str, path)], "seconds": seconds, "gigabytes": gigabytes,
            "reads": [*map(str, [*path, inbox, *reads]), *sorted(LIBRARIES)],
            "writes": str(inbox) * writes,
        }  # fmt: skip
        socket.send_fds(processes(), [json.dumps(request).encode()],
                        [theirs.fileno(), status.fileno()])  # fmt: skip
        theirs.close()
        status.close()
        super().__init__(Connection(ours.detach()))
        self.stays = (*STAYS, *stays)
        self.seconds, self.deadline = seconds, time.monotonic() + PATIENCE * seconds

    def load(self, module: str):
        """Import a module there."""
        return self.ask("import", module)

    def close(self) -> None:
        """End the process, if it has not ended."""
        self.status.close()
        self.connection.close()

    # what goes in and out

    def by_value(self, x: object) -> bool:
        named = isinstance(x, (type, FunctionType)) and "<" not in x.__qualname__
        kind = x if named else type(x)
        return kind.__module__.split(".")[0] in COPIED and (named or not isinstance(x, self.stays))

    def find_class(self, module: str, name: str) -> type:
        found = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in DATA}
        return found[f"{module}.{name}"]

    def permits(self, verb: str, x: object, name: object = "", *value) -> bool:
        """A submission may call what it was given, and read what the project's objects show."""
        if id(x) not in self.held:
            return False
        if verb == "set":
            return isinstance(x, KVCache) and name == "length" and isinstance(*value, int)
        top = type(x).__module__.split(".")[0]
        ours = top not in sys.stdlib_module_names and top not in ("torch", "_pytest")
        shown = name in SHOWN or not hasattr(torch.nn.Module, name) if verb == "get" else True
        return verb != "get" or (ours and shown and not name.startswith("_"))

    def send(self, *message) -> None:
        try:
            super().send(*message)
        except OSError:
            raise Ended(self.ending()) from None

    def receive(self) -> tuple:
        if not self.connection.poll(max(0.0, self.deadline - time.monotonic())):
            raise Ended(self.too_long)
        try:
            return super().receive()
        except (EOFError, OSError):
            raise Ended(self.ending()) from None
        except Exception as error:  # whatever a forged message leads to
            raise Ended(f"it sent what is no data ({type(error).__name__})") from None

    @property
    def too_long(self) -> str:
        return f"it ran for more than {self.seconds:g} seconds and was stopped"

    def ending(self) -> str:
        """Why the process has ended."""
        self.status.settimeout(5)
        try:
            code = int(self.status.recv(16) or b"0")
        except (OSError, ValueError):
            code = 0
        if -code == getattr(signal, "SIGXCPU", None):
            return self.too_long
        return f"the process ended with status {code} before it was done"


COPIED = {"builtins", "collections", "copyreg", "functools", "torch", "minispec", "NoneType"}
DATA = (int, float, str, bool, list, tuple, dict, set, Tree, Step, OneHot, Language)
STAYS = (KVCache, Toy, Seeded, ScriptedRandomness, Iterator, FunctionType, MethodType,
         GeneratorType)  # fmt: skip
SHOWN = {"forward", "eval", "parameters", "named_parameters", "state_dict", "training"}
