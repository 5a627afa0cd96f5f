"""A minimal, readable and provably lossless implementation of LLM decoding acceleration in plain
PyTorch.
"""

import signal
import sys

from minispec.cli import UserError, exit_on_sigint

# For python -m minispec.…: importing torch takes seconds, and Ctrl-C would print a traceback.
if sys.argv[:1] == ["-m"] and any(argument.startswith("minispec") for argument in sys.orig_argv):
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_on_sigint)

from minispec.checkpoints.load import load
from minispec.fast import optimize
from minispec.machine import package_version
from minispec.sampling import Sampling

__all__ = ["Sampling", "UserError", "load", "optimize"]
__version__ = package_version("minispec")  # None in a checkout that is not installed
