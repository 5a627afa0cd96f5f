"""onnxruntime-genai 0.18.0's Generator, as black boxes for the certifier."""

import contextlib
import functools
import json
import os
from pathlib import Path

import numpy as np
import onnxruntime_genai as og
from end_tokens import end_tokens
from onnxruntime_genai.models.builder import create_model, parse_extra_options


def export(checkpoint: str) -> Path:
    """Convert to its format, with float32 weights. Its builder requires an end token, too."""
    source, out = Path(checkpoint, "with-end"), Path(checkpoint, "ortgenai")
    source.mkdir(exist_ok=True)
    for name in "model.safetensors", "tokenizer.json", "tokenizer_config.json":
        if not (source / name).exists():
            (source / name).symlink_to(Path(checkpoint, name).resolve())
    config = json.loads(Path(checkpoint, "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "eos_token_id": 0}))
    with contextlib.redirect_stdout(open(os.devnull, "w")):
        arguments = "", str(source), str(out), "fp32", "cpu", f"{checkpoint}/cache"
        create_model(*arguments, **parse_extra_options(*arguments, []))
    return out


@functools.cache
def load(checkpoint: str, with_draft: bool) -> og.Model:
    path = export(checkpoint) / "genai_config.json"
    config = json.loads(path.read_text())
    config["model"]["eos_token_id"] = end_tokens(checkpoint) or 0  # if there is none, the padding
    # it ignores such tokens at the end of a prompt, as after the shorter prompts of a batch
    config["model"]["pad_token_id"] = config["model"]["vocab_size"]
    if with_draft:
        draft = export(f"{checkpoint}/draft") / "genai_config.json"
        config["model"]["draft"] = json.loads(draft.read_text())["model"]["decoder"]
        config["model"]["draft"]["filename"] = "../draft/ortgenai/model.onnx"
    path.write_text(json.dumps(config))
    return og.Model(str(path.parent))


def generate(
    with_draft, options, checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed
):
    if max_new_tokens == 0:  # it does not accept 0
        return []
    params = og.GeneratorParams(load(checkpoint, with_draft))
    params.set_search_options(max_length=len(prompt) + max_new_tokens, do_sample=temperature > 0)
    if temperature:
        params.set_search_options(
            temperature=temperature, top_k=top_k, top_p=top_p, random_seed=seed)  # fmt: skip
    params.set_speculative_options(**options)
    generator = og.Generator(load(checkpoint, with_draft), params)
    generator.append_tokens(np.array([prompt], dtype=np.int32))
    tokens, end = [], end_tokens(checkpoint)
    while len(tokens) < max_new_tokens and (not tokens or tokens[-1] not in end):
        if generator.is_done():  # at token 0, if there is no end token
            generator.append_tokens(np.array([tokens[-1:]], dtype=np.int32))
        generator.generate_next_token()
        tokens.append(int(generator.get_next_tokens()[0]))
    if not options:
        return tokens
    stats = generator.get_speculative_stats()
    return tokens, stats["draft_tokens_proposed"], stats["draft_tokens_accepted"]


plain = functools.partial(generate, False, {})
draft_model = functools.partial(generate, True, {"max_draft_tokens": 3})
ngram = functools.partial(generate, False, {"ngram_size": 2, "max_draft_tokens": 3})
