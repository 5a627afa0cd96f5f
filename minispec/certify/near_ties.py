"""Compare an engine's texts with and without drafts where any rounding error is likely to show.

Rounding changes a greedy text where the best two tokens are nearly tied. A *near tie* is a gap
between their logits, in float64, that is smaller than one step of bfloat16 at the best logit."""

import torch
from torch import Tensor

from minispec.certify.common import Result, first_difference
from minispec.certify.examination import Examination, Request, baseline_tokens
from minispec.generate.api import common_prefix_length
from minispec.model import Transformer
from minispec.remote.identity import answer_logits

SEARCHED, CHOSEN = 64, 8  # prompts of one length
TOKENS = 64  # of an answer


def gaps(logits: Tensor) -> Tensor:
    """The gaps between the best two of logits (..., V), in steps of bfloat16 at the best one."""
    best, second = logits.topk(2).values.unbind(-1)
    return (best - second) / torch.exp2(torch.frexp(best).exponent - 8)


def find_prompts(model: Transformer, half: int) -> list[list[int]]:
    """Choose, of many random prompts that repeat their first half, those whose greedy answers come
    closest to a tie. The first token of an answer does not count, as it depends on no draft."""
    vocab, generator = model.config.vocab_size, torch.Generator().manual_seed(half)
    prompts = torch.randint(vocab, (SEARCHED, half), generator=generator).repeat(1, 2)
    cache = model.new_cache(2 * half + TOKENS, SEARCHED)
    new, found = prompts, []
    for _ in range(TOKENS):
        logits = model.logits(model(new, cache)[:, -1])  # (SEARCHED, V)
        cache.commit(list(range(new.shape[1])))
        new = logits.argmax(-1, keepdim=True)
        found.append(gaps(logits))
    return prompts[torch.stack(found[1:]).amin(0).argsort()[:CHOSEN]].tolist()


def compare_near_ties(exam: Examination, half: int) -> Result:
    """`compare_texts` for prompts of 2 * `half` tokens that are found by a search."""
    return compare_texts(exam, find_prompts(exam.model, half), TOKENS)


def compare_texts(exam: Examination, prompts: list[list[int]], n: int) -> Result:
    """Check that greedy answers of `n` tokens equal the baseline's; no difference counts as a tie.
    Proves nothing if there are no near ties."""
    found, different = [], []
    for prompt in prompts:
        plain = baseline_tokens(exam, prompt, n)
        tokens = exam.tokens(prompt, n)[:n]
        found.append(gaps(answer_logits(exam.model, prompt, plain)))
        if tokens != plain:
            different.append((prompt, tokens, plain, found[-1]))
    every = torch.cat(found)
    near = int((every < 1).sum())
    counts = f"{len(prompts)} prompts, {len(every)} tokens, {near} near ties"
    if near:
        counts += f" (the closest: {every.min():.1g} of a bfloat16 step)"
    if not different:
        return (True if near else None), f"equal texts: {counts}"
    prompt, tokens, plain, steps = different[0]
    exam.remember(Request(prompt, n), tokens=tokens, baseline=plain)
    at = common_prefix_length(tokens, plain)
    gap = f" (top-2 gap: {steps[at]:.3g} steps)" if at < len(plain) else ""
    where = f"the first, after {len(prompt)} tokens, {first_difference(tokens, plain)}{gap}"
    return False, f"{len(different)} of {len(found)} texts differ; {where}; {counts}"
