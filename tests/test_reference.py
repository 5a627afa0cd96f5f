"""Comparison with transformers (`make reference`): it reads what we write and predicts the same."""

import pytest
import torch
from conftest import GOLDEN, ROOT, random_tokens

from minispec import load
from minispec.checkpoints.load import save
from minispec.generate import decode

transformers = pytest.importorskip("transformers", reason="the `reference` extra is not installed")
TARGET = ROOT / "weights" / "target"


@pytest.mark.parametrize("variant", sorted(f.name for f in GOLDEN.iterdir() if f.name != "mimo"))
def test_a_saved_checkpoint_loads_in_transformers(variant, tmp_path):
    model, _ = load(GOLDEN / variant, "float32", "cpu")
    save(model, None, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = random_tokens(50, vocab=64)
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits
    # relative to the largest logit, as processors sum in different orders
    atol = 1e-5 * expected.abs().max().item()
    torch.testing.assert_close(model.logits(model(tokens)), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("name", ["target", "draft"])
def test_the_shipped_weights_load_in_transformers_with_the_same_logits(name):
    folder = ROOT / "weights" / name
    model, tokenizer = load(folder, "float32", "cpu")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("Once upon a time", "从前有一只小猫", "def f(x):\n    return 1", ""):
        assert their_tokenizer(text).input_ids == tokenizer.encode(text)
        tokens = torch.tensor([tokenizer.encode(text)])
        with torch.no_grad():
            expected = theirs(tokens).logits
        torch.testing.assert_close(model.logits(model(tokens)), expected, rtol=0, atol=1e-4)
    messages = [{"role": "user", "content": "Hi!"}]
    chat = their_tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert chat == tokenizer.chat(messages)


@pytest.mark.slow
def test_the_shipped_target_generates_greedily_as_in_transformers():
    model, tokenizer = load(TARGET, "float64", "cpu")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float64)
    prompt = tokenizer.encode("Once upon a time")
    ours = decode(model, tokenizer, prompt, max_new_tokens=60).tokens
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=60, do_sample=False)
    assert ours == expected[0, len(prompt) :].tolist()
