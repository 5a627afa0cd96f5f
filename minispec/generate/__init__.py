"""Generate text with any method: `stream` and `decode`, and a command line."""

from minispec.generate.api import decode, stream
from minispec.methods import METHODS

__all__ = ["METHODS", "decode", "stream"]
