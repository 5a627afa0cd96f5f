"""mistralrs 0.6.0, whose Python interface still has draft models, as black boxes for the certifier.
Prompts and results are texts of one letter per token."""

import functools
import json
import tempfile
from pathlib import Path

from end_tokens import until_end
from mistralrs import Architecture, CompletionRequest, ModelDType, Runner, Which

FIELDS = "single_word", "lstrip", "rstrip", "normalized", "special"


def model(checkpoint: str) -> Which:
    """Describe a copy of the checkpoint whose only end token is never generated: one is required,
    and it would be dropped. The decoder is one that mistral.rs knows. There is room for drafts at
    the end of the context, where the engine would stop with an error."""
    folder = Path(tempfile.mkdtemp())
    values = json.loads(Path(checkpoint, "config.json").read_text()) | {"eos_token_id": None}
    values["max_position_embeddings"] += 8
    (folder / "config.json").write_text(json.dumps(values))
    values = json.loads(Path(checkpoint, "tokenizer.json").read_text())
    vocab = len(values["model"]["vocab"])
    values["model"]["vocab"] = {chr(ord("!") + i): i for i in range(vocab)}  # no control characters
    values["decoder"] = {
        "type": "Sequence",
        "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}],
    }
    values["added_tokens"] = [dict.fromkeys(FIELDS, False) | {"id": vocab, "content": "<end>"}]
    (folder / "tokenizer.json").write_text(json.dumps(values))
    values = {"bos_token_id": vocab, "eos_token_id": vocab}
    (folder / "generation_config.json").write_text(json.dumps(values))
    template = {"chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(template))
    (folder / "model.safetensors").symlink_to(Path(checkpoint, "model.safetensors").absolute())
    return Which.Plain(model_id=str(folder), arch=Architecture.Llama, dtype=ModelDType.F32)


@functools.cache
def load(checkpoint: str, draft: bool) -> Runner:
    options = {"which_draft": model(f"{checkpoint}/draft"), "speculative_gamma": 2} if draft else {}
    return Runner(
        model(checkpoint), token_source="none", prefix_cache_n=0, no_paged_attn=True, **options
    )


def generate(draft, checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
    """No seed: on a CPU the runner rejects one."""
    if max_new_tokens == 0:
        return []
    request = CompletionRequest(
        "".join(chr(ord("!") + token) for token in prompt), "default", max_tokens=max_new_tokens,
        temperature=float(temperature), top_k=top_k or None, top_p=top_p)  # fmt: skip
    try:
        text = load(checkpoint, draft).send_completion_request(request).choices[0].text
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # in Rust; it is no Exception in Python
            raise
        raise RuntimeError(str(error)) from error
    tokens = [ord(letter) - ord("!") for letter in text[:max_new_tokens]]  # it returns one more
    return until_end(checkpoint, tokens)


plain, speculative = functools.partial(generate, False), functools.partial(generate, True)
