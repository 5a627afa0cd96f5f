"""vLLM's methods in one process, as black boxes for the certifier (run by `make engines`)."""

import os

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
               "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "CRITICAL",
               "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # fmt: skip
from batches import batching
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

PRECISION = os.environ.get("PRECISION", "float32")


def engine(**speculation):
    """Make a decoding function; `speculation` is vLLM's speculative_config, where {} stands for the
    checkpoint's folder."""
    loaded: dict[str, LLM] = {}

    def load(folder: str) -> LLM:
        if folder not in loaded:
            for old in loaded.values():  # later, it would destroy state that the new one uses
                old.llm_engine.engine_core.shutdown()
            loaded.clear()
            config = {name: value.format(folder) if isinstance(value, str) else value
                      for name, value in speculation.items()}  # fmt: skip
            loaded[folder] = LLM(
                folder, skip_tokenizer_init=True, dtype=PRECISION, enforce_eager=True,
                num_gpu_blocks_override=512,  # clearing all that it would take lasts a second
                disable_log_stats=False, speculative_config=config or None)  # fmt: skip
            # in a second engine this would fail if numba is loaded, as it is by ngram
            current_platform.register_triton_kernel_overrides = lambda: None
        return loaded[folder]

    def counts(llm: LLM) -> list[int]:
        values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
        return [values.get(f"vllm:spec_decode_num_{x}_tokens", 0) for x in ("draft", "accepted")]

    def many(checkpoint: str, requests: list[dict]) -> list:
        llm = load(checkpoint)
        before, valid = counts(llm), [r for r in requests if r["max_new_tokens"]]  # it rejects 0
        try:
            outputs = iter(llm.generate(
                [{"prompt_token_ids": r["prompt"]} for r in valid],
                [SamplingParams(max_tokens=r["max_new_tokens"], temperature=r["temperature"],
                                top_k=r["top_k"] or -1, top_p=r["top_p"], seed=r["seed"],
                                detokenize=False) for r in valid], use_tqdm=False))  # fmt: skip
        except BaseException:  # it would step forever for the requests that are left
            left = list(llm.llm_engine.output_processor.request_states)
            llm.llm_engine.abort_request(left, internal=True)
            raise
        tokens = [next(outputs).outputs[0].token_ids if r["max_new_tokens"] else []
                  for r in requests]  # fmt: skip
        drafted, accepted = (b - a for a, b in zip(before, counts(llm)))
        return [(tokens[0], drafted, accepted), *tokens[1:]]  # counts of the whole batch

    return batching(many)


K = {"num_speculative_tokens": 3}
DRAFT = {"method": "draft_model", "model": "{}/draft", **K}
plain = engine()
ngram = engine(method="ngram", prompt_lookup_min=1, prompt_lookup_max=3, **K)
draft_greedy = engine(**DRAFT, draft_sample_method="greedy")
draft_probabilistic = engine(**DRAFT, draft_sample_method="probabilistic")
