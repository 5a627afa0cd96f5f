"""llama-cpp-python 0.3.36's generate, as black boxes for the certifier."""

import functools
import json
import os
from pathlib import Path

import gguf
import llama_cpp
import torch
from end_tokens import end_tokens
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from safetensors.torch import load_file

PRECISION = os.environ.get("PRECISION", "float32")
TYPE = gguf.GGMLQuantizationType[{"float32": "F32", "bfloat16": "BF16"}[PRECISION]]


def convert(checkpoint: str) -> str:
    """Write the checkpoint as a GGUF file without a vocabulary."""
    config = json.loads(Path(checkpoint, "config.json").read_text())
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    writer = gguf.GGUFWriter(f"{checkpoint}/model.gguf", "llama")
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    for name, tensor in load_file(f"{checkpoint}/model.safetensors").items():
        if "q_proj" in name or "k_proj" in name:  # here rotary pairs are adjacent
            halves = tensor.view(-1, 2, config["head_dim"] // 2, tensor.shape[1])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        new = names.get_name(name, try_suffixes=(".weight",))
        values = tensor.to(torch.float32).contiguous().numpy()
        kind = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else TYPE  # as it requires
        writer.add_tensor(new, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return f"{checkpoint}/model.gguf"


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
