"""Plan a model on a named card without its weights: what a pass reads, computes and sends, a lower
bound on its time, and what each method gains if its drafts are accepted as often as measured.

    python -m minispec.bench --shape llama-2-7b --plan
    python -m minispec.bench --shape llama-3.1-70b --nproc 8 --cached 2000 --draft llama-3.1-8b

The bound is the roofline (Williams et al. 2009): a pass takes as long as reading its bytes from
memory or as its arithmetic, whichever is longer. Real passes take longer, because the time to
launch kernels and the latency of messages are left out. All sizes come from modules on the meta
device, which have no data.
"""

import argparse
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import nn

from minispec import distributed, paths
from minispec.bench.shapes import DEFAULT_ACCEPTANCE, MODEL_SHAPES, stored_bytes, without_data
from minispec.checkpoints.config import CheckedJson, integer
from minispec.checkpoints.heads import read_acceptance, read_tree
from minispec.checkpoints.load import pick_dtype
from minispec.cli import UserError, number, read_json, user_error
from minispec.fast import optimize
from minispec.fast.cost import ROW_COUNTS
from minispec.generate.drafters import check_vocabularies
from minispec.methods.adaptive import AdaptiveK, AdaptiveTree, best_draft_size, best_first
from minispec.methods.fastmtp import MTPHead
from minispec.methods.medusa import MedusaHeads
from minispec.model import Transformer, count_parameters

PASS_ROWS = 1, 2, 4, 8, 16, 32, 64, 128, 256, 512  # of the passes in the table
DEFAULT_CARD = "h100"
FLAGS = "plan", "nproc", "card", "bandwidth", "flops", "link", "cached"
UNITS = {"bandwidth": 1e9, "flops": 1e12, "link": 1e9}  # of the flags' values


# ---- the roofline --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """The work of one card in a pass."""

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
        """The least time of a pass over `rows` tokens. The next layer has to wait for messages."""
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


def pass_work(model: Transformer, cached: int = 0) -> Work:
    """The work of a pass of a model, or of a rank's part of it, after `cached` tokens. It reads all
    weights of the layers and lm_head; of the embedding, it reads only a row per token."""
    return block_work(model, (model.model.layers, model.lm_head), cached)


def block_work(blocks: Transformer | MTPHead, read: tuple[nn.Module, ...], cached: int) -> Work:
    """The work of a pass that reads these modules and multiplies by their weights. `blocks` is the
    model or head that holds the attention layers among them."""
    c, kv = blocks.config, blocks.new_cache(1).kv  # (2, layers, 1, 1, kv_heads, head_dim)
    layers, weights = kv.shape[1], product_work(*read)
    attention = 4 * layers * c.heads * c.head_dim * cached  # q · k and p · v, with every cached row
    summed = 2 * layers * c.hidden_size * kv.dtype.itemsize  # per row, after o and after down
    # in a ring, a rank sends (N - 1) / N of a buffer twice: to add it up, to pass on the sums
    sent = summed * 2 * (c.ranks - 1) / c.ranks
    return Work(weights.read_bytes + cached * kv.nbytes, weights.row_flops + attention, sent)


def product_work(*modules: nn.Module) -> Work:
    """The work of multiplying by the weights of modules. One that is listed again is read once."""
    return Work(stored_bytes(*set(modules)), 2 * sum(map(count_parameters, modules)))


# ---- a plan --------------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add --shape, --acceptance and the FLAGS of a plan to those of bench."""
    parser.add_argument("--shape", choices=MODEL_SHAPES, help="random weights in this shape")
    parser.add_argument("--acceptance", type=number(0, 1, float), help="with --shape: a draft's "
                        f"accuracy (default: {DEFAULT_ACCEPTANCE})")  # fmt: skip
    p = parser.add_argument_group(
        "plan", "With --shape and any of these, --draft (a shape), --mtp or --heads, nothing is "
        "measured. The roofline of a named card shows how long passes take at least and what "
        "methods gain with the acceptance in the heads' config.json.",
    )  # fmt: skip
    rate = number(1e-3, 1e9, float)
    p.add_argument("--plan", action="store_true", help="plan even if no other of these is given")
    p.add_argument("--nproc", type=number(1, 1024),
                   help="tensor-parallel ranks (default: those of torchrun, or 1)")  # fmt: skip
    p.add_argument("--card", choices=CARDS, help=f"for the next three (default: {DEFAULT_CARD})")
    meanings = "memory bandwidth in GB/s", "TFLOP/s", "GB/s at which a rank can send to others"
    for (flag, unit), meaning in zip(UNITS.items(), meanings):
        values = ", ".join(f"{name} {getattr(card, flag) / unit:g}" for name, card in CARDS.items())
        p.add_argument(f"--{flag}", type=rate, help=f"{meaning} ({values})")
    p.add_argument("--cached", type=number(0, 2**40), help="tokens in the cache (default: 0)")


def make_plan(args: argparse.Namespace) -> dict:
    """Plan --shape: the sizes and times of the whole model and of a rank's part of it, and what
    methods gain, as --json prints it. Raises UserError for flags that do not fit."""
    ranks, cached = sorted({1, args.nproc or distributed.world.size}), args.cached or 0
    models = [make_shape(args, args.shape, n) for n in ranks]
    hardware = hardware_of(args, models[0].dtype)
    plain = hardware.seconds(pass_work(models[-1], cached))
    return {
        "shape": args.shape,
        "dtype": str(models[0].dtype).removeprefix("torch."),
        "quantize": args.quantize,
        "cached": cached,
        "card": args.card or DEFAULT_CARD,
        **asdict(hardware),
        "rows": list(PASS_ROWS),  # of the passes in `seconds`
        "shares": [share(hardware, model, cached) for model in models],
        "methods": [row | {"tokens_per_second": row["speedup"] / plain}
                    for row in method_rows(args, hardware, models[-1], cached)],
    }  # fmt: skip


def make_shape(
    args: argparse.Namespace, name: str, ranks: int, draft: bool = False
) -> Transformer:
    """A rank's part of the model of this shape, without data. A `draft` may be whole on each. The
    dtype is that of a GPU, wherever the plan is made."""
    with user_error(name):
        config = distributed.shard_config(MODEL_SHAPES[name], ranks, draft)
    dtype = pick_dtype(args.dtype, torch.device("cuda"))
    model = without_data(partial(Transformer, config), dtype)
    if args.quantize:
        optimize(model, int8=True)
    return model


def hardware_of(args: argparse.Namespace, dtype: torch.dtype) -> Hardware:
    """The card, with the rates that flags replace, for weights of this dtype."""
    rates = {name: getattr(args, name) for name in UNITS}
    given = {name: rate * UNITS[name] for name, rate in rates.items() if rate is not None}
    if dtype.itemsize != 2 and "flops" not in given:
        raise UserError(f"--dtype {args.dtype}: the FLOP rates of cards are for bfloat16; give the "
                        "card's rate with --flops")  # fmt: skip
    card = CARDS[args.card or DEFAULT_CARD]
    flags = ", ".join(f"--{name}" for name in given)
    source = f"{flags}; otherwise {card.source}" if given else card.source
    return replace(card, **given, source=source)


def share(hardware: Hardware, model: Transformer, cached: int) -> dict:
    """The sizes, work and times of each rank, as --json prints them."""
    work = pass_work(model, cached)
    return {
        "ranks": model.config.ranks,
        "weight_bytes": stored_bytes(model),
        "cache_bytes_per_token": model.new_cache(1).kv.nbytes,
        **asdict(work),
        "memory_bound_rows": hardware.memory_bound_rows(work),
        "seconds": [hardware.seconds(work, n) for n in PASS_ROWS],
        "link_seconds": [hardware.link_seconds(work, n) for n in PASS_ROWS],
    }


# ---- what methods gain ---------------------------------------------------------------------------


def method_rows(
    args: argparse.Namespace, hardware: Hardware, model: Transformer, cached: int
) -> Iterator[dict]:
    """Yield the rows of the methods' table. Without --draft, the drafts are free, like those of
    OracleDraft and prompt lookup. FastMTP's head drafts from the full vocabulary."""
    work, lm_head = pass_work(model, cached), model.lm_head

    def cost(other: Work, rows: int = 1) -> float:
        """The time of this work, in passes of the model over one token."""
        return hardware.seconds(other, rows) / hardware.seconds(work)

    def chain(method: str, draft: Work, max_k: int, rates: list[float], source: str) -> dict:
        policy = AdaptiveK(curve, cost(draft), max_k, rates)
        return expected_round(method, policy.accept_probs(), policy.costs, rates, source)

    curve = [0.0] + [cost(work, n) for n in range(1, ROW_COUNTS[-1] + 1)]  # as in `cost_curve`
    yield expected_round("autoregressive", [], [1.0], [], "")

    rates, source, draft_work = [args.acceptance], "--acceptance", Work(0, 0)
    if args.acceptance is None:
        rates, source = [DEFAULT_ACCEPTANCE], "assumed, see --acceptance"
    if args.draft:
        draft = make_shape(args, args.draft, model.config.ranks, draft=True)
        check_vocabularies(None, None, model, draft)
        draft_work = pass_work(draft, cached)
    yield chain(f"speculative ({args.draft or 'free'} draft)", draft_work, 16, rates, source)

    if args.mtp is not None or args.acceptance is None:
        path, source = measured_heads(args.mtp, "--mtp", "mtp_acceptance", "acceptance")
        rates = read_acceptance(path)
    head = without_data(partial(MTPHead, model.config), model.dtype)
    yield chain("fastmtp", block_work(head, (head, lm_head), cached), 8, rates, source)

    path, source = measured_heads(args.heads, "--heads", "medusa_accuracy", "tree")
    heads = medusa_heads(path, model)
    projections = [lm_head] * len(heads) if heads.shared else []
    policy = AdaptiveTree(curve, cost(product_work(heads, *projections)))
    costs = [1.0, *policy.costs[1:]]  # a round without drafts does not run the heads
    gains = (gain for _, gain in best_first(heads.accuracy.tolist()))
    yield expected_round("medusa", gains, costs, heads.accuracy[:, 0].tolist(), source)


def expected_round(
    method: str, gains: Iterable[float], costs: list[float], rates: list[float], source: str
) -> dict:
    """A method's row of the table: its best number of drafts and what a round with them yields and
    costs. The first draft adds gains[0] tokens to a round on average, and so on. costs[n] is the
    cost of a round with n drafts, in passes over one token."""
    gains = list(islice(gains, len(costs) - 1))
    n = best_draft_size(gains, costs)
    tokens = 1.0 + sum(gains[:n])
    return {
        "method": method,
        "acceptance": rates,  # by step
        "acceptance_source": source,
        "drafts": n,
        "tokens_per_pass": tokens,
        "round_cost": costs[n],
        "speedup": tokens / costs[n],
    }


def measured_heads(source: str | None, flag: str, key: str, command: str) -> tuple[Path, str]:
    """The config.json of a flag's heads (default: SmolLM2's), and whose it is. Raises UserError if
    it does not have the `key` that this command of distill writes."""
    default = paths.SMOLLM2_HEADS / key.partition("_")[0]  # mtp or medusa
    path = default if source is None else Path(source)
    path = (path.parent if path.is_file() else path) / "config.json"
    if not path.is_file():
        raise UserError(f"{flag} {source}: there is no config.json, which has the acceptance")
    rates = read_json(path).get(key)
    if not isinstance(rates, list) or not rates:
        raise UserError(f"{path} has no {key}; measure it with minispec.distill {command}")
    return path, "measured with " + ("SmolLM2's" if source is None else source)


def medusa_heads(path: Path, model: Transformer) -> MedusaHeads:
    """Heads without data for the model, with the accuracies and layers of a config.json."""
    keys, c = CheckedJson(path), model.config
    layers = keys.get("medusa_num_layers", integer(0, 99), 1)
    vocab_size = None if str(keys.raw.get("version")) == "2" else c.vocab_size
    sizes = len(keys.raw["medusa_accuracy"]), layers, c.hidden_size, vocab_size
    heads = without_data(partial(MedusaHeads, *sizes), model.dtype)
    read_tree(heads, path)
    rates = heads.accuracy
    if not rates.numel() or not ((rates >= 0) & (rates <= 1)).all():
        raise UserError(f"{path}: medusa_accuracy must hold rates from 0 to 1")
    return heads
