"""A minimal, readable and provably lossless implementation of LLM decoding acceleration in plain
PyTorch.
"""

from minispec.checkpoints.load import load
from minispec.cli import UserError
from minispec.fast import optimize
from minispec.machine import package_version
from minispec.sampling import Sampling

__all__ = ["Sampling", "UserError", "load", "optimize"]
__version__ = package_version("minispec")  # None in a checkout that is not installed
