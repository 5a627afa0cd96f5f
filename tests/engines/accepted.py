"""Tokens a pass that heads of ours bring in vLLM, beside what they bring here, greedy:

    python tests/engines/accepted.py mtp weights/smollm2/target weights/smollm2/mtp --own chat.jsonl

vLLM drafts three tokens over the full vocabulary, with Medusa heads a chain; so do we here.
"""

import argparse
import re
import tempfile
from pathlib import Path

import httpx
from serve import serving, vllm_tokens

from minispec import bench, load
from minispec.fast import optimize
from minispec.generate import decode
from minispec.generate.drafters import load_drafter
from minispec.generate.run import acceptance
from minispec.training.distill import main as distill

CHAIN = [(0,), (0, 0), (0, 0, 0)]
p = argparse.ArgumentParser(description=__doc__)
p.add_argument("kind", choices=["mtp", "medusa"])
p.add_argument("model")
p.add_argument("heads")
p.add_argument("--own", type=Path, nargs="+", required=True)
p.add_argument("--prompts", type=int, default=4)
p.add_argument("--max-new-tokens", type=int, default=100)
args = p.parse_args()
args.questions = args.data = None
model, tokenizer = load(args.model, "float32", "cpu")
optimize(model)
method = "fastmtp" if args.kind == "mtp" else "medusa"
options = load_drafter(method, model, tokenizer, args.heads, "none")
options |= {"k": 3} if args.kind == "mtp" else {"tree": CHAIN}
prompts = [each for kind in bench.prompts_of(args, model, tokenizer).values() for each in kind]
runs = [
    decode(model, tokenizer, prompt, method, max_new_tokens=args.max_new_tokens, **options)
    for prompt in prompts
]
with tempfile.TemporaryDirectory() as folder:
    distill(["export", "--model", args.model, f"--{args.kind}", args.heads, "--dtype", "float32",
             "--out", folder])  # fmt: skip
    length = f"--max-model-len {min(1024, model.config.context)}"
    with serving(f"vllm-{args.kind}", args.model, folder, more=length) as address:
        theirs = [vllm_tokens(address, args.model, p, args.max_new_tokens) for p in prompts]
        counts = httpx.get(f"{address}/metrics").text


def counted(name: str) -> list[float]:
    found = re.findall(rf"^vllm:spec_decode_num_{name}_total\S* (\S+)$", counts, re.M)
    return [float(each) for each in found]


vllm = [each / sum(counted("drafts")) for each in counted("accepted_tokens_per_pos")]
ours = acceptance([step for run in runs for step in run.rounds])["unconditional"]
for name, shares in (("ours", ours), ("vLLM", vllm)):
    by_place = ", ".join(f"{share:.3f}" for share in shares)
    print(f"{name}: {1 + sum(shares):.3f} tokens a pass, accepted by position {by_place}")
same = sum(run.tokens == tokens for run, tokens in zip(runs, theirs))
print(f"{same} of {len(runs)} answers are the same")
