"""Compare all methods in one process: the speedup of each over plain decoding, and why.

    python -m minispec.bench                                        built-in story beginnings
    python -m minispec.bench --data DIR --kind stories_en           held-out text
    python -m minispec.bench --own chat.jsonl sums.jsonl            documents held out from training
    python -m minispec.bench --questions question.jsonl             Spec-Bench, one table per group
    python -m minispec.bench --shape smollm2-135m --acceptance 0.8  random weights, real model shape
    python -m minispec.bench --shape llama-2-7b --plan --nproc 2    no weights: see plan.py
    torchrun --nproc-per-node 2 -m minispec.bench …                 a model that processes share

For each prompt, the methods run one after another, so noise on the machine affects all of them. A
method's speedup is plain decoding's seconds per token divided by the method's. All prompts are
decoded several times: a prompt's speedup is the median over these repeats, and the median over
prompts is reported with the range. The column ± shows how well the mean over prompts repeats: half
its range over the repeats. Nothing is reported if other processes kept the cores busy. Greedy
output is compared with plain decoding's, token for token. Under torchrun, rank 0's times count.
"""

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TextIO

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from minispec import distributed
from minispec.bench import plan
from minispec.bench.plan import (
    DEFAULT_ACCEPTANCE,
    MODEL_SHAPES,
    Hardware,
    format_bytes,
    make_plan,
    markdown_table,
    pass_work,
    plan_markdown,
    plan_text,
    stored_bytes,
    without_data,
)
from minispec.cache import KVCache
from minispec.checkpoints.fetch import default_model
from minispec.checkpoints.load import load, pick_device, pick_dtype, require_tokenizer
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.cli import (
    OutputFile,
    Parser,
    Source,
    UserError,
    check_package,
    comma_separated,
    command,
    flag_name,
    note,
    number,
    stdout_reserved,
    suggestion,
    writing,
)
from minispec.distill.own_text import read_split
from minispec.fast import optimize, optimize_drafter
from minispec.fast.cost import ROW_COUNTS, cost_curve, draft_cost, interleaved_min_times, one_pass
from minispec.generate import decode
from minispec.generate.api import encode_prompt, unlisted_eos_warning
from minispec.generate.drafters import drafter_of, find_drafter, load_drafter, read_tree_option
from minispec.generate.run import Run, acceptance
from minispec.machine import (
    CpuTimes,
    command_line,
    describe_machine,
    free_memory,
    others_share,
    others_share_now,
    read_cpu_times,
)
from minispec.methods.adaptive import curve_at
from minispec.methods.speculative import speedup, tokens_per_pass
from minispec.model import Config, Transformer
from minispec.training.text import Conversation, LeftOut, encode, held_out_prompts, turn

# written for this benchmark; used when no held-out text is available
PROMPTS = [
    "Once upon a time, there was a small bird who could not fly.",
    "Tom and his sister found an old box under the big tree.",
    "One morning, a rabbit woke up and saw snow for the first time.",
    "Anna had a red kite. She took it to the park with her dad.",
    "There was a boat that was afraid of the water.",
    "Mia wanted to bake a cake for her grandmother, but she had no eggs.",
    "A little dog sat at the window and waited for the rain to stop.",
    "In a quiet village lived a boy who loved to paint stones.",
]
MT_BENCH = set("writing roleplay reasoning math coding extraction stem humanities".split())
Prompts = dict[str, list[list[int]]]  # category of text -> prompts as token ids
Methods = dict[str, dict]  # table row, which starts with the method's name -> the method's options

# ---- the machine ---------------------------------------------------------------------------------

COPY_BYTES, MATMUL_SIZE = 2**28, 2048  # sizes of the copy and of the square product
MAX_OTHERS_SHARE = 0.5  # of the cores, for other processes; above it, speeds are not reported


def measure_machine(model: Transformer, draft: Transformer | None = None) -> dict:
    """Measure what determines the speedups on this machine, as --json prints it. A pass cannot be
    faster than reading its weights once at the bandwidth of a copy, or than doing its
    multiplications at the rate of a large matrix product."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=model.device)
    target = torch.ones_like(source)
    a = torch.ones(MATMUL_SIZE, MATMUL_SIZE, dtype=model.dtype, device=model.device)
    pass_seconds, copy, matmul = interleaved_min_times(
        [one_pass(model, 1), lambda: target.copy_(source)[-1].item(),
         lambda: (a @ a)[-1, -1].item()], turns=5,
    )  # fmt: skip
    hardware = Hardware(2 * COPY_BYTES / copy, 2 * MATMUL_SIZE**3 / matmul)
    work, curve = pass_work(model), cost_curve(model)
    return {
        "pass_seconds": pass_seconds,  # for one token
        "pass_bytes": work.read_bytes,  # by each rank
        "ranks": model.config.ranks,
        "sent_bytes": work.sent_bytes,  # by each rank, per row of a pass
        "cache_bytes_per_token": model.new_cache(1).kv.nbytes,
        "draft_cost": draft_cost(model, draft) if draft else 0.0,  # per token, in such passes
        "memory_floor": work.read_bytes / hardware.bandwidth,  # seconds per pass
        "compute_floor": work.row_flops / hardware.flops,  # seconds per row
        "rows": [n for n in ROW_COUNTS if n < len(curve)],  # where the curve was measured
        "curve": curve,  # pass(n) / pass(1)
        "floor": [hardware.seconds(work, n) / pass_seconds for n in range(len(curve))],
    }


# ---- prompts and methods -------------------------------------------------------------------------


def prompts_of(args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer) -> Prompts:
    """Choose at most --prompts prompts per category, evenly spaced (with --data, the first ones).
    Prompts that exceed the context or that the chat template rejects are left out."""
    left_out = LeftOut()
    if args.questions:
        categories = read_questions(args.questions, tokenizer, left_out)
    elif args.own:
        categories = {}
        for row in read_split(args.own, model, tokenizer)[1]:  # the held-out rows
            categories.setdefault(row["location"][0].stem, []).append(row["prompt"])
    elif args.data:
        categories = held_out_prompts(args.data, args.kind, tokenizer, args.prompts, left_out)
    else:
        categories = {"stories": [tokenizer.encode(text) for text in PROMPTS]}
    for category, prompts in categories.items():
        fitting = [ids for ids in prompts if len(ids) < model.config.context]
        if too_long := len(prompts) - len(fitting):
            note(f"{category}: prompts left out because they exceed the context: {too_long}")
        chosen = fitting[:: max(1, len(fitting) // args.prompts)][: args.prompts]
        categories[category] = [encode_prompt(model, tokenizer, ids) for ids in chosen]
    if not any(categories.values()):
        why = "no document is held out, or none fits in the context"
        raise UserError(f"there are no prompts: {str(left_out) or why}")
    if left_out.reasons:
        note(str(left_out))
    return {category: prompts for category, prompts in categories.items() if prompts}


def read_questions(path: Path, tokenizer: Tokenizer, left_out: LeftOut) -> Prompts:
    """Read the first turn of each Spec-Bench question, as a chat if there is a chat template. Group
    them as Spec-Bench does, in six groups: all of MT-Bench's categories form "multi-turn"."""
    chats: list[tuple[str, Conversation]] = []
    try:
        for i, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
            if line.strip():
                question = json.loads(line)
                category, content = str(question["category"]), str(question["turns"][0])
                chats.append((category, Conversation([turn("user", content)], f"{path} line {i}")))
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise UserError(
            f"--questions {path}: each line must be an object with category and turns ({error})"
        ) from None
    groups: Prompts = {}
    for category, chat in chats:
        group = "multi-turn" if category in MT_BENCH else category
        if prompt := left_out.attempt(chat, encode, tokenizer):
            groups.setdefault(group, []).append(prompt)
    return groups


def methods_of(args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer) -> Methods:
    """Build the table's rows."""
    methods: Methods = {
        "autoregressive": {}, "prompt-lookup": {}, "prompt-lookup k=auto": {"k": "auto"},
        "jacobi": {},
        "lookahead (5,4,5)": {"window": 5, "ngram": 4, "guesses": 5},
        "lookahead (10,5,10)": {"window": 10, "ngram": 5, "guesses": 10},
        "lookahead (15,5,15)": {"window": 15, "ngram": 5, "guesses": 15},
        f"speculative k={args.k}": {"k": args.k}, "speculative k=auto": {"k": "auto"},
        "medusa": {}, "medusa tree=auto": {"tree": "auto"}, "medusa tree=32": {},
        "fastmtp k=2": {"k": 2}, "fastmtp k=3": {"k": 3}, "fastmtp k=auto": {"k": "auto"},
        "hybrid k=3": {"k": 3}, "hybrid k=auto": {"k": "auto"},
    }  # fmt: skip
    method_of = {row: row.split()[0] for row in methods}
    if args.methods is not None:
        requested = {"autoregressive", *args.methods}
        if unknown := requested - set(method_of.values()) - methods.keys():
            names = dict.fromkeys([*method_of.values(), *methods])
            raise UserError(f"--methods {min(unknown)!r}: no such method or row of the table; "
                            f"{suggestion(min(unknown), names)}")  # fmt: skip
        method_of = {row: method for row, method in method_of.items() if {row, method} & requested}
    drafters = drafters_of(args, model, tokenizer, set(method_of.values()))
    if "medusa tree=32" in method_of and "medusa" in drafters:
        heads = drafters["medusa"]["heads"]
        if heads.accuracy is not None or "medusa tree=32" in (args.methods or []):
            tree = read_tree_option("32", heads, model.config.context)
            methods["medusa tree=32"] = {"tree": tree}
        else:  # a tree cannot be grown without accuracies
            del method_of["medusa tree=32"]
    for size in args.vocabulary_sizes:
        subset = {"vocabulary": "none"} if size is None else {"size": size}
        row = f"fastmtp k=3 of {size or 'all'}"
        methods[row] = load_drafter("fastmtp", model, tokenizer, args.mtp, **subset) | {"k": 3}
        method_of[row] = "fastmtp"
    return {row: drafters[m] | methods[row] for row, m in method_of.items() if m in drafters}


def drafters_of(
    args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer, methods: set[str]
) -> Methods:
    """Load what each of the methods drafts with, as its options. Methods with the same drafter
    share it. Without --methods, leave out those whose drafter is not found."""
    sources = {"speculative": args.draft, "medusa": args.heads, "fastmtp": args.mtp}
    loaded: Methods = {}
    drafters: Methods = {}
    for method in sorted(methods):
        try:
            drafter = drafter_of(method, model, args.mtp, args.draft)
            if drafter in sources and sources[drafter] is None:
                sources[drafter] = find_drafter(drafter, model)
        except UserError:
            if args.methods or method == "fastmtp" and args.vocabulary_sizes:
                raise
            continue
        if drafter in sources and drafter not in loaded:
            loaded[drafter] = load_drafter(drafter, model, tokenizer, sources[drafter])
        drafters[method] = loaded.get(drafter, {})
    return drafters


# ---- random weights ------------------------------------------------------------------------------


def random_weights(config: Config, dtype: str = "auto", device: str = "auto") -> Transformer:
    """Make a model of this shape: its text is noise, but its passes cost what real ones do. Ranks
    that share it all have the same shard, so that their embeddings and lm_heads are equal."""
    torch_device, previous_dtype = pick_device(device), torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(pick_dtype(dtype, torch_device))
    try:
        with torch_device:
            model = Transformer(distributed.shard_config(config)).eval()
    finally:
        torch.set_default_dtype(previous_dtype)
    distributed.all_reduce_outputs(model)
    return model


def missing_memory(shape: str, dtype: str, device: str, int8: bool) -> str | None:
    """Why the weights do not fit in memory. None if they do, or if the free memory is unknown."""
    torch_device, processes = pick_device(device), distributed.world.size
    torch_dtype = pick_dtype(dtype, torch_device)
    config = distributed.shard_config(MODEL_SHAPES[shape], processes)
    needed = stored_bytes(without_data(partial(Transformer, config), torch_dtype))
    if torch_device.type == "cpu":
        needed *= processes  # their shards are in the same memory
        needed *= 1 if int8 else 2  # the fastest products may need a copy (see fast/products.py)
    free = free_memory(torch_device)
    if free is None or needed <= free:
        return None
    name = str(torch_dtype).removeprefix("torch.")
    sizes = f"needs up to {format_bytes(needed)}, but {format_bytes(free)} are free"
    return f"{shape} in {name} {sizes}"


class OracleDraft:
    """A draft that costs nothing. It knows the target's output and predicts each of its tokens with
    probability `acceptance`. With a real draft, the speedup is lower by the draft's cost."""

    prefill, prefill_chunks = Transformer.prefill, Transformer.prefill_chunks
    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, model: Transformer, tokens: list[int], acceptance: float):
        self.config = replace(model.config, hidden_size=1)
        wrong = torch.rand(len(tokens), generator=torch.Generator().manual_seed(0)) >= acceptance
        self.predictions = (torch.tensor(tokens) + wrong) % model.config.vocab_size

    def new_cache(self, capacity: int) -> KVCache:
        return KVCache(1, 1, 1, capacity, 1, torch.float32)

    def __call__(self, tokens, cache: KVCache) -> Tensor:
        """Return the position after each token, (1, n, 1), in place of hidden states."""
        return torch.arange(1, len(tokens) + 1)[None, :, None] + cache.length

    def logits(self, hidden: Tensor) -> Tensor:
        positions = hidden.flatten().clamp(max=len(self.predictions) - 1)
        return F.one_hot(self.predictions[positions], self.config.vocab_size).float()


def oracle_methods(args: argparse.Namespace, model: Transformer, prompt: list[int]) -> Methods:
    """Build the rows of --shape: plain decoding, and chains of 1 to 16 draft tokens."""
    plain = decode(model, None, prompt, max_new_tokens=args.max_new_tokens, ignore_eos=True)
    acceptance = DEFAULT_ACCEPTANCE if args.acceptance is None else args.acceptance
    draft = OracleDraft(model, prompt + plain.tokens, acceptance)
    chains = {f"speculative k={k}": {"draft": draft, "k": k} for k in (1, 2, 4, 8, 16)}
    return {"autoregressive": {}} | chains


# ---- running -------------------------------------------------------------------------------------


def measure(
    model: Transformer, tokenizer: Tokenizer | None, methods: Methods, prompts: list, n: int,
    temperature: float = 0.0, others: dict[str, Callable] | None = None,
) -> dict[str, list[Run]]:  # fmt: skip
    """Decode each prompt with every method in turn, which is one repeat of the measurement; return
    table row -> its runs, one per prompt. The first prompt is decoded an extra time beforehand as a
    warm-up. `others` are decoders from other libraries: given a prompt, they return the attributes
    of a Run that the table needs."""
    ours = partial(decode, model, tokenizer, max_new_tokens=n, temperature=temperature)
    decoders = {
        row: partial(ours, method=row.split()[0], **options) for row, options in methods.items()
    } | (others or {})
    _, *by_prompt = [
        {row: decoder(prompt) for row, decoder in decoders.items()}
        for prompt in tqdm([prompts[0], *prompts], unit="prompt")
    ]
    return {row: [runs[row] for runs in by_prompt] for row in decoders}


# ---- statistics, tables and a plot ---------------------------------------------------------------


def seconds_per_token(run: Run) -> float:
    return run.decode_seconds / max(len(run.tokens), 1)


def per_pass(runs: list[Run]) -> float:
    """Tokens per forward pass of the target, over all runs; 0 if the passes were not recorded."""
    passes = sum(len(run.rounds) for run in runs)
    return sum(len(run.tokens) for run in runs) / passes if passes else 0.0


def alpha(runs: list[Run]) -> float | None:
    """Share of tested draft tokens that were accepted. A round stops testing at a rejection."""
    steps = [step for run in runs for step in run.rounds]
    if any(len(step.tree) > max(step.tree.depths) + 1 for step in steps):
        return None  # in a tree, a round also tests siblings
    tested = sum(min(len(step.path), len(step.tree) - 1) for step in steps)
    return sum(len(step.path) - 1 for step in steps) / tested if tested else None


def speedups(plain: list[Run], runs: list[Run]) -> list[float]:
    """Plain decoding's seconds per token divided by the method's, for each prompt."""
    return [seconds_per_token(p) / seconds_per_token(r) for p, r in zip(plain, runs)]


def differing(plain: list[Run], runs: list[Run]) -> int:
    """Count the runs whose tokens differ from plain decoding's."""
    return sum(p.tokens != r.tokens for p, r in zip(plain, runs))


def rows_per_pass(runs: list[Run]) -> float:
    """Mean number of rows in a pass: those of the tree and of lookahead's window."""
    steps = [step for run in runs for step in run.rounds]
    return statistics.mean(len(s.tree) + sum(map(len, s.window)) for s in steps) if steps else 0.0


def timing(plain: list[list[Run]], repeats: list[list[Run]]) -> dict[str, float | None]:
    """Summarise a method's times. Both arguments hold a list per repeat, with a run per prompt."""
    by_repeat = [speedups(*pair) for pair in zip(plain, repeats)]
    by_prompt = list(map(statistics.median, zip(*by_repeat)))
    means = list(map(statistics.mean, by_repeat))
    seconds = [map(seconds_per_token, runs) for runs in repeats]
    return {
        "speedup": statistics.median(by_prompt),
        "mean": statistics.mean(by_prompt),
        "least": min(by_prompt),
        "most": max(by_prompt),
        # how well the mean over prompts repeats
        "half_range": (max(means) - min(means)) / 2 if len(means) > 1 else None,
        "tokens_per_second": 1 / statistics.median(map(statistics.median, zip(*seconds))),
    }


def table_of(
    category: str, temperature: float, repeats: list[dict[str, list[Run]]], machine: dict,
    methods: Methods,
) -> list[dict]:  # fmt: skip
    """Summarise each method over all prompts: the rows of a table, as --json prints them. `repeats`
    come from `measure`. Only times and tokens are taken from all of them, the rest from the first.

    For a draft model, the formula of Leviathan et al. 2023 assumes that a target pass over k + 1
    tokens costs as much as a pass over one. Here, its cost is read from the curve.
    """
    table: list[dict] = []
    plain = [runs["autoregressive"] for runs in repeats]
    curve, c = machine["curve"], machine["draft_cost"]
    for method, its_runs in repeats[0].items():
        its_repeats = [runs[method] for runs in repeats]
        a, rows = alpha(its_runs), rows_per_pass(its_runs)
        options, expected_tokens, expected_speedup = methods.get(method, {}), None, None
        if method.startswith("speculative") and isinstance(options["k"], int) and a is not None:
            k, pass_cost = options["k"], curve_at(curve, options["k"] + 1)
            expected_tokens = tokens_per_pass(a, k)
            expected_speedup = speedup(a, k, c / pass_cost) / pass_cost
        table.append({
            "kind": category,
            "temperature": temperature,
            "method": method,
            "prompts": len(its_runs),
            "repeats": len(repeats),
            **timing(plain, its_repeats),
            "tokens_per_pass": per_pass(its_runs) or None,
            "rows_per_pass": rows,
            "pass_cost": curve_at(curve, round(rows)),  # of a pass over that many rows
            "acceptance": a,  # probability that a tested draft token is accepted
            "by_step": acceptance([s for run in its_runs for s in run.rounds])["conditional"],
            "expected_tokens_per_pass": expected_tokens,
            "expected_speedup": expected_speedup,
            "differing": None if temperature else sum(map(differing, plain, its_repeats)),  # runs
            "extra_parameters": its_runs[0].extra_parameters,
        })  # fmt: skip
    return table


def reason(row: dict) -> str:
    """Explain a speedup in one sentence: what a round yields, what it costs (in steps of plain
    decoding) and, if the method is slower, the main reason."""
    cost = row["tokens_per_pass"] / row["speedup"]
    overhead = cost - row["pass_cost"]  # everything but the target's pass
    why = f"; drafting and accepting account for {overhead:.2f} of them"
    if row["speedup"] >= 1:
        why = ""
    elif row["tokens_per_pass"] < 1.1:
        why = "; almost no draft token is accepted"
    elif row["pass_cost"] - 1 > overhead:
        why = f"; its pass over {row['rows_per_pass']:.0f} rows accounts for {row['pass_cost']:.2f}"
    tokens = f"{row['tokens_per_pass']:.2f} tokens per pass"
    return f"{row['method']}: {tokens}; a round costs {cost:.2f} steps of plain decoding{why}"


def show_machine(machine: dict, model: Transformer) -> None:
    counts, curve, floor = machine["rows"], machine["curve"], machine["floor"]
    parameters = distributed.count_whole(model)
    print(f"{parameters / 1e6:.1f}M parameters, {model.dtype} on {model.device}; "
          f"a pass over one token takes {1e3 * machine['pass_seconds']:.2f} ms")  # fmt: skip
    keys = "pass_bytes", "cache_bytes_per_token", "sent_bytes"
    read, cache, sent = (format_bytes(machine[key]) for key in keys)
    shared = f" and sends {sent} per row on each of {machine['ranks']} ranks"
    shared = shared if machine["ranks"] > 1 else ""
    print(f"a pass reads {read} of weights{shared}; the cache takes {cache} per token")
    print("rows n            " + "".join(f"{n:8}" for n in counts))
    print("pass(n) / pass(1) " + "".join(f"{curve[n]:8.2f}" for n in counts))
    print("pass(n) / floor   " + "".join(f"{curve[n] / floor[n]:8.2f}" for n in counts))


COLUMNS = {  # heading -> cell, filled in from a row
    "speedup": "{speedup}", "(min-max)": "({least}-{most})", "mean": "{mean}", "±": "{half_range}",
    "tokens/s": "{tokens_per_second}", "tokens/pass": "{tokens_per_pass}",
    "acceptance": "{acceptance}",
    "by formula": "{expected_tokens_per_pass}, {expected_speedup}", "differing": "{differing}",
}  # fmt: skip


def show(table: list[dict]) -> None:
    """Print a table and, below it, the reasons."""
    print(f"{'method':<22}" + "".join(f"{heading:>13}" for heading in COLUMNS))
    for row in table:
        texts = {key: format_value(value) for key, value in row.items()}
        cells = [cell.format(**texts) for cell in COLUMNS.values()]
        print(f"{row['method']:<22}" + "".join(f"{cell:>13}" for cell in cells))
    for row in table[1:]:
        if row["tokens_per_pass"]:
            print("  " + reason(row))
    print(flush=True)


def format_value(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def markdown(tables: list[list[dict]], about: dict) -> str:
    """Return one Markdown table of all categories, and the facts needed to judge and repeat it."""
    plain, *methods = zip(*tables)  # the rows of each method, one per category
    lines = [["tokens per pass, relative speed", *(row["kind"] for row in plain), "mean"]]
    for rows in methods:
        figures = [(row["tokens_per_pass"] or 0.0, row["speedup"]) for row in rows]
        figures.append(tuple(map(statistics.mean, zip(*figures))))
        lines.append([f"`{rows[0]['method']}`", *(f"{n:.2f}, {speed:.2f}" for n, speed in figures)])
    text = " ".join(facts(plain, methods, about))
    return "\n\n".join([markdown_table(lines), text, f"    {about['command']}"])


def facts(plain: tuple[dict, ...], methods: list[tuple[dict, ...]], about: dict) -> Iterator[str]:
    """Yield the sentences below a Markdown table."""
    rows, repeats, versions = sum(methods, plain), plain[0]["repeats"], about["versions"]
    rates = ", ".join(f"{row['tokens_per_second']:.1f} ({row['kind']})" for row in plain)
    yield f"Plain decoding generated {rates} tokens/s."
    yield f"{about['processor']} ({about['instructions']}; threads: {about['threads']}),"
    yield f"torch {versions['torch']}, commit {about['commit'] or 'unknown'}, {about['date'][:10]}."
    yield f"Prompts: {sum(row['prompts'] for row in plain)}; repeats: {repeats}."
    if methods:
        least = (f"`{r[0]['method']}` {min(row['least'] for row in r):.2f}" for r in methods)
        yield f"Lowest speedup of a single prompt: {', '.join(least)}."
    if repeats > 1:
        worst = max(row["half_range"] for row in rows)
        yield f"Half the range, over repeats, of a mean over prompts: at most {worst:.2f}."
    if not plain[0]["temperature"]:
        yield f"Outputs that differ from plain decoding's: {sum(r['differing'] for r in rows)}."
    shares = [row["others_share"] for row in plain if row["others_share"] is not None]
    if shares:
        yield f"Other processes used at most {max(shares):.0%} of the cores."


def draw(file: Path, tables: list[list[dict]], machine: dict) -> None:
    """Plot the speedups, with their range over prompts, and the cost curve with its floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained",
                                         width_ratios=[2, 1])  # fmt: skip
    methods, width = [row["method"] for row in tables[0][1:]], 0.8 / len(tables)
    for i, (first, *rows) in enumerate(tables):
        x = [n + (i + 0.5) * width for n in range(len(rows))]
        below, above = ([abs(r["speedup"] - r[end]) for r in rows] for end in ("least", "most"))
        left.bar(x, [r["speedup"] for r in rows], width, yerr=[below, above], ecolor="0.4",
                 label=f"{first['kind']}, T = {first['temperature']:g}")  # fmt: skip
    left.axhline(1, color="0.3", linewidth=1)
    centres = [n + 0.4 for n in range(len(methods))]
    left.set_xticks(centres, methods, rotation=35, ha="right", fontsize=8)
    left.set_ylabel("speedup over plain decoding")
    left.legend(fontsize=7)
    counts = range(1, len(machine["curve"]))
    right.plot(counts, machine["curve"][1:], label="measured")
    right.plot(counts, machine["floor"][1:], "--", color="0.4", label="floor: memory, then compute")
    right.set(xscale="log", xlabel="rows n in a pass", ylabel="pass(n) / pass(1)", ylim=(0, None))
    right.set_xticks(machine["rows"], machine["rows"])
    right.legend(fontsize=8)
    with writing(file):
        figure.savefig(file, dpi=110)


# ---- command line --------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the flags and check them before the weights are read."""
    p = Parser(prog="python -m minispec.bench", description=__doc__)
    p.add_argument("--model", type=Source,
                   help="directory, hub id or .gguf (default: the shipped toy)")  # fmt: skip
    p.add_argument("--draft", type=Source, help="a draft model (default: the one next to the "
                   "model; with --shape, a shape)")  # fmt: skip
    p.add_argument("--heads", type=Source, help="Medusa heads (default: those next to the model)")
    p.add_argument("--mtp", type=Source, help="a FastMTP head (default: the one next to the model)")
    p.add_argument("--methods", type=comma_separated,
                   help="run only these methods or table rows, comma-separated")  # fmt: skip
    text = p.add_mutually_exclusive_group()
    text.add_argument("--data", type=Path, help="a file or folder; its held-out text is used")
    text.add_argument("--own", type=Path, nargs="+", help="files written by distill generate")
    text.add_argument("--questions", type=Path, help="Spec-Bench's question.jsonl")
    p.add_argument("--kind", type=comma_separated,
                   help="with --data: kinds of text, comma-separated (default: all)")  # fmt: skip
    p.add_argument("--prompts", type=number(1), default=20, help="at most this many per category")
    p.add_argument("--repeats", type=number(1), default=3, help="decode everything this many times")
    p.add_argument("--max-new-tokens", type=number(1), default=100)
    p.add_argument("--temperature", default=[0.0], help="one or several, comma-separated",
                   type=lambda text: [number(0, kind=float)(part)
                                      for part in comma_separated(text)])  # fmt: skip
    p.add_argument("--k", type=number(1), default=4, help="draft tokens per round, for speculative")
    p.add_argument("--vocabulary-sizes", default=[], metavar="N,N,…",
                   help="run fastmtp also with N tokens per language; none: with all tokens",
                   type=lambda text: [None if part == "none" else number(1)(part)
                                      for part in comma_separated(text)])  # fmt: skip
    p.add_argument("--dtype", default="auto")
    p.add_argument("--device", default="auto")
    p.add_argument("--quantize", choices=["int8"], help="int8 weights for target and draft")
    p.add_argument("--compile", action="store_true", help="run passes as compiled graphs")
    p.add_argument("--busy", action="store_true", help="measure even if other programs run")
    output = p.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true",
                        help="print one JSON object instead of tables")  # fmt: skip
    output.add_argument("--markdown", action="store_true",
                        help="print one Markdown table of all categories")  # fmt: skip
    p.add_argument("--picture", type=OutputFile, metavar="FILE.png",
                   help="plot speedups and cost curve")  # fmt: skip
    p.add_argument("--shape", choices=list(MODEL_SHAPES), help="random weights in this shape")
    p.add_argument(
        "--acceptance",
        type=number(0, 1, float),
        help=f"with --shape: a draft's accuracy (default: {DEFAULT_ACCEPTANCE})",
    )
    plan.add_flags(p)
    args = p.parse_args(argv)

    def given(*names: str) -> str:
        """Those of these flags that differ from their defaults."""
        changed = [name for name in names if getattr(args, name) != p.get_default(name)]
        return ", ".join(map(flag_name, changed))

    unused = given("model", "methods", "data", "kind", "own", "questions", "temperature", "k",
                   "prompts", "vocabulary_sizes")  # fmt: skip
    planning = given(*plan.FLAGS)
    args.plan = bool(args.shape and (planning or given("draft", "heads", "mtp")))
    hybrid = () if args.mtp is not None else ("hybrid",)  # with a head, it needs no draft
    applies_to = {"draft": ("speculative", *hybrid), "heads": ("medusa",),
                  "mtp": ("fastmtp", "hybrid"), "k": ("speculative",),
                  "vocabulary_sizes": ("fastmtp",)}  # fmt: skip
    measuring = given("device", "compile", "busy", "repeats", "max_new_tokens", "picture")
    for wrong, message in (
        (args.shape and unused, f"--shape has its own weights and prompt; omit {unused}"),
        (planning and not args.shape, f"{planning}: requires --shape"),
        (args.plan and measuring, f"a plan measures nothing; omit {measuring}"),
        (args.acceptance is not None and not args.shape, "--acceptance requires --shape"),
        *((given(name) and args.methods and not any(row.startswith(its) for row in args.methods),
           f"{given(name)} applies to {' and '.join(its)}; add it to --methods or omit the flag")
          for name, its in applies_to.items()),
        (args.kind and not args.data, "--kind requires --data"),
        (args.compile and distributed.world.size > 1, distributed.NOT_COMPILED),
        (args.markdown and len(args.temperature) > 1,
         "--markdown prints one table; choose one --temperature"),
    ):  # fmt: skip
        if wrong:
            raise UserError(message)
    if args.picture:
        check_package("matplotlib", "--picture")
    return args


@command
def main(argv: list[str] | None = None) -> None:
    distributed.join()
    short = None
    with distributed.together():
        args = parse(argv)
        if args.shape and not args.plan:
            short = missing_memory(args.shape, args.dtype, args.device, args.quantize == "int8")
    if short := distributed.all_gather(short)[0]:
        note(f"{short}: nothing is measured; the plan needs no memory")
        args.plan = True
    argv = sys.argv[1:] if argv is None else argv
    command = command_line("minispec.bench", argv, distributed.world.size)
    with stdout_reserved() if args.json else contextlib.nullcontext() as out:
        (print_plan if args.plan else run)(args, command, out)


def print_plan(args: argparse.Namespace, command: str, out: TextIO | None) -> None:
    """Print what --shape would cost and gain on a card, without its weights."""
    planned = make_plan(args)
    if args.json:
        print(json.dumps({"about": describe_machine() | {"command": command}, "plan": planned}),
              file=out)  # fmt: skip
    else:
        print(plan_markdown(planned, command) if args.markdown else plan_text(planned))


def run(args: argparse.Namespace, command: str, out: TextIO | None) -> None:
    """Measure and compare. Tables are printed as they are ready, JSON is written to `out`. If a
    category fails, the Markdown table of those before it is still printed."""
    distributed.join_tensor_parallel()
    share = distributed.from_rank_0(others_share_now)
    check_others(share, "before the measurement", "nothing was measured", args.busy)
    model, tokenizer, categories, methods = prepare(args)
    machine, tables = measure_machine(model, draft_of(methods)), []
    about, as_text = describe_machine() | {"command": command}, not (args.json or args.markdown)
    if as_text:
        show_machine(machine, model)
    try:
        for (category, prompts), t in product(categories.items(), args.temperature):
            once = partial(measure, model, tokenizer, methods, prompts, args.max_new_tokens, t)
            repeats, share = repeat(once, args.repeats)
            check_others(share, f"while {category} (temperature {t:g}) was measured",
                         "its table is omitted", args.busy)  # fmt: skip
            table = table_of(category, t, repeats, machine, methods)
            tables.append([row | {"others_share": share} for row in table])
            if as_text:
                print(f"\n{category}, {len(prompts)} prompts, temperature {t:g}")
                show(tables[-1])
    finally:
        if args.markdown and tables:
            print(markdown(tables, about), flush=True)
    if args.picture and distributed.world.rank == 0:
        draw(args.picture, tables, machine)
    if args.json:
        report = {"about": about, "machine": machine, "rows": sum(tables, [])}
        print(json.dumps(report), file=out)


def prepare(args: argparse.Namespace) -> tuple[Transformer, Tokenizer | None, Prompts, Methods]:
    """Load and optimise the model and its drafters; choose the prompts."""
    if args.shape is None and args.model is None:
        args.model = distributed.from_rank_0(default_model)
    with distributed.together():
        if args.shape:
            shape, tokenizer = MODEL_SHAPES[args.shape], None
            model = random_weights(shape, args.dtype, args.device)
            categories, methods = {args.shape: [list(range(100, 116))]}, {}
        else:
            model, tokenizer = load(args.model, args.dtype, args.device)
            require_tokenizer(tokenizer, model.source)
            categories = prompts_of(args, model, tokenizer)
            methods = methods_of(args, model, tokenizer)
            if unlisted := unlisted_eos_warning(model, tokenizer):
                note(unlisted)
    for network in filter(None, (model, draft_of(methods))):
        optimize(network, int8=args.quantize == "int8", compiled=args.compile)
    for options in methods.values():
        optimize_drafter(options, model)
    if args.shape:
        methods = oracle_methods(args, model, *categories[args.shape])
    return model, tokenizer, categories, methods


def draft_of(methods: Methods) -> Transformer | None:
    """Return the draft model, if there is one. (An OracleDraft costs nothing.)"""
    drafts = (options.get("draft") for options in methods.values())
    return next((draft for draft in drafts if isinstance(draft, Transformer)), None)


def repeat(
    once: Callable[[], dict[str, list[Run]]], times: int
) -> tuple[list[dict[str, list[Run]]], float | None]:
    """Measure several times; return the results and the share of the cores that other processes
    used meanwhile."""
    before = read_own_times()
    repeats = [once() for _ in range(times)]
    after = read_own_times()
    return repeats, distributed.from_rank_0(lambda: others_share(before, after))


def read_own_times() -> CpuTimes:
    """The clocks of this machine. All ranks run on it, so their time counts as ours."""
    times = read_cpu_times()
    return replace(times, own=sum(distributed.all_gather(times.own)))


def check_others(share: float | None, when: str, consequence: str, busy: bool) -> None:
    """Raise UserError if other processes used more than MAX_OTHERS_SHARE of the cores. With --busy,
    print a note instead."""
    if share is None or share <= MAX_OTHERS_SHARE:
        return
    fault = f"{when}, other processes used {share:.0%} of the cores"
    if not busy:
        raise UserError(f"{fault}, so {consequence}; wait until they end, or add --busy")
    note(f"{fault}, so speeds may be wrong")


if __name__ == "__main__":
    main()
