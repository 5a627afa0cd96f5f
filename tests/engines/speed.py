"""Our decoding beside transformers', llama.cpp's and vLLM's, of the same weights, in turns, greedy:

    python tests/engines/speed.py weights/smollm2/target GGUF… --own chat.jsonl sums.jsonl

Each prompt goes to every engine before the next one does. The servers wait, idle, for their turn;
where a GGUF file has other numbers than the model, other tokens are no fault.
"""

import argparse
import contextlib
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import httpx
import torch
from serve import serving, vllm_tokens

from minispec import bench, load
from minispec.drafters import load_drafter
from minispec.fast import quicken


def llamacpp(address: str, n: int, prompt: list[int]) -> SimpleNamespace:
    def generate(count: int) -> list[int]:
        asked = {"prompt": prompt, "n_predict": count, "temperature": 0, "cache_prompt": False,
                 "return_tokens": True}  # fmt: skip
        return httpx.post(f"{address}/completion", json=asked, timeout=600).json()["tokens"]

    return bench.timed(generate, n)


def vllm(address: str, name: str, n: int, prompt: list[int]) -> SimpleNamespace:
    return bench.timed(partial(vllm_tokens, address, name, prompt), n)


# without prefix caching, for which the second of two requests would have no prompt to read
ALONE = "--max-model-len 1024 --no-enable-prefix-caching"
p = argparse.ArgumentParser(description=__doc__)
p.add_argument("model")
p.add_argument("gguf", nargs="*", type=Path)
p.add_argument("--own", type=Path, nargs="+", required=True)
p.add_argument("--prompts", type=int, default=4)
p.add_argument("--max-new-tokens", type=int, default=100)
p.add_argument("--compile", action="store_true", help="our passes")
p.add_argument("--json", action="store_true")
args = p.parse_args()
args.questions = args.data = None
n, threads = args.max_new_tokens, torch.get_num_threads()
model, tokenizer = load(args.model, "float32", "cpu")
head = load_drafter("fastmtp", model, tokenizer)
methods = {"autoregressive": {}} | {f"fastmtp k={k}": head | {"k": k} for k in (3, "auto")}
with contextlib.ExitStack() as stack:
    others = bench.transformers_decoders(model, None, n)
    for port, file in enumerate(args.gguf, 8200):
        server = serving("llamacpp-plain", str(file), port=port, more=f"-np 1 -t {threads}")
        others[f"llama.cpp {file.stem}"] = partial(llamacpp, stack.enter_context(server), n)
    if Path(".engines/vllm/installed").exists():
        server = serving("vllm-plain", args.model, port=8199, more=ALONE)
        others["vllm"] = partial(vllm, stack.enter_context(server), args.model, n)
    quicken(model, compiled=args.compile)
    machine, tables = bench.measured(model), []
    for kind, prompts in bench.prompts_of(args, model, tokenizer).items():
        runs = bench.measure(model, tokenizer, methods, prompts, n, others=others)
        tables.append(bench.table_of(kind, 0.0, runs, machine, methods))
        if not args.json:
            print(f"\n{kind}, {len(prompts)} prompts, {threads} threads")
            bench.show(tables[-1])
if args.json:
    print(json.dumps({"machine": machine, "rows": sum(tables, [])}))
