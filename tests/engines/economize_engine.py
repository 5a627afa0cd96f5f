"""economize's techniques, including SSD, as black boxes for the certifier."""

from functools import cache, partial

import economize.techniques as t
import torch
from economize import DecodeConfig, JumpConfig, TopPSampler, apply
from economize.distributed.ssd import AsyncSpeculativeDecoder, SSDConfig
from transformers import AutoModelForCausalLM

JUMP, TREE = JumpConfig(1, 1), t.medusa.MedusaConfig(tree="small")
CONFIGS = dict(
    plain=None, ssd=None, mtp=t.vendor_mtp.VendorMTPConfig(), lookup=t.lookup.LookupConfig(),
    jump=JUMP, early_exit=t.early_exit.EarlyExitConfig(1, "shared"), eagle3=t.eagle3.Eagle3Config(),
    medusa=t.medusa.MedusaConfig(2), medusa_tree=TREE, draft_model=t.draft_model.DraftModelConfig,
    frspec=t.frspec.FRSpecConfig(JUMP, 2, (1, 0)), hybrid=t.hybrid.HybridConfig(TREE),
    layer_skip=t.layer_skip.LayerSkipConfig((1,)),
)  # fmt: skip


@cache
def read(folder, config=None):
    configs = [config(f"{folder}/draft") if callable(config) else config] if config else []
    return apply(AutoModelForCausalLM.from_pretrained(folder), *configs)


def decode(name, folder, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
    if top_k > 1:
        raise NotImplementedError("no top-k")
    model, temperature = read(folder, CONFIGS[name]), temperature if top_k != 1 else 0
    request, end = (torch.tensor(prompt), max_new_tokens), model.generation_config.eos_token_id
    if name == "ssd":
        models = model.base_model, read(f"{folder}/draft").base_model
        config = SSDConfig(2, temperature=temperature, top_p=top_p, seed=2 * seed)  # it uses two
        result = AsyncSpeculativeDecoder(*models, config).generate(*request, end)
    else:
        config = DecodeConfig(3 if CONFIGS[name] else 1, verifier="rejection")
        selector = TopPSampler(temperature, top_p, seed) if temperature else None
        result = model.decode(*request, selector=selector, stop=end, decoding=config)
    return result.tokens.tolist(), *map(sum, zip((0, 0), *result.acceptance))


globals().update({name: partial(decode, name) for name in CONFIGS})
