"""Every method side by side in one process: what it gains over plain decoding, and why.

    python -m minispec.bench                                        built-in beginnings of stories
    python -m minispec.bench --data DIR --kind stories_en           held-out text
    python -m minispec.bench --questions question.jsonl             Spec-Bench, a table a category
    python -m minispec.bench --shape smollm2-135m --acceptance 0.8  random weights of a real size

Each prompt is decoded by every method in turn, so that a noisy machine is noisy for all of them. A
speedup is the median over prompts of plain decoding's seconds per token over the method's own.
Greedy output is compared with plain decoding's, token for token.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from minispec.cache import KVCache
from minispec.checkpoint import WEIGHTS, load, pick_device, pick_dtype
from minispec.cost import COUNTS, cost_curve, draft_cost, least_in_turn, one_pass
from minispec.drafters import found_beside, load_drafter
from minispec.errors import Parser, UserError, check_package, check_writable, command, number
from minispec.fast import quicken
from minispec.generate import as_prompt, decode
from minispec.methods.adaptive import curve_at
from minispec.methods.speculative import speedup, tokens_per_pass
from minispec.model import Config, Transformer, count_parameters
from minispec.run import Run
from minispec.sampling import Sampling
from minispec.text import held_out_prompts
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
Prompts = dict[str, list[list[int]]]  # kind of text -> token ids

# ---- the machine ---------------------------------------------------------------------------------

COPIED, SIDE = 2**28, 2048  # bytes of the copy that times memory, side of the product for sums


@dataclass(frozen=True)
class Machine:
    """What decides every speedup here. No pass can be faster than reading its weights once at the
    speed of a copy, or than its multiplications at the speed of a large product."""

    pass_seconds: float  # over one token
    curve: list[float]  # pass(n) / pass(1)
    memory_floor: float  # seconds, of any pass
    compute_floor: float  # seconds, for each row

    @classmethod
    def of(cls, model: Transformer) -> "Machine":
        source = torch.ones(COPIED, dtype=torch.uint8, device=model.device)
        target = torch.ones_like(source)
        a = torch.ones(SIDE, SIDE, dtype=model.dtype, device=model.device)
        own, copy, product = least_in_turn(
            [one_pass(model, 1), lambda: target.copy_(source)[-1].item(),
             lambda: (a @ a)[-1, -1].item()], turns=5,
        )  # fmt: skip
        sums = count_parameters(model.model.layers) + model.lm_head.weight.numel()
        read = weights_read(model) * copy / (2 * COPIED)
        return cls(own, cost_curve(model), read, sums * product / SIDE**3)

    def floor(self, n: int) -> float:
        """Seconds of a pass over n rows, at least."""
        return max(self.memory_floor, n * self.compute_floor)


def weights_read(model: Transformer) -> int:
    """Bytes that a pass must read: every weight of the blocks and of lm_head, as they are kept."""
    parts = *model.model.layers, model.lm_head
    return sum(t.nbytes for part in parts for t in (*part.parameters(), *part.buffers()))


# ---- what is decoded -----------------------------------------------------------------------------


def prompts_of(args: argparse.Namespace, tokenizer: Tokenizer, context: int) -> Prompts:
    """At most --prompts of each kind of text."""
    if args.questions:
        kinds = read_questions(args.questions, tokenizer, context)
    elif args.data:
        names = args.kind.split(",") if args.kind else None
        kinds = held_out_prompts(args.data, names, tokenizer, args.prompts)
    else:
        kinds = {"stories": [tokenizer.encode(text) for text in PROMPTS]}
    return {kind: each[: args.prompts] for kind, each in kinds.items()}


def lies_beside(method: str, model: Transformer) -> bool:
    """Whether its draft or heads lie beside the model."""
    try:
        found_beside(method, model)
    except UserError:
        return False
    return True


def read_questions(path: Path, tokenizer: Tokenizer, context: int) -> Prompts:
    """The first turn of each question of Spec-Bench, by category, as a chat if there is a
    template; those longer than the context are left out."""
    kinds: Prompts = {}
    longer = Counter()
    try:
        for line in filter(str.strip, path.read_text(encoding="utf-8").split("\n")):
            question = json.loads(line)
            turn, kind = str(question["turns"][0]), str(question["category"])
            chat = [{"role": "user", "content": turn}]
            ids = tokenizer.chat(chat) if tokenizer.chat_template else tokenizer.encode(turn)
            if len(ids) < context:
                kinds.setdefault(kind, []).append(ids)
            else:
                longer[kind] += 1
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise UserError(
            f"--questions {path}: must hold objects with category and turns, one a line ({error})"
        ) from None
    for kind, n in longer.items():
        questions = "question" if n == 1 else "questions"
        print(f"{n} {questions} of {kind} longer than the context: left out", file=sys.stderr)
    return kinds


def methods_of(
    args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer
) -> dict[str, dict]:
    """Row of the table -> options of the method that is its first word. Without --methods, those
    that have no draft or heads beside the model are left out."""
    methods: dict[str, dict] = {"autoregressive": {}, "prompt-lookup": {}, "jacobi": {}}
    for w, n, g in (5, 4, 5), (10, 5, 10), (15, 5, 15):
        methods[f"lookahead ({w},{n},{g})"] = {"window": w, "ngram": n, "guesses": g}
    drafted = {  # where its draft or heads are, and how much it drafts
        "speculative": (args.draft, [{"k": args.k}, {"k": "auto"}]),
        "medusa": (args.heads, [{}, {"tree": "auto"}]),
        "fastmtp": (args.mtp, [{"k": 2}, {"k": 3}, {"k": "auto"}]),
    }
    wanted = set(args.methods.split(",")) if args.methods is not None else None
    unknown = (wanted or set()) - {name.split()[0] for name in methods} - drafted.keys()
    if unknown:
        raise UserError(f"--methods {min(unknown)}: not one of the benchmark's")
    for method, (source, variants) in drafted.items():
        if wanted is not None and method not in wanted:
            continue
        if wanted is source is None and not lies_beside(method, model):
            continue
        options = load_drafter(method, model, tokenizer, source)
        for more in variants:
            label = "".join(f" {name}={value}" for name, value in more.items())
            methods[method + label] = options | more
    keep = None if wanted is None else wanted | {"autoregressive"}
    return {name: o for name, o in methods.items() if keep is None or name.split()[0] in keep}


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


class Reciter:
    """A draft that costs nothing: it knows what the target will say, and each of its tokens is that
    with a chosen probability. What a real draft costs is to be taken off its speedup."""

    prefill = Transformer.prefill

    def __init__(self, model: Transformer, text: list[int], acceptance: float):
        self.config, rng = replace(model.config, hidden_size=1), random.Random(0)
        self.dtype, self.device = torch.float32, torch.device("cpu")
        wrong = [(token + 1) % self.config.vocab_size for token in text]
        self.guesses = [t if rng.random() < acceptance else w for t, w in zip(text, wrong)]

    def new_cache(self, capacity: int) -> KVCache:
        return KVCache(1, 1, 1, capacity, 1, torch.float32)

    def __call__(self, tokens, cache: KVCache) -> Tensor:
        """In place of hidden states the position that follows each token, (1, n, 1)."""
        return torch.arange(1, len(tokens) + 1)[None, :, None] + cache.length

    def logits(self, hidden: Tensor) -> Tensor:
        known = [self.guesses[min(int(at), len(self.guesses) - 1)] for at in hidden.flatten()]
        return F.one_hot(torch.tensor(known), self.config.vocab_size).float()


def drafts_of(args: argparse.Namespace, model: Transformer, prompt: list[int]) -> dict[str, dict]:
    """For --shape: chains of 1 to 16 drafts."""
    plain = decode(model, None, prompt, max_new_tokens=args.max_new_tokens, ignore_eos=True)
    draft = Reciter(model, prompt + plain.tokens, args.acceptance)
    chains = {f"speculative k={k}": {"draft": draft, "k": k} for k in (1, 2, 4, 8, 16)}
    return {"autoregressive": {}} | chains


# ---- running -------------------------------------------------------------------------------------


def measure(
    model: Transformer, tokenizer: Tokenizer | None, methods: dict[str, dict], prompts: list,
    n: int, temperature: float = 0.0,
) -> dict[str, list[Run]]:  # fmt: skip
    """Row of the table -> a run per prompt, the methods in turn. The first prompt also warms up."""
    runs: dict[str, list[Run]] = {name: [] for name in methods}
    for i, prompt in enumerate(tqdm([prompts[0], *prompts], unit="prompt")):
        for name, options in methods.items():
            run = decode(model, tokenizer, prompt, name.split()[0], max_new_tokens=n,
                         temperature=temperature, **options)  # fmt: skip
            if i:
                runs[name].append(run)
    return runs


@dataclass
class Theirs:
    """What the table needs of a run of transformers."""

    tokens: list[int]
    decode_seconds: float
    rounds: list = field(default_factory=list)
    extra_parameters: int = 0


def transformers_runs(
    args: argparse.Namespace, model: Transformer, plain: list[Run]
) -> Iterator[tuple[str, list[Theirs]]]:
    """transformers' `generate` on the same prompts, plain and with the draft as its assistant."""
    import transformers

    transformers.logging.set_verbosity_error()

    def read(name: str):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=model.dtype)
        return loaded.to(model.device).eval()

    target, draft = read(args.model), args.draft or Path(args.model).parent / "draft"
    assistants = {"transformers": None}
    if args.draft or draft.exists():
        assistants["transformers, assisted"] = read(str(draft))
    for name, assistant in assistants.items():
        theirs = partial(generated, target, assistant, args.max_new_tokens)
        theirs(plain[0])  # warms up
        yield name, [theirs(run) for run in tqdm(plain, desc=name, unit="prompt")]


@torch.no_grad()
def generated(target, assistant, n: int, run: Run) -> Theirs:
    """Greedy tokens after the run's prompt, and the seconds they would take without the prefill:
    those of all but the first, which comes with it, scaled to all."""
    ids = torch.tensor([run.prompt], device=target.device)

    def timed(count: int) -> tuple[list[int], float]:
        begin = time.perf_counter()
        out = target.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=assistant, do_sample=False,
            max_new_tokens=count, eos_token_id=list(run.eos_ids) or None, pad_token_id=0,
        )  # fmt: skip
        return out[0, ids.shape[1] :].tolist(), time.perf_counter() - begin

    _, prefill = timed(1)
    tokens, seconds = timed(n)
    seconds = max(seconds - prefill, 1e-9) * len(tokens) / max(len(tokens) - 1, 1)
    return Theirs(tokens, seconds)


# ---- figures -------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class Row:
    """What one method did over all prompts of a kind at a temperature."""

    kind: str
    temperature: float
    method: str
    speedup: float  # the median over prompts
    least: float
    most: float
    tokens_per_second: float
    tokens_per_pass: float
    rows_per_pass: float
    pass_cost: float  # of a pass over so many rows, in passes over one, by the curve
    acceptance: float | None  # chance that a draft that was tried is accepted
    expected_tokens_per_pass: float | None  # by Leviathan et al. 2023, for a draft model
    expected_speedup: float | None
    differing: int | None  # prompts whose tokens are not plain decoding's; None under sampling
    extra_parameters: int

    @property
    def round_cost(self) -> float:
        """In passes of plain decoding."""
        return self.tokens_per_pass / self.speedup

    def reason(self) -> str:
        """One sentence: what a round brings against what it costs, and why that is not enough."""
        line = (f"{self.method}: {self.tokens_per_pass:.2f} tokens a pass, for a round that costs "
                f"{self.round_cost:.2f} plain ones")  # fmt: skip
        if self.speedup >= 1:
            return line
        if self.tokens_per_pass < 1.1:
            return f"{line}: hardly any guess is right"
        own = self.round_cost - self.pass_cost
        if self.pass_cost - 1 > own:
            return f"{line}: its pass over {self.rows_per_pass:.0f} rows costs {self.pass_cost:.2f}"
        return f"{line}: drafting and accepting cost {own:.2f} of them"


def summarise(
    kind: str, temperature: float, name: str, runs: list[Run], plain: list[Run], machine: Machine,
    options: dict, model: Transformer,
) -> Row:  # fmt: skip
    """The paper's formula takes a target pass over k + 1 tokens to cost no more than one over 1:
    here it costs what the curve says."""
    speeds, a, rows = ratios(plain, runs), alpha(runs), rows_fed(runs)
    draft, k, expected, gain = options.get("draft"), options.get("k"), None, None
    if draft is not None and isinstance(k, int) and a is not None:
        flat = curve_at(machine.curve, k + 1)
        c = draft_cost(model, draft) if isinstance(draft, Transformer) else 0.0
        expected, gain = tokens_per_pass(a, k), speedup(a, k, c / flat) / flat
    return Row(
        kind, temperature, name, statistics.median(speeds), min(speeds), max(speeds),
        1 / statistics.median(map(seconds_per_token, runs)), per_pass(runs), rows,
        curve_at(machine.curve, round(rows)), a, expected, gain,
        None if temperature else differing(plain, runs), runs[0].extra_parameters,
    )  # fmt: skip


# ---- words and a picture -------------------------------------------------------------------------


def show_machine(machine: Machine, model: Transformer) -> None:
    own = machine.pass_seconds
    print(f"{count_parameters(model) / 1e6:.1f}M parameters, {model.dtype} on {model.device}: a "
          f"pass over one token takes {1e3 * own:.2f} ms")  # fmt: skip
    print("rows n            " + "".join(f"{n:>8}" for n in known_counts(machine)))
    curve = [machine.curve[n] for n in known_counts(machine)]
    print("pass(n) / pass(1) " + "".join(f"{cost:8.2f}" for cost in curve))
    floors = [own * machine.curve[n] / machine.floor(n) for n in known_counts(machine)]
    print("pass(n) / floor   " + "".join(f"{ratio:8.2f}" for ratio in floors))


def known_counts(machine: Machine) -> list[int]:
    return [n for n in COUNTS if n < len(machine.curve)]


def show(rows: list[Row], prompts: int) -> None:
    """One kind's table at one temperature, and the reasons."""
    print(f"\n{rows[0].kind}, {prompts} prompts, temperature {rows[0].temperature:g}")
    titles = "speedup", "(least-most)", "tokens/s", "tokens/pass", "accepted", "formula", "differ"
    print(f"{'method':<22}" + "".join(f"{title:>13}" for title in titles))
    for r in rows:
        formula = f"{figure(r.expected_tokens_per_pass)}, {figure(r.expected_speedup)}"
        cells = (figure(r.speedup), f"({r.least:.2f}-{r.most:.2f})", f"{r.tokens_per_second:.1f}",
                 figure(r.tokens_per_pass or None), figure(r.acceptance), formula,
                 "-" if r.differing is None else str(r.differing))  # fmt: skip
        print(f"{r.method:<22}" + "".join(f"{cell:>13}" for cell in cells))
    for row in rows[1:]:
        if row.tokens_per_pass:
            print("  " + row.reason())
    print(flush=True)


def figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def draw(file: Path, rows: list[Row], machine: Machine) -> None:
    """One PNG: the speedups, with their spread over prompts, and the cost curve over its floors."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    page, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained",
                                         width_ratios=[2, 1])  # fmt: skip
    names = list(dict.fromkeys(row.method for row in rows[1:]))
    groups = list(dict.fromkeys((row.kind, row.temperature) for row in rows))
    width = 0.8 / len(groups)
    for g, (kind, temperature) in enumerate(groups):
        part = [r for r in rows if (r.kind, r.temperature) == (kind, temperature)]
        part = [r for r in part if r.method in names]
        at = [names.index(r.method) + (g - (len(groups) - 1) / 2) * width for r in part]
        spread = [[r.speedup - r.least for r in part], [r.most - r.speedup for r in part]]
        left.bar(at, [r.speedup for r in part], width, yerr=spread, ecolor="0.4",
                 label=f"{kind}, T = {temperature:g}")  # fmt: skip
    left.axhline(1, color="0.3", linewidth=1)
    left.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
    left.set_ylabel("speed over plain decoding")
    left.legend(fontsize=7)
    counts = range(1, len(machine.curve))
    right.plot(counts, machine.curve[1:], label="measured")
    floors = [machine.floor(n) / machine.pass_seconds for n in counts]
    right.plot(counts, floors, "--", color="0.4", label="floor: memory, then sums")
    right.set(xscale="log", xlabel="rows n of a pass", ylabel="pass(n) / pass(1)", ylim=(0, None))
    right.set_xticks(known_counts(machine), known_counts(machine))
    right.legend(fontsize=8)
    page.savefig(file, dpi=110)


# ---- command line --------------------------------------------------------------------------------


def parser() -> Parser:
    p = Parser(prog="python -m minispec.bench", description=__doc__.split("\n\n")[0])
    p.add_argument("--model", default=str(WEIGHTS / "target"), help="default: the shipped target")
    p.add_argument("--draft", help="a draft model (default: the one beside the model)")
    p.add_argument("--heads", help="Medusa heads (default: as --draft)")
    p.add_argument("--mtp", help="FastMTP's head (default: as --draft)")
    p.add_argument("--methods", help="only these, between commas")
    p.add_argument("--data", type=Path, help="a file or folder: its held-out text")
    p.add_argument("--kind", help="with --data: kinds of text, between commas (default: all)")
    p.add_argument("--questions", type=Path, help="Spec-Bench's question.jsonl")
    p.add_argument("--prompts", type=number(1), default=20, help="at most this many of each kind")
    p.add_argument("--max-new-tokens", type=number(1), default=100)
    p.add_argument("--temperature", default="0", help="one or several, between commas")
    p.add_argument("--k", type=number(1), default=4, help="drafts of the draft model")
    p.add_argument("--dtype", default="auto")
    p.add_argument("--device", default="auto")
    p.add_argument("--quantize", choices=["int8"], help="int8 weights, of target and draft")
    p.add_argument("--compile", action="store_true", help="passes as compiled graphs")
    p.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    p.add_argument("--picture", type=Path, metavar="FILE.png", help="speedups and cost curve")
    p.add_argument("--against", choices=["transformers"], help="its generate, plain and assisted")
    p.add_argument("--shape", choices=list(SHAPES), help="random weights of a real model's sizes")
    p.add_argument("--acceptance", type=number(0, 1, float), help="with --shape: of its drafts")
    return p


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The flags, checked before the weights are read."""
    args = parser().parse_args(argv)
    unused = ("model", "draft", "heads", "mtp", "methods", "data", "kind", "questions", "against",
              "temperature", "k", "prompts")  # fmt: skip
    given = [flag for flag in unused if getattr(args, flag) != parser().get_default(flag)]
    if args.shape and given:
        raise UserError(f"--shape has its own weights, prompt and drafts: leave --{given[0]} out")
    if args.acceptance is not None and not args.shape:
        raise UserError("--acceptance is of the drafts of --shape: leave it out")
    if args.kind and args.data is None:
        raise UserError(f"--kind {args.kind}: is of the text of --data")
    if args.data and args.questions:
        raise UserError("--data and --questions are two sources of prompts: give one of them")
    args.acceptance = 0.8 if args.acceptance is None else args.acceptance
    try:
        args.temperature = [Sampling(float(t)).temperature for t in args.temperature.split(",")]
    except ValueError:
        raise UserError("--temperature must be numbers from 0 on, between commas") from None
    if args.picture:
        check_package("matplotlib", "--picture")
        check_writable(args.picture, "--picture")
    if args.against:
        check_package("transformers", "--against")
        if args.quantize or args.temperature != [0]:
            raise UserError("--against transformers is greedy and unquantised: give neither "
                            "--temperature nor --quantize")  # fmt: skip
    return args


def rows_of(
    args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer | None, machine: Machine,
    methods: dict[str, dict], kinds: Prompts,
) -> Iterator[list[Row]]:  # fmt: skip
    """A table's rows for each kind of prompts and each temperature."""
    for kind, prompts in kinds.items():
        for temperature in args.temperature:
            runs = measure(model, tokenizer, methods, prompts, args.max_new_tokens, temperature)
            plain = runs["autoregressive"]
            if args.against:
                runs |= dict(transformers_runs(args, model, plain))
            yield [
                summarise(kind, temperature, name, each, plain, machine, methods.get(name, {}),
                          model) for name, each in runs.items()
            ]  # fmt: skip


@command
def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.shape:
        model, tokenizer = random_weights(SHAPES[args.shape], args.dtype, args.device), None
        kinds = {args.shape: [list(range(100, 116))]}
    else:
        model, tokenizer = load(args.model, args.dtype, args.device)
        if tokenizer is None:
            raise UserError(f"{args.model} has no tokenizer.json")
        kinds = prompts_of(args, tokenizer, model.config.context)
        kinds = {k: [as_prompt(model, tokenizer, ids) for ids in each] for k, each in kinds.items()}
        if not any(kinds.values()):
            raise UserError("there are no prompts: the text holds no document that is held out, or "
                            "none that fits into the context")  # fmt: skip
    methods = {} if args.shape else methods_of(args, model, tokenizer)
    drafts = {options["draft"] for options in methods.values() if "draft" in options}
    for each in (model, *drafts):
        quicken(each, int8=args.quantize == "int8", compiled=args.compile)
    if args.shape:
        methods = drafts_of(args, model, kinds[args.shape][0])
    machine = Machine.of(model)
    if not args.json:
        show_machine(machine, model)
    rows = []
    for each in rows_of(args, model, tokenizer, machine, methods, kinds):
        if not args.json:
            show(each, len(kinds[each[0].kind]))
        rows += each
    if args.json:
        print(json.dumps({"machine": asdict(machine), "rows": [asdict(row) for row in rows]}))
    if args.picture:
        draw(args.picture, rows, machine)


if __name__ == "__main__":
    main()
