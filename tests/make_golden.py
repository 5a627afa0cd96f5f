"""Write tests/golden: tiny random checkpoints of every family, and what transformers makes of them.

    make golden        (needs the `reference` dependencies)

Each folder holds a checkpoint as transformers saves it and golden.safetensors: tokens, their
logits in float32 and float64, and 64 greedy tokens of the float64 model. transformers computes
norms and rotary angles in float32 even in a float64 model; these casts are widened here, so that
the float64 logits are exact to the last digits and can be compared to within 1e-10.
"""

import copy
import json
import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode

GOLDEN = Path(__file__).parent / "golden"
SMALL = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=2,
)
LLAMA3 = dict(
    rope_type="llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
    rope_theta=1000.0,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, rope_theta=10000.0)
VARIANTS = {
    "llama": ("Llama", dict(tie_word_embeddings=True)),
    "llama-bias": ("Llama", dict(attention_bias=True, mlp_bias=True, num_key_value_heads=1)),
    "llama-head-dim": ("Llama", dict(head_dim=12, num_key_value_heads=4)),
    "llama-linear": (
        "Llama",
        dict(rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=500.0)),
    ),
    "llama-llama3": ("Llama", dict(rope_parameters=LLAMA3)),
    "llama-yarn": ("Llama", dict(rope_parameters=YARN)),
    "mistral": ("Mistral", dict(sliding_window=None)),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen2-yarn": ("Qwen2", dict(rope_parameters=YARN | dict(beta_fast=16, beta_slow=2))),
    "qwen3": ("Qwen3", dict(head_dim=16, tie_word_embeddings=True)),
    "mimo": ("Qwen2", dict()),  # its main model is Qwen2's; transformers has no class for it
}


class Widened(TorchFunctionMode):
    """Every cast to float32 becomes one to float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = {k: widen(v) for k, v in (kwargs or {}).items()}
        if function is torch.Tensor.float:
            return args[0].double()
        return function(*(widen(a) if function is torch.Tensor.to else a for a in args), **kwargs)


def widen(value):
    return torch.float64 if value is torch.float32 else value


def make(name: str, family: str, settings: dict, seed: int) -> None:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**(SMALL | settings))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        # norms and biases too: ones and zeros hide mistakes
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape) * (0.3 if parameter.dim() == 2 else 0.2)
            parameter.copy_((noise + (1.0 if "norm" in key else 0.0)).half().float())
    folder = GOLDEN / name
    shutil.rmtree(folder, ignore_errors=True)
    copy.deepcopy(model).half().save_pretrained(folder)  # half() would spoil the rotary frequencies
    tokens = torch.randint(SMALL["vocab_size"], (100,))
    with torch.no_grad():
        logits32 = model(tokens[None]).logits[0]
        model.double()
        with Widened():
            logits64 = model(tokens[None]).logits[0]
            greedy = model.generate(
                tokens[None, :20],
                attention_mask=torch.ones(1, 20),
                max_new_tokens=64,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[0, 20:]
    save_file(
        {
            "tokens": tokens,
            "logits32": logits32.clone(),
            "logits64": logits64.clone(),
            "greedy": greedy.clone(),
        },
        folder / "golden.safetensors",
    )
    if name == "mimo":
        raw = json.loads((folder / "config.json").read_text())
        raw |= dict(
            model_type="mimo",
            architectures=["MiMoForCausalLM"],
            attention_bias=True,
            num_nextn_predict_layers=1,
        )
        (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    print(f"{name:16} largest logit {logits64.abs().max():.2f}")


def make_probs() -> None:
    """Distributions from transformers' warpers, with ties, for random logits and settings."""
    torch.manual_seed(99)
    cases = []
    for i in range(24):
        logits = (2 * torch.randn(1, 23, dtype=torch.float64)).round(decimals=i % 3)
        sampling = dict(temperature=(0.5, 1.0, 1.7)[i % 3], top_k=(0, 3, 10, 50)[i % 4])
        sampling["top_p"] = (1.0, 0.9, 0.5, 0.2, 0.99)[i % 5]
        warped = transformers.TemperatureLogitsWarper(sampling["temperature"])(None, logits)
        if sampling["top_k"]:
            warped = transformers.TopKLogitsWarper(sampling["top_k"])(None, warped)
        if sampling["top_p"] < 1:
            warped = transformers.TopPLogitsWarper(sampling["top_p"])(None, warped)
        probs = warped.softmax(-1)[0].tolist()
        cases.append(dict(logits=logits[0].tolist(), sampling=sampling, probs=probs))
    (GOLDEN.parent / "golden_probs.json").write_text(json.dumps(cases) + "\n")


if __name__ == "__main__":
    make_probs()
    for i, (name, (family, settings)) in enumerate(VARIANTS.items()):
        make(name, family, settings, seed=i)
