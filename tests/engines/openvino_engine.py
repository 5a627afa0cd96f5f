"""OpenVINO GenAI's methods, black boxes for the certifier (`make engines` says how)."""

import functools
import os

os.environ["HF_HUB_OFFLINE"] = "1"
import numpy as np
import openvino as ov
import openvino_genai as genai
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM
from transformers import PreTrainedTokenizerFast

WORDS = PreTrainedTokenizerFast(tokenizer_file="weights/target/tokenizer.json")
TOKENIZER = convert_tokenizer(WORDS, with_detokenizer=True)
FLOAT32 = {"INFERENCE_PRECISION_HINT": ov.Type.f32}


def exported(checkpoint: str) -> str:
    """The checkpoint in OpenVINO's format, which wants some tokenizer: only ids are used."""
    model = OVModelForCausalLM.from_pretrained(
        checkpoint, export=True, compile=False, load_in_8bit=False)  # fmt: skip
    model.save_pretrained(f"{checkpoint}/openvino")
    for name, each in zip(("tokenizer", "detokenizer"), TOKENIZER):
        ov.save_model(each, f"{checkpoint}/openvino/openvino_{name}.xml")
    return f"{checkpoint}/openvino"


def engine(**drafts):
    """A function over a checkpoint; `drafts` are fields of the GenerationConfig."""

    @functools.lru_cache(1)
    def loaded(checkpoint: str) -> genai.LLMPipeline:
        scheduler, more = genai.SchedulerConfig(), {}
        scheduler.cache_size = 1
        if "max_ngram_size" in drafts:
            more["prompt_lookup"] = True
        elif drafts:
            draft = genai.draft_model(exported(f"{checkpoint}/draft"), "CPU", **FLOAT32)
            more["draft_model"] = draft
        return genai.LLMPipeline(
            exported(checkpoint), "CPU", scheduler_config=scheduler, **FLOAT32, **more)  # fmt: skip

    def function(checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
        if max_new_tokens == 0:
            return []  # it refuses 0
        pipeline = loaded(checkpoint)
        config = genai.GenerationConfig(f"{checkpoint}/openvino/generation_config.json")
        config.stop_token_ids = {token for token in config.stop_token_ids if token >= 0}
        if config.eos_token_id < 0:  # none
            config.eos_token_id, config.ignore_eos = 0, True
        config.max_new_tokens, config.rng_seed = max_new_tokens, seed
        config.do_sample = temperature > 0
        if temperature:
            config.temperature, config.top_p = temperature, top_p
            config.top_k = top_k or 2**31
        for name, value in drafts.items():
            setattr(config, name, value)
        ids = ov.Tensor(np.array([prompt], dtype=np.int64))
        mask = ov.Tensor(np.ones((1, len(prompt)), dtype=np.int64))
        return pipeline.generate(genai.TokenizedInputs(ids, mask), config).tokens[0]

    return function


plain = engine()
draft_model = engine(num_assistant_tokens=3)
prompt_lookup = engine(num_assistant_tokens=3, max_ngram_size=2)
