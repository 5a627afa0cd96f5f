"""OpenVINO GenAI's methods, as black boxes for the certifier (run by `make engines`)."""

import functools
import os

os.environ["HF_HUB_OFFLINE"] = "1"
import numpy as np
import openvino as ov
import openvino_genai as genai
from batches import batching
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM
from transformers import PreTrainedTokenizerFast

HF_TOKENIZER = PreTrainedTokenizerFast(tokenizer_file="weights/target/tokenizer.json")
OV_TOKENIZERS = convert_tokenizer(HF_TOKENIZER, with_detokenizer=True)
FLOAT32 = {"INFERENCE_PRECISION_HINT": ov.Type.f32, "KV_CACHE_PRECISION": ov.Type.f32}


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
    def load(checkpoint: str) -> genai.ContinuousBatchingPipeline:
        scheduler, more = genai.SchedulerConfig(), {}
        scheduler.cache_size = 1
        if "max_ngram_size" in speculation:
            more["prompt_lookup"] = True
        elif speculation:
            draft = genai.draft_model(export(f"{checkpoint}/draft"), "CPU", **FLOAT32)
            more["draft_model"] = draft
        folder = export(checkpoint)
        return genai.ContinuousBatchingPipeline(
            folder, genai.Tokenizer(folder), scheduler, "CPU", **FLOAT32, **more)  # fmt: skip

    def config_of(checkpoint: str, request: dict) -> genai.GenerationConfig:
        config = genai.GenerationConfig(f"{checkpoint}/openvino/generation_config.json")
        config.stop_token_ids = {token for token in config.stop_token_ids if token >= 0}
        if config.eos_token_id < 0:  # no end token
            config.set_eos_token_id(0)
            config.ignore_eos = True
        config.max_new_tokens, config.rng_seed = request["max_new_tokens"], request["seed"]
        config.do_sample = request["temperature"] > 0
        if config.do_sample:
            config.temperature, config.top_p = request["temperature"], request["top_p"]
            config.top_k = request["top_k"] or 2**31
        for name, value in speculation.items():
            setattr(config, name, value)
        return config

    def many(checkpoint: str, requests: list[dict]) -> list[list[int]]:
        pipeline = load(checkpoint)
        valid = [r for r in requests if r["max_new_tokens"]]  # it does not accept 0
        answers = iter(pipeline.generate(
            [ov.Tensor(np.array([r["prompt"]], dtype=np.int64)) for r in valid],
            [config_of(checkpoint, r) for r in valid]))  # fmt: skip
        return [next(answers).m_generation_ids[0] if r["max_new_tokens"] else []
                for r in requests]  # fmt: skip

    return batching(many)


plain = engine()
draft_model = engine(num_assistant_tokens=3)
prompt_lookup = engine(num_assistant_tokens=3, max_ngram_size=2)
