"""Compare our speed with transformers', llama.cpp's and vLLM's, with the same weights, greedily:

    python tests/engines/speed.py weights/smollm2/target GGUF… --generated chat.jsonl sums.jsonl

For each prompt, the engines run one after another; a server is idle until its turn. A GGUF file
whose weights are rounded, as in F16 or Q4_1, may yield different tokens.
"""

import argparse
import contextlib
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import httpx
import torch
from serve import serving, vllm_tokens

from minispec import load
from minispec.bench.measure import measure, measure_machine, table_of
from minispec.bench.prompts import prompts_of
from minispec.bench.tables import show
from minispec.checkpoints.gguf import find_gguf
from minispec.fast import optimize
from minispec.generate.drafters import find_drafter, with_drafter
from minispec.model import Transformer


def timed(generate: Callable[[int], list[int]], n: int) -> SimpleNamespace:
    """Time another library's decoder; return the attributes of a Run that the table needs. Prefill
    yields the first token, so the time of the others is measured and scaled to all tokens."""
    start = time.perf_counter()
    generate(1)
    middle = time.perf_counter()
    tokens = generate(n)
    decoding = max(time.perf_counter() - middle - (middle - start), 1e-9)
    seconds = decoding * len(tokens) / max(len(tokens) - 1, 1)
    return SimpleNamespace(tokens=tokens, decode_seconds=seconds, rounds=[], extra_parameters=0)


def transformers_decoders(model: Transformer, n: int) -> dict:
    """Set up transformers' greedy `generate`: plain, with prompt lookup, and, if there is a draft
    next to the model, with that draft as its assistant model."""
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()

    def read(source: Path):
        folder, options = source, {}
        if file := find_gguf(source):
            folder, options = file.parent, {"gguf_file": file.name}
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype, **options)
        return loaded.to(model.device)

    def decoder(options: dict, prompt: list[int]) -> SimpleNamespace:
        ids = torch.tensor([prompt], device=model.device)

        def generate(count: int) -> list[int]:
            out = target.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count,
                pad_token_id=0, eos_token_id=list(model.config.eos_ids) or None, **options,
            )  # fmt: skip
            return out[0, len(prompt) :].tolist()

        return timed(generate, n)

    target = read(model.source)
    options = {"transformers": {}, "transformers, lookup": {"prompt_lookup_num_tokens": 4}}
    if draft := find_drafter("draft", model):
        options["transformers, assisted"] = {"assistant_model": read(draft)}
    return {row: partial(decoder, options[row]) for row in options}


def llamacpp(address: str, n: int, prompt: list[int]) -> SimpleNamespace:
    def generate(count: int) -> list[int]:
        request = {"prompt": prompt, "n_predict": count, "temperature": 0, "cache_prompt": False,
                   "return_tokens": True}  # fmt: skip
        return httpx.post(f"{address}/completion", json=request, timeout=600).json()["tokens"]

    return timed(generate, n)


def vllm(address: str, name: str, n: int, prompt: list[int]) -> SimpleNamespace:
    return timed(partial(vllm_tokens, address, name, prompt), n)


# with prefix caching, the second of the two timed requests would skip prefill
VLLM_FLAGS = "--max-model-len 1024 --no-enable-prefix-caching"


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("model")
    p.add_argument("gguf", nargs="*", type=Path)
    p.add_argument("--generated", type=Path, nargs="+",
                   help="held-out text (default: story beginnings)")  # fmt: skip
    p.add_argument("--prompts", type=int, default=4)
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--max-new-tokens", type=int, default=100)
    p.add_argument("--compile", action="store_true", help="compile our passes")
    p.add_argument("--json", action="store_true")
    args = p.parse_args(argv)
    args.questions = args.data = None
    n, threads = args.max_new_tokens, torch.get_num_threads()
    model, tokenizer = load(args.model, "float32", "cpu")
    head = with_drafter("fastmtp", model, tokenizer, {})
    methods = {"autoregressive": {}} | {f"fastmtp k={k}": head | {"k": k} for k in (3, "auto")}
    with contextlib.ExitStack() as stack:
        others = transformers_decoders(model, n)
        for port, file in enumerate(args.gguf, 8200):
            server = serving("llamacpp-plain", str(file), port=port, more=f"-np 1 -t {threads}")
            others[f"llama.cpp {file.stem}"] = partial(llamacpp, stack.enter_context(server), n)
        if Path(".engines/vllm/installed").exists():
            server = serving("vllm-plain", args.model, port=8199, more=VLLM_FLAGS)
            others["vllm"] = partial(vllm, stack.enter_context(server), args.model, n)
        optimize(model, compiled=args.compile)
        machine, tables = measure_machine(model), []
        for kind, prompts in prompts_of(args, model, tokenizer).items():
            repeats = [
                measure(model, tokenizer, methods, prompts, n, others=others)
                for _ in range(args.repeats)
            ]
            tables.append(table_of(kind, 0.0, repeats, machine))
            if not args.json:
                print(f"\n{kind}, {len(prompts)} prompts, {threads} threads")
                show(tables[-1])
    if args.json:
        print(json.dumps({"machine": machine, "rows": sum(tables, [])}))


if __name__ == "__main__":
    main()
