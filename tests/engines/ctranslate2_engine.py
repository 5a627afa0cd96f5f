"""CTranslate2 4.8.5's Generator, as a black box for the certifier. It has no speculation."""

import functools
import json
from pathlib import Path

import ctranslate2
from ctranslate2.converters import TransformersConverter
from end_tokens import end_tokens


@functools.cache
def load(checkpoint: str) -> tuple[ctranslate2.Generator, list[str]]:
    """Convert to its format. Return the model and the tokens' texts."""
    folder = Path(checkpoint)
    TransformersConverter(checkpoint).convert(
        f"{folder}/ctranslate2", quantization="float32", force=True)  # fmt: skip
    names = folder / "ctranslate2/config.json"  # null names of special tokens cannot be read
    names.write_text(names.read_text().replace("null", '""'))
    texts = json.loads((folder / "ctranslate2/vocabulary.json").read_text())
    return ctranslate2.Generator(f"{folder}/ctranslate2", compute_type="float32"), texts


def plain(checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
    if max_new_tokens == 0:  # it does not accept 0
        return []
    model, texts = load(checkpoint)
    ctranslate2.set_random_seed(seed)
    sampling = {"sampling_topk": 1}
    if temperature:
        sampling = {"sampling_topk": top_k, "sampling_topp": top_p,
                    "sampling_temperature": temperature}  # fmt: skip
    result = model.generate_batch(
        [[texts[token] for token in prompt]], max_length=max_new_tokens,
        end_token=end_tokens(checkpoint), return_end_token=True, include_prompt_in_result=False,
        **sampling)  # fmt: skip
    return result[0].sequences_ids[0]
