"""llama-cpp-python 0.3.36's generate, as black boxes for the certifier."""

import functools

import llama_cpp
from end_tokens import end_tokens
from gguf_file import TYPE, convert
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding


@functools.cache
def load(checkpoint: str, lookup: bool) -> llama_cpp.Llama:
    draft = LlamaPromptLookupDecoding(max_ngram_size=2, num_pred_tokens=3) if lookup else None
    return llama_cpp.Llama(
        convert(checkpoint), n_ctx=512, n_threads=1, n_threads_batch=1, draft_model=draft,
        type_k=TYPE, type_v=TYPE, verbose=False)  # fmt: skip


def generate(lookup, checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
    model, tokens = load(checkpoint, lookup), []
    model.set_seed(seed)
    stream = model.generate(prompt, top_k=top_k, top_p=top_p, min_p=0.0, temp=temperature)
    while len(tokens) < max_new_tokens:
        tokens.append(next(stream))
        if tokens[-1] in end_tokens(checkpoint):
            break
    return tokens


plain, prompt_lookup = functools.partial(generate, False), functools.partial(generate, True)
