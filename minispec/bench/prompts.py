"""Choose what to decode: story beginnings, held-out text, or Spec-Bench's questions."""

import argparse
import json
from pathlib import Path

from minispec.checkpoints.tokenizer import Tokenizer
from minispec.cli import UserError, note, user_error
from minispec.distill.generated import read_split
from minispec.model import Transformer
from minispec.training.text import Conversation, Skipped, encode, held_out_prompts, turn

# written for this benchmark; used when no held-out text is available
PROMPTS = [
    "Once upon a time, there was a small bird who could not fly.",
    "Tom and his sister found an old box under the big tree.",
    "One morning, a rabbit woke up and saw snow for the first time.",
    "Anna had a red kite. She took it to the park with her dad.",
    "There was a boat that was afraid of the water.",
    "Mia wanted to bake a cake for her grandmother, but she had no eggs.",
    "A little dog sat at the window and waited for the rain to stop.",
    "In a quiet village lived a boy who loved to paint stones.",
]
MT_BENCH = set("writing roleplay reasoning math coding extraction stem humanities".split())
Prompts = dict[str, list[list[int]]]  # kind of text -> prompts as token ids


def prompts_of(args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer) -> Prompts:
    """Choose at most --prompts prompts per kind, evenly spaced (with --data, the first ones).
    Prompts that exceed the context or that the chat template rejects are skipped."""
    skipped = Skipped()
    if args.questions:
        kinds = read_questions(args.questions, tokenizer, skipped)
    elif args.generated:
        kinds = {}
        for row in read_split(args.generated, model, tokenizer)[1]:  # the held-out rows
            kinds.setdefault(row["file"].stem, []).append(row["prompt"])
    elif args.data:
        kinds = held_out_prompts(args.data, args.kind, tokenizer, args.prompts, skipped)
    else:
        kinds = {"stories": [tokenizer.encode(text) for text in PROMPTS]}
    for kind, prompts in kinds.items():
        fitting = [ids for ids in prompts if len(ids) < model.config.context]
        if too_long := len(prompts) - len(fitting):
            note(f"{kind}: prompts skipped because they exceed the context: {too_long}")
        kinds[kind] = fitting[:: max(1, len(fitting) // args.prompts)][: args.prompts]
    if not any(kinds.values()):
        why = "no document is held out, or none fits in the context"
        raise UserError(f"there are no prompts: {str(skipped) or why}")
    if skipped.reasons:
        note(str(skipped))
    return {kind: prompts for kind, prompts in kinds.items() if prompts}


def read_questions(path: Path, tokenizer: Tokenizer, skipped: Skipped) -> Prompts:
    """Read the first turn of each Spec-Bench question, as a chat if there is a chat template. Group
    them as Spec-Bench does, in six groups: all of MT-Bench's categories form "multi-turn"."""
    groups: Prompts = {}
    with user_error(f"--questions {path}: each line must be an object with category and turns"):
        for i, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
            if line.strip():
                question = json.loads(line)
                kind, content = str(question["category"]), str(question["turns"][0])
                chat = Conversation([turn("user", content)], f"{path} line {i}")
                if prompt := skipped.attempt(chat, encode, tokenizer):
                    group = "multi-turn" if kind in MT_BENCH else kind
                    groups.setdefault(group, []).append(prompt)
    return groups
