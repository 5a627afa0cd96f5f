"""Where weights are: the shipped ones and the downloaded ones, in a checkout and without one."""

from pathlib import Path

import platformdirs

PACKAGE = Path(__file__).resolve().parents[1]
CHECKOUT = PACKAGE.parent / "weights"
CACHE = platformdirs.user_cache_path("minispec", appauthor=False)  # XDG_CACHE_HOME on Linux
SHIPPED = CHECKOUT if CHECKOUT.exists() else PACKAGE / "weights"  # a wheel has only `smollm2`
TOY = SHIPPED / "target"
REAL_HEADS = SHIPPED / "smollm2"
REAL = (CHECKOUT if CHECKOUT.exists() else CACHE) / "smollm2"  # what `minispec.fetch` writes
REAL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
