"""Random weights of real models' sizes, with drafts of a chosen acceptance: what the machinery
gains on this machine, where no trained heads are at hand.

The output is decoded plainly first; then it is decoded again with it as the draft, in which each
token is spoiled with probability 1 - acceptance. Such drafts cost nothing, so the speedups are what
a method's own drafting cost is to be taken from.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator

import torch

from minispec.cache import KVCache
from minispec.checkpoint import pick_device, pick_dtype
from minispec.compiled import compile_model
from minispec.cost import (
    bytes_per_pass,
    cost_curve,
    curve_at,
    floors_and_passes,
    where_arithmetic_decides,
)
from minispec.errors import UserError
from minispec.generate import peak_memory
from minispec.model import Config, Transformer, count_parameters
from minispec.sampling import Randomness, Sampling, Seeded, probs
from minispec.methods.speculative import tokens_per_pass
from minispec.tree import Step, Tree
from minispec.verify import accept

# hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary; the context is cut to 2,048
SHAPES = {
    "smollm2-135m": Config(576, 1536, 30, 9, 3, 64, 49152, 2048),
    "qwen2.5-0.5b": Config(896, 4864, 24, 14, 2, 64, 151936, 2048, "qwen2", qkv_bias=True),
    "llama-3.2-1b": Config(2048, 8192, 16, 32, 8, 64, 128256, 2048),
    "llama-2-7b": Config(4096, 11008, 32, 32, 32, 128, 32000, 2048, tied=False),
}
CHAINS = 1, 2, 4, 8, 16  # drafts a round
TURNS = 3  # runs of each chain, plain decoding among them, of which the fastest counts


def random_weights(
    config: Config, dtype: torch.dtype, device: torch.device, quantize: bool = False,
    seed: int = 0, stored: torch.dtype = torch.bfloat16,
) -> Transformer:  # fmt: skip
    """A prepared model of this size, as if its weights had been `stored` so before; its text is
    noise, its passes cost what real ones do."""
    with torch.device("meta"):
        model = Transformer(config)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        weight = torch.empty(parameter.shape, dtype=dtype, device=device)
        if weight.dim() == 1:
            weight.fill_(0.0 if leaf == "bias" else 1.0)
        else:
            weight.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
            weight.copy_(weight.to(stored))
        weight = torch.nn.Parameter(weight, requires_grad=False)
        setattr(model.get_submodule(owner), leaf, weight)
        model.prepare_part(name, quantize)
    return model.eval()


def replayed(
    model: Transformer, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    text: list[int], k: int, acceptance: float, cache: KVCache | None = None,
) -> Iterator[Step]:  # fmt: skip
    """Decode with `k` drafts a round from `text`, the output known beforehand, each of them right
    with the chance `acceptance`."""
    cache = cache or model.new_cache()
    tokens, spoil = list(prompt), random.Random(0)
    model.prefill(tokens[cache.length : -1], cache)
    yield Step()
    while True:
        at = len(tokens) - len(prompt)
        right = text[at : at + min(k, cache.room - 1)]
        other = model.config.vocab_size - 1
        guess = [t if spoil.random() < acceptance else (t + 1) % other for t in right]
        tree = Tree.chain(tokens[-1], guess)
        hidden = model(tree.tokens, cache)
        path, fresh = accept(probs(model.logits(hidden[0]), sampling), tree, randomness)
        cache.commit(path)
        new = tree.tokens_at(path[1:]) + [fresh]
        tokens += new
        yield Step(new, tree, path)


@torch.inference_mode()
def decoded(steps: Iterator[Step], n: int) -> tuple[list[int], int, float]:
    """At least `n` tokens, and the rounds and seconds they took after the prefill."""
    tokens, rounds = next(steps).tokens[:], 0
    begin = time.perf_counter()
    while len(tokens) < n:
        tokens += next(steps).tokens
        rounds += 1
    return tokens, rounds, time.perf_counter() - begin


def bench_shape(args: argparse.Namespace) -> None:
    """The table of one shape: plain decoding against the floor, chains of drafts against it."""
    device = pick_device(args.device)
    dtype = pick_dtype(args.dtype, device)
    before = peak_memory(device) or 0
    stored = args.stored or "bfloat16"  # as most checkpoints are
    if getattr(torch, stored).itemsize > dtype.itemsize:
        narrow = str(dtype).removeprefix("torch.")
        raise UserError(f"--stored {stored} needs --dtype {stored}: {narrow} has fewer bits")
    model = random_weights(
        SHAPES[args.shape], dtype, device, args.quantize is not None, stored=getattr(torch, stored)
    )
    if args.compile:
        compile_model(model)
    prompt, n = list(range(100, 116)), args.max_new_tokens
    capacity = len(prompt) + n + 64

    def run(k: int, text: list[int]) -> tuple[list[int], int, float]:
        steps = replayed(
            model, prompt, Sampling(), Seeded(0), text=text, k=k, acceptance=args.acceptance,
            cache=model.new_cache(capacity),
        )  # fmt: skip
        return decoded(steps, n)

    text, _, _ = run(0, [])  # warms up
    tries = [{k: run(k, text) for k in (0, *CHAINS)} for _ in range(TURNS)]
    least = {k: min((each[k] for each in tries), key=lambda it: it[2]) for k in tries[0]}
    peak, curve = peak_memory(device), cost_curve(model)
    weights = dtype.itemsize * count_parameters(model)
    _, rounds, plain = least[0]
    found = {
        "shape": args.shape, "stored": stored, **machinery(model),
        "tokens_per_second": rounds / plain,
        "memory_over_weights": (peak - before) / weights if peak else None,
        "acceptance": args.acceptance,
    }  # fmt: skip
    found["rows"] = [
        {"k": k, **chain_row(*least[k], args.acceptance, k, plain / rounds, curve),
         "differing": sum(a != b for a, b in zip(least[k][0], text))}
        for k in CHAINS
    ]  # fmt: skip
    print(json.dumps(found) if args.json else described(found))


def chain_row(
    tokens: list[int], rounds: int, seconds: float, acceptance: float, k: int, plain: float,
    curve: list[float],
) -> dict:  # fmt: skip
    """What chains of `k` drafts brought, and what the formula says; `plain` seconds of a round
    without any."""
    expected = tokens_per_pass(acceptance, k)
    return {
        "tokens_per_pass": len(tokens) / rounds,
        "expected_tokens_per_pass": expected,
        "speedup": plain * len(tokens) / seconds,
        "predicted_speedup": expected / curve_at(curve, k + 1),
    }


def machinery(model: Transformer) -> dict:
    """How the model runs here, and what its passes cost."""
    curve, (floor, row, (own,)) = cost_curve(model), floors_and_passes(model)
    return {
        "dtype": str(model.dtype).removeprefix("torch."), "device": str(model.device),
        "int8": model.quantized, "compiled": model.compiled is not None,
        "megabytes_per_pass": bytes_per_pass(model) / 1e6, "floor_ms": 1e3 * floor,
        "row_ms": row and 1e3 * row, "pass_ms": 1e3 * own,
        "curve": {n: curve[n] for n in (2, 4, 8, 16, 32, 64)},
    }  # fmt: skip


def described(found: dict) -> str:
    """The figures as text."""
    curve = ", ".join(f"{n}: {cost:.2f}" for n, cost in found["curve"].items())
    ways = [name for name in ("int8", "compiled") if found[name]]
    kind = ", ".join([found["dtype"], f"stored in {found['stored']}", *ways, found["device"]])
    over, memory = found["memory_over_weights"], ""
    if over is not None:
        memory = f"; making and running it took {over:.2f} times its size in {found['dtype']}"
    lines = [
        f"{found['shape']} ({kind}): {found['megabytes_per_pass']:.0f} MB a pass, read in "
        f"{found['floor_ms']:.1f} ms at the speed of a copy",
        f"pass(1) {found['pass_ms']:.1f} ms, {found['pass_ms'] / found['floor_ms']:.2f} of that; "
        f"pass(n)/pass(1): {curve}",
        f"plain decoding {found['tokens_per_second']:.1f} tokens/s{memory}",
        f"drafts right with chance {found['acceptance']:g}:",
        "  k  tokens/pass  expected  speedup  predicted  differ",
    ]
    if found["row_ms"]:
        least = (found[key] / 1e3 for key in ("floor_ms", "row_ms", "pass_ms"))
        lines.insert(2, where_arithmetic_decides(*least, found["curve"]))
    for row in found["rows"]:
        lines.append(
            f"{row['k']:>3}{row['tokens_per_pass']:>13.2f}{row['expected_tokens_per_pass']:>10.2f}"
            f"{row['speedup']:>9.2f}{row['predicted_speedup']:>11.2f}{row['differing']:>8}"
        )
    return "\n".join(lines)
