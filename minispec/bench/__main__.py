"""Compare all methods in one process: the speedup of each over plain decoding, and why.

    python -m minispec.bench                                        built-in story beginnings
    python -m minispec.bench --data DIR --kind stories_en           held-out text
    python -m minispec.bench --generated chat.jsonl sums.jsonl      documents held out from training
    python -m minispec.bench --questions question.jsonl             Spec-Bench, one table per group
    python -m minispec.bench --shape smollm2-135m --acceptance 0.8  random weights, real model shape
    python -m minispec.bench --shape llama-2-7b --plan --nproc 2    no weights: see shapes.py
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
import signal
import sys
from functools import partial
from itertools import product
from pathlib import Path

from minispec import cli, distributed
from minispec.bench import measure, shapes
from minispec.bench.methods import Methods, methods_of, methods_of_flags
from minispec.bench.prompts import Prompts, prompts_of
from minispec.bench.shapes import MODEL_SHAPES, oracle_methods, random_weights
from minispec.bench.tables import markdown, plan_text, show, show_machine
from minispec.checkpoints.load import load, require_tokenizer
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.cli import Parser, Source, UserError, comma_separated, flag_name, number
from minispec.fast.bitwise import NOT_COMPILED
from minispec.generate.__main__ import add_model_flags, choose_model, optimize_all
from minispec.generate.api import unlisted_eos_warning
from minispec.machine import command_line, describe_machine
from minispec.model import Transformer
from minispec.verify import RULES


def parser() -> Parser:
    p = Parser(prog="python -m minispec.bench", description=__doc__)
    add_model_flags(p)
    p.add_argument("--draft", type=Source, help="a draft model (default: the one next to the "
                   "model; with --shape, a shape)")  # fmt: skip
    p.add_argument("--heads", type=Source, help="Medusa heads (default: those next to the model)")
    p.add_argument("--mtp", type=Source, help="a FastMTP head (default: the one next to the model)")
    p.add_argument("--eagle3", type=Source, help="an EAGLE-3 head (default: as for the others)")
    p.add_argument("--methods", type=comma_separated,
                   help="run only these methods or table rows, comma-separated, also with any "
                   "number, as in 'fastmtp tree=16', or your own: file.py:function")  # fmt: skip
    p.add_argument("--temperature", default=[0.0], help="one or several, comma-separated",
                   type=lambda text: [*map(number(0, kind=float), comma_separated(text))])
    p.add_argument("--k", type=number(1), default=4, help="draft tokens per round, for speculative")
    p.add_argument("--verify", choices=RULES,
                   help="the rule of acceptance, for methods that sample drafts")  # fmt: skip
    p.add_argument("--vocabulary-sizes", default=[], metavar="N,N,…",
                   help="run fastmtp also with N tokens per language; none: with all tokens",
                   type=lambda text: [None if part == "none" else number(1)(part)
                                      for part in comma_separated(text)])  # fmt: skip
    p.add_argument("--stats", action="store_true", help="show where the time of a round goes")
    p.add_argument("--busy", action="store_true", help="measure even if other programs run")
    output = p.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument("--markdown", action="store_true", help="print one table of all kinds")
    text = p.add_mutually_exclusive_group()
    text.add_argument("--data", type=Path, help="a file or folder; its held-out text is used")
    text.add_argument("--generated", type=Path, nargs="+", help="files written by distill generate")
    text.add_argument("--questions", type=Path, help="Spec-Bench's question.jsonl")
    p.add_argument("--kind", type=comma_separated,
                   help="with --data: kinds of text, comma-separated (default: all)")  # fmt: skip
    p.add_argument("--prompts", type=number(1), default=20, help="at most this many per kind")
    p.add_argument("--repeats", type=number(1), default=3, help="decode everything this many times")
    p.add_argument("--max-new-tokens", type=number(1), default=100)
    shapes.add_flags(p)
    return p


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the flags and check them before the weights are read."""
    p = parser()
    args = p.parse_args(argv)

    def given(*names: str) -> str:
        """Those of these flags that differ from their defaults."""
        changed = [name for name in names if getattr(args, name) != p.get_default(name)]
        return ", ".join(map(flag_name, changed))

    unused = given("model", "methods", "data", "kind", "generated", "questions", "temperature",
                   "k", "prompts", "vocabulary_sizes", "eagle3")  # fmt: skip
    measuring = given("device", "compile", "bitwise", "busy", "stats", "repeats", "max_new_tokens",
                      "markdown")  # fmt: skip
    planning, for_shape = given(*shapes.PLAN_FLAGS), given("acceptance", *shapes.PLAN_FLAGS)
    args.plan = bool(args.shape and (planning or given("draft", "heads", "mtp")))
    wrong = [
        (args.shape and unused, f"--shape has its own weights and prompt; omit {unused}"),
        (for_shape and not args.shape, f"{for_shape}: requires --shape"),
        (args.plan and measuring, f"a plan measures nothing; omit {measuring}"),
        (args.plan and args.draft not in (None, *MODEL_SHAPES),
         f"--draft {args.draft}: with --shape, choose one of {', '.join(MODEL_SHAPES)}"),
        (args.kind and not args.data, "--kind requires --data"),
        (args.compile and distributed.world.size > 1, distributed.NOT_COMPILED),
        (args.compile and args.bitwise, NOT_COMPILED),
        (args.stats and not hasattr(signal, "setitimer"), "--stats needs a timer of Unix; omit it"),
        (args.markdown and len(args.temperature) > 1,
         "--markdown prints one table; choose one --temperature"),
    ]
    for name, methods in methods_of_flags(args).items():
        used = any(row.startswith(methods) or ":" in row for row in args.methods or methods)
        wrong.append((given(name) and not used, f"{flag_name(name)} applies to "
                      f"{' and '.join(methods)}; add it to --methods or omit the flag"))
    for applies, message in wrong:
        if applies:
            raise UserError(message)
    return args


@cli.command
def main(argv: list[str] | None = None) -> None:
    distributed.join()
    with distributed.together():
        args = parse(argv)
    argv = sys.argv[1:] if argv is None else argv
    command = command_line("minispec.bench", argv, distributed.world.size)
    about = describe_machine() | {"command": command}
    with cli.stdout_reserved() if args.json else contextlib.nullcontext() as out:
        report = {"plan": shapes.make_plan(args)} if args.plan else run(args, about)
        if args.json:
            print(json.dumps({"about": about} | report), file=out)
        elif args.plan:
            print(plan_text(report["plan"]))


def run(args: argparse.Namespace, about: dict) -> dict:
    """Measure and compare. Print tables as they are ready, and return their rows for JSON. If a
    kind fails, the Markdown table of those before it is still printed."""
    distributed.join(share_models=True)
    model, tokenizer, kinds, methods = prepare(args)
    machine, tables = measure.measure_machine(model), []
    as_text = not (args.json or args.markdown)
    if as_text:
        show_machine(machine, model)
    try:
        for (kind, prompts), t in product(kinds.items(), args.temperature):
            arguments = model, tokenizer, methods, prompts, args.max_new_tokens, t
            parts: dict[str, dict] = {}
            once = partial(measure.measure, *arguments, parts=parts if args.stats else None)
            repeats, share = measure.watch(lambda: [once() for _ in range(args.repeats)])
            measure.check_others(share, f"while {kind} (temperature {t:g}) was measured",
                         "its table is omitted", args.busy)  # fmt: skip
            table = measure.table_of(kind, t, repeats, machine)
            tables.append([row | {"others_share": share, "time": parts.get(row["method"])}
                           for row in table])  # fmt: skip
            if as_text:
                print(f"\n{kind}, {len(prompts)} prompts, temperature {t:g}")
                show(tables[-1])
    finally:
        if args.markdown and tables:
            print(markdown(tables, about), flush=True)
    return {"machine": machine, "rows": sum(tables, [])}


def prepare(args: argparse.Namespace) -> tuple[Transformer, Tokenizer | None, Prompts, Methods]:
    """Load and optimise the model and its drafters; choose the prompts."""
    args.model = args.shape or args.model  # a shape takes the place of the default model
    choose_model(args)
    with distributed.together():
        if args.shape:
            model = random_weights(MODEL_SHAPES[args.shape], args.dtype, args.device)
            tokenizer, kinds, methods = None, {args.shape: [list(range(100, 116))]}, {}
        else:
            model, tokenizer = load(args.model, args.dtype, args.device)
            require_tokenizer(tokenizer, model.source)
            kinds = prompts_of(args, model, tokenizer)
            methods = methods_of(args, model, tokenizer)
            if unlisted := unlisted_eos_warning(model, tokenizer):
                cli.note(unlisted)
    # wrong input has been reported by now, and what follows measures products
    share = measure.others_share_now()
    measure.check_others(share, "before the measurement", "nothing was measured", args.busy)
    optimize_all(args, model, *methods.values())
    if args.shape:
        methods = oracle_methods(args, model, *kinds[args.shape])
    return model, tokenizer, kinds, methods


if __name__ == "__main__":
    main()
