"""Every method side by side in one process, against plain decoding, its formula and the machine's
floor; and in words, why a method loses where it loses.

    python -m minispec.bench [--data DIR]

Each prompt is decoded by every method in turn, so that a noisy machine is noisy for all of them;
a method's speedup is the median over prompts of plain decoding's seconds per token over its own;
beside it stands the same ratio of all prompts together (`overall`). Greedy output is compared with
plain decoding's token by token on the way.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from tqdm import tqdm

from minispec.advise import advise
from minispec.checkpoint import load
from minispec.cost import COUNTS, cost_curve, curve_at, floors_and_passes, where_arithmetic_decides
from minispec.errors import Parser, UserError, check_package, command, prepare_folder
from minispec.methods.fastmtp import load_mtp
from minispec.generate import (
    WEIGHTS,
    Run,
    check_vocabularies,
    compile_parts,
    decode,
    earlier_tokens,
    peak_memory,
    read_earlier,
    stream,
)
from minispec.methods.lookahead import memory_of
from minispec.methods.medusa import load_medusa
from minispec.model import Transformer
from minispec.plots import PICTURES, save_plots
from minispec.pretrain import KINDS, distinct_4grams, held_out_prompts
from minispec.questions import answer_questions
from minispec.replay import SHAPES, bench_shape
from minispec.methods.speculative import speedup, tokens_per_pass
from minispec.timing import PARTS, middle_of_turns, per_pass, seconds_per_token, split
from minispec.tokenizer import Tokenizer
from minispec.methods.vocabulary import load_vocabulary

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
Runs = dict[str, list[Run]]  # row of the table -> a run per prompt


@dataclass(frozen=True)
class Row:
    """What one method did over all prompts of a kind at a temperature."""

    kind: str
    temperature: float
    method: str
    speedup: float  # median over prompts
    least: float
    most: float
    overall: float  # the same ratio of all prompts together
    tokens_per_pass: float | None
    over_floor: float  # seconds per token over those of reading each weight once
    split: dict[str, float] | None  # of a round, in seconds: draft, target, accept, commit, host
    alpha: float | None  # chance that a draft that was tried is accepted
    predicted_tokens_per_pass: float | None
    predicted_speedup: float | None
    distinct_4grams: float
    differing: int | None  # prompts whose tokens are not plain decoding's; None under sampling
    extra_parameters: int
    peak_memory_bytes: int | None  # of the process, or of the GPU

    @property
    def round_cost(self) -> float:
        """Of a round, in rounds of plain decoding."""
        return self.tokens_per_pass / self.overall


# ---- running -------------------------------------------------------------------------------------


def measure(
    model: Transformer, tokenizer: Tokenizer, methods: dict[str, dict], prompts: list, n: int,
    temperature: float, repeat: int = 1,
) -> Runs:  # fmt: skip
    """`repeat` runs per prompt of every method, interleaved, of which that of the middle speed
    counts; the first prompt also warms up."""
    runs: Runs = {name: [] for name in methods}
    for i, prompt in enumerate(tqdm([prompts[0], *prompts], unit="prompt")):
        tasks = {
            name: partial(
                decode, model, tokenizer, prompt, name.split()[0], max_new_tokens=n,
                temperature=temperature, **options,
            )
            for name, options in methods.items()
        }  # fmt: skip
        for name, run in middle_of_turns(tasks, repeat if i else 1).items():
            if i:
                runs[name].append(run)
    return runs


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


@dataclass(frozen=True)
class Machine:
    """What decides every speedup here."""

    floor: float  # seconds of reading each weight once, at the speed of a copy
    curve: list[float]  # pass(n) / pass(1)
    pass_seconds: float  # of one token
    draft: float | None  # seconds of a draft model's pass over one token
    row: float | None = None  # seconds of a row's arithmetic, at the speed of a large product

    @classmethod
    def of(cls, model: Transformer, draft: Transformer | None) -> "Machine":
        drafts = [] if draft is None else [draft]
        floor, row, (target, *its) = floors_and_passes(model, *drafts)
        return cls(floor, cost_curve(model), target, its[0] if its else None, row)

    def flat(self, n: int) -> float:
        """Cost of a pass over n rows, in those over one."""
        return curve_at(self.curve, n)


def summarise(
    kind: str, name: str, runs: list[Run], plain: list[Run], machine: Machine, k: int | None = None,
    temperature: float = 0.0, parts: dict[str, float] | None = None,
) -> Row:  # fmt: skip
    """`k` drafts of a model, for the paper's formula, which takes a target pass over k + 1 tokens
    to cost no more than one over 1: here it costs `machine.flat(k + 1)` as much."""
    speeds, a = ratios(plain, runs), alpha(runs)
    expected = predicted = None
    if k and a is not None and machine.draft:
        flat = machine.flat(k + 1)
        expected = tokens_per_pass(a, k)
        predicted = speedup(a, k, machine.draft / (machine.pass_seconds * flat)) / flat
    stats = runs[0].stats
    return Row(
        kind, temperature, name, statistics.median(speeds), min(speeds), max(speeds),
        seconds_per_token(*plain) / seconds_per_token(*runs), per_pass(runs),
        statistics.median(map(seconds_per_token, runs)) / machine.floor, parts, a, expected,
        predicted, statistics.mean(distinct_4grams(r.tokens) for r in runs),
        None if temperature else differing(plain, runs), stats["extra_parameters"],
        peak_memory(runs[0].cache.device),
    )  # fmt: skip


# ---- words and tables ----------------------------------------------------------------------------


def reason(row: Row, plain: Row) -> str:
    """In words, why the method wins or loses: tokens a pass against what a round costs."""
    line = (
        f"{row.method}: {row.tokens_per_pass:.2f} tokens a pass for a round that costs "
        f"{row.round_cost:.2f} plain ones"
    )
    if row.split and plain.split:
        whole = sum(plain.split.values())
        costs = {part: row.split[part] / whole for part in PARTS}
        line += " (" + ", ".join(f"{part} {cost:.2f}" for part, cost in costs.items()) + ")"
        if row.overall < 1:
            grown = {part: costs[part] - plain.split[part] / whole for part in PARTS}
            most = max(grown, key=grown.get)
            line += ": it loses" + (f", {BLAME[most]}" if grown[most] > 0.02 else "")
            if row.tokens_per_pass < 1.3:
                line += "; and hardly a guess is right"
    return line


BLAME = {
    "draft": "as drafting costs too much",
    "target": "as a pass over so many rows costs too much on this machine",
    "accept": "as walking its tree costs too much",
    "commit": "as moving cache rows costs too much",
    "host": "as its own work between the passes costs too much",
}


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def show(rows: list[Row], prompts: int) -> None:
    """One kind's table at one temperature, and the reasons."""
    line = "{:<23}{:>18}{:>9}{:>12}{:>8}  {:<35}{:>6}{:>13}{:>9}{:>7}{:>9}{:>7}"
    print(f"\n{rows[0].kind}, {prompts} prompts, temperature {rows[0].temperature:g}")
    print(line.format("method", "speedup", "overall", "tokens/pass", "/floor",
                      " ms: " + " ".join(PARTS), "alpha", "formula", "distinct", "differ",
                      "extra M", "GiB"))  # fmt: skip
    for r in rows:
        spread = f"{r.speedup:.2f} ({r.least:.2f}-{r.most:.2f})"
        formula = f"{number(r.predicted_tokens_per_pass)}, {number(r.predicted_speedup)}"
        parts = " ".join(f"{1e3 * r.split[p]:6.2f}" for p in PARTS) if r.split else "-"
        memory = number(r.peak_memory_bytes and r.peak_memory_bytes / 2**30)
        print(line.format(
            r.method, spread, f"{r.overall:.2f}", number(r.tokens_per_pass),
            f"{r.over_floor:.1f}", parts, number(r.alpha), formula, number(r.distinct_4grams),
            "-" if r.differing is None else r.differing, f"{r.extra_parameters / 1e6:.2f}", memory,
        ))  # fmt: skip
    for r in [r for r in rows[1:] if r.tokens_per_pass]:
        print("  " + reason(r, rows[0]))
    print(flush=True)


def show_machine(machine: Machine) -> None:
    curve = {n: machine.flat(n) for n in COUNTS[1:] if n < len(machine.curve)}
    print(
        f"a pass over one token takes {1e3 * machine.pass_seconds:.2f} ms, "
        f"{machine.pass_seconds / machine.floor:.2f} of its floor (each weight read once, at the "
        f"speed of a copy, {1e3 * machine.floor:.2f} ms); "
        "pass(n)/pass(1): " + ", ".join(f"{n}: {cost:.2f}" for n, cost in curve.items())
    )
    if machine.row:
        print(where_arithmetic_decides(machine.floor, machine.row, machine.pass_seconds, curve))
    if machine.draft:
        print(f"a draft's pass takes {machine.draft / machine.pass_seconds:.2f} of the target's")


# ---- the methods ---------------------------------------------------------------------------------


def methods_of(
    args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer
) -> dict[str, dict]:
    """Row of the table -> the method's options; the first word is the method's name."""
    wanted = args.methods.split(",") if args.methods else None
    methods = {"autoregressive": {}}
    for name, options in all_methods(args, model, tokenizer, wanted):
        methods[name] = options
    unknown = set(wanted or []) - {name.split()[0] for name in methods}
    if unknown:
        raise UserError(f"--methods {min(unknown)}: not one of the benchmark's, or without weights")
    return methods


def all_methods(
    args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer, wanted: list[str] | None
) -> Iterator[tuple[str, dict]]:
    """Of the methods `wanted` (None: all); only their weights are read."""

    def asked(name: str) -> bool:
        return wanted is None or name in wanted

    if asked("speculative") and args.draft:
        draft, its_tokenizer = load(args.draft, args.dtype, args.device, args.quantize)
        check_vocabularies(tokenizer, its_tokenizer, model, draft)
        for k in dict.fromkeys((args.k, "auto")):
            yield f"speculative k={k}", {"draft": draft, "k": k}
    if asked("prompt-lookup"):
        yield "prompt-lookup", {}
    if asked("medusa") and args.heads:
        heads = load_medusa(args.heads, model, tokenizer)
        yield "medusa", {"heads": heads}
        yield "medusa tree=auto", {"heads": heads, "tree": "auto"}
    if asked("jacobi"):
        yield "jacobi", {}
    if asked("lookahead"):
        for w, n, g in ((5, 4, 5), (10, 5, 10), (15, 5, 15)):
            yield f"lookahead ({w},{n},{g})", {"window": w, "ngram": n, "guesses": g}
    if asked("lookahead-auto"):
        yield "lookahead-auto", {}
        if args.earlier is not None:
            known = memory_of([earlier_tokens(args.earlier, model, tokenizer)])
            yield "lookahead-auto earlier", {"earlier": known}
    if asked("fastmtp") and args.mtp:
        head, file = load_mtp(args.mtp, model, tokenizer), Path(args.mtp) / "vocabulary.json"
        words = load_vocabulary(file, model, tokenizer) if file.exists() else None
        chains = {f"k={k}": {"k": k} for k in (2, 3, 4, "auto")}
        for name, options in (chains | {"tree 8": {"k": 4, "tree": 8}}).items():
            yield f"fastmtp {name}", {"head": head, "vocabulary": words, **options}


# ---- command line --------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = Parser(prog="python -m minispec.bench", description=__doc__.split("\n\n")[0])
    p.add_argument("--model", help=f"default: {WEIGHTS / 'target'}")
    p.add_argument("--draft", default=str(WEIGHTS / "draft"), help="a draft model; '' for none")
    p.add_argument("--heads", default=str(WEIGHTS / "medusa"), help="Medusa heads; '' for none")
    p.add_argument("--mtp", default=str(WEIGHTS / "mtp"), help="FastMTP's head; '' for none")
    p.add_argument("--methods", help="only these, between commas")
    p.add_argument("--data", type=Path, help="a corpus (see pretrain): its held-out text")
    p.add_argument("--kind", default="stories_en", help="with --data: the kind of text, or all")
    p.add_argument("--prompts", type=int, default=20, help="how many at most")
    p.add_argument("--repeat", type=int, default=1, metavar="R",
                   help="runs per prompt and method, of which the middle one counts")  # fmt: skip
    p.add_argument("--earlier", metavar="FILE",
                   help="lookahead-auto once more, its memory filled (before the clock starts) "
                   "from a UTF-8 text: shipped is weights/lookahead/stories_en.txt")  # fmt: skip
    p.add_argument("--max-new-tokens", type=int, default=150)
    p.add_argument("--temperature", help="one or several, between commas (default: 0,0.7)")
    p.add_argument("--k", type=int, default=4, help="drafts of the draft model")
    p.add_argument("--dtype", default="auto")
    p.add_argument("--device", default="auto")
    p.add_argument("--quantize", choices=["int8"], help="int8 weights, of target and draft")
    p.add_argument("--compile", action="store_true", help="passes as compiled graphs")
    p.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    p.add_argument("--plots", type=Path, help="a folder for PNG pictures (matplotlib)")
    p.add_argument("--against", choices=["transformers"], help="its generate, plain and assisted")
    p.add_argument("--advise", action="store_true", help="the K, tree and window to use here")
    p.add_argument("--questions", type=Path, help="Spec-Bench's question.jsonl")
    p.add_argument("--answers", type=Path, help="with --questions: a folder for its answer files")
    p.add_argument("--shape", choices=list(SHAPES), help="random weights of a real model's sizes")
    p.add_argument("--acceptance", type=float, help="with --shape: of its drafts (0.8)")
    p.add_argument("--stored", choices=["bfloat16", "float32"],
                   help="with --shape: how many bits its weights need, as if they had been stored "
                   "in this type (bfloat16, as most checkpoints are)")  # fmt: skip
    return p.parse_args(argv)


def check(args: argparse.Namespace) -> list[float]:
    """Complain before the weights are read; the temperatures."""
    if min(args.prompts, args.max_new_tokens, args.k, args.repeat) < 1:
        raise UserError("--prompts, --max-new-tokens, --k and --repeat must be at least 1")
    if args.acceptance is None:
        args.acceptance = 0.8
    elif not args.shape:
        raise UserError("--acceptance is that of the drafts of --shape: give both, or neither")
    if args.stored and not args.shape:
        raise UserError("--stored is for the random weights of --shape: give both, or neither")
    if not 0 <= args.acceptance <= 1:
        raise UserError(f"--acceptance {args.acceptance}: must be from 0 to 1")
    if args.kind != "stories_en" and args.data is None:
        raise UserError(f"--kind {args.kind} needs --data: the prompts of our own are stories_en")
    for flag, package in (("plots", "matplotlib"), ("against", "transformers")):
        if getattr(args, flag):
            check_package(package, f"--{flag}")
    if args.against and args.quantize:
        raise UserError("--against transformers compares float weights: leave --quantize out")
    check_report(args)
    if args.earlier is not None:
        args.earlier = read_earlier(args.earlier)
    default = "0" if args.questions else "0,0.7"
    try:
        temperatures = [float(part) for part in (args.temperature or default).split(",")]
    except ValueError:
        temperatures = [-1.0]
    if not all(0 <= t < float("inf") for t in temperatures):
        raise UserError(f"--temperature {args.temperature}: must be numbers from 0 on, as 0,0.7")
    if args.questions and len(temperatures) > 1:
        raise UserError("--questions is asked at one temperature")
    if args.against and 0 not in temperatures:
        raise UserError("--against transformers is for greedy decoding: --temperature 0")
    return temperatures


def check_report(args: argparse.Namespace) -> None:
    """A report of its own excludes other flags."""
    given = [f for f in ("shape", "questions", "advise") if getattr(args, f)]
    if len(given) > 1 or (given and (args.plots or args.against or args.repeat > 1)):
        raise UserError(f"--{given[0]} makes a report of its own: give it alone")
    for report, flag, why in (
        ("shape", "methods", "measures chains of drafts"), ("shape", "temperature", "is greedy"),
        ("advise", "temperature", "is greedy"), ("advise", "json", "prints text"),
        ("advise", "earlier", "measures without it"), ("shape", "earlier", "needs no text"),
        ("shape", "data", "needs no text"), ("shape", "model", "makes random weights"),
        ("questions", "earlier", "asks each question afresh"),
        ("questions", "json", "prints text and writes --answers"),
    ):  # fmt: skip
        if getattr(args, report) and getattr(args, flag):
            raise UserError(f"--{report} {why}: leave --{flag} out")
    if (args.questions is None) != (args.answers is None):
        raise UserError("--questions FILE and --answers DIR belong together")
    if args.earlier and args.methods and "lookahead-auto" not in args.methods.split(","):
        raise UserError("--earlier is for lookahead-auto: add it to --methods")
    args.model = args.model or str(WEIGHTS / "target")


@command
def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    temperatures = check(args)
    if args.shape:
        return bench_shape(args)
    if args.plots:
        prepare_folder(args.plots, "--plots", *PICTURES)
    model, tokenizer = load(args.model, args.dtype, args.device, args.quantize)
    if tokenizer is None:
        raise UserError(f"{args.model} has no tokenizer.json")
    methods = methods_of(args, model, tokenizer)
    if args.compile:
        compile_parts(model, {k: v for each in methods.values() for k, v in each.items()})
    if args.questions:
        return answer_questions(args, model, tokenizer, methods, temperatures[0])
    texts = beginnings(args, tokenizer)
    if args.advise:
        return advise(model, tokenizer, methods, texts, args.max_new_tokens)
    drafts = [options["draft"] for options in methods.values() if "draft" in options]
    machine = Machine.of(model, drafts[0] if drafts else None)
    rows = []
    for kind, prompts in texts.items():
        for temperature in temperatures:
            found = table(model, tokenizer, methods, kind, prompts, temperature, machine, args)
            if not args.json:
                show(found, len(prompts))
            rows += found
    report(args, rows, machine)


def beginnings(args: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, list]:
    """Of each kind the prompts: those of --data, else our own."""
    kinds = list(KINDS) if args.kind == "all" else [args.kind]
    if args.data is None:
        return dict.fromkeys(kinds, PROMPTS[: args.prompts])
    return held_out_prompts(args.data, kinds, tokenizer, args.prompts)


def table(
    model: Transformer, tokenizer: Tokenizer, methods: dict[str, dict], kind: str, prompts: list,
    temperature: float, machine: Machine, args: argparse.Namespace,
) -> list[Row]:  # fmt: skip
    """One kind of prompts at one temperature: a row per method, plain decoding's first."""
    runs = measure(
        model, tokenizer, methods, prompts, args.max_new_tokens, temperature, args.repeat
    )
    if args.against and not temperature:
        from minispec.against import transformers_runs

        runs |= transformers_runs(args, model, runs["autoregressive"])
    rows = []
    for name, each in runs.items():
        parts = None
        if name in methods:
            method = name.split()[0]
            begin = partial(
                stream, model, tokenizer, prompts[0], method, temperature=temperature,
                max_new_tokens=args.max_new_tokens, **methods[name],
            )  # fmt: skip
            _, parts = split(method, begin)
        k = args.k if name == f"speculative k={args.k}" else None
        rows.append(
            summarise(kind, name, each, runs["autoregressive"], machine, k, temperature, parts)
        )
    return rows


def report(args: argparse.Namespace, rows: list[Row], machine: Machine) -> None:
    """JSON or the machine's figures; pictures, if asked for."""
    if args.json:
        print(json.dumps({"machine": asdict(machine), "rows": [asdict(row) for row in rows]}))
    else:
        show_machine(machine)
    if args.plots:
        save_plots(args.plots, rows, machine)


if __name__ == "__main__":
    main()
