"""Paths of the shipped and the downloaded weights, in a checkout and in an installed package."""

from pathlib import Path

import platformdirs

PACKAGE = Path(__file__).resolve().parent
CHECKOUT = PACKAGE.parent / "weights"
CACHE = platformdirs.user_cache_path("minispec", appauthor=False)  # XDG_CACHE_HOME on Linux
CACHE_ADVICE = "; set XDG_CACHE_HOME to a folder that can be written"
SHIPPED = CHECKOUT if CHECKOUT.exists() else PACKAGE / "weights"  # a wheel contains only `smollm2`
TOY = SHIPPED / "target"
SMOLLM2_HEADS = SHIPPED / "smollm2"
SMOLLM2 = (CHECKOUT if CHECKOUT.exists() else CACHE) / "smollm2"  # written by `minispec fetch`
SMOLLM2_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
