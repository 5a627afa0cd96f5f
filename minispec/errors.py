"""What a user can get wrong: one line that says what and how to mend it, exit code 2."""

import argparse
import atexit
import contextlib
import functools
import json
import math
import os
import re
import signal
import sys
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn, TextIO

from tqdm import tqdm

# How a user's text is read: UTF-8, without a byte-order mark, every line end as \n. Other bytes
# become lone surrogates, which a tokenizer refuses.
AS_TEXT = {"encoding": "utf-8-sig", "errors": "surrogateescape", "newline": None}


class UserError(ValueError):
    """Wrong input; its message is all the user needs to see."""


class Parser(argparse.ArgumentParser):
    """A command line's parser. Wrong arguments raise UserError. The description is a module's
    docstring, of which -h shows the first paragraph (python -OO leaves no docstring)."""

    def __init__(self, *args, description: str | None = None, **options):
        super().__init__(*args, description=(description or "").split("\n\n")[0], **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} ({self.prog} -h shows the flags)")


def number(least: float, most: float = 2**63 - 1, kind: Callable = int) -> Callable[[str], float]:
    """The `type=` of a flag that takes a number of this kind, from `least` to `most`."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if least <= (value := kind(text)) <= most and math.isfinite(value):
                return value
        short = most == 2**63 - 1 and len(text) < 19
        end = f"at least {least}" if short else f"from {least} to {most}"
        whole = "whole number" if kind is int else "number"
        raise argparse.ArgumentTypeError(f"{text[:40]} must be a {whole}, {end}")

    return parse


def comma_separated(text: str) -> list[str]:
    """The `type=` of a flag that takes a list; a comma inside parentheses is part of a name."""
    parts = re.split(r",(?![^(]*\))", text)
    if not all(map(str.strip, parts)):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} has an empty name before or after a comma")
    return parts


def command(main: Callable) -> Callable:
    """A command line's `main`: a UserError ends it with one line and code 2, Ctrl-C with 130."""

    @functools.wraps(main)
    def wrapped(argv: list[str] | None = None) -> None:
        prepare_streams()
        try:
            if signal.getsignal(signal.SIGINT) is interrupted:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            main(argv)
        except KeyboardInterrupt:
            sys.exit(130)
        except BrokenPipeError:  # the reader of our output has gone: nothing is left to say
            drop_unwritable_output()
        except (UserError, OSError, MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not out_of_memory(error):  # a bug of ours
                raise
            note(" ".join(str(error).split()) or "not enough memory")
            drop_unwritable_output()
            sys.exit(2)

    return wrapped


def out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocation failed, on a CPU or on a GPU. An illegal access to memory is a bug."""
    return re.search("tried to allocate|out of memory", str(error), re.IGNORECASE) is not None


def note(text: str) -> None:
    """Print one line to standard error, between progress bars if there are any."""
    tqdm.write(f"minispec: {printable(text)}", file=sys.stderr)


def printable(text: str) -> str:
    """The text with every character that could drive a terminal (control characters, changes of
    direction, lone surrogates) replaced by its escape, such as \\x1b."""
    return "".join(
        c if unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
        else c.encode("unicode_escape").decode() for c in text
    )  # fmt: skip


def interrupted(*_) -> None:
    """What Ctrl-C does while a command line's modules are imported (`minispec/__init__.py`)."""
    os._exit(130)


def prepare_streams() -> None:
    """Speak UTF-8, whatever the system's encoding."""
    for stream, how in (sys.stdin, AS_TEXT), (sys.stdout, {"encoding": "utf-8"}):
        with contextlib.suppress(ValueError):  # closed, or read from already
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(**how)
    if sys.stderr is None:  # closed: `print` would write to standard output instead
        sys.stderr = open(os.devnull, "w")


@contextlib.contextmanager
def stdout_reserved() -> Iterator[TextIO]:
    """Yield a stream for the answer, the only thing that reaches standard output. Meanwhile, and as
    Python exits, what other code prints (child processes and C too) goes to standard error."""
    stdout = sys.stdout
    with contextlib.ExitStack() as stack:
        if stdout is None:  # closed: file descriptor 1 may be any other file by now
            yield stack.enter_context(open(os.devnull, "w"))
            return
        stdout.flush()
        answer = stdout
        if descriptor(stdout) == 1:  # else it was replaced, as pytest does
            how = {"encoding": stdout.encoding, "errors": stdout.errors}
            answer = stack.enter_context(open(os.dup(1), "w", **how))
        stack.callback(atexit.register, divert_stdout)  # for what C has buffered, and handlers
        kept = os.dup(1)
        stack.callback(os.close, kept)
        stack.callback(os.dup2, kept, 1)
        divert_stdout()
        stack.callback(stdout.flush)  # code may have kept a reference to it
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield answer


def divert_stdout() -> None:
    """Point file descriptor 1 to standard error."""
    drop_unwritable_output()
    stderr = descriptor(sys.stderr)
    with contextlib.suppress(OSError):  # closed
        os.dup2(2 if stderr is None else stderr, 1)


def descriptor(stream: TextIO) -> int | None:
    """The file descriptor of a stream, if it has one."""
    try:
        return stream.fileno()
    except (AttributeError, OSError, ValueError):
        return None


def drop_unwritable_output() -> None:
    """Standard output goes nowhere from now on, if it cannot be written: Python would complain of
    what is left in it at its end."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):  # no file
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def read_json(path: Path, kind: type = dict) -> dict | list:
    """The JSON object, or list, that a file holds."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, kind):
        raise UserError(f"{path} must hold a JSON {'object' if kind is dict else 'list'}")
    return value


def optional_json(path: Path) -> dict:
    """The JSON object that a file holds, an empty one where there is no file."""
    return read_json(path) if path.exists() else {}


def check_package(name: str, flag: str) -> None:
    """Refuse a flag that needs a package that is not installed."""
    if find_spec(name) is None:
        raise UserError(f"{flag} needs {name}: pip install {name}")


def check_writable(file: str | Path, flag: str) -> None:
    """Make the folder of a flag's file, and refuse a file that could not be written, before any
    long work. Another process may be making the same file, so the trial file has a name of its own.
    """
    file = Path(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        place = file.resolve()  # where a link points, if anything is there or not
        if not place.exists():
            tempfile.TemporaryFile(dir=place.parent).close()
        elif place.is_file() or place.is_char_device():
            place.open("a").close()
        else:  # a folder; or a pipe, which would wait for a reader
            raise OSError(0, "not a file")
    except OSError as error:
        raise UserError(f"{flag} {file}: cannot be written ({error.strerror})") from None
