"""Get the answers that `generate` would sample itself from a server running the target. The first
ones are compared with the target's own predictions: another model, other weights or one BOS too
many would spoil the text without any error.
"""

import argparse
from collections.abc import Callable, Iterator

import torch

from minispec.checkpoints.tokenizer import Tokenizer
from minispec.cli import UserError, note
from minispec.model import Transformer
from minispec.remote import client, identity
from minispec.sampling import Sampling, warp
from minispec.training.text import Skipped

RETRY_SECONDS = 1.0, 2.0, 4.0, 8.0  # waited before a failed request is sent again
ANSWER_SECONDS = 600.0  # for one answer; a slow server may give all others of its batch first
CHECKED_ANSWERS, CHECKED_TOKENS = 8, 8
TOLERANCE = 0.5  # of logits: more than float16, bfloat16 or 8-bit weights usually change them
SKIPPED = {"rejected": "rejects it: ", "incomplete": ""}  # errors that concern one prompt only
REMOVED_SHARE = 0.02  # of sampled tokens; a few are removed by our warpers due to rounding


class ServerSampler:
    """A server, called like the function of `generate.local_sampler`. It gets the requests of a
    batch at once, each with its own seed. Prompts that it rejects, or whose answers it breaks off,
    are skipped."""

    def __init__(
        self, args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer, skipped: Skipped
    ):
        self.model, self.tokenizer = model, tokenizer
        self.skipped, self.batch = skipped, args.batch
        (key,) = client.keys_in([args.key_env], 1) if args.key_env else (None,)
        eos_ids = model.config.eos_ids
        self.server = client.Server(
            args.server, tokenizer, args.name, eos_ids, ANSWER_SECONDS, key, connections=args.batch
        )
        self.server.probe(tokenizer.encode("The") or [0])
        self.server.retried, self.server.retry_seconds = client.TRANSIENT, RETRY_SECONDS
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
        if not self.server.supports(sampling):
            raise UserError(f"{self.server.url} does not support top_k; use --top-k 0")

        def ask(i: int) -> list[int]:
            answer = self.server.ask(prompts[i], n, sampling, (seed + i) % 2**31)
            return self.tokens_of(answer, n)

        answers: list[tuple[list[int], list[int]]] = []
        try:
            self.check_model(prompts)
            for i, tokens in self.ask_all(prompts, ask):
                if tokens and isinstance(tokens, list):
                    answers.append((prompts[i], tokens))
                    yield i, tokens
                else:  # prompts may be the same, so they are numbered
                    start = self.tokenizer.decode(prompts[i])[:40]
                    name = f"prompt {len(self.skipped.reasons) + 1}, {start!r}"
                    self.skipped.reasons[name] = tokens or "the answer is empty"
        except client.RequestError as error:
            hint = "the documents so far are in --out, and the same command continues there"
            raise UserError(f"{self.server.url} {error}; {hint}") from None
        removes = sampling.temperature and (sampling.top_k or sampling.top_p < 1)
        if answers and removes and not self.samples_checked:
            self.check_samples(answers[:CHECKED_ANSWERS], sampling)

    def ask_all(self, prompts: list[list[int]], ask: Callable[[int], object]) -> Iterator[tuple]:
        """Yield the index of each prompt and ask(index), or why the prompt is skipped."""

        def answer_or_reason(i: int) -> object:
            ids, encode = prompts[i], self.tokenizer.encode
            if not self.server.accepts_ids and encode(self.server.as_text(ids)) != ids:
                return "the server accepts text only, and its text has other tokens"
            try:
                return ask(i)
            except client.RequestError as error:
                if error.kind not in SKIPPED:
                    raise
                return f"the server {SKIPPED[error.kind]}{error}"

        return client.in_parallel(answer_or_reason, list(range(len(prompts))), self.batch)

    def tokens_of(self, answer: client.Answer, n: int) -> list[int]:
        """Return the tokens of an answer of at most `n`, with an end token if one ended it."""
        end = self.end if answer.end is None else [answer.end]
        tokens = (answer.tokens + (end if answer.ended else []))[:n]
        if not identity.are_known(self.model, tokens):
            raise UserError(f"{self.server.url} returned token {max(tokens)}, which --model lacks")
        return tokens

    # ---- checks of the first answers -------------------------------------------------------------

    @torch.no_grad()
    def check_model(self, prompts: list[list[int]]) -> None:
        """Compare greedy answers to the first few different prompts with the target's predictions.
        Raise UserError if the server does not serve the target."""
        new = [list(ids) for ids in dict.fromkeys(map(tuple, prompts)) if ids not in self.checked]
        new = new[: CHECKED_ANSWERS - len(self.checked)]
        self.checked.update(map(tuple, new))
        compared, n = [], CHECKED_TOKENS
        answers = self.ask_all(new, lambda i: identity.greedy_answer(self.server, new[i], n))
        for i, answer in answers:
            if not isinstance(answer, str):
                given = answer.tokens[:n], n, answer.ended
                compared.append((new[i], answer, identity.with_end(self.model, new[i], *given)))
        if problem := compared and identity.mismatch(self.model, compared, TOLERANCE):
            raise UserError(f"{self.server.url} does not serve --model: {problem}")

    @torch.no_grad()
    def check_samples(self, answers: list[tuple[list[int], list[int]]], sampling: Sampling) -> None:
        """Note if the server draws many tokens that our top-k and top-p remove."""
        removed = total = 0
        for prompt, tokens in answers:
            p = warp(identity.answer_logits(self.model, prompt, tokens), sampling)  # (n, V)
            drawn = p.gather(-1, torch.tensor(tokens, device=p.device)[:, None])
            removed, total = removed + int((drawn == 0).sum()), total + len(tokens)
        self.samples_checked = True
        if removed > REMOVED_SHARE * total:
            note(f"{self.server.url} samples differently: {removed} of the first {total} tokens "
                 "are not among those that --temperature, --top-k and --top-p allow; it ignores "
                 "one of them, or applies them in another order")  # fmt: skip
