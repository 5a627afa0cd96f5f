"""User errors: one line saying what is wrong and how to fix it; exit code 2."""

import argparse
import contextlib
import errno
import functools
import importlib.util
import json
import math
import os
import re
import signal
import sys
import tempfile
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from textwrap import shorten
from typing import NoReturn, TextIO

from tqdm import tqdm

# How a user's text is read: as UTF-8, without a byte-order mark, with every line end as \n. Invalid
# bytes become lone surrogates, which the tokenizer rejects.
TEXT_ENCODING = {"encoding": "utf-8-sig", "errors": "surrogateescape", "newline": None}

FORMER_FLAGS = {"--own": "--generated"}  # accepted until version 0.2
MODEL_FILES = ".json", ".safetensors", ".bin", ".pt", ".gguf", ".jinja"  # read from directories


class UserError(ValueError):
    """Invalid input. The message is all that the user needs to see."""


@contextlib.contextmanager
def user_error(problem: str, kind: type = BaseException) -> Iterator[None]:
    """Raise UserError with this problem and the reason if the block raises an error of this kind.
    (If the Rust code of the tokenizers library panics, it raises a BaseException.)"""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except kind as error:
        raise UserError(f"{problem}: {shorten(str(error), 300)}") from None


class Source(str):
    """An argument that names something to read: a directory, a file or a hub id."""


class OutputFile(type(Path())):
    """An argument that names a file to write."""


class OutputFolder(OutputFile):
    """An argument that names a directory to write."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UserError, also for outputs that would overwrite a source. -h
    shows the first paragraph of `description`, a module's docstring (None under python -OO)."""

    def __init__(self, *args, description: str | None = None, **options):
        text = (description or "").split("\n\n")[0]
        super().__init__(*args, description=text, allow_abbrev=False, **options)

    def parse_args(self, args: list[str] | None = None, **options) -> argparse.Namespace:
        args = sys.argv[1:] if args is None else args
        parsed = super().parse_args([FORMER_FLAGS.get(text, text) for text in args], **options)
        check_outputs(vars(parsed))
        return parsed

    def error(self, message: str) -> NoReturn:
        if wrong := re.search(r"invalid choice: '(.*?)' \((choose from (.*))\)", message):
            names = re.findall(r"[^', ]+", wrong[3])
            message = message.replace(wrong[2], suggestion(wrong[1], names))
        raise UserError(f"{message} ({self.prog} -h shows the flags)")


def suggestion(name: str, names: Iterable[str]) -> str:
    """The name that a mistyped one is closest to, or all names if none is close."""
    closest = get_close_matches(name, names := list(names), 1)
    return f"did you mean {closest[0]}?" if closest else f"choose from {', '.join(names)}"


def number(low: float, high: float = 2**63 - 1, kind: Callable = int) -> Callable[[str], float]:
    """Return an argparse `type=` for numbers of this kind from `low` to `high`."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if low <= (value := kind(text)) <= high and math.isfinite(value):
                return value
        hide_high = high == 2**63 - 1 and len(text) < 19
        bounds = f"at least {low}" if hide_high else f"from {low} to {high}"
        noun = "whole number" if kind is int else "number"
        raise argparse.ArgumentTypeError(f"{text[:40]} must be a {noun}, {bounds}")

    return parse


def to_number(value: object, kind: type[int] | type[float]) -> int | float:
    """Convert a number of any type, such as NumPy's, to Python's own. Raises UserError."""
    with contextlib.suppress(OverflowError):  # an integer that is too large for a float
        if isinstance(value, Integral if kind is int else Real):
            return kind(value)
    raise UserError(f"must be a {'whole number' if kind is int else 'number'}")


def import_function(name: str, flag: str = "--impl") -> Callable:
    """Import the function named `package.module:function` or `file.py:function`."""
    module_name, colon, function = name.rpartition(":")
    if not colon:
        raise UserError(f"{flag} {name}: name the function, too, as in {name}:decode")
    sys.path.insert(0, "")
    advice = "use package.module:function or file.py:function"
    with user_error(f"{flag} {name}: cannot be imported; {advice}"):
        if module_name.endswith(".py"):
            sys.path.insert(0, str(Path(module_name).parent))
            spec = importlib.util.spec_from_file_location(Path(module_name).stem, module_name)
            module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(module_name)
        found = getattr(module, function)
    if not callable(found):
        raise UserError(f"{flag} {name}: is not a function")
    return found


def flag_name(name: str) -> str:
    """The flag of an argument: --top-k for `top_k`."""
    return "--" + name.replace("_", "-")


def comma_separated(text: str) -> list[str]:
    """An argparse `type=` for lists of names; a comma inside parentheses is part of a name."""
    parts = re.split(r",(?![^(]*\))", text)
    if not all(map(str.strip, parts)):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} has an empty name before or after a comma")
    return parts


def command(main: Callable) -> Callable:
    """Decorate a command's `main`: a UserError exits with one line and code 2, Ctrl-C with 130."""

    @functools.wraps(main)
    def wrapped(argv: list[str] | None = None) -> None:
        # read and write UTF-8, whatever the system's encoding
        for stream, encoding in (sys.stdin, TEXT_ENCODING), (sys.stdout, {"encoding": "utf-8"}):
            with contextlib.suppress(AttributeError, ValueError):  # replaced, closed, already read
                stream.reconfigure(**encoding)
        try:
            if signal.getsignal(signal.SIGINT) is exit_on_sigint:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            main(argv)
            if sys.stdout is not None:
                sys.stdout.flush()
        except KeyboardInterrupt:
            sys.exit(130)
        except BrokenPipeError:  # nobody reads our output any more, so there is nothing to report
            drop_unwritable_output()
        except (UserError, OSError, MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not out_of_memory(error):  # a bug in our code
                raise
            if getattr(error, "errno", 0) in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                error.filename = error.filename or "standard output"  # other files are named
            note(" ".join(str(error).split()) or "not enough memory")
            drop_unwritable_output()
            sys.exit(2)

    return wrapped


def out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocation failed, on the CPU or a GPU. (An illegal memory access is a bug.)"""
    return re.search("tried to allocate|out of memory", str(error), re.IGNORECASE) is not None


def note(text: str) -> None:
    """Print one line to standard error without disturbing progress bars."""
    tqdm.write(f"minispec: {printable(text)}", file=sys.stderr)


def printable(text: str) -> str:
    """Replace every character that could control a terminal (control characters, direction changes,
    lone surrogates) by its escape sequence, such as \\x1b."""
    return "".join(
        c if unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
        else c.encode("unicode_escape").decode() for c in text
    )  # fmt: skip


def exit_on_sigint(*_) -> None:
    """Handle Ctrl-C while a command's modules are being imported (see `minispec/__init__.py`)."""
    os._exit(130)


@contextlib.contextmanager
def stdout_reserved() -> Iterator[TextIO]:
    """Yield a stream for the result. From now on and as Python exits, whatever other code prints
    (even child processes and C) goes to standard error."""
    drop_unwritable_output()
    with contextlib.ExitStack() as stack:
        result = sys.stdout
        if result is sys.__stdout__:  # otherwise something has replaced it, as pytest does
            result = stack.enter_context(open(os.dup(1), "w", encoding="utf-8"))
        os.dup2(2, 1)
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield result


def drop_unwritable_output() -> None:
    """Discard standard output if it cannot be written: Python would complain about it at exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):  # not a file
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def read_json(path: Path, kind: type = dict) -> dict | list:
    """Read a JSON object (or list, if that is the `kind`) from a file."""
    with user_error(f"{path} cannot be read as JSON"):
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    if not isinstance(value, kind):
        raise UserError(f"{path} must hold a JSON {'object' if kind is dict else 'list'}")
    return value


def optional_json(path: Path) -> dict:
    """Read a JSON object from a file. Returns an empty one if the file does not exist."""
    return read_json(path) if path.exists() else {}


def check_package(name: str, flag: str) -> None:
    """Raise UserError if a flag needs a package that is not installed."""
    if importlib.util.find_spec(name) is None:
        raise UserError(f"{flag} needs {name}: pip install {name}")


def check_outputs(arguments: dict[str, object]) -> None:
    """Before any long work, raise UserError if one of the arguments is an output that cannot be
    written, or that would overwrite a source among the others (a Source or any other Path)."""
    values = [(flag_name(name), value) for name in arguments for value in flat(arguments[name])]
    outputs = [pair for pair in values if isinstance(pair[1], OutputFile)]
    sources = [pair for pair in values if isinstance(pair[1], Source | Path)]
    for flag, output in outputs:
        for name, source in sources:
            if not isinstance(source, OutputFile) and files_of(output) & files_of(source):
                raise UserError(f"{flag} {output} would overwrite {name} {source}, or a file in "
                                f"it: choose another {flag}")  # fmt: skip
        folder = isinstance(output, OutputFolder)
        check_writable(output / "config.json" if folder else output, flag)


def flat(value: object) -> list:
    """The values in a nested list."""
    return sum(map(flat, value), []) if isinstance(value, list | tuple) else [value]


def files_of(argument: Source | Path) -> set[tuple[int, int]]:
    """Identify what an argument names: a file (the FILE of FILE:FUNCTION), or a directory and the
    files in it. For a Source or an OutputFolder, these are only the files of a model and its card.
    """
    place = argument if os.path.exists(argument) else str(argument).rpartition(":")[0]
    names = os.listdir(place) if os.path.isdir(place) else []
    if isinstance(argument, Source | OutputFolder):
        names = [name for name in names if name.endswith((*MODEL_FILES, ".md"))]
    files = filter(os.path.exists, [place, *(os.path.join(place, name) for name in names)])
    return {(status.st_dev, status.st_ino) for status in map(os.stat, files)}


def check_writable(file: str | Path, flag: str, advice: str = "") -> None:
    """Before any long work, create the folder of a flag's file and raise UserError, which ends with
    `advice`, if neither the file nor a temporary one next to it, which will replace it, can be
    written. A file that does not exist is not created: another process may be creating it."""
    file = Path(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        target = file.resolve()  # follows links, even to a file that does not exist
        if target.exists():
            if not (target.is_file() or target.is_char_device()):  # a folder, or a pipe: open waits
                raise OSError(0, "not a file")
            target.open("a").close()
        if not target.is_char_device():
            tempfile.TemporaryFile(dir=target.parent).close()
    except OSError as error:
        raise UserError(f"{flag} {file}: cannot be written ({error.strerror}){advice}") from None
