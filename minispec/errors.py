"""What a user can get wrong: one line that says what and how to mend it, exit code 2."""

import argparse
import contextlib
import functools
import json
import math
import os
import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn


class UserError(ValueError):
    """Wrong input; its message is all the user needs to see."""


class Parser(argparse.ArgumentParser):
    """A command line's parser: what it cannot read is a UserError, as any wrong input."""

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
            said = " ".join(str(error).split()) or "not enough memory"
            if isinstance(error, RuntimeError) and "memory" not in said:  # a bug of ours
                raise
            print(f"minispec: {said}", file=sys.stderr)
            drop_unwritable_output()
            sys.exit(2)

    return wrapped


def interrupted(*_) -> None:
    """What Ctrl-C does while a command line's modules are imported (`minispec/__init__.py`)."""
    os._exit(130)


def prepare_streams() -> None:
    """Speak UTF-8, whatever the system's encoding. Bytes that are not pass standard input as lone
    surrogates, which a tokenizer refuses."""
    for stream, errors in (sys.stdin, "surrogateescape"), (sys.stdout, "strict"):
        with contextlib.suppress(ValueError):  # closed, or read from already
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(encoding="utf-8", errors=errors)
    if sys.stderr is None:  # closed: `print` would write to standard output instead
        sys.stderr = open(os.devnull, "w")


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
    """Make the folder that the file of a flag is to be in, and refuse, before any long work, a file
    that could not be written after it."""
    file = Path(file)
    existed = file.exists() or file.is_symlink()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists() and not (file.is_file() or file.is_char_device()):  # a pipe would wait
            raise OSError(0, "not a file")
        file.open("a").close()
    except OSError as error:
        raise UserError(f"{flag} {file}: cannot be written ({error.strerror})") from None
    if not existed:
        file.unlink(missing_ok=True)  # another process tries as well
