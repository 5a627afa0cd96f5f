"""Models of a real shape without a checkpoint: with random weights, to be measured, or with none,
for a plan of a named card.

    python -m minispec.bench --shape smollm2-135m --acceptance 0.8
    python -m minispec.bench --shape llama-2-7b --plan
    python -m minispec.bench --shape llama-3.1-70b --nproc 8 --cached 2000 --draft llama-3.1-8b

A plan has what a pass reads, computes and sends, a lower bound on its time, and what each method
gains if its drafts are accepted as often as measured. The bound is the roofline (Williams et al.
2009): a pass takes as long as reading its bytes from memory or as its arithmetic, whichever is
longer. Real passes take longer, because the time to launch kernels and the latency of messages are
left out. All sizes come from modules on the meta device, which have no data.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, chain, islice, repeat
from operator import mul
from pathlib import Path
from typing import TypeVar

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec import distributed, paths
from minispec.bench.methods import Methods
from minispec.bench.tables import format_bytes
from minispec.cache import KVCache
from minispec.checkpoints.config import CheckedJson, integer
from minispec.checkpoints.heads import read_acceptance, read_tree
from minispec.checkpoints.load import pick_device, pick_dtype
from minispec.cli import UserError, flag_name, number, read_json, user_error
from minispec.fast import optimize
from minispec.fast.cost import ROW_COUNTS
from minispec.generate import decode
from minispec.generate.drafters import check_vocabularies
from minispec.methods.adaptive import best_draft_size, best_first
from minispec.methods.fastmtp import MTPHead
from minispec.methods.medusa import MedusaHeads
from minispec.model import Config, Transformer, count_parameters

M = TypeVar("M", bound=nn.Module)
# hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary; context limited to 2,048
MODEL_SHAPES = {
    "smollm2-135m": Config(576, 1536, 30, 9, 3, 64, 49152, 2048),
    "qwen2.5-0.5b": Config(896, 4864, 24, 14, 2, 64, 151936, 2048, "qwen2", qkv_bias=True),
    "llama-3.2-1b": Config(2048, 8192, 16, 32, 8, 64, 128256, 2048),
    "llama-2-7b": Config(4096, 11008, 32, 32, 32, 128, 32000, 2048, tied=False),
    "llama-3.1-8b": Config(4096, 14336, 32, 32, 8, 128, 128256, 2048, tied=False),
    "llama-3.1-70b": Config(8192, 28672, 80, 64, 8, 128, 128256, 2048, tied=False),
}
DEFAULT_ACCEPTANCE = 0.8  # of a draft model
DEFAULT_CARD = "h100"
PASS_ROWS = 1, 2, 4, 8, 16, 32, 64, 128, 256, 512  # of the passes in a plan's table
RATES = {  # flags that replace a card's figures: their unit, and what it is
    "bandwidth": (1e9, "memory bandwidth in GB/s"), "flops": (1e12, "TFLOP/s"),
    "link": (1e9, "GB/s at which a rank can send to others"),
}  # fmt: skip
PLAN_FLAGS = "plan", "nproc", "card", *RATES, "cached"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add --shape, --acceptance and the flags of a plan to those of bench."""
    parser.add_argument("--shape", choices=MODEL_SHAPES, help="random weights in this shape")
    parser.add_argument("--acceptance", type=number(0, 1, float), help="with --shape: a draft's "
                        f"accuracy (default: {DEFAULT_ACCEPTANCE})")  # fmt: skip
    p = parser.add_argument_group(
        "plan", "With --shape and any of these, --draft (a shape), --mtp or --heads, nothing is "
        "measured. The roofline of a named card shows how long passes take at least and what "
        "methods gain with the acceptance in the heads' config.json.",
    )  # fmt: skip
    p.add_argument("--plan", action="store_true", help="plan even if no other of these is given")
    p.add_argument("--nproc", type=number(1, 1024),
                   help="tensor-parallel ranks (default: those of torchrun, or 1)")  # fmt: skip
    p.add_argument("--card", choices=CARDS, help=f"for the next three (default: {DEFAULT_CARD})")
    for flag, (unit, meaning) in RATES.items():
        values = ", ".join(f"{name} {getattr(card, flag) / unit:g}" for name, card in CARDS.items())
        p.add_argument(f"--{flag}", type=number(1e-3, 1e9, float), help=f"{meaning} ({values})")
    p.add_argument("--cached", type=number(0, 2**40), help="tokens in the cache (default: 0)")


def without_data(make: Callable[[], M], dtype: torch.dtype) -> M:
    """Return the module that `make` makes, on the meta device."""
    with torch.device("meta"):
        return make().to(dtype)


def stored_bytes(*modules: nn.Module) -> int:
    """Count the bytes of all weights as stored. Weights that a module ties count once."""
    return sum(t.nbytes for module in modules for t in (*module.parameters(), *module.buffers()))


# ---- random weights ------------------------------------------------------------------------------


def random_weights(config: Config, dtype: str = "auto", device: str = "auto") -> Transformer:
    """Make a model of this shape: its text is noise, but its passes cost what real ones do. Ranks
    that share it all have the same shard, so that their embeddings and lm_heads are equal."""
    torch_device, previous_dtype = pick_device(device), torch.get_default_dtype()
    torch_dtype, config = pick_dtype(dtype, torch_device), distributed.shard_config(config)
    if torch_device.type == "cpu":  # a GPU reports by itself that its memory is full
        check_memory(config, torch_dtype)
    torch.manual_seed(0)
    torch.set_default_dtype(torch_dtype)
    try:
        with torch_device:
            model = Transformer(config).eval()
    finally:
        torch.set_default_dtype(previous_dtype)
    distributed.all_reduce_outputs(model)
    return model


def check_memory(config: Config, dtype: torch.dtype) -> None:
    """Raise UserError if the weights of all ranks do not fit in this machine's memory."""
    shard = stored_bytes(without_data(partial(Transformer, config), dtype))
    needed, free = config.ranks * shard, psutil.virtual_memory().available
    if needed > free:
        raise UserError(f"the weights need {format_bytes(needed)}, but {format_bytes(free)} are "
                        "free; --plan needs no memory")  # fmt: skip


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
        return KVCache(1, 1, 1, capacity, torch.float32)

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
        return max(memory, compute) + rows * work.sent_bytes / self.link

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


def pass_work(
    model: Transformer | MTPHead, cached: int = 0, read: tuple[nn.Module, ...] = ()
) -> Work:
    """The work of a pass of a model, of a rank's part of it or of a head, after `cached` tokens. It
    reads these modules, by default the layers and lm_head; of the embedding, only a row per token.
    """
    c, kv = model.config, model.new_cache(1).kv  # (2, layers, 1, 1, kv_heads, head_dim)
    layers, weights = kv.shape[1], product_work(*read or (model.model.layers, model.lm_head))
    attention = 4 * layers * c.heads * c.head_dim * cached  # q · k and p · v, with every cached row
    summed = 2 * layers * c.hidden_size * kv.dtype.itemsize  # per row, after o and after down
    # in a ring, a rank sends (N - 1) / N of a buffer twice: to add it up, to pass on the sums
    sent = summed * 2 * (c.ranks - 1) / c.ranks
    return Work(weights.read_bytes + cached * kv.nbytes, weights.row_flops + attention, sent)


def product_work(*modules: nn.Module) -> Work:
    """The work of multiplying by the weights of modules. One that is listed again is read once."""
    return Work(stored_bytes(*set(modules)), 2 * sum(map(count_parameters, modules)))


# ---- a plan --------------------------------------------------------------------------------------


def make_plan(args: argparse.Namespace) -> dict:
    """Plan --shape: the sizes and times of the whole model and of a rank's part of it, and what
    methods gain, as --json prints it. Raises UserError for flags that do not fit."""
    ranks, cached = sorted({1, args.nproc or distributed.world.size}), args.cached or 0
    models = [make_shape(args, args.shape, n) for n in ranks]
    name, rates = args.card or DEFAULT_CARD, {flag: getattr(args, flag) for flag in RATES}
    given = {flag: rate * RATES[flag][0] for flag, rate in rates.items() if rate is not None}
    if models[0].dtype.itemsize != 2 and "flops" not in given:
        raise UserError(f"--dtype {args.dtype}: the FLOP rates of cards are for bfloat16; give the "
                        "card's rate with --flops")  # fmt: skip
    source = f"{', '.join(map(flag_name, given))}; otherwise " * bool(given) + CARDS[name].source
    hardware = replace(CARDS[name], **given, source=source)
    return {
        "shape": args.shape,
        "dtype": str(models[0].dtype).removeprefix("torch."),
        "quantize": args.quantize,
        "cached": cached,
        "card": name,
        **asdict(hardware),
        "rows": list(PASS_ROWS),  # of the passes in `seconds`
        "shares": [share(hardware, model, cached) for model in models],
        "methods": list(method_rows(args, hardware, models[-1], cached)),
    }


def make_shape(
    args: argparse.Namespace, name: str, ranks: int, draft: bool = False
) -> Transformer:
    """A rank's part of this shape, in the dtype of a GPU. A `draft` may be whole on each rank."""
    with user_error(name):
        config = distributed.shard_config(MODEL_SHAPES[name], ranks, draft)
    dtype = pick_dtype(args.dtype, torch.device("cuda"))
    model = without_data(partial(Transformer, config), dtype)
    if args.quantize:
        optimize(model, int8=True)
    return model


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
        "link_seconds": [n * work.sent_bytes / hardware.link for n in PASS_ROWS],
    }


def method_rows(
    args: argparse.Namespace, hardware: Hardware, model: Transformer, cached: int
) -> Iterator[dict]:
    """Yield the rows of the methods' table: each one's best number of drafts, and such a round."""
    work = pass_work(model, cached)
    plain = hardware.seconds(work)
    for method, rates, source, gains, draft, runs in drafters_of(args, model, cached):
        seconds = [plain] + [hardware.seconds(work, rows) + n * hardware.seconds(draft)
                             for rows, n in enumerate(runs, 2)]  # fmt: skip
        if gains is None:  # a chain: the probability that the first n drafts are accepted
            gains = accumulate(chain(rates, repeat(rates[-1])), mul)
        gains = list(islice(gains, len(runs)))
        n = best_draft_size(gains, seconds)
        tokens = 1.0 + sum(gains[:n])
        yield {
            "method": method,
            "acceptance": rates,  # by step
            "acceptance_source": source,
            "drafts": n,
            "tokens_per_pass": tokens,
            "round_cost": seconds[n] / plain,
            "speedup": tokens * plain / seconds[n],
            "tokens_per_second": tokens / seconds[n],
        }


def drafters_of(args: argparse.Namespace, model: Transformer, cached: int) -> Iterator[tuple]:
    """Yield for each method its acceptance by step and who measured it, the mean number of tokens
    that each draft adds to a round (None: those of a chain), the work of its drafter, and how often
    that runs for 1, 2, … drafts. Without --draft, drafts are free, like those of OracleDraft and
    prompt lookup. FastMTP's head drafts from the full vocabulary."""
    yield "autoregressive", [], "", [], Work(0, 0), []
    rates, source, work = [args.acceptance], "--acceptance", Work(0, 0)
    if args.acceptance is None:
        rates, source = [DEFAULT_ACCEPTANCE], "assumed, see --acceptance"
    if args.draft:
        draft = make_shape(args, args.draft, model.config.ranks, draft=True)
        check_vocabularies(None, None, model, draft)
        work = pass_work(draft, cached)
    name = f"speculative ({args.draft or 'free'} draft)"
    yield name, rates, source, None, work, range(1, 17)

    if args.mtp is not None or args.acceptance is None:
        path, source = measured_heads(args.mtp, "--mtp", "mtp_acceptance", "acceptance")
        rates = read_acceptance(path)
    head = without_data(partial(MTPHead, model.config), model.dtype)
    work = pass_work(head, cached, read=(head, model.lm_head))
    yield "fastmtp", rates, source, None, work, range(1, 9)

    path, source = measured_heads(args.heads, "--heads", "medusa_accuracy", "tree")
    heads = medusa_heads(path, model)
    rates, gains = heads.accuracy[:, 0].tolist(), best_first(heads.accuracy.tolist())
    work = product_work(heads, *[model.lm_head] * len(heads) * heads.shared)
    yield "medusa", rates, source, (gain for _, gain in gains), work, [1] * (ROW_COUNTS[-1] - 1)


def measured_heads(source: str | None, flag: str, key: str, command: str) -> tuple[Path, str]:
    """The config.json of a flag's heads (default: SmolLM2's), and whose it is. Raises UserError if
    it does not have the `key` that this command of distill writes."""
    default = paths.SMOLLM2_HEADS / key.partition("_")[0]  # mtp or medusa
    path = Path(default if source is None else source)
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
    if not heads.accuracy.numel() or not ((heads.accuracy >= 0) & (heads.accuracy <= 1)).all():
        raise UserError(f"{path}: medusa_accuracy must hold rates from 0 to 1")
    return heads
