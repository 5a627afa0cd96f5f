"""Generate text with a model, then train a FastMTP head and Medusa heads on it.

    make gpu-heads                               SmolLM2 (make smollm2) on a GPU, under ten minutes
    make gpu-heads QUESTIONS=question.jsonl      also measure the heads on Spec-Bench
    make gpu-heads ARGS=--small                  the same code with the toy; also runs on a CPU

The model also writes the users' turns, so no other text is needed; DATA="FILE …" adds your own
prompts, and ARGS="--init FOLDER" continues with the heads in FOLDER/mtp and FOLDER/medusa. Each
phase stops at its time limit and keeps what it has done so far. The text, in files that
`distill --generated` reads, and heads.tar are written next to the report.
"""

import argparse
import json
import lzma
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
from steps import TOTAL_MINUTES, Results, Step, main, table

from minispec import load, paths
from minispec.bench import __main__ as bench
from minispec.bench.measure import per_pass
from minispec.checkpoints.weights import atomic_write, write_bytes
from minispec.distill.generated import read_generated
from minispec.generate import decode
from minispec.training.loop import CHECKPOINT

BEGINNINGS = {  # kind of text -> how user turns begin; "" lets the model decide
    "prose": ["", "", "", "", "Translate German to English:", "Summarize:", "Who", "When", "Where",
              "What", "How many", "Why", "Explain", "Write a story about", "Write a letter",
              "Give me advice on", "Answer the question by the text below."],
    "code": ["Write a Python function", "Write a function", "Write a Python program", "Write a",
             "Fix this code:", "What does this code do?", "Implement"],
    "sums": ["A baker", "A farmer has", "A train", "A store sells", "Tom has", "Maria buys", "If",
             "There are", "Calculate", "Solve", "How much"],
}  # fmt: skip
MAX_PACKED_BYTES = 14_000_000  # of each file of text
FULL_SCALE = {"model": "smollm2", "tokens": 200,
              "documents": {"prose": 9000, "code": 5000, "sums": 7000, "data": 9000},
              "batch": 256, "rows": 64, "context": 384, "vocabulary": 8192,
              "prompts": 5, "answer": 64, "dtype": "bfloat16"}  # fmt: skip
SMALL_SCALE = {"model": str(paths.TOY), "documents": dict.fromkeys([*BEGINNINGS, "data"], 4),
               "tokens": 40, "batch": 16, "rows": 4, "context": 96, "vocabulary": 512,
               "prompts": 1, "answer": 24, "dtype": "float32"}  # fmt: skip
HEAD_FLAGS = {"mtp": ["--k", "3", "--soft", "--lr", "2e-3"],
              "medusa": ["--heads", "4", "--shared", "--lr", "2e-3"]}  # fmt: skip


def existing(name: str) -> Path:
    """An argparse type: a path that must exist, checked before minutes of work."""
    if not Path(name).exists():
        raise argparse.ArgumentTypeError(f"{name} does not exist")
    return Path(name)


def scale(args: argparse.Namespace) -> dict:
    return SMALL_SCALE if args.small else FULL_SCALE


def text_files(args: argparse.Namespace) -> list[Path]:
    """List the files that the heads are trained on."""
    kinds = [*BEGINNINGS, *(["data"] if args.data else [])]
    return args.generated or [args.work / f"{kind}.jsonl.xz" for kind in kinds]


def distill(command: str, args: argparse.Namespace, *flags: object) -> list[str]:
    """Build a command line for minispec.distill."""
    arguments = ["-m", "minispec.distill", command, "--model", scale(args)["model"], *flags]
    return [sys.executable, *map(str, arguments)]


# ---- phases --------------------------------------------------------------------------------------


def text(args: argparse.Namespace) -> Iterator[dict]:
    """Generate all kinds in parallel for at most three quarters of the time, then compress."""
    end, size = time.monotonic() + 0.75 * args.seconds, scale(args)
    common = ["--temperature", 0, "--tokens", size["tokens"], "--dtype", size["dtype"]]
    flags = {name: ["--chat", *texts, "--batch", size["batch"]]
             for name, texts in BEGINNINGS.items()}  # fmt: skip
    if args.data:  # prompts may be long
        flags["data"] = ["--data", *args.data, "--batch", size["batch"] // 2]
    raw = {name: args.work / f"{name}.jsonl" for name in flags}
    running = [subprocess.Popen(distill("generate", args, *flags[name], *common, "--documents",
                                        size["documents"][name], "--out", raw[name]))
               for name in flags]  # fmt: skip
    for child in running:
        try:
            child.wait(max(0, end - time.monotonic()))
        except subprocess.TimeoutExpired:  # at most one pool of prompts is lost
            child.kill()
            child.wait()
    with ThreadPoolExecutor() as pool:
        list(pool.map(pack, raw.values()))
    publish(args, *text_files(args))
    for file in text_files(args):
        rows = read_generated(file)[1]
        yield {"text": file.name, "documents": len(rows), "bytes": file.stat().st_size,
               "tokens": sum(len(row["tokens"]) for row in rows)}  # fmt: skip


def pack(file: Path) -> None:
    """Compress a file to FILE.xz. If that exceeds MAX_PACKED_BYTES, drop the last documents."""
    lines = file.read_bytes().splitlines(keepends=True)
    while len(packed := lzma.compress(b"".join(lines), preset=3)) > MAX_PACKED_BYTES:
        lines = lines[: int(0.99 * len(lines) * MAX_PACKED_BYTES / len(packed))]
    write_bytes(file.with_name(f"{file.name}.xz"), packed)


def vocabulary(args: argparse.Namespace) -> Iterator[dict]:
    """Find the most frequent tokens of each kind; both heads predict only these."""
    out, flags = args.work / "vocabulary.json", ["--size", scale(args)["vocabulary"]]
    for file in text_files(args):
        flags += ["--text", f"{file.name.partition('.')[0]}={file}"]
    subprocess.run(distill("vocabulary", args, *flags, "--out", out), check=True)
    for name, language in json.loads(out.read_text())["languages"].items():
        yield {"vocabulary": name, "tokens": len(language["ids"])}


def learn(head: str, args: argparse.Namespace) -> Iterator[dict]:
    """Train for 60 % of the time; the rest is for reading the text and evaluating the head."""
    size, out = scale(args), args.work / head
    flags = ["--generated", *text_files(args), "--vocabulary", args.work / "vocabulary.json",
             "--rows", size["rows"], "--context", size["context"], *HEAD_FLAGS[head],
             "--save-every", 50, "--dtype", size["dtype"], "--out", out]  # fmt: skip
    if args.init:
        flags += ["--init", args.init / head]
    minutes = 0.05 if args.small else round(args.seconds / 100, 2)
    try:
        subprocess.run(distill(head, args, *flags, "--minutes", minutes), check=True,
                       timeout=0.9 * args.seconds)  # fmt: skip
    except subprocess.TimeoutExpired:  # finish with the steps done so far
        command = distill(head, args, *flags, "--steps", counts(out)[0])
        subprocess.run(command, check=True)
    publish(args)
    steps, seconds = counts(out)
    card = (out / "README.md").read_text(encoding="utf-8")
    yield {"head": head, "steps": steps, "minutes of training": seconds / 60}
    yield {"readme": card.replace("# ", "## ", 1)}


def counts(out: Path) -> list[float]:
    """Read the steps and seconds of training so far from the checkpoint."""
    return torch.load(out / CHECKPOINT, "cpu", weights_only=True)["counts"]


def measure(args: argparse.Namespace) -> Iterator[dict]:
    """Measure tokens per pass on Spec-Bench and on held-out text."""
    size = scale(args)
    model, tokenizer = load(size["model"])
    flags = ["--mtp", args.work / "mtp", "--heads", args.work / "medusa", "--prompts",
             size["prompts"], "--methods", "fastmtp k=3,medusa tree=32"]  # fmt: skip
    sources = {"own text": ["--generated", *text_files(args)]}
    if args.questions:
        sources = {"Spec-Bench": ["--questions", args.questions]} | sources
    else:
        yield {"tokens per pass on": "Spec-Bench: not measured; set QUESTIONS to its file"}
    for source, prompts_from in sources.items():
        parsed = bench.parse(list(map(str, ["--model", size["model"], *flags, *prompts_from])))
        methods, rows = bench.methods_of(parsed, model, tokenizer), []
        del methods["autoregressive"]
        for kind, prompts in bench.prompts_of(parsed, model, tokenizer).items():
            runs = {row: [decode(model, tokenizer, prompt, max_new_tokens=size["answer"], **options)
                          for prompt in prompts] for row, options in methods.items()}  # fmt: skip
            rows.append({method: per_pass(runs[method]) for method in methods})
            name = f"{source}, {kind.removesuffix('.jsonl')}"
            yield {"tokens per pass on": name, "prompts": len(prompts)} | rows[-1]
        means = {method: statistics.mean(row[method] for row in rows) for method in methods}
        yield {"tokens per pass on": f"**{source}, mean**"} | means


def publish(args: argparse.Namespace, *files: Path) -> None:
    """Copy files, and all heads trained so far, next to the report."""
    args.out.mkdir(parents=True, exist_ok=True)
    for file in files:
        write_bytes(args.out / file.name, file.read_bytes())
    with atomic_write(args.out / "heads.tar") as partial, tarfile.open(partial, "w") as tar:
        for head in HEAD_FLAGS:
            for file in sorted((args.work / head).glob("*")):
                if file.name != CHECKPOINT:
                    tar.add(file, f"{head}/{file.name}")


def steps_of(args: argparse.Namespace) -> dict[str, Step]:
    share = args.minutes / TOTAL_MINUTES
    steps = {
        "text": Step(205 * share, text), "vocabulary": Step(20 * share, vocabulary),
        "mtp": Step(205 * share, partial(learn, "mtp")),
        "medusa": Step(90 * share, partial(learn, "medusa")), "measure": Step(50 * share, measure),
    }  # fmt: skip
    if args.generated:
        del steps["text"]
    return steps


def tables(results: Results) -> list[str]:
    """Build the tables: text, vocabularies, heads with their cards, tokens per pass."""
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
    parser.add_argument("--generated", nargs="+", type=existing, help="train on this text instead")
    parser.add_argument("--init", type=existing, help="folder of heads to start from")
    main(parser, steps_of, tables)
