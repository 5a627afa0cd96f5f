"""Ask a server of the target for the answers that `generate` would sample itself.

The server's first answers are compared with the target's own predictions: another model, other
weights or one BOS too many would spoil the text without any error.
"""

import argparse
import time
from collections.abc import Callable, Iterator

import torch

from minispec.checkpoints.tokenizer import Tokenizer
from minispec.cli import UserError, note
from minispec.model import Transformer
from minispec.remote.api_keys import keys_in, warn_if_exposed
from minispec.remote.client import (
    Answer,
    ConnectionLost,
    RequestError,
    Server,
    in_parallel,
)
from minispec.remote.identity import (
    answer_logits,
    are_known,
    greedy_answer,
    mismatch,
    with_end,
)
from minispec.sampling import Sampling, warp
from minispec.training.text import LeftOut

RETRY_SECONDS = 1.0, 2.0, 4.0, 8.0  # waited before a failed request is sent again
ANSWER_SECONDS = 600.0  # for one answer; a slow server may give all others of its batch first
CHECKED_ANSWERS, CHECKED_TOKENS = 8, 8
TOLERANCE = 0.5  # of logits: more than float16, bfloat16 or 8-bit weights usually change them
REMOVED_SHARE = 0.02  # of sampled tokens; a few are removed by our warpers due to rounding


class ServerSampler:
    """A server, called like the function of `generate.local_sampler`. The requests of a batch are
    sent at once, each with a seed of its own. A prompt that the server rejects, or whose answers
    it breaks off, has no answer."""

    def __init__(
        self, args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer, left_out: LeftOut
    ):
        self.model, self.tokenizer = model, tokenizer
        self.left_out, self.batch = left_out, args.batch
        (key,) = keys_in([args.key_env], 1) if args.key_env else (None,)
        eos_ids = model.config.eos_ids
        self.server = Server(
            args.server, tokenizer, args.name, eos_ids, ANSWER_SECONDS, key, connections=args.batch
        )
        warn_if_exposed(self.server)
        self.server.probe(tokenizer.encode("The") or [0])
        if not self.server.accepts_extra:
            note(f"{self.server.url} accepts OpenAI's fields only; its own settings of min-p and "
                 "repetition penalties apply, if it has any")  # fmt: skip
        end = tokenizer.id_of("eos_token")  # ends a turn, if the model has several end tokens
        self.end = [end] if end in eos_ids else list(eos_ids[:1])
        self.checked: set[tuple[int, ...]] = set()  # prompts
        self.samples_checked = False

    def __call__(
        self, prompts: list[list[int]], n: int, sampling: Sampling, seed: int
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield the index of each prompt and the tokens of its answer, at most `n`. If the server
        fails, or on Ctrl-C, yield the answers that are finished before raising."""
        try:
            self.check_model(prompts)
            yield from self.answers(prompts, n, sampling, seed)
        except (ConnectionLost, RequestError) as error:
            hint = "the documents so far are in --out, and the same command continues there"
            if getattr(error, "kind", "") == "unsupported":
                error, hint = f"does not support {error}", "use --top-k 0"
            raise UserError(f"{self.server.url} {error}; {hint}") from None

    def answers(
        self, prompts: list[list[int]], n: int, sampling: Sampling, seed: int
    ) -> Iterator[tuple[int, list[int]]]:
        def ask(i: int) -> Answer | str:
            request = prompts[i], n, sampling, (seed + i) % 2**31
            return self.with_retries(prompts[i], lambda: self.server.ask(*request))

        first: list[tuple[list[int], list[int]]] = []
        for i, answer in in_parallel(ask, list(range(len(prompts))), self.batch):
            tokens = [] if isinstance(answer, str) else self.tokens_of(answer, n)
            if not tokens:
                self.leave_out(prompts[i], answer or "the answer is empty")
                continue
            if len(first) < CHECKED_ANSWERS:
                first.append((prompts[i], tokens))
            yield i, tokens
        removes = sampling.temperature and (sampling.top_k or sampling.top_p < 1)
        if first and removes and not self.samples_checked:
            self.check_samples(first, sampling)

    def with_retries(self, prompt: list[int], ask: Callable[[], Answer]) -> Answer | str:
        """Return the answer to a prompt, or the reason why the prompt is left out. If a request
        fails or its answer is broken off, repeat it with back-off."""
        text = None if self.server.accepts_ids else self.server.as_text(prompt)
        if text is not None and self.tokenizer.encode(text) != prompt:
            return "the server accepts text only, and its text has other tokens"
        for seconds in (*RETRY_SECONDS, None):
            try:
                answer = ask()
                if answer.ended is not None:
                    return answer
                if seconds is None:
                    return f"the server breaks off its answer: finish_reason {answer.reason!r}"
            except (ConnectionLost, RequestError) as error:
                kind = getattr(error, "kind", "failed")
                if kind == "rejected":
                    return f"the server rejects it: {error}"
                if kind != "failed" or seconds is None:
                    raise
            time.sleep(seconds)

    def leave_out(self, prompt: list[int], reason: str) -> None:
        reasons = self.left_out.reasons  # prompts may be the same, so they are numbered
        reasons[f"prompt {len(reasons) + 1}, {self.tokenizer.decode(prompt)[:40]!r}"] = reason

    def tokens_of(self, answer: Answer, n: int) -> list[int]:
        """Return the tokens of an answer of at most `n`, with an end token if one ended it."""
        end = self.end if answer.end is None else [answer.end]
        tokens = (answer.tokens + (end if answer.ended else []))[:n]
        if not are_known(self.model, tokens):
            unknown = max(tokens)
            raise UserError(f"{self.server.url} returned token {unknown}, which --model lacks")
        return tokens

    # ---- checks of the first answers -------------------------------------------------------------

    @torch.no_grad()
    def check_model(self, prompts: list[list[int]]) -> None:
        """Compare greedy answers to the first few different prompts with the target's predictions.
        Raise UserError if the server does not serve the target."""
        new = [list(ids) for ids in dict.fromkeys(map(tuple, prompts)) if ids not in self.checked]
        new = new[: CHECKED_ANSWERS - len(self.checked)]
        self.checked.update(map(tuple, new))

        def ask(prompt: list[int]) -> Answer | str:
            return self.with_retries(
                prompt, lambda: greedy_answer(self.server, prompt, CHECKED_TOKENS)
            )

        compared = []
        for i, answer in in_parallel(ask, new, self.batch):
            if isinstance(answer, str):
                continue
            tokens = answer.tokens[:CHECKED_TOKENS]
            tokens = with_end(self.model, new[i], tokens, CHECKED_TOKENS, answer.ended)
            compared.append((new[i], answer, tokens))
        if problem := compared and mismatch(self.model, compared, TOLERANCE):
            raise UserError(f"{self.server.url} does not serve --model: {problem}")

    @torch.no_grad()
    def check_samples(self, answers: list[tuple[list[int], list[int]]], sampling: Sampling) -> None:
        """Note if the server draws many tokens that our top-k and top-p remove."""
        removed = total = 0
        for prompt, tokens in answers:
            p = warp(answer_logits(self.model, prompt, tokens), sampling)  # (n, V)
            drawn = p.gather(-1, torch.tensor(tokens, device=p.device)[:, None])
            removed, total = removed + int((drawn == 0).sum()), total + len(tokens)
        self.samples_checked = True
        if removed > REMOVED_SHARE * total:
            note(f"{self.server.url} samples differently: {removed} of the first {total} tokens "
                 "are not among those that --temperature, --top-k and --top-p allow; it ignores "
                 "one of them, or applies them in another order")  # fmt: skip
