"""OpenVINO GenAI's methods, as black boxes for the certifier (run by `make engines`)."""

import functools
import os

os.environ["HF_HUB_OFFLINE"] = "1"
import numpy as np
import openvino as ov
import openvino_genai as genai
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM
from transformers import PreTrainedTokenizerFast

HF_TOKENIZER = PreTrainedTokenizerFast(tokenizer_file="weights/target/tokenizer.json")
OV_TOKENIZERS = convert_tokenizer(HF_TOKENIZER, with_detokenizer=True)
FLOAT32 = {"INFERENCE_PRECISION_HINT": ov.Type.f32}


def export(checkpoint: str) -> str:
    """Export to OpenVINO's format. It requires a tokenizer, but only ids are used."""
    model = OVModelForCausalLM.from_pretrained(
        checkpoint, export=True, compile=False, load_in_8bit=False)  # fmt: skip
    model.save_pretrained(f"{checkpoint}/openvino")
    for name, model in zip(("tokenizer", "detokenizer"), OV_TOKENIZERS):
        ov.save_model(model, f"{checkpoint}/openvino/openvino_{name}.xml")
    return f"{checkpoint}/openvino"


def engine(**speculation):
    """Make a decoding function; `speculation` is a set of GenerationConfig fields."""

    @functools.lru_cache(1)
    def load(checkpoint: str) -> genai.LLMPipeline:
        scheduler, more = genai.SchedulerConfig(), {}
        scheduler.cache_size = 1
        if "max_ngram_size" in speculation:
            more["prompt_lookup"] = True
        elif speculation:
            draft = genai.draft_model(export(f"{checkpoint}/draft"), "CPU", **FLOAT32)
            more["draft_model"] = draft
        return genai.LLMPipeline(
            export(checkpoint), "CPU", scheduler_config=scheduler, **FLOAT32, **more)  # fmt: skip

    def function(checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
        if max_new_tokens == 0:
            return []  # it does not accept 0
        pipeline = load(checkpoint)
        config = genai.GenerationConfig(f"{checkpoint}/openvino/generation_config.json")
        config.stop_token_ids = {token for token in config.stop_token_ids if token >= 0}
        if config.eos_token_id < 0:  # no end token
            config.eos_token_id, config.ignore_eos = 0, True
        config.max_new_tokens, config.rng_seed = max_new_tokens, seed
        config.do_sample = temperature > 0
        if temperature:
            config.temperature, config.top_p = temperature, top_p
            config.top_k = top_k or 2**31
        for name, value in speculation.items():
            setattr(config, name, value)
        ids = ov.Tensor(np.array([prompt], dtype=np.int64))
        mask = ov.Tensor(np.ones((1, len(prompt)), dtype=np.int64))
        return pipeline.generate(genai.TokenizedInputs(ids, mask), config).tokens[0]

    return function


plain = engine()
draft_model = engine(num_assistant_tokens=3)
prompt_lookup = engine(num_assistant_tokens=3, max_ngram_size=2)
