"""Every method side by side in one process: what it gains over plain decoding, and why.

    python -m minispec.bench                                        built-in beginnings of stories
    python -m minispec.bench --data DIR --kind stories_en           held-out text
    python -m minispec.bench --own chat.jsonl sums.jsonl            what distill set aside of them
    python -m minispec.bench --questions question.jsonl             Spec-Bench, a table a group
    python -m minispec.bench --shape smollm2-135m --acceptance 0.8  random weights of a real size

Each prompt is decoded by every method in turn, so that a noisy machine is noisy for all of them. A
speedup is the median over prompts of plain decoding's seconds per token over the method's own.
Greedy output is compared with plain decoding's, token for token.
"""

import argparse
import contextlib
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TextIO

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from minispec.cache import KVCache
from minispec.checkpoints.fetch import default_model
from minispec.checkpoints.load import load, needed, pick_device, pick_dtype
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.cost import COUNTS, cost_curve, draft_cost, interleaved_min_times, one_pass
from minispec.errors import (
    Parser,
    UserError,
    check_package,
    check_writable,
    comma_separated,
    command,
    note,
    number,
    stdout_reserved,
)
from minispec.fast import optimize
from minispec.generate import decode
from minispec.generate.api import as_prompt, unlisted_end
from minispec.generate.drafters import found_beside, load_drafter, read_tree_option
from minispec.generate.run import Run, acceptance
from minispec.methods.adaptive import curve_at
from minispec.methods.speculative import speedup, tokens_per_pass
from minispec.model import Config, Transformer, count_parameters
from minispec.training.own_text import read_training
from minispec.training.text import Conversation, LeftOut, encode, held_out_prompts, turn

# beginnings of our own, for where no held-out text is at hand
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
Prompts = dict[str, list[list[int]]]  # kind of text -> token ids
Methods = dict[str, dict]  # row of the table -> options of the method that is its first word

# ---- the machine ---------------------------------------------------------------------------------

COPIED, SIDE = 2**28, 2048  # bytes of the copy that times memory, side of the product for sums


def measured(model: Transformer, draft: Transformer | None = None) -> dict:
    """What decides every speedup here, as --json prints it. No pass can be faster than reading its
    weights once at the speed of a copy, or than its multiplications at the speed of a large
    product."""
    source = torch.ones(COPIED, dtype=torch.uint8, device=model.device)
    target = torch.ones_like(source)
    a = torch.ones(SIDE, SIDE, dtype=model.dtype, device=model.device)
    own, copy, square = interleaved_min_times(
        [one_pass(model, 1), lambda: target.copy_(source)[-1].item(),
         lambda: (a @ a)[-1, -1].item()], turns=5,
    )  # fmt: skip
    sums = count_parameters(model.model.layers) + count_parameters(model.lm_head)
    memory, compute = weights_read(model) * copy / (2 * COPIED), sums * square / SIDE**3
    curve = cost_curve(model)
    return {
        "pass_seconds": own,  # over one token
        "draft_cost": draft_cost(model, draft) if draft else 0.0,  # a token's, in such passes
        "memory_floor": memory,  # seconds, of any pass
        "compute_floor": compute,  # seconds, for each row
        "rows": [n for n in COUNTS if n < len(curve)],  # at which the curve was measured
        "curve": curve,  # pass(n) / pass(1)
        "floor": [max(memory, n * compute) / own for n in range(len(curve))],  # of the curve
    }


def weights_read(model: Transformer) -> int:
    """Bytes that a pass must read: every weight of the blocks and of lm_head, as they are kept."""
    parts = *model.model.layers, model.lm_head
    return sum(t.nbytes for part in parts for t in (*part.parameters(), *part.buffers()))


# ---- what is decoded -----------------------------------------------------------------------------


def prompts_of(args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer) -> Prompts:
    """At most --prompts of each kind of text: every second, third … one, as long as there are
    enough (of --data the first); those longer than the context, and those that the chat template
    refuses, are left out."""
    left_out = LeftOut()
    if args.questions:
        kinds = read_questions(args.questions, tokenizer, left_out)
    elif args.own:
        kinds = {}
        for row in read_training(args.own, model, tokenizer)[1]:  # set aside when they are learnt
            kinds.setdefault(row["place"][0].stem, []).append(row["prompt"])
    elif args.data:
        kinds = held_out_prompts(args.data, args.kind, tokenizer, args.prompts, left_out)
    else:
        kinds = {"stories": [tokenizer.encode(text) for text in PROMPTS]}
    for kind, prompts in kinds.items():
        fit = [ids for ids in prompts if len(ids) < model.config.context]
        if len(fit) < len(prompts):
            n = len(prompts) - len(fit)
            note(f"{kind}: {n} longer than the context, left out")
        chosen = fit[:: max(1, len(fit) // args.prompts)][: args.prompts]
        kinds[kind] = [as_prompt(model, tokenizer, ids) for ids in chosen]
    if not any(kinds.values()):
        why = "the text holds no document that is held out, or none that fits into the context"
        raise UserError(f"there are no prompts: {str(left_out) or why}")
    if left_out.reasons:
        note(str(left_out))
    return {kind: prompts for kind, prompts in kinds.items() if prompts}


def read_questions(path: Path, tokenizer: Tokenizer, left_out: LeftOut) -> Prompts:
    """The first turn of each question of Spec-Bench, as a chat if there is a template, by its six
    groups: the categories, but those of MT-Bench are one, "multi-turn"."""
    chats: list[tuple[str, Conversation]] = []
    try:
        for i, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
            if line.strip():
                question = json.loads(line)
                category, said = str(question["category"]), str(question["turns"][0])
                chats.append((category, Conversation([turn("user", said)], f"{path} line {i}")))
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise UserError(
            f"--questions {path}: must hold objects with category and turns, one a line ({error})"
        ) from None
    kinds: Prompts = {}
    for category, chat in chats:
        group = "multi-turn" if category in MT_BENCH else category
        if prompt := left_out.attempt(chat, encode, tokenizer):
            kinds.setdefault(group, []).append(prompt)
    return kinds


def methods_of(args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer) -> Methods:
    """Without --methods, those that have no draft or heads beside the model are left out."""
    methods: Methods = {
        "autoregressive": {}, "prompt-lookup": {}, "jacobi": {},
        "lookahead (5,4,5)": {"window": 5, "ngram": 4, "guesses": 5},
        "lookahead (10,5,10)": {"window": 10, "ngram": 5, "guesses": 10},
        "lookahead (15,5,15)": {"window": 15, "ngram": 5, "guesses": 15},
        f"speculative k={args.k}": {"k": args.k}, "speculative k=auto": {"k": "auto"},
        "medusa": {}, "medusa tree=auto": {"tree": "auto"}, "medusa tree=32": {},
        "fastmtp k=2": {"k": 2}, "fastmtp k=3": {"k": 3}, "fastmtp k=auto": {"k": "auto"},
    }  # fmt: skip
    named = {row: row.split()[0] for row in methods}
    known = set(named.values())
    if args.methods is not None:
        asked = {"autoregressive", *args.methods}
        if wrong := asked - known - methods.keys():
            raise UserError(f"--methods {min(wrong)}: not one of the benchmark's or of its rows")
        named = {row: each for row, each in named.items() if {row, each} & asked}
    wanted = set(named.values())
    sources = {"speculative": args.draft, "medusa": args.heads, "fastmtp": args.mtp}
    drafters: Methods = {method: {} for method in wanted - sources.keys()}
    for method in sorted(wanted & sources.keys()):
        try:
            source = sources[method] or found_beside(method, model)
        except UserError:
            if args.methods or method == "fastmtp" and args.vocabulary_sizes:
                raise
            continue
        drafters[method] = load_drafter(method, model, tokenizer, source)
        if "medusa tree=32" in named and method == "medusa":
            heads = drafters[method]["heads"]
            if heads.accuracy is not None or "medusa tree=32" in (args.methods or []):
                tree = read_tree_option("32", heads, model.config.context)
                methods["medusa tree=32"] = {"tree": tree}
            else:  # there is nothing to grow it by
                del named["medusa tree=32"]
        for size in args.vocabulary_sizes if method == "fastmtp" else []:
            words = {"vocabulary": "none"} if size is None else {"size": size}
            row = f"fastmtp k=3 of {size or 'all'}"
            methods[row] = load_drafter(method, model, tokenizer, source, **words) | {"k": 3}
            named[row] = method
    return {row: drafters[each] | methods[row] for row, each in named.items() if each in drafters}


# ---- random weights ------------------------------------------------------------------------------

# hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary; the context is cut to 2,048
SHAPES = {
    "smollm2-135m": Config(576, 1536, 30, 9, 3, 64, 49152, 2048),
    "qwen2.5-0.5b": Config(896, 4864, 24, 14, 2, 64, 151936, 2048, "qwen2", qkv_bias=True),
    "llama-3.2-1b": Config(2048, 8192, 16, 32, 8, 64, 128256, 2048),
    "llama-2-7b": Config(4096, 11008, 32, 32, 32, 128, 32000, 2048, tied=False),
}


def random_weights(config: Config, dtype: str = "auto", device: str = "auto") -> Transformer:
    """A model of this size: its text is noise, its passes cost what real ones do."""
    place, before = pick_device(device), torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(pick_dtype(dtype, place))
    try:
        with place:
            return Transformer(config).eval()
    finally:
        torch.set_default_dtype(before)


class OracleDraft:
    """A draft that costs nothing: it knows what the target will say, and each of its tokens is that
    with a chosen probability. What a real draft costs is to be taken off its speedup."""

    prefill, prefill_chunks = Transformer.prefill, Transformer.prefill_chunks
    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, model: Transformer, text: list[int], acceptance: float):
        self.config = replace(model.config, hidden_size=1)
        wrong = torch.rand(len(text), generator=torch.Generator().manual_seed(0)) >= acceptance
        self.guesses = (torch.tensor(text) + wrong) % model.config.vocab_size

    def new_cache(self, capacity: int) -> KVCache:
        return KVCache(1, 1, 1, capacity, 1, torch.float32)

    def __call__(self, tokens, cache: KVCache) -> Tensor:
        """In place of hidden states the position that follows each token, (1, n, 1)."""
        return torch.arange(1, len(tokens) + 1)[None, :, None] + cache.length

    def logits(self, hidden: Tensor) -> Tensor:
        known = self.guesses[hidden.flatten().clamp(max=len(self.guesses) - 1)]
        return F.one_hot(known, self.config.vocab_size).float()


def recited(args: argparse.Namespace, model: Transformer, prompt: list[int]) -> Methods:
    """For --shape: chains of 1 to 16 drafts."""
    plain = decode(model, None, prompt, max_new_tokens=args.max_new_tokens, ignore_eos=True)
    acceptance = 0.8 if args.acceptance is None else args.acceptance
    draft = OracleDraft(model, prompt + plain.tokens, acceptance)
    chains = {f"speculative k={k}": {"draft": draft, "k": k} for k in (1, 2, 4, 8, 16)}
    return {"autoregressive": {}} | chains


# ---- running -------------------------------------------------------------------------------------


def measure(
    model: Transformer, tokenizer: Tokenizer | None, methods: Methods, prompts: list, n: int,
    temperature: float = 0.0, others: dict[str, Callable] | None = None,
) -> dict[str, list[Run]]:  # fmt: skip
    """Row of the table -> a run per prompt, the methods in turn. The first prompt also warms up.
    `others` are decoders that are not ours: of a prompt, what the table needs of a Run."""
    ours = partial(decode, model, tokenizer, max_new_tokens=n, temperature=temperature)
    decoders = {
        row: partial(ours, method=row.split()[0], **options) for row, options in methods.items()
    } | (others or {})
    _, *turns = [
        {row: decoder(prompt) for row, decoder in decoders.items()}
        for prompt in tqdm([prompts[0], *prompts], unit="prompt")
    ]
    return {row: [turn[row] for turn in turns] for row in decoders}


# ---- figures, words and a picture ----------------------------------------------------------------


def seconds_per_token(run: Run) -> float:
    return run.decode_seconds / max(len(run.tokens), 1)


def per_pass(runs: list[Run]) -> float:
    """Tokens per forward pass of the target, over all runs; 0 if its passes are not known."""
    passes = sum(len(run.rounds) for run in runs)
    return sum(len(run.tokens) for run in runs) / passes if passes else 0.0


def alpha(runs: list[Run]) -> float | None:
    """Accepted drafts over tried ones: a round tries those it accepts and the one it rejects."""
    steps = [step for run in runs for step in run.rounds]
    if any(len(step.tree) > max(step.tree.depths) + 1 for step in steps):
        return None  # in a tree a round tries many
    tried = sum(min(len(step.path), len(step.tree) - 1) for step in steps)
    return sum(len(step.path) - 1 for step in steps) / tried if tried else None


def ratios(plain: list[Run], runs: list[Run]) -> list[float]:
    """Of each prompt, plain decoding's seconds per token over the method's own."""
    return [seconds_per_token(p) / seconds_per_token(r) for p, r in zip(plain, runs)]


def differing(plain: list[Run], runs: list[Run]) -> int:
    """How many runs have other tokens than plain decoding."""
    return sum(p.tokens != r.tokens for p, r in zip(plain, runs))


def rows_fed(runs: list[Run]) -> float:
    """Rows of a pass on average: the tree's, and those of a window beside it."""
    steps = [step for run in runs for step in run.rounds]
    return statistics.mean(len(s.tree) + sum(map(len, s.window)) for s in steps) if steps else 0.0


def table_of(
    kind: str, temperature: float, runs: dict[str, list[Run]], machine: dict, methods: Methods
) -> list[dict]:
    """A table's rows, as --json prints them: what each method did over all prompts.

    The formula of Leviathan et al. 2023, for a draft model, takes a target pass over k + 1 tokens
    to cost no more than one over 1: here it costs what the curve says.
    """
    table: list[dict] = []
    plain, curve, c = runs["autoregressive"], machine["curve"], machine["draft_cost"]
    for method, own in runs.items():
        speeds, a, rows = ratios(plain, own), alpha(own), rows_fed(own)
        options, expected, gain = methods.get(method, {}), None, None
        if "draft" in options and isinstance(options["k"], int) and a is not None:
            k, flat = options["k"], curve_at(curve, options["k"] + 1)
            expected, gain = tokens_per_pass(a, k), speedup(a, k, c / flat) / flat
        table.append({
            "kind": kind,
            "temperature": temperature,
            "method": method,
            "speedup": statistics.median(speeds),
            "least": min(speeds),
            "most": max(speeds),
            "tokens_per_second": 1 / statistics.median(map(seconds_per_token, own)),
            "tokens_per_pass": per_pass(own) or None,
            "rows_per_pass": rows,
            "pass_cost": curve_at(curve, round(rows)),  # of a pass over so many rows
            "acceptance": a,  # chance that a draft that was tried is accepted
            "by_step": acceptance([step for run in own for step in run.rounds])["conditional"],
            "expected_tokens_per_pass": expected,
            "expected_speedup": gain,
            "differing": None if temperature else differing(plain, own),  # prompts
            "extra_parameters": own[0].extra_parameters,
        })  # fmt: skip
    return table


def reason(row: dict) -> str:
    """One sentence: what a round brings against what it costs, in passes of plain decoding, and why
    that is not enough."""
    cost = row["tokens_per_pass"] / row["speedup"]
    own = cost - row["pass_cost"]  # of all but the pass
    why = f": drafting and accepting cost {own:.2f} of them"
    if row["speedup"] >= 1:
        why = ""
    elif row["tokens_per_pass"] < 1.1:
        why = ": hardly any guess is right"
    elif row["pass_cost"] - 1 > own:
        why = f": its pass over {row['rows_per_pass']:.0f} rows costs {row['pass_cost']:.2f}"
    brought = f"{row['tokens_per_pass']:.2f} tokens a pass"
    return f"{row['method']}: {brought}, for a round that costs {cost:.2f} plain ones{why}"


def show_machine(machine: dict, model: Transformer) -> None:
    counts, curve, floor = machine["rows"], machine["curve"], machine["floor"]
    print(f"{count_parameters(model) / 1e6:.1f}M parameters, {model.dtype} on {model.device}: a "
          f"pass over one token takes {1e3 * machine['pass_seconds']:.2f} ms")  # fmt: skip
    print("rows n            " + "".join(f"{n:8}" for n in counts))
    print("pass(n) / pass(1) " + "".join(f"{curve[n]:8.2f}" for n in counts))
    print("pass(n) / floor   " + "".join(f"{curve[n] / floor[n]:8.2f}" for n in counts))


COLUMNS = {  # title -> cell, of a row's figures
    "speedup": "{speedup}", "(least-most)": "({least}-{most})", "tokens/s": "{tokens_per_second}",
    "tokens/pass": "{tokens_per_pass}", "accepted": "{acceptance}",
    "formula": "{expected_tokens_per_pass}, {expected_speedup}", "differ": "{differing}",
}  # fmt: skip


def show(table: list[dict]) -> None:
    """The rows, and the reasons."""
    print(f"{'method':<22}" + "".join(f"{title:>13}" for title in COLUMNS))
    for row in table:
        said = {name: figure(value) for name, value in row.items()}
        cells = [cell.format(**said) for cell in COLUMNS.values()]
        print(f"{row['method']:<22}" + "".join(f"{cell:>13}" for cell in cells))
    for row in table[1:]:
        if row["tokens_per_pass"]:
            print("  " + reason(row))
    print(flush=True)


def figure(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def draw(file: Path, tables: list[list[dict]], machine: dict) -> None:
    """One PNG: the speedups, with their spread over prompts, and the cost curve over its floors."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    page, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained",
                                         width_ratios=[2, 1])  # fmt: skip
    methods, width = [row["method"] for row in tables[0][1:]], 0.8 / len(tables)
    for i, (first, *rows) in enumerate(tables):
        at = [n + (i + 0.5) * width for n in range(len(rows))]
        below, above = ([abs(r["speedup"] - r[end]) for r in rows] for end in ("least", "most"))
        left.bar(at, [r["speedup"] for r in rows], width, yerr=[below, above], ecolor="0.4",
                 label=f"{first['kind']}, T = {first['temperature']:g}")  # fmt: skip
    left.axhline(1, color="0.3", linewidth=1)
    middle = [n + 0.4 for n in range(len(methods))]
    left.set_xticks(middle, methods, rotation=35, ha="right", fontsize=8)
    left.set_ylabel("speed over plain decoding")
    left.legend(fontsize=7)
    counts = range(1, len(machine["curve"]))
    right.plot(counts, machine["curve"][1:], label="measured")
    right.plot(counts, machine["floor"][1:], "--", color="0.4", label="floor: memory, then sums")
    right.set(xscale="log", xlabel="rows n of a pass", ylabel="pass(n) / pass(1)", ylim=(0, None))
    right.set_xticks(machine["rows"], machine["rows"])
    right.legend(fontsize=8)
    page.savefig(file, dpi=110)


# ---- command line --------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The flags, checked before the weights are read."""
    p = Parser(prog="python -m minispec.bench", description=__doc__)
    p.add_argument("--model", help="directory, hub id or .gguf (default: the shipped toy)")
    p.add_argument("--draft", help="a draft model (default: the one beside the model)")
    p.add_argument("--heads", help="Medusa heads (default: as --draft)")
    p.add_argument("--mtp", help="FastMTP's head (default: as --draft)")
    p.add_argument("--methods", type=comma_separated,
                   help="only these, or rows of the table, between commas")  # fmt: skip
    text = p.add_mutually_exclusive_group()
    text.add_argument("--data", type=Path, help="a file or folder: its held-out text")
    text.add_argument("--own", type=Path, nargs="+", help="files of distill generate")
    text.add_argument("--questions", type=Path, help="Spec-Bench's question.jsonl")
    p.add_argument("--kind", type=comma_separated,
                   help="with --data: kinds of text, between commas (default: all)")  # fmt: skip
    p.add_argument("--prompts", type=number(1), default=20, help="at most this many of each kind")
    p.add_argument("--max-new-tokens", type=number(1), default=100)
    p.add_argument("--temperature", default=[0.0], help="one or several, between commas",
                   type=lambda text: [number(0, kind=float)(part)
                                      for part in comma_separated(text)])  # fmt: skip
    p.add_argument("--k", type=number(1), default=4, help="drafts of the draft model")
    p.add_argument("--vocabulary-sizes", default=[], metavar="N,N,…",
                   help="fastmtp also with so many tokens of a language; none: with the model's",
                   type=lambda text: [None if part == "none" else number(1)(part)
                                      for part in comma_separated(text)])  # fmt: skip
    p.add_argument("--dtype", default="auto")
    p.add_argument("--device", default="auto")
    p.add_argument("--quantize", choices=["int8"], help="int8 weights, of target and draft")
    p.add_argument("--compile", action="store_true", help="passes as compiled graphs")
    p.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    p.add_argument("--picture", type=Path, metavar="FILE.png", help="speedups and cost curve")
    p.add_argument("--shape", choices=list(SHAPES), help="random weights of a real model's sizes")
    p.add_argument("--acceptance", type=number(0, 1, float), help="with --shape: of its drafts")
    args = p.parse_args(argv)
    own = ("model", "draft", "heads", "mtp", "methods", "data", "kind", "own", "questions",
           "temperature", "k", "prompts", "vocabulary_sizes")  # fmt: skip
    given = [flag for flag in own if getattr(args, flag) != p.get_default(flag)]
    given = ", ".join(f"--{flag.replace('_', '-')}" for flag in given)
    for wrong, message in (
        (args.shape and given, f"--shape has its own weights, prompt and drafts: omit {given}"),
        (args.acceptance is not None and not args.shape, "--acceptance is for --shape: omit it"),
        (args.vocabulary_sizes and "fastmtp" not in " ".join(args.methods or ["fastmtp"]),
         "--vocabulary-sizes is for fastmtp: name it in --methods, or omit it"),
        (args.kind and not args.data, "--kind is of the text of --data: give that as well"),
    ):  # fmt: skip
        if wrong:
            raise UserError(message)
    if args.picture:
        check_package("matplotlib", "--picture")
        check_writable(args.picture, "--picture")
    return args


@command
def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    with stdout_reserved() if args.json else contextlib.nullcontext() as out:
        run(args, out)


def run(args: argparse.Namespace, out: TextIO | None) -> None:
    """Measure and compare; tables are printed as they come, the JSON object goes to `out`."""
    if args.shape:
        model, tokenizer = random_weights(SHAPES[args.shape], args.dtype, args.device), None
        kinds, methods = {args.shape: [list(range(100, 116))]}, {}
    else:
        args.model = default_model() if args.model is None else args.model
        model, tokenizer = load(args.model, args.dtype, args.device)
        needed(tokenizer, model.source)
        kinds = prompts_of(args, model, tokenizer)
        methods = methods_of(args, model, tokenizer)
        if unlisted := unlisted_end(model, tokenizer):
            note(unlisted)
    draft = next((each["draft"] for each in methods.values() if "draft" in each), None)
    for each in filter(None, (model, draft)):
        optimize(each, int8=args.quantize == "int8", compiled=args.compile)
    if args.shape:
        methods = recited(args, model, *kinds[args.shape])
    machine, tables = measured(model, draft), []
    if not args.json:
        show_machine(machine, model)
    for (kind, prompts), t in product(kinds.items(), args.temperature):
        runs = measure(model, tokenizer, methods, prompts, args.max_new_tokens, t)
        tables.append(table_of(kind, t, runs, machine, methods))
        if not args.json:
            print(f"\n{kind}, {len(prompts)} prompts, temperature {t:g}")
            show(tables[-1])
    if args.picture:
        draw(args.picture, tables, machine)
    if args.json:
        print(json.dumps({"machine": machine, "rows": sum(tables, [])}), file=out)


if __name__ == "__main__":
    main()
