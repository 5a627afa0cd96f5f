"""economize's techniques, as black boxes for the certifier."""

from functools import cache, partial

import economize.techniques as t
import torch
from batches import batching
from economize import DecodeConfig, JumpConfig, TopPSampler, apply
from mend import fixed
from transformers import AutoModelForCausalLM
from transformers_engine import generate as transformers_generate

JUMP, TREE = JumpConfig(1, 1), t.medusa.MedusaConfig(tree="small")
CONFIGS = dict(
    plain=None, mtp=t.vendor_mtp.VendorMTPConfig(), lookup=t.lookup.LookupConfig(),
    jump=JUMP, early_exit=t.early_exit.EarlyExitConfig(1, "shared"), eagle3=t.eagle3.Eagle3Config(),
    medusa=t.medusa.MedusaConfig(2), medusa_tree=TREE, draft_model=t.draft_model.DraftModelConfig,
    frspec=t.frspec.FRSpecConfig(JUMP, 2, (1, 0)), hybrid=t.hybrid.HybridConfig(TREE),
    layer_skip=t.layer_skip.LayerSkipConfig((1,)),
)  # fmt: skip


@cache
def read(folder, config=None):
    configs = [config(f"{folder}/draft") if callable(config) else config] if config else []
    return apply(AutoModelForCausalLM.from_pretrained(folder), *configs)


def selector(request):
    if request["top_k"] > 1:
        raise NotImplementedError("no top-k")
    if request["top_k"] == 1 or request["temperature"] == 0:
        return None
    return TopPSampler(request["temperature"], request["top_p"], request["seed"])


def engine(config):
    def many(folder, requests):
        model, selectors = read(folder, config), [selector(request) for request in requests]
        results = model.decode_batch(
            [torch.tensor(request["prompt"]) for request in requests],
            [request["max_new_tokens"] for request in requests],
            selectors=selectors, stop=model.generation_config.eos_token_id,
            decoding=DecodeConfig(3 if config else 1, verifier="rejection"))  # fmt: skip
        return [(result.tokens.tolist(), *map(sum, zip((0, 0), *result.acceptance)))
                for result in results]  # fmt: skip

    return batching(many)


globals().update({name: engine(config) for name, config in CONFIGS.items()})


def with_lookup(folder, sampled):
    return {"decoding": DecodeConfig(3, verifier="rejection")}


# transformers' `generate`, with lookup
generate = partial(transformers_generate, partial(read, config=CONFIGS["lookup"]), with_lookup)
generate_fixed = fixed(
    generate,
    ("economize.integrations.generate.check_model_kwargs", ('"past_key_values"', '"cache"')),
)
