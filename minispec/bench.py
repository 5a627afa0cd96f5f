"""Every method side by side in one process, against plain decoding, its formula and the machine's
floor; and in words, why a method loses where it loses.

    python -m minispec.bench [--data DIR]

Each prompt is decoded by every method in turn, so that a noisy machine is noisy for all of them. A
method's speedup is the median over prompts of plain decoding's seconds per token over its own; the
same ratio of all prompts together is `overall`. Greedy output is compared with plain decoding's.
"""

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from minispec.against import transformers_runs
from minispec.checkpoint import WEIGHTS, load
from minispec.cost import COUNTS, cost_curve, least_in_turn, one_pass
from minispec.drafters import load_drafter
from minispec.errors import Parser, UserError, check_package, command, prepare_folder
from minispec.fast import quicken
from minispec.generate import Run, decode, stream
from minispec.heads import load_medusa
from minispec.methods.adaptive import curve_at
from minispec.methods.speculative import speedup, tokens_per_pass
from minispec.model import Transformer
from minispec.plots import PICTURES, save_plots
from minispec.questions import answer_questions
from minispec.replay import SHAPES, bench_shape, random_weights
from minispec.sampling import Sampling
from minispec.text import distinct_4grams, held_out_prompts
from minispec.timing import PARTS, middle_of_turns, per_pass, seconds_per_token, split
from minispec.tokenizer import Tokenizer

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

# ---- the machine ---------------------------------------------------------------------------------

COPIED = 2**28  # bytes of the copy by which memory is timed


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a large copy."""
    source = torch.ones(COPIED, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return 2 * COPIED / least_in_turn([lambda: target.copy_(source)[-1].item()], turns=5)[0]


def bytes_per_pass(model: Transformer) -> int:
    """What a pass over one token must read: every weight of the blocks and of lm_head, as kept."""
    parts = *model.model.layers, model.lm_head
    return sum(t.nbytes for part in parts for t in (*part.parameters(), *part.buffers()))


@dataclass(frozen=True)
class Machine:
    """What decides every speedup here."""

    floor: float  # seconds of reading each weight once, at the speed of a copy
    curve: list[float]  # pass(n) / pass(1)
    pass_seconds: float  # of one token
    draft: float | None = None  # seconds of a draft model's pass over one token

    @classmethod
    def of(cls, model: Transformer, *drafts: Transformer) -> "Machine":
        """Measured now, with at most one draft."""
        floor = bytes_per_pass(model) / copy_bandwidth(model.device)
        own, *its = least_in_turn([one_pass(each, 1) for each in (model, *drafts)], turns=5)
        return cls(floor, cost_curve(model), own, *its)


# ---- running -------------------------------------------------------------------------------------


def measure(
    model: Transformer, tokenizer: Tokenizer, methods: dict[str, dict], prompts: list, n: int,
    temperature: float, repeat: int = 1,
) -> dict[str, list[Run]]:  # fmt: skip
    """Row of the table -> a run per prompt: of `repeat` runs, in turn with the other methods', the
    one of middle speed. The first prompt also warms up."""
    runs: dict[str, list[Run]] = {name: [] for name in methods}
    for i, prompt in enumerate(tqdm([prompts[0], *prompts], unit="prompt")):
        tasks = {
            name: partial(decode, model, tokenizer, prompt, name.split()[0], max_new_tokens=n,
                          temperature=temperature, **options)
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


def summarise(
    kind: str, name: str, runs: list[Run], plain: list[Run], machine: Machine, k: int | None = None,
    temperature: float = 0.0, parts: dict[str, float] | None = None,
) -> Row:  # fmt: skip
    """`k` drafts of a model, for the paper's formula, which takes a target pass over k + 1 tokens
    to cost no more than one over 1: here it costs what the curve says."""
    speeds, a = ratios(plain, runs), alpha(runs)
    expected = predicted = None
    if k and a is not None and machine.draft:
        flat = curve_at(machine.curve, k + 1)
        expected = tokens_per_pass(a, k)
        predicted = speedup(a, k, machine.draft / (machine.pass_seconds * flat)) / flat
    return Row(
        kind, temperature, name, statistics.median(speeds), min(speeds), max(speeds),
        seconds_per_token(*plain) / seconds_per_token(*runs), per_pass(runs),
        statistics.median(map(seconds_per_token, runs)) / machine.floor, parts, a, expected,
        predicted, statistics.mean(distinct_4grams(r.tokens) for r in runs),
        None if temperature else differing(plain, runs), runs[0].stats["extra_parameters"],
    )  # fmt: skip


def table(
    model: Transformer, tokenizer: Tokenizer, methods: dict[str, dict], kind: str, prompts: list,
    temperature: float, machine: Machine, args: argparse.Namespace,
) -> list[Row]:  # fmt: skip
    """One kind of prompts at one temperature: a row per method, plain decoding's first."""
    n, rows = args.max_new_tokens, []
    runs = measure(model, tokenizer, methods, prompts, n, temperature, args.repeat)
    plain = runs["autoregressive"]
    if args.against and not temperature:
        runs |= transformers_runs(args, model, plain)
    for name, each in runs.items():
        parts, method = None, name.split()[0]
        if name in methods:
            begin = partial(stream, model, tokenizer, prompts[0], method, max_new_tokens=n,
                            temperature=temperature, **methods[name])  # fmt: skip
            _, parts = split(method, begin)
        k = args.k if name == f"speculative k={args.k}" else None
        rows.append(summarise(kind, name, each, plain, machine, k, temperature, parts))
    return rows


# ---- words and tables ----------------------------------------------------------------------------


def reason(row: Row, plain: Row) -> str:
    """In words, why the method wins or loses: tokens a pass against what a round costs."""
    line = (f"{row.method}: {row.tokens_per_pass:.2f} tokens a pass for a round that costs "
            f"{row.tokens_per_pass / row.overall:.2f} plain ones")  # fmt: skip
    if row.split and plain.split:
        whole = sum(plain.split.values())
        costs = ", ".join(f"{part} {row.split[part] / whole:.2f}" for part in PARTS)
        grown = {part: (row.split[part] - plain.split[part]) / whole for part in PARTS}
        most, lost = max(grown, key=grown.get), row.overall < 1 and max(grown.values()) > 0.02
        line += f" ({costs})" + (f": it loses most by {most}" if lost else "")
    return line + ("; hardly a guess is right" if row.tokens_per_pass < 1.1 else "")


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def columns(r: Row) -> dict[str, str]:
    """Titles and cells of a line of the table."""
    formula = f"{number(r.predicted_tokens_per_pass)}, {number(r.predicted_speedup)}"
    return {
        "method": r.method, "speedup": f"{r.speedup:.2f} ({r.least:.2f}-{r.most:.2f})",
        "overall": number(r.overall), "tokens/pass": number(r.tokens_per_pass),
        "/floor": number(r.over_floor),
        **{f"{part} ms": number(r.split and 1e3 * r.split[part]) for part in PARTS},
        "alpha": number(r.alpha), "formula": formula, "distinct": number(r.distinct_4grams),
        "differ": "-" if r.differing is None else str(r.differing),
        "extra M": number(r.extra_parameters / 1e6),
    }  # fmt: skip


def show(rows: list[Row], prompts: int) -> None:
    """One kind's table at one temperature, and the reasons."""
    print(f"\n{rows[0].kind}, {prompts} prompts, temperature {rows[0].temperature:g}")
    titles = list(columns(rows[0]))
    lines = [titles, *(list(columns(row).values()) for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines)]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths)))
    for row in rows[1:]:
        if row.tokens_per_pass:
            print("  " + reason(row, rows[0]))
    print(flush=True)


def show_machine(machine: Machine) -> None:
    own, floor = machine.pass_seconds, machine.floor
    curve = [f"{n}: {machine.curve[n]:.2f}" for n in COUNTS[1:] if n < len(machine.curve)]
    print(f"a pass over one token takes {1e3 * own:.2f} ms, {own / floor:.2f} of its floor (each "
          f"weight read once, at the speed of a copy, {1e3 * floor:.2f} ms); "
          "pass(n)/pass(1): " + ", ".join(curve))  # fmt: skip
    if machine.draft:
        print(f"a draft's pass takes {machine.draft / own:.2f} of the target's")


# ---- command line --------------------------------------------------------------------------------


def methods_of(
    args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer
) -> dict[str, dict]:
    """Row of the table -> options of the method that is its first word; weights of methods that
    nobody asked for are not read."""
    methods: dict[str, dict] = {"autoregressive": {}, "prompt-lookup": {}, "jacobi": {}}
    for w, n, g in ((5, 4, 5), (10, 5, 10), (15, 5, 15)):
        methods[f"lookahead ({w},{n},{g})"] = {"window": w, "ngram": n, "guesses": g}
    beside = {"speculative": args.draft, "medusa": args.heads, "fastmtp": args.mtp}
    known = {name.split()[0] for name in methods} | {name for name in beside if beside[name]}
    wanted = set(args.methods.split(",")) if args.methods else known
    if wanted - known:
        name = min(wanted - known)
        raise UserError(f"--methods {name}: not one of the benchmark's, or without weights")
    if "speculative" in wanted:
        draft = load_drafter("speculative", model, tokenizer, args.draft)["draft"]
        methods |= {f"speculative k={k}": {"draft": draft, "k": k} for k in (args.k, "auto")}
    if "medusa" in wanted:
        heads = {"heads": load_medusa(args.heads, model, tokenizer)}
        methods |= {"medusa": heads, "medusa tree=auto": heads | {"tree": "auto"}}
    if "fastmtp" in wanted:
        head = load_drafter("fastmtp", model, tokenizer, args.mtp)
        methods |= {f"fastmtp k={k}": head | {"k": k} for k in (2, 3, 4, "auto")}
    wanted.add("autoregressive")
    return {name: options for name, options in methods.items() if name.split()[0] in wanted}


def parser() -> Parser:
    p = Parser(prog="python -m minispec.bench", description=__doc__.split("\n\n")[0])
    p.add_argument("--model", default=str(WEIGHTS / "target"), help="default: the shipped target")
    p.add_argument("--draft", default=str(WEIGHTS / "draft"), help="a draft model; '' for none")
    p.add_argument("--heads", default=str(WEIGHTS / "medusa"), help="Medusa heads; '' for none")
    p.add_argument("--mtp", default=str(WEIGHTS / "mtp"), help="FastMTP's head; '' for none")
    p.add_argument("--methods", help="only these, between commas")
    p.add_argument("--data", type=Path, help="a corpus (see pretrain): its held-out text")
    p.add_argument("--kind", default="stories_en", help="with --data: the kind of text, or all")
    p.add_argument("--prompts", type=int, default=20, help="how many at most")
    p.add_argument("--repeat", type=int, default=1, help="runs of each, of which the middle counts")
    p.add_argument("--max-new-tokens", type=int, default=150)
    p.add_argument("--temperature", default="0,0.7", help="one or several, between commas")
    p.add_argument("--k", type=int, default=4, help="drafts of the draft model")
    p.add_argument("--dtype", default="auto")
    p.add_argument("--device", default="auto")
    p.add_argument("--quantize", choices=["int8"], help="int8 weights, of target and draft")
    p.add_argument("--compile", action="store_true", help="passes as compiled graphs")
    p.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    p.add_argument("--plots", type=Path, help="a folder for PNG pictures (matplotlib)")
    p.add_argument("--against", choices=["transformers"], help="its generate, plain and assisted")
    p.add_argument("--questions", type=Path, help="Spec-Bench's question.jsonl")
    p.add_argument("--answers", type=Path, help="with --questions: a folder for its answer files")
    p.add_argument("--shape", choices=list(SHAPES), help="random weights of a real model's sizes")
    p.add_argument("--acceptance", type=float, default=0.8, help="with --shape: of its drafts")
    return p


UNUSED = {  # reports of their own, and the flags they have no use for
    "shape": "model draft heads mtp methods data kind prompts repeat temperature k plots against "
             "questions answers",
    "questions": "data kind repeat json plots against",
}  # fmt: skip


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The flags, checked before the weights are read."""
    p = parser()
    args = p.parse_args(argv)
    given = [flag for flag, value in vars(args).items() if value != p.get_default(flag)]
    for report, unused in UNUSED.items():
        wrong = [flag for flag in given if report in given and flag in unused.split()]
        if wrong:
            raise UserError(f"--{report} has no use for --{wrong[0]}: leave it out")
    if min(args.prompts, args.max_new_tokens, args.k, args.repeat) < 1:
        raise UserError("--prompts, --max-new-tokens, --k and --repeat must be at least 1")
    if not 0 <= args.acceptance <= 1 or ("acceptance" in given and not args.shape):
        raise UserError(f"--acceptance {args.acceptance}: goes with --shape, and from 0 to 1")
    if "kind" in given and args.data is None:
        raise UserError(f"--kind {args.kind} needs --data: the prompts of our own are stories_en")
    if (args.questions is None) != (args.answers is None):
        raise UserError("--questions FILE and --answers DIR belong together")
    try:
        args.temperature = [Sampling(float(t)).temperature for t in args.temperature.split(",")]
    except ValueError:
        raise UserError("--temperature must be numbers from 0 on, between commas") from None
    if args.questions and "temperature" in given and len(args.temperature) > 1:
        raise UserError("--questions is asked at one temperature")
    for flag, package in (("plots", "matplotlib"), ("against", "transformers")):
        if flag in given:
            check_package(package, f"--{flag}")
    if args.against and (args.quantize or 0 not in args.temperature):
        raise UserError("--against transformers is greedy and unquantised: add --temperature 0, "
                        "leave --quantize out")  # fmt: skip
    return args


@command
def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.plots:
        prepare_folder(args.plots, "--plots", *PICTURES)
    if args.shape:
        model, methods = random_weights(SHAPES[args.shape], args.dtype, args.device), {}
    else:
        model, tokenizer = load(args.model, args.dtype, args.device)
        if tokenizer is None:
            raise UserError(f"{args.model} has no tokenizer.json")
        methods = methods_of(args, model, tokenizer)
        kinds = None if args.kind == "all" else [args.kind]
        texts = dict.fromkeys(kinds or ["built-in"], PROMPTS[: args.prompts])
        if args.data:
            texts = held_out_prompts(args.data, kinds, tokenizer, args.prompts)
    drafts = {options["draft"] for options in methods.values() if "draft" in options}
    for each in (model, *drafts):
        quicken(each, int8=args.quantize == "int8", compiled=args.compile)
    if args.questions:
        return answer_questions(args, model, tokenizer, methods)
    machine = Machine.of(model, *drafts)
    if not args.json:
        show_machine(machine)
    if args.shape:
        return bench_shape(args, model, machine)
    rows = []
    for kind, prompts in texts.items():
        for temperature in args.temperature:
            found = table(model, tokenizer, methods, kind, prompts, temperature, machine, args)
            if not args.json:
                show(found, len(prompts))
            rows += found
    if args.json:
        print(json.dumps({"machine": asdict(machine), "rows": [asdict(row) for row in rows]}))
    if args.plots:
        save_plots(args.plots, rows, machine)


if __name__ == "__main__":
    main()
