"""Generate a model's own text, then train a FastMTP head and Medusa heads on all of it.

    make gpu-heads                               SmolLM2 (make smollm2) on a GPU, under ten minutes
    make gpu-heads QUESTIONS=question.jsonl      and measure the heads on Spec-Bench
    make gpu-heads ARGS=--small                  the same code with the toy, on a CPU as well

The model also writes the users' turns, so no other text is needed; DATA="FILE …" adds your own
prompts. Each phase ends at its time limit with the work done so far. The text, in files that
`distill --own` reads, and heads.tar are written next to the report.
"""

import argparse
import json
import lzma
import shutil
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from steps import MINUTES, Results, Step, main, table

from minispec import bench, load
from minispec.checkpoints import places
from minispec.generate import decode
from minispec.training.loop import CHECKPOINT
from minispec.training.own_text import read_own

BEGINNINGS = {  # kind of text -> beginnings of users' turns; "" leaves it to the model
    "prose": ["", "", "", "", "Translate German to English:", "Summarize:", "Who", "When", "Where",
              "What", "How many", "Why", "Explain", "Write a story about", "Write a letter",
              "Give me advice on", "Answer the question by the text below."],
    "code": ["Write a Python function", "Write a function", "Write a Python program", "Write a",
             "Fix this code:", "What does this code do?", "Implement"],
    "sums": ["A baker", "A farmer has", "A train", "A store sells", "Tom has", "Maria buys", "If",
             "There are", "Calculate", "Solve", "How much"],
}  # fmt: skip
PACKED = 4_000_000  # bytes of all text
FULL = {"model": "smollm2", "documents": {"prose": 9000, "code": 5000, "sums": 7000},
        "tokens": 200, "batch": 512, "rows": 64, "context": 384, "vocabulary": 8192, "prompts": 5,
        "answer": 64}  # fmt: skip
SMALL = {"model": str(places.TOY), "documents": dict.fromkeys(BEGINNINGS, 4),
         "tokens": 40, "batch": 16, "rows": 4, "context": 96, "vocabulary": 512, "prompts": 1,
         "answer": 24}  # fmt: skip
HEADS = {"mtp": ["--k", "3", "--soft", "--lr", "3e-3"],
         "medusa": ["--heads", "4", "--shared", "--lr", "2e-3"]}  # fmt: skip


def existing(name: str) -> Path:
    """Check a path before minutes of work."""
    if not Path(name).exists():
        raise argparse.ArgumentTypeError(f"{name} does not exist")
    return Path(name)


def scale(args: argparse.Namespace) -> dict:
    return SMALL if args.small else FULL


def text_files(args: argparse.Namespace) -> list[Path]:
    """List the files that heads learn from."""
    kinds = [*BEGINNINGS, *(["data"] if args.data else [])]
    return args.own or [args.work / f"{kind}.jsonl.xz" for kind in kinds]


def distill(command: str, args: argparse.Namespace, *flags: object) -> list[str]:
    """Make a command line of minispec.distill."""
    words = ["-m", "minispec.distill", command, "--model", scale(args)["model"], *flags]
    return [sys.executable, *map(str, words)]


# ---- phases --------------------------------------------------------------------------------------


def text(args: argparse.Namespace) -> Iterator[dict]:
    """Generate all kinds of text in parallel, for at most three quarters of the time; pack it."""
    end, size = time.monotonic() + 0.75 * args.seconds, scale(args)
    how = ["--temperature", 0, "--tokens", size["tokens"]]
    flags = {kind: ["--chat", *begin, "--documents", size["documents"][kind], "--batch",
                    size["batch"], *how] for kind, begin in BEGINNINGS.items()}  # fmt: skip
    if args.data:  # prompts may be long
        flags["data"] = ["--data", *args.data, "--batch", size["batch"] // 4, *how]
    raw = {kind: args.work / f"{kind}.jsonl" for kind in flags}
    running = [subprocess.Popen(distill("generate", args, *each, "--out", raw[kind]))
               for kind, each in flags.items()]  # fmt: skip
    for child in running:
        try:
            child.wait(max(0, end - time.monotonic()))
        except subprocess.TimeoutExpired:  # at most a batch is lost
            child.kill()
            child.wait()
    pack(list(raw.values()), PACKED)
    publish(args, *text_files(args))
    for file in text_files(args):
        rows = read_own(file)[1]
        yield {"text": file.name, "documents": len(rows), "bytes": file.stat().st_size,
               "tokens": sum(len(row["tokens"]) for row in rows)}  # fmt: skip


def pack(files: list[Path], most: int) -> None:
    """Compress each file to FILE.xz. If these exceed `most` bytes together, leave out the same
    share of documents from each."""
    share, lines = 1.0, [file.read_bytes().splitlines(keepends=True) for file in files]
    while True:
        kept = [b"".join(each[: max(2, int(share * len(each)))]) for each in lines]
        with ThreadPoolExecutor() as pool:
            packed = list(pool.map(partial(lzma.compress, preset=6), kept))
        if sum(map(len, packed)) <= most:
            break
        share *= 0.99 * most / sum(map(len, packed))
    for file, content in zip(files, packed):
        file.with_name(f"{file.name}.xz").write_bytes(content)


def vocabulary(args: argparse.Namespace) -> Iterator[dict]:
    """Count the most frequent tokens of each kind; both heads learn only these."""
    out, flags = args.work / "vocabulary.json", ["--size", scale(args)["vocabulary"]]
    for file in text_files(args):
        flags += ["--text", f"{file.name.partition('.')[0]}={file}"]
    subprocess.run(distill("vocabulary", args, *flags, "--out", out), check=True)
    for name, language in json.loads(out.read_text())["languages"].items():
        yield {"vocabulary": name, "tokens": len(language["ids"])}


def learn(head: str, args: argparse.Namespace) -> Iterator[dict]:
    """Train for half of the time; reading the text and evaluating the head take the rest."""
    size, out = scale(args), args.work / head
    flags = ["--own", *text_files(args), "--vocabulary", args.work / "vocabulary.json", "--rows",
             size["rows"], "--context", size["context"], *HEADS[head], "--save-every", 50,
             "--out", out]  # fmt: skip
    minutes = 0.05 if args.small else round(args.seconds / 120, 2)
    try:
        subprocess.run(distill(head, args, *flags, "--minutes", minutes), check=True,
                       timeout=0.8 * args.seconds)  # fmt: skip
    except subprocess.TimeoutExpired:  # finish with the steps in the checkpoint
        line = distill(head, args, *flags, "--steps", counts(out)[0])
        subprocess.run(line, check=True)
    publish(args)
    steps, seconds = counts(out)
    card = (out / "README.md").read_text(encoding="utf-8")
    yield {"head": head, "steps": steps, "minutes of training": seconds / 60}
    yield {"readme": card.replace("# ", "## ", 1)}


def counts(out: Path) -> list[float]:
    """Read the steps and seconds of a training so far."""
    return torch.load(out / CHECKPOINT, "cpu", weights_only=True)["counts"]


def measure(args: argparse.Namespace) -> Iterator[dict]:
    """Measure tokens per pass on Spec-Bench and on held-out text."""
    size = scale(args)
    model, tokenizer = load(size["model"])
    flags = ["--mtp", args.work / "mtp", "--heads", args.work / "medusa", "--prompts",
             size["prompts"], "--methods", "fastmtp k=3,medusa tree=32"]  # fmt: skip
    sources = {"own text": ["--own", *text_files(args)]}
    if args.questions:
        sources = {"Spec-Bench": ["--questions", args.questions]} | sources
    else:
        yield {"tokens per pass on": "Spec-Bench: not measured; QUESTIONS= names its file"}
    for source, prompts_from in sources.items():
        parsed = bench.parse(list(map(str, ["--model", size["model"], *flags, *prompts_from])))
        methods, found = bench.methods_of(parsed, model, tokenizer), []
        del methods["autoregressive"]
        for kind, prompts in bench.prompts_of(parsed, model, tokenizer).items():
            runs = {row: [decode(model, tokenizer, prompt, row.split()[0],
                                 max_new_tokens=size["answer"], **options) for prompt in prompts]
                    for row, options in methods.items()}  # fmt: skip
            found.append({row: bench.per_pass(each) for row, each in runs.items()})
            kind = kind.removesuffix(".jsonl")
            yield {"tokens per pass on": f"{source}, {kind}", "prompts": len(prompts)} | found[-1]
        means = {row: statistics.mean(each[row] for each in found) for row in methods}
        yield {"tokens per pass on": f"**{source}, mean**"} | means


def publish(args: argparse.Namespace, *files: Path) -> None:
    """Copy files, and all heads trained so far, next to the report."""
    args.out.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copy(file, args.out)
    with tarfile.open(args.out / "heads.tar", "w") as tar:
        for head in HEADS:
            for file in sorted((args.work / head).glob("*")):
                if file.name != CHECKPOINT:
                    tar.add(file, f"{head}/{file.name}")


def steps_of(args: argparse.Namespace) -> dict[str, Step]:
    part = args.minutes / MINUTES
    steps = {
        "text": Step(175 * part, text), "vocabulary": Step(20 * part, vocabulary),
        "mtp": Step(205 * part, partial(learn, "mtp")),
        "medusa": Step(105 * part, partial(learn, "medusa")), "measure": Step(65 * part, measure),
    }  # fmt: skip
    if args.own:
        del steps["text"]
    return steps


def tables(results: Results) -> list[str]:
    """Make the tables: text, vocabularies, heads with their cards, tokens per pass."""
    cards = [row["readme"] for rows in results.values() for row in rows if "readme" in row]
    return [
        table(results, "text"), table(results, "vocabulary"), table(results, "head"), *cards,
        "Tokens per pass, greedy; the goal on Spec-Bench is 2.0:\n",
        table(results, "tokens per pass on"),
    ]  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="tests/gpu/heads.py", description=__doc__.split("\n")[0])
    parser.add_argument("--questions", type=existing, help="Spec-Bench's question.jsonl")
    parser.add_argument("--data", nargs="+", type=existing, help="prompts: files or folders")
    parser.add_argument("--own", nargs="+", type=existing, help="learn from this text instead")
    main(parser, steps_of, tables)
