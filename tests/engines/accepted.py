"""Tokens a pass that exported heads bring in vLLM, beside ours on the same prompts, greedy:

    python -m minispec.distill export --model smollm2 --mtp weights/smollm2/mtp \
        --dtype float32 --out HEAD
    python tests/engines/accepted.py vllm-mtp weights/smollm2/target HEAD --own chat.jsonl

vLLM drafts three tokens over the full vocabulary, with Medusa heads a chain; so do we here.
"""

import argparse
import re
from pathlib import Path

import httpx
from serve import serving

from minispec import bench, load
from minispec.drafters import load_drafter
from minispec.fast import quicken
from minispec.generate import decode
from minispec.run import acceptance

CHAIN = [(0,), (0, 0), (0, 0, 0)]
p = argparse.ArgumentParser(description=__doc__)
p.add_argument("server", choices=["vllm-mtp", "vllm-medusa"])
p.add_argument("model")
p.add_argument("heads", help="as export wrote them, with --dtype float32")
p.add_argument("--own", type=Path, nargs="+", required=True)
p.add_argument("--prompts", type=int, default=4)
p.add_argument("--max-new-tokens", type=int, default=100)
args = p.parse_args()
args.questions = args.data = None
model, tokenizer = load(args.model, "float32", "cpu")
quicken(model)
method = args.server.replace("vllm-mtp", "fastmtp").replace("vllm-medusa", "medusa")
options = load_drafter(method, model, tokenizer)
options |= {"k": 3, "vocabulary": None} if method == "fastmtp" else {"tree": CHAIN}
prompts = [each for kind in bench.prompts_of(args, model, tokenizer).values() for each in kind]
runs = [
    decode(model, tokenizer, prompt, method, max_new_tokens=args.max_new_tokens, **options)
    for prompt in prompts
]
more = f"--max-model-len {min(1024, model.config.context)}"
with serving(args.server, args.model, args.heads, more=more) as address:
    same = 0
    for prompt, run in zip(prompts, runs):
        asked = {"model": args.model, "prompt": prompt, "max_tokens": args.max_new_tokens,
                 "temperature": 0, "return_token_ids": True}  # fmt: skip
        answer = httpx.post(f"{address}/v1/completions", json=asked, timeout=600).json()
        same += answer["choices"][0]["token_ids"] == run.tokens
    counts = httpx.get(f"{address}/metrics").text


def counted(name: str) -> list[float]:
    found = re.findall(rf"^vllm:spec_decode_num_{name}_total\S* (\S+)$", counts, re.M)
    return [float(each) for each in found]


theirs = [each / sum(counted("drafts")) for each in counted("accepted_tokens_per_pos")]
ours = acceptance([step for run in runs for step in run.rounds])["unconditional"]
for name, shares in (("ours", ours), ("vLLM", theirs)):
    by_place = ", ".join(f"{share:.3f}" for share in shares)
    print(f"{name}: {1 + sum(shares):.3f} tokens a pass, accepted by position {by_place}")
print(f"{same} of {len(runs)} answers are the same")
