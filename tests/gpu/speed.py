"""Measure plain decoding against a GPU's memory bandwidth, and every method against plain decoding.

    make gpu                    on a machine with a GPU, under ten minutes
    make gpu ARGS=--small       the same code with small models; also runs on a CPU

SmolLM2 (make smollm2) answers questions and the toy tells stories, with the shipped drafts and
heads. Larger shapes use random weights, untrained Medusa heads, and a draft that is right with
probability 0.8 (`OracleDraft`); they show what a round costs.
"""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from operator import attrgetter
from types import SimpleNamespace

import torch
from steps import ROOT, Results, Step, main, table

from minispec import UserError, load, paths
from minispec.bench import __main__ as bench
from minispec.bench import measure, shapes
from minispec.bench.methods import Methods, methods_of
from minispec.bench.prompts import PROMPTS
from minispec.bench.shapes import pass_work
from minispec.checkpoints.heads import PUBLISHED_TREES
from minispec.fast import optimize, optimize_drafter
from minispec.fast.cost import ROW_COUNTS, capacity_for, interleaved_min_times, one_pass
from minispec.generate import decode
from minispec.generate.run import Run
from minispec.methods.medusa import new_heads
from minispec.model import Transformer
from minispec.training.text import Conversation, encode

TOY = str(paths.TOY)
QUESTIONS = ["Write a short story about a bird that could not fly.",
             "Tom has 12 apples and buys 3 bags of 8 apples each. How many does he have? Explain.",
             "Write a Python function that returns the n-th Fibonacci number."]  # fmt: skip
CHATS = [Conversation([{"role": "user", "content": question}]) for question in QUESTIONS]
TEXTS_OF_MODEL = {"smollm2": CHATS, TOY: PROMPTS[:3]}
WAYS = "graphs", "eager", "compiled"
TREE_ROW, TREE = "medusa tree=64", PUBLISHED_TREES["mc_sim_7b_63"]  # 63 nodes and the root
FIRST_ROW_COUNTS = 1, 8, 64  # rows of the passes measured before the methods
TINY_SIZES = {"hidden_size": 64, "intermediate_size": 96, "layers": 2, "heads": 4, "kv_heads": 2,
              "head_dim": 16, "vocab_size": 256}  # fmt: skip
# a model, its tokenizer, prompts, and methods with their options
Loaded = tuple[Transformer, object, list[list[int]], Methods]


def pretrained(source: str, args: argparse.Namespace) -> Loaded:
    """Load a model, with every method whose draft or heads are found next to it."""
    model, tokenizer = load(source)
    prompts = [encode(text, tokenizer) for text in TEXTS_OF_MODEL[source][: 1 if args.small else 3]]
    methods = methods_of(bench.parse(["--model", source]), model, tokenizer)
    if "medusa" in methods:
        methods[TREE_ROW] = methods["medusa"] | {"tree": TREE}
    return model, tokenizer, prompts, methods


def random_shape(shape: str, args: argparse.Namespace) -> Loaded:
    """Make a model with random weights. The prompt is short because prefill is compiled too."""
    config = shapes.MODEL_SHAPES[shape]
    model = shapes.random_weights(replace(config, **TINY_SIZES) if args.small else config)
    options = SimpleNamespace(max_new_tokens=tokens(args), acceptance=None)
    methods = shapes.oracle_methods(options, model, [1, 2])
    methods["lookahead (15,5,15)"] = {"window": 15, "ngram": 5, "guesses": 15}
    methods[TREE_ROW] = {"heads": new_heads(4, 1, model, shared=True), "tree": TREE}
    return model, None, [[1, 2]], methods


def tokens(args: argparse.Namespace) -> int:
    return 24 if args.small else 64


# ---- steps ---------------------------------------------------------------------------------------


def gpu_tests(args: argparse.Namespace) -> Iterator[dict]:
    """Run the tests marked gpu; on a CPU, only those that compile nothing."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu", "tests/test_gpu.py"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True,
                         env=os.environ | {"GPU_TESTS_DEVICE": device})  # fmt: skip
    print(run.stdout[-3000:], run.stderr[-3000:], flush=True)
    yield {"tests on": device, "result": (run.stdout.strip().splitlines() or ["no output"])[-1]}
    if run.returncode:
        raise RuntimeError(f"pytest exited with code {run.returncode}")


def figures(
    loader: Callable[[argparse.Namespace], Loaded], way: str, args: argparse.Namespace
) -> Iterator[dict]:
    """Measure plain decoding, what it launches, the cost curve, and every method, starting with the
    last: "eager", with "graphs", or "compiled" with graphs."""
    try:
        model, tokenizer, prompts, methods = loader(args)
    except UserError as error:
        yield {"skipped": str(error)}
        return
    drafts = {options["draft"] for options in methods.values() if "draft" in options}
    if way != "eager":
        for network in {model} | {draft for draft in drafts if isinstance(draft, Transformer)}:
            optimize(network, compiled=way == "compiled")
        for options in methods.values():
            optimize_drafter(options, model)
    cache = model.new_cache(capacity_for(model))

    def run(row: str, options: dict, prompt: list[int]) -> Run:
        options = {"method": row.split()[0], "max_new_tokens": tokens(args)} | options
        return decode(model, tokenizer, prompt, **options)

    def runs(row: str, options: dict) -> list[Run]:
        """Decode all prompts twice; return the second runs, which capture no graphs."""
        return [[run(row, options, prompt) for prompt in prompts] for _ in range(2)][1]

    def passes(counts: Iterable[int]) -> Iterator[dict]:
        for n in counts:
            yield {"rows": n, "seconds": interleaved_min_times([one_pass(model, n, cache)])[0]}

    plain = runs("autoregressive", {})
    yield bandwidth(model, plain)
    yield from kernels(partial(run, "autoregressive", {}, prompts[0]))
    yield from passes(FIRST_ROW_COUNTS)
    for row, options in reversed(methods.items()):
        if row != "autoregressive":
            yield {"method": row} | compared(plain, runs(row, options))
    yield from passes(n for n in ROW_COUNTS if n not in FIRST_ROW_COUNTS)


def kernels(run: Callable[[], Run]) -> Iterator[dict]:
    """Profile a run: what a round launches, how long the GPU and the host are busy with it, and the
    most expensive kernels. On a CPU, operators instead of kernels."""
    with torch.profiler.profile() as profiler:
        rounds, seconds = len((profiled := run()).rounds), profiled.decode_seconds
    events = profiler.key_averages()
    on_gpu = [e for e in events if e.device_type != torch.autograd.DeviceType.CPU]
    time_of = attrgetter("self_device_time_total" if on_gpu else "self_cpu_time_total")
    waits = sum(e.self_cpu_time_total for e in events if "Synchronize" in e.key)
    found = sorted(on_gpu or events, key=time_of, reverse=True)
    busy, wall = sum(map(time_of, found)), 1e6 * seconds
    yield {"kernels per round": sum(e.count for e in found) / rounds, "busy": busy / wall,
           "host, ms per round": (wall - waits) / rounds / 1e3}  # fmt: skip
    for e in found[:10]:
        yield {"kernel": e.key[:70].replace("|", "/"), "calls per round": e.count / rounds,
               "ms per round": time_of(e) / rounds / 1e3, "share": time_of(e) / busy}  # fmt: skip


def bandwidth(model: Transformer, plain: list[Run]) -> dict:
    """Compare the bandwidth at which plain decoding reads weights with that of a large copy."""
    size = 2**32 if model.device.type == "cuda" else 2**28
    source = torch.ones(size, dtype=torch.uint8, device=model.device)
    target = torch.ones_like(source)
    copied = 2 * size / interleaved_min_times([lambda: target.copy_(source)[-1].item()])[0]
    weights, seconds = pass_work(model).read_bytes, median_seconds(plain)
    return {
        "type": str(model.dtype).removeprefix("torch."), "weights, GB": weights / 1e9,
        "copy, GB/s": copied / 1e9, "ms per token": 1e3 * seconds, "tokens/s": 1 / seconds,
        "share of copy bandwidth": weights / seconds / copied,
    }  # fmt: skip


def compared(plain: list[Run], runs: list[Run]) -> dict:
    """Compare a method's runs with plain decoding's, prompt by prompt."""
    per_pass, speedup = measure.per_pass(runs), measure.timing([plain], [runs])["speedup"]
    return {
        "tokens per pass": per_pass, "speedup": speedup,
        "cost of a round": per_pass / speedup, "tokens/s": 1 / median_seconds(runs),
        "rows per pass": measure.rows_per_pass(runs), "texts": len(runs),
        "differing": sum(a.tokens != b.tokens for a, b in zip(plain, runs)),
    }  # fmt: skip


def median_seconds(runs: list[Run]) -> float:
    return statistics.median(map(measure.seconds_per_token, runs))


def steps_of(args: argparse.Namespace) -> dict[str, Step]:
    """List the steps: each model with CUDA graphs, in eager mode, and compiled."""
    models = {  # name -> loader, seconds for each of WAYS
        "SmolLM2": (partial(pretrained, "smollm2"), 60, 45, 70),
        "1B": (partial(random_shape, "llama-3.2-1b"), 35, 25, 50),
        "7B": (partial(random_shape, "llama-2-7b"), 60, 35, 60),
        "toy": (partial(pretrained, TOY), 30, 25, 0),
    }
    if args.small:
        del models["SmolLM2"]
    on_gpu = torch.cuda.is_available()
    possible = {"graphs": on_gpu, "eager": True, "compiled": on_gpu or args.compile}
    steps = {"tests": Step(75, gpu_tests)}
    for i, way in enumerate(WAYS):
        for name, (loader, *seconds) in models.items():
            if possible[way] and seconds[i]:
                steps[f"{name}, {way}"] = Step(seconds[i], partial(figures, loader, way))
    return steps


def tables(results: Results) -> list[str]:
    """Build the tables: tests, plain decoding, cost curves, methods."""
    curves: Results = {}
    for step, rows in results.items():
        passes = {row["rows"]: row["seconds"] for row in rows if "rows" in row}
        if 1 in passes:
            ratios = {f"n = {n}": passes[n] / passes[1] for n in ROW_COUNTS if n in passes}
            curves[step] = [{"n = 1, ms": 1e3 * passes[1]} | ratios]
    return [
        table(results, "tests on"), "Plain decoding:\n", table(results, "ms per token"),
        "A round of plain decoding; busy is GPU time over wall time, under a profiler:\n",
        table(results, "busy"), table(results, "kernel"),
        "The cost of a pass over n tokens, relative to one token:\n", table(curves, "n = 1, ms"),
        "All methods; the cost of a round is relative to a step of plain decoding:\n",
        table(results, "method"),
    ]  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="tests/gpu/speed.py", description=__doc__.split("\n")[0])
    parser.add_argument("--compile", action="store_true", help="on a CPU, too; takes minutes")
    main(parser, steps_of, tables)
