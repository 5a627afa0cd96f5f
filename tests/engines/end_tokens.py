"""The end tokens of a checkpoint, for engines that do not read them."""

import functools
import json
from pathlib import Path


@functools.cache
def end_tokens(checkpoint: str) -> list[int]:
    """Read them as transformers does: from generation_config.json if there is one."""
    paths = Path(checkpoint, "generation_config.json"), Path(checkpoint, "config.json")
    path = next(path for path in paths if path.exists())
    end = json.loads(path.read_text()).get("eos_token_id")
    return end if isinstance(end, list) else [end] if end is not None else []
