"""The training that `pretrain` and `distill` share: optimisers, the loop, its checkpoint, the card.

A run started again with the same --out goes on from its checkpoint exactly as if it had not
stopped: batches follow from the seed and the number of steps.
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from minispec.checkpoints.load import pick_device
from minispec.checkpoints.weights import replacing, write_text
from minispec.errors import UserError, check_writable, number

try:
    import fcntl
except ImportError:  # on Windows, where no file is locked
    fcntl = None

CHECKPOINT = "training.pt"  # in --out, while a training goes on and after it
Batch = Callable[[int], Tensor]  # how many steps were taken -> the next batch


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum (Jordan et al. 2024, kellerjordan.github.io/posts/muon), in steps as
    large as AdamW's (Liu et al. 2025, arXiv 2502.16982): one learning rate does for both. In
    float32, for torch.optim.Muon computes in bfloat16, which many CPUs emulate. In two minutes on
    one core of such a CPU a small model came to 1.44 bits per byte, with AdamW alone to 1.59."""

    def __init__(self, parameters, lr: float = 1e-3, momentum: float = 0.95, decay: float = 0.1):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(p.grad.lerp(mean, group["momentum"]))
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(update, alpha=-0.2 * math.sqrt(max(p.shape)) * group["lr"])


def orthogonal(x: Tensor) -> Tensor:
    """About UVᵀ of x = USVᵀ: five Newton-Schulz steps with Jordan's quintic polynomial."""
    if x.shape[0] > x.shape[1]:
        return orthogonal(x.T).T
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (2.0315 * a @ a - 4.7750 * a) @ x
    return x


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices, AdamW for embeddings, norms and biases."""
    ends = "embed_tokens.weight", "lm_head.weight"
    inner = {n: p.dim() == 2 and not n.endswith(ends) for n, p in model.named_parameters()}
    matrices = [p for n, p in model.named_parameters() if inner[n]]
    others = [p for n, p in model.named_parameters() if not inner[n]]
    return [Muon(matrices), torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)]


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up in the first tenth, of at most 100 steps; then a cosine to a fiftieth."""
    warmup = min(100, steps // 10 + 1)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


@dataclass
class Training:
    """What a checkpoint holds. `what` describes the run: it goes on only as it was begun."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    what: dict[str, str]
    step: int = 0
    seconds: float = 0.0

    def save(self, path: Path) -> None:
        """Write the checkpoint; on a full disk the one before stays."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [each.state_dict() for each in self.optimizers],
            "what": self.what,
            "counts": [self.step, self.seconds],
        }
        with replacing(path) as part:
            torch.save(state, part)

    def restore(self, path: Path) -> None:
        """Become what the checkpoint holds. It is never unpickled as code."""
        try:
            state = torch.load(path, "cpu", weights_only=True)
            what, (self.step, self.seconds) = state["what"], state["counts"]
            other = [key for key, value in self.what.items() if what[key] != value]
            if not other:
                self.model.load_state_dict(state["model"])
                for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                    optimizer.load_state_dict(saved)
        except Exception:  # whatever a damaged file raises
            raise UserError(f"{path} is damaged, or of another version of this program: delete it "
                            "to begin anew, or give another --out") from None  # fmt: skip
        if other:
            raise UserError(f"{path} is of another training (other {other[0]}): give what it was "
                            "begun with, or another --out")  # fmt: skip


def train(
    model: nn.Module, what: dict[str, str], loss: Callable[[Tensor], Tensor], batch: Batch,
    args: argparse.Namespace, optimizers: list[torch.optim.Optimizer] | None = None,
) -> Training:  # fmt: skip
    """Steps until --steps, from the checkpoint in --out if there is one; rank 0 writes it every
    --save-every steps and in the end. By default with Muon and AdamW."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    what |= {name: str(getattr(args, name)) for name in ("rows", "context", "seed")}
    run = Training(model, optimizers or muon_and_adamw(model), what)
    if (args.out / CHECKPOINT).exists():
        run.restore(args.out / CHECKPOINT)
    if world > 1:
        loss = nn.parallel.DistributedDataParallel(loss)
    with (
        tf32(args.device),
        tqdm(total=args.steps, initial=run.step, unit="step", disable=rank > 0) as bar,
    ):
        while run.step < (steps := steps_of(args, run)):
            start = time.perf_counter()
            with torch.autocast(args.device.type, args.dtype, enabled=args.dtype != torch.float32):
                value = loss(batch(run.step)[rank::world])
            descend(run.optimizers, value, learning_rate(run.step, steps, args.lr))
            run.step += 1
            run.seconds += time.perf_counter() - start
            bar.total = steps
            bar.set_postfix(loss=f"{value:.3f}", refresh=False)
            bar.update()
            if rank == 0 and (run.step >= steps_of(args, run) or run.step % args.save_every == 0):
                run.save(args.out / CHECKPOINT)
    return run


def steps_of(args: argparse.Namespace, run: Training) -> int:
    """--steps; with --minutes those that fit, at the pace so far, known from the tenth on."""
    if not args.minutes or run.step < 10:
        return args.steps
    return max(run.step, int(run.step * 60 * args.minutes / run.seconds))


@contextlib.contextmanager
def tf32(device: torch.device) -> Iterator[None]:
    """On a GPU, float32 products in TF32: five times as fast, and exact enough to learn by."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def descend(optimizers: list[torch.optim.Optimizer], loss: Tensor, rate: float) -> None:
    """One step of this learning rate, its gradient clipped to length 1."""
    loss.backward()
    groups = [group for each in optimizers for group in each.param_groups]
    length = nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], 1.0)
    if not length.isfinite():
        raise UserError(f"the loss is {loss:.3f} and its gradient is not finite: lower --lr")
    for group in groups:
        group["lr"] = rate
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@contextlib.contextmanager
def processes(args: argparse.Namespace) -> Iterator[int]:
    """This process's rank among those that torchrun has started; on GPUs each takes its own."""
    if "RANK" not in os.environ:
        yield 0
        return
    if args.minutes:  # processes would stop at different steps
        raise UserError("--minutes is for a training in one process: choose --steps")
    dist.init_process_group("nccl" if args.device.type == "cuda" else "gloo")
    if args.device.type == "cuda":
        args.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    try:
        if args.rows % dist.get_world_size():
            raise UserError(f"--rows {args.rows} must be a multiple of {dist.get_world_size()}, "
                            "the number of processes")  # fmt: skip
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def write_card(
    args: argparse.Namespace, run: Training, title: str, facts: dict[str, object], table: str
) -> None:  # fmt: skip
    """The README.md beside the weights: what they are, how they were made, what they reach."""
    tokens = run.step * args.rows * args.context
    facts["training"] = (
        f"{run.step:,} steps, {tokens:,} tokens with padding, {run.seconds / 60:.1f} minutes on "
        f"{torch.get_num_threads()} thread(s), {args.device.type}"
    )
    items = "".join(f"- {name}: {fact}\n" for name, fact in facts.items())
    text = f"# {title}\n\n    python -m minispec.{args.line}\n\n{items}\n{table}\n"
    write_text(args.out / "README.md", text)
    print(table)


def markdown(corner: str, columns: list[str], rows: dict[object, list[float]]) -> str:
    """A table of rates."""
    lines = [f"| {' | '.join([corner, *columns])} |", "|---" * len(columns) + "|---|"]
    for name, rates in rows.items():
        lines.append(f"| {name} | " + " | ".join(f"{rate:.3f}" for rate in rates) + " |")
    return "\n".join(lines)


def whole_numbers(p: argparse.ArgumentParser, *flags: tuple[str, int, int, str]) -> None:
    """A flag for each name, with its least value, its default and what it counts."""
    for name, least, default, text in flags:
        p.add_argument(f"--{name}", type=number(least), default=default,
                       help=f"{text} (default: {default})")  # fmt: skip


def training_arguments(p: argparse.ArgumentParser, steps: int, context: int, lr: float) -> None:
    """The flags of every training, with these defaults."""
    p.add_argument("--out", type=Path, required=True, help="the directory to write")
    whole_numbers(
        p,
        ("steps", 1, steps, "steps"),
        ("rows", 1, 16, "rows of a step"),
        ("context", 8, context, "tokens of a row"),
        ("save-every", 1, 100, "steps between checkpoints"),
        ("seed", 0, 0, "of all that is random"),
    )
    p.add_argument("--minutes", type=number(1e-3, 1e6, float),
                   help="train for this long, whatever --steps says")  # fmt: skip
    p.add_argument("--lr", type=number(1e-12, 1e3, float), default=lr, help="default: %(default)s")
    p.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32",
                   help="of the products (float32: TF32 on a GPU; bfloat16 is fast there and where "
                        "AMX is)")  # fmt: skip
    p.add_argument("--device", default="auto")


@contextlib.contextmanager
def prepared(args: argparse.Namespace, words: list[str]) -> Iterator[None]:
    """Refuse what cannot be before any long work, and hold --out against any other training until
    this one ends. dtype and device become torch's, and `args.line` is the command line without
    this machine's folders."""
    args.dtype, args.device = getattr(torch, args.dtype), pick_device(args.device)
    args.line = " ".join(map(without_folders, words))
    check_writable(args.out / CHECKPOINT, "--out")
    with contextlib.ExitStack() as stack:
        # the processes of torchrun share --out; Windows neither opens folders nor has these locks
        if fcntl and os.environ.get("RANK", "0") == "0":
            folder = os.open(args.out, os.O_RDONLY)
            stack.callback(os.close, folder)
            lock(folder, f"--out {args.out}")
        yield


def lock(file: IO | int, where: str, wait: bool = False) -> None:
    """Refuse a file or folder that another process has locked, or wait for it. Closing the file
    releases it. A file system without locks goes unlocked."""
    try:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise UserError(f"{where}: another process is writing it; wait until it ends, or choose "
                        "another") from None  # fmt: skip
    except OSError:  # such as NFS without a lock daemon
        pass


def without_folders(word: str) -> str:
    """A path of this machine's as its last part."""
    return Path(word).name if Path(word).is_absolute() else word


def digest(value: object) -> str:
    """A short hash of what JSON can write."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
