"""Certify engines of this folder, `make engine NAME=…` or `make engines`:

    python tests/engines/run.py RESULTS.jsonl [NAME]

Each function runs in its engine's environment, which is built first, and adds one line to the
results; functions that have a report there are left out. NAME selects some. Losses are expected.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS, OLD = ".venv", ".engines/transformers444"
FOUR = ".engines/transformers4:.engines/small4"
ENGINES = [  # the file, the environment, more folders of packages, functions
    ("transformers", OURS, "", "plain assisted"),
    ("transformers_kinds", OURS, "", "prompt_lookup early_exit constant heuristic transient "
                                     "confidence universal"),  # fmt: skip
    ("transformers_kinds", OLD, "", "constant prompt_lookup_with_end"),
    ("transformers_heads", OURS, "", "dflash mtp gemma4"),
    ("vllm", ".engines/vllm", "", "plain ngram draft_greedy draft_probabilistic"),
    ("vllm_heads", ".engines/vllm", ".engines/arctic", "medusa mtp eagle3 suffix"),
    ("vllm_fixed", ".engines/vllm", ".engines/arctic", "ngram draft_greedy draft_probabilistic "
                                                       "medusa mtp eagle3 suffix"),  # fmt: skip
    ("openvino", ".engines/openvino", "", "plain draft_model prompt_lookup"),
    ("ortgenai", ".engines/ortgenai", "", "plain ngram draft_model"),
    ("ctranslate2", ".engines/ctranslate2", "", "plain"),
    ("llamacpp_python", ".engines/llamacpp-python", "", "plain prompt_lookup"),
    ("mistralrs", ".engines/mistralrs", "", "plain"),
    ("mistralrs_draft", ".engines/mistralrs06", "", "plain speculative"),
    ("mlx", ".engines/mlx", "", "plain speculative"),
    ("litgpt", ".engines/litgpt", "", "plain speculative step"),
    ("eagle", OLD, ".engines/eagle", "chain tree"),
    ("medusa", OLD, ".engines/transformers436:.engines/eagle", "medusa"),
    ("lade", OLD, ".engines/transformers434:.engines/eagle", "lookahead"),
    ("flashspec", OURS, ".engines/small", "model batch"),
    ("economize", OURS, ".engines/small", "draft_model lookup medusa_tree mtp"),
    ("specdec", OURS, ".engines/small", "plain speculative"),
    ("seqspecdecod", OURS, ".engines/small", "plain standard naive_hsd capped_hsd"),
    ("speculative_decoding", OURS, ".engines/small", "plain draft same_model prophet"),
    ("mini_infer", OURS, ".engines/pure", "plain prefix_cached speculative"),
    ("csaq", OURS, ".engines/transformers4:.engines/pure", "plain speculative"),
    ("rotalabs", OURS, ".engines/transformers4:.engines/pure", "draft_model tree medusa eagle"),
    ("microgen", OURS, FOUR, "plain speculative speculative_fixed"),
    ("uarc", OURS, FOUR, "plain speculative speculative_fixed backend backend_fixed"),
    ("dejavuu", OURS, FOUR, "plain pld token_recycling token_recycling_tree pld_fixed "
                            "token_recycling_fixed token_recycling_tree_fixed"),  # fmt: skip
    ("naive_speculate", OURS, FOUR, "plain speculative"),
    ("smol_vllm", OURS, FOUR, "released patched fixed"),
    ("llm_samplers", OURS, FOUR, "single batch single_fixed"),
    ("specstream", OURS, FOUR, "streaming streaming_fixed"),
    ("liteinfer", OURS, ".engines/liteinfer", "plain plain_fixed"),
]  # fmt: skip
BASELINES = {  # functions that are compared with the engine's own plain decoding
    ("transformers_heads", "gemma4"): "gemma4_plain", ("csaq", "speculative"): "plain",
    ("llamacpp_python", "prompt_lookup"): "plain", ("mistralrs_draft", "speculative"): "plain",
}  # fmt: skip
SECONDS = 1800  # of one function, with its start


def build(environment: str, folders: str) -> None:
    """Build the environment and the folders of packages, unless they are there."""
    own = {OURS: f"{OURS}/referenced"}
    places = [environment, *filter(None, folders.split(":"))]
    targets = [own.get(place, f"{place}/installed") for place in places]
    # .engines/eagle brings the versions of transformers that it needs
    targets = [target for target in targets if "transformers43" not in target]
    subprocess.run(["make", "-s", *targets], cwd=ROOT, check=True)


def certify(name: str, environment: str, folders: str, function: str) -> dict:
    """Return the certifier's report, or the reason why there is none."""
    file = f"tests/engines/{name}_engine.py"
    command = [f"{environment}/bin/python", "-m", "minispec.certify", "--json", "--impl",
               f"{file}:{function}"]  # fmt: skip
    if baseline := BASELINES.get((name, function)):
        command += ["--baseline", f"{file}:{baseline}"]
    paths = {"PYTHONPATH": f"{folders}:.", "HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": ""}
    try:
        done = subprocess.run(command, cwd=ROOT, env=os.environ | paths, timeout=SECONDS,
                              capture_output=True, text=True)  # fmt: skip
        return json.loads(done.stdout)
    except (subprocess.TimeoutExpired, OSError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def main(results: str, only: str = "") -> None:
    path = Path(results)
    known = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    finished = {result["name"] for result in known if "error" not in result}
    path.parent.mkdir(parents=True, exist_ok=True)
    for name, environment, folders, functions in ENGINES:
        for function in functions.split():
            label = f"{name} {function} ({Path(environment).name})"
            if only not in label or label in finished:
                continue
            build(environment, folders)
            report = certify(name, environment, folders, function)
            with path.open("a") as out:
                print(json.dumps({"name": label} | report), file=out)
            rows = report.get("verdicts", [])
            failed = [f"{v['check']}: {v['case']}" for v in rows if v["passed"] is False]
            summary = report.get("error", f"{len(rows)} rows, {len(failed)} failed")
            print(label, summary, *failed, sep="; ", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
