"""dejavuu 0.2.0 with its Hugging Face backend, as black boxes for the certifier. It has no top-k
and takes one end token."""

import functools
from types import SimpleNamespace

from dejavuu import DejaVu
from dejavuu.decoders.hf import HFBackend
from end_tokens import AnyOf, end_tokens

read = functools.cache(functools.partial(HFBackend, device="cpu"))


class Ids(SimpleNamespace):
    """A tokenizer whose text consists of the ids."""

    __call__ = staticmethod(lambda ids: {"input_ids": ids})
    decode = staticmethod(lambda ids: ids)


def generate(
    method, checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed, tree=False,
    fixed=False,
):  # fmt: skip
    if top_k > 1:
        raise NotImplementedError("top-k")
    if max_new_tokens == 0:  # it does not accept 0
        return []
    ends = end_tokens(checkpoint)
    ids = Ids(eos_token_id=AnyOf(ends) if fixed else next(iter(ends), None))
    temperature = 0.0 if top_k else temperature
    return DejaVu(read(checkpoint), ids, method).generate(
        prompt, max_new=max_new_tokens, budget=3, temperature=temperature, top_p=top_p, seed=seed,
        tree=tree)  # fmt: skip


plain, pld, token_recycling = (
    functools.partial(generate, method) for method in ("baseline", "pld", "token_recycling")
)
token_recycling_tree = functools.partial(token_recycling, tree=True)
pld_fixed, token_recycling_fixed, token_recycling_tree_fixed = (
    functools.partial(decode, fixed=True) for decode in (pld, token_recycling, token_recycling_tree)
)
