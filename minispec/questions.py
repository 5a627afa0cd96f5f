"""Spec-Bench's questions (hemingkx/Spec-Bench) answered by our methods, in its own answer format:
token counts are of what was emitted, never of re-tokenised text."""

import argparse
import json
import time
import uuid
from pathlib import Path

from tqdm import tqdm

from minispec.errors import UserError, prepare_folder
from minispec.generate import as_prompt, decode
from minispec.model import Transformer
from minispec.tokenizer import Tokenizer


def read_questions(path: Path) -> list[dict]:
    """Lines with question_id, category and turns."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise UserError(f"--questions {path} cannot be read: {error}") from None
    questions = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                question = json.loads(line)
                assert "question_id" in question and question["turns"]
                assert isinstance(question["turns"], list)
                "".join(question["turns"]).encode()  # texts, of whole characters
            except (ValueError, KeyError, TypeError, AssertionError):
                raise UserError(
                    f"--questions {path}, line {number}: must be an object with question_id and "
                    "turns (texts)"
                ) from None
            questions.append(question)
    if not questions:
        raise UserError(f"--questions {path}: holds no questions")
    return questions


def answer(
    model: Transformer, tokenizer: Tokenizer, method: str, options: dict, turns: list[str],
    n: int, temperature: float,
) -> dict:  # fmt: skip
    """One choice of the answer format; a turn that no longer fits into the context ends it."""
    choice = {
        "index": 0, "turns": [], "decoding_steps": [], "new_tokens": [], "wall_time": [],
        "accept_lengths": [],
    }  # fmt: skip
    messages: list[dict[str, str]] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        prompt = tokenizer.chat(messages) if tokenizer.chat_template else flat(messages)
        try:
            ids = as_prompt(model, tokenizer, prompt)
        except UserError:
            break
        begin = time.perf_counter()
        run = decode(
            model, tokenizer, ids, method, max_new_tokens=n, temperature=temperature, **options
        )
        choice["wall_time"].append(time.perf_counter() - begin)
        choice["turns"].append(run.text)
        choice["decoding_steps"].append(len(run.rounds))
        choice["new_tokens"].append(len(run.tokens))
        choice["accept_lengths"] += [len(step.tokens) for step in run.rounds]
        messages.append({"role": "assistant", "content": run.text})
    return choice


def flat(messages: list[dict[str, str]]) -> str:
    """A chat for a model without a template: one text after the other."""
    return "\n".join(message["content"] for message in messages)


def answer_questions(
    args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer, methods: dict[str, dict]
) -> None:
    """Write one file per method into --answers, and print what Spec-Bench's speed report would
    say of them: tokens per second over plain decoding's, tokens per step."""
    temperature = args.temperature[0]
    questions = read_questions(args.questions)
    questions = questions[:: max(len(questions) // args.prompts, 1)][: args.prompts]
    prepare_folder(args.answers, "--answers", *map(answer_file, methods))
    answers: dict[str, list[dict]] = {name: [] for name in methods}
    skipped = 0
    for name, options in methods.items():  # warm up
        answer(model, tokenizer, name.split()[0], options, ["A"], args.max_new_tokens, temperature)
    for question in tqdm(questions, unit="question"):
        for name, options in methods.items():
            choice = answer(
                model, tokenizer, name.split()[0], options, question["turns"],
                args.max_new_tokens, temperature,
            )  # fmt: skip
            if choice["turns"]:
                answers[name].append(
                    {"question_id": question["question_id"], "category": question.get("category"),
                     "answer_id": uuid.uuid4().hex, "model_id": f"minispec-{name}",
                     "choices": [choice], "tstamp": time.time()}
                )  # fmt: skip
        skipped += not choice["turns"]
    report(answers, args.answers)
    if skipped:
        print(f"{skipped} of {len(questions)} questions are longer than the context: left out")


def answer_file(method: str) -> str:
    return method.replace(" ", "-") + ".jsonl"


def report(answers: dict[str, list[dict]], folder: Path) -> None:
    """Each method's file, and a line about it."""
    speeds = {}
    for name, lines in answers.items():
        file = folder / answer_file(name)
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        file.write_text(text, encoding="utf-8")
        tokens, steps, seconds = (
            sum(sum(line["choices"][0][key]) for line in lines)
            for key in ("new_tokens", "decoding_steps", "wall_time")
        )
        speeds[name] = tokens / seconds if seconds else 0.0
        print(
            f"{name:<22}{speeds[name]:8.1f} tokens/s  "
            f"{speeds[name] / (speeds['autoregressive'] or 1):.2f}x  "
            f"{tokens / max(steps, 1):.2f} tokens a step  {file}"
        )
