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


def until_end(checkpoint: str, tokens: list[int]) -> list[int]:
    """Return the tokens up to the first end token, for engines that continue after it."""
    ends = [i for i, token in enumerate(tokens) if token in end_tokens(checkpoint)]
    return tokens[: ends[0] + 1] if ends else tokens


class AnyOf(frozenset):
    """End tokens that equal each of their tokens, for engines that compare with a single one."""

    def __eq__(self, token):
        return any(token == end for end in self)

    __hash__ = frozenset.__hash__
