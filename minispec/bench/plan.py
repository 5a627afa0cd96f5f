"""Plan a model on a named card without its weights: what a pass reads, computes and sends, how long
it takes at least, and what each method gains if its drafts are accepted as often as measured.

    python -m minispec.bench --shape llama-2-7b --plan
    python -m minispec.bench --shape llama-3.1-70b --nproc 8 --cached 2000 --draft llama-3.1-8b

The roofline (Williams et al. 2009): a pass takes as long as reading its bytes from memory or as its
arithmetic, whichever is longer. Real passes take longer, as launching kernels and the latency of
messages are left out. All sizes come from modules on the meta device, which have no data.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from minispec import distributed, paths
from minispec.checkpoints.config import CheckedJson, integer
from minispec.checkpoints.heads import read_acceptance, read_tree
from minispec.checkpoints.load import pick_dtype
from minispec.cli import UserError, number, read_json
from minispec.fast import optimize
from minispec.fast.cost import ROW_COUNTS
from minispec.generate.drafters import check_vocabularies
from minispec.methods.adaptive import (
    AdaptiveK,
    AdaptiveTree,
    best_draft_size,
    best_first,
    expected_tokens,
    grow_tree,
)
from minispec.methods.fastmtp import MTPHead
from minispec.methods.medusa import MedusaHeads
from minispec.model import Config, Transformer, count_parameters

DEFAULT_ACCEPTANCE = 0.8  # of a draft model
PASS_ROWS = 1, 2, 4, 8, 16, 32, 64, 128, 256, 512  # of the passes in the table
M = TypeVar("M", bound=nn.Module)
Table = list[list[str]]  # a row of headings, then the others

# hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary; context limited to 2,048
MODEL_SHAPES = {
    "smollm2-135m": Config(576, 1536, 30, 9, 3, 64, 49152, 2048),
    "qwen2.5-0.5b": Config(896, 4864, 24, 14, 2, 64, 151936, 2048, "qwen2", qkv_bias=True),
    "llama-3.2-1b": Config(2048, 8192, 16, 32, 8, 64, 128256, 2048),
    "llama-2-7b": Config(4096, 11008, 32, 32, 32, 128, 32000, 2048, tied=False),
    "llama-3.1-8b": Config(4096, 14336, 32, 32, 8, 128, 128256, 2048, tied=False),
    "llama-3.1-70b": Config(8192, 28672, 80, 64, 8, 128, 128256, 2048, tied=False),
}

# ---- the roofline --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What one card does in a pass."""

    read_bytes: int  # from memory, for any number of rows
    row_flops: int  # per row; a multiplication and an addition are two
    sent_bytes: float = 0.0  # per row, to the other ranks


@dataclass(frozen=True)
class Hardware:
    """The speed of a card at its best."""

    bandwidth: float  # bytes/s read from memory
    flops: float  # FLOP/s in large matrix products
    link: float = math.inf  # bytes/s sent to other cards
    source: str = ""  # of these figures

    def seconds(self, work: Work, rows: int = 1) -> float:
        """The least time of a pass over `rows` tokens. Messages add to it, because the next layer
        has to wait for them."""
        memory, compute = work.read_bytes / self.bandwidth, rows * work.row_flops / self.flops
        return max(memory, compute) + self.link_seconds(work, rows)

    def link_seconds(self, work: Work, rows: int = 1) -> float:
        """The share of `seconds` that is spent on messages."""
        return rows * work.sent_bytes / self.link

    def memory_bound_rows(self, work: Work) -> int:
        """The most rows in a pass for which reading takes longer than the arithmetic."""
        return int(work.read_bytes / self.bandwidth * self.flops / work.row_flops)


# FLOP rates are those of bfloat16 without sparsity, with sums in float32. The link is what a card
# can send: half of the data sheets' figure for NVLink, which counts both directions.
CARDS = {
    "h100": Hardware(3.35e12, 989e12, 450e9, "NVIDIA's data sheet of the H100 SXM; NVLink 4"),
    "h200": Hardware(4.8e12, 989e12, 450e9, "NVIDIA's data sheet of the H200 SXM; NVLink 4"),
    "a100": Hardware(2.039e12, 312e12, 300e9, "NVIDIA's data sheet of the A100 80GB SXM; NVLink 3"),
    "rtx-4090": Hardware(1.008e12, 165.2e12, 31.5e9, "NVIDIA's white paper on Ada; PCIe 4.0 x16"),
}


def stored_bytes(*modules: nn.Module) -> int:
    """Count the bytes of all weights as stored. Weights that a module ties count once."""
    return sum(t.nbytes for module in modules for t in (*module.parameters(), *module.buffers()))


def pass_work(model: Transformer, cached: int = 0) -> Work:
    """The work of a pass of a model, or of a rank's part of it, after `cached` tokens. It reads all
    weights of the layers and lm_head; of the embedding, it reads only a row per token."""
    return block_work(model, (model.model.layers, model.lm_head), cached)


def block_work(blocks: Transformer | MTPHead, read: tuple[nn.Module, ...], cached: int) -> Work:
    """The work of a pass that reads these modules and multiplies by their weights. `blocks` is the
    model or head that holds the attention layers among them."""
    c, kv = blocks.config, blocks.new_cache(1).kv  # (2, layers, 1, 1, kv_heads, head_dim)
    layers = kv.shape[1]
    attention = 4 * layers * c.heads * c.head_dim * cached  # q · k and p · v, with every cached row
    summed = 2 * layers * c.hidden_size * kv.dtype.itemsize  # per row, after o and after down
    return Work(
        read_bytes=stored_bytes(*read) + cached * kv.nbytes,
        row_flops=2 * sum(map(count_parameters, read)) + attention,
        # in a ring, a rank sends (N - 1) / N of a buffer twice: to add it up, to pass on the sums
        sent_bytes=summed * 2 * (c.ranks - 1) / c.ranks,
    )


# ---- modules without data ------------------------------------------------------------------------


def without_data(make: Callable[[], M], dtype: torch.dtype) -> M:
    """Return the module that `make` makes, on the meta device."""
    with torch.device("meta"):
        return make().to(dtype)


@dataclass(frozen=True)
class Setting:
    """What a plan assumes about the card and the weights."""

    hardware: Hardware
    dtype: torch.dtype
    int8: bool
    cached: int  # tokens in the cache
    ranks: int

    def model(self, name: str, draft: bool = False) -> Transformer:
        """A rank's part of the model of this shape. A `draft` may be whole on each."""
        try:
            config = distributed.shard_config(MODEL_SHAPES[name], self.ranks, draft)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
        model = without_data(partial(Transformer, config), self.dtype)
        if self.int8:
            optimize(model, int8=True)
        return model

    def work(self, model: Transformer) -> Work:
        """The work of one of the model's passes."""
        return pass_work(model, self.cached)

    def cost(self, work: Work, model: Transformer, rows: int = 1) -> float:
        """The time of a pass over `rows` tokens, in passes of the model over one token."""
        return self.hardware.seconds(work, rows) / self.hardware.seconds(self.work(model))

    def curve(self, model: Transformer) -> list[float]:
        """The model's cost curve, as `cost_curve` measures it."""
        work = self.work(model)
        return [0.0] + [self.cost(work, model, n) for n in range(1, ROW_COUNTS[-1] + 1)]


# ---- what methods gain ---------------------------------------------------------------------------


def expected_round(
    method: str, accuracy: Tensor, costs: list[float], known: list[float], source: str
) -> dict:
    """A method's row of the table: its best number of drafts and what a round with them yields and
    costs. `accuracy` (K, ranks) is as for MedusaHeads; a chain is a tree with one rank. costs[n] is
    the cost of a round with n drafts, in passes over one token."""
    gains = [gain for _, gain in islice(best_first(accuracy.tolist()), len(costs) - 1)]
    n = best_draft_size(gains, costs)
    tokens = expected_tokens(accuracy, grow_tree(accuracy, n))
    return {
        "method": method,
        "acceptance": known,  # by step
        "acceptance_source": source,
        "drafts": n,
        "tokens_per_pass": tokens,
        "round_cost": costs[n],
        "speedup": tokens / costs[n],
    }


def expected_chain(
    method: str, curve: list[float], draft_cost: float, max_k: int, known: list[float], source: str
) -> dict:
    """The row of a method that drafts a chain: `k_policy` would start from the same figures."""
    policy = AdaptiveK(curve, draft_cost, max_k, known)
    accuracy = torch.tensor(policy.rate, dtype=torch.float64)[:, None]  # (max_k, 1)
    return expected_round(method, accuracy, policy.costs, known, source)


def speculative_row(
    args: argparse.Namespace, setting: Setting, model: Transformer, curve: list[float]
) -> dict:
    """The row of a draft model with the shape --draft or, without it, of drafts that cost nothing,
    like those of OracleDraft and prompt lookup."""
    name, cost = "free", 0.0
    if args.draft is not None:
        if args.draft not in MODEL_SHAPES:
            choices = ", ".join(MODEL_SHAPES)
            raise UserError(f"--draft {args.draft}: with --shape, choose one of {choices}")
        name, draft = args.draft, setting.model(args.draft, draft=True)
        check_vocabularies(None, None, model, draft)
        cost = setting.cost(setting.work(draft), model)
    rate, source = args.acceptance, "--acceptance"
    if rate is None:
        rate, source = DEFAULT_ACCEPTANCE, "assumed, see --acceptance"
    return expected_chain(f"speculative ({name} draft)", curve, cost, 16, [rate], source)


def fastmtp_row(
    args: argparse.Namespace, setting: Setting, model: Transformer, curve: list[float]
) -> dict:
    """The row of a FastMTP head with the acceptance of --mtp, of the flag or of SmolLM2's head. It
    drafts from the full vocabulary."""
    head = without_data(partial(MTPHead, model.config), setting.dtype)
    work = block_work(head, (head, model.lm_head), setting.cached)
    rates, source = [args.acceptance], "--acceptance"
    if args.mtp is not None or args.acceptance is None:
        path, source = config_of(args.mtp, "--mtp", "mtp")
        rates = read_acceptance(path)
        if rates is None:
            raise UserError(f"{path} has no mtp_acceptance; measure it with minispec.distill "
                            "acceptance, or use --acceptance instead of --mtp")  # fmt: skip
    return expected_chain("fastmtp", curve, setting.cost(work, model), 8, rates, source)


def medusa_row(
    args: argparse.Namespace, setting: Setting, model: Transformer, curve: list[float]
) -> dict:
    """The row of Medusa heads with the accuracies and layers of --heads or of SmolLM2's heads."""
    path, source = config_of(args.heads, "--heads", "medusa")
    heads = medusa_heads(path, model)
    policy = AdaptiveTree(curve, setting.cost(heads_work(heads, model.lm_head), model))
    costs = [1.0, *policy.costs[1:]]  # a round without drafts does not run the heads
    known = heads.accuracy[:, 0].tolist()
    return expected_round("medusa", heads.accuracy, costs, known, source)


def config_of(source: str | None, flag: str, shipped: str) -> tuple[Path, str]:
    """The config.json of a flag's heads (default: those shipped for SmolLM2), and whose it is."""
    if source is None:
        return paths.SMOLLM2_HEADS / shipped / "config.json", "measured with SmolLM2's"
    path = Path(source).parent if Path(source).is_file() else Path(source)
    if not (path / "config.json").is_file():
        raise UserError(f"{flag} {source}: there is no config.json, which has the acceptance")
    return path / "config.json", f"measured with {source}"


def medusa_heads(path: Path, model: Transformer) -> MedusaHeads:
    """Heads without data for the model, with the accuracies and layers of a config.json."""
    keys = CheckedJson(path, read_json(path))
    measured = keys.raw.get("medusa_accuracy")
    if not isinstance(measured, list) or not measured:
        raise UserError(f"{path} has no medusa_accuracy; measure it with minispec.distill tree")
    layers = keys.get("medusa_num_layers", integer(0, 99), 1)
    vocab_size = None if str(keys.raw.get("version")) == "2" else model.config.vocab_size
    make = partial(MedusaHeads, len(measured), layers, model.config.hidden_size, vocab_size)
    heads = without_data(make, model.dtype)
    read_tree(heads, path)
    rates = heads.accuracy
    if not rates.numel() or not ((rates >= 0) & (rates <= 1)).all():
        raise UserError(f"{path}: medusa_accuracy must hold rates from 0 to 1")
    return heads


def heads_work(heads: MedusaHeads, lm_head: nn.Module) -> Work:
    """The work of Medusa heads in a round. If they share lm_head, each multiplies by it."""
    read, flops = stored_bytes(heads), count_parameters(heads)
    if heads.shared:
        read += stored_bytes(lm_head)
        flops += len(heads) * count_parameters(lm_head)
    return Work(read, 2 * flops)


# ---- the plan ------------------------------------------------------------------------------------

METHOD_ROWS = speculative_row, fastmtp_row, medusa_row
DEFAULT_CARD = "h100"
FLAGS = "plan", "nproc", "card", "bandwidth", "flops", "link", "cached"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the FLAGS of a plan to those of bench."""
    p = parser.add_argument_group(
        "plan", "With --shape and any of these, --draft (a shape), --mtp or --heads, nothing is "
        "measured. The roofline of a named card shows how long passes take at least and what "
        "methods gain with the acceptance in the heads' config.json.",
    )  # fmt: skip
    rate = number(1e-3, 1e9, float)
    p.add_argument("--plan", action="store_true", help="plan even if no other of these is given")
    p.add_argument("--nproc", type=number(1, 1024),
                   help="tensor-parallel ranks (default: those of torchrun, or 1)")  # fmt: skip
    p.add_argument("--card", choices=list(CARDS),
                   help=f"sets the next three (default: {DEFAULT_CARD})")  # fmt: skip
    for flag, unit, meaning in (
        ("bandwidth", 1e9, "memory bandwidth in GB/s"), ("flops", 1e12, "TFLOP/s"),
        ("link", 1e9, "bandwidth in GB/s at which a rank can send to others"),
    ):  # fmt: skip
        values = ", ".join(f"{name} {getattr(card, flag) / unit:g}" for name, card in CARDS.items())
        p.add_argument(f"--{flag}", type=rate, help=f"{meaning} ({values})")
    p.add_argument("--cached", type=number(0, 2**40),
                   help="tokens in the cache, which a pass reads too (default: 0)")  # fmt: skip


def setting_of(args: argparse.Namespace) -> Setting:
    """What the flags say about the card and the weights."""
    dtype = pick_dtype(args.dtype, torch.device("cuda"))  # the plan is for a GPU, wherever it runs
    if dtype.itemsize != 2 and args.flops is None:
        raise UserError(f"--dtype {args.dtype}: the FLOP rates of cards are for bfloat16; give the "
                        "card's rate with --flops")  # fmt: skip
    units = {"bandwidth": 1e9, "flops": 1e12, "link": 1e9}
    given = {name: getattr(args, name) * unit for name, unit in units.items()
             if getattr(args, name) is not None}  # fmt: skip
    hardware = replace(CARDS[args.card or DEFAULT_CARD], **given)
    if given:
        flags = ", ".join(f"--{name}" for name in given)
        hardware = replace(hardware, source=f"{flags}; otherwise {hardware.source}")
    int8 = args.quantize == "int8"
    return Setting(hardware, dtype, int8, args.cached or 0, args.nproc or distributed.world.size)


def share(setting: Setting, model: Transformer) -> dict:
    """What each rank holds and does, as --json prints it."""
    work, hardware = setting.work(model), setting.hardware
    return {
        "ranks": setting.ranks,
        "weight_bytes": stored_bytes(model),
        "cache_bytes_per_token": model.new_cache(1).kv.nbytes,
        "read_bytes": work.read_bytes,  # per pass: weights and cache
        "row_flops": work.row_flops,
        "sent_bytes": work.sent_bytes,  # per row of a pass
        "memory_bound_rows": hardware.memory_bound_rows(work),
        "seconds": [hardware.seconds(work, n) for n in PASS_ROWS],
        "link_seconds": [hardware.link_seconds(work, n) for n in PASS_ROWS],
    }


def make_plan(args: argparse.Namespace) -> dict:
    """Plan --shape: the sizes and times of the whole model and of a rank's part of it, and what
    methods gain, as --json prints it. Raises UserError for flags that do not fit."""
    setting = setting_of(args)
    shares = []
    for ranks in sorted({1, setting.ranks}):
        setting = replace(setting, ranks=ranks)
        model = setting.model(args.shape)
        shares.append(share(setting, model))
    plain = setting.hardware.seconds(setting.work(model))
    curve = setting.curve(model)
    methods = [expected_round("autoregressive", torch.zeros(1, 1), [1.0], [], "")]
    methods += [row(args, setting, model, curve) for row in METHOD_ROWS]
    hardware = asdict(setting.hardware)
    return {
        "shape": args.shape,
        "dtype": str(setting.dtype).removeprefix("torch."),
        "quantize": args.quantize,
        "cached": setting.cached,
        "card": args.card or DEFAULT_CARD,
        **hardware,
        "rows": list(PASS_ROWS),  # of the passes in `seconds`
        "shares": shares,
        "methods": [row | {"tokens_per_second": row["speedup"] / plain} for row in methods],
    }


# ---- printing ------------------------------------------------------------------------------------


def size_table(plan: dict) -> Table:
    shares = plan["shares"]
    whole, *parts = shares
    headings = ["one card", *(f"each of {part['ranks']} ranks" for part in parts)]
    lines = {
        "weights": "weight_bytes", "cache per token": "cache_bytes_per_token",
        "read per pass": "read_bytes", "sent per row of a pass": "sent_bytes",
    }  # fmt: skip
    if not parts:
        del lines["sent per row of a pass"]
    table = [["", *headings]]
    for title, key in lines.items():
        table.append([title, *(format_bytes(share[key]) for share in shares)])
    flops = (f"{share['row_flops'] / 1e9:.2f} GFLOP" for share in shares)
    table.append(["arithmetic per row", *flops])
    bound = (f"{share['memory_bound_rows']:,} rows" for share in shares)
    return [*table, ["memory-bound up to", *bound]]


def pass_table(plan: dict) -> Table:
    table = [["rows n of a pass", *map(str, plan["rows"])]]
    for share in plan["shares"]:
        where = "one card" if share["ranks"] == 1 else f"{share['ranks']} ranks"
        seconds = share["seconds"]
        table.append([f"{where}: ms", *(f"{1e3 * s:.3g}" for s in seconds)])
        if share["ranks"] > 1:
            messages = (f"{1e3 * s:.2g}" for s in share["link_seconds"])
            table.append([f"{where}: ms for messages", *messages])
        relative = (f"{s / seconds[0]:.2f}" for s in seconds)
        table.append([f"{where}: pass(n) / pass(1)", *relative])
    return table


def method_table(plan: dict) -> Table:
    table = [["method", "acceptance", "drafts", "tokens/pass", "cost of a round", "speedup",
              "tokens/s"]]  # fmt: skip
    for row in plan["methods"]:
        acceptance = ", ".join(f"{rate:.2f}" for rate in row["acceptance"]) or "-"
        figures = (row[key] for key in ("tokens_per_pass", "round_cost", "speedup"))
        table.append([row["method"], acceptance, str(row["drafts"]),
                      *(f"{figure:.2f}" for figure in figures),
                      f"{row['tokens_per_second']:.0f}"])  # fmt: skip
    return table


def facts(plan: dict) -> Iterator[str]:
    """Yield sentences about where the figures come from."""
    dtype = f"{plan['quantize']} and {plan['dtype']}" if plan["quantize"] else plan["dtype"]
    yield f"{plan['shape']} in {dtype}, {plan['cached']:,} tokens in the cache, on {plan['card']}:"
    yield (f"{plan['bandwidth'] / 1e9:,.4g} GB/s of memory, {plan['flops'] / 1e12:,.4g} TFLOP/s, "
           f"{plan['link'] / 1e9:,.4g} GB/s between ranks ({plan['source']}).")  # fmt: skip
    yield "Times are lower bounds, without the latency of kernels and messages."
    for row in plan["methods"]:
        if row["acceptance_source"]:
            yield f"Acceptance of {row['method']}: {row['acceptance_source']}."


def plan_text(plan: dict) -> str:
    """The plan as aligned tables."""
    tables = size_table(plan), pass_table(plan), method_table(plan)
    return "\n\n".join(["\n".join(facts(plan)), *map(aligned, tables)]) + "\n"


def plan_markdown(plan: dict, command: str) -> str:
    """The plan as Markdown tables, with the facts and the command below them."""
    tables = size_table(plan), pass_table(plan), method_table(plan)
    return "\n\n".join([*map(markdown_table, tables), " ".join(facts(plan)), f"    {command}"])


def aligned(table: Table) -> str:
    """The table with its first column on the left and the others on the right."""
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = []
    for first, *cells in table:
        padded = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:]))
        lines.append("  ".join([f"{first:<{widths[0]}}", *padded]))
    return "\n".join(lines)


def markdown_table(table: Table) -> str:
    header, *body = (f"| {' | '.join(row)} |" for row in table)
    return "\n".join([header, f"|{'---|' * len(table[0])}", *body])


def format_bytes(n: float) -> str:
    for unit, size in ("GB", 1e9), ("MB", 1e6), ("kB", 1e3):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n:.0f} B"
