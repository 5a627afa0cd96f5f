"""Export Medusa heads for vLLM, or an MTP head for vLLM and SGLang, which load them next to the
model.

For an MTP head, vLLM's command overrides the target's config, to announce the head. The target must
be served by its own model class: vLLM's MiMo class gives the head states from before the final
norm, but ours are trained on states after it. SGLang (its class MiMoMTP) reads the same files as an
EAGLE-style draft, a chain here (top-k 1); not tried, as it needs a GPU. llama.cpp takes an MTP head
only inside the GGUF file of a few architectures, none of them ours.
"""

import argparse
import json
import re
from pathlib import Path

import torch
from torch import Tensor

from minispec.checkpoints.config import config_json
from minispec.checkpoints.heads import MTP_PREFIX, load_medusa, load_mtp
from minispec.checkpoints.load import load
from minispec.checkpoints.weights import write_json, write_tensors
from minispec.cli import OutputFolder, Source, UserError
from minispec.methods.fastmtp import MTPHead
from minispec.methods.medusa import MedusaHeads
from minispec.model import Transformer

MTP_STEPS = 3  # tokens per round in the printed commands
QKV_WEIGHTS = "q_proj.weight", "k_proj.weight", "v_proj.weight"


def run(args: argparse.Namespace) -> None:
    """Export Medusa heads for vLLM, or an MTP head for vLLM and SGLang, and print the commands that
    serve the target with them."""
    target, tokenizer = load(args.model, args.dtype, "cpu")
    if args.medusa:
        heads = load_medusa(args.medusa, target, tokenizer)
        export_medusa(heads, target, args.out)
        settings, overrides = {"method": "medusa", "num_speculative_tokens": len(heads)}, ""
    else:
        export_mtp(load_mtp(args.mtp, target, tokenizer), target, args.out)
        settings = {"method": "mtp", "num_speculative_tokens": MTP_STEPS}
        overrides = """ --hf-overrides '{"num_nextn_predict_layers": 1}'"""
    settings["model"] = str(args.out)
    print(f"vllm serve {target.source}{overrides} --speculative-config '{json.dumps(settings)}'")
    if args.mtp:
        print(f"python -m sglang.launch_server --model-path {target.source} "
              f"--speculative-algorithm EAGLE --speculative-draft-model-path {args.out} "
              f"--speculative-num-steps {MTP_STEPS} --speculative-eagle-topk 1 "
              f"--speculative-num-draft-tokens {MTP_STEPS + 1}")  # fmt: skip


def export_medusa(heads: MedusaHeads, target: Transformer, directory: Path) -> None:
    """Write the heads under vLLM's names. vLLM drafts a chain of each head's best token."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in heads.state_dict().items():
        name = re.sub(r"^(\d+)\.(\d+)\.linear", r"blocks.\1.layers.\2", name)
        tensors[re.sub(r"^(\d+)\.\d+\.weight", r"lm_heads.\1.weight", name)] = tensor
    if heads.shared:
        tensors["lm_heads.0.weight"] = target.lm_head.weight
    write_tensors(directory / "model.safetensors", tensors)
    vocab = target.config.vocab_size
    config = {
        "model_type": "medusa", "architectures": ["MedusaModel"], "medusa_fc_bias": True,
        "hidden_size": target.config.hidden_size, "original_lm_head": heads.shared,
        "vocab_size": vocab, "truncated_vocab_size": vocab, "num_heads": len(heads),
        "num_hidden_layers": heads.layers, "torch_dtype": str(target.dtype).removeprefix("torch."),
    }  # fmt: skip
    write_json(directory / "config.json", config)


def export_mtp(head: MTPHead, target: Transformer, directory: Path) -> None:
    """Write the head in MiMo's layout, with zeros for missing qwen2 biases. vLLM lets it share the
    target's embedding and lm_head."""
    c = target.config
    if c.qk_norm or c.o_bias or c.mlp_bias or c.heads * c.head_dim != c.hidden_size:
        raise UserError("vLLM's class for an MTP head of this layout is a qwen2 block: no norms on "
                        "q and k, biases on q, k and v only, and a hidden size of heads * "
                        "head_dim")  # fmt: skip
    tensors = {MTP_PREFIX + name: tensor for name, tensor in head.state_dict().items()}
    for name in [name for name in tensors if name.endswith(QKV_WEIGHTS)]:
        bias = name.removesuffix("weight") + "bias"
        tensors.setdefault(bias, torch.zeros(len(tensors[name]), dtype=target.dtype))
    write_tensors(directory / "model.safetensors", tensors)
    # qwen2 is the type that transformers knows
    config = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "attention_bias": True}
    config = config_json(c, target.dtype) | config | {"num_nextn_predict_layers": 1}
    write_json(directory / "config.json", config)


def arguments(p: argparse.ArgumentParser) -> None:
    kind = p.add_mutually_exclusive_group(required=True)
    kind.add_argument("--medusa", type=Source,
                      help="directory or file of the Medusa heads to export")  # fmt: skip
    kind.add_argument("--mtp", type=Source, help="directory of the MTP head to export")
    p.add_argument("--dtype", default="float16", choices=("float32", "float16", "bfloat16"),
                   help="of the exported weights (default: %(default)s)")  # fmt: skip
    p.add_argument("--out", type=OutputFolder, required=True, help="directory to write")
