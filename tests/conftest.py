"""Fixtures: tiny random models, and the folders that hold real ones."""

from pathlib import Path

import pytest
import torch

from minispec.model import Config, Transformer

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"
SHARED = ROOT.parent / "shared"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason=f"{SHARED} is not on this machine")


def random_model(seed: int = 0, dtype: torch.dtype = torch.float64, **changes) -> Transformer:
    """A tiny model with every parameter random, so that no mistake hides behind a one or a zero."""
    settings = (
        dict(
            hidden_size=16,
            intermediate_size=24,
            layers=2,
            heads=4,
            kv_heads=2,
            head_dim=4,
            vocab_size=32,
            context=256,
        )
        | changes
    )
    model = Transformer(Config(**settings)).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator, dtype=dtype)
        p.data.copy_(0.4 * noise + (1.0 if "norm" in name else 0.0))
        p.requires_grad_(False)
    return model.eval()


def random_tokens(n: int, seed: int = 0, vocab: int = 32) -> list[int]:
    return torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
