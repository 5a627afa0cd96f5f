"""Fixtures: tiny random models, and the folders that hold real ones."""

from pathlib import Path

import pytest
import torch

from minispec import cost
from minispec.model import Transformer
from minispec.toys import small_model

torch.set_num_threads(1)  # tests' tensors are tiny: two threads would only wait for one another
cost.MOMENT = 0.0  # nor does it matter how well a cost is measured
ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"
SHARED = ROOT.parent / "shared"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason=f"{SHARED} is not on this machine")


def random_model(seed: int = 0, dtype: torch.dtype = torch.float64, **changes) -> Transformer:
    """The certifier's tiny random Transformer, over 32 tokens and a context of 256."""
    vocab, context = changes.pop("vocab_size", 32), changes.pop("context", 256)
    return small_model(seed, vocab, context, **changes).to(dtype)


def random_tokens(n: int, seed: int = 0, vocab: int = 32) -> list[int]:
    return torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
