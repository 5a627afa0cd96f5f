"""mistral.rs 0.9.5's Runner, as a black box for the certifier. It speculates only with MTP models,
so this is plain decoding. Prompts and results are texts of one letter per token. It would drop the
end token, so it generates more, which is cut off here."""

import functools
import json
import os
from pathlib import Path

os.environ["MISTRALRS_CPU_KV_F32"] = "1"
from end_tokens import until_end
from mistralrs import Architecture, CompletionRequest, ModelDType, Runner, Which


@functools.cache
def load(checkpoint: str) -> tuple[Runner, dict[str, int]]:
    tokenizer = json.loads(Path(checkpoint, "tokenizer.json").read_text())
    letters = {chr(ord("!") + i): i for i in tokenizer["model"]["vocab"].values()}
    tokenizer["model"]["vocab"] = letters  # which its decoder knows
    options = dict.fromkeys(("add_prefix_space", "trim_offsets", "use_regex"), False)
    tokenizer["decoder"] = {"type": "ByteLevel", **options}  # it does not know the given one, Fuse
    file = Path(checkpoint, "mistralrs.json")
    file.write_text(json.dumps(tokenizer))
    which = Which.Plain(
        checkpoint, arch=Architecture.Llama, tokenizer_json=str(file), dtype=ModelDType.F32)
    return Runner(which), tokenizer["model"]["vocab"]  # it cannot seed a CPU's generator


def plain(checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
    if max_new_tokens == 0:  # it does not accept 0
        return []
    runner, vocab = load(checkpoint)
    letters = sorted(vocab, key=vocab.get)
    request = CompletionRequest(
        "".join(letters[token] for token in prompt), "default", max_tokens=max_new_tokens,
        temperature=temperature, top_k=top_k or len(vocab), top_p=top_p, ignore_eos=True,
    )  # fmt: skip
    text = runner.send_completion_request(request).choices[0].text
    return until_end(checkpoint, [vocab[letter] for letter in text])
