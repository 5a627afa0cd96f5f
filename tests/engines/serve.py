"""Start an engine's server, certify it, and stop it (`make engines` builds .engines):

    python tests/engines/serve.py vllm-ngram weights/target [--draft DIR] [flags of certify]

With --bitwise, its plain decoding is the baseline. PRECISION is vLLM's dtype.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx

VLLM_COMMAND = (".engines/vllm/bin/python -m vllm.entrypoints.openai.api_server --model {model} "
                "--port {port} --dtype {precision} --enforce-eager")  # fmt: skip
LLAMACPP = ".engines/llamacpp/build/bin/llama-server --no-webui"
if not os.path.exists(".engines/llamacpp/installed"):
    LLAMACPP = f"{sys.executable} {os.path.dirname(__file__)}/llamacpp_server.py"  # xllamacpp
LLAMACPP_COMMAND = LLAMACPP + " -m {model} --port {port} -c 8192"
K3 = {"num_speculative_tokens": 3}
DRAFT_MODEL = {"method": "draft_model", "model": "{draft}", **K3}
VLLM_MODES = {
    "plain": None,
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, **K3},
    "draft": {**DRAFT_MODEL, "draft_sample_method": "probabilistic"}, "draft-greedy": DRAFT_MODEL,
    "medusa": {**DRAFT_MODEL, "method": "medusa"}, "mtp": {**DRAFT_MODEL, "method": "mtp"},
    "eagle3": {**DRAFT_MODEL, "method": "eagle3"},
}  # fmt: skip
LLAMACPP_DRAFT = "-md {draft} -ctkd f32 -ctvd f32 --spec-type draft-simple"
LLAMACPP_MODES = {
    "plain": "", "draft": LLAMACPP_DRAFT,
    "draft-probabilistic": LLAMACPP_DRAFT + " --spec-draft-sampling probabilistic",
    "ngram": "--spec-type ngram-simple --spec-ngram-simple-size-n 2 --spec-ngram-simple-size-m 4",
    "map": "--spec-type ngram-map-k --spec-ngram-map-k-size-n 2 --spec-ngram-map-k-size-m 4",
    "map4v": "--spec-type ngram-map-k4v --spec-ngram-map-k4v-size-n 2 "
             "--spec-ngram-map-k4v-size-m 4",
    "mod": "--spec-type ngram-mod --spec-ngram-mod-n-match 2 --spec-ngram-mod-n-min 1 "
           "--spec-ngram-mod-n-max 4",
    "cache": "--spec-type ngram-cache",
    "several": "--spec-type ngram-mod,ngram-cache --spec-ngram-mod-n-match 3 "
               "--spec-ngram-mod-n-min 1 --spec-ngram-mod-n-max 4",
}
CERTIFY_FLAGS = {"vllm": "--max-model-len 512", "llamacpp": "-np 8 -t 1 -fa off -ctk f32 -ctv f32"}


@contextmanager
def serving(server: str, model: str, draft: str = "", port: int = 8123,
            more: str = "") -> Iterator[str]:  # fmt: skip
    """Run a server and yield its address; `more` are further flags for it."""
    address = f"http://localhost:{port}"
    if responds(address):
        sys.exit(f"another server is running at {address}; stop it first")
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    engine, _, mode = server.partition("-")
    vllm = engine == "vllm"
    command = (VLLM_COMMAND if vllm else f"{LLAMACPP_COMMAND} {LLAMACPP_MODES[mode]}").split()
    if vllm and VLLM_MODES[mode]:
        command += ["--speculative-config", json.dumps(VLLM_MODES[mode])]
    if server == "vllm-mtp":
        command += ["--hf-overrides", '{"num_nextn_predict_layers": 1}']
    precision = os.environ.get("PRECISION", "float32")
    values = {"{model}": model, "{draft}": draft, "{port}": str(port), "{precision}": precision}
    for name, value in values.items():
        command = [word.replace(name, value) for word in command]
    paths = os.pathsep.join([".engines/xllamacpp", os.environ.get("PYTHONPATH", "")])
    environment = None if vllm else os.environ | {"PYTHONPATH": paths}
    process = subprocess.Popen(command + more.split(), stdout=subprocess.DEVNULL, env=environment)
    try:
        while not responds(address):
            if process.poll() is not None:
                sys.exit(f"{server} exited with code {process.returncode}")
            time.sleep(1)
        yield address
    finally:
        process.terminate()
        process.wait()


def responds(address: str) -> bool:
    try:
        return httpx.get(f"{address}/v1/models").is_success
    except httpx.HTTPError:
        return False


def vllm_tokens(address: str, model: str, prompt: list[int], n: int) -> list[int]:
    """Decode at most `n` tokens greedily with vLLM's server."""
    request = {"model": model, "prompt": prompt, "max_tokens": n, "temperature": 0,
               "return_token_ids": True}  # fmt: skip
    response = httpx.post(f"{address}/v1/completions", json=request, timeout=600).raise_for_status()
    return response.json()["choices"][0]["token_ids"]


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__)
    servers = [f"vllm-{x}" for x in VLLM_MODES] + [f"llamacpp-{x}" for x in LLAMACPP_MODES]
    p.add_argument("server", choices=servers)
    p.add_argument("model")
    p.add_argument("--draft", default="", help="a draft, or heads")
    args, flags = p.parse_known_args()
    engine, _, mode = args.server.partition("-")
    modes = {"vllm": VLLM_MODES, "llamacpp": LLAMACPP_MODES}[engine]
    if "{draft}" in str(modes[mode]) and not args.draft:
        p.error(f"{args.server} needs --draft")
    more = CERTIFY_FLAGS[engine]
    with ExitStack() as servers:
        address = servers.enter_context(serving(args.server, args.model, args.draft, more=more))
        if "--bitwise" in flags:
            plain = serving(f"{engine}-plain", args.model, port=8124, more=more)
            flags += ["--baseline", servers.enter_context(plain)]
        flags = ["--server", address, "--model", args.model, *flags]
        code = subprocess.run([sys.executable, "-m", "minispec.certify", *flags]).returncode
    sys.exit(code)
