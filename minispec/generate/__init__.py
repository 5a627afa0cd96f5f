"""Generate text with any method: `stream` and `decode`, and a command line."""

from minispec.generate.api import METHODS, decode, stream

__all__ = ["METHODS", "decode", "stream"]
