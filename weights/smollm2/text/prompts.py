"""Write prompts whose passages, sentences and first turns are the model's own answers, so that no
text of anyone else is needed: python weights/smollm2/text/prompts.py MODEL OUT FILE.jsonl.xz …

OUT gets summaries, retrieval, translation and turns (.jsonl), for `distill generate --data`.
`python … MODEL OUT --back FILE …` takes the answers of translation as sentences to translate back.
"""

import json
import random
import re
import sys
from pathlib import Path

from minispec import load
from minispec.distill.generated import read_generated

LANGUAGES = "German", "French", "Spanish", "Italian"
SUMMARIES = (
    "Summarize: {}", "Summarize: {}", "Summarize: {}", "Summarize the following text.\n\n{}",
    "{}\n\nSummarize the text above in three sentences.", "What are the main points?\n\n{}",
    "Write a headline for this text and list its key facts:\n{}", "TL;DR of this:\n{}",
)  # fmt: skip
QUESTIONS = (
    "What is this text about?", "Who is mentioned in the text, and what do they do?",
    "What reasons does the text give?", "Which examples are mentioned?", "Why is this important?",
    "What happens first, and what happens after that?", "When and where does this take place?",
    "What would happen without it?", "Name three facts from the passage.", "How does it work?",
)  # fmt: skip
FOLLOW_UPS = (
    "Can you give me an example?", "Explain it to a five-year-old.", "Why?", "Make it shorter.",
    "Rewrite your answer as a list.", "Are you sure? Check your answer.",
    "What else should I know?",
    "Now write the same in a more formal tone.", "What are the disadvantages?",
    "Translate your answer into German.", "Summarize what you just said in one sentence.",
    "How would you explain this to an expert?", "Give me three alternatives.", "Continue.",
    "What assumptions did you make?", "Turn your answer into a short story.",
)  # fmt: skip


def turns_of(path: Path, tokenizer) -> list[tuple[str, str]]:
    """The user's last turn and the answer of each document."""
    pairs = []
    for row in read_generated(path, tokenizer)[1]:
        prompt = tokenizer.backend.decode(row["prompt"], skip_special_tokens=False)
        question = prompt.split("<|im_start|>user\n")[-1].split("<|im_end|>")[0].strip()
        pairs.append((question, tokenizer.decode(row["tokens"]).strip()))
    return pairs


def write(path: Path, prompts: list) -> None:
    """Write each prompt once; a list of strings holds a conversation's turns."""
    lines = []
    for prompt in prompts:
        turns = [prompt] if isinstance(prompt, str) else prompt
        roles = ["user", "assistant"] * len(turns)
        messages = [{"role": role, "content": text} for role, text in zip(roles, turns)]
        lines.append(json.dumps({"messages": messages}, ensure_ascii=False))
    path.write_text("\n".join(dict.fromkeys(lines)) + "\n", encoding="utf-8")


def main(model: str, out: str, *files: str) -> None:
    tokenizer, rng, out = load(model)[1], random.Random(0), Path(out)
    back, files = files[0] == "--back", [Path(file) for file in files if file != "--back"]
    pairs = [pair for file in files for pair in turns_of(file, tokenizer)]
    if back:
        found = [(re.match(r"Translate English to (\w+): ", q), a) for q, a in pairs]
        long = [(m[1], a.splitlines()[0]) for m, a in found if m and len(a) > 20]
        write(out / "back.jsonl", [f"Translate {name} to English: {s}" for name, s in long])
        return
    prose = [(q, a[:1800].rpartition(".")[0] + ".") for q, a in pairs if "```" not in a]
    passages = [(q, a) for q, a in prose if len(a) > 600]
    write(out / "summaries.jsonl", [rng.choice(SUMMARIES).format(a) for _, a in passages])
    write(out / "retrieval.jsonl", [
        f"{a[:1100]}\n{rng.choice(passages)[1][:500]}\n{rng.choice([q, *QUESTIONS])}"
        if rng.random() < 0.5 else f"{a}\n\n{rng.choice([q, *QUESTIONS])}"
        for q, a in passages if len(q) < 200
    ])  # fmt: skip
    sentences = {s for _, a in prose for s in re.findall(r"(?<=\. )[A-Z][^.!?\n]{40,160}[.!?]", a)}
    chosen = rng.sample(sorted(sentences), min(len(sentences), 6000))
    write(out / "translation.jsonl",
          [f"Translate English to {rng.choice(LANGUAGES)}: {s}" for s in chosen])  # fmt: skip
    write(out / "turns.jsonl", [
        [q, a, rng.choice(FOLLOW_UPS)] for q, a in pairs if len(a) < 900 and len(q) < 500
    ])  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
