"""Optimisers, the training loop, checkpoints and model cards, for `pretrain` and `distill`.

A run restarted with the same --out resumes from its checkpoint exactly as if it had never stopped:
each batch depends only on the seed and the step number.
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
from torch import Tensor, nn
from tqdm import tqdm

from minispec import distributed
from minispec.checkpoints.load import pick_device
from minispec.checkpoints.weights import atomic_write, write_text
from minispec.cli import OutputFolder, UserError, number, user_error

CHECKPOINT = "training.pt"  # in --out, kept after training ends
DEVICE = "device", str, "auto", "cpu, cuda or mps"  # for `add_flags`
Batch = Callable[[int], Tensor]  # number of completed steps -> the next batch


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum (Jordan et al. 2024, kellerjordan.github.io/posts/muon), with updates
    scaled to AdamW's size (Liu et al. 2025, arXiv 2502.16982), so one learning rate suits both.
    In float32: torch.optim.Muon uses bfloat16, which many CPUs emulate. In two minutes on one core
    of such a CPU, a small model reached 1.44 bits per byte; with AdamW alone, 1.59."""

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
    """Approximate UVᵀ of x = USVᵀ: five Newton-Schulz steps with Jordan's quintic polynomial."""
    if x.shape[0] > x.shape[1]:
        return orthogonal(x.T).T
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (2.0315 * a @ a - 4.7750 * a) @ x
    return x


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices, AdamW for embeddings, norms and biases."""
    excluded = "embed_tokens.weight", "lm_head.weight"
    is_matrix = {n: p.dim() == 2 and not n.endswith(excluded) for n, p in model.named_parameters()}
    matrices = [p for n, p in model.named_parameters() if is_matrix[n]]
    others = [p for n, p in model.named_parameters() if not is_matrix[n]]
    return [Muon(matrices), torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)]


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over a tenth of the steps, at most 100, then cosine decay to peak / 50."""
    warmup = min(100, steps // 10 + 1)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


@dataclass
class TrainingRun:
    """The state in a checkpoint. Only a run with an equal `identity` can resume it."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    identity: dict[str, str]
    step: int = 0
    seconds: float = 0.0

    def save(self, path: Path) -> None:
        """Write the checkpoint. If the disk is full, the previous one is kept."""
        state = {"model": self.model.state_dict(), "what": self.identity,
                 "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                 "counts": [self.step, self.seconds]}  # fmt: skip
        with atomic_write(path) as partial, open(partial, "wb") as file:
            try:
                torch.save(state, file)
            except RuntimeError as error:  # its context is the file's OSError
                raise error.__context__ or error

    def restore(self, path: Path) -> None:
        """Load a checkpoint. Nothing in it is unpickled as code."""
        with user_error(f"{path} is damaged, or from another version of minispec: delete it to "
                        "start over, or choose another --out"):  # fmt: skip
            state = torch.load(path, "cpu", weights_only=True)
            saved, (self.step, self.seconds) = state["what"], state["counts"]
            changed = [key for key, value in self.identity.items() if saved[key] != value]
            if not changed:
                self.model.load_state_dict(state["model"])
                for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
                    optimizer.load_state_dict(values)
        if changed:
            raise UserError(f"{path} is from another run (different {changed[0]}): use the same "
                            "settings, or choose another --out")  # fmt: skip


def train(
    model: nn.Module, identity: dict[str, str], loss: Callable[[Tensor], Tensor], batch: Batch,
    args: argparse.Namespace, optimizers: list[torch.optim.Optimizer] | None = None,
) -> TrainingRun:  # fmt: skip
    """Train until --steps, resuming from the checkpoint in --out if there is one. It is saved every
    --save-every steps and at the end. The default optimisers are Muon and AdamW. Several processes
    each compute the loss of their rows; these losses and gradients add up to those of the batch."""
    rank, world = distributed.world.rank, distributed.world.size
    identity |= {name: str(getattr(args, name)) for name in ("rows", "context", "seed")}
    run = TrainingRun(model, optimizers or muon_and_adamw(model), identity)
    if (args.out / CHECKPOINT).exists():
        run.restore(args.out / CHECKPOINT)
    with tqdm(total=args.steps, initial=run.step, unit="step", disable=rank > 0) as bar:
        while run.step < (steps := total_steps(args, run)):
            start = time.perf_counter()
            with torch.autocast(args.device.type, args.dtype, enabled=args.dtype != torch.float32):
                value = loss(batch(run.step)[rank::world])
            optimizer_step(run.optimizers, value, learning_rate(run.step, steps, args.lr))
            run.step += 1
            run.seconds += time.perf_counter() - start
            bar.total = steps
            bar.set_postfix(loss=f"{distributed.all_reduce(value):.3f}", refresh=False)
            bar.update()
            done = run.step >= total_steps(args, run)
            if rank == 0 and (done or run.step % args.save_every == 0):
                run.save(args.out / CHECKPOINT)
    return run


def total_steps(args: argparse.Namespace, run: TrainingRun) -> int:
    """--steps, or with --minutes as many as fit at the pace so far, measured after 10 steps."""
    if not args.minutes or run.step < 10:
        return args.steps
    return max(run.step, int(run.step * 60 * args.minutes / run.seconds))


def optimizer_step(optimizers: list[torch.optim.Optimizer], loss: Tensor, rate: float) -> None:
    """Take one step at this learning rate, with the gradient norm clipped to 1."""
    loss.backward()
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    parameters = [p for group in groups for p in group["params"] if p.grad is not None]
    for p in parameters:
        p.grad = distributed.all_reduce(p.grad)
    if not nn.utils.clip_grad_norm_(parameters, 1.0).isfinite():
        raise UserError(f"the loss is {loss:.3f} and its gradient is not finite: lower --lr")
    for group in groups:
        group["lr"] = rate
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def check_processes(args: argparse.Namespace) -> None:
    """Raise UserError for flags that do not suit the number of processes."""
    if (size := distributed.world.size) > 1 and args.minutes:  # they would stop at different steps
        raise UserError("--minutes works in one process only: use --steps")
    if args.rows % size:
        raise UserError(f"--rows {args.rows} must be a multiple of {size}, the number of processes")


def write_card(args: argparse.Namespace, run: TrainingRun, title: str, *results: str) -> None:
    """Write README.md next to the weights: the command that made them and the `results`, a text and
    a table, which is also printed."""
    limit = "at most " if "generated" in args else ""  # documents may be shorter than --context
    training = (
        f"Training: {run.step:,} steps, {limit}{run.step * args.rows * args.context:,} tokens, "
        f"{run.seconds / 60:.1f} minutes on {torch.get_num_threads()} thread(s), "
        f"{args.device.type}."
    )
    parts = f"# {title}", f"    minispec {args.line}", training, *results
    write_text(args.out / "README.md", "\n\n".join(parts) + "\n")
    print(results[-1])


def markdown_table(corner: str, columns: list[str], rows: dict[object, list[float | str]]) -> str:
    """A Markdown table of rates or texts."""
    lines = [f"| {' | '.join([corner, *columns])} |", "|---" * len(columns) + "|---|"]
    for name, values in rows.items():
        cells = [value if isinstance(value, str) else f"{value:.3f}" for value in values]
        lines.append(f"| {' | '.join([str(name), *cells])} |")
    return "\n".join(lines)


def add_flags(p: argparse.ArgumentParser, *flags: tuple[str, Callable, float, str]) -> None:
    """Add a flag for each (name, type, default, help)."""
    for name, kind, default, text in flags:
        p.add_argument(f"--{name}", type=kind, default=default, help=f"{text} (default: {default})")


def training_arguments(p: argparse.ArgumentParser, steps: int, context: int, lr: float) -> None:
    """Add the flags that all training commands share, with these defaults."""
    p.add_argument("--out", type=OutputFolder, required=True, help="directory to write")
    add_flags(
        p,
        ("steps", number(1), steps, "training steps"),
        ("rows", number(1), 16, "rows per step"),
        ("context", number(8), context, "tokens per row"),
        ("save-every", number(1), 100, "steps between checkpoints"),
        ("seed", number(0), 0, "random seed"),
        ("lr", number(1e-12, 1e3, float), lr, "peak learning rate"),
        DEVICE,
    )
    p.add_argument("--minutes", type=number(1e-3, 1e6, float),
                   help="train for this long instead of for --steps")  # fmt: skip
    p.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32",
                   help="for matrix products (float32 uses TF32 on a GPU; bfloat16 is fast on GPUs "
                        "and on CPUs with AMX)")  # fmt: skip


@contextlib.contextmanager
def training_setup(args: argparse.Namespace, argv: list[str]) -> Iterator[None]:
    """Check the arguments before any long work, and lock --out until training ends. Replaces
    args.dtype and args.device by torch objects, and sets args.line to the command line without the
    folders of absolute paths."""
    with contextlib.ExitStack() as stack:
        with distributed.together():
            args.dtype, args.device = getattr(torch, args.dtype), pick_device(args.device)
            args.line = " ".join(map(without_folder, argv))
            check_processes(args)
            if os.name == "posix" and distributed.world.rank == 0:  # Windows cannot open folders
                folder = os.open(args.out, os.O_RDONLY)
                stack.callback(os.close, folder)
                lock(folder, f"--out {args.out}")
        if args.device.type == "cuda":  # TF32 is five times as fast, and accurate enough
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("high")
        yield


def lock(file: IO | int, name: str) -> None:
    """Lock a file or folder until it is closed. If another process holds the lock, raise UserError.
    On Windows and on a file system without locks, this does nothing."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{name}: another process is writing to it; wait for that, or choose "
                        "another name") from None  # fmt: skip
    except (ImportError, OSError):  # for example NFS without a lock daemon
        pass


def without_folder(argument: str) -> str:
    """The file name of an absolute path; any other argument unchanged."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def digest(value: object) -> str:
    """A short hash of any JSON value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
