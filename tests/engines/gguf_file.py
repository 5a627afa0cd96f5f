"""Write a checkpoint as a GGUF file, for llama.cpp. PRECISION is its dtype:

    python tests/engines/gguf_file.py weights/target target.gguf
"""

import json
import os
import sys
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file

PRECISION = os.environ.get("PRECISION", "float32")
TYPE = gguf.GGMLQuantizationType[{"float32": "F32", "bfloat16": "BF16"}[PRECISION]]


def convert(checkpoint: str, file: str = "") -> str:
    """Write the checkpoint, a Llama, as a GGUF file; without a tokenizer, it has no vocabulary."""
    config = json.loads(Path(checkpoint, "config.json").read_text())
    file = file or f"{checkpoint}/model.gguf"
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    writer = gguf.GGUFWriter(file, "llama")
    add_vocabulary(writer, Path(checkpoint, "tokenizer.json"), config)
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
    return file


def add_vocabulary(writer: gguf.GGUFWriter, path: Path, config: dict) -> None:
    """Add a byte-level BPE vocabulary that splits digits, as in our bundled toy."""
    if not path.exists():
        writer.add_tokenizer_model("no_vocab")
        return
    tokenizer = json.loads(path.read_text())
    ids, special = tokenizer["model"]["vocab"], tokenizer["added_tokens"]
    ids |= {token["content"]: token["id"] for token in special}
    control = {token["id"] for token in special}
    tokens = sorted(ids, key=ids.get)
    ends = config["eos_token_id"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in control else 1 for i in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(ends[0] if isinstance(ends, list) else ends)
    writer.add_add_bos_token(False)


if __name__ == "__main__":
    convert(*sys.argv[1:])
