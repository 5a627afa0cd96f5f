"""Check that a server serves our model: compare its tokens and logprobs with ours."""

import math

import torch
from torch import Tensor

from minispec.model import Transformer
from minispec.remote.client import Answer, RequestError, Server


def answer_logits(model: Transformer, prompt: list[int], tokens: list[int]) -> Tensor:
    """Return the logits (n, V) from which each of `tokens` was chosen."""
    return model.logits(model([*prompt, *tokens][:-1])[0, len(prompt) - 1 :])


def are_known(model: Transformer, tokens: list[int]) -> bool:
    return all(0 <= token < model.config.vocab_size for token in tokens)


def largest_gap(model: Transformer, prompt: list[int], tokens: list[int]) -> tuple[float, int, int]:
    """Return the largest gap below the best token, its index, and how many tokens have a gap."""
    unknown = [i for i, token in enumerate(tokens) if not are_known(model, [token])]
    if unknown or not tokens:
        return (math.inf, unknown[0], 1) if unknown else (0.0, 0, 0)
    logits = answer_logits(model, prompt, tokens)  # (n, V)
    below = logits.max(-1).values - logits[torch.arange(len(tokens)), tokens]
    return float(below.max()), int(below.argmax()), int((below > 0).sum())


def with_end(
    model: Transformer, prompt: list[int], tokens: list[int], n: int, ended: bool
) -> list[int]:
    """Append the most probable end token to an answer that ended before it had `n` tokens."""
    eos_ids = model.config.eos_ids
    if not (ended and eos_ids and len(tokens) < n and are_known(model, tokens)):
        return tokens
    logits = answer_logits(model, prompt, [*tokens, eos_ids[0]])[-1]
    return [*tokens, max(eos_ids, key=lambda end: logits[end])]


def greedy_answer(server: Server, prompt: list[int], n: int) -> Answer:
    """Return a greedy answer of at most `n` tokens, with logprobs if the server has them."""
    try:
        return server.ask(prompt, n, logprobs=1)
    except RequestError:
        return server.ask(prompt, n)


def logprob_differences(model: Transformer, prompt: list[int], answer: Answer) -> list[float]:
    """Return how far each logprob is from ours; nothing if the answer has none."""
    n = min(len(answer.tokens), len(answer.logprobs or []))
    if n == 0 or not answer.has_ids or not are_known(model, answer.tokens):
        return []
    logits = answer_logits(model, prompt, answer.tokens[:n]).cpu().double()
    ours = logits.log_softmax(-1)[torch.arange(n), answer.tokens[:n]]
    return (ours - torch.tensor(answer.logprobs[:n], dtype=torch.float64)).abs().tolist()


def mismatch(
    model: Transformer, answers: list[tuple[list[int], Answer, list[int]]], tolerance: float
) -> str:
    """Return why these greedy answers are not the model's, or "" if they are. Each is given with
    its prompt and the tokens to check. A logit gap below `tolerance` may be due to rounding.
    Half of the answers may differ, because quantised weights change some tokens."""
    differences, best = [], []
    for prompt, answer, tokens in answers:
        differences += logprob_differences(model, prompt, answer)
        best.append(bool(tokens) and largest_gap(model, prompt, tokens)[0] < tolerance)
    typical = sorted(differences)[len(differences) // 2] if differences else 0.0
    if typical > max(0.5, tolerance) and sum(best) < len(best):
        return f"another model or other weights: logprobs differ from ours by {typical:.1f}"
    if sum(best) < len(best) / 2:
        share = f"only {sum(best)} of {len(best)} prompts continue as ours do"
        return f"another model, other weights, or wrong from the first token: {share}"
    for prompt, answer, _ in answers:
        if answer.prompt_tokens not in (None, 0, len(prompt)):
            counts = f"counts {answer.prompt_tokens} tokens for a prompt of {len(prompt)}"
            return f"the server {counts}: does it add BOS or a chat template?"
    return ""
