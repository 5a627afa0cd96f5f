"""Score an EAGLE-3 head for SmolLM2: the tokens per pass of the target that its drafts bring.

A head is data, so no code of a student's runs; and no head can change the text.
"""

import random

from minispec import paths
from minispec.bench.prompts import read_questions
from minispec.certify.common import Failed
from minispec.checkpoints.eagle3 import load_eagle3
from minispec.checkpoints.load import find_smollm2, load
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.cli import UserError
from minispec.generate import decode
from minispec.training.text import Skipped

DRAFTS = {"accepted length": {"k": 5}, "tree of 16": {"tree": 16}}  # the first decides
PER_KIND = 2  # prompts of each kind


def prompts(tokenizer: Tokenizer, seed: int) -> list[list[int]]:
    """Questions of each kind, as chats. Other seeds choose others."""
    rng, file = random.Random(seed), paths.SMOLLM2_HEADS / "prompts.jsonl"
    kinds = read_questions(file, tokenizer, Skipped())
    return [prompt for of_kind in kinds.values() for prompt in rng.sample(of_kind, PER_KIND)]


def accepted_lengths(folder: str, seed: int, length: int) -> dict[str, float]:
    """The tokens per pass for each kind of DRAFTS, in greedy answers of at most `length` tokens.
    Raises Failed if the folder has no head for SmolLM2."""
    model, tokenizer = load(find_smollm2(), "float32", "cpu")
    try:
        head = load_eagle3(folder, model, tokenizer)
    except UserError as error:
        raise Failed(str(error)) from None
    asked, found = prompts(tokenizer, seed), {}
    for name, options in DRAFTS.items():
        runs = [decode(model, tokenizer, prompt, "eagle3", head=head, max_new_tokens=length,
                       **options) for prompt in asked]  # fmt: skip
        tokens, passes = (
            sum(map(len, each)) for each in zip(*((r.tokens, r.rounds) for r in runs))
        )
        print(f"{name}: {tokens} tokens from {passes} passes", flush=True)
        found[name] = round(tokens / passes, 3)
    return found
