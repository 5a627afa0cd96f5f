"""The smallest complete, readable and provably lossless LLM decoding acceleration, in plain
PyTorch.
"""

from minispec.checkpoint import load
from minispec.errors import UserError
from minispec.sampling import Sampling

__all__ = ["Sampling", "UserError", "load"]
