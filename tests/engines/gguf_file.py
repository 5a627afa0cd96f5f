"""Write a checkpoint as a GGUF file, for llama.cpp. PRECISION is its dtype:

    python tests/engines/gguf_file.py weights/target target.gguf
"""

import json
import os
import sys
from pathlib import Path

import gguf
import torch
from end_tokens import end_tokens
from safetensors.torch import load_file

PRECISION = os.environ.get("PRECISION", "float32")
TYPE = gguf.GGMLQuantizationType[{"float32": "F32", "bfloat16": "BF16"}[PRECISION]]


def convert(checkpoint: str, file: str = "", room: int = 0) -> str:
    """Write the checkpoint, a Llama, as a GGUF file; without a tokenizer, it has no vocabulary. Its
    context is longer by `room`."""
    config = json.loads(Path(checkpoint, "config.json").read_text())
    file = file or f"{checkpoint}/model.gguf"
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    writer = gguf.GGUFWriter(file, "llama")
    add_vocabulary(writer, checkpoint)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"] + room)
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
    return file


def add_vocabulary(writer: gguf.GGUFWriter, checkpoint: str) -> None:
    """Add the tokens, of a byte-level BPE that splits digits or without merges, and the end tokens,
    of which llama.cpp knows three kinds."""
    path = Path(checkpoint, "tokenizer.json")
    if not path.exists():
        writer.add_tokenizer_model("no_vocab")
        return
    tokenizer = json.loads(path.read_text())
    ids, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    ids |= special
    tokens = sorted(ids, key=ids.get)
    writer.add_tokenizer_model("gpt2" if merges else "rwkv")  # the latter has no end by default
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    if merges:
        writer.add_tokenizer_pre("smollm")
        writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_add_bos_token(False)
    kinds = writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id
    for add, token in zip(kinds, end_tokens(checkpoint)):
        add(token)


if __name__ == "__main__":
    convert(*sys.argv[1:])
