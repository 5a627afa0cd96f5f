"""Random weights of real models' sizes, with drafts of a chosen acceptance: what speculation gains
on this machine, where no trained heads are at hand.

The output is decoded plainly first; then it is decoded again with it as the draft, in which each
token is spoiled with probability 1 - acceptance. Such drafts cost nothing: what a method pays for
its own is to be taken off these speedups.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from minispec.cache import KVCache
from minispec.checkpoint import fill, pick_device, pick_dtype, tie
from minispec.methods.adaptive import curve_at
from minispec.methods.speculative import tokens_per_pass
from minispec.model import Config, Transformer
from minispec.sampling import Randomness, Sampling, Seeded, probs
from minispec.tree import Step, Tree
from minispec.verify import accept

if TYPE_CHECKING:
    from minispec.bench import Machine

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
    config: Config, dtype: str | torch.dtype = "auto", device: str | torch.device = "auto",
    seed: int = 0,
) -> Transformer:  # fmt: skip
    """A model of this size: its text is noise, its passes cost what real ones do."""
    device = pick_device(device)
    kind, generator = pick_dtype(dtype, device), torch.Generator(device).manual_seed(seed)
    with torch.device("meta"):
        model = Transformer(config)
    state = {}
    for name, parameter in model.named_parameters():
        weight = torch.ones(parameter.shape, dtype=kind, device=device)
        if weight.dim() == 2:
            weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)
        state[name] = weight
    if config.tied:
        tie(state)
    fill(model, state, "random weights")
    return model.eval()


def replayed(
    model: Transformer, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    text: list[int], k: int, acceptance: float, cache: KVCache | None = None,
) -> Iterator[Step]:  # fmt: skip
    """Decode with `k` drafts a round from `text`, the output known beforehand, each of them right
    with probability `acceptance`."""
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


def bench_shape(args: argparse.Namespace, model: Transformer, machine: "Machine") -> None:
    """The table of one shape: chains of drafts against plain decoding."""
    prompt, n, acceptance = list(range(100, 116)), args.max_new_tokens, args.acceptance

    def run(k: int, text: list[int]) -> tuple[list[int], int, float]:
        steps = replayed(
            model, prompt, Sampling(), Seeded(0), text=text, k=k, acceptance=acceptance,
            cache=model.new_cache(len(prompt) + n + 64),
        )  # fmt: skip
        return decoded(steps, n)

    text, _, _ = run(0, [])  # warms up
    tries = [{k: run(k, text) for k in (0, *CHAINS)} for _ in range(TURNS)]
    least = {k: min((each[k] for each in tries), key=lambda it: it[2]) for k in (0, *CHAINS)}
    speed = n / least[0][2]
    rows = [chain_row(*least[k], text, acceptance, k, speed, machine.curve) for k in CHAINS]
    if args.json:
        found = {"shape": args.shape, "acceptance": acceptance, "machine": asdict(machine),
                 "tokens_per_second": speed, "rows": rows}  # fmt: skip
        print(json.dumps(found))
        return
    print(f"{args.shape}, {model.dtype} on {model.device}: plain decoding {speed:.1f} tokens/s")
    print(f"drafts, each right with probability {acceptance:g}:")
    print("  k  tokens/pass  expected  speedup  predicted  differ")
    for row in rows:
        print("{k:>3}{tokens_per_pass:>13.2f}{expected_tokens_per_pass:>10.2f}{speedup:>9.2f}"
              "{predicted_speedup:>11.2f}{differing:>8}".format(**row))  # fmt: skip


def chain_row(
    tokens: list[int], rounds: int, seconds: float, text: list[int], acceptance: float, k: int,
    plain: float, curve: list[float],
) -> dict:  # fmt: skip
    """What chains of `k` drafts brought, over `plain` tokens per second, and the formula."""
    expected = tokens_per_pass(acceptance, k)
    return {
        "k": k,
        "tokens_per_pass": len(tokens) / rounds,
        "expected_tokens_per_pass": expected,
        "speedup": len(tokens) / seconds / plain,
        "predicted_speedup": expected / curve_at(curve, k + 1),
        "differing": sum(a != b for a, b in zip(tokens, text)),
    }
