"""Examine a Python function: the signature that --impl names, and its adapter."""

import operator
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from tqdm import tqdm

from minispec.certify.common import (
    CallTimeOver,
    Failed,
    NotSupported,
    describe_error,
    time_limit,
)
from minispec.certify.examination import Request

# of one call, which may have to load and compile; `many` has one more per request
CALL_SECONDS, SECONDS_AFTER_HANGING = 300, 30
MANY = 50  # requests that take long enough for a progress bar


class Implementation(Protocol):
    """The signature of the function that --impl names."""

    def __call__(
        self, checkpoint: str, prompt: list[int], *, max_new_tokens: int, temperature: float,
        top_k: int, top_p: float, seed: int,
    ) -> list[int] | tuple[list[int], int, int]:  # fmt: skip
        """Return the new tokens after `prompt`, including a final EOS; or a tuple of these and the
        numbers of drafted and accepted tokens.

        The checkpoint is a Hugging Face directory: a small float32 llama with a tokenizer of one
        letter per token. Its folder `draft` holds a noisy copy. max_new_tokens may be 0, for no
        tokens. Temperature 0 is greedy, whatever top_k and top_p are; top_k 0 and top_p 1 are off.
        Different seeds must give independent samples. Raise NotImplementedError for unsupported
        options. The function is called thousands of times, so keep the loaded model between calls;
        there are several checkpoints.

        An engine that batches may have an attribute `many`: a function of (checkpoint, requests)
        that returns a list of such results. Each request is a dict of the other arguments."""


@dataclass(frozen=True)
class FunctionDecoder:
    """An implementation and one checkpoint, as a decoder under examination."""

    impl: Implementation
    folder: str = ""
    # (drafted, accepted) of each call that returns them, of all checkpoints
    counts: list[tuple[int, int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=lambda: [CALL_SECONDS])  # limit of a call

    def at(self, folder: str) -> "FunctionDecoder":
        return replace(self, folder=folder)

    def batch(self, requests: list[Request]) -> list[list[int]]:
        """Return the tokens of several requests, in one call if the implementation can batch."""
        options, what = [request.options() for request in requests], ""
        try:
            if hasattr(self.impl, "many"):
                return self.ask_many(options)
            results, quiet = [], None if len(options) >= MANY else True
            for request in tqdm(options, "runs", leave=False, disable=quiet):
                what = ", ".join(f"{k} {v}" for k, v in request.items() if k != "prompt")
                what = f"prompt of {len(request['prompt'])} tokens, {what}"
                with time_limit(*self.seconds, CallTimeOver):
                    results.append(self.token_ids(self.impl(self.folder, **request)))
            return results
        except (NotSupported, Failed):
            raise
        except NotImplementedError as error:
            raise NotSupported(str(error)) from error
        except CallTimeOver as error:
            self.seconds[:] = [SECONDS_AFTER_HANGING]
            raise Failed(f"{error} ({what})") from error
        except (Exception, SystemExit) as error:
            raise Failed(describe_error(error, what)) from error

    def ask_many(self, options: list[dict]) -> list[list[int]]:
        with time_limit(sum(self.seconds, len(options)), CallTimeOver):
            results = list(self.impl.many(self.folder, options))
        if len(results) != len(options):
            raise Failed(f"many returned {len(results)} results for {len(options)} requests")
        return [self.token_ids(result) for result in results]

    def token_ids(self, result) -> list[int]:
        """Convert a result to ints, also from numpy and torch; add up its counts."""
        if isinstance(result, tuple) and len(result) == 3 and np.ndim(result[0]) == 1:
            result, *counts = result
            self.counts.append(tuple(counts))
        tokens = list(result)  # runs the implementation if it is a generator
        try:
            return [operator.index(token) for token in tokens]
        except TypeError:
            raise Failed(f"must return token ids, not {str(result)[:80]!r}") from None
