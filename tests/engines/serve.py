"""Start an engine's server, certify it, and stop it (`make engines` builds .engines):

    python tests/engines/serve.py vllm-ngram weights/target [--draft DIR] [flags of certify]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

VLLM = (".engines/vllm/bin/python -m vllm.entrypoints.openai.api_server --model {model} "
        "--port {port} --dtype float32 --enforce-eager")  # fmt: skip
LLAMA = ".engines/llamacpp/build/bin/llama-server -m {model} --port {port} --no-webui -c 8192"
K = {"num_speculative_tokens": 3}
DRAFT = {"method": "draft_model", "model": "{draft}", **K}
VLLMS = {
    "plain": None,
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, **K},
    "draft": {**DRAFT, "draft_sample_method": "probabilistic"}, "draft-greedy": DRAFT,
    "medusa": {**DRAFT, "method": "medusa"}, "mtp": {**DRAFT, "method": "mtp"},
}  # fmt: skip
LLAMAS = {
    "plain": "", "draft": "-md {draft} --spec-type draft-simple",
    "ngram": "--spec-type ngram-simple --spec-ngram-simple-size-n 2 --spec-ngram-simple-size-m 4",
}
CERTIFIED = {"vllm": "--max-model-len 512", "llamacpp": "-np 8 -fa off -ctk f32 -ctv f32"}


@contextmanager
def serving(server: str, model: str, draft: str = "", port: int = 8123,
            more: str = "") -> Iterator[str]:  # fmt: skip
    """The address of a server while it runs; `more` are flags of its own."""
    address = f"http://localhost:{port}"
    if answers(address):
        sys.exit(f"another server answers at {address}: stop it first")
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    engine, _, kind = server.partition("-")
    words = (VLLM if engine == "vllm" else f"{LLAMA} {LLAMAS[kind]}").split()
    if engine == "vllm" and VLLMS[kind]:
        words += ["--speculative-config", json.dumps(VLLMS[kind])]
    if server == "vllm-mtp":
        words += ["--hf-overrides", '{"num_nextn_predict_layers": 1}']
    filled = [("{model}", model), ("{draft}", draft), ("{port}", str(port))]
    for name, value in filled:
        words = [word.replace(name, value) for word in words]
    process = subprocess.Popen(words + more.split(), stdout=subprocess.DEVNULL)
    try:
        while not answers(address):
            if process.poll() is not None:
                sys.exit(f"{server} ended with code {process.returncode}")
            time.sleep(1)
        yield address
    finally:
        process.terminate()
        process.wait()


def answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/v1/models").is_success
    except httpx.HTTPError:
        return False


def vllm_tokens(address: str, model: str, prompt: list[int], n: int) -> list[int]:
    """What vLLM says, greedily, in at most `n` tokens."""
    asked = {"model": model, "prompt": prompt, "max_tokens": n, "temperature": 0,
             "return_token_ids": True}  # fmt: skip
    answer = httpx.post(f"{address}/v1/completions", json=asked, timeout=600).raise_for_status()
    return answer.json()["choices"][0]["token_ids"]


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__)
    servers = [f"vllm-{x}" for x in VLLMS] + [f"llamacpp-{x}" for x in LLAMAS]
    p.add_argument("server", choices=servers)
    p.add_argument("model")
    p.add_argument("--draft", default="", help="a draft, Medusa heads or an MTP head")
    args, flags = p.parse_known_args()
    if not args.draft and args.server.split("-", 1)[1] not in ("plain", "ngram"):
        p.error(f"{args.server} needs --draft")
    more = CERTIFIED[args.server.partition("-")[0]]
    with serving(args.server, args.model, args.draft, more=more) as address:
        asked = ["--server", address, "--model", args.model, *flags]
        code = subprocess.run([sys.executable, "-m", "minispec.certify", *asked]).returncode
    sys.exit(code)
