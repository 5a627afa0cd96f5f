"""sequential-speculative-decoding's methods, as black boxes for the certifier. It has no top-k and
no top-p; top-k 1 is requested as temperature 0, which is the same distribution."""

import functools
from types import SimpleNamespace

import torch
import transformers
from end_tokens import AnyOf, end_tokens
from mend import mend
from seqspecdecod import baseline_generate, capped_hsd, speculative_generate

read = functools.cache(transformers.AutoModelForCausalLM.from_pretrained)


# fixed: they keep the end token, know several, and return no more tokens than were asked for
plain_generate = mend(baseline_generate, ("current_ids = current_ids[:, :-1]", "pass"))
divergences = mend(
    capped_hsd.compute_capped_branch_divergences,
    ("ratio_branch / divide", "p_joint / divide - q_joint"),
    ("torch.sum(torch.where(r_star > 1, r_star - 1, torch.zeros_like(r_star)) * q_joint)",
     "r_star.clamp(min=0).sum()"),
    ("torch.sum(torch.where(r_star <= 1, 1 - r_star, torch.zeros_like(r_star)) * q_joint)",
     "-r_star.clamp(max=0).sum()"),
)  # fmt: skip
capped_step = mend(
    capped_hsd.capped_hsd_step,
    ("(ratios, gamma - 1)", "(ratios, gamma)"),
    ("tau, ratios", "tau + 1, ratios"),
    ("q_dist * q_prefix * (r_star - 1)", "r_star"),
    compute_capped_branch_divergences=divergences,
)
mended_generate = mend(
    speculative_generate,
    ("prompt_len + eos_pos", "prompt_len + eos_pos + 1"),
    ("output_ids = input_ids[0, prompt_len:]",
     "output_ids = input_ids[0, prompt_len : prompt_len + max_new_tokens]"),
    capped_hsd_step=capped_step,
)  # fmt: skip


class Ids(SimpleNamespace):
    """A tokenizer whose text consists of the ids; its chat template adds nothing."""

    apply_chat_template = staticmethod(lambda messages, **_: messages[0]["content"])
    __call__ = staticmethod(lambda texts, **_: SimpleNamespace(input_ids=torch.tensor(texts)))
    convert_tokens_to_ids = staticmethod(lambda token: None)  # unk: there is no </think>
    decode = staticmethod(lambda ids, **_: " ".join(map(str, ids)))


def generate(
    method, checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed, fixed=False
):  # fmt: skip
    if top_p < 1 or top_k > 1:
        raise NotImplementedError("top-k, top-p")
    torch.manual_seed(seed)
    target, temperature = read(checkpoint), 0.0 if top_k else float(temperature)
    end = AnyOf(end_tokens(checkpoint)) if fixed else target.generation_config.eos_token_id
    ids = Ids(eos_token_id=end, unk_token_id=None)
    request = target, ids, prompt, max_new_tokens
    if not method:
        decode = plain_generate if fixed else baseline_generate
        result = decode(*request, target_temperature=temperature)
        return [int(token) for token in result["text"].split()]
    draft, temperatures = read(f"{checkpoint}/draft"), (temperature, temperature)  # draft, target
    decode = mended_generate if fixed else speculative_generate
    result = decode(draft, *request, 2, *temperatures, method=method)
    tokens = [int(token) for token in result["text"].split()]
    return tokens, result["draft_tokens"], result["accepted_tokens"]


plain, standard, naive_hsd, capped_hsd = (
    functools.partial(generate, method) for method in ("", "standard", "naive_hsd", "capped_hsd")
)
plain_fixed, standard_fixed, naive_hsd_fixed, capped_hsd_fixed = (
    functools.partial(decode, fixed=True) for decode in (plain, standard, naive_hsd, capped_hsd)
)
