"""Write tests/golden_eagle3: tiny random EAGLE-3 heads in both published layouts, with the outputs
of `speculators`, the library by vLLM's authors that trains and stores such heads.

    pip install speculators && python tests/make_golden_eagle3.py

It is no dependency, and this is run by hand. The folder `speculators` holds a head as the library
saves it. `eagle` holds one under the names of EAGLE's own checkpoints, which the library's
converter reads. golden.safetensors has features (n, 3d), the token after each, and the logits
(3, n, draft vocabulary) of three steps, each of which reads the output of the one before.
"""

import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.convert.eagle.eagle3_converter import Eagle3Converter
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, LlamaForCausalLM

GOLDEN = Path(__file__).parent / "golden_eagle3"
SIZES = dict(
    vocab_size=24, hidden_size=16, intermediate_size=24, num_attention_heads=4,
    num_key_value_heads=2, head_dim=4, max_position_embeddings=64, rms_norm_eps=1e-5,
    rope_theta=10000.0,
)  # fmt: skip
IDS, ROWS, STEPS = [0, 2, 3, 7, 8, 11, 12, 17, 20, 23], 9, 3


def randomised(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        noise = 0.5 * torch.randn(p.shape, generator=generator)
        p.data = noise + ("norm" in name)
    return model.eval()


def vocabulary() -> tuple[torch.Tensor, torch.Tensor]:
    """t2d and d2t."""
    t2d = torch.zeros(SIZES["vocab_size"], dtype=torch.bool)
    t2d[IDS] = True
    return t2d, torch.tensor(IDS) - torch.arange(len(IDS))


@torch.no_grad()
def write_outputs(head: Eagle3DraftModel, folder: Path, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(ROWS, 3 * SIZES["hidden_size"], generator=generator)
    tokens, logits = torch.randint(SIZES["vocab_size"], (ROWS,), generator=generator), []
    head.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output[0]))
    one_document = torch.zeros(1, ROWS, dtype=torch.long)
    head(features[None], tokens[None], one_document, ttt_steps=STEPS)
    stored = {"features": features, "tokens": tokens, "logits": torch.stack(logits)}
    save_file(stored, folder / "golden.safetensors")


def write_speculators(base: Path) -> None:
    """A head whose residual is the normed hidden state."""
    proposal = GreedyTokenProposalConfig(speculative_tokens=STEPS)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=LlamaConfig(
            **SIZES, num_hidden_layers=1, attn_implementation="eager"
        ),
        draft_vocab_size=len(IDS), norm_before_residual=True,
        eagle_aux_hidden_state_layer_ids=[1, 3, 6],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=[proposal], default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(str(base)),
        ),
    )  # fmt: skip
    head = randomised(Eagle3DraftModel(config), 1)
    head.load_vocab_mappings(*vocabulary())
    folder = GOLDEN / "speculators"
    head.save_pretrained(folder)
    (folder / "config.py").unlink()  # code
    text = (folder / "config.json").read_text().replace(str(base), "../target")
    (folder / "config.json").write_text(text)
    write_outputs(head, folder, 2)


def write_eagle(base: Path, scratch: Path) -> None:
    """A head under EAGLE's names, without its own embedding: the library takes the target's."""
    folder = GOLDEN / "eagle"
    folder.mkdir(parents=True)
    d, kv = SIZES["hidden_size"], SIZES["num_key_value_heads"] * SIZES["head_dim"]
    inner = SIZES["intermediate_size"]
    shapes = {
        "fc": (d, 3 * d), "norm": (d,), "lm_head": (len(IDS), d),
        "midlayer.input_layernorm": (d,), "midlayer.hidden_norm": (d,),
        "midlayer.post_attention_layernorm": (d,), "midlayer.self_attn.q_proj": (d, 2 * d),
        "midlayer.self_attn.k_proj": (kv, 2 * d), "midlayer.self_attn.v_proj": (kv, 2 * d),
        "midlayer.self_attn.o_proj": (d, d), "midlayer.mlp.gate_proj": (inner, d),
        "midlayer.mlp.up_proj": (inner, d), "midlayer.mlp.down_proj": (d, inner),
    }  # fmt: skip
    generator, t2d_d2t = torch.Generator().manual_seed(3), vocabulary()
    tensors = {f"{name}.weight": 0.5 * torch.randn(shape, generator=generator) + ("norm" in name)
               for name, shape in shapes.items()}  # fmt: skip
    tensors |= dict(zip(("t2d", "d2t"), t2d_d2t))
    save_file(tensors, folder / "model.safetensors")
    config = SIZES | {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
        "num_hidden_layers": 1, "draft_vocab_size": len(IDS), "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    Eagle3Converter().convert(folder, scratch / "converted", str(base), validate=False)
    converted = Eagle3DraftModel.from_pretrained(scratch / "converted", dtype=torch.float32)
    converted.config.transformer_layer_config._attn_implementation = "eager"
    head = Eagle3DraftModel(converted.config)  # with the other attention
    head.load_state_dict(converted.state_dict())
    write_outputs(head.eval(), folder, 4)


def main() -> None:
    shutil.rmtree(GOLDEN, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        base = GOLDEN / "target"
        target = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=7))
        randomised(target, 0).save_pretrained(base)
        write_speculators(base)
        write_eagle(base, Path(scratch))


if __name__ == "__main__":
    main()
