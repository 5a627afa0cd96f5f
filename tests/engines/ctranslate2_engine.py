"""CTranslate2 4.8.5's Generator, as a black box for the certifier. It has no speculation."""

import functools
import json
from pathlib import Path

import ctranslate2
from ctranslate2.converters import TransformersConverter


@functools.cache
def load(checkpoint: str) -> tuple[ctranslate2.Generator, list[str], list[int]]:
    """Convert to its format. Return the model, the tokens' texts and the end tokens."""
    folder = Path(checkpoint)
    TransformersConverter(checkpoint).convert(
        f"{folder}/ctranslate2", quantization="float32", force=True)  # fmt: skip
    names = folder / "ctranslate2/config.json"  # null names of special tokens cannot be read
    names.write_text(names.read_text().replace("null", '""'))
    texts = json.loads((folder / "ctranslate2/vocabulary.json").read_text())
    paths = folder / "generation_config.json", folder / "config.json"
    end = json.loads(next(p for p in paths if p.exists()).read_text()).get("eos_token_id")
    end = end if isinstance(end, list) else [] if end is None else [end]
    model = ctranslate2.Generator(f"{folder}/ctranslate2", compute_type="float32")
    return model, texts, end


def plain(checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
    if max_new_tokens == 0:  # it does not accept 0
        return []
    model, texts, end = load(checkpoint)
    ctranslate2.set_random_seed(seed)
    sampling = {"sampling_topk": 1}
    if temperature:
        sampling = {"sampling_topk": top_k, "sampling_topp": top_p,
                    "sampling_temperature": temperature}  # fmt: skip
    result = model.generate_batch(
        [[texts[token] for token in prompt]], max_length=max_new_tokens, end_token=end,
        return_end_token=True, include_prompt_in_result=False, **sampling)  # fmt: skip
    return result[0].sequences_ids[0]
