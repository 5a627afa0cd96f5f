"""The smallest complete, readable and provably lossless LLM decoding acceleration, in plain
PyTorch.
"""

import signal
import sys

from minispec.errors import UserError, interrupted

# python -m minispec.…: importing torch takes seconds, in which Ctrl-C would print a traceback
if sys.argv[:1] == ["-m"] and any(word.startswith("minispec") for word in sys.orig_argv):
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupted)

from minispec.checkpoints.load import load
from minispec.sampling import Sampling

__all__ = ["Sampling", "UserError", "load"]
