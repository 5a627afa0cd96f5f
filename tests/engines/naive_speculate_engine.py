"""naive-speculate 0.1.0's decoders, as black boxes for the certifier. They have only temperature 1,
and leave the loop to the user. The package needs Python 3.14, which evaluates annotations late; for
older ones, its files are compiled with annotations as text."""

import __future__

import functools
import sys
import typing
from importlib.machinery import PathFinder, SourceFileLoader

import torch
from end_tokens import end_tokens
from transformers import AutoModelForCausalLM

read = functools.cache(AutoModelForCausalLM.from_pretrained)


class LateAnnotations(SourceFileLoader):
    """Finds and loads naive_speculate's modules."""

    @staticmethod
    def find_spec(name, path, target=None):
        if name.partition(".")[0] == "naive_speculate":
            spec = PathFinder.find_spec(name, path)
            spec.loader = LateAnnotations(name, spec.origin)
            return spec

    def get_code(self, name):
        source, flag = self.get_data(self.path), __future__.annotations.compiler_flag
        return compile(source, self.path, "exec", flag, dont_inherit=True)


sys.meta_path.insert(0, LateAnnotations)
typing.override = getattr(typing, "override", lambda method: method)

from naive_speculate.autoregress import AutoregressiveDecoder  # noqa: E402
from naive_speculate.config.strategy import SampleStrategy, VerifyStrategy  # noqa: E402
from naive_speculate.infer.inferencer.basic import BasicInferencer  # noqa: E402
from naive_speculate.infer.kvcache.dynamic_no_update import DynamicNoUpdateCache  # noqa: E402
from naive_speculate.infer.lm.qwen3 import Qwen3LanguageModel  # noqa: E402
from naive_speculate.speculate.decoder import SpeculativeDecoder  # noqa: E402
from naive_speculate.speculate.drafter import Drafter  # noqa: E402
from naive_speculate.speculate.scorer import Scorer  # noqa: E402


class Llama(Qwen3LanguageModel):
    """Its wrapper of transformers' models, for a llama that may have no end token."""

    eos_token_id = -1

    def __init__(self, checkpoint: str):
        self.hf_model, ends = read(checkpoint), end_tokens(checkpoint)
        self.eos_token_id = ends[0] if ends else -1


def strategies(temperature, top_k, top_p) -> tuple[SampleStrategy, VerifyStrategy]:
    if temperature == 0 or top_k == 1:
        return SampleStrategy.GREEDY, VerifyStrategy.GREEDY_MATCH
    if temperature != 1 or top_k or top_p < 1:
        raise NotImplementedError("temperature, top-k, top-p")
    return SampleStrategy.RANDOM, VerifyStrategy.SPECULATIVE_SAMPLING


def plain(checkpoint, prompt, *, max_new_tokens, seed, **sampling):
    if max_new_tokens == 0:  # it generates one token
        return []
    torch.manual_seed(seed)
    drafter = Drafter(BasicInferencer(Llama(checkpoint)))
    decoder = AutoregressiveDecoder(drafter, DynamicNoUpdateCache())
    tokens = decoder.decode(torch.tensor([prompt]), max_new_tokens, strategies(**sampling)[0])
    return tokens.token_ids[0].tolist()


def speculative(checkpoint, prompt, *, max_new_tokens, seed, **sampling):
    torch.manual_seed(seed)
    caches = DynamicNoUpdateCache(), DynamicNoUpdateCache()
    models = Drafter(BasicInferencer(Llama(f"{checkpoint}/draft"))), Scorer(Llama(checkpoint))
    decoder = SpeculativeDecoder(*models, *caches)
    tokens, drafted, accepted, query = [], 0, 0, torch.tensor([prompt])
    while len(tokens) < max_new_tokens:
        k = min(2, max_new_tokens - len(tokens))
        result = decoder.decode(query, k, *strategies(**sampling))
        agreed = result.num_accepted_tokens
        drafted, accepted = drafted + k, accepted + agreed
        for token in result.token_ids[0].tolist()[: max_new_tokens - len(tokens)]:
            tokens.append(token)
            if token in end_tokens(checkpoint):
                return tokens, drafted, accepted
        # as in its main.py: the draft has not read the last of its tokens if all were accepted
        query = result.token_ids[:, -2:] if agreed == k else result.token_ids[:, -1:]
    return tokens, drafted, accepted
