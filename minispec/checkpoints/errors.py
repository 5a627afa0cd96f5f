"""User errors for what libraries raise on a damaged file or an impossible text."""

import contextlib
from collections.abc import Iterator
from textwrap import shorten

from minispec.cli import UserError


@contextlib.contextmanager
def user_error(problem: str) -> Iterator[None]:
    """Raise UserError with this problem and the reason if the block fails, whatever it raises: the
    tokenizers library has bare Exceptions and, if its Rust code panics, BaseExceptions."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise UserError(f"{problem}: {shorten(str(error), 300)}") from None
