"""Answers of SmolLM2 with p and q at each of their tokens, for lesson 03."""

from torch import Tensor

from minispec import Sampling
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.generate import decode
from minispec.generate.drafters import with_drafter
from minispec.generate.run import Run
from minispec.methods.fastmtp import HeadDrafter
from minispec.model import Transformer
from minispec.sampling import probs


def answers(
    model: Transformer, tokenizer: Tokenizer, questions: list[str]
) -> list[tuple[Run, Tensor, Tensor]]:
    """Answer each question at temperature 1, with one draft of the FastMTP head per round. Returns
    the runs, each with p and q at its tokens."""
    drafter = with_drafter("fastmtp", model, tokenizer, {})
    options = drafter | {"k": 1, "temperature": 1.0, "max_new_tokens": 60}
    prompts = [tokenizer.chat([{"role": "user", "content": text}]) for text in questions]
    runs = [decode(model, tokenizer, prompt, "fastmtp", **options) for prompt in prompts]
    return [(run, *p_and_q(model, drafter, run)) for run in runs]


def p_and_q(model: Transformer, drafter: dict, run: Run) -> tuple[Tensor, Tensor]:
    """Return p and q (n, m) at the n tokens of a finished run, for the m tokens that the head can
    draft, from one pass of the model and one of the head. q is 0 for all other tokens."""
    text, first = run.prompt + run.tokens, len(run.prompt)
    hidden = model(text)[0]
    draft_head = drafter["vocabulary"].select(text)
    head = HeadDrafter(drafter["head"], model, drafter["head"].new_cache(len(text)), offset=0)
    q = probs(draft_head.logits(head.run(hidden[:-1], text[1:])), Sampling(1.0))
    p = probs(model.logits(hidden[1:]), Sampling(1.0))[:, draft_head.host_ids]
    return p[first - 2 : -1], q[first - 2 : -1]  # row j is about token j + 2
