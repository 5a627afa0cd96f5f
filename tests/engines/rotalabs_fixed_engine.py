"""rotalabs-accel 1.1.1's loops with finding 16 of README.md fixed, except `tree`."""

import functools

import torch
from mend import mend
from rotalabs_accel.speculative import EAGLEModel, core, eagle_decode, eagle_verify, medusa_decode
from rotalabs_accel.speculative.sampling import _top_p_filtering
from rotalabs_engine import generate, with_draft, with_eagle, with_medusa


def distribution(logits, temperature, top_p):
    logits = logits / temperature
    return (_top_p_filtering(logits, top_p) if top_p < 1 else logits).softmax(-1)


def pick(logits, temperature, top_p, use_sampling):
    """Return a token, and its distribution instead of its probability."""
    p = distribution(logits, temperature, top_p)
    return torch.multinomial(p, 1)[0] if use_sampling else logits.argmax(-1), p[0]


def prefill(model, tokens):
    """Leave out the last token, which the first round feeds."""
    return core.prefill_cache(model, tokens[:, :-1]) if tokens.shape[1] > 1 else (None, None)


speculative_decode = mend(
    core.speculative_decode,
    ("(draft_cache, all_token_ids.shape[1])", "(draft_cache, all_token_ids.shape[1] - 1)"),
    prefill_cache=prefill,
    draft_tokens=mend(
        core.draft_tokens,
        ("token.unsqueeze(0).unsqueeze(0)", "token.reshape(1, 1)"),
        ("torch.cat([p.reshape(1) for p in draft_probs_list], dim=0)",
         "torch.stack(draft_probs_list)"),
        sample_from_logits=pick,
    ),
    verify_tokens=mend(
        core.verify_tokens,
        ("F.softmax(all_logits / max(temperature, 1e-8), dim=-1)",
         "distribution(all_logits[0], temperature, top_p)[None]"),
        ("p_draft = draft_probs[i]", "p_draft = draft_probs[i, draft_token]"),
        ("draft_dist[draft_token] = p_draft", "draft_dist = draft_probs[i]"),
        sample_from_logits=pick, distribution=distribution,
    ),
)  # fmt: skip
medusa_loop = mend(medusa_decode, ("candidates, target_cache", "candidates, None"))
CROP = "target_cache.crop(input_ids.shape[1] - 1)"
eagle_loop = mend(
    eagle_decode,
    ("        draft_start =", f"        {CROP}\n        draft_start ="),
    ("        verify_start =", f"        {CROP}\n        verify_start ="),
    eagle_verify=mend(
        eagle_verify,
        ("draft_probs[0, i].item()", "draft_probs[0, i, draft_token].item()"),
        ("target_probs[0, i] - draft_prob,", "target_probs[0, i] - draft_probs[0, i],"),
        ("bonus = target_logits[0, k].argmax()",
         "bonus = pick(target_logits[:, k], 1.0, 1.0, use_sampling)[0][0]"),
        pick=pick,
    ),
)  # fmt: skip


class MendedEagle(EAGLEModel):
    """It returns the drafts' distributions instead of their probabilities."""

    draft_tokens = mend(
        EAGLEModel.draft_tokens, ("probs.gather(1, next_token).squeeze(-1)", "probs")
    )


draft_model, medusa, eagle = (functools.partial(generate, decode, fixed=True) for decode in (
    functools.partial(with_draft, decode=speculative_decode),
    functools.partial(with_medusa, decode=medusa_loop),
    functools.partial(with_eagle, decode=eagle_loop, kind=MendedEagle),
))  # fmt: skip
