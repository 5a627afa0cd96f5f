"""Seconds per token of plain decoding, ours over transformers' `generate`, in one process:

    python tests/speed_of_transformers.py [CHECKPOINT] [--compile]        (`reference` extra)

Rounds are interleaved; the figure is the median of their ratios.
"""

import argparse
import statistics
import time

import torch
import transformers

from minispec import load
from minispec.checkpoint import WEIGHTS
from minispec.fast import quicken
from minispec.generate import decode

transformers.logging.set_verbosity_error()


def main(checkpoint: str, compiled: bool, n: int = 100, rounds: int = 7) -> None:
    model, tokenizer = load(checkpoint, "float32", "cpu")
    quicken(model, compiled=compiled)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    prompt = tokenizer.encode("Once upon a time")
    tokens, ratios, ours_seconds = torch.tensor([prompt]), [], []
    for round_ in range(rounds + 1):  # the first warms up
        begin = time.perf_counter()
        ours = decode(model, tokenizer, prompt, max_new_tokens=n, ignore_eos=True).tokens
        middle = time.perf_counter()
        with torch.no_grad():
            out = theirs.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=n, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        end = time.perf_counter()
        if round_:
            ratios.append((end - middle) / (middle - begin))
            ours_seconds.append(middle - begin)
    same = ours == out[0, len(prompt) :].tolist()
    speed, threads = n / statistics.median(ours_seconds), torch.get_num_threads()
    print(f"minispec {speed:.0f} tokens/s on {threads} threads; same tokens: {same}")
    spread = f"{min(ratios):.2f} to {max(ratios):.2f} in {rounds} rounds"
    print(f"{statistics.median(ratios):.2f} times transformers ({spread})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", nargs="?", default=str(WEIGHTS / "target"))
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    main(args.checkpoint, args.compile)
