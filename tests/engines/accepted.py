"""Compare the tokens per pass of our heads in vLLM and in minispec, with greedy decoding:

    python tests/engines/accepted.py mtp weights/smollm2/target weights/smollm2/mtp \\
        --generated chat.jsonl

Both draft three tokens, as a chain even with Medusa heads, over the full vocabulary or an EAGLE-3
head's own.
"""

import argparse
import re
import tempfile
from pathlib import Path

import httpx
from serve import serving, vllm_tokens

from minispec import load
from minispec.bench.prompts import prompts_of
from minispec.distill.__main__ import main as distill
from minispec.fast import optimize
from minispec.generate import decode
from minispec.generate.drafters import load_drafter
from minispec.generate.run import acceptance

CHAIN_OF_3 = [(0,), (0, 0), (0, 0, 0)]
p = argparse.ArgumentParser(description=__doc__)
p.add_argument("type", choices=["mtp", "medusa", "eagle3"])
p.add_argument("model")
p.add_argument("heads")
p.add_argument("--generated", type=Path, nargs="+", required=True)
p.add_argument("--prompts", type=int, default=4)
p.add_argument("--max-new-tokens", type=int, default=100)
args = p.parse_args()
args.questions = args.data = None
model, tokenizer = load(args.model, "float32", "cpu")
optimize(model)
method = "fastmtp" if args.type == "mtp" else args.type
vocabulary = None if args.type == "eagle3" else "none"
options = load_drafter(args.type, model, tokenizer, args.heads, vocabulary)
options |= {"tree": CHAIN_OF_3} if args.type == "medusa" else {"k": 3}
prompts = sum(prompts_of(args, model, tokenizer).values(), [])
runs = [
    decode(model, tokenizer, prompt, method, max_new_tokens=args.max_new_tokens, **options)
    for prompt in prompts
]
with tempfile.TemporaryDirectory() as folder:
    as_it_is = args.type == "eagle3"  # vLLM reads such a head
    if not as_it_is:
        distill(["export", "--model", args.model, f"--{args.type}", args.heads, "--dtype",
                 "float32", "--out", folder])  # fmt: skip
    heads = args.heads if as_it_is else folder
    length = f"--max-model-len {min(1024, model.config.context)}"
    with serving(f"vllm-{args.type}", args.model, heads, more=length) as address:
        vllm_answers = [
            vllm_tokens(address, args.model, prompt, args.max_new_tokens) for prompt in prompts
        ]
        metrics = httpx.get(f"{address}/metrics").text


def counters(name: str) -> list[float]:
    values = re.findall(rf"^vllm:spec_decode_num_{name}_total\S* (\S+)$", metrics, re.M)
    return [float(value) for value in values]


vllm = [accepted / sum(counters("drafts")) for accepted in counters("accepted_tokens_per_pos")]
ours = acceptance([step for run in runs for step in run.rounds])["unconditional"]
for name, rates in (("minispec", ours), ("vLLM", vllm)):
    by_position = ", ".join(f"{rate:.3f}" for rate in rates)
    print(f"{name}: {1 + sum(rates):.3f} tokens per pass, acceptance by position: {by_position}")
same = sum(run.tokens == tokens for run, tokens in zip(runs, vllm_answers))
print(f"{same} of {len(runs)} answers are identical")
