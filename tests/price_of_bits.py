"""What `--bitwise` costs: plain and speculative decoding with and without it, in one process.

    python tests/price_of_bits.py float32      # or bfloat16; a minute on an idle machine
"""

import json
import sys
import time

import torch

from minispec import load, optimize
from minispec.generate import decode
from minispec.machine import processor

TOKENS, PROMPTS = 64, (0, 12, 24, 50)  # lines of prompts.jsonl: chat, sums, code, summaries
HYBRID = {"method": "hybrid", "tree": "auto"}


def main(dtype: str) -> None:
    models = []
    for bitwise in False, True:
        model, tokenizer = load("smollm2", dtype=dtype, device="cpu")
        optimize(model, bitwise=bitwise)
        models.append(model)
        decode(model, tokenizer, "Hello", max_new_tokens=8, **HYBRID)  # measures the cost of a pass
    with open("weights/smollm2/prompts.jsonl", encoding="utf-8") as file:
        questions = [json.loads(line)["turns"][0] for line in file]
    seconds = {}
    for i in PROMPTS:
        prompt = tokenizer.chat([{"role": "user", "content": questions[i]}])
        for name, options in ("plain", {}), ("hybrid", HYBRID):
            for bitwise, model in enumerate(models):
                begin = time.perf_counter()
                decode(model, tokenizer, prompt, max_new_tokens=TOKENS, ignore_eos=True, **options)
                used = time.perf_counter() - begin
                seconds[name, bitwise] = seconds.get((name, bitwise), 0.0) + used
    print(f"{processor()}, {torch.get_num_threads()} threads, {dtype}")
    for name in "plain", "hybrid":
        times = [seconds[name, bitwise] for bitwise in (0, 1)]
        gains = [seconds["plain", bitwise] / times[bitwise] for bitwise in (0, 1)]
        print(f"{name}: {times[1] / times[0]:.2f} times as long with --bitwise; over plain "
              f"decoding {gains[0]:.2f} without, {gains[1]:.2f} with")  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
