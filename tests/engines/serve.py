"""Start an engine's server, certify it, and stop it (`make engines` builds .engines):

    python tests/engines/serve.py vllm-ngram weights/target [--draft DIR] [flags of certify]
"""

import argparse
import json
import os
import subprocess
import sys
import time

import httpx

VLLM = (".engines/vllm/bin/python -m vllm.entrypoints.openai.api_server --model {model} "
        "--port 8123 --dtype float32 --enforce-eager --max-model-len 512")  # fmt: skip
LLAMA = (".engines/llamacpp/build/bin/llama-server -m {model} --port 8123 --no-webui "
         "-np 8 -c 8192 -fa off -ctk f32 -ctv f32")  # float16 by default  # fmt: skip
K = {"num_speculative_tokens": 3}
DRAFT = {"method": "draft_model", "model": "{draft}", **K}
VLLMS = {
    "plain": None,
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, **K},
    "draft": {**DRAFT, "draft_sample_method": "probabilistic"}, "draft-greedy": DRAFT,
    "medusa": {"method": "medusa", "model": "{draft}", **K}, "mtp": {"method": "mtp", **K},
}  # fmt: skip
LLAMAS = {
    "plain": "", "draft": "-md {draft} --spec-type draft-simple",
    "ngram": "--spec-type ngram-simple --spec-ngram-simple-size-n 2 --spec-ngram-simple-size-m 4",
}
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
p = argparse.ArgumentParser(description=__doc__)
p.add_argument("server", choices=[f"vllm-{x}" for x in VLLMS] + [f"llamacpp-{x}" for x in LLAMAS])
p.add_argument("model")
p.add_argument("--draft", help="a draft, or Medusa heads")
args, flags = p.parse_known_args()
engine, _, kind = args.server.partition("-")
words = (VLLM if engine == "vllm" else f"{LLAMA} {LLAMAS[kind]}").split()
if engine == "vllm" and VLLMS[kind]:
    words += ["--speculative-config", json.dumps(VLLMS[kind])]
server = subprocess.Popen([w.replace("{model}", args.model).replace("{draft}", args.draft or "")
                           for w in words], stdout=subprocess.DEVNULL)  # fmt: skip
try:
    while server.poll() is None:
        try:
            httpx.get("http://localhost:8123/v1/models").raise_for_status()
            break
        except httpx.HTTPError:
            time.sleep(1)
    asked = ["--server", "http://localhost:8123", "--model", args.model, *flags]
    sys.exit(subprocess.run([sys.executable, "-m", "minispec.certify", *asked]).returncode)
finally:
    server.terminate()
    server.wait()
