"""flashspec's SpeculativeEngine, as black boxes for the certifier. It has no plain decoding."""

from functools import cache, partial

import torch
from flashspec import FlashSpecConfig, SamplingConfig, SpeculativeEngine
from flashspec.bandit import UCB1Selector
from flashspec.engine import ArmSpec, HuggingFaceDrafter, NgramDrafter, TargetModel


class MendedModel(TargetModel):
    """It cuts its distributions to the nucleus."""

    def score_draft(self, *tokens, **options):
        return nucleus(super().score_draft(*tokens, **options), self.top_p)

    def verify(self, *tokens, **options):
        return nucleus(super().verify(*tokens, **options), self.top_p)


def nucleus(logprobs, top_p):
    """Keep the most likely tokens until they reach top_p."""
    p, order = logprobs.exp().sort(descending=True)
    outside = torch.zeros_like(p, dtype=torch.bool).scatter(-1, order, p.cumsum(-1) - p >= top_p)
    return logprobs.masked_fill(outside, -torch.inf).log_softmax(-1)


@cache
def read(folder, static, kind):
    models = kind(folder, "cpu", torch.float32), HuggingFaceDrafter(f"{folder}/draft", "cpu")
    for model in models if static else ():  # as on CUDA, but without graphs
        model.use_static_cache(512, compile_forward=False, pad_widths=(1, 2, 4, 8))
    return models


def generate(
    folder, prompt, *, max_new_tokens, temperature, top_k, top_p, seed, arms, others=0,
    static=False, kind=TargetModel,
):  # fmt: skip
    if top_k > 1:
        raise NotImplementedError("no top-k")
    temperature, (target, draft) = temperature if top_k != 1 else 0.0, read(folder, static, kind)
    draft.set_temperature(temperature)
    target.top_p = top_p
    sampling = SamplingConfig(temperature=temperature, top_p=top_p, seed=seed)
    config, drafters = FlashSpecConfig(device="cpu", sampling=sampling), [NgramDrafter(2), draft]
    engine = SpeculativeEngine(config, drafters, target, UCB1Selector(len(arms)), arms)
    end = target._model.generation_config.eos_token_id or []  # the engine does not read it
    end, rows = end if isinstance(end, list) else [end], [prompt[::-1]] * others + [prompt]
    result = engine.generate(torch.tensor(rows), max_new_tokens, end)
    tokens = [token for token in result.output_ids[-1].tolist() if token != -1]
    return tokens, *map(sum, zip((0, 0), *((s.proposed, s.accepted) for s in result.arm_steps)))


MODEL, LOOKUP, BOTH = ArmSpec(1, 2), ArmSpec(0, 3), ArmSpec(0, 4, fallback=1, fallback_gamma=2)
model, lookup = partial(generate, arms=[MODEL]), partial(generate, arms=[LOOKUP])
composite = partial(generate, arms=[BOTH])
bandit = partial(generate, arms=[MODEL, LOOKUP, ArmSpec(1, 1), BOTH])
static, batch = partial(bandit, static=True), partial(generate, arms=[ArmSpec(1, 1)], others=1)
model_fixed, batch_fixed = (partial(decode, kind=MendedModel) for decode in (model, batch))
