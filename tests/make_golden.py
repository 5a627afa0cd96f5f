"""Write tests/golden: tiny random checkpoints of every family, with the outputs of transformers.

    make golden        (needs the `reference` dependencies)
    python tests/make_golden.py rounds        (only golden_rounds.json, which needs nothing else)

Each folder holds a checkpoint as transformers saves it and golden.safetensors: tokens, their
logits in float32 and float64, and 64 greedy tokens of the float64 model. transformers computes
norms and rotary angles in float32 even in a float64 model. Here it casts them to float64 instead,
so the float64 logits are exact to the last digits and can be compared to within 1e-10.
"""

import copy
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, models
from tokenizers.processors import TemplateProcessing
from torch.overrides import TorchFunctionMode

from minispec.checkpoints.weights import write_json

if sys.argv[1:] != ["rounds"]:
    import transformers
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

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
    "llama-dynamic": (
        "Llama",
        dict(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=500.0)),
    ),
}


class Float64Casts(TorchFunctionMode):
    """Replace every cast to float32 with one to float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = {k: widen(v) for k, v in (kwargs or {}).items()}
        if function is torch.Tensor.float:
            return args[0].double()
        return function(*(widen(a) if function is torch.Tensor.to else a for a in args), **kwargs)


def widen(value):
    return torch.float64 if value is torch.float32 else value


def make_checkpoint(name: str, family: str, settings: dict, seed: int) -> None:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**(SMALL | settings))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        # also norms and biases: ones and zeros would hide mistakes
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
        with Float64Casts():
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
    """Write golden_probs.json: distributions by transformers' warpers, some with ties."""
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
    write_json(GOLDEN.parent / "golden_probs.json", cases, indent=None)


ADDED_TOKENS = {
    "plain": [],
    "begins with <s>": [],
    "has <x>": [AddedToken("<x>", special=False)],
    "has <x> as special": [AddedToken("<x>", special=True)],
}
ADDED_TOKEN_FLAGS = dict(lstrip=True, rstrip=False, normalized=False, single_word=False)


def decoder(**tokens) -> dict:
    """A tokenizer_config.json with an added_tokens_decoder."""
    return {"tokenizer_config": {"added_tokens_decoder": tokens}}


def config(**settings) -> dict:
    return {"tokenizer_config": settings}


X, Y = dict(content="<x>", special=True), dict(content="<y>", special=True)
TEMPLATE = (
    "{{ bos_token }}{{ unk_token }}{{ pad_token }}{{ extra_token }}{% for m in messages %}"
    "<x>{{ m['content'] }}<y>{% endfor %}{% if add_generation_prompt %}<x>{% endif %}"
)
ALL_NAMES = dict(bos_token="<s>", unk_token="<in>", pad_token="<x>", extra_token="<y>")
TOKENIZER_CASES = {  # case -> tokenizer.json and the files next to it
    "add_bos_token is true": ("plain", config(bos_token="<s>", add_bos_token=True)),
    "add_bos_token is false": ("begins with <s>", config(bos_token="<s>", add_bos_token=False)),
    "add_eos_token is true": ("begins with <s>", config(eos_token="</s>", add_eos_token=True)),
    "a new BOS": ("plain", config(bos_token="<x>", add_bos_token=True)),
    "added_tokens": ("plain", {"added_tokens": {"<x>": 46, "<y>": 47}}),
    "added_tokens with a gap": ("plain", {"added_tokens": {"<x>": 46, "<y>": 60}}),
    "added_tokens, one with a name": (
        "plain",
        {"added_tokens": {"<y>": 46, "<x>": 47}, "special_tokens_map": {"pad_token": "<x>"}},
    ),
    "added_tokens and a map": (
        "plain",
        {
            "added_tokens": {"<x>": 46, "<y>": 47},
            "special_tokens_map": {"additional_special_tokens": ["<x>"]},
        },
    ),
    "a map": ("plain", {"special_tokens_map": {"additional_special_tokens": ["<x>", "<y>"]}}),
    "a map and an empty list": (
        "plain",
        {"special_tokens_map": {"additional_special_tokens": ["<x>"]}}
        | config(additional_special_tokens=[]),
    ),
    "a map and a config": (
        "plain",
        {"special_tokens_map": {"bos_token": "<x>"}} | config(bos_token="<s>", eos_token="</s>"),
    ),
    "a map that is ignored": (
        "plain",
        {"special_tokens_map": {"unk_token": "<x>"}} | decoder(**{"44": dict(content="<s>")}),
    ),
    "additional": ("plain", config(additional_special_tokens=["<x>", "<y>"])),
    "additional, known as text": ("has <x>", config(additional_special_tokens=["<x>"])),
    "additional, a word": ("plain", config(additional_special_tokens=["<in>"])),
    "extra": ("plain", config(extra_special_tokens=["<x>", "<y>"])),
    "extra, with names": ("plain", config(extra_special_tokens=dict(image_token="<x>"))),
    "extra, with names, and additional": (
        "plain",
        config(extra_special_tokens=dict(image_token="<y>"), additional_special_tokens=["<x>"]),
    ),
    "model-specific names": (
        "plain",
        config(model_specific_special_tokens=dict(image_token="<x>")),
    ),
    "added_tokens and a config": (
        "plain",
        {"added_tokens": {"<x>": 46, "<y>": 47}} | config(additional_special_tokens=["<y>"]),
    ),
    "extra and additional": (
        "plain",
        config(extra_special_tokens=["<x>"], additional_special_tokens=["<y>"]),
    ),
    "listed": ("plain", decoder(**{"46": X, "47": Y})),
    "listed with a gap": ("plain", decoder(**{"46": X, "70": Y})),
    "listed as text with a gap": ("plain", decoder(**{"70": Y | dict(special=False)})),
    "listed as special, known as text": ("has <x>", decoder(**{"46": X})),
    "listed with flags": ("has <x> as special", decoder(**{"46": X | ADDED_TOKEN_FLAGS})),
    "listed as text, known as special": (
        "has <x> as special",
        decoder(**{"46": X | dict(special=False)}),
    ),
    "listed, a word": ("plain", decoder(**{"43": dict(content="<in>", special=True)})),
    "an EOS known as text": ("has <x>", config(eos_token="<x>")),
    "an EOS that is a word": ("plain", config(eos_token="<in>")),
    "a pad": ("plain", config(pad_token="<x>")),
    "a pad with flags": (
        "plain",
        config(pad_token=dict(content="<x>", __type="AddedToken") | ADDED_TOKEN_FLAGS),
    ),
    "a custom name": ("plain", config(image_token="<x>")),
    "a template with all names": ("plain", config(chat_template=TEMPLATE, **ALL_NAMES)),
    "several templates": (
        "plain",
        config(
            chat_template=[
                dict(name="tool_use", template="no"),
                dict(name="default", template=TEMPLATE),
            ],
            **ALL_NAMES,
        ),
    ),
    "templates by name": ("plain", config(chat_template=dict(default=TEMPLATE), **ALL_NAMES)),
    "a template in a folder": (
        "plain",
        config(chat_template="no", **ALL_NAMES)
        | {"chat_template.jinja": "no", "additional_chat_templates/default.jinja": TEMPLATE},
    ),
}
SENTENCE = "a <x> b<y>c <in>d<s>e</s>"


def make_tokenizers() -> None:
    """Write golden_tokenizers.json: small tokenizers as transformers reads them."""
    letters = {c: i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz<>/[]_ 0123456789")}
    files, cases = {}, {}
    for name, added in ADDED_TOKENS.items():
        backend = Tokenizer(models.BPE(letters | {"<in>": len(letters)}, []))
        backend.add_special_tokens(["<s>", "</s>"])
        backend.add_tokens(added)
        if name == "begins with <s>":
            bos = "<s>", backend.token_to_id("<s>")
            backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[bos])
        files[name] = backend.to_str()
    for case, (name, more_files) in TOKENIZER_CASES.items():
        texts = {"tokenizer.json": files[name]}
        for file, content in more_files.items():
            jinja = file.endswith(".jinja")
            texts[file if jinja else f"{file}.json"] = content if jinja else json.dumps(content)
        with tempfile.TemporaryDirectory() as folder:
            for file, text in texts.items():
                (Path(folder) / file).parent.mkdir(exist_ok=True)
                (Path(folder) / file).write_text(text)
            tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        ids = tokenizer.encode(SENTENCE)
        found = dict(ids=ids, shown=tokenizer.decode(ids, skip_special_tokens=True))
        found["named"] = tokenizer.special_tokens_map
        if tokenizer.chat_template:
            chat = [dict(role="user", content="hi"), dict(role="assistant", content="yo")]
            rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
            found["chat"] = rendered["input_ids"]
        cases[case] = dict(files=texts | {"tokenizer.json": name}, found=found)
    golden = dict(sentence=SENTENCE, tokenizers=files, cases=cases)
    write_json(GOLDEN.parent / "golden_tokenizers.json", golden, indent=1)


def make_published() -> None:
    """Write golden_published.json: how transformers reads the configs in published.json."""
    golden = {}
    for name, files in json.loads((GOLDEN.parent / "published.json").read_text()).items():
        raw = dict(files["config"])
        kind = raw.pop("model_type").title().replace("Mimo", "Qwen2")
        config = getattr(transformers, f"{kind}Config")(**raw)
        generation = transformers.GenerationConfig.from_model_config(config)
        if "generation_config" in files:
            generation = transformers.GenerationConfig.from_dict(files["generation_config"])
        rope = LlamaRotaryEmbedding(config)
        with torch.device("meta"):
            model = getattr(transformers, f"{kind}ForCausalLM")(config)
        golden[name] = dict(
            parameters=sum(p.numel() for p in model.parameters()),
            max_position_embeddings=config.max_position_embeddings,
            bos_token_id=generation.bos_token_id,
            eos_token_id=generation.eos_token_id,
            frequencies=rope.inv_freq.tolist()[::9],
            scale=rope.attention_scaling,
        )
    write_json(GOLDEN.parent / "golden_published.json", golden, indent=1)


def make_rounds() -> None:
    """Write golden_rounds.json: how many tokens a round of each method brings today."""
    sys.path.insert(0, str(GOLDEN.parent.parent))
    import test_rounds

    golden = {method: test_rounds.all_means(method) for method in test_rounds.METHODS}
    lists = re.compile(r"\[.*?\]", re.S)  # each on one line
    text = lists.sub(lambda found: " ".join(found[0].split()), json.dumps(golden, indent=1))
    test_rounds.GOLDEN.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    make_rounds()
    if sys.argv[1:] == ["rounds"]:
        sys.exit()
    make_probs()
    make_tokenizers()
    make_published()
    for i, (name, (family, settings)) in enumerate(VARIANTS.items()):
        make_checkpoint(name, family, settings, seed=i)
